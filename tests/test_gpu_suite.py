"""The GPU tests, as far as no GPU is needed: which combinations they make, and that their judges can say no."""

from __future__ import annotations

import importlib
import inspect
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from gpu import accuracy, block_combinations
from gpu.calls import STORAGES, VARIANTS, Poisoned, draw, make_block, make_op, make_problem
from gpu.combinations import Combination, combinations, groups, runs, schedule_of
from gpu.test_cases import HELD

from cutlass_sep import kernel
from cutlass_sep.bench.inputs import options
from cutlass_sep.block_schedule import supports
from cutlass_sep.problem import ACTIVATIONS, SeparableConv2dProblem
from cutlass_sep.source import render

ARCH = "sm_90a"
#: Kernels that the combinations may cost to build.
MOST_SOURCES = 200


def test_combinations_are_many_and_of_every_kind():
    made = combinations()
    assert len({c.id for c in made}) == len({(c.group, c.problem("fp32"), c.form) for c in made}) == len(made) >= 300
    assert {k for g in groups() for k in g.kernel} == set(range(1, 32))
    for name in ("mid_activation", "activation"):
        assert {getattr(g, name) for g in groups()} == set(ACTIVATIONS)
    for wide in (True, False):
        some = [g for g in groups() if g.wide == wide]
        assert {(g.dw_bias, g.pw_bias) for g in some} == {(a, b) for a in (True, False) for b in (True, False)}
        assert {g.layout for g in some} == {"contiguous", "channels_last"}
        assert {g.stride != (1, 1) for g in some} == {g.dilation != (1, 1) for g in some} == {True, False}
        assert any(g.stride[0] != g.stride[1] for g in some) and any(g.dilation[0] != g.dilation[1] for g in some)
    for extent in ("c", "o"):
        assert 1 in {getattr(g, extent) for g in groups()}
    for extent in ("n", "h", "w"):
        values = {getattr(c, extent) for c in made}
        assert 1 in values and any(v % 2 for v in values - {1})
    forms = Counter(c.form for c in made)
    assert min(forms[f] for f in ("plain", "offset", "sliced", "transposed", "expanded")) >= 5
    paddings = Counter(c.padding if isinstance(c.padding, str) else "pair" for c in made)
    assert min(paddings[p] for p in ("same", "valid", "pair")) >= 10
    assert any(c.problem("fp32").padding.top != c.problem("fp32").padding.bottom for c in made)


def test_every_combination_runs_on_portable_and_a_third_on_sm90():
    found = Counter((variant, path) for _, variant, path in runs(ARCH))
    for variant in ("fp32", "fp16", "bf16"):
        assert found[variant, "portable"] == len(combinations())
        assert 3 * found[variant, "sm90"] >= len(combinations())
    assert found["tf32", "portable"] >= 100
    assert 3 * found["tf32", "sm90"] >= found["tf32", "portable"]


def test_combinations_share_kernels():
    sources = {
        render(c.problem(variant), schedule_of(c.group, variant, path, ARCH), ARCH) for c, variant, path in runs(ARCH)
    }
    assert len(sources) <= MOST_SOURCES


def test_combinations_of_the_block_are_many_and_of_every_kind():
    made, groups = block_combinations.combinations(), block_combinations.groups()
    assert len({c.id for c in made}) == len(made) >= 200
    assert {1, 2, 64, 65} < {g.kernel for g in groups}
    assert min(sum(g.kernel % 2 == odd for g in groups) for odd in (0, 1)) >= 8
    assert {1, 2, 3, 128} < {g.dilation for g in groups}
    assert {g.activation for g in groups} == set(ACTIVATIONS)
    assert len({(g.expand_bias, g.dw_bias, g.project_bias) for g in groups}) == 8
    assert 1 in {g.c for g in groups} and 1 in {g.e for g in groups}
    for wide in (True, False):
        some = [g for g in groups if g.wide == wide]
        assert {g.layout for g in some} == {"contiguous", "channels_last"}
        assert {g.residual for g in some} == {True, False} and any(g.o != g.c for g in some)
        assert any(g.e < g.c for g in some) and any(g.e >= 2 * g.c for g in some)
    assert any(c.l == 1 for c in made) and any(c.l % 2 for c in made if c.l > 1) and any(c.l > 1000 for c in made)
    shorter = [c for c in made if c.l <= c.group.dilation * (c.group.kernel - 1)]
    assert len(shorter) >= 20 and any(c.group.wide for c in shorter)
    storages = Counter(c.storage for c in made)
    assert min(storages[s] for s in STORAGES) >= 4
    assert {c.n for c in made} > {1, 2, 3}


def test_every_combination_of_the_block_runs_in_every_form_that_takes_it():
    found = Counter((variant, form, path) for _, variant, form, path in block_combinations.runs(ARCH))
    total = len(block_combinations.combinations())
    for variant in ("fp32", "fp16", "bf16"):
        assert found[variant, "two_kernel", "portable"] == total
        assert 3 * found[variant, "two_kernel", "sm90"] >= total
    assert found["tf32", "two_kernel", "portable"] >= 70
    for combination, variant, form, path in block_combinations.runs(ARCH)[::7]:
        assert supports(combination.problem(variant), path, ARCH, form)


