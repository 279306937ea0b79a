"""torch.nn modules with the parameters and keys of the plain modules that they replace."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from . import functional, torch_ops
from .problem import ACTIVATIONS, PRECISIONS, check_flag, check_option, is_integer, pair, same_pads, single
from .reference import activate
from .torch_ops import TorchOp


class SeparableModule(nn.Module, ABC):
    """What the modules have in common: children that are plain convolutions, read or called at each call."""

    #: The operator that stands for the children while they fit it.
    op: TorchOp
    #: Class of the children.
    convolution: type[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        if self.plain_reason() is not None:
            return self.plain(x)
        return functional.call(self.op, *self.call(x))

    @abstractmethod
    def plain(self, x: Tensor) -> Tensor:
        """y of x by calling the children."""

    @abstractmethod
    def call(self, x: Tensor) -> tuple[tuple, tuple]:
        """Tensors and options of the operator's call that forward(x) stands for while `plain_reason()` is None."""

    def plain_reason(self) -> str | None:
        """Why forward() calls the children one by one, or None if it does not."""
        children, convolution = self._in_order(), self.convolution
        bare = not _any_global_hook()
        for child in children:
            bare = bare and _is_bare(child, convolution)
        if not bare:
            return f"a child carries hooks, parametrizations or another class than nn.{convolution.__name__}"
        return self._misfit(*children)

    @abstractmethod
    def _in_order(self) -> tuple[nn.Module, ...]:
        """The children in the order in which they act."""

    @abstractmethod
    def _misfit(self, *children: nn.Module) -> str | None:
        """Why bare children, in their order, do not fit the operator; None if they do."""

    def extra_repr(self) -> str:
        # The other options are in the children's own.
        names = (name for name in self.op.operator.options if name in self.__dict__)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class DepthwiseSeparableConv2d(SeparableModule):
    """`pointwise(mid_activation(depthwise(x)))` with an activation behind it, as at most two kernels on a GPU.

    The children `depthwise` and `pointwise` are nn.Conv2d and hold the parameters: depthwise.weight [C,1,kh,kw],
    pointwise.weight [O,C,1,1] and, with `bias`, depthwise.bias [C], pointwise.bias [O]. They are read at each call. If
    one carries hooks, parametrizations or another class, or no longer fits the operator, both are called the plain
    way; then torch's own precision flags hold. forward() gives y [N,O,P,Q] of x [N,C,H,W], or [O,P,Q] of [C,H,W].

    Arguments are those of nn.Conv2d, `kernel_size` to `dilation` for the depthwise convolution. Raises ValueError for
    values that are not supported. See `functional.depthwise_separable_conv2d` for the rest.
    """

    op = torch_ops.separable2d
    convolution = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = False,
        *,
        mid_activation: str | None = None,
        activation: str | None = None,
        fp32_precision: str = "ieee",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_option("mid_activation", mid_activation, ACTIVATIONS)
        check_option("activation", activation, ACTIVATIONS)
        check_option("fp32_precision", fp32_precision, PRECISIONS)
        _check_channels(in_channels=in_channels, out_channels=out_channels)
        try:
            kernel_size = pair("kernel_size", kernel_size, minimum=1)
            stride, dilation = pair("stride", stride, minimum=1), pair("dilation", dilation, minimum=1)
            if not isinstance(padding, str):
                padding = pair("padding", padding, minimum=0)
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        self.mid_activation, self.activation, self.fp32_precision = mid_activation, activation, fp32_precision
        self.depthwise = nn.Conv2d(
            in_channels, in_channels, kernel_size, stride, padding, dilation,
            groups=in_channels, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip
        self.pointwise = nn.Conv2d(in_channels, out_channels, 1, bias=bias, device=device, dtype=dtype)

    def plain(self, x: Tensor) -> Tensor:
        y = self.pointwise(activate(self.depthwise(x), self.mid_activation))
        return activate(y, self.activation)

    def call(self, x: Tensor) -> tuple[tuple, tuple]:
        depthwise, pointwise = self._in_order()
        tensors = (
            x, _tensor(depthwise, "weight"), _tensor(pointwise, "weight"), _tensor(depthwise, "bias"),
            _tensor(pointwise, "bias"),
        )  # fmt: skip
        options = (
            depthwise.stride, depthwise.padding, depthwise.dilation, self.mid_activation, self.activation,
            self.fp32_precision,
        )  # fmt: skip
        return tensors, options

    def _in_order(self) -> tuple[nn.Module, nn.Module]:
        children = self._modules  # without the cost of nn.Module.__getattr__
        return children["depthwise"], children["pointwise"]

    def _misfit(self, depthwise: nn.Conv2d, pointwise: nn.Conv2d) -> str | None:
        if _is_depthwise(depthwise) and _is_pointwise(pointwise):
            return None
        return "the children are no depthwise and no pointwise convolution"


class SeparableConvBlock1d(SeparableModule):
    """`project_back(activation(depthwise(pointwise(x)))) + x` of sequences, as at most two kernels on a GPU.

    The children are nn.Conv1d with biases and hold the parameters: pointwise.weight [E,C,1], depthwise.weight [E,1,k]
    (padding="same": the length is kept, of even kernels too) and project_back.weight [C,E,1]. They are read at each
    call. If one carries hooks, parametrizations or another class, or no longer fits the operator, all are called the
    plain way; then torch's own precision flags hold. forward() gives y [N,C,L] of x [N,C,L], or [C,L] of [C,L].

    Raises ValueError for values that are not supported. See `functional.separable_conv_block1d` for the rest.
    """

    op = torch_ops.block1d
    convolution = nn.Conv1d

    def __init__(
        self,
        channels: int,
        expanded_channels: int,
        kernel_size: int,
        *,
        dilation: int = 1,
        activation: str | None = "gelu",
        residual: bool = True,
        fp32_precision: str = "ieee",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_option("activation", activation, ACTIVATIONS)
        check_flag("residual", residual)
        check_option("fp32_precision", fp32_precision, PRECISIONS)
        _check_channels(channels=channels, expanded_channels=expanded_channels)
        try:
            kernel_size = single("kernel_size", kernel_size, minimum=1)
            dilation = single("dilation", dilation, minimum=1)
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        self.activation, self.residual, self.fp32_precision = activation, residual, fp32_precision
        self.pointwise = nn.Conv1d(channels, expanded_channels, 1, device=device, dtype=dtype)
        self.depthwise = nn.Conv1d(
            expanded_channels, expanded_channels, kernel_size, padding="same", dilation=dilation,
            groups=expanded_channels, device=device, dtype=dtype,
        )  # fmt: skip
        self.project_back = nn.Conv1d(expanded_channels, channels, 1, device=device, dtype=dtype)

    def plain(self, x: Tensor) -> Tensor:
        y = self.project_back(activate(self.depthwise(self.pointwise(x)), self.activation))
        return x + y if self.residual else y

    def call(self, x: Tensor) -> tuple[tuple, tuple]:
        pointwise, depthwise, project_back = self._in_order()
        tensors = (
            x, _tensor(pointwise, "weight"), _tensor(depthwise, "weight"), _tensor(project_back, "weight"),
            _tensor(pointwise, "bias"), _tensor(depthwise, "bias"), _tensor(project_back, "bias"),
        )  # fmt: skip
        return tensors, (depthwise.dilation, self.activation, self.residual, self.fp32_precision)

    def _in_order(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        children = self._modules  # without the cost of nn.Module.__getattr__
        return children["pointwise"], children["depthwise"], children["project_back"]

    def _misfit(self, pointwise: nn.Conv1d, depthwise: nn.Conv1d, project_back: nn.Conv1d) -> str | None:
        if not (_is_pointwise(pointwise) and _is_depthwise(depthwise) and _is_pointwise(project_back)):
            return "the children are no pointwise, depthwise and pointwise convolution"
        left, right = same_pads(depthwise.kernel_size[0], depthwise.dilation[0])
        if depthwise.stride != (1,) or not (
            depthwise.padding == "same"
            or (left == right and depthwise.padding == (left,))
            or (right == 0 and depthwise.padding == "valid")
        ):
            return "the child depthwise does not keep the length"
        return None


#: Of nn.Conv1d and nn.Conv2d.
_ONES = ((1,), (1, 1))
_NO_PADDING = ((0,), (0, 0), "valid", "same")


def _check_channels(**named: int) -> None:
    for name, value in named.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _is_depthwise(child: nn.Module) -> bool:
    """Whether a convolution is depthwise, of multiplier 1 and padded with zeros."""
    return child.groups == child.in_channels == child.out_channels and child.padding_mode == "zeros"


def _is_pointwise(child: nn.Module) -> bool:
    """Whether a convolution takes one pixel to one pixel, all channels of it."""
    return child.kernel_size in _ONES and child.stride in _ONES and child.padding in _NO_PADDING and child.groups == 1


def _tensor(child: nn.Module, name: str) -> Tensor | None:
    """child.<name>, without the cost of nn.Module.__getattr__ where it is a parameter as usual."""
    parameters = child._parameters
    return parameters[name] if name in parameters else getattr(child, name)


def _is_bare(child: nn.Module, convolution: type[nn.Module]) -> bool:
    """Whether calling the child would run the forward() of `convolution` and, but for global hooks, nothing else."""
    if type(child) is not convolution:
        return False
    own = child.__dict__
    return not (
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
        or "forward" in own
    )


def _any_global_hook() -> bool:
    """Whether calling any module would run more than its forward() and hooks of its own."""
    return bool(
        nn_module._global_forward_pre_hooks
        or nn_module._global_forward_hooks
        or nn_module._global_backward_pre_hooks
        or nn_module._global_backward_hooks
    )
