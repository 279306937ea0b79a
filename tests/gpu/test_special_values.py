"""Inf, NaN and values beyond an operand's range land exactly where plain fp32 arithmetic puts them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cutlass_sep import op
from cutlass_sep.bench.inputs import options
from cutlass_sep.problem import Problem, SeparableConv2dProblem
from cutlass_sep.schedule import supports

from . import accuracy
from .calls import Tensors, describe, draw, make_problem

LAYOUTS = ("contiguous", "channels_last")
PATHS = ("sm90", "portable")
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}

everywhere = pytest.mark.parametrize("path", PATHS)
laid_out = pytest.mark.parametrize("layout", LAYOUTS)
in_all_types = pytest.mark.parametrize("variant", ["fp32", "tf32", "fp16", "bf16"])


def small(variant: str, layout: str, mid_activation: str | None = None, activation: str | None = None):
    return make_problem(
        variant, layout, n=2, c=40, h=24, w=24, o=24, mid_activation=mid_activation, activation=activation
    )


def run(machine, problem: SeparableConv2dProblem, tensors: Tensors, path: str) -> Tensor:
    if not (support := supports(problem, path, machine.arch)):
        pytest.skip(f"path {path}: {support.reason}")
    operator = op.DepthwiseSeparableConv2d(*tensors, **options(problem), path=path, arch=machine.arch)
    return operator.run(*tensors)


def compare(problem: Problem, tensors: Tensors, y: Tensor, where: tuple = (...,)) -> Tensor:
    """Assert that y has NaN, Inf, -Inf exactly where float64 has and is within bounds elsewhere; returns float64's y.

    `where`: the index of what is looked at.
    """
    want, bound = accuracy.exact_and_bound(problem, tensors)
    y, want, bound = (t[where] for t in (y, want, bound))
    rounded = want.to(y.dtype)  # fp16: too large is Inf
    for name, found, expected in (
        ("NaN", y.isnan(), rounded.isnan()),
        ("Inf", y == math.inf, rounded == math.inf),
        ("-Inf", y == -math.inf, rounded == -math.inf),
    ):
        assert torch.equal(found, expected), (
            f"{name}: {int(found.sum())} elements, expected {int(expected.sum())}; {int((found & ~expected).sum())} "
            f"where there should be none, {int((expected & ~found).sum())} missing\n{describe(problem)}"
        )
    finite = rounded.isfinite()
    excess = torch.where(finite, (y.double() - want).abs() - bound, -1.0).max().item()
    assert excess <= 0, f"finite values exceed their bound by {excess:.3g}\n{describe(problem)}"
    return want


def place(t: Tensor, value: float, count: int, generator: torch.Generator) -> None:
    """`value` at random positions of t, in place and whatever its strides."""
    for _ in range(count):
        index = tuple(
            int(torch.randint(extent, (), generator=generator, device=generator.device)) for extent in t.shape
        )
        t[index] = value


@everywhere
@laid_out
@in_all_types
def test_in_x(machine, generator, variant: str, layout: str, path: str):
    problem = small(variant, layout)
    tensors = draw(problem, generator)
    for value in (math.nan, math.inf, -math.inf):
        place(tensors[0], value, 3, generator)
    want = compare(problem, tensors, run(machine, problem, tensors, path))
    assert want.isnan().any() and want.isinf().any() and want.isfinite().any()


@everywhere
@laid_out
@pytest.mark.parametrize("activations", [("relu6", "gelu"), ("silu", "relu"), ("gelu_tanh", "hardswish")], ids="-".join)
@pytest.mark.parametrize("variant", ["fp32", "bf16"])
def test_in_x_with_activations(machine, generator, variant: str, activations, layout: str, path: str):
    """relu6 makes Inf finite again; gelu of -Inf is NaN as in PyTorch."""
    problem = small(variant, layout, *activations)
    tensors = draw(problem, generator)
    for value in (math.nan, math.inf, -math.inf):
        place(tensors[0], value, 3, generator)
    compare(problem, tensors, run(machine, problem, tensors, path))


@everywhere
@laid_out
@in_all_types
def test_in_weights_and_biases(machine, generator, variant: str, layout: str, path: str):
    problem = small(variant, layout)
    for which, value in (
        (2, math.nan),
        (2, math.inf),
        (4, math.nan),
        (4, -math.inf),
        (3, math.inf),
        (1, math.inf),
        (1, math.nan),
    ):
        tensors = draw(problem, generator)
        place(tensors[which], value, 1, generator)
        # At the border a tap lies on padding; backends differ on whether Inf * 0 counts there.
        where = (..., slice(1, -1), slice(1, -1)) if which == 1 else (...,)
        want = compare(problem, tensors, run(machine, problem, tensors, path), where)
        assert not want.isfinite().all()


@everywhere
@in_all_types
def test_every_nan_is_nan(machine, generator, variant: str, path: str):
    """Rounding an operand by adding to its bits must not carry a NaN of all ones into a number."""
    problem = small(variant, "contiguous")
    for which in (0, 2):
        for pattern in (-1, 1 << (8 * problem.element_size - 1)):  # all ones; all ones but the sign
            pattern = -1 if pattern == -1 else pattern - 1
            tensors = draw(problem, generator)
            at = (1, 3, 5, 7) if which == 0 else (3, 5, 0, 0)
            bits = BITS[tensors[which].dtype]
            tensors[which].view(bits)[at] = pattern
            assert tensors[which][at].isnan()
            want = compare(problem, tensors, run(machine, problem, tensors, path))
            assert want.isnan().any()


@everywhere
@laid_out
@in_all_types
def test_hidden_values_beyond_the_operand(machine, generator, variant: str, layout: str, path: str):
    """Hidden values that fp16 cannot hold, or near fp32's end, give finite results; and cancel exactly."""
    problem = small(variant, layout)
    x, dw_weight, pw_weight, dw_bias, pw_bias = tensors = draw(problem, generator)
    x[:, :2].normal_(generator=generator)
    dw_weight[:2] = 0
    dw_bias[:2] = 0
    dw_weight[0, 0, 1, 1], dw_weight[1, 0, 1, 1] = 300.0, -300.0
    x[0, 0, 3:6, 4], x[1, 0, 9, 9], x[1, 1, 9, 9] = 300.0, 310.0, 310.0
    scale = 2.0**-10
    if problem.dtype != "float16":
        # 3e38 of at most 3.4e38. bf16 and one-pass TF32 keep fp32's range, the split must not leave it.
        dw_weight[0, 0, 1, 1], dw_weight[1, 0, 1, 1], scale = 1e36, -1e36, 2.0**-100
    pw_weight[:, :2] = scale
    y = run(machine, problem, tensors, path)
    want = compare(problem, tensors, y)
    assert want.isfinite().all()
    hidden = accuracy.depthwise(problem, x.double(), dw_weight.double(), dw_bias.double())
    assert hidden.abs().max() > (65504 if problem.dtype == "float16" else 2.9e38)


@everywhere
@laid_out
def test_results_beyond_fp16_are_inf(machine, generator, layout: str, path: str):
    problem = small("fp16", layout)
    tensors = draw(problem, generator)
    for t in tensors[1:3]:
        t.abs_()
    tensors[0][0, :, 8, 8] = 500.0
    tensors[2][3] = 50.0
    want = compare(problem, tensors, run(machine, problem, tensors, path))
    assert (want.abs() > 2 * 65504).any() and (want.abs() < 30000).any()


@everywhere
@laid_out
def test_the_largest_float32(machine, generator, layout: str, path: str):
    """Rounding it up to TF32 is Inf; fp32-grade arithmetic must not show that."""
    problem = small("fp32", layout)
    x, dw_weight, pw_weight, dw_bias, _ = tensors = draw(problem, generator)
    dw_weight[5], dw_bias[5] = 0, 0
    dw_weight[5, 0, 1, 1] = 1
    x[0, 5, 7, 7] = torch.finfo(torch.float32).max
    pw_weight[:, 5] = 2.0**-64
    pw_weight[2, 5] = 0.5
    want = compare(problem, tensors, run(machine, problem, tensors, path))
    assert want.abs().max() > 1e38
