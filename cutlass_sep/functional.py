"""The operator as a function of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from . import dispatch, torch_ops
from .problem import check_tensors, pair, resolve_padding

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})


def depthwise_separable_conv2d(
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Tensor | None = None,
    pw_bias: Tensor | None = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    mid_activation: str | None = None,
    activation: str | None = None,
    fp32_precision: str = "ieee",
) -> Tensor:
    """activation(pointwise(mid_activation(depthwise(x)))), one kernel on a GPU.

    Args:
        x: [N,C,H,W] or [C,H,W]; float32, float16, bfloat16 (kernels), float64 (ATen). Any strides: x that is neither
            contiguous nor channels_last is copied once.
        dw_weight, pw_weight: [C,1,kh,kw] and [O,C,1,1]. dw_bias, pw_bias: [C] and [O], or None.
        stride, padding, dilation: as in torch.nn.functional.conv2d, for the depthwise convolution.
        mid_activation, activation: None, "relu", "relu6", "silu", "hardswish", "gelu" (erf) or "gelu_tanh".
        fp32_precision: "ieee" (fp32-grade) or "tf32" (one TF32 pass); torch's own TF32 flags are not consulted.

    Returns:
        [N,O,P,Q] (or [O,P,Q]) in x's dtype, channels_last if x is that and not contiguous, else contiguous. Under
        autocast floating tensors are cast to its dtype first, except float64.

    Raises:
        RuntimeError: shapes, mixed dtypes or devices. TypeError: other dtypes, sparse or quantised tensors, no tensors.
        ValueError: option values, a depth multiplier. With CUTLASS_SEP_FALLBACK=0 also whatever prevents the kernel.
    """
    untouched = (
        x is not None and not torch.compiler.is_compiling() and _untouched(x, dw_weight, pw_weight, dw_bias, pw_bias)
    )
    if untouched and not (torch.is_grad_enabled() and _any_requires_grad(x, dw_weight, pw_weight, dw_bias, pw_bias)):
        # Nothing but the arithmetic is wanted: torch's dispatcher, which costs more than a launch, has nothing to do.
        options = (stride, padding, dilation, mid_activation, activation, fp32_precision)
        if x.dim() == 3:
            return dispatch.run(x.unsqueeze(0), dw_weight, pw_weight, dw_bias, pw_bias, *options).squeeze(0)
        return dispatch.run(x, dw_weight, pw_weight, dw_bias, pw_bias, *options)

    tensors = (x, dw_weight, pw_weight, dw_bias, pw_bias)
    if has_torch_function(tensors):
        return handle_torch_function(
            depthwise_separable_conv2d, tensors, *tensors, stride=stride, padding=padding, dilation=dilation,
            mid_activation=mid_activation, activation=activation, fp32_precision=fp32_precision,
        )  # fmt: skip
    present = (*tensors[:3], *(t for t in tensors[3:] if t is not None))
    if not all(isinstance(t, Tensor) for t in present) or x.dim() not in (3, 4) or dw_weight.dim() != 4:
        check_tensors(*tensors)  # raises
    stride, dilation = pair("stride", stride, minimum=1), pair("dilation", dilation, minimum=1)
    pads = resolve_padding(padding, tuple(dw_weight.shape[2:]), stride, dilation)
    batched = x if x.dim() == 4 else x.unsqueeze(0)
    arguments = (
        batched, dw_weight, pw_weight, dw_bias, pw_bias, stride, pads, dilation,
        mid_activation, activation, fp32_precision,
    )  # fmt: skip
    if untouched:
        y = torch_ops.SeparableConv2d.apply(None, *arguments)
    elif not torch.compiler.is_compiling() and _transforms():
        y = torch_ops.TransformedSeparableConv2d.apply(*arguments)
    else:
        y = torch_ops.forward_op(*arguments)
    return y if x.dim() == 4 else y.squeeze(0)


_any_requires_grad = torch._C._any_requires_grad
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_autocast = torch._C._is_any_autocast_enabled
_jit_tracing = torch._C._get_tracing_state


def _untouched(*tensors: Tensor | None) -> bool:
    """Whether no mode, transform, autocast, tracer or subclass wants to see this call (outside torch.compile)."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN_TYPES or tensor.is_neg() or tensor.is_meta):
            return False
    return not (
        _modes() or _function_modes() or _transforms() or _autocast() or _jit_tracing() is not None
    ) and forward_ad._current_level < 0  # fmt: skip
