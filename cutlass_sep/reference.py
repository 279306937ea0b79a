"""Path "torch": the operators and their gradients through ATen, at a stated precision whatever torch's flags say.

Everything here is raw arithmetic on checked arguments: x [N,C,H,W], dw_weight [C,1,kh,kw], pw_weight [O,C,1,1],
resolved `Pads`, pairs for stride and dilation; of the block x [N,C,L], expand_weight [E,C,1], dw_weight [E,1,k],
project_weight [O,E,1]. With cuDNN switched off (`torch.backends.cudnn.enabled`) ATen takes cuBLAS, for which nothing
can be stated.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from .problem import Pads, output_extent, same_pads

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


class Stage(NamedTuple):
    """A convolution of maps [N,*,H,W] and the activation behind it; each operator is a chain of these."""

    weight: Tensor
    bias: Tensor | None
    activation: str | None = None
    stride: tuple[int, int] = (1, 1)
    padding: Pads = Pads(0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def shape(self, of: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of what a map of shape `of` becomes."""
        kernel, pads = self.weight.shape[2:], (self.padding[:2], self.padding[2:])
        extents = map(output_extent, of[2:], pads, kernel, self.stride, self.dilation)
        return of[0], self.weight.shape[0], *extents  # type: ignore[return-value]


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
    stages = _pair(dw_weight, pw_weight, dw_bias, pw_bias, stride, padding, dilation, mid_activation, activation)
    return _run(x, stages, fp32_precision)


def separable_conv_block1d(
    x: Tensor,
    expand_weight: Tensor,
    dw_weight: Tensor,
    project_weight: Tensor,
    expand_bias: Tensor | None,
    dw_bias: Tensor | None,
    project_bias: Tensor | None,
    dilation: int,
    activation: str | None,
    residual: bool,
    fp32_precision: str,
) -> Tensor:
    """y [N,O,L] in x's dtype. 16-bit tensors round after each convolution, as three nn.Conv1d do."""
    stages = _block(expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias, dilation, activation)
    # Both in place, on memory that is this call's own: y is no view, which autograd would treat otherwise.
    y = _run(x.unsqueeze(2), stages, fp32_precision).squeeze_(2)
    return y.add_(x) if residual else y


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
    stages = _pair(dw_weight, pw_weight, dw_bias, pw_bias, stride, padding, dilation, mid_activation, activation)
    need_x, *needed_parameters = needed
    gradients = _gradients(grad, x, stages, need_x, needed_parameters, fp32_precision)
    return _as_tensors(gradients, (x, dw_weight, pw_weight, dw_bias, pw_bias))


def separable_conv_block1d_backward(
    grad: Tensor,
    x: Tensor,
    expand_weight: Tensor,
    dw_weight: Tensor,
    project_weight: Tensor,
    expand_bias: Tensor | None,
    dw_bias: Tensor | None,
    project_bias: Tensor | None,
    dilation: int,
    activation: str | None,
    residual: bool,
    fp32_precision: str,
    needed: tuple[bool, bool, bool, bool, bool, bool, bool],
) -> list[Tensor | None]:
    """Gradients of (x, expand_weight, dw_weight, project_weight and the three biases) as for the 2-D operator.

    What lies between the convolutions is computed anew, as far as a wanted gradient depends on it.
    """
    inputs = (x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias)
    stages = _block(*inputs[1:], dilation, activation)
    need_x, *needed_parameters = needed
    gradients = _gradients(grad.unsqueeze(2), x.unsqueeze(2), stages, need_x, needed_parameters, fp32_precision)
    gradients = [g if g is None or g.dim() == 1 else g.squeeze(2) for g in gradients]
    if residual and need_x:
        gradients[0] = gradients[0] + grad
    return _as_tensors(gradients, inputs)


def _pair(
    dw_weight, pw_weight, dw_bias, pw_bias, stride, padding, dilation, mid_activation, activation
) -> tuple[Stage, ...]:
    """Stages of the 2-D operator."""
    depthwise = Stage(dw_weight, dw_bias, mid_activation, stride, padding, dilation, dw_weight.shape[0])
    return depthwise, Stage(pw_weight, pw_bias, activation)


def _block(
    expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias, dilation, activation
) -> tuple[Stage, ...]:
    """Stages of the block, as maps [N,*,1,L]. They pad the expanded channels, so no bias leaks in from outside."""
    pads = Pads(0, 0, *same_pads(dw_weight.shape[2], dilation))
    return (
        Stage(expand_weight.unsqueeze(2), expand_bias),
        Stage(dw_weight.unsqueeze(2), dw_bias, activation, (1, 1), pads, (1, dilation), dw_weight.shape[0]),
        Stage(project_weight.unsqueeze(2), project_bias),
    )


def _run(x: Tensor, stages: tuple[Stage, ...], fp32_precision: str) -> Tensor:
    for stage in stages:
        x = activate(_convolve(x, stage, fp32_precision == "tf32"), stage.activation)
    return x


