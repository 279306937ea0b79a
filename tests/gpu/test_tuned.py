"""On the GPU: tuning times what runs and calls then take the winner; path torch in the layout that is fast."""

from __future__ import annotations

import pytest

import cutlass_sep
from cutlass_sep import dispatch, tuner
from cutlass_sep.bench import accuracy, inputs
from cutlass_sep.problem import has_layout

from .calls import make_block, make_problem

PROBLEMS = {
    "2-D": make_problem("bf16", "channels_last", n=4, c=64, o=64, h=28, w=28, mid_activation="relu"),
    "block": make_block("fp16", c=64, l=520, e=128, kernel=9),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_calls_take_what_was_fastest(gpu, problem, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "CONTENDERS", 2)
    f, tensors, options = inputs.function(problem), inputs.tensors(problem, gpu), inputs.options(problem)
    assert not cutlass_sep.explain(f, *tensors, **options).tuned
    try:
        found = cutlass_sep.tune(f, *tensors, **options)
        assert [trial.path for trial in found.trials].count("torch") == 1 and len(found.trials) == 3
        times = [trial.median_ms for trial in found.trials]
        assert times == sorted(times) and 0 < times[0] < times[-1] < 10
        now = cutlass_sep.explain(f, *tensors, **options)
        assert (now.tuned, now.path, now.schedule) == (True, found.trials[0].path, found.trials[0].schedule)
        verdict = accuracy.judge_one(problem, tensors, f(*tensors, **options))
        assert verdict.ok, verdict
    finally:
        dispatch.clear()


@pytest.mark.parametrize("kind", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "shape",
    [
        {"kernel": (3, 3), "dilation": (2, 3), "padding": (2, 3)},
        {"kernel": (3, 43), "padding": (1, 21)},
        {"kernel": (4, 4), "dilation": (3, 1), "stride": (2, 1), "padding": (1, 2)},
    ],
    ids=str,
)
def test_path_torch_keeps_the_layout_of_convolutions_that_it_runs_contiguous(gpu, kind, shape):
    problem = make_problem(kind, "channels_last", n=2, c=24, o=40, h=30, w=50, dw_bias=True, **shape)
    tensors = inputs.tensors(problem, gpu)
    op = inputs.operation(problem)(*tensors, **inputs.options(problem), path="torch")
    y = op.run(*tensors)
    assert has_layout(y, "channels_last") and not y.is_contiguous()
    verdict = accuracy.judge_one(problem, tensors, y)
    # PyTorch's own arithmetic, so held to the bound for peers.
    assert verdict.ours.rel <= accuracy.peer_limit(problem), verdict
