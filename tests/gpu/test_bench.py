"""Benchmarks on a GPU: the figures agree with an independent profiler, and rows are whole."""

import math
from dataclasses import replace

import pytest
import torch

from cutlass_sep import functional
from cutlass_sep.bench import ceilings, environment, inputs, overhead, results, runner, startup, timing
from cutlass_sep.bench.inputs import Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
DEVICE = torch.device("cuda", 0)


def problem(**changes):
    """The input that cases.md names for benchmarks, with more images so that launches do not dominate."""
    extents = {"n": 64, "c": 64, "h": 56, "w": 56, "o": 64}
    return replace(inputs.lead("float16").problem, **{**extents, **changes}).with_alignment()


@pytest.fixture(scope="module")
def limits():
    return ceilings.measure(DEVICE)


def test_rows_of_a_small_problem(limits, tmp_path):
    plan = runner.Plan(peers=("eager",), timings=("events", "cuda_graph"), samples=10)
    outcome = runner.measure(Case("small", problem(n=8)), plan, limits, environment.describe(DEVICE), DEVICE)
    assert outcome.problems == []
    assert len(outcome.rows) == 8, "two implementations, two layouts, two timings"
    path = tmp_path / "results.json"
    data = {"schema": 1, "digest": "", "environment": environment.describe(DEVICE), "ceilings": limits}
    results.save(path, data | {"rows": outcome.rows})
    assert results.load(path)["rows"] == outcome.rows


def test_rows_of_a_small_block(limits, tmp_path):
    block = replace(inputs.lead1d("bfloat16").problem, n=4, l=1024).with_alignment()
    plan = runner.Plan(peers=("eager",), forms=(None, "fused", "two_kernel"), samples=10)
    outcome = runner.measure(Case("block", block), plan, limits, environment.describe(DEVICE), DEVICE)
    assert outcome.problems == []
    for layout in ("contiguous", "channels_last"):
        own = [row for row in outcome.rows if row["impl"] == "cutlass_sep" and row["layout"] == layout]
        assert [row.get("forced", False) for row in own] == [False] + [True] * (len(own) - 1)
        assert len({row["form"] for row in own}) == len(own), "the form that the planner picks is measured once"
        assert "two_kernel" in {row["form"] for row in own}
        assert [row["impl"] for row in outcome.rows if row["layout"] == layout].count("eager") == 1
    path = tmp_path / "results.json"
    data = {"schema": 1, "digest": "", "environment": environment.describe(DEVICE), "ceilings": limits}
    results.save(path, data | {"rows": outcome.rows})
    assert results.load(path)["rows"] == outcome.rows


def test_events_agree_with_the_profiler():
    case = problem()
    tensors = inputs.tensors(case, DEVICE)
    options = inputs.options(case)

    def call(_):
        return functional.depthwise_separable_conv2d(*tensors, **options)

    with torch.no_grad():
        timed = timing.interleaved({"x": timing.Candidate(call)}, sets=2, samples=30, device=DEVICE)["x"].median_ms
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for i in range(30):
                call(i)
            torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # The time in which a kernel runs, and be it two of them: those of a call overlap.
    covered, end = 0.0, -math.inf
    for span in sorted((event.time_range.start, event.time_range.end) for event in kernels):
        covered += max(0.0, span[1] - max(span[0], end))
        end = max(end, span[1])
    profiled = covered / 30 / 1e3
    # That leaves out the gaps between kernels, which are a few microseconds.
    assert 0.9 * profiled < timed < 1.1 * profiled + 0.005


def test_a_stub_is_refused_on_the_device(limits, monkeypatch):
    monkeypatch.setattr(functional, "depthwise_separable_conv2d", lambda x, *a, **k: x)
    outcome = runner.measure(Case("stub", problem(n=8)), runner.Plan(samples=3), limits, {}, DEVICE)
    assert {row["impl"] for row in outcome.rows} == {"eager"}
    assert len(outcome.problems) == 2


def test_ceilings_are_plausible(limits):
    assert set(limits) == {"copy_TBps", "bf16_TFLOPS", "fp16_TFLOPS", "tf32_TFLOPS", "fp32_TFLOPS"}
    assert 0.1 < limits["copy_TBps"] < 20
    assert limits["fp32_TFLOPS"] < limits["tf32_TFLOPS"] < limits["fp16_TFLOPS"]


def test_cold_and_warm_starts():
    times = startup.measure(problem(n=8))
    assert not times["cold"]["cache_hit"] and times["warm"]["cache_hit"]
    assert times["warm"]["total_ms"] < times["cold"]["total_ms"]


def test_overhead_is_in_microseconds():
    found = overhead.measure(DEVICE)
    assert set(found) == {"functional", "op.run", "F.conv2d", "F.conv2d pair"}
    assert all(0.5 < value < 1000 for value in found.values())
    assert found["F.conv2d"] < found["F.conv2d pair"]
