"""From the tensors of a call to what runs it: one tuple key, one look-up; planned and built on the first such call.

Falls back to path "torch" with one warning a reason, or raises if CUTLASS_SEP_FALLBACK=0. CPU tensors, float64 and the
problems for which the planner holds PyTorch to be faster run on path "torch" by rule: that is no fallback.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from marshal import dumps
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import operators
from .errors import CompileError, EnvironmentProblem, Unsupported
from .log import logger
from .problem import KERNEL_DTYPES, MAX_ALIGNMENT, Problem, is_dense, laid_out, strides_of

if TYPE_CHECKING:
    from .kernel import Kernel
    from .operators import Operator
    from .planner import Plan

#: What a kernel that cannot be had raises; anything else is an error of the call or a bug and is not hidden.
UNAVAILABLE = (Unsupported, CompileError, EnvironmentProblem)
_MISALIGNED = MAX_ALIGNMENT - 1

#: y of the tensors of a call and their addresses.
_Launcher = Callable[[tuple, list[int]], Tensor]
_launchers: dict[tuple, _Launcher] = {}
#: Entries are small and cheap to make again, but a service with ever new sizes must not grow without end.
_MAX_LAUNCHERS = 1 << 16
_warned: set[str] = set()


def run(operator: Operator, tensors: tuple[Tensor | None, ...], options: tuple, resolved: bool = False) -> Tensor:
    """y of `tensors`, x of them batched, on x's device and torch's current stream; records no gradient, never waits.

    Options as in the public function, or as `operator.resolve` made them. Raises as `from_tensors` of the operator's
    problem does.
    """
    try:
        x = tensors[0]
        address = x.data_ptr()
        # 1, 1.0 and True are equal, in tuples too, but not as bytes (of version 2, which depend on values alone).
        kinds = options if resolved else dumps(options, 2)
        key = [operator, kinds, x.shape, x.stride(), x.dtype, x.device, address & _MISALIGNED]
        addresses, copy_parameters = [address], False
        for tensor in tensors[1:]:
            if tensor is None:
                key.append(None)
                addresses.append(0)
            else:
                address = tensor.data_ptr()
                key += tensor.shape, tensor.dtype, tensor.device
                addresses.append(address)
                if address & _MISALIGNED or not tensor.is_contiguous():
                    copy_parameters = True
        key.append(copy_parameters)
        key = tuple(key)
        launcher = _launchers.get(key)
    except (RuntimeError, TypeError, AttributeError, ValueError):
        # Dealt with below: a sparse tensor has no strides, no tensor has no address, and NumPy's integers no bytes.
        key = launcher = None
    if launcher is not None:
        return launcher(tensors, addresses)

    problem = operator.describe(tensors, options)
    if key is None:
        return run(operator, tensors, operator.options_of(problem), resolved=True)
    launcher, y = _first_call(problem, tensors, addresses, copy_parameters)
    if len(_launchers) >= _MAX_LAUNCHERS:
        _launchers.clear()
    _launchers[key] = launcher
    return y


def choose(problem: Problem, device: torch.device) -> Plan:
    """What a call of this problem on `device` runs; a meta tensor stands for one on the default architecture.

    Raises one of `UNAVAILABLE` where no kernel can be planned although the call is one for a kernel.
    """
    from . import arch, planner, tuned

    if device.type not in ("cuda", "meta"):
        return planner.Plan("torch", None, f"tensors on {device.type} run through ATen")
    if problem.dtype not in KERNEL_DTYPES:
        return planner.Plan("torch", None, f"{problem.dtype} runs through ATen")
    if problem.n == 0:
        return planner.Plan("torch", None, "the batch is empty: nothing is launched")
    if device.type == "cuda" and (found := tuned.pick(problem, device)) is not None:
        return found
    target = arch.of_device(device.index) if device.type == "cuda" else arch.default()
    plan = planner.planned(problem, target)
    if plan.path == "torch" and plan.kernel is None:
        raise Unsupported(plan.reason)
    return plan


def clear() -> None:
    """Forget every launcher, so that the next call of each kind is planned anew, and which warnings were given."""
    _launchers.clear()
    _warned.clear()


def _first_call(
    problem: Problem, tensors: tuple, addresses: list[int], copy_parameters: bool
) -> tuple[_Launcher, Tensor]:
    x = tensors[0]
    launcher: _Launcher = _Torch(problem, None)
    if problem.n == 0:
        launcher = _Empty(problem)
    else:
        try:
            plan = choose(problem, x.device)
            if plan.path == "torch":
                logger.info("path torch: %s", plan.reason)
            else:
                from .kernel import kernel_for

                launcher = _Fused(problem, x, kernel_for(problem, x.device.index, plan), copy_parameters)
                return launcher, launcher(tensors, addresses)
        except UNAVAILABLE as error:
            if not fallback_allowed():
                raise
            reason = str(error)
            if reason not in _warned:
                _warned.add(reason)
                warnings.warn(f"cutlass_sep falls back to path 'torch': {reason}", RuntimeWarning, stacklevel=5)
            launcher = _Torch(problem, reason)
    return launcher, launcher(tensors, addresses)


def fallback_allowed() -> bool:
    """False if CUTLASS_SEP_FALLBACK=0."""
    return os.environ.get("CUTLASS_SEP_FALLBACK", "1") != "0"


class _Output:
    """Allocates y of a problem beside x, like torch.empty does, so at an address that every kernel can write."""

    __slots__ = ("shape", "strides")

    def __init__(self, problem: Problem) -> None:
        self.shape = problem.y_shape
        self.strides = strides_of(self.shape, problem.layout)

    def allocate(self, x: Tensor) -> Tensor:
        return x.new_empty_strided(self.shape, self.strides)


class _Empty(_Output):
    """An empty batch: neither a launch nor a build."""

    __slots__ = ()

    def __call__(self, tensors: tuple, addresses: list[int]) -> Tensor:
        return self.allocate(tensors[0])


class _Fused(_Output):
    """A launch of a kernel of this package; what the kernel cannot read where it lies is copied first."""

    __slots__ = ("kernel", "copy_x", "copy_parameters")

    def __init__(self, problem: Problem, x: Tensor, kernel: Kernel, copy_parameters: bool) -> None:
        super().__init__(problem)
        self.kernel = kernel
        self.copy_x = not is_dense(x, problem.spatial)
        self.copy_parameters = copy_parameters

    def __call__(self, tensors: tuple, addresses: list[int]) -> Tensor:
        if self.copy_x or self.copy_parameters:
            # The allocator reuses the memory of these copies only behind the kernel, which runs on the same stream.
            x, *parameters = tensors
            tensors = (x.contiguous() if self.copy_x else x, *map(as_parameter, parameters))
            addresses = addresses_of(tensors)
        y = self.allocate(tensors[0])
        self.kernel.launch(tensors, y, addresses)
        return y


class _Torch:
    """Path "torch"; `reason` is given where that is a fallback."""

    __slots__ = ("forward", "options", "layout", "reason")

    def __init__(self, problem: Problem, reason: str | None) -> None:
        operator = operators.of(problem)
        self.forward, self.options = operator.forward, operator.options_of(problem)
        self.layout = problem.layout
        self.reason = reason

    def __call__(self, tensors: tuple, addresses: list[int]) -> Tensor:
        if self.reason is not None and not fallback_allowed():
            raise Unsupported(self.reason)
        x, *parameters = tensors
        return laid_out(self.forward(laid_out(x, self.layout), *parameters, *self.options), self.layout)


def addresses_of(tensors: tuple) -> list[int]:
    """Where the tensors of a call are in memory, 0 for None: what a launch takes of them."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def as_parameter(tensor: Tensor | None) -> Tensor | None:
    """A weight or bias as kernels read it: contiguous, at a 16-byte boundary; a copy only if it is not so already."""
    if tensor is None or (tensor.is_contiguous() and not tensor.data_ptr() & _MISALIGNED):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
