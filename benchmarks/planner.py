"""How well the planner picks without timing, by the trials that `cutlass-sep bench --tune` left in a results file.

    python benchmarks/planner.py [benchmarks/results/h200.json]

The kernels' constants in estimate.py are fitted to two thirds of the layers and lead shapes; every third one by id is
left out of that. A pick is good if its kernel takes at most 5 % longer than the fastest kernel timed. Whether to run a
kernel or PyTorch is a choice of its own; what a call loses to the wrong one is in the last column. A planner that has
changed since picks kernels that nobody timed: such layers are counted apart, and left out of the shares.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "h200.json"
#: A pick may take this much longer than the fastest kernel.
GOOD = 1.05


@dataclass(frozen=True)
class Pick:
    """One tuned layer, in times over the fastest: of the kernel picked, of the one that would be picked if every size
    had its own, both over the fastest kernel, and of what a call runs.
    """

    id: str
    kind: str
    kernel: float
    own_size: float
    call: float


def left_out(ids: Iterable[str]) -> set[str]:
    """The ids, of all layers', that estimate.py is not fitted to."""
    from cutlass_sep.bench import inputs

    return set(sorted({*ids, inputs.LEAD_ID, inputs.LEAD1D_ID})[2::3])


def picks(data: dict[str, Any]) -> tuple[list[Pick], list[str]]:
    """What the planner would have run, of every row with trials that has the planner's kernel among them; and the ids
    of those that have not.
    """
    from cutlass_sep import planner
    from cutlass_sep.bench import results

    found, untimed = [], []
    for row in data["rows"]:
        times = {_key(trial["schedule"]): trial["median_ms"] for trial in row.get("trials", ())}
        if len(times) < 2:
            continue
        problem = results.problem_of(row)
        plan = planner.plan(problem, row["arch"])
        mine = times.get(_key(planner.candidates(problem, row["arch"])[0].to_json()))
        if mine is None:
            untimed.append(row["id"])
            continue
        kernels = [time for key, time in times.items() if key != _key(None)]
        own = times.get(_key(planner.rules(problem).for_size(problem, row["arch"])[0].to_json()), math.inf)
        called = mine if plan.schedule else times[_key(None)]
        kind = " ".join(filter(None, (row["dtype"], row["fp32_precision"], row["layout"])))
        found.append(Pick(row["id"], kind, mine / min(kernels), own / min(kernels), called / min(times.values())))
    return found, untimed


def _key(schedule: dict[str, Any] | None) -> str:
    from cutlass_sep.bench.results import canonical

    return canonical(schedule)


def summary(found: list[Pick]) -> dict[str, tuple[int, float, float, float]]:
    """{kind: (layers, share of good picks, the same if every size had its own, mean of what a call loses)}."""
    kinds = sorted({pick.kind for pick in found})
    return {kind: _summary([pick for pick in found if pick.kind == kind]) for kind in kinds}


def _summary(found: list[Pick]) -> tuple[int, float, float, float]:
    good = sum(pick.kernel <= GOOD for pick in found) / len(found)
    own = sum(pick.own_size <= GOOD for pick in found) / len(found)
    return len(found), good, own, math.exp(sum(math.log(pick.call) for pick in found) / len(found))


def main() -> int:
    """Print the table for the layers left out of the fit, and for all."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from cutlass_sep.bench import inputs, results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    found, untimed = picks(results.load(parser.parse_args().results))
    layers, _ = inputs.layers(Path(__file__).resolve().parent / "layers.jsonl")
    others = left_out(case.id for case in layers)
    for title, chosen in (("left out of the fit", [p for p in found if p.id in others]), ("all", found)):
        print(f"{title}: layers, picks within 5 % of the fastest kernel timed (of its own size), what a call loses")
        for kind, (count, good, own, lost) in summary(chosen).items():
            print(f"  {kind:32} {count:4} {100 * good:5.0f} % ({100 * own:.0f} %) {100 * (lost - 1):6.1f} %")
    print(f"picks that were not timed: {len(untimed)}, {len(others.intersection(untimed))} of them left out of the fit")
    for pick in sorted(found, key=lambda pick: -pick.call)[:10]:
        print(f"  worst: {pick.id} {pick.kind}: {pick.call:.2f} x the fastest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
