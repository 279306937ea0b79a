"""The operators as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from . import dispatch, torch_ops

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
    """activation(pointwise(mid_activation(depthwise(x)))), in one kernel on a GPU, or two where they are faster.

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
    tensors = (x, dw_weight, pw_weight, dw_bias, pw_bias)
    options = (stride, padding, dilation, mid_activation, activation, fp32_precision)
    return call(torch_ops.separable2d, tensors, options)


def separable_conv_block1d(
    x: Tensor,
    expand_weight: Tensor,
    dw_weight: Tensor,
    project_weight: Tensor,
    expand_bias: Tensor | None = None,
    dw_bias: Tensor | None = None,
    project_bias: Tensor | None = None,
    *,
    dilation: int = 1,
    activation: str | None = "gelu",
    residual: bool = True,
    fp32_precision: str = "ieee",
) -> Tensor:
    """project(activation(depthwise(expand(x)))) + x: a pointwise, a depthwise and a pointwise convolution of sequences.

    The depthwise convolution keeps the length as padding='same' does, of even kernels too: it pads the expanded
    channels with zeros, the odd position on the right. Few kernels on a GPU, one where it is the fastest.

    Args:
        x: [N,C,L] or [C,L]; float32, float16, bfloat16 (kernels), float64 (ATen). Any strides: x that is neither
            contiguous nor the transpose of a contiguous [N,L,C] is copied once.
        expand_weight, dw_weight, project_weight: [E,C,1], [E,1,k] and [O,E,1]; O is C, or anything without `residual`.
        expand_bias, dw_bias, project_bias: [E], [E] and [O], or None.
        dilation: of the depthwise convolution.
        activation: behind it: None, "relu", "relu6", "silu", "hardswish", "gelu" (erf) or "gelu_tanh".
        residual: whether x is added.
        fp32_precision: "ieee" (fp32-grade) or "tf32" (one TF32 pass); torch's own TF32 flags are not consulted.

    Returns:
        [N,O,L] (or [O,L]) in x's dtype, in [N,L,O] memory if x is transposed so and not contiguous, else contiguous.
        Under autocast floating tensors are cast to its dtype first, except float64; x is added in its own dtype, which
        is that of the result, and without `residual` the result has autocast's.

    Raises:
        As `depthwise_separable_conv2d`.
    """
    tensors = (x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias)
    options = (dilation, activation, residual, fp32_precision)
    return call(torch_ops.block1d, tensors, options)


def call(op: torch_ops.TorchOp, tensors: tuple, options: tuple) -> Tensor:
    """The public function that `op` stands for, of all its tensors and options in their order."""
    x, operator = tensors[0], op.operator
    untouched = not _compiling() and _untouched(tensors)
    if untouched and not (_grad_enabled() and _any_requires_grad(*tensors)):
        # Nothing but the arithmetic is wanted: torch's dispatcher, which costs more than a launch, has nothing to do.
        if x.dim() == operator.batched - 1:
            return dispatch.run(operator, (x.unsqueeze(0), *tensors[1:]), options).squeeze(0)
        return dispatch.run(operator, tensors, options)

    if has_torch_function(tensors):
        return handle_torch_function(globals()[operator.name], tensors, *tensors, **operator.named(options))
    batched = operator.batched
    weights = [t for t, name in zip(tensors[1:], operator.tensors[1:], strict=True) if name.endswith("weight")]
    present = [t for t in tensors if t is not None]
    if (
        not all(isinstance(t, Tensor) for t in (x, *weights, *present))
        or x.dim() not in (batched - 1, batched)
        or any(t.dim() != batched for t in weights)
    ):
        operator.check(tensors, options)  # raises
    arguments = (x if x.dim() == batched else x.unsqueeze(0), *tensors[1:], *operator.resolve(tensors, options))
    if untouched:
        y = torch_ops.Separable.apply(op, None, *arguments)
    elif not _compiling() and _transforms():
        y = torch_ops.TransformedSeparable.apply(op, *arguments)
    else:
        y = op.forward(*arguments)
    return y if x.dim() == batched else y.squeeze(0)


_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_any_requires_grad = torch_ops.any_requires_grad
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_autocast = torch._C._is_any_autocast_enabled
_jit_tracing = torch._C._get_tracing_state


def _untouched(tensors: tuple) -> bool:
    """Whether no mode, transform, autocast, tracer or subclass wants to see this call (outside torch.compile)."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN_TYPES or tensor.is_neg()):
            return False
    x = tensors[0]
    return not (
        x is None or x.is_meta or _modes() or _function_modes() or _transforms() or _autocast()
        or _jit_tracing() is not None or forward_ad._current_level >= 0
    )  # fmt: skip
