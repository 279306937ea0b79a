"""One case after the other: check values, then time cutlass_sep and its peers interleaved, and write results rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .. import arch as archs
from .. import block_schedule, tuner
from ..explain import explain
from ..problem import LAYOUTS, Problem
from ..schedule import PATHS
from . import accuracy, ceilings, inputs, peers, results, timing
from .inputs import AnyTensors, Case
from .peers import Unfair

#: A row may be this much slower than the best of its peers.
SLOWER_ALLOWED = 1.03


@dataclass(frozen=True)
class Plan:
    """What to measure beside what.

    layouts, peer_layouts, compiled_layouts: memory formats of x, for cutlass_sep, for eager and for compiled peers.
    path: None for the planner's pick. forms: of the block, None for the planner's pick; each that its path supports is
    measured. tune: time the candidates first, where no path and form is asked for. samples: timed samples a candidate.
    """

    layouts: Sequence[str] = LAYOUTS
    peer_layouts: Sequence[str] = LAYOUTS
    compiled_layouts: Sequence[str] = LAYOUTS
    tune: bool = False
    peers: Sequence[str] = ("eager",)
    timings: Sequence[str] = ("events",)
    path: str | None = None
    forms: Sequence[str | None] = (None,)
    samples: int = 40


@dataclass
class Outcome:
    """The rows of one case, and sentences about what was wrong: refused candidates, times that cannot be."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class WrongValues(RuntimeError):
    """A candidate's output is not within the limits that accuracy.limits sets."""


@dataclass(frozen=True)
class _Candidate:
    """One row to be: `call` takes the tensors of one input set, already in `layout`."""

    name: str
    impl: str
    layout: str
    call: Callable[[AnyTensors], torch.Tensor]
    about: dict[str, Any]

    def repeats(self, other: _Candidate) -> bool:
        """Whether this is what the planner picks for `other`, asked for once more."""
        picked = {**other.about, "forced": True}
        return (self.layout, self.about) == (other.layout, picked)


def measure(
    case: Case, plan: Plan, ceil: dict[str, float], environment: dict[str, Any], device: torch.device
) -> Outcome:
    """All rows of one case, whose own layout is ignored: `plan` says which to measure.

    A candidate whose values are wrong, whose time is impossible or whose precision is not the row's gets no row and a
    sentence in `problems`.
    """
    outcome = Outcome()
    torch.compiler.reset()
    with torch.cuda.device(device), torch.no_grad(), peers.flags(case.problem.fp32_precision):
        sets = timing.rotation(case.problem.bytes, torch.cuda.get_device_properties(device).L2_cache_size)
        drawn = {
            layout: inputs.input_sets(replace(case.problem, layout=layout), sets, device) for layout in LAYOUTS
        }  # fmt: skip
        ready, errors = _ready(case, plan, drawn, outcome, device)
        for kind in plan.timings:
            timed = _candidates_for(kind, ready, drawn, sets, device)
            times = timing.interleaved(timed, sets=sets, samples=plan.samples, device=device)
            for candidate in ready:
                what = f"{case.id} {candidate.name} {case.problem.dtype} ({kind})"
                try:
                    ceilings.check_possible(what, case.problem, times[candidate.name].median_ms, ceil)
                except Unfair as error:
                    outcome.problems.append(str(error))
                    continue
                row = _row(case, candidate, kind, times[candidate.name], errors[candidate.name], ceil)
                if candidate.impl != results.OWN:
                    row["measured"] = environment
                outcome.rows.append(row)
    gc.collect()
    torch.cuda.empty_cache()
    return outcome


