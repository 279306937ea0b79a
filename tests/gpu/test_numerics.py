"""Accuracy where it is hard: long reductions, sums without cancellation, the lead shape, every value that an activation
can meet; and torch's TF32 flags."""

from __future__ import annotations

import ctypes

import pytest
import torch
from sweeps import assert_accurate, values

from cutlass_sep import compiler, kernel, op, source
from cutlass_sep.bench import inputs
from cutlass_sep.bench.inputs import options
from cutlass_sep.functional import depthwise_separable_conv2d
from cutlass_sep.problem import SeparableConv2dProblem
from cutlass_sep.schedule import supports

from . import accuracy
from .calls import Poisoned, Tensors, draw, make_problem

PATHS = ("sm90", "portable")
LAYOUTS = ("contiguous", "channels_last")
#: Multiply-adds that the rehearsal's CPU can be asked for.
REHEARSED_FLOPS = 2e9
#: Largest |y - y64| on the lead shape, fp32-grade.
LEAD_LARGEST = 1e-5
#: Values of fp32 that an activation is tried on.
SWEPT = 1 << 24
SWEEP_THREADS = 256
SWEEP = """
extern "C" __global__ void {name}_{dtype}({element} const* x, {element}* y) {{
  long long const i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  y[i] = {element}(cutlass_sep::{struct}<{element}>::apply(static_cast<float>(x[i])));
}}
"""
ELEMENTS = {torch.float32: "float", torch.float16: "cutlass::half_t", torch.bfloat16: "cutlass::bfloat16_t"}


def run(machine, problem: SeparableConv2dProblem, tensors: Tensors, path: str | None) -> accuracy.Found:
    operator = op.DepthwiseSeparableConv2d(*tensors, **options(problem), path=path, arch=machine.arch)
    assert operator.path == path
    out = Poisoned.like(problem, machine.device)
    operator.run(*tensors, out=out.tensor)
    out.check()
    return accuracy.judge(problem, tensors, out.tensor, f"path {path}, {operator.schedule}")


