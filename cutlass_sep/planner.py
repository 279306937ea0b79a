"""The planner: which path, form and schedule run a problem, decided from the shapes alone.

A layer's kernels are the best ones of a few typical sizes, so that many sizes need few builds. Which of them is fastest
for the size at hand, and whether PyTorch's convolutions are faster, is estimated: that costs no build.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from . import block_schedule, kept
from . import schedule as separable_schedule
from .block_schedule import FORMS, BlockSchedule
from .errors import Unsupported
from .estimate import torch_us
from .problem import KERNEL_DTYPES, Problem, SeparableBlock1dProblem
from .schedule import PATHS, Schedule, Support

#: PyTorch's convolutions are called only where they are estimated to be faster by this factor: the estimates are rough.
TORCH_MARGIN = 1.1
#: And by more than this many microseconds: less is lost among launches.
TORCH_LEAST_US = 6.0
#: A plan that took less than this is not kept for other processes, in seconds: it is one of a layer whose schedules are
#: known to this process by now, and layers have any number of sizes.
KEEP_SECONDS = 0.02


@dataclass(frozen=True)
class Plan:
    """What runs a problem and why. `schedule` is None on path "torch"; `tuned`: timed by `tune`, not estimated.

    kernel: where PyTorch's convolutions are estimated to be faster, the best kernel's schedule.
    """

    path: str
    schedule: Schedule | BlockSchedule | None
    reason: str
    tuned: bool = False
    kernel: Schedule | BlockSchedule | None = None

    @property
    def form(self) -> str | None:
        """The block's form; None on path "torch" and for the 2-D operator (see `Schedule.apart`)."""
        return getattr(self.schedule, "form", None)

    def to_json(self) -> dict[str, Any]:
        """What `read` makes this plan of again, but for `tuned`."""
        schedules = {"schedule": self.schedule, "kernel": self.kernel}
        return {"reason": self.reason} | {k: None if s is None else s.to_json() for k, s in schedules.items()}


def read(problem: Problem, arch: str, data: bytes, *, tuned: bool = False) -> Plan | None:
    """The plan whose `to_json` is in `data`; None if that is no such text, or if a schedule of it is not legal here."""
    try:
        record = json.loads(data)
        found = [record["schedule"], record["kernel"]]
        schedule, kernel = (None if s is None else schedule_type(problem).from_json(s) for s in found)
        reason = record["reason"]
    except (ValueError, KeyError, TypeError):
        return None
    if not all(rules(problem).check(problem, s, arch) for s in (schedule, kernel) if s is not None):
        return None
    return Plan("torch" if schedule is None else schedule.path, schedule, reason, tuned, kernel)


def rules(problem: Problem) -> ModuleType:
    """The module of this problem's schedules: `check`, `estimate` and the like."""
    return block_schedule if isinstance(problem, SeparableBlock1dProblem) else separable_schedule


def schedule_type(problem: Problem) -> type[Schedule] | type[BlockSchedule]:
    """The class of this problem's schedules."""
    return BlockSchedule if isinstance(problem, SeparableBlock1dProblem) else Schedule


def check_form(problem: Problem, form: str | None) -> None:
    """Raise ValueError unless `form` is None or one that the operator has."""
    if form is not None and not isinstance(problem, SeparableBlock1dProblem):
        raise ValueError(f"form={form!r}: only the 1-D block has forms")
    if form not in (None, *FORMS):
        raise ValueError(f"form={form!r} is unknown; it must be None or one of {', '.join(map(repr, FORMS))}")


def supports(problem: Problem, path: str, arch: str, form: str | None = None) -> Support:
    """Whether `path` has a kernel (of `form`, if given) for `problem` on `arch`, and if not, why not."""
    check_form(problem, form)
    support = rules(problem).supports(problem, path, arch, *(() if form is None else (form,)))
    if support and not candidates(problem, arch, path, form):
        return Support(False, "no schedule of the layer's typical sizes can run it")
    return support


def candidates(problem: Problem, arch: str, path: str | None = None, form: str | None = None) -> list:
    """Legal schedules, of one path and form or of all, best first."""
    check_form(problem, form)
    return rules(problem).candidates(problem, arch, path, *(() if form is None else (form,)))


