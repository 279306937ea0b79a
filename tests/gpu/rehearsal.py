"""The rehearsal: everything but the GPU.

Calls on CPU tensors are planned as for a GPU, their kernels are compiled into the disk cache by a pool of processes,
and a launch computes on the CPU what the kernel would: fp32 throughout, the hidden values and (for TF32) the weights
rounded as an MMA operand is. So tests fail here for the same reasons as on a GPU, except for those that lie in the
kernels themselves.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from cutlass_sep import arch as archs
from cutlass_sep import compiler, dispatch, kernel
from cutlass_sep.kernel import Kernel
from cutlass_sep.op import DepthwiseSeparableConv2d

from .accuracy import ACTIVATIONS, depthwise, pointwise

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Builds:
    """Compiles sources, each once, beside the tests."""

    def __init__(self) -> None:
        # Not forked: torch's threads would not survive that.
        self._pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
        self._futures: dict[str, tuple[str, Future]] = {}
        self._started = time.monotonic()

    def submit(self, k: Kernel) -> None:
        if k.source not in self._futures:
            self._futures[k.source] = (k.name, self._pool.submit(_build, k.source, k.arch, k.name))

    def finish(self, write) -> list[str]:
        """Wait for all, telling `write` how far it is now and then; the errors, one line each."""
        failed, compiled, told = [], 0, time.monotonic()
        for done, (name, future) in enumerate(self._futures.values()):
            try:
                compiled += not future.result()
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            if time.monotonic() - told > 10:
                told = time.monotonic()
                write(f"kernels: {done + 1} of {len(self._futures)} compiled")
        self._pool.shutdown()
        seconds = time.monotonic() - self._started
        write(f"kernels: {len(self._futures)} in all, {compiled} compiled now, {len(failed)} failed, {seconds:.0f} s")
        return failed


def _build(source: str, arch: str, name: str) -> bool:
    """In a process of the pool; whether the cubin was there."""
    return compiler.build(source, arch, name=name).cache_hit


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
