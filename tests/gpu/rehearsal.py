"""The rehearsal: everything but the GPU.

Calls on CPU tensors are planned as for a GPU, their kernels are compiled into the disk cache by a pool of processes,
and a launch computes on the CPU what the kernel would: fp32 throughout, the operands of an MMA rounded as it takes
them, the block's expanded channels as the two-kernel form stores them. So tests fail here for the same reasons as on a
GPU, except for those that lie in the kernels themselves.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cutlass_sep import arch as archs
from cutlass_sep import dispatch, kernel, op
from cutlass_sep.kernel import Kernel
from cutlass_sep.problem import SeparableBlock1dProblem, has_layout

from .accuracy import ACTIVATIONS, depthwise, pointwise, project, taps
from .builds import Builds
from .calls import Tensors


def install(patch: pytest.MonkeyPatch, arch: str, builds: Builds) -> None:
    """Let CPU tensors take the way of CUDA tensors, as if on a device that `arch` runs on."""
    choose = dispatch.choose
    patch.setattr(archs, "of_device", lambda index: arch)
    patch.setattr(archs, "default", lambda: arch)
    patch.setattr(dispatch, "choose", lambda problem, device: choose(problem, torch.device("meta")))
    patch.setattr(op.Operation, "_check_device", lambda self, device: None)
    patch.setattr(kernel.Kernel, "load", lambda self, device: builds.submit(self))

    def launch(self: Kernel, tensors: Tensors, y: Tensor, addresses: list[int]) -> None:
        builds.submit(self)
        _check_contract(self, tensors, y, addresses)
        y.copy_(_compute(self, tensors))

    patch.setattr(kernel.Kernel, "launch", launch)


def _check_contract(k: Kernel, tensors: Tensors, y: Tensor, addresses: list[int]) -> None:
    p, (x, *parameters) = k.problem, tensors
    if isinstance(p, SeparableBlock1dProblem):
        assert tuple(x.shape) == (p.n, p.c, p.l)
        biases = (p.expand_bias, p.dw_bias, p.project_bias)
    else:
        assert tuple(x.shape) == (p.n, p.c, p.h, p.w)
        biases = (p.dw_bias, p.pw_bias)
    assert tuple(y.shape) == p.y_shape
    for t in (x, y):
        assert has_layout(t, p.layout)
        assert t.data_ptr() % p.alignment == 0
    assert tuple(t is not None for t in parameters[-len(biases) :]) == biases
    for t in parameters:
        assert t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)
    assert addresses == [0 if t is None else t.data_ptr() for t in tensors]


def _compute(k: Kernel, tensors: Tensors) -> Tensor:
    p = k.problem
    dtype = tensors[0].dtype
    x, *parameters = (None if t is None else t.float() for t in tensors)

    def operand(t: Tensor) -> Tensor:
        """What an MMA takes."""
        if p.fp32_precision == "tf32":
            return _tf32(t)
        rounded = t.to(dtype).float()
        # Where one does not survive, the kernel computes in plain fp32.
        return torch.where(rounded.isfinite(), rounded, t)

    if isinstance(p, SeparableBlock1dProblem):
        expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias = parameters
        e = project(operand(expand_weight), operand(x), expand_bias)
        e = e if dtype == torch.float32 else operand(e)
        a = operand(ACTIVATIONS[p.activation](taps(p, e, dw_weight, dw_bias)))
        y = project(operand(project_weight), a, project_bias)
        return y + x if p.residual else y
    dw_weight, pw_weight, dw_bias, pw_bias = parameters
    a = operand(ACTIVATIONS[p.mid_activation](depthwise(p, x, dw_weight, dw_bias)))
    return ACTIVATIONS[p.activation](pointwise(operand(pw_weight), a, pw_bias))


def _tf32(t: Tensor) -> Tensor:
    """Rounded to 10 stored bits, to nearest; Inf and NaN stay."""
    rounded = ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(t.isfinite(), rounded, t)
