"""What a call would run and why, and building it ahead of the call."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from . import arch as archs
from . import dispatch, functional, schedule
from .module import DepthwiseSeparableConv2d
from .op import DepthwiseSeparableConv2d as Operation
from .problem import SeparableConv2dProblem
from .schedule import Schedule, Support
from .torch_ops import autocast


@dataclass(frozen=True)
class Explanation:
    """path: "sm90", "portable" or "torch". reason: why that one. schedule: None on path "torch". form: None in 2-D."""

    path: str
    reason: str
    schedule: Schedule | None
    form: str | None = None


def explain(f: Any, *args: Any, **kwargs: Any) -> Explanation:
    """What `f(*args, **kwargs)` would run; builds and launches nothing. f: a function, module or `op` of this package.

    Meta tensors are planned for the default architecture. TypeError for any other f.
    """
    if isinstance(f, Operation):
        return Explanation(f.path, f.reason, f.schedule)
    if isinstance(f, DepthwiseSeparableConv2d) and (reason := f.plain_reason()) is not None:
        return Explanation("torch", reason, None)
    problem, device = _problem(f, args, kwargs)
    try:
        plan = dispatch.choose(problem, device)
    except dispatch.UNAVAILABLE as error:
        return Explanation("torch", str(error), None)
    return Explanation(plan.path, plan.reason, plan.schedule)


def warmup(f: Any, *args: Any, **kwargs: Any) -> None:
    """Build and load what `f(*args, **kwargs)` would need, so that the call itself neither waits nor builds.

    f as in `explain`; an `op` needs no arguments. On meta tensors (or for an op without its GPU) the cubin is built and
    cached, not loaded. Raises what keeps the kernel from being built, also where the call would fall back.
    """
    if isinstance(f, Operation):
        if f.path == "torch":
            return
        f.compile()
        x = args[0] if args else kwargs.get("x")
        if isinstance(x, torch.Tensor) and x.is_cuda:
            f.kernel.load(x.device.index)
        return
    if isinstance(f, DepthwiseSeparableConv2d) and f.plain_reason() is not None:
        return
    problem, device = _problem(f, args, kwargs)
    plan = dispatch.choose(problem, device)
    if plan.path == "torch":
        return
    from . import kernel

    if device.type == "cuda":
        kernel.kernel_for(problem, device.index, plan).load(device.index)
    else:
        kernel.Kernel(problem, plan.schedule, archs.default()).cubin  # noqa: B018


def supports(op_or_problem: Operation | SeparableConv2dProblem, path: str, arch: str) -> Support:
    """Whether `path` ("sm90", "portable" or "torch") can run this problem on `arch`; `.reason` says why not.

    ValueError for unknown paths and architectures, TypeError for anything but an op or a problem.
    """
    problem = op_or_problem.problem if isinstance(op_or_problem, Operation) else op_or_problem
    if not isinstance(problem, SeparableConv2dProblem):
        raise TypeError(f"op_or_problem must be an op or a problem of cutlass_sep, got {op_or_problem!r}")
    archs.check(arch)
    return Support(True) if path == "torch" else schedule.supports(problem, path, arch)


def _problem(f: Any, args: tuple, kwargs: dict) -> tuple[SeparableConv2dProblem, torch.device]:
    if isinstance(f, DepthwiseSeparableConv2d):
        args, kwargs = f.call(*args, **kwargs)
    elif f is not functional.depthwise_separable_conv2d:
        raise TypeError(f"f must be a function, module or op of cutlass_sep, got {f!r}")
    # As the call itself would take them: an argument too many, too few or given twice raises TypeError.
    bound = inspect.signature(functional.depthwise_separable_conv2d).bind(*args, **kwargs).arguments
    x = bound["x"]
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        # What the cast would give, as a meta tensor: same layout, a fresh (aligned) address.
        dtype = torch.get_autocast_dtype(x.device.type)
        bound |= {
            name: autocast(value.to("meta"), "meta", dtype)
            for name, value in bound.items()
            if isinstance(value, torch.Tensor)
        }
    return SeparableConv2dProblem.from_tensors(**bound), x.device