def _gradients(
    grad: Tensor, x: Tensor, stages: tuple[Stage, ...], need_x: bool, needed: list[bool], fp32_precision: str
) -> list[Tensor | None]:
    """Gradients of x and, of first all weights and then all biases, those `needed`; None elsewhere."""
    count, tf32 = len(stages), fp32_precision == "tf32"
    need_weight, need_bias = needed[:count], needed[count:]
    weights: list[Tensor | None] = [None] * count
    biases: list[Tensor | None] = [None] * count
    if x.shape[0] == 0:
        weights = [torch.zeros_like(s.weight) if want else None for s, want in zip(stages, need_weight, strict=True)]
        biases = [torch.zeros_like(s.bias) if want else None for s, want in zip(stages, need_bias, strict=True)]
        return [torch.zeros_like(x) if need_x else None, *weights, *biases]

    # below[i]: whether a wanted gradient depends on that of stage i's input, wanted[i]: on that of its output.
    below = [need_x or any(need_weight[:i]) or any(need_bias[:i]) for i in range(count)]
    wanted = [below[i] or need_weight[i] or need_bias[i] for i in range(count)]
    # Outputs of the convolutions, as far up as an activation's slope or a weight's gradient asks for them.
    known = [s.activation is not None and want for s, want in zip(stages, wanted, strict=True)]
    above = [*need_weight[1:], False]
    last = max((i for i in range(count) if known[i] or above[i]), default=-1)
    inputs, outputs = [x], []
    for i, stage in enumerate(stages):
        if i <= last:
            outputs.append(_convolve(inputs[i], stage, tf32))
            inputs.append(activate(outputs[i], stage.activation) if i < last or above[i] else outputs[i])
        else:
            # Only its shape is read.
            inputs.append(x.new_empty(1).expand(stage.shape(inputs[i].shape)))
    inputs.pop()

    for i, stage in reversed(list(enumerate(stages))):
        if not wanted[i]:
            break
        if stage.activation is not None:
            grad = ACTIVATIONS[stage.activation].backward(grad, outputs[i])
        del outputs[i:]
        wider, symmetric, crop = _split(inputs.pop(), stage.padding)
        grad, weights[i], biases[i] = _convolution_backward(
            grad, wider, stage.weight, stage.stride, symmetric, stage.dilation, stage.groups,
            (below[i], need_weight[i], need_bias[i]), tf32,
        )  # fmt: skip
        if grad is not None and crop is not None:
            grad = grad[crop]
    # oneDNN makes the gradient of a weight along with that of its bias, wanted or not.
    found = [grad, *weights, *biases]
    return [g if want else None for g, want in zip(found, (need_x, *needed), strict=True)]


def depthwise_contiguous(kernel: tuple[int, int], dilation: tuple[int, int], element_size: int) -> bool:
    """Whether path "torch" runs this depthwise convolution of channels_last CUDA tensors contiguous.

    cuDNN's fast channels_last kernels know no dilation and few taps (with 9.19 up to 64 in fp32, at least 75 in
    16 bit); the others are slower than the contiguous ones by more than the transposes take.
    """
    return max(dilation) > 1 or math.prod(kernel) > (64 if element_size == 4 else 128)


def _convolve(x: Tensor, stage: Stage, tf32: bool) -> Tensor:
    wider, symmetric, _ = _split(x, stage.padding)
    transpose = (
        stage.groups > 1 and x.is_cuda and not wider.is_contiguous()
        and depthwise_contiguous(tuple(stage.weight.shape[2:]), stage.dilation, x.element_size())
    )  # fmt: skip
    if transpose:
        wider = wider.contiguous()
    y = _convolution(wider, stage.weight, stage.bias, stage.stride, symmetric, stage.dilation, stage.groups, tf32)
    return y.contiguous(memory_format=torch.channels_last) if transpose else y


def _split(x: Tensor, pads: Pads) -> tuple[Tensor, tuple[int, int], tuple | None]:
    """ATen pads both sides alike: x widened by what exceeds that, the symmetric part, the slice that undoes it."""
    symmetric = (min(pads.top, pads.bottom), min(pads.left, pads.right))
    top, bottom = pads.top - symmetric[0], pads.bottom - symmetric[0]
    left, right = pads.left - symmetric[1], pads.right - symmetric[1]
    if not (top or bottom or left or right):
        return x, symmetric, None
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


def _as_tensors(gradients: list[Tensor | None], tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The gradients with the strides that empty_like of their tensor has: those of the tensor if it is dense."""
    return [None if g is None else _like(g, t) for g, t in zip(gradients, tensors, strict=True)]


def _like(grad: Tensor, tensor: Tensor) -> Tensor:
    if is_legacy_batchedtensor(grad):  # one of several gradients, which torch stacks
        return grad
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
