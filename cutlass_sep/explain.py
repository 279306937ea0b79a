"""What a call would run and why, and building it ahead of the call."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from . import arch as archs
from . import dispatch, functional, planner
from .block_schedule import BlockSchedule
from .log import logger
from .module import SeparableModule
from .op import Operation
from .operators import OPERATORS, lowered
from .problem import Problem
from .schedule import Schedule, Support


@dataclass(frozen=True)
class Explanation:
    """path: "sm90", "portable" or "torch". reason: why that one. schedule: None on path "torch".

    form: "fused" or "two_kernel" of a block, None on path "torch" and in 2-D. tuned: the pick was timed by `tune`.
    """

    path: str
    reason: str
    schedule: Schedule | BlockSchedule | None
    form: str | None = None
    tuned: bool = False


def explain(f: Any, *args: Any, **kwargs: Any) -> Explanation:
    """What `f(*args, **kwargs)` would run; builds and launches nothing. f: a function, module or `op` of this package.

    Meta tensors are planned for the default architecture. TypeError for any other f.
    """
    if isinstance(f, Operation):
        return Explanation(f.path, f.reason, f.schedule, f.form, f.tuned)
    if isinstance(f, SeparableModule) and (reason := f.plain_reason()) is not None:
        return Explanation("torch", reason, None)
    problem, device = problem_of_call(f, args, kwargs)
    try:
        plan = dispatch.choose(problem, device)
    except dispatch.UNAVAILABLE as error:
        return Explanation("torch", str(error), None)
    return Explanation(plan.path, plan.reason, plan.schedule, plan.form, plan.tuned)


def warmup(f: Any, *args: Any, **kwargs: Any) -> None:
    """Build and load what `f(*args, **kwargs)` would need, so that the call itself neither waits nor builds.

    f as in `explain`; an `op` needs no arguments. On meta tensors (or for an op without its GPU) the cubin is built and
    cached, not loaded. Where the call would run PyTorch's convolutions there is nothing to build: that is logged
    (level info), and for a call on the CPU, likely of tensors that were not moved yet, a RuntimeWarning. Raises what
    keeps the kernel from being built, also where the call would fall back.
    """
    if isinstance(f, Operation):
        if f.path == "torch":
            _log_nothing(f.reason)
            return
        f.compile()
        x = args[0] if args else kwargs.get("x")
        if isinstance(x, torch.Tensor) and x.is_cuda:
            f.kernel.load(x.device.index)
        return
    if isinstance(f, SeparableModule) and (reason := f.plain_reason()) is not None:
        _log_nothing(reason)
        return
    problem, device = problem_of_call(f, args, kwargs)
    plan = dispatch.choose(problem, device)
    if plan.path == "torch":
        if device.type not in ("cuda", "meta"):
            advice = "x must be on a CUDA device, or on 'meta' to build ahead of it"
            warnings.warn(f"warmup builds nothing: {plan.reason}; {advice}", RuntimeWarning, stacklevel=2)
        else:
            _log_nothing(plan.reason)
        return
    from . import kernel

    if device.type == "cuda":
        kernel.kernel_for(problem, device.index, plan).load(device.index)
    else:
        kernel.make(problem, plan.schedule, archs.default()).cubin  # noqa: B018


def _log_nothing(reason: str) -> None:
    logger.info("warmup builds nothing: %s", reason)


def supports(op_or_problem: Operation | Problem, path: str, arch: str, form: str | None = None) -> Support:
    """Whether `path` ("sm90", "portable" or "torch") can run this problem on `arch`; `.reason` says why not.

    form: of the block, "fused" or "two_kernel"; None for any. ValueError for unknown paths, forms and architectures,
    TypeError for anything but an op or a problem.
    """
    problem = op_or_problem.problem if isinstance(op_or_problem, Operation) else op_or_problem
    if not isinstance(problem, Problem):
        kind = type(op_or_problem).__name__
        raise TypeError(f"op_or_problem must be an op or a problem of cutlass_sep, got a {kind}")
    archs.check(arch)
    planner.check_form(problem, form)
    if path != "torch":
        return planner.supports(problem, path, arch, form)
    return Support(True) if form is None else Support(False, "path torch has no forms")


def problem_of_call(f: Any, args: tuple, kwargs: dict) -> tuple[Problem, torch.device]:
    """The problem of `f(*args, **kwargs)`, f a function or module of this package, and the device it runs on."""
    if isinstance(f, SeparableModule):
        operator = f.op.operator
        tensors, options = f.call(*args, **kwargs)
    else:
        operator = next((o for o in OPERATORS if f is getattr(functional, o.name)), None)
        if operator is None:
            raise TypeError(f"f must be a function, module or op of cutlass_sep, got {f!r}")
        # As the call itself would take them: an argument too many, too few or given twice raises TypeError.
        bound = inspect.signature(f).bind(*args, **kwargs)
        bound.apply_defaults()
        tensors = tuple(bound.arguments[name] for name in operator.tensors)
        options = tuple(bound.arguments[name] for name in operator.options)
    x = tensors[0]
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)

        def lower(tensor: torch.Tensor) -> torch.Tensor:
            """What the cast would give, as a meta tensor: same layout, a fresh (aligned) address."""
            return lowered(tensor.to("meta"), "meta", dtype)

        operator.check(tuple(lower(t) if isinstance(t, torch.Tensor) else t for t in tensors), options)
        tensors, options, _ = operator.cast(tensors, options, lower)
    return operator.describe(tensors, options), x.device
