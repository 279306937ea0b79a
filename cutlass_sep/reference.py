"""Path "torch": the operator and its gradients through ATen, at a stated precision instead of what torch's flags say.

Everything here is raw arithmetic on checked arguments: x [N,C,H,W], dw_weight [C,1,kh,kw], pw_weight [O,C,1,1],
resolved `Pads`, pairs for stride and dilation. With cuDNN switched off (`torch.backends.cudnn.enabled`) ATen takes
cuBLAS, for which nothing can be stated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Pads

aten = torch.ops.aten


class Activation(NamedTuple):
    """An activation and the gradient of its input, as ATen computes them."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


#: One entry for each name of problem.ACTIVATIONS; `backward` takes the gradient and the activation's input.
ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(aten.relu, lambda g, z: aten.threshold_backward(g, z, 0)),
    "relu6": Activation(lambda z: aten.hardtanh(z, 0.0, 6.0), lambda g, z: aten.hardtanh_backward(g, z, 0.0, 6.0)),
    "silu": Activation(aten.silu, aten.silu_backward),
    "hardswish": Activation(aten.hardswish, aten.hardswish_backward),
    "gelu": Activation(aten.gelu, aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda z: aten.gelu(z, approximate="tanh"), lambda g, z: aten.gelu_backward(g, z, approximate="tanh")
    ),
}


def activate(z: Tensor, name: str | None) -> Tensor:
    """The activation `name` of z."""
    return z if name is None else ACTIVATIONS[name].forward(z)


def depthwise_separable_conv2d(
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Tensor | None,
    pw_bias: Tensor | None,
    stride: tuple[int, int],
    padding: Pads,
    dilation: tuple[int, int],
    mid_activation: str | None,
    activation: str | None,
    fp32_precision: str,
) -> Tensor:
    """y [N,O,P,Q] in x's dtype. 16-bit tensors round after each convolution, as two nn.Conv2d do."""
    tf32 = fp32_precision == "tf32"
    m = activate(_depthwise(x, dw_weight, dw_bias, stride, padding, dilation, tf32), mid_activation)
    return activate(_convolution(m, pw_weight, pw_bias, (1, 1), (0, 0), (1, 1), 1, tf32), activation)


def oracle(
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Tensor | None,
    pw_bias: Tensor | None,
    stride: tuple[int, int],
    padding: Pads,
    dilation: tuple[int, int],
    mid_activation: str | None,
    activation: str | None,
) -> Tensor:
    """The same y computed in float64 and returned so: what tests and `verify` compare with."""
    tensors = [None if t is None else t.detach().double() for t in (x, dw_weight, pw_weight, dw_bias, pw_bias)]
    return depthwise_separable_conv2d(*tensors, stride, padding, dilation, mid_activation, activation, "ieee")


def depthwise_separable_conv2d_backward(
    grad: Tensor,
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Tensor | None,
    pw_bias: Tensor | None,
    stride: tuple[int, int],
    padding: Pads,
    dilation: tuple[int, int],
    mid_activation: str | None,
    activation: str | None,
    fp32_precision: str,
    needed: tuple[bool, bool, bool, bool, bool],
) -> list[Tensor | None]:
    """Gradients of (x, dw_weight, pw_weight, dw_bias, pw_bias) for that of y (any strides); None where not needed.

    The depthwise output is computed anew, and only if a wanted gradient depends on it. Each gradient has the strides of
    its tensor where that tensor is dense.
    """
    inputs = (x, dw_weight, pw_weight, dw_bias, pw_bias)
    if x.shape[0] == 0:
        return [torch.zeros_like(t) if want else None for t, want in zip(inputs, needed, strict=True)]
    need_x, need_dw, need_pw, need_dw_bias, need_pw_bias = needed
    below = need_x or need_dw or need_dw_bias
    tf32 = fp32_precision == "tf32"
    pixels = (x.shape[0], x.shape[1], *grad.shape[2:])

    if need_pw or activation is not None or (below and mid_activation is not None):
        m = _depthwise(x, dw_weight, dw_bias, stride, padding, dilation, tf32)
        a = activate(m, mid_activation)
    else:
        a = x.new_empty(1).expand(pixels)  # only its shape is read
    if activation is not None:
        z = _convolution(a, pw_weight, pw_bias, (1, 1), (0, 0), (1, 1), 1, tf32)
        grad = ACTIVATIONS[activation].backward(grad, z)
    grad_m, grad_pw, grad_pw_bias = _convolution_backward(
        grad, a, pw_weight, (1, 1), (0, 0), (1, 1), 1, (below, need_pw, need_pw_bias), tf32
    )
    grad_x = grad_dw = grad_dw_bias = None
    if below:
        if mid_activation is not None:
            grad_m = ACTIVATIONS[mid_activation].backward(grad_m, m)
        wider, symmetric, crop = _split(x, padding)
        grad_x, grad_dw, grad_dw_bias = _convolution_backward(
            grad_m, wider, dw_weight, stride, symmetric, dilation, x.shape[1], (need_x, need_dw, need_dw_bias), tf32
        )
        if grad_x is not None:
            grad_x = grad_x[crop]
    grads = (grad_x, grad_dw, grad_pw, grad_dw_bias, grad_pw_bias)
    # oneDNN makes the gradient of a weight along with that of its bias, wanted or not.
    return [_like(g, t) if want else None for g, t, want in zip(grads, inputs, needed, strict=True)]


