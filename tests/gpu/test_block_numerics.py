"""Accuracy of the block where it is hard: long reductions, no cancellation, the lead shape; and torch's TF32 flags."""

from __future__ import annotations

import pytest
import torch

from cutlass_sep import op
from cutlass_sep.bench import inputs
from cutlass_sep.bench.inputs import options
from cutlass_sep.block_schedule import FORMS
from cutlass_sep.functional import separable_conv_block1d
from cutlass_sep.problem import SeparableBlock1dProblem
from cutlass_sep.schedule import PATHS

from . import accuracy
from .calls import Poisoned, Tensors, draw, make_block
from .test_numerics import LEAD_LARGEST, REHEARSED_FLOPS
from .test_special_values import compare

LAYOUTS = ("contiguous", "channels_last")

every_kernel = pytest.mark.parametrize(("form", "path"), [(form, path) for form in FORMS for path in PATHS])
laid_out = pytest.mark.parametrize("layout", LAYOUTS)


def require(machine, problem: SeparableBlock1dProblem, path: str, form: str) -> None:
    """Skip what there is no kernel for, and in the rehearsal what a CPU cannot compute in good time."""
    machine.require(problem, path, form)
    if problem.flops > REHEARSED_FLOPS:
        machine.needs_gpu(problem, path=path, form=form)


def run(machine, problem: SeparableBlock1dProblem, tensors: Tensors, path: str, form: str) -> accuracy.Found:
    operator = op.SeparableConvBlock1d(*tensors, **options(problem), path=path, form=form, arch=machine.arch)
    assert (operator.path, operator.form) == (path, form)
    out = Poisoned.like(problem, machine.device)
    operator.run(*tensors, out=out.tensor)
    out.check()
    return accuracy.judge(problem, tensors, out.tensor, f"path {path}, form {form}, {operator.schedule}")


def run_compared(machine, problem: SeparableBlock1dProblem, tensors: Tensors, path: str, form: str) -> torch.Tensor:
    """y, finite and each of its elements within its bound."""
    operator = op.SeparableConvBlock1d(*tensors, **options(problem), path=path, form=form, arch=machine.arch)
    y = operator.run(*tensors)
    assert compare(problem, tensors, y).isfinite().all()
    return y


@every_kernel
@laid_out
@pytest.mark.parametrize("variant", ["fp32", "tf32", "fp16", "bf16"])
def test_lead_shape(machine, generator, variant: str, layout: str, path: str, form: str):
    """On tensors as a module has them: the limit on |y - y64| is for those."""
    problem = make_block(variant, layout, n=32, c=256, l=4096, e=512, kernel=9)
    assert inputs.is_lead(problem)
    require(machine, problem, path, form)
    drawn = draw(problem, generator)
    found = run(machine, problem, (drawn[0], *tuple(inputs.tensors(problem, machine.device))[1:]), path, form)
    if variant == "fp32":
        assert found.largest <= LEAD_LARGEST
    run(machine, problem, drawn, path, form)


@every_kernel
@laid_out
@pytest.mark.parametrize("e", [512, 2048])
def test_long_reductions_are_fp32_grade(machine, generator, e: int, layout: str, path: str, form: str):
    """Also without cancellation, where cut-off sums lean to one side."""
    problem = make_block("fp32", layout, n=1, c=256, l=520, e=e, kernel=9)
    require(machine, problem, path, form)
    tensors = draw(problem, generator)
    run(machine, problem, tensors, path, form)
    run(machine, problem, tuple(t.abs_() for t in tensors), path, form)


@every_kernel
@laid_out
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("variant", ["fp16", "bf16"])
def test_sixteen_bit_is_as_good_as_eager(
    machine, generator, variant: str, residual: bool, layout: str, path: str, form: str
):
    problem = make_block(variant, layout, n=2, c=128, l=520, e=512, kernel=9, residual=residual)
    require(machine, problem, path, form)
    assert problem.n * problem.o * problem.l >= accuracy.ENOUGH_FOR_EAGER
    run(machine, problem, draw(problem, generator), path, form)


@every_kernel
@laid_out
def test_tf32_is_one_rounding_of_each_operand(machine, generator, layout: str, path: str, form: str):
    """And no better: "tf32" asked for must not pay for "ieee"."""
    problem = make_block("tf32", layout, n=1, c=64, l=256, e=128, residual=False)
    require(machine, problem, path, form)
    found = run(machine, problem, draw(problem, generator), path, form)
    assert found.relative > 10 * accuracy.FP32_GRADE


@pytest.mark.parametrize("variant", ["fp32", "tf32"])
@pytest.mark.parametrize("kernel", [4, 5, 8])
@pytest.mark.parametrize("l", [4, 12, 60, 68, 132, 516])
def test_contiguous_rows_that_end_within_8_positions(machine, generator, l: int, kernel: int, variant: str):  # noqa: E741
    """Of the fused form: half of the last group of positions that share a scale lies outside."""
    problem = make_block(variant, n=3, c=40, l=l, e=72, kernel=kernel)
    require(machine, problem, "sm90", "fused")
    run_compared(machine, problem, draw(problem, generator), "sm90", "fused")


@every_kernel
@laid_out
@pytest.mark.parametrize("exponent", [-60, -100, -120])
def test_tiny_values_are_fp32_grade(machine, generator, exponent: int, layout: str, path: str, form: str):
    """No power of two that fp32 holds the inverse of takes the last ones to the end of fp16's range."""
    problem = make_block("fp32", layout, n=2, c=24, l=200, e=40, activation=None, residual=False, project_bias=False)
    require(machine, problem, path, form)
    x, _, _, _, expand_bias, taps_bias, _ = tensors = draw(problem, generator)
    for t in (x, expand_bias, taps_bias):
        t.mul_(2.0**exponent)
    run(machine, problem, tensors, path, form)