def _ready(
    case: Case, plan: Plan, drawn: dict[str, list[AnyTensors]], outcome: Outcome, device: torch.device
) -> tuple[list[_Candidate], dict]:
    """The candidates whose values are right on the first and the last input set, warm, and their errors."""
    ready: list[_Candidate] = []
    errors: dict[str, accuracy.Errors] = {}
    for layout in LAYOUTS:
        problem = inputs.variant(case, case.problem.dtype, layout, case.problem.fp32_precision).problem
        example = drawn[layout][0]
        makers = {}
        for form in plan.forms if layout in plan.layouts else ():
            if form is None or supported(problem, plan.path, form, device):
                name = " ".join(filter(None, (results.OWN, form, layout)))
                make = tuned if plan.tune and form is None and plan.path is None else own
                makers[name] = partial(make, name, problem, plan.path, form, example)
        for impl in plan.peers:
            if layout in (plan.peer_layouts if impl == "eager" else plan.compiled_layouts):
                makers[f"{impl} {layout}"] = partial(_peer, f"{impl} {layout}", impl, problem)
        made = {}

        def attempt(name: str, what: Callable[[], Any], made=made, problem=problem) -> Any:
            """`what()`, or None with a sentence in the outcome: one that fails must not cost the other rows."""
            try:
                return what()
            except Exception as error:
                made.pop(name, None)
                outcome.problems.append(f"{case.id} {name} {problem.dtype}: {type(error).__name__}: {error}")

        for name, make in makers.items():
            candidate = attempt(name, make)
            if candidate is not None and not any(candidate.repeats(other) for other in (*ready, *made.values())):
                made[name] = candidate
        for tensors in (example, drawn[layout][-1]) if made else ():
            calls = list(made.items())
            outputs = {name: attempt(name, partial(_output, c.call, problem, tensors)) for name, c in calls}
            verdicts = accuracy.judge(problem, tensors, {name: outputs[name] for name in made})
            for name, candidate in list(made.items()):
                errors[name] = attempt(name, partial(_accepted, candidate.impl, problem, verdicts[name]))
        ready += made.values()
    return ready, errors


def supported(problem: Problem, path: str | None, form: str, device: torch.device) -> bool:
    """Whether `path`, or any if None, has this form of a block's kernel."""
    arch = archs.of_device(device.index)
    return any(block_schedule.supports(problem, name, arch, form) for name in ((path,) if path else PATHS))


def own(name: str, problem: Problem, path: str | None, form: str | None, example: AnyTensors) -> _Candidate:
    """cutlass_sep as a user calls it: the function, or the op where a path or a form is forced."""
    options = inputs.options(problem)
    call = inputs.function(problem)
    forced = {key: value for key, value in (("path", path), ("form", form)) if value is not None}
    if not forced:
        run, chosen = (lambda t: call(*t, **options)), explain(call, *example, **options)
    else:
        chosen = inputs.operation(problem)(*example, **options, **forced)
        run = lambda t: chosen.run(*t)  # noqa: E731
    about = {
        "path": chosen.path,
        "form": chosen.form,
        "schedule": chosen.schedule.to_json() if chosen.schedule else None,
        "arch": archs.of_device(example.x.device.index),
    } | ({"tuned": True} if chosen.tuned else {})
    return _Candidate(name, results.OWN, problem.layout, run, about | ({"forced": True} if forced else {}))


def tuned(name: str, problem: Problem, path: None, form: None, example: AnyTensors) -> _Candidate:
    """cutlass_sep as a user calls it after `tune`."""
    device = example.x.device
    candidates = tuner.compiled(problem, tuner.contenders(problem, device), device)
    trials = tuner.choose(problem, candidates, device).trials
    made = own(name, problem, path, form, example)
    return replace(made, about=made.about | {"trials": [trial.to_json() for trial in trials]})


def _peer(name: str, impl: str, problem: Problem) -> _Candidate:
    call = peers.build(impl, problem)
    about = {"path": None, "form": None, "schedule": None, "arch": None}
    return _Candidate(name, impl, problem.layout, lambda t: call(*t), about)