def _depthwise(x, weight, bias, stride, padding: Pads, dilation, tf32: bool) -> Tensor:
    wider, symmetric, _ = _split(x, padding)
    return _convolution(wider, weight, bias, stride, symmetric, dilation, x.shape[1], tf32)


def _split(x: Tensor, pads: Pads) -> tuple[Tensor, tuple[int, int], tuple]:
    """ATen pads both sides alike: x widened by what exceeds that, the symmetric part, the slice that undoes it."""
    symmetric = (min(pads.top, pads.bottom), min(pads.left, pads.right))
    top, bottom = pads.top - symmetric[0], pads.bottom - symmetric[0]
    left, right = pads.left - symmetric[1], pads.right - symmetric[1]
    if not (top or bottom or left or right):
        return x, symmetric, (...,)
    crop = (..., slice(top, top + x.shape[2]), slice(left, left + x.shape[3]))
    return aten.constant_pad_nd(x, (left, right, top, bottom)), symmetric, crop


def _convolution(x, weight, bias, stride, padding, dilation, groups: int, tf32: bool) -> Tensor:
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    with _NOTHING if x.is_cuda else _mkldnn_precision(x):
        return aten._convolution(
            x, weight, bias, stride, padding, dilation, False, (0, 0), groups,
            cudnn.benchmark, deterministic, cudnn.enabled, tf32,
        )  # fmt: skip


def _convolution_backward(grad, x, weight, stride, padding, dilation, groups: int, mask, tf32: bool):
    if not any(mask):
        return None, None, None
    with _cudnn_precision(tf32) if x.is_cuda and x.dtype == torch.float32 else _mkldnn_precision(x):
        return aten.convolution_backward(
            grad, x, weight, (weight.shape[0],), stride, padding, dilation, False, (0, 0), groups, mask
        )


def _like(grad: Tensor, tensor: Tensor) -> Tensor:
    """`grad` with the strides that empty_like(tensor) has: those of the tensor if it is dense."""
    wanted = torch.empty_like(tensor)
    return grad if grad.stride() == wanted.stride() else wanted.copy_(grad)


# aten::convolution_backward has no allow_tf32 argument, it reads the process's flag: set it for the call, under a lock
# so that two backward threads (one a device) cannot restore each other's value. torch 2.9 split the flag by operator;
# reading the old one then raises if convolution and RNN differ.
_NOTHING = nullcontext()
_flag_lock = threading.Lock()
_PER_OPERATOR = hasattr(torch._C, "_set_fp32_precision_setter")


@contextmanager
def _cudnn_precision(tf32: bool) -> Iterator[None]:
    with _flag_lock:
        if not _PER_OPERATOR:
            before = torch._C._get_cudnn_allow_tf32()
            torch._C._set_cudnn_allow_tf32(tf32)
            try:
                yield
            finally:
                torch._C._set_cudnn_allow_tf32(before)
            return
        with _operator_precision("cuda", "tf32" if tf32 else "ieee"):
            yield


@contextmanager
def _mkldnn_precision(x: Tensor) -> Iterator[None]:
    """On a CPU oneDNN may be told to round fp32 to TF32 or bfloat16; the lock is taken only where somebody did."""
    reduced = _PER_OPERATOR and x.dtype == torch.float32 and x.device.type == "cpu"
    if reduced and torch._C._get_fp32_precision_getter("mkldnn", "conv") not in ("none", "ieee"):
        with _flag_lock, _operator_precision("mkldnn", "ieee"):
            yield
    else:
        yield


@contextmanager
def _operator_precision(backend: str, precision: str) -> Iterator[None]:
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    before = read(backend, "conv")
    write(backend, "conv", precision)
    try:
        yield
    finally:
        # "none" inherits from the wider settings, which is the usual state: only an own value must be written back.
        write(backend, "conv", "none")
        if read(backend, "conv") != before:
            write(backend, "conv", before)
