"""torch.library: the operator cutlass_sep::depthwise_separable_conv2d, its fake kernel, gradient and autocast rule.

Options arrive resolved: padding as (top, bottom, left, right), stride and dilation as pairs. x is [N,C,H,W].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch, reference
from .problem import (
    ACTIVATIONS,
    PRECISIONS,
    Pads,
    check_extent,
    check_option,
    check_tensors,
    layout_of,
    output_extent,
)

_PARAMETERS = (
    "Tensor x, Tensor dw_weight, Tensor pw_weight, Tensor? dw_bias, Tensor? pw_bias, int[2] stride, int[4] padding, "
    "int[2] dilation, str? mid_activation, str? activation, str fp32_precision"
)
# y's layout follows x's, so a compiler must not hand over x with other strides than it traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

library = torch.library.Library("cutlass_sep", "DEF")
library.define(f"depthwise_separable_conv2d({_PARAMETERS}) -> Tensor", tags=_TAGS)
# Returns the gradients that `needed` marks, of (x, dw_weight, pw_weight, dw_bias, pw_bias), in that order.
library.define(
    f"depthwise_separable_conv2d_backward(Tensor grad, {_PARAMETERS}, bool[5] needed) -> Tensor[]", tags=_TAGS
)
forward_op = torch.ops.cutlass_sep.depthwise_separable_conv2d.default
backward_op = torch.ops.cutlass_sep.depthwise_separable_conv2d_backward.default


def _forward(
    x, dw_weight, pw_weight, dw_bias, pw_bias, stride, padding, dilation, mid_activation, activation, fp32_precision
) -> Tensor:
    if x.dim() != 4:
        raise RuntimeError(f"x must be [N,C,H,W], got shape {list(x.shape)}")
    return dispatch.run(
        x, dw_weight, pw_weight, dw_bias, pw_bias, tuple(stride), Pads(*padding), tuple(dilation),
        mid_activation, activation, fp32_precision,
    )  # fmt: skip


def _forward_fake(
    x, dw_weight, pw_weight, dw_bias, pw_bias, stride, padding, dilation, mid_activation, activation, fp32_precision
) -> Tensor:
    check_tensors(x, dw_weight, pw_weight, dw_bias, pw_bias)
    check_option("mid_activation", mid_activation, ACTIVATIONS)
    check_option("activation", activation, ACTIVATIONS)
    check_option("fp32_precision", fp32_precision, PRECISIONS)
    n, _, h, w = x.shape
    kernel = dw_weight.shape[2:]
    check_extent(h, w, kernel, dilation, padding)
    p = output_extent(h, padding[:2], kernel[0], stride[0], dilation[0])
    q = output_extent(w, padding[2:], kernel[1], stride[1], dilation[1])
    memory_format = dispatch.MEMORY_FORMATS[layout_of(x)]
    return torch.empty((n, pw_weight.shape[0], p, q), dtype=x.dtype, device=x.device, memory_format=memory_format)


def _backward(
    grad, x, dw_weight, pw_weight, dw_bias, pw_bias, stride, padding, dilation, mid_activation, activation,
    fp32_precision, needed,
) -> list[Tensor]:  # fmt: skip
    gradients = reference.depthwise_separable_conv2d_backward(
        grad, x, dw_weight, pw_weight, dw_bias, pw_bias, tuple(stride), Pads(*padding), tuple(dilation),
        mid_activation, activation, fp32_precision, tuple(needed),
    )  # fmt: skip
    return [g for g in gradients if g is not None]


def _backward_fake(grad, x, dw_weight, pw_weight, dw_bias, pw_bias, *options) -> list[Tensor]:
    inputs = (x, dw_weight, pw_weight, dw_bias, pw_bias)
    return [torch.empty_like(t) for t, wanted in zip(inputs, options[-1], strict=True) if wanted]


class SeparableConv2d(torch.autograd.Function):
    """The gradient. Saved tensors carry version counters: an in-place edit raises in backward.

    `keyset` is that of the dispatcher, or None for a call that did not come through it.
    """

    @staticmethod
    def forward(ctx, keyset, x, dw_weight, pw_weight, dw_bias, pw_bias, *options):
        ctx.save_for_backward(x, dw_weight, pw_weight, dw_bias, pw_bias)
        ctx.options = options
        if keyset is None:
            return dispatch.run(x, dw_weight, pw_weight, dw_bias, pw_bias, *options)
        with torch._C._AutoDispatchBelowAutograd():
            keyset = keyset & torch._C._after_autograd_keyset
            return forward_op.redispatch(keyset, x, dw_weight, pw_weight, dw_bias, pw_bias, *options)

    @staticmethod
    def backward(ctx, grad):
        needed = ctx.needs_input_grad[1:6]
        # Under create_graph autograd must know that the gradients depend on the saved tensors too, or it takes their
        # own derivatives for zero; torch's once_differentiable marks only what depends on `grad`.
        gradients_of = Gradients.apply if torch.is_grad_enabled() else backward_op
        gradients = iter(gradients_of(grad, *ctx.saved_tensors, *ctx.options, needed))
        return None, *(next(gradients) if wanted else None for wanted in needed), *(None for _ in ctx.options)


class TransformedSeparableConv2d(torch.autograd.Function):
    """The same in the form that torch.func's transforms (grad, vmap, ...) ask for; it costs more a call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args):
        return forward_op(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[5:]

    @staticmethod
    def backward(ctx, grad):
        needed = ctx.needs_input_grad[:5]
        gradients = iter(Gradients.apply(grad, *ctx.saved_tensors, *ctx.options, needed))
        return *(next(gradients) if wanted else None for wanted in needed), *(None for _ in ctx.options)


class Gradients(torch.autograd.Function):
    """Gradients whose own derivative raises: autograd and torch.func would take what is not recorded for zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args):
        return tuple(backward_op(*args))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("depthwise_separable_conv2d has no second derivative")


def _autograd(keyset, *args) -> Tensor:
    if (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)) or forward_ad._current_level >= 0:
        return SeparableConv2d.apply(keyset, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def _autocast(device_type: str):
    """Casts what autocast casts (floating, not float64); the convolutions inside see no autocast any more."""

    def forward(*args):
        dtype = torch.get_autocast_dtype(device_type)
        args = [autocast(a, device_type, dtype) if isinstance(a, Tensor) else a for a in args]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return forward_op(*args)

    return forward


def autocast(tensor: Tensor, device_type: str, dtype: torch.dtype) -> Tensor:
    """`tensor` as autocast of `device_type` to `dtype` hands it to a convolution."""
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type
    return tensor.to(dtype) if eligible else tensor


def _backward_without_autocast(*args) -> list[Tensor]:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
        return backward_op(*args)


def _of_no_element(op, in_dims, args):
    """What vmap returns over a dimension of size 0: `op` is never called, its fake kernel tells the shapes."""
    meta = (
        a.new_empty([*a.shape[:d], *a.shape[d + 1 :]] if isinstance(d, int) else a.shape, device="meta")
        if isinstance(a, Tensor)
        else a
        for a, d in zip(args, in_dims, strict=True)
    )
    device = next(a.device for a in args if isinstance(a, Tensor))
    result = op(*meta)
    if isinstance(result, Tensor):
        return torch.empty((0, *result.shape), dtype=result.dtype, device=device), 0
    return [torch.empty((0, *r.shape), dtype=r.dtype, device=device) for r in result], [0] * len(result)


def _one_by_one(op):
    """Rule of torch.vmap: calls `op` once an element of the mapped dimension."""

    def rule(info, in_dims, *args):
        if info.batch_size == 0:
            return _of_no_element(op, in_dims, args)
        results = [
            op(*(a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return [torch.stack(parts) for parts in zip(*results, strict=True)], [0] * len(results[0])

    return rule


library.impl("depthwise_separable_conv2d", _forward, "CompositeExplicitAutograd")
library.impl("depthwise_separable_conv2d", _autograd, "Autograd", with_keyset=True)
library.impl("depthwise_separable_conv2d_backward", _backward, "CompositeExplicitAutograd")
for _device_type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    library.impl("depthwise_separable_conv2d", _autocast(_device_type), _key)
    library.impl("depthwise_separable_conv2d_backward", _backward_without_autocast, _key)
torch.library.register_fake("cutlass_sep::depthwise_separable_conv2d", _forward_fake, lib=library)
torch.library.register_fake("cutlass_sep::depthwise_separable_conv2d_backward", _backward_fake, lib=library)
torch.library.register_vmap("cutlass_sep::depthwise_separable_conv2d", _one_by_one(forward_op), lib=library)
torch.library.register_vmap("cutlass_sep::depthwise_separable_conv2d_backward", _one_by_one(backward_op), lib=library)
