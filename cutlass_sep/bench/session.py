"""A benchmark session: cases one after the other, progress shown, a results file kept up to date after each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from .. import arch as archs
from .. import dispatch, kernel, tuner
from ..console import Output
from ..kernel import Kernel
from ..problem import LAYOUTS, Problem
from . import builds, ceilings, environment, inputs, isolated, overhead, peers, results, runner, startup
from .inputs import Case

#: (dtype, fp32_precision) measured when the arguments name none.
LEAD_VARIANTS = (("float32", "ieee"), ("bfloat16", None), ("float16", None), ("float32", "tf32"))
LAYER_VARIANTS = (("float32", "ieee"), ("bfloat16", None))
SWEEP_VARIANTS = (("bfloat16", None),)
#: What of the environment decides whether a peer that failed would fail again.
_OF_PEERS = ("gpu", "driver", "torch", "cudnn")
#: As many kernels are compiled where they are needed; a pool of processes takes longer to start.
_FEW_KERNELS = 4


@dataclass(frozen=True)
class Request:
    """What to measure. `peers` None: eager, on the lead shapes all. `path`, `forms`, `layouts`, `compiled_layouts`,
    `tune`: as in runner.Plan. `peer_seconds`: time limit of each of isolated.PEERS. `append`: keep the other rows of
    the output file. `resume`: leave out the rows that it has, and the peers that failed.
    """

    cases: Sequence[Case]
    peers: Sequence[str] | None = None
    timings: Sequence[str] = ("events",)
    path: str | None = None
    forms: Sequence[str | None] = (None,)
    layouts: Sequence[str] = LAYOUTS
    compiled_layouts: Sequence[str] = LAYOUTS
    tune: bool = False
    samples: int = 40
    peer_seconds: float = 200
    startup: bool = False
    output: Path | None = None
    append: bool = False
    resume: bool = False


@dataclass
class Finished:
    """The results so far, and sentences about what was refused."""

    results: dict[str, Any]
    measured: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and all(comparison.ok for comparison in self._judged())

    def _judged(self) -> list[runner.Comparison]:
        """The comparisons that have to be good: beside the planner's pick, forms that were forced only inform."""
        picked = {results.pick_key(row) for row in self.measured if not row.get("forced")}
        return [
            c for c in runner.compare(self.measured)
            if not (c.row.get("forced") and results.pick_key(c.row) in picked)
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        named = ("id", "dtype", "layout", "timing")
        slower = [{**{name: c.row[name] for name in named}, "speedup": c.speedup} for c in self._judged() if not c.ok]
        gpu = self.results["environment"]["gpu"]
        return {"ok": self.ok, "gpu": gpu, "problems": self.problems, "slower": slower, "results": self.results}


def run(request: Request, device: torch.device, output: Output) -> Finished:
    """Measure every case and print a table; the output file, if any, is whole after each case."""
    where = environment.describe(device)
    with output.working("measuring the ceilings of this device"):
        limits = ceilings.measure(device)
    finished = Finished(_start(request, where, limits))
    wanted = {case: _wanted(request, case, finished.results, device) for case in request.cases}
    cases = [case for case, rows in wanted.items() if rows]
    here = {case for case in cases if any(impl not in isolated.PEERS for impl, _, _ in wanted[case])}
    kernels = [kernel for case in cases if case in here for kernel in _kernels(request, case, device)]
    if len(kernels) > _FEW_KERNELS:
        with output.working("compiling", total=len({kernel.source for kernel in kernels})) as advance:
            builds.compile_all(kernels, advance)
    apart, progress = isolated.Worker(request.peer_seconds), output.working("measuring", total=len(cases))
    with apart as worker, progress as advance:
        for case in cases:
            plan = runner.Plan(
                peers=[impl for impl in _peers(request, case) if impl not in isolated.PEERS],
                timings=request.timings, path=request.path, forms=request.forms, layouts=request.layouts,
                compiled_layouts=request.compiled_layouts, tune=request.tune, samples=request.samples,
            )  # fmt: skip
            if case in here:
                measured = runner.measure(case, plan, limits, where, device)
                finished.problems += measured.problems
                finished.problems += _drop_drifted(finished.results, measured.rows)
                _add(request, finished, measured.rows)
            for impl, layout, _ in wanted[case]:
                if impl in isolated.PEERS:
                    begin = time.monotonic()
                    alone = replace(plan, compiled_layouts=(layout,))
                    measured = worker.measure(case, impl, alone, limits, where, device)
                    told = _take(request, finished, case, impl, layout, measured, where)
                    output.say(f"{told} ({time.monotonic() - begin:.0f} s)")
            advance(f"{case.id} {case.problem.dtype}")
    if request.startup:
        with output.working("timing starts and calls", total=2) as advance:
            finished.results["startup"] = startup.measure(inputs.lead().problem)
            advance()
            finished.results["overhead_us"] = overhead.measure(device)
            advance()
        _keep(request, finished)
    finished.results["digest"] = results.digest(finished.results["rows"])
    show(finished.measured, output)
    _show_extras(finished.results if request.startup else {}, output)
    for sentence in finished.problems:
        output.warn(sentence)
    return finished


def _start(request: Request, where: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    fresh = {"schema": results.SCHEMA, "digest": "", "environment": where, "ceilings": limits, "rows": []}
    # Appending must not put old numbers under the new digest: rows of kernels that changed since are dropped.
    if not (request.append and request.output and request.output.exists()):
        return fresh
    old = results.load(request.output)
    rows = [row for row in old["rows"] if results.is_current(row)]
    kept = {name: old[name] for name in ("startup", "overhead_us", "failed_peers") if name in old}
    return fresh | kept | {"rows": rows}


def _kernels(request: Request, case: Case, device: torch.device) -> list[Kernel]:
    """What the measurements of a case will run, as far as it is planned and not forced."""
    if request.path is not None or request.forms != (None,):
        return []
    found = []
    for layout in request.layouts:
        problem = _problem(case, layout)
        try:
            picked = tuner.contenders(problem, device) if request.tune else [dispatch.choose(problem, device).schedule]
        except dispatch.UNAVAILABLE:  # the measurement runs path "torch", as a call does
            continue
        found += [kernel.make(problem, s, archs.of_device(device.index)) for s in picked if s is not None]
    return found


def _wanted(
    request: Request, case: Case, found: dict[str, Any], device: torch.device
) -> list[tuple[str, str, str | None]]:
    """(implementation, layout, form) of the rows to measure of a case. With `resume` those that the results lack, but
    for peers that they say failed with the same versions.
    """
    asked = list(_asked(request, case, device))
    if not request.resume:
        return asked
    there: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        there.setdefault(results.pick_key(row), []).append(row)
    here = found["environment"]
    failed = {
        results.pick_key(entry)
        for entry in found.get("failed_peers", ())
        if all(entry["measured"][name] == here[name] for name in _OF_PEERS)
    }

    def is_there(impl: str, layout: str, form: str | None) -> bool:
        keys = [results.pick_key(_about(case, impl, layout, timing)) for timing in request.timings]
        return all(key in failed or any(_is_wanted(request, form, row) for row in there.get(key, ())) for key in keys)

    return [row for row in asked if not is_there(*row)]


def _asked(request: Request, case: Case, device: torch.device) -> Iterator[tuple[str, str, str | None]]:
    """(implementation, layout, form) of the rows that a case would add."""
    layouts = {"eager": LAYOUTS, results.OWN: request.layouts}
    for impl in (results.OWN, *_peers(request, case)):
        forms = request.forms if impl == results.OWN else (None,)
        for layout, form in product(layouts.get(impl, request.compiled_layouts), forms):
            if form is None or runner.supported(_problem(case, layout), request.path, form, device):
                yield impl, layout, form


def _problem(case: Case, layout: str) -> Problem:
    return inputs.variant(case, case.problem.dtype, layout, case.problem.fp32_precision).problem


def _about(case: Case, impl: str, layout: str, timing: str) -> dict[str, Any]:
    """What a row says that it measures."""
    return {"id": case.id, **results.about(_problem(case, layout)), "impl": impl, "timing": timing}


def _is_wanted(request: Request, form: str | None, row: dict[str, Any]) -> bool:
    """Whether a row of the same measurement ran what the request asks for with this form."""
    if row["impl"] != results.OWN:
        return True
    if request.path is None and form is None:
        return not row.get("forced") and (row.get("tuned", False) or not request.tune)
    return request.path in (None, row["path"]) and form in (None, row["form"])


def _take(
    request: Request,
    finished: Finished,
    case: Case,
    impl: str,
    layout: str,
    measured: runner.Outcome,
    where: dict[str, Any],
) -> str:
    """Take the rows of a peer that was measured apart, or note in the results that it failed; a sentence for a reader.

    Eager, which was measured beside it, must not have drifted from eager in the results; what has none there gets it.
    """
    found, name = finished.results, f"{case.id} {impl} {layout} {case.problem.dtype}"
    known = {results.pick_key(row): row for row in found["rows"] if row["impl"] == "eager"}
    new = {results.pick_key(row): row for row in measured.rows}
    failed = {results.pick_key(entry): entry for entry in found.get("failed_peers", ())}
    rows, told = [], list(measured.problems)
    for timing in request.timings:
        about = _about(case, impl, layout, timing)
        key, eager_key = results.pick_key(about), results.pick_key(about | {"impl": "eager"})
        row, eager = new.get(key), new.get(eager_key)
        if row is None or eager is None:
            failed[key] = about | {"reason": "; ".join(measured.problems), "measured": where}
        elif eager_key in known and peers.drifted(eager, known[eager_key]):
            told.append(
                f"{name}: dropped, eager beside it took {eager['median_ms']:.4g} ms and not "
                f"{known[eager_key]['median_ms']:.4g} ms"
            )
        else:
            failed.pop(key, None)
            rows += [row] if eager_key in known else [row, eager]
    if failed or "failed_peers" in found:
        found["failed_peers"] = list(failed.values())
    finished.problems += told
    _add(request, finished, rows)
    times = (f"{row['median_ms']:.4f} ms" for row in rows if row["impl"] == impl)
    return "; ".join(told) or f"{name}: {', '.join(times)}"


def _add(request: Request, finished: Finished, rows: Sequence[dict[str, Any]]) -> None:
    finished.measured += rows
    results.merge(finished.results, rows)
    _keep(request, finished)


def _drop_drifted(found: dict[str, Any], measured: Sequence[dict[str, Any]]) -> list[str]:
    """Drop compiled peers of an earlier run whose eager row is no longer what it was then; a sentence for each case.

    Their times are used again only as long as eager, measured anew, shows that the machine is the same.
    """
    eager = {results.pick_key(row): row for row in measured if row["impl"] == "eager"}
    drifted = {
        peers.alike(row)
        for row in found["rows"]
        if (now := eager.get(results.pick_key(row))) is not None and peers.drifted(now, row)
    }
    new = {results.pick_key(row) for row in measured}
    compiled = [row for row in found["rows"] if row["impl"] not in ("eager", results.OWN)]
    stale = [row for row in compiled if peers.alike(row) in drifted and results.pick_key(row) not in new]
    found["rows"] = [row for row in found["rows"] if row not in stale]
    return [
        f"{row['id']} {row['impl']} {row['layout']} {row['dtype']}: dropped, eager has drifted since" for row in stale
    ]


def _peers(request: Request, case: Case) -> Sequence[str]:
    if request.peers is not None:
        return request.peers
    return peers.PEERS if case.id in (inputs.LEAD_ID, inputs.LEAD1D_ID) else ("eager",)


def _keep(request: Request, finished: Finished) -> None:
    if request.output is not None:
        results.save(request.output, finished.results)


def show(rows: Sequence[dict[str, Any]], output: Output) -> None:
    """A table of rows, own rows with the speed-up over their best peer."""
    speedups = {results.row_key(c.row): f"{c.speedup:.2f}x{'' if c.ok else ' SLOWER'}" for c in runner.compare(rows)}
    table = []
    for row in sorted(rows, key=lambda row: (row["id"], row["dtype"], row["fp32_precision"] or "", row["median_ms"])):
        moved = results.problem_of(row).bytes / row["median_ms"] / 1e9
        table.append(
            (
                row["id"],
                " ".join(filter(None, (row["dtype"], row["fp32_precision"]))),
                row["layout"],
                row["impl"] + _how(row),
                row["timing"],
                f"{row['median_ms']:.4f}",
                f"{row['p10_ms']:.4f}-{row['p90_ms']:.4f}",
                f"{100 * row['floor_ms'] / row['median_ms']:.0f} %",
                f"{moved:.2f}",
                f"{row['rel_error']:.2g}",
                speedups.get(results.row_key(row), ""),
            )
        )
    columns = "id", "dtype", "layout", "by", "timing", "ms", "p10-p90", "of floor", "TB/s", "error", "over best peer"
    output.table("median times", columns, table)


def _how(row: dict[str, Any]) -> str:
    """What an own row ran, in brackets."""
    if not row["path"]:
        return ""
    words = (row["form"], row["path"], "asked for" if row.get("forced") else None)
    return f" ({', '.join(filter(None, words))})"


def _show_extras(extras: dict[str, Any], output: Output) -> None:
    for name, times in extras.get("startup", {}).items():
        output.say(
            f"{name} start to the first result: {times['total_ms']:.0f} ms (emit {times['emit_ms']:.0f}, "
            f"compile {times['compile_ms']:.0f}, load and run {times['load_and_run_ms']:.0f})"
        )
    for name, value in extras.get("overhead_us", {}).items():
        output.say(f"host time of one call, {name}: {value:.2f} us")
