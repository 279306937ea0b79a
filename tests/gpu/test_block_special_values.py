"""Inf, NaN and hidden values beyond an operand's range: the block puts them where plain fp32 arithmetic does."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from cutlass_sep import op
from cutlass_sep.bench.inputs import options
from cutlass_sep.problem import SeparableBlock1dProblem

from . import accuracy
from .calls import Tensors, draw, make_block
from .test_block_numerics import every_kernel, laid_out
from .test_special_values import BITS, compare, in_all_types, place

#: Index of each tensor in the operator's order.
X, EXPAND, TAPS, PROJECT, EXPAND_BIAS, TAPS_BIAS, PROJECT_BIAS = range(7)


def small(variant: str, layout: str, **changes) -> SeparableBlock1dProblem:
    return make_block(variant, layout, **{"n": 2, "c": 24, "l": 200, "e": 40, "kernel": 5, **changes})


def run(machine, problem: SeparableBlock1dProblem, tensors: Tensors, path: str, form: str) -> Tensor:
    machine.require(problem, path, form)
    operator = op.SeparableConvBlock1d(*tensors, **options(problem), path=path, form=form, arch=machine.arch)
    return operator.run(*tensors)


@every_kernel
@in_all_types
@pytest.mark.parametrize(
    ("layout", "activation"),
    [("contiguous", None), ("contiguous", "gelu"), ("channels_last", None), ("channels_last", "relu6")],
)
def test_in_x(machine, generator, variant: str, layout: str, activation: str | None, path: str, form: str):
    """Of mixed signs an Inf is Inf - Inf at every output; relu6 makes it finite again."""
    problem = small(variant, layout, activation=activation)
    tensors = draw(problem, generator)
    for value in (math.nan, math.inf, -math.inf):
        place(tensors[X], value, 2, generator)
    want = compare(problem, tensors, run(machine, problem, tensors, path, form))
    assert want.isnan().any() and want.isfinite().any()


@every_kernel
@laid_out
@in_all_types
def test_infinities_of_one_sign_stay(machine, generator, variant: str, layout: str, path: str, form: str):
    problem = small(variant, layout, activation="relu")
    tensors = draw(problem, generator)
    for which in (EXPAND, TAPS, PROJECT):
        tensors[which].abs_().add_(0.01)
    tensors[X][0, 3, 0], tensors[X][1, 7, 150] = math.inf, math.inf
    tensors[X][1, 2, 60] = -math.inf  # relu cuts the branch off; the residual keeps it
    want = compare(problem, tensors, run(machine, problem, tensors, path, form))
    assert (want == math.inf).any() and (want == -math.inf).sum() == 1 and not want.isnan().any()


@every_kernel
@laid_out
@in_all_types
def test_in_weights_and_biases(machine, generator, variant: str, layout: str, path: str, form: str):
    problem = small(variant, layout, activation=None)
    for which, value in (
        (PROJECT, math.nan),
        (EXPAND, math.nan),
        (EXPAND, math.inf),
        (PROJECT_BIAS, -math.inf),
        (EXPAND_BIAS, math.nan),
        (EXPAND_BIAS, math.inf),
        (TAPS_BIAS, math.nan),
        (TAPS_BIAS, math.inf),
        (TAPS, math.nan),
        (TAPS, math.inf),
    ):
        tensors = draw(problem, generator)
        place(tensors[which], value, 1, generator)
        if which == TAPS:
            # Inf times a hidden value near 0 has the sign that its rounding gives it: keep them away from there.
            tensors[EXPAND_BIAS].add_(8.0)
        # At an end a tap lies on padding; backends differ on whether Inf * 0 counts there.
        where = (..., slice(2, -2)) if which == TAPS else (...,)
        want = compare(problem, tensors, run(machine, problem, tensors, path, form), where)
        assert not want.isfinite().all()


@every_kernel
@in_all_types
def test_every_nan_is_nan(machine, generator, variant: str, path: str, form: str):
    """Rounding an operand by adding to its bits must not carry a NaN of all ones into a number."""
    problem = small(variant, "contiguous")
    largest = (1 << (8 * problem.element_size - 1)) - 1
    for which, at in ((X, (1, 3, 50)), (EXPAND, (7, 5, 0)), (PROJECT, (3, 5, 0))):
        for pattern in (-1, largest):  # all ones; all ones but the sign
            tensors = draw(problem, generator)
            tensors[which].view(BITS[tensors[which].dtype])[at] = pattern
            assert tensors[which][at].isnan()
            want = compare(problem, tensors, run(machine, problem, tensors, path, form))
            assert want.isnan().any()


@every_kernel
@in_all_types
@pytest.mark.parametrize(
    ("layout", "activation"), [("contiguous", None), ("contiguous", "gelu"), ("channels_last", None)]
)
@pytest.mark.parametrize("where", ["everywhere", "somewhere"])
def test_hidden_values_beyond_the_operand(
    machine, generator, where: str, activation: str | None, variant: str, layout: str, path: str, form: str
):
    """Expanded values of 1e5 to 1e6 and more, brought back by small weights behind them."""
    problem = small(variant, layout, activation=activation)
    tensors = draw(problem, generator)
    if where == "everywhere":
        tensors[EXPAND].mul_(2.0**16).clamp_(-60000, 60000)
        tensors[PROJECT].mul_(2.0**-12)
    else:
        tensors[X][0, :, 40:43] *= 2.0**12
        tensors[X][1, :, -1] *= 2.0**12
        tensors[EXPAND].mul_(2.0**6)
        tensors[PROJECT].mul_(2.0**-12)
    hidden = accuracy.project(tensors[EXPAND].double(), tensors[X].double(), tensors[EXPAND_BIAS].double())
    assert 1e5 < hidden.abs().max() < 1e7
    want = compare(problem, tensors, run(machine, problem, tensors, path, form))
    assert want.isfinite().all()


@every_kernel
@laid_out
def test_hidden_values_near_the_end_of_float32(machine, generator, layout: str, path: str, form: str):
    problem = small("fp32", layout, activation="relu")
    tensors = draw(problem, generator)
    tensors[EXPAND].mul_(1e36)
    tensors[TAPS].mul_(0.25)
    tensors[PROJECT].mul_(2.0**-100)
    want = compare(problem, tensors, run(machine, problem, tensors, path, form))
    assert want.isfinite().all()


@every_kernel
@laid_out
@pytest.mark.parametrize("variant", ["fp32", "fp16"])
def test_small_values_keep_their_precision(machine, generator, variant: str, layout: str, path: str, form: str):
    """Below fp16's range in fp32; with fp16's own smallest numbers in fp16."""
    problem = small(variant, layout, activation=None, residual=False, project_bias=False)
    x, expand, taps, project, expand_bias, taps_bias, _ = tensors = draw(problem, generator)
    scale = 2.0**-30 if variant == "fp32" else 2.0**-9
    for t in (x, expand_bias, taps_bias):
        t.mul_(scale)
    compare(problem, tensors, run(machine, problem, tensors, path, form))
    if variant == "fp32":
        y = run(machine, problem, tensors, path, form)
        accuracy.judge(problem, tensors, y)
