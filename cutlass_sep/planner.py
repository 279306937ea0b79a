"""The planner: which path and schedule run a problem, decided from the shapes alone.

The kernel depends on the layer and on the size class of the map (`schedule.representative`), so that many sizes need
few builds. Whether PyTorch's two convolutions are faster is estimated for the size at hand: that costs no build.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .errors import Unsupported
from .estimate import torch_us
from .problem import KERNEL_DTYPES, SeparableConv2dProblem
from .schedule import PATHS, Schedule, candidates, estimate, supports

#: PyTorch's convolutions are called only where they are estimated to be faster by this factor: the estimates are rough.
TORCH_MARGIN = 1.5
#: And by more than this many microseconds: less is lost among launches.
TORCH_LEAST_US = 6.0


@dataclass(frozen=True)
class Plan:
    """What runs a problem and why. `schedule` is None on path "torch"."""

    path: str
    schedule: Schedule | None
    reason: str


@lru_cache(maxsize=4096)
def plan(problem: SeparableConv2dProblem, arch: str, path: str | None = None) -> Plan:
    """Choose a path (or take the one asked for) and its best schedule.

    Raises Unsupported if the path asked for cannot run this problem, ValueError for unknown names.
    """
    if path == "torch":
        return Plan("torch", None, "asked for")
    if path is not None:
        if not (support := supports(problem, path, arch)):
            raise Unsupported(f"path {path}: {support.reason}")
        return Plan(path, candidates(problem, arch, path)[0], "asked for")
    if problem.dtype not in KERNEL_DTYPES:
        return Plan("torch", None, f"dtype {problem.dtype} has no kernels")

    estimates, refused = {}, []
    for name in PATHS:
        if support := supports(problem, name, arch):
            estimates[name] = f"path {name} at {estimate(problem, candidates(problem, arch, name)[0], arch):.0f} us"
        else:
            refused.append(f"path {name} cannot run it ({support.reason})")
    if not estimates:
        return Plan("torch", None, "; ".join(refused))
    kernel, eager_us = candidates(problem, arch)[0], torch_us(problem)
    times = [*estimates.values(), f"PyTorch's two convolutions at {eager_us:.0f} us"]
    reason = "; ".join([f"estimates: {', '.join(times)}", *refused])
    if estimate(problem, kernel, arch) > max(eager_us * TORCH_MARGIN, eager_us + TORCH_LEAST_US):
        return Plan("torch", None, reason)
    return Plan(kernel.path, kernel, reason)
