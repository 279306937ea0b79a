"""The operators: what one differs in from another on the way from a call to a kernel or to ATen.

A call is a tuple of tensors, x first, and a tuple of options, both in the order of the public function's arguments.
dispatch.py, torch_ops.py, functional.py, op.py and explain.py are written once, over these descriptions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .problem import (
    ACTIVATIONS,
    PRECISIONS,
    Pads,
    Problem,
    SeparableBlock1dProblem,
    SeparableConv2dProblem,
    check_block_tensors,
    check_extent,
    check_flag,
    check_option,
    check_tensors,
    output_extent,
    pair,
    resolve_padding,
    single,
)


class Operator(ABC):
    """One operator; each has a single instance."""

    #: Name of the public function and of the operator in torch.ops.cutlass_sep.
    name: str
    problem: type[Problem]
    #: Dimensions of x with its batch.
    batched: int
    #: Names of the tensors; a "bias" may be None.
    tensors: tuple[str, ...]
    #: Names of the options; the last one is fp32_precision.
    options: tuple[str, ...]
    #: The options in torch.library's schema language.
    schema: str
    #: Path "torch": y of (*tensors, *resolved options), and the gradients of (grad, *tensors, *options, needed).
    forward: Callable[..., Tensor]
    backward: Callable[..., list[Tensor | None]]

    def named(self, options: tuple) -> dict[str, Any]:
        """Options as keyword arguments."""
        return dict(zip(self.options, options, strict=True))

    def describe(self, tensors: tuple, options: tuple) -> Problem:
        """The problem of a call, which is checked. Raises as `from_tensors` of the problem does."""
        return self.problem.from_tensors(*tensors, **self.named(options))

    def options_of(self, problem: Problem) -> tuple:
        """The resolved options of a problem."""
        own = (getattr(problem, name) for name in self.options[:-1])
        return (*own, problem.fp32_precision or "ieee")

    def cast(self, tensors: tuple, options: tuple, lower: Callable[[Tensor], Tensor]) -> tuple[tuple, tuple, Any]:
        """A call under autocast: its tensors through `lower`, its options, and the tensor to add to its result."""
        return tuple(t if t is None else lower(t) for t in tensors), options, None

    @abstractmethod
    def check(self, tensors: tuple, options: tuple) -> None:
        """Raise what `describe` raises for these tensors."""

    @abstractmethod
    def resolve(self, tensors: tuple, options: tuple) -> tuple:
        """Public options as torch's operator takes them, checked as far as that would not do it."""

    @abstractmethod
    def restored(self, options: tuple) -> tuple:
        """Resolved options of the types they had before torch's dispatcher made lists of tuples."""

    @abstractmethod
    def y_shape(self, tensors: tuple, options: tuple) -> tuple:
        """Shape of y of batched x, for resolved options. Sizes may be symbolic; checks the call as `describe` does."""


class _Separable2d(Operator):
    name = "depthwise_separable_conv2d"
    problem = SeparableConv2dProblem
    batched = 4
    tensors = ("x", "dw_weight", "pw_weight", "dw_bias", "pw_bias")
    options = ("stride", "padding", "dilation", "mid_activation", "activation", "fp32_precision")
    schema = "int[2] stride, int[4] padding, int[2] dilation, str? mid_activation, str? activation, str fp32_precision"
    forward = staticmethod(reference.depthwise_separable_conv2d)
    backward = staticmethod(reference.depthwise_separable_conv2d_backward)

    def check(self, tensors: tuple, options: tuple) -> None:
        check_tensors(*tensors)

    def resolve(self, tensors: tuple, options: tuple) -> tuple:
        stride, padding, dilation, *rest = options
        _check_names(self.options, options)
        stride, dilation = pair("stride", stride, minimum=1), pair("dilation", dilation, minimum=1)
        return stride, resolve_padding(padding, tuple(tensors[1].shape[2:]), stride, dilation), dilation, *rest

    def restored(self, options: tuple) -> tuple:
        stride, padding, dilation, *rest = options
        return tuple(stride), Pads(*padding), tuple(dilation), *rest

    def y_shape(self, tensors: tuple, options: tuple) -> tuple:
        self.check(tensors, options)
        stride, padding, dilation, *_ = options
        _check_names(self.options, options)
        x, dw_weight, pw_weight, *_ = tensors
        n, _, h, w = x.shape
        kernel = dw_weight.shape[2:]
        check_extent(h, w, kernel, dilation, padding)
        p = output_extent(h, padding[:2], kernel[0], stride[0], dilation[0])
        q = output_extent(w, padding[2:], kernel[1], stride[1], dilation[1])
        return n, pw_weight.shape[0], p, q


