"""Tuning: the schedules with the best estimates, and PyTorch's convolutions, timed for one problem on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import arch as archs
from . import cache, dispatch, operators, planner, tuned
from .bench import accuracy, inputs, timing
from .block_schedule import BlockSchedule
from .console import Output
from .errors import CompileError, Unsupported
from .explain import problem_of_call
from .kernel import Kernel, kernel_for
from .log import logger
from .module import SeparableModule
from .op import Operation
from .planner import Plan
from .problem import KERNEL_DTYPES, Problem, laid_out, strides_of
from .schedule import Schedule

#: Schedules that are timed.
CONTENDERS = 8
_SAMPLES = 15


@dataclass(frozen=True)
class Trial:
    """One candidate and its median time of a call; `schedule` is None for PyTorch's convolutions."""

    path: str
    schedule: Schedule | BlockSchedule | None
    median_ms: float

    def to_json(self) -> dict[str, Any]:
        schedule = self.schedule.to_json() if self.schedule else None
        return {"path": self.path, "schedule": schedule, "median_ms": self.median_ms}


@dataclass(frozen=True)
class Tuned:
    """The candidates that were timed, fastest first, and the pick that calls of this problem now take."""

    trials: tuple[Trial, ...]
    pick: Plan


def tune(f: Any, *args: Any, **kwargs: Any) -> Tuned:
    """Time what could run `f(*args, **kwargs)` on its device, on fresh data; later calls like it take the winner.

    f: a function or module of this package. The pick is kept in the disk cache for this problem, GPU, driver and
    package versions; `explain` shows it, `cutlass-sep cache clear` removes it. Builds up to 8 kernels, seconds each.

    Raises TypeError for any other f, RuntimeError for tensors that are not on a CUDA device, Unsupported where nothing
    can be chosen: dtypes without kernels, an empty batch, a module whose children are called the plain way;
    EnvironmentProblem where the disk cache keeps nothing.
    """
    if isinstance(f, Operation):
        raise TypeError("an op keeps its schedule; tune the function or the module, then make the op")
    if isinstance(f, SeparableModule) and (reason := f.plain_reason()) is not None:
        raise Unsupported(f"nothing to tune: {reason}")
    problem, device = problem_of_call(f, args, kwargs)
    if device.type != "cuda":
        raise RuntimeError(f"x must be on a CUDA device to be tuned for it, got {device}")
    if problem.dtype not in KERNEL_DTYPES or problem.n == 0:
        reason = "the batch is empty" if problem.n == 0 else f"dtype {problem.dtype} has no kernels"
        raise Unsupported(f"nothing to tune: {reason}")
    cache.require("tune cannot keep its pick")
    output = Output(as_json=True)
    schedules = contenders(problem, device)
    with output.working("compiling", total=len(schedules)) as advance:
        candidates = compiled(problem, schedules, device, advance)
    with output.working("timing"):
        return choose(problem, candidates, device)


def contenders(problem: Problem, device: torch.device) -> list:
    """The schedules worth timing."""
    return planner.contenders(problem, archs.of_device(device.index), CONTENDERS)


def compiled(
    problem: Problem, schedules: Sequence, device: torch.device, advance: Callable[[], None] = lambda: None
) -> dict:
    """{schedule: a callable of the problem's tensors} of all that can be built, and of path "torch" under None."""
    operator = operators.of(problem)
    options, strides = operator.options_of(problem), strides_of(problem.y_shape, problem.layout)

    def convolutions(*tensors: torch.Tensor | None) -> torch.Tensor:
        return laid_out(operator.forward(*tensors, *options), problem.layout)

    def launched(kernel: Kernel, *tensors: torch.Tensor | None) -> torch.Tensor:
        y = tensors[0].new_empty_strided(problem.y_shape, strides)
        kernel.launch(tensors, y, dispatch.addresses_of(tensors))
        return y

    found: dict = {None: convolutions}
    for schedule in schedules:
        try:
            kernel = kernel_for(problem, device.index, Plan(schedule.path, schedule, "to be timed"))
            kernel.load(device.index)
            found[schedule] = partial(launched, kernel)
        except CompileError as error:
            logger.warning("not timed: %s", error)
        advance()
    return found


def choose(problem: Problem, candidates: dict, device: torch.device) -> Tuned:
    """Check and time the candidates, keep the winner, and let later calls take it."""
    # With torch's flags as they are: path torch takes precision from the problem, and cudnn.benchmark from the user.
    with torch.cuda.device(device), torch.no_grad():
        sets = timing.rotation(problem.bytes, torch.cuda.get_device_properties(device).L2_cache_size)
        drawn = inputs.input_sets(problem, sets, device)
        outputs = {name: call(*drawn[0]) for name, call in candidates.items()}
        verdicts = accuracy.judge(problem, drawn[0], outputs)
        del outputs
        right = {}
        for schedule, call in candidates.items():
            if schedule is None or verdicts[schedule].ok:
                right[schedule] = timing.Candidate(lambda i, call=call: call(*drawn[i]))
            else:
                logger.warning("not timed, its values are wrong (%s): %s", verdicts[schedule], schedule)
        times = timing.interleaved(right, sets=sets, samples=_SAMPLES, device=device)
    trials = sorted(
        (Trial("torch" if s is None else s.path, s, t.median_ms) for s, t in times.items()), key=lambda t: t.median_ms
    )
    beside = ", ".join(f"{trial.path} {1e3 * trial.median_ms:.1f}" for trial in trials)
    reason = f"tuned on {torch.cuda.get_device_name(device)}; us: {beside}"
    pick = Plan(trials[0].path, trials[0].schedule, reason, tuned=True)
    tuned.keep(problem, device, pick)
    dispatch.clear()
    return Tuned(tuple(trials), pick)
