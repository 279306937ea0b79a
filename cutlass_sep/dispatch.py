"""From the tensors of a call to what runs it: one tuple key, one look-up; planned and built on the first such call.

Falls back to path "torch" with one warning a reason, or raises if CUTLASS_SEP_FALLBACK=0. CPU tensors, float64 and the
problems for which the planner holds PyTorch to be faster run on path "torch" by rule: that is no fallback.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import reference
from .errors import CompileError, EnvironmentProblem, Unsupported
from .log import logger
from .problem import KERNEL_DTYPES, MAX_ALIGNMENT, SeparableConv2dProblem, is_dense

if TYPE_CHECKING:
    from .kernel import Kernel
    from .planner import Plan

#: What a kernel that cannot be had raises; anything else is an error of the call or a bug and is not hidden.
UNAVAILABLE = (Unsupported, CompileError, EnvironmentProblem)
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_MISALIGNED = MAX_ALIGNMENT - 1

_Launcher = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]
_launchers: dict[tuple, _Launcher] = {}
#: Entries are small and cheap to make again, but a service with ever new sizes must not grow without end.
_MAX_LAUNCHERS = 1 << 16
_warned: set[str] = set()


def run(
    x: Tensor,
    dw_weight: Tensor,
    pw_weight: Tensor,
    dw_bias: Tensor | None,
    pw_bias: Tensor | None,
    stride,
    padding,
    dilation,
    mid_activation: str | None,
    activation: str | None,
    fp32_precision: str,
) -> Tensor:
    """y [N,O,P,Q] of x [N,C,H,W], on x's device and torch's current stream; records no gradient and never waits.

    Options as in the public function, or `Pads` for the padding. Raises as `SeparableConv2dProblem.from_tensors` does.
    """
    try:
        misaligned = dw_weight.data_ptr() | pw_weight.data_ptr()
        dw_bias_key = pw_bias_key = None
        if dw_bias is not None:
            misaligned |= dw_bias.data_ptr()
            dw_bias_key = (dw_bias.shape, dw_bias.stride(), dw_bias.dtype, dw_bias.device)
        if pw_bias is not None:
            misaligned |= pw_bias.data_ptr()
            pw_bias_key = (pw_bias.shape, pw_bias.stride(), pw_bias.dtype, pw_bias.device)
        key = (
            x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & _MISALIGNED, misaligned & _MISALIGNED,
            dw_weight.shape, dw_weight.stride(), dw_weight.dtype, dw_weight.device,
            pw_weight.shape, pw_weight.stride(), pw_weight.dtype, pw_weight.device,
            dw_bias_key, pw_bias_key, stride, padding, dilation, mid_activation, activation, fp32_precision,
        )  # fmt: skip
        launcher = _launchers.get(key)
    except (RuntimeError, TypeError, AttributeError):
        # Dealt with below: a sparse tensor has no strides, a list no hash, and None is no weight.
        key = launcher = None
    if launcher is not None:
        return launcher(x, dw_weight, pw_weight, dw_bias, pw_bias)

    problem = SeparableConv2dProblem.from_tensors(
        x, dw_weight, pw_weight, dw_bias, pw_bias, stride=stride, padding=padding, dilation=dilation,
        mid_activation=mid_activation, activation=activation, fp32_precision=fp32_precision,
    )  # fmt: skip
    if key is None:
        options = (problem.stride, problem.padding, problem.dilation, mid_activation, activation, fp32_precision)
        return run(x, dw_weight, pw_weight, dw_bias, pw_bias, *options)
    copy_parameters = misaligned & _MISALIGNED or not all(
        t is None or t.is_contiguous() for t in (dw_weight, pw_weight, dw_bias, pw_bias)
    )
    launcher, y = _first_call(problem, (x, dw_weight, pw_weight, dw_bias, pw_bias), bool(copy_parameters))
    if len(_launchers) >= _MAX_LAUNCHERS:
        _launchers.clear()
    _launchers[key] = launcher
    return y


def choose(problem: SeparableConv2dProblem, device: torch.device) -> Plan:
    """What a call of this problem on `device` runs; a meta tensor stands for one on the default architecture.

    Raises one of `UNAVAILABLE` where no kernel can be planned although the call is one for a kernel.
    """
    from . import arch, planner, schedule

    if device.type not in ("cuda", "meta"):
        return planner.Plan("torch", None, f"tensors on {device.type} run through ATen")
    if problem.dtype not in KERNEL_DTYPES:
        return planner.Plan("torch", None, f"{problem.dtype} runs through ATen")
    if problem.n == 0:
        return planner.Plan("torch", None, "the batch is empty: nothing is launched")
    target = arch.of_device(device.index) if device.type == "cuda" else arch.default()
    plan = planner.plan(problem, target)
    if plan.path == "torch" and not schedule.candidates(problem, target):
        raise Unsupported(plan.reason)
    return plan


def clear() -> None:
    """Forget every launcher and which warnings were given (for tests)."""
    _launchers.clear()
    _warned.clear()


def _first_call(problem: SeparableConv2dProblem, tensors: tuple, copy_parameters: bool) -> tuple[_Launcher, Tensor]:
    x = tensors[0]
    launcher: _Launcher = _Torch(problem, None)
    if problem.n == 0:
        launcher = _Empty(problem, x)
    else:
        try:
            plan = choose(problem, x.device)
            if plan.path == "torch":
                logger.info("path torch: %s", plan.reason)
            else:
                from .kernel import kernel_for

                launcher = _Fused(problem, x, kernel_for(problem, x.device.index, plan), copy_parameters)
                return launcher, launcher(*tensors)
        except UNAVAILABLE as error:
            if not fallback_allowed():
                raise
            reason = str(error)
            if reason not in _warned:
                _warned.add(reason)
                warnings.warn(f"cutlass_sep falls back to path 'torch': {reason}", RuntimeWarning, stacklevel=4)
            launcher = _Torch(problem, reason)
    return launcher, launcher(*tensors)


def fallback_allowed() -> bool:
    """False if CUTLASS_SEP_FALLBACK=0."""
    return os.environ.get("CUTLASS_SEP_FALLBACK", "1") != "0"


class _Output:
    """Allocates y of a problem like torch.empty does, so at an address that every kernel can write."""

    __slots__ = ("shape", "dtype", "device", "memory_format")

    def __init__(self, problem: SeparableConv2dProblem, x: Tensor) -> None:
        self.shape = (problem.n, problem.o, problem.p, problem.q)
        self.dtype, self.device = x.dtype, x.device
        self.memory_format = MEMORY_FORMATS[problem.layout]

    def allocate(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, memory_format=self.memory_format)


class _Empty(_Output):
    """An empty batch: neither a launch nor a build."""

    __slots__ = ()

    def __call__(self, x, dw_weight, pw_weight, dw_bias, pw_bias) -> Tensor:
        return self.allocate()


class _Fused(_Output):
    """A launch of the fused kernel; what the kernel cannot read where it lies is copied first."""

    __slots__ = ("kernel", "copy_x", "copy_parameters")

    def __init__(self, problem: SeparableConv2dProblem, x: Tensor, kernel: Kernel, copy_parameters: bool) -> None:
        super().__init__(problem, x)
        self.kernel = kernel
        self.copy_x = not is_dense(x)
        self.copy_parameters = copy_parameters

    def __call__(self, x, dw_weight, pw_weight, dw_bias, pw_bias) -> Tensor:
        # The allocator reuses the memory of these copies only behind the kernel, which runs on the same stream.
        if self.copy_x:
            x = x.contiguous()
        if self.copy_parameters:
            dw_weight, pw_weight, dw_bias, pw_bias = map(as_parameter, (dw_weight, pw_weight, dw_bias, pw_bias))
        y = self.allocate()
        self.kernel.launch(x, dw_weight, pw_weight, dw_bias, pw_bias, y)
        return y


class _Torch:
    """Path "torch"; `reason` is given where that is a fallback."""

    __slots__ = ("options", "memory_format", "reason")

    def __init__(self, problem: SeparableConv2dProblem, reason: str | None) -> None:
        self.options = (
            problem.stride, problem.padding, problem.dilation, problem.mid_activation, problem.activation,
            problem.fp32_precision or "ieee",
        )  # fmt: skip
        self.memory_format = MEMORY_FORMATS[problem.layout]
        self.reason = reason

    def __call__(self, x, dw_weight, pw_weight, dw_bias, pw_bias) -> Tensor:
        if self.reason is not None and not fallback_allowed():
            raise Unsupported(self.reason)
        x = x.contiguous(memory_format=self.memory_format)
        y = reference.depthwise_separable_conv2d(x, dw_weight, pw_weight, dw_bias, pw_bias, *self.options)
        return y.contiguous(memory_format=self.memory_format)


def as_parameter(tensor: Tensor | None) -> Tensor | None:
    """A weight or bias as kernels read it: contiguous, at a 16-byte boundary; a copy only if it is not so already."""
    if tensor is None or (tensor.is_contiguous() and not tensor.data_ptr() & _MISALIGNED):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
