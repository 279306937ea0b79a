"""How good the planner's picks are, by the times that a tuned benchmark left in the committed results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cutlass_sep.bench import inputs, results

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import planner as quality  # noqa: E402


@pytest.fixture(scope="module")
def found() -> list[quality.Pick]:
    return quality.picks(results.load(BENCHMARKS / "results" / "h200.json"))


@pytest.fixture(scope="module")
def others() -> set[str]:
    return quality.left_out(case.id for case in inputs.layers(BENCHMARKS / "layers.jsonl")[0])


def test_a_third_of_the_layers_is_left_out(found, others):
    ids = {pick.id for pick in found}
    assert 0.3 < len(ids & others) / len(ids) < 0.37


def test_a_summary_counts_good_picks_and_averages_losses():
    picks = [quality.Pick("a", "k", 1.05, 2.0), quality.Pick("b", "k", 1.06, 0.5 * 4), quality.Pick("c", "l", 1.0, 1.0)]
    assert quality.summary(picks) == {"k": (2, 0.5, pytest.approx(2.0)), "l": (1, 1.0, 1.0)}


def test_picks_are_as_good_as_the_documentation_says(found, others):
    """docs/performance.md states these; a change of the planner that makes them worse has to say so there."""
    left_out = quality.summary([pick for pick in found if pick.id in others])
    count, good, lost = left_out["bfloat16 channels_last"]
    assert count == 28 and good >= 0.75 and lost <= 1.035
    count, good, lost = left_out["float32 ieee channels_last"]
    assert count == 24 and good >= 0.62 and lost <= 1.08