def test_combinations_of_the_block_share_kernels():
    sources = {
        kernel.make(c.problem(variant), block_combinations.schedule_of(c.group, variant, form, path, ARCH), ARCH).source
        for c, variant, form, path in block_combinations.runs(ARCH)
    }
    assert len(sources) <= MOST_SOURCES


def test_tensors_of_the_block_make_the_problem_that_was_meant():
    from cutlass_sep import op

    for combination in block_combinations.combinations()[::3]:
        problem = combination.problem("bf16")
        tensors = draw(problem, torch.Generator(), combination.storage)
        assert op.SeparableConvBlock1d(*tensors, **options(problem), path="torch").problem == problem
    problem = make_block("fp16", "channels_last", kernel=4, dilation=3, residual=False, o=24)
    assert make_op(problem, ARCH, "torch").problem == problem


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_judge_of_the_block_passes_right_results_and_no_others(variant: str, layout: str):
    problem = make_block(variant, layout, c=24, e=40, l=50, kernel=5, dilation=2, activation="silu")
    tensors = draw(problem, torch.Generator().manual_seed(1))
    y = accuracy.exact(problem, tensors).to(tensors[0].dtype)
    found = accuracy.judge(problem, tensors, y)
    assert found.relative <= accuracy.UNIT[problem.dtype]

    def refused(wrong: torch.Tensor) -> None:
        with pytest.raises(AssertionError, match="out of bounds"):
            accuracy.judge(problem, tensors, wrong)

    for value in (math.nan, math.inf, 0.0):
        wrong = y.clone()
        wrong[1, 5, 7] = value
        refused(wrong)
    x, expand, taps, project, expand_bias, taps_bias, project_bias = tensors
    tapless, channelless, unexpanded = taps.clone(), project.clone(), expand.clone()
    tapless[3, 0, 2], channelless[:, 39], unexpanded[:, 23] = 0, 0, 0
    biases = (expand_bias, taps_bias, project_bias)
    for changed in (
        (x, expand, tapless, project, *biases),
        (x, expand, taps, channelless, *biases),
        (x, unexpanded, taps, project, *biases),
        (x.roll(1, 2), expand, taps, project, *biases),
        (x, expand, taps, project, expand_bias.roll(1), taps_bias, project_bias),
        (x, expand, taps, project, expand_bias, taps_bias.roll(1), project_bias),
        (x, expand, taps, project, expand_bias, taps_bias, project_bias.roll(1)),
    ):
        refused(accuracy.exact(problem, changed).to(y.dtype))
    for other in ({"activation": "gelu"}, {"residual": False}, {"dilation": 1}):
        refused(accuracy.exact(replace(problem, **other), tensors).to(y.dtype))


def test_the_judge_of_the_block_refuses_a_bias_that_leaks_into_the_padding():
    """Padding x instead of the expanded channels is right everywhere but at the ends."""
    problem = make_block("bf16", c=24, e=40, l=50)
    x, *parameters = tensors = draw(problem, torch.Generator().manual_seed(2))
    left, right = problem.pads
    wider = make_block("bf16", c=24, e=40, l=50 + left + right)
    padded = torch.nn.functional.pad(x, (left, right))
    leaked = accuracy.exact(wider, (padded, *parameters))[:, :, left:-right].to(x.dtype)
    inner = slice(left, -right)
    assert torch.equal(leaked[..., inner], accuracy.exact(problem, tensors).to(x.dtype)[..., inner])
    with pytest.raises(AssertionError, match="out of bounds"):
        accuracy.judge(problem, tensors, leaked)


def test_the_judge_of_the_block_refuses_what_lower_precision_gives():
    problem = make_block("fp32", c=64, e=128, l=200)
    tensors = draw(problem, torch.Generator().manual_seed(2))
    y = accuracy.exact(problem, tensors)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    accuracy.judge(problem, tensors, (y + 2e-7 * noise * y.std()).float())
    for wrong in ((y + 2e-6 * noise * y.std()).float(), y.bfloat16().float()):
        with pytest.raises(AssertionError, match="relative error|out of bounds"):
            accuracy.judge(problem, tensors, wrong)


def _op_problem(combination: Combination) -> SeparableConv2dProblem:
    """What an op makes of the combination's tensors."""
    from cutlass_sep import op
    from cutlass_sep.bench.inputs import options

    tensors = draw(combination.problem("bf16"), torch.Generator(), combination.form)
    return op.DepthwiseSeparableConv2d(*tensors, **options(combination.problem("bf16")), path="torch").problem


def test_tensors_make_the_problem_that_was_meant():
    for combination in combinations()[::5]:
        assert _op_problem(combination) == combination.problem("bf16")