@every_kernel
@laid_out
@pytest.mark.parametrize("variant", ["fp32", "tf32"])
def test_tiny_values_and_zeros_beside_others(machine, generator, variant: str, layout: str, path: str, form: str):
    problem = make_block(variant, layout, n=3, c=24, l=200, e=40, activation="relu", residual=False,
                         expand_bias=False, dw_bias=False, project_bias=False)  # fmt: skip
    require(machine, problem, path, form)
    tensors = draw(problem, generator)
    x = tensors[0]
    x[0] *= 1e-30
    x[1, :, 96:112] = 0
    x[2] = 0
    found = run_compared(machine, problem, tensors, path, form)
    assert (found[0] != 0).any() and (found[1, :, 98:110] == 0).all() and (found[2] == 0).all()


@every_kernel
@laid_out
@pytest.mark.parametrize("which", ["expand", "taps", "project"])
@pytest.mark.parametrize("exponent", [77, 80, 113])
def test_weights_near_the_end_of_float32(
    machine, generator, exponent: int, which: str, layout: str, path: str, form: str
):
    """y stays near 1."""
    problem = make_block("fp32", layout, n=2, c=24, l=200, e=40, activation="relu", residual=False)
    require(machine, problem, path, form)
    x, expand, taps, project, expand_bias, taps_bias, _ = tensors = draw(problem, generator)
    large, small = {
        "expand": ((expand,), (project,)),
        "taps": ((taps,), (project,)),
        "project": ((project,), (x, expand_bias, taps_bias)),
    }[which]
    for t in large:
        t.clamp_(-1.9, 1.9).mul_(2.0**exponent)
    for t in small:
        t.mul_(2.0**-exponent)
    run_compared(machine, problem, tensors, path, form)


@laid_out
def test_scales_whose_product_float32_does_not_hold(machine, generator, layout: str):
    """Of the fused form: the largest hidden value meets the smallest weights, so that y is finite."""
    path, form = "sm90", "fused"
    problem = make_block("fp32", layout, n=2, c=24, l=200, e=40, activation="relu")
    require(machine, problem, path, form)
    _, _, _, project, _, taps_bias, _ = tensors = draw(problem, generator)
    taps_bias[0] = 2.0**77
    project.mul_(2.0**100)
    project[:, 0] = 2.0**40
    found = run_compared(machine, problem, tensors, path, form)
    assert found.abs().max() > 2.0**116


@every_kernel
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_F24_gelu_is_erf_and_gelu_tanh_is_tanh(machine, activation: str, path: str, form: str):
    """The branch carries z in [-6, 6]: the two forms differ by up to 4.7e-4."""
    l = 4096  # noqa: E741
    problem = make_block("fp32", n=1, c=1, l=l, e=1, kernel=1, activation=activation, residual=False)
    require(machine, problem, path, form)
    z = torch.linspace(-6, 6, l, device=machine.device).view(1, 1, l)
    one, zero = torch.ones(1, 1, 1, device=machine.device), torch.zeros(1, device=machine.device)
    arguments = (z, one, one, one, zero, zero, zero)
    y = op.SeparableConvBlock1d(*arguments, **options(problem), path=path, form=form, arch=machine.arch).run(*arguments)
    want = accuracy.ACTIVATIONS[activation](z.double())
    assert (y.double() - want).abs().max() < 2e-6


@pytest.mark.parametrize("kind", [*FORMS, "path torch"])
def test_F15_only_the_call_decides_about_tf32(machine, fused, tf32_flags, kind: str):
    """2077 needs 12 significant bits, TF32 has 11."""
    x = torch.full((1, 1, 4), 2077.0, device=machine.device)
    one = torch.ones(1, 1, 1, device=machine.device)
    quiet = {"activation": None, "residual": False}
    form = None if kind == "path torch" else kind
    problem = make_block("fp32", n=1, c=1, l=4, e=1, kernel=1, activation=None, residual=False, expand_bias=False,
                         dw_bias=False, project_bias=False)  # fmt: skip
    if form is not None:
        machine.require(problem, form=form)
    fused(None, form)
    for flag in (False, True, False):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = flag
        for precision in ("ieee", "tf32"):
            if form is not None:
                y = separable_conv_block1d(x, one, one, one, **quiet, fp32_precision=precision)
            else:
                operator = op.SeparableConvBlock1d(x, one, one, one, **quiet, fp32_precision=precision, path="torch")
                y = operator.run(x, one, one, one)
            if precision == "ieee":
                assert torch.equal(y, x)
            elif form is not None:
                assert torch.equal(y, torch.full_like(y, 2078.0)) or torch.equal(y, torch.full_like(y, 2076.0))


def test_F15_gradients_are_fp32_whatever_the_flags_say(machine, generator, fused, tf32_flags):
    """Every sum has at most n products: ||g - g64|| <= 2 n u ||g64||, where TF32 would have thousands of u."""
    problem = make_block("fp32", c=32, l=72, e=64)
    tensors = draw(problem, generator)
    leaves = [t.clone().requires_grad_() for t in tensors]
    doubles = [t.double().requires_grad_() for t in tensors]
    accuracy.exact(problem, doubles).sum().backward()
    longest = problem.n * problem.l
    for flag in (False, True, False):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = flag
        for leaf in leaves:
            leaf.grad = None
        separable_conv_block1d(*leaves, **options(problem)).sum().backward()
        for got, want in zip(leaves, doubles, strict=True):
            error = (got.grad.double() - want.grad).norm() / want.grad.norm()
            assert error <= 2 * longest * accuracy.UNIT["float32"]
