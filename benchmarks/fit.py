"""Fit the constants of cutlass_sep/estimate.py to timed schedules, and say how well they meet them.

    python benchmarks/fit.py --seconds 60     # a random search from the constants as they are; prints better ones
    python benchmarks/fit.py --seconds 0      # only how well the constants as they are meet the times

The times are those of `bench --tune` in benchmarks/results/h200.json, of the kernels as they are, and those of
benchmarks/results/h200.trials.jsonl, taken while developing, with kernels a little older: for a layer at one dtype,
layout and batch, microseconds of a call and the values of the schedule's fields, and of PyTorch's convolutions in this
layout and in the other one. In the latter, kernels whose depthwise stage runs on tensor cores had their weights packed
by a launch before, which their estimates here have in addition. Every third layer is left out of the fit.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
TRIALS = BENCHMARKS / "results" / "h200.trials.jsonl"
RESULTS = BENCHMARKS / "results" / "h200.json"
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS)]

from planner import GOOD, left_out  # noqa: E402

from cutlass_sep import estimate, planner  # noqa: E402
from cutlass_sep.bench import inputs, results  # noqa: E402
from cutlass_sep.block_schedule import BlockSchedule, FusedGeometry, FusedTile  # noqa: E402
from cutlass_sep.direct import DirectGeometry  # noqa: E402
from cutlass_sep.planes import PlaneGeometry  # noqa: E402
from cutlass_sep.problem import Problem  # noqa: E402
from cutlass_sep.schedule import PORTABLE_MARGIN, Geometry, Schedule, packs  # noqa: E402

ARCH = "sm_90a"
#: What is fitted for each kind of kernel; constants that hold by arithmetic or by a measurement of their own are not.
#: "diagonal" is path sm90 with the depthwise stage on tensor cores; "planes" and "direct" (by
#: FMA) where that is a kernel of its own.
CONSTANTS = {
    "sm90": (
        "_RUN", "_LATENCY", "_COPY", "_ROW", "_ITEM", "_STAGE", "_WAIT", "_STEP", "_MMA_WAIT", "_WAVEFRONT",
        "OVERLAPPED_US",
    ),
    "diagonal": ("_MARCH", "_SPLIT"),
    "portable": ("_PORTABLE_ISSUE", "_PORTABLE_SHARED", "_PORTABLE_GLOBAL", "_PORTABLE_ALONE", "_PORTABLE_CHUNK"),
    "planes": ("_PLANE_MMA", "_PLANE_WAVEFRONT", "_PLANE_TILE", "_FEW_WARPS", "_PLANE_COPY"),
    "direct": (
        "_DIRECT_OUTPUT", "_DIRECT_LOAD", "_DIRECT_UNIT", "_DIRECT_TABLE", "_DIRECT_ISSUE", "_DIRECT_WAVEFRONT",
        "_DIRECT_LATENCY", "_DIRECT_STEP", "_DIRECT_MISSES", "_DIRECT_SHARE", "_DIRECT_START", "_DIRECT_TAIL",
        "_SHARED_X_TENSOR", "_SHARED_X_BYTES", "_SHARED_X_ITEM", "_SHARED_X_OUTPUT", "BEHIND_US",
    ),
    "fused": ("_FUSED_CHUNK", "_FUSED_TENSOR", "_FUSED_DEPTHWISE"),
    "fused fp32": ("_FUSED_FMA", "_FUSED_TAP", "_FUSED_OUTPUT"),
}  # fmt: skip
#: Kinds whose constants are fitted together.
TOGETHER = (("sm90", "diagonal"), ("portable",), ("planes",), ("direct",), ("fused",), ("fused fp32",))
#: An error of this size, in its logarithm, is where outliers begin: they count in proportion, not squared.
_SMALL = 0.05
#: Share of an estimate's own error beside that of its order among a case's, which decides what is picked.
_LEVEL = 0.15
#: Schedules slower than the best of a case by this factor count 1/e of it.
_SLOWER = 1.35


@dataclass(frozen=True)
class Trial:
    """One timed call: `estimated` gives the microseconds by the present constants. Trials of a `case` are compared."""

    layer: str
    tensors: str  # data type, precision and layout
    case: int
    kind: str
    estimated: Callable[[], float]
    microseconds: float

    @property
    def error(self) -> float:
        return math.log(self.microseconds / self.estimated())


def trials() -> list[Trial]:
    """All trials of kernels in both files, the older ones first."""
    layers = {case.id: case for case in inputs.layers(BENCHMARKS / "layers.jsonl")[0]}
    layers |= {case.id: case for case in (inputs.lead(), inputs.lead1d())}
    timed = []
    for line in TRIALS.read_text().splitlines():
        row = json.loads(line)
        case = inputs.variant(layers[row["id"]], row["dtype"], row["layout"], row["fp32_precision"])
        schedules = [(us, _block(f) if f[0] in ("fused", "two_kernel") else _separable(f)) for us, f in row["trials"]]
        timed.append((row["id"], replace(case.problem, n=row["batch"]), schedules))
    older = len(timed)
    for row in results.load(RESULTS)["rows"]:
        if tried := [trial for trial in row.get("trials", ()) if trial["schedule"] is not None]:
            problem = results.problem_of(row)
            read = planner.schedule_type(problem).from_json
            timed.append((row["id"], problem, [(1e3 * t["median_ms"], read(t["schedule"])) for t in tried]))
    return [
        Trial(layer, _tensors(problem), case, *_estimate(problem, schedule, packed=case < older), us)
        for case, (layer, problem, schedules) in enumerate(timed)
        for us, schedule in schedules
    ]


def _tensors(problem: Problem) -> str:
    return " ".join(filter(None, (problem.dtype, problem.fp32_precision, problem.layout)))


def _separable(fields: list[Any]) -> Schedule:
    """Counts, three flags, mma_q; rows of before there were the last two leave them out."""
    return Schedule(*fields[:9], *map(bool, fields[9:12]), *fields[12:])


def _kind(schedule: Schedule) -> str:
    return "diagonal" if schedule.mma_q else schedule.path


def _block(fields: list[Any]) -> BlockSchedule:
    form, path, *parts = fields
    if form == "fused":
        return BlockSchedule(form, path, tile=FusedTile(*parts[0]))
    return BlockSchedule(form, path, *map(_separable, parts))


def _estimate(problem: Problem, schedule: Schedule | BlockSchedule, *, packed: bool) -> tuple[str, Callable[[], float]]:
    """(what kind of kernel, its estimate): the geometry is computed once, the constants are read at each call.

    packed: whether a launch packs the weights of kernels that no longer need that.
    """
    if isinstance(schedule, Schedule):
        return _half(problem, schedule, packed)
    if schedule.form == "fused":
        fused = FusedGeometry(problem, schedule.tile)
        return "fused fp32" if fused.scaled else "fused", lambda: estimate.fused_us(fused)
    (_, first), (kind, second) = (
        _half(half, part, packed)
        for half, part in ((problem.expand, schedule.expand), (problem.project, schedule.project))
    )
    once = packed or packs(problem.expand, schedule.expand) and packs(problem.project, schedule.project)
    shared = lambda: estimate.SHARED_US + estimate.PACKING_US * once  # noqa: E731
    return kind, lambda: first() + second() - shared()


def _half(problem: Problem, schedule: Schedule, packed: bool) -> tuple[str, Callable[[], float]]:
    """The same of a separable convolution."""
    if not schedule.apart:
        return _kind(schedule), _of_geometry(Geometry(problem, schedule), packed)
    pointwise = _of_geometry(Geometry(problem.pointwise, schedule.pointwise), packed)
    if schedule.plane_rows:
        planes = PlaneGeometry(problem, schedule)
        return "planes", lambda: estimate.planes_us(planes) + pointwise()
    direct = DirectGeometry(problem, schedule)
    return "direct", lambda: estimate.direct_us(direct) - estimate.BEHIND_US + pointwise()


def _of_geometry(geometry: Geometry, packed: bool) -> Callable[[], float]:
    if geometry.schedule.shared_x:
        return lambda: estimate.pointwise_us(geometry)
    if geometry.schedule.path == "sm90":
        return lambda: estimate.sm90_us(geometry) + estimate.PACKING_US * (packed and not geometry.pack_blocks)
    return lambda: estimate.portable_us(geometry, ARCH)


def loss(chosen: list[Trial]) -> float:
    """Mean of the errors, as outliers count: of each estimate, and, more, of its order among those of its case."""
    cases: dict[int, list[Trial]] = {}
    for trial in chosen:
        cases.setdefault(trial.case, []).append(trial)
    total = 0.0
    for tried in cases.values():
        best = min(trial.microseconds for trial in tried)
        weights = [math.exp((1 - trial.microseconds / best) / (_SLOWER - 1)) for trial in tried]
        errors = [trial.error for trial in tried]
        mean = sum(map(operator.mul, weights, errors)) / sum(weights)
        for weight, error in zip(weights, errors, strict=True):
            total += weight * (_size(error - mean) + _LEVEL * _size(error))
    return total / len(chosen)


def _size(error: float) -> float:
    """The square of a small error, and proportional to a large one."""
    return _SMALL * (math.hypot(error, _SMALL) - _SMALL)


def fit(chosen: list[Trial], names: tuple[str, ...], seconds: float, seed: int = 0) -> dict[str, float]:
    """Constants of `estimate` that meet the trials better, which it then has."""
    draw, constants = random.Random(seed), vars(estimate)
    best, steps = loss(chosen), dict.fromkeys(names, 0.2)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name = draw.choice(names)
        before = constants[name]
        constants[name] = before * math.exp(draw.gauss(0, steps[name]))
        if (now := loss(chosen)) < best:
            best, steps[name] = now, min(0.5, 1.3 * steps[name])
        else:
            constants[name], steps[name] = before, max(0.02, 0.95 * steps[name])
    return {name: constants[name] for name in names}


def show(found: list[Trial], others: set[str]) -> None:
    """Of those fitted and of those left out: mean and standard deviation of the errors; then how often the schedule
    with the best estimate among a case's trials takes at most 5 % longer than the fastest one.
    """
    sets = {
        "fitted": [trial for trial in found if trial.layer not in others],
        "left out": [trial for trial in found if trial.layer in others],
    }
    for kind in CONSTANTS:
        for title, chosen in sets.items():
            errors = [trial.error for trial in chosen if trial.kind == kind]
            text = f"{kind:9} {title:9} {len(errors):5} trials, {100 * statistics.fmean(errors):+5.1f} %"
            print(f"{text} on average, standard deviation {100 * statistics.pstdev(errors):.0f} %")
    for tensors in sorted({trial.tensors for trial in found}):
        for title, chosen in sets.items():
            if losses := first_choices([trial for trial in chosen if trial.tensors == tensors]):
                good = sum(lost <= GOOD for lost in losses) / len(losses)
                print(f"{tensors:28} {title:9} {len(losses):5} cases, first choice good in {100 * good:.0f} %")


def first_choices(chosen: list[Trial]) -> list[float]:
    """Of each case with several trials, the time of the best estimate's over the shortest."""
    cases: dict[int, list[Trial]] = {}
    for trial in chosen:
        cases.setdefault(trial.case, []).append(trial)
    found = []
    for tried in cases.values():
        if len(tried) > 1:
            first = min(tried, key=lambda t: t.estimated() * (PORTABLE_MARGIN if t.kind == "portable" else 1))
            found.append(first.microseconds / min(trial.microseconds for trial in tried))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of search for each kind of kernel")
    seconds = parser.parse_args().seconds
    found = trials()
    others = left_out(trial.layer for trial in found)
    show(found, others)
    if seconds > 0:
        for kinds in TOGETHER:
            chosen = [trial for trial in found if trial.kind in kinds and trial.layer not in others]
            names = tuple(name for kind in kinds for name in CONSTANTS[kind])
            for name, value in fit(chosen, names, seconds).items():
                print(f"{name} = {value:.3g}")
        show(found, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