class _Block1d(Operator):
    name = "separable_conv_block1d"
    problem = SeparableBlock1dProblem
    batched = 3
    tensors = ("x", "expand_weight", "dw_weight", "project_weight", "expand_bias", "dw_bias", "project_bias")
    options = ("dilation", "activation", "residual", "fp32_precision")
    schema = "int dilation, str? activation, bool residual, str fp32_precision"
    forward = staticmethod(reference.separable_conv_block1d)
    backward = staticmethod(reference.separable_conv_block1d_backward)

    def cast(self, tensors: tuple, options: tuple, lower: Callable[[Tensor], Tensor]) -> tuple[tuple, tuple, Any]:
        """x is added in its own dtype, so not by the kernel where that is another one."""
        x, project_weight = tensors[0], tensors[3]
        tensors, options, _ = super().cast(tensors, options, lower)
        dilation, activation, residual, fp32_precision = options
        # With rows that x cannot be added to, the call raises as it is.
        if not residual or x.dtype == tensors[0].dtype or x.shape[-2] != project_weight.shape[0]:
            return tensors, options, None
        return tensors, (dilation, activation, False, fp32_precision), x

    def check(self, tensors: tuple, options: tuple) -> None:
        check_block_tensors(*tensors, residual=options[2])

    def resolve(self, tensors: tuple, options: tuple) -> tuple:
        dilation, activation, residual, fp32_precision = options
        _check_names(self.options, options)
        check_flag("residual", residual)  # the dispatcher would take 0 and 1 too
        return single("dilation", dilation, minimum=1), activation, residual, fp32_precision

    def restored(self, options: tuple) -> tuple:
        return options

    def y_shape(self, tensors: tuple, options: tuple) -> tuple:
        self.check(tensors, options)
        _check_names(self.options, options)
        x, project_weight = tensors[0], tensors[3]
        return x.shape[0], project_weight.shape[0], x.shape[2]


def _check_names(names: tuple[str, ...], options: tuple) -> None:
    """ValueError for an activation or a precision that there is not; torch's dispatcher would raise its own error."""
    for name, value in zip(names, options, strict=True):
        if name in _CHOICES:
            check_option(name, value, _CHOICES[name])


_CHOICES = {"mid_activation": ACTIVATIONS, "activation": ACTIVATIONS, "fp32_precision": PRECISIONS}
SEPARABLE2D = _Separable2d()
BLOCK1D = _Block1d()
OPERATORS = (SEPARABLE2D, BLOCK1D)
_BY_PROBLEM = {operator.problem: operator for operator in OPERATORS}


def of(problem: Problem) -> Operator:
    """The operator that a problem is one of."""
    return _BY_PROBLEM[type(problem)]


#: What autocast casts; float64 stays.
_LOWERED = (torch.float32, torch.float16, torch.bfloat16)


def lowered(tensor: Tensor, device_type: str, dtype: torch.dtype) -> Tensor:
    """`tensor` as autocast of `device_type` to `dtype` hands it to a convolution; what none here takes stays."""
    eligible = tensor.dtype in _LOWERED and tensor.layout == torch.strided and tensor.device.type == device_type
    return tensor.to(dtype) if eligible else tensor