def test_meta_tensors_make_the_same_problem():
    problem = make_problem("fp16", "channels_last", kernel=(3, 2), padding="same", activation="gelu")
    assert make_op(problem, ARCH, "torch").problem == problem


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_judge_passes_right_results_and_no_others(variant: str):
    problem = make_problem(variant, c=24, mid_activation="silu", activation="hardswish")
    tensors = draw(problem, torch.Generator().manual_seed(1))
    y = accuracy.exact(problem, tensors).to(tensors[0].dtype)
    found = accuracy.judge(problem, tensors, y)
    assert found.relative <= accuracy.UNIT[problem.dtype]

    def refused(wrong: torch.Tensor) -> None:
        with pytest.raises(AssertionError, match="out of bounds"):
            accuracy.judge(problem, tensors, wrong)

    for value in (math.nan, math.inf, 0.0):
        wrong = y.clone()
        wrong[1, 5, 7, 3] = value
        refused(wrong)
    x, dw_weight, pw_weight, dw_bias, pw_bias = tensors
    tapless, channelless = dw_weight.clone(), pw_weight.clone()
    tapless[3, 0, 2, 2] = 0
    channelless[:, 23] = 0
    for changed in (
        (x, tapless, pw_weight, dw_bias, pw_bias),
        (x, dw_weight, channelless, dw_bias, pw_bias),
        (x.roll(1, 3), dw_weight, pw_weight, dw_bias, pw_bias),
        (x, dw_weight, pw_weight, dw_bias.roll(1), pw_bias),
    ):
        refused(accuracy.exact(problem, changed).to(y.dtype))
    refused(accuracy.exact(replace(problem, activation="silu"), tensors).to(y.dtype))


def test_fp32_grade_refuses_what_lower_precision_gives():
    problem = make_problem("fp32", c=64, o=64)
    tensors = draw(problem, torch.Generator().manual_seed(2))
    y = accuracy.exact(problem, tensors)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    accuracy.judge(problem, tensors, (y + 2e-7 * noise * y.std()).float())
    with pytest.raises(AssertionError, match="relative error|out of bounds"):
        accuracy.judge(problem, tensors, (y + 2e-6 * noise * y.std()).float())
    with pytest.raises(AssertionError, match="relative error|out of bounds"):
        accuracy.judge(problem, tensors, y.bfloat16().float())


def test_sixteen_bit_refuses_one_rounding_too_many():
    problem = make_problem("bf16", c=64, o=64)
    tensors = draw(problem, torch.Generator().manual_seed(4))
    y = accuracy.exact(problem, tensors)
    assert y.numel() >= accuracy.ENOUGH_FOR_EAGER
    accuracy.judge(problem, tensors, y.bfloat16())
    noise = 2 * torch.rand(y.shape, generator=torch.Generator().manual_seed(5)) - 1
    coarse = (y + 1.5 * accuracy.UNIT["bfloat16"] * y.std() * noise).bfloat16()
    with pytest.raises(AssertionError, match="times eager"):
        accuracy.judge(problem, tensors, coarse)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_poison_tells_what_was_not_written_and_what_was_by_mistake(layout: str):
    problem = make_problem("fp16", layout)
    out = Poisoned.like(problem, torch.device("cpu"))
    assert out.tensor.is_contiguous(
        memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format
    )
    assert out.tensor.data_ptr() % 16 == 0
    with pytest.raises(AssertionError, match="not written"):
        out.check()
    out.tensor.zero_()
    out.check()
    outside = out.tensor.as_strided((1,), (1,), out.tensor.storage_offset() + out.tensor.numel())
    outside.zero_()
    with pytest.raises(AssertionError, match="behind y"):
        out.check()


def test_rows_of_the_collection_are_held_for_the_block():
    named: set[str] = set()
    for name in ("test_block_cases", "test_block_numerics"):
        module = importlib.import_module(f"gpu.{name}")
        named |= {test[5:8] for test in vars(module) if test.startswith("test_F")}
    rows = {1, 2, 3, 4, 5, 12, 13, 15, 16, 17, 19, 20, 21, 22, 24, 27, 31}
    assert named == {f"F{row:02}" for row in rows}
    borrowed = vars(importlib.import_module("gpu.test_borrowed"))
    assert "test_block_nan_and_inf_stay_in_their_receptive_field" in borrowed
    for test in ("autocast", "opcheck", "unbatched", "exactly_the_gradients_asked_for"):
        cases = [mark for mark in borrowed[f"test_functional_{test}"].pytestmark if "case" in mark.args[0]]
        assert "Block" in str(cases)


def test_rows_of_the_collection_are_held_where_it_is_said():
    own = importlib.import_module("gpu.test_cases")
    named = {name[5:8] for name, test in vars(own).items() if name.startswith("test_F") and inspect.isfunction(test)}
    assert not named & set(HELD)
    for where in HELD.values():
        file, test = where.split("::")
        assert inspect.isfunction(getattr(importlib.import_module(f"gpu.{file.removesuffix('.py')}"), test)), where
    expected = {1, 2, 4, 5, 7, 9, 10, 11, 12, 13, 15, 16, 17, 18, 21, 22, 24, 27, 28, 29, 31}
    assert named | set(HELD) == {f"F{row:02}" for row in expected}
