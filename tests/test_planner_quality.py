"""How good the planner's picks are, by the times that a tuned benchmark left in the committed results."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import pytest

from cutlass_sep import estimate
from cutlass_sep.bench import inputs, results

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fit as fitting  # noqa: E402
import planner as quality  # noqa: E402


@pytest.fixture(scope="module")
def found() -> list[quality.Pick]:
    return quality.picks(results.load(BENCHMARKS / "results" / "h200.json"))[0]


@pytest.fixture(scope="module")
def others() -> set[str]:
    return quality.left_out(case.id for case in inputs.layers(BENCHMARKS / "layers.jsonl")[0])


def test_a_third_of_the_layers_is_left_out(found, others):
    ids = {pick.id for pick in found}
    assert 0.3 < len(ids & others) / len(ids) < 0.37


def test_a_summary_counts_good_picks_and_averages_losses():
    picks = [
        quality.Pick("a", "k", 1.05, 1.0, 2.0),
        quality.Pick("b", "k", 1.06, 1.0, 2.0),
        quality.Pick("c", "l", 1.0, 1.1, 1.0),
    ]
    assert quality.summary(picks) == {"k": (2, 0.5, 1.0, pytest.approx(2.0)), "l": (1, 1.0, 0.0, 1.0)}


def test_picks_are_as_good_as_the_documentation_says(found, others):
    """docs/performance.md states these; a change of the planner that makes them worse has to say so there."""
    left_out = quality.summary([pick for pick in found if pick.id in others])
    count, good, _, lost = left_out["bfloat16 channels_last"]
    assert count == 28 and good >= 0.82 and lost <= 1.021
    count, good, _, lost = left_out["float32 ieee channels_last"]
    assert count == 28 and good >= 0.89 and lost <= 1.016


# ---- the fit of the estimates


@pytest.fixture(scope="module")
def trials() -> list[fitting.Trial]:
    return fitting.trials()


def test_the_estimates_meet_the_times_they_were_fitted_to_and_others_alike(trials):
    """The constants of estimate.py are those of the fit: standard deviations that docs/performance.md states."""
    others = quality.left_out(trial.layer for trial in trials)
    for kind, spread in (
        ("sm90", 0.12),
        ("diagonal", 0.12),
        ("portable", 0.16),
        ("planes", 0.07),
        ("direct", 0.14),
        ("fused", 0.03),
    ):
        for left_out in (False, True):
            errors = [t.error for t in trials if t.kind == kind and (t.layer in others) == left_out]
            assert len(errors) > 8 and abs(statistics.fmean(errors)) < 0.07
            assert statistics.pstdev(errors) < spread, (kind, left_out)
    # Its constants are from the lead shape alone: smaller blocks take longer, all alike.
    errors = [t.error for t in trials if t.kind == "fused fp32"]
    assert 0.05 < statistics.fmean(errors) < 0.12 and statistics.pstdev(errors) < 0.05


def test_first_choices_are_good_in_most_cases_left_out(trials):
    """docs/performance.md states these shares."""
    others = quality.left_out(trial.layer for trial in trials)
    for tensors, cases, share in (
        ("bfloat16 channels_last", 133, 0.91),
        ("float32 ieee channels_last", 83, 0.93),
        ("float32 ieee contiguous", 84, 0.97),
    ):
        losses = fitting.first_choices([t for t in trials if t.tensors == tensors and t.layer in others])
        assert len(losses) == cases and min(losses) == 1.0
        assert sum(lost <= quality.GOOD for lost in losses) / cases >= share


def test_a_first_choice_is_compared_with_the_fastest_of_its_case():
    def trial(case, kind, estimated, microseconds):
        return fitting.Trial("a", "t", case, kind, lambda: estimated, microseconds)

    tried = [trial(1, "sm90", 2.0, 12.0), trial(1, "sm90", 3.0, 10.0), trial(2, "sm90", 2.0, 9.0)]
    assert fitting.first_choices(tried) == [1.2]
    # The rougher estimate of path portable must be better by a margin.
    assert fitting.first_choices([*tried, trial(1, "portable", 1.95, 5.0)]) == [2.4]
    assert fitting.first_choices([*tried, trial(1, "portable", 1.7, 5.0)]) == [1.0]


def test_outliers_and_slow_schedules_count_less():
    def trial(error, microseconds):
        return fitting.Trial("a", "t", 1, "sm90", lambda: microseconds / math.exp(error), microseconds)

    assert fitting.loss([trial(0.0, 1.0), trial(0.0, 3.0)]) == 0.0
    # Alone in its case an error is one of level only; ten times the error is then ten times the loss, not a hundred.
    small, large = fitting.loss([trial(0.5, 1.0)]), fitting.loss([trial(5.0, 1.0)])
    assert small == pytest.approx(0.15 * 0.05 * (math.hypot(0.5, 0.05) - 0.05)) and 9 < large / small < 12
    # The same error of a schedule three times as slow as the best one of its case.
    assert fitting.loss([trial(0.0, 1.0), trial(0.1, 3.0)]) < 0.05 * fitting.loss([trial(0.1, 1.0), trial(0.0, 1.0)])


def test_a_fit_finds_a_constant_that_was_changed(trials, monkeypatch):
    chosen = [trial for trial in trials if trial.kind == "fused"]
    before = estimate._FUSED_TENSOR
    monkeypatch.setattr(estimate, "_FUSED_TENSOR", before)  # fit() changes it
    best = fitting.fit(chosen, ("_FUSED_TENSOR",), seconds=1.0)["_FUSED_TENSOR"]
    right = fitting.loss(chosen)
    assert best == pytest.approx(before, rel=0.15)
    estimate._FUSED_TENSOR = 3 * best
    assert fitting.loss(chosen) > 10 * right
    assert fitting.fit(chosen, ("_FUSED_TENSOR",), seconds=1.0)["_FUSED_TENSOR"] == pytest.approx(best, rel=0.05)
    assert fitting.loss(chosen) < 1.1 * right