def _output(call: Callable[[AnyTensors], torch.Tensor], problem: Problem, tensors: AnyTensors) -> torch.Tensor:
    """y of one call. Memory that it may get for y is filled with NaN first, so that what nobody wrote is found out."""
    shape = problem.y_shape
    poison = torch.full(shape, float("nan"), dtype=tensors.x.dtype, device=tensors.x.device)
    del poison
    y = call(tensors)
    if y.shape != shape or y.dtype != tensors.x.dtype:
        raise WrongValues(f"returned {y.dtype} {list(y.shape)}, not {tensors.x.dtype} {list(shape)}")
    return y


def _accepted(impl: str, problem: Problem, verdict: accuracy.Verdict) -> accuracy.Errors:
    """The errors of an output; WrongValues if they are not those of `impl` at the problem's precision."""
    found = verdict.ours
    if impl == results.OWN and not verdict.ok:
        raise WrongValues(
            f"relative error {found.rel:.3g} (allowed {verdict.rel_limit:.3g}), largest {found.max_abs:.3g} "
            f"(allowed {verdict.max_abs_limit or 'any'})"
        )
    if impl != results.OWN and not found.rel <= accuracy.peer_limit(problem):
        raise WrongValues(
            f"relative error {found.rel:.3g}, more than {accuracy.peer_limit(problem):.3g} at this precision"
        )
    return found


def _candidates_for(
    kind: str,
    ready: Iterable[_Candidate],
    drawn: dict[str, list[AnyTensors]],
    sets: int,
    device: torch.device,
) -> dict[str, timing.Candidate]:
    timed = {}
    for candidate in ready:

        def call(i: int, candidate=candidate, sets_=drawn[candidate.layout]) -> torch.Tensor:
            return candidate.call(sets_[i])

        call(0)
        timed[candidate.name] = timing.as_graph(call, sets, device) if kind == "cuda_graph" else timing.Candidate(call)
    return timed


def _row(
    case: Case, candidate: _Candidate, kind: str, times: timing.Times, errors: accuracy.Errors, ceil: dict[str, float]
) -> dict[str, Any]:
    problem = case.problem
    floor_ms, floor_kind = ceilings.floor(problem, ceil)
    row = {
        "id": case.id,
        **results.about(replace(problem, layout=candidate.layout)),
        "impl": candidate.impl,
        "timing": kind,
        **candidate.about,
        **times.to_json(),
        "floor_ms": floor_ms,
        "floor_kind": floor_kind,
        "rel_error": errors.rel,
        "max_abs_error": errors.max_abs,
    }
    if candidate.impl == results.OWN:
        row["digest"] = results.digest([row])
    if case.note:
        row["note"] = case.note
    return row


@dataclass(frozen=True)
class Comparison:
    """One own row beside the fastest of its peers, over both layouts. `speedup` is peer time over own time."""

    row: dict[str, Any]
    peer: dict[str, Any]

    @property
    def speedup(self) -> float:
        return self.peer["median_ms"] / self.row["median_ms"]

    @property
    def ok(self) -> bool:
        """Path "torch" is held against eager alone, every other path against all peers."""
        return self.row["median_ms"] <= SLOWER_ALLOWED * self.peer["median_ms"]


def compare(rows: Iterable[dict[str, Any]]) -> list[Comparison]:
    """Each own row beside its best peer of the same shape, dtype, precision and timing; without one it is left out."""
    rows = list(rows)
    comparisons = []
    for row in rows:
        if row["impl"] != results.OWN:
            continue
        fair = [peer for peer in rows if peer["impl"] != results.OWN and _is_peer(row, peer)]
        if fair:
            comparisons.append(Comparison(row, min(fair, key=lambda peer: peer["median_ms"])))
    return comparisons


def _is_peer(row: dict[str, Any], peer: dict[str, Any]) -> bool:
    try:
        peers.comparable(row, peer)
    except Unfair:
        return False
    return row["path"] != "torch" or peer["impl"] == "eager"
