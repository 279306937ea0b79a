"""Schedules of the 1-D block: which form and tiles run a problem, and which are legal.

The two-kernel form is two kernels of the separable operator on maps of one row: a pointwise one, and one whose
depthwise stage reads the hidden channels that the first left in the workspace (so that its zero padding is that of the
hidden channels), with the residual in its epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import arch as archs
from . import schedule as separable
from .problem import KERNEL_DTYPES, SeparableBlock1dProblem
from .schedule import PATHS, Schedule, Support

if TYPE_CHECKING:
    from cutlass_library import TileDescription

FORMS = ("fused", "two_kernel")
#: Of each of the two kernels, how many of the best schedules are combined.
_EACH = 3


@dataclass(frozen=True)
class BlockSchedule:
    """One way to run a block: in the two-kernel form, a schedule for each kernel."""

    form: str
    path: str
    expand: Schedule | None = None
    project: Schedule | None = None

    def to_json(self) -> dict[str, Any]:
        parts = {"expand": self.expand, "project": self.project}
        return {"form": self.form, "path": self.path} | {k: v.to_json() for k, v in parts.items() if v is not None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BlockSchedule:
        """The schedule that `to_json` wrote. ValueError for anything else; values are unchecked."""
        try:
            parts = {k: Schedule.from_json(v) if k in ("expand", "project") else v for k, v in data.items()}
            return cls(**parts)
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"schedule must be a dict as BlockSchedule.to_json writes; got {data!r} ({error})"
            ) from None

    def tile_description(self, problem: SeparableBlock1dProblem) -> TileDescription:
        """The tile of the second GEMM as CUTLASS describes it, for `problem`'s data type."""
        return self.project.tile_description(problem.project)


def supports(problem: SeparableBlock1dProblem, path: str, arch: str, form: str | None = None) -> Support:
    """Whether `path` has a kernel of `form` (None: of any) for `problem` on `arch`, and if not, why not.

    Raises ValueError for a path, a form or an arch that does not exist.
    """
    if path not in PATHS:
        known = ", ".join(map(repr, PATHS))
        raise ValueError(f"path={path!r} is unknown; it must be one of {known} here ('torch' always runs)")
    if form not in (None, *FORMS):
        raise ValueError(f"form={form!r} is unknown; it must be None or one of {', '.join(map(repr, FORMS))}")
    archs.check(arch)
    if problem.dtype not in KERNEL_DTYPES:
        return Support(False, f"dtype {problem.dtype} has no kernels")
    if form == "fused":
        return Support(False, "the fused form is not there yet")
    for name, half in (("expand", problem.expand), ("project", problem.project)):
        if not (support := separable.supports(half, path, arch)):
            return Support(False, f"kernel {name}: {support.reason}")
    return Support(True)


def check(problem: SeparableBlock1dProblem, schedule: BlockSchedule, arch: str) -> Support:
    """Whether this schedule can run this problem on `arch`, and if not, why not."""
    if schedule.form not in FORMS:
        return Support(False, f"form={schedule.form!r} must be one of {', '.join(map(repr, FORMS))}")
    for name, half in (("expand", problem.expand), ("project", problem.project)):
        part = getattr(schedule, name)
        if not isinstance(part, Schedule) or part.path != schedule.path:
            return Support(False, f"{name} must be a schedule of path {schedule.path}, got {part!r}")
        if not (support := separable.check(half, part, arch)):
            return Support(False, f"kernel {name}: {support.reason}")
    return Support(True)


def candidates(
    problem: SeparableBlock1dProblem, arch: str, path: str | None = None, form: str | None = None
) -> list[BlockSchedule]:
    """Legal schedules (of one path and form, or of all), best first by `estimate`."""
    paths = [name for name in PATHS if path in (None, name) and supports(problem, name, arch, form)]
    found = [schedule for name in paths for schedule in _two_kernel(problem, name, arch)]
    return sorted(found, key=lambda schedule: estimate(problem, schedule, arch))


def _two_kernel(problem: SeparableBlock1dProblem, path: str, arch: str) -> list[BlockSchedule]:
    halves = (separable.candidates(half, arch, path)[:_EACH] for half in (problem.expand, problem.project))
    expands, projects = halves
    return [BlockSchedule("two_kernel", path, expand, project) for project in projects for expand in expands]


def estimate(problem: SeparableBlock1dProblem, schedule: BlockSchedule, arch: str) -> float:
    """Estimated microseconds of a call on a large GPU: for choosing, not for predicting."""
    halves = ((problem.expand, schedule.expand), (problem.project, schedule.project))
    return sum(separable.estimate(separable.representative(half), part, arch) for half, part in halves)