def contenders(problem: Problem, arch: str, count: int) -> list:
    """The schedule that a call would take, and those with the best estimates for this very size: `count` in all."""
    found = dict.fromkeys([*candidates(problem, arch)[:1], *rules(problem).for_size(problem, arch)])
    return [schedule for schedule in found if rules(problem).check(problem, schedule, arch)][:count]


def planned(problem: Problem, arch: str, path: str | None = None, form: str | None = None) -> Plan:
    """`plan`, out of the disk cache if an earlier process took its time for it."""
    if path == "torch" or problem.dtype not in KERNEL_DTYPES:
        return plan(problem, arch, path, form)
    arguments = {"op": problem.op, "problem": problem.to_json(), "arch": arch, "path": path, "form": form}
    data = kept.load(".plan", problem.op, arguments, kept.PACKAGE)
    if data is not None and (known := read(problem, arch, data)) is not None:
        return known
    start = time.perf_counter()
    made = plan(problem, arch, path, form)
    if time.perf_counter() - start > KEEP_SECONDS:
        kept.keep(".plan", problem.op, arguments, json.dumps(made.to_json()).encode(), kept.PACKAGE)
    return made


@lru_cache(maxsize=4096)
def plan(problem: Problem, arch: str, path: str | None = None, form: str | None = None) -> Plan:
    """Choose a path and a form (or take those asked for) and their best schedule.

    Raises Unsupported if what is asked for cannot run this problem, ValueError for unknown names and for a form of path
    "torch".
    """
    check_form(problem, form)
    if path == "torch":
        if form is not None:
            raise ValueError(f"form={form!r} contradicts path='torch', which has no forms")
        return Plan("torch", None, "asked for")
    if path is not None or form is not None:
        refused = []
        for name in PATHS if path is None else (path,):
            if not (support := supports(problem, name, arch, form)):
                refused.append(f"path {name}: {support.reason}")
        if not (legal := candidates(problem, arch, path, form)):
            raise Unsupported("; ".join(refused))
        return Plan(legal[0].path, legal[0], "asked for")
    if problem.dtype not in KERNEL_DTYPES:
        return Plan("torch", None, f"dtype {problem.dtype} has no kernels")

    found, estimates, refused = candidates(problem, arch), [], []
    for name in PATHS:
        if not (support := supports(problem, name, arch)):
            refused.append(f"path {name} cannot run it ({support.reason})")
            continue
        for each in FORMS if isinstance(problem, SeparableBlock1dProblem) else (None,):
            kind = f"path {name}" + (f" {each}" if each else "")
            if support := supports(problem, name, arch, each):
                # Of what is taken, the schedule taken: the best one of a path and form alone may be another.
                taken = (found[0].path, getattr(found[0], "form", None)) == (name, each)
                best = found[0] if taken else candidates(problem, arch, name, each)[0]
                if getattr(getattr(best, "project", None) or best, "apart", False):
                    kind += f" in {'three' if each else 'two'} kernels"
                estimates.append(f"{kind} {rules(problem).estimate(problem, best, arch):.0f} us")
            elif name == PATHS[0]:  # the other path has but one form
                refused.append(f"{kind} cannot run it ({support.reason})")
    if not estimates:
        return Plan("torch", None, "; ".join(refused))
    kernel, (count, eager_us) = found[0], _eager(problem)
    times = [*estimates, f"PyTorch's {count} convolutions {eager_us:.0f} us"]
    reason = "; ".join([f"estimates: {', '.join(times)}", *refused])
    if rules(problem).estimate(problem, kernel, arch) > max(eager_us * TORCH_MARGIN, eager_us + TORCH_LEAST_US):
        return Plan("torch", None, reason, kernel=kernel)
    return Plan(kernel.path, kernel, reason)


def _eager(problem: Problem) -> tuple[str, float]:
    """PyTorch's convolutions in the place of a kernel: how many, and the estimated microseconds of a call."""
    if isinstance(problem, SeparableBlock1dProblem):
        return "three", torch_us(problem.expand) + torch_us(problem.project)
    return "two", torch_us(problem)
