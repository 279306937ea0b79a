"""torch.nn modules with the parameters and keys of the plain modules that they replace."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from . import functional
from .problem import ACTIVATIONS, PRECISIONS, check_option, is_integer, pair
from .reference import activate


class DepthwiseSeparableConv2d(nn.Module):
    """`pointwise(mid_activation(depthwise(x)))` with an activation behind it, as one kernel on a GPU.

    The children `depthwise` and `pointwise` are nn.Conv2d and hold the parameters: depthwise.weight [C,1,kh,kw],
    pointwise.weight [O,C,1,1] and, with `bias`, depthwise.bias [C], pointwise.bias [O]. They are read at each call. If
    one carries hooks, parametrizations or another class, or no longer fits the operator, both are called the plain
    way; then torch's own precision flags hold.

    Arguments are those of nn.Conv2d, `kernel_size` to `dilation` for the depthwise convolution. Raises ValueError for
    values that are not supported. See `functional.depthwise_separable_conv2d` for the rest.
    """

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
        for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
            if not is_integer(value) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
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

    def forward(self, x: Tensor) -> Tensor:
        """y [N,O,P,Q] of x [N,C,H,W], or [O,P,Q] of [C,H,W]."""
        if self.plain_reason() is not None:
            y = self.pointwise(activate(self.depthwise(x), self.mid_activation))
            return activate(y, self.activation)
        arguments, options = self.call(x)
        return functional.depthwise_separable_conv2d(*arguments, **options)

    def call(self, x: Tensor) -> tuple[tuple, dict]:
        """Arguments of the function that forward(x) stands for while `plain_reason()` is None."""
        depthwise, pointwise = self._modules["depthwise"], self._modules["pointwise"]
        arguments = (
            x, _tensor(depthwise, "weight"), _tensor(pointwise, "weight"), _tensor(depthwise, "bias"),
            _tensor(pointwise, "bias"),
        )  # fmt: skip
        options = {
            "stride": depthwise.stride,
            "padding": depthwise.padding,
            "dilation": depthwise.dilation,
            "mid_activation": self.mid_activation,
            "activation": self.activation,
            "fp32_precision": self.fp32_precision,
        }
        return arguments, options

    def plain_reason(self) -> str | None:
        """Why forward() calls the children one by one, or None if it does not."""
        depthwise, pointwise = self._modules["depthwise"], self._modules["pointwise"]
        if not (_is_bare(depthwise) and _is_bare(pointwise)):
            return "a child carries hooks, parametrizations or another class than nn.Conv2d"
        if (
            depthwise.groups != depthwise.in_channels
            or depthwise.in_channels != depthwise.out_channels
            or depthwise.padding_mode != "zeros"
            or pointwise.kernel_size != (1, 1)
            or pointwise.stride != (1, 1)
            or pointwise.padding not in ((0, 0), "valid", "same")
            or pointwise.groups != 1
        ):
            return "the children are no depthwise and no pointwise convolution"
        return None

    def extra_repr(self) -> str:
        names = ("mid_activation", "activation", "fp32_precision")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _tensor(child: nn.Module, name: str) -> Tensor | None:
    """child.<name>, without the cost of nn.Module.__getattr__ where it is a parameter as usual."""
    parameters = child._parameters
    return parameters[name] if name in parameters else getattr(child, name)


def _is_bare(child: nn.Module) -> bool:
    """Whether calling the child would run nn.Conv2d.forward and nothing else."""
    return type(child) is nn.Conv2d and not (
        child._forward_pre_hooks
        or child._forward_hooks
        or child._backward_pre_hooks
        or child._backward_hooks
        or "forward" in child.__dict__
        or nn_module._global_forward_pre_hooks
        or nn_module._global_forward_hooks
        or nn_module._global_backward_pre_hooks
        or nn_module._global_backward_hooks
    )