def require(machine, problem: SeparableConv2dProblem, path: str) -> None:
    """Skip what `path` cannot run, and in the rehearsal what a CPU cannot compute in good time."""
    support = supports(problem, path, machine.arch)
    if not support:
        pytest.skip(f"path {path}: {support.reason}")
    if problem.flops > REHEARSED_FLOPS:
        machine.needs_gpu(problem, path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", ["fp32", "tf32", "fp16", "bf16"])
def test_lead_shape(machine, generator, variant: str, layout: str, path: str):
    problem = make_problem(variant, layout, n=16, c=64, h=512, w=512, o=128, dw_bias=False, pw_bias=False)
    assert inputs.is_lead(problem)
    require(machine, problem, path)
    found = run(machine, problem, draw(problem, generator), path)
    if variant == "fp32":
        assert found.largest <= LEAD_LARGEST


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("c", [256, 2048])
def test_long_reductions_are_fp32_grade(machine, generator, c: int, layout: str, path: str):
    """Also without cancellation, where cut-off sums lean to one side."""
    problem = make_problem("fp32", layout, n=1, c=c, h=32, w=32, o=256)
    require(machine, problem, path)
    tensors = draw(problem, generator)
    run(machine, problem, tensors, path)
    run(machine, problem, tuple(t.abs_() for t in tensors), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activations", [(None, None), ("gelu", "silu")], ids=["linear", "gelu-silu"])
@pytest.mark.parametrize("variant", ["fp16", "bf16"])
def test_sixteen_bit_is_as_good_as_eager(machine, generator, variant: str, activations, layout: str, path: str):
    mid, out = activations
    problem = make_problem(variant, layout, n=2, c=256, h=28, w=32, o=128, mid_activation=mid, activation=out)
    require(machine, problem, path)
    tensors = draw(problem, generator)
    assert problem.n * problem.o * problem.p * problem.q >= accuracy.ENOUGH_FOR_EAGER
    run(machine, problem, tensors, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tf32_is_one_rounding_of_each_operand(machine, generator, layout: str, path: str):
    """And no better: "tf32" asked for must not pay for "ieee"."""
    problem = make_problem("tf32", layout, n=1, c=64, h=32, w=32, o=64)
    require(machine, problem, path)
    found = run(machine, problem, draw(problem, generator), path)
    assert found.relative > 10 * accuracy.FP32_GRADE


@pytest.mark.parametrize("kind", ["fused", "path torch"])
def test_F15_only_the_call_decides_about_tf32(machine, fused, tf32_flags, kind: str):
    """2077 needs 12 significant bits, TF32 has 11."""
    x = torch.full((1, 1, 4, 4), 2077.0, device=machine.device)
    one = torch.ones(1, 1, 1, 1, device=machine.device)
    for flag in (False, True, False):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = flag
        for precision in ("ieee", "tf32"):
            if kind == "fused":
                y = depthwise_separable_conv2d(x, one, one, fp32_precision=precision)
            else:
                y = op.DepthwiseSeparableConv2d(x, one, one, fp32_precision=precision, path="torch").run(x, one, one)
            if precision == "ieee":
                assert torch.equal(y, x)
            elif kind == "fused":
                assert torch.equal(y, torch.full_like(y, 2078.0)) or torch.equal(y, torch.full_like(y, 2076.0))


def test_F15_gradients_are_fp32_whatever_the_flags_say(machine, generator, fused, tf32_flags):
    """Every sum has at most n products: ||g - g64|| <= 2 n u ||g64||, where TF32 would have thousands of u."""
    problem = make_problem("fp32", c=32, h=12, w=12, o=32)
    tensors = draw(problem, generator)
    leaves = [t.clone().requires_grad_() for t in tensors]
    doubles = [t.double().requires_grad_() for t in tensors]
    accuracy.exact(problem, doubles).sum().backward()
    longest = problem.n * problem.p * problem.q
    for flag in (False, True, False):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = flag
        for leaf in leaves:
            leaf.grad = None
        depthwise_separable_conv2d(*leaves, **options(problem)).sum().backward()
        for got, want in zip(leaves, doubles, strict=True):
            error = (got.grad.double() - want.grad).norm() / want.grad.norm()
            assert error <= 2 * longest * accuracy.UNIT["float32"]


@pytest.fixture(scope="module")
def sweeps(machine):
    """The library with a kernel for each activation and type of elements; None in a rehearsal, which compiles it."""
    from cuda.bindings import driver

    kernels = [
        SWEEP.format(name=name, struct=struct, dtype=str(dtype).removeprefix("torch."), element=element)
        for name, struct in source.ACTIVATION_STRUCTS.items()
        for dtype, element in ELEMENTS.items()
    ]
    activations = (source.templates() / "activation.cuh").read_text().replace("#pragma once\n", "")
    headers = "#include <cutlass/cutlass.h>\n#include <cutlass/numeric_types.h>\n"
    cubin = compiler.build("".join([headers, activations, *kernels]), machine.arch, name="sweeps")
    if machine.rehearsing:
        yield None
        return
    torch.cuda.synchronize()  # makes the device's context current
    library = kernel._checked(driver.cuLibraryLoadData(cubin.code, [], [], 0, [], [], 0), "loading the sweeps")
    yield library
    kernel._checked(driver.cuLibraryUnload(library), "unloading the sweeps")


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("name", source.ACTIVATION_STRUCTS, ids=str)
def test_activations_of_every_value(machine, generator, sweeps, name: str | None, dtype: torch.dtype):
    """Every value of the 16-bit types, 2^24 values of fp32."""
    if machine.rehearsing:
        pytest.skip("rehearsal: the kernels are built, the rest needs a GPU")
    from cuda.bindings import driver

    symbol = f"{name}_{str(dtype).removeprefix('torch.')}"
    function = kernel._checked(driver.cuLibraryGetKernel(sweeps, symbol.encode()), f"finding {symbol}")
    x = values(dtype, SWEPT, generator)
    y = torch.empty_like(x)
    blocks, rest = divmod(x.numel(), SWEEP_THREADS)
    assert rest == 0
    stream = torch.cuda.current_stream().cuda_stream
    arguments = (x.data_ptr(), y.data_ptr()), (ctypes.c_void_p, ctypes.c_void_p)
    launched = driver.cuLaunchKernel(
        driver.CUfunction(int(function)), blocks, 1, 1, SWEEP_THREADS, 1, 1, 0, stream, arguments, 0
    )
    kernel._checked(launched, f"launching {symbol}")
    assert_accurate(name, x, y)
