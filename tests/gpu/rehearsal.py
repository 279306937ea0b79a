"""The rehearsal: everything but the GPU.

Calls on CPU tensors are planned as for a GPU, their kernels are compiled into the disk cache by a pool of processes,
and a launch computes on the CPU what the kernel would: fp32 throughout, the hidden values and (for TF32) the weights
rounded as an MMA operand is. So tests fail here for the same reasons as on a GPU, except for those that lie in the
kernels themselves.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cutlass_sep import arch as archs
from cutlass_sep import dispatch, kernel
from cutlass_sep.kernel import Kernel
from cutlass_sep.op import DepthwiseSeparableConv2d

from .accuracy import ACTIVATIONS, depthwise, pointwise
from .builds import Builds

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def install(patch: pytest.MonkeyPatch, arch: str, builds: Builds) -> None:
    """Let CPU tensors take the way of CUDA tensors, as if on a device that `arch` runs on."""
    choose = dispatch.choose
    patch.setattr(archs, "of_device", lambda index: arch)
    patch.setattr(archs, "default", lambda: arch)
    patch.setattr(dispatch, "choose", lambda problem, device: choose(problem, torch.device("meta")))
    patch.setattr(DepthwiseSeparableConv2d, "_check_device", lambda self, device: None)
    patch.setattr(kernel.Kernel, "load", lambda self, device: builds.submit(self))

    def launch(self: Kernel, x, dw_weight, pw_weight, dw_bias, pw_bias, y) -> None:
        builds.submit(self)
        _check_contract(self, x, dw_weight, pw_weight, dw_bias, pw_bias, y)
        y.copy_(_compute(self, x, dw_weight, pw_weight, dw_bias, pw_bias))

    patch.setattr(kernel.Kernel, "launch", launch)


def _check_contract(k: Kernel, x, dw_weight, pw_weight, dw_bias, pw_bias, y) -> None:
    p = k.problem
    assert tuple(x.shape) == (p.n, p.c, p.h, p.w)
    assert tuple(y.shape) == (p.n, p.o, p.p, p.q)
    for t in (x, y):
        assert t.is_contiguous(memory_format=_FORMATS[p.layout])
        assert t.data_ptr() % p.alignment == 0
    assert (dw_bias is not None, pw_bias is not None) == (p.dw_bias, p.pw_bias)
    for t in (dw_weight, pw_weight, dw_bias, pw_bias):
        assert t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)


def _compute(k: Kernel, x, dw_weight, pw_weight, dw_bias, pw_bias) -> Tensor:
    p = k.problem
    dtype = x.dtype
    x, dw_weight, pw_weight, dw_bias, pw_bias = (
        None if t is None else t.float() for t in (x, dw_weight, pw_weight, dw_bias, pw_bias)
    )
    a = ACTIVATIONS[p.mid_activation](depthwise(p, x, dw_weight, dw_bias))
    if p.fp32_precision == "tf32":
        a, pw_weight = _tf32(a), _tf32(pw_weight)
    elif dtype != torch.float32:
        rounded = a.to(dtype).float()
        # Where one does not survive, the kernel computes in plain fp32.
        a = torch.where(rounded.isfinite(), rounded, a)
    return ACTIVATIONS[p.activation](pointwise(pw_weight, a, pw_bias))


def _tf32(t: Tensor) -> Tensor:
    """Rounded to 10 stored bits, to nearest; Inf and NaN stay."""
    rounded = ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(t.isfinite(), rounded, t)
