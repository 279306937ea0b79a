"""The device code of every activation, compiled for the host and held against float64.

The GPU's own instructions are emulated: exact, or off by as many units in the last place as PTX allows them.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from separable import UNIT_ROUNDOFF
from sweeps import EXACT, GELU_LOSS, assert_accurate, values

from cutlass_sep import source

#: Host code for the assembly that activation.cuh may hold, from its operands to y; `off` is a number of units.
EMULATED = {
    "ex2.approx.ftz.f32 %0, %1;": "shifted(flushed(std::exp2(double({}))))",
    "rcp.approx.ftz.f32 %0, %1;": "shifted(flushed(1 / double({})))",
    "max.NaN.f32 %0, %1, %2;": "std::isnan({0}) || std::isnan({1}) ? NAN : std::signbit({0} - {1}) ? {1} : {0}",
}
HOST = """
#include <cmath>
#include <cstdint>
#include <cstring>
using std::exp2;
#define CUTLASS_DEVICE inline
#define CUTLASS_PRAGMA_UNROLL
namespace cutlass { struct half_t { uint16_t bits; }; struct bfloat16_t { uint16_t bits; }; }
static int off = 0;
inline float __int_as_float(int32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline int32_t __float_as_int(float x) { int32_t bits; std::memcpy(&bits, &x, 4); return bits; }
inline float shifted(float x) { return x != 0 && std::isfinite(x) ? __int_as_float(__float_as_int(x) + off) : x; }
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
"""
APPLY = """
extern "C" void {name}_{dtype}(float* x, long count, int units) {{
  off = units;
  for (long i = 0; i < count; ++i) x[i] = cutlass_sep::{struct}<{element}>::apply(x[i]);
}}
"""
ELEMENTS = {torch.float32: "float", torch.float16: "cutlass::half_t", torch.bfloat16: "cutlass::bfloat16_t"}
#: Values of fp32 to try.
COUNT = 1 << 18
#: The activation of that name and for that type, of fp32 values; the approximate instructions off by so many units.
Apply = Callable[[str | None, torch.dtype, torch.Tensor, int], torch.Tensor]


def _emulated(match: re.Match) -> str:
    operands = re.findall(r'"f"\(([^()]*)\)', match[2])
    return f"y = {EMULATED[match[1]].format(*operands)};"


@pytest.fixture(scope="module")
def apply(tmp_path_factory: pytest.TempPathFactory) -> Apply:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler here (c++, g++, clang++)")
    folder: Path = tmp_path_factory.mktemp("activations")
    device = (source.templates() / "activation.cuh").read_text().replace("#pragma once", "")
    device = re.sub(r'asm\("([^"]*)" : "=f"\(y\) : ([^;]*)\);', _emulated, device)
    functions = (
        APPLY.format(name=name, struct=struct, dtype=str(dtype).removeprefix("torch."), element=element)
        for name, struct in source.ACTIVATION_STRUCTS.items()
        for dtype, element in ELEMENTS.items()
    )
    (folder / "activations.cpp").write_text(HOST + device + "".join(functions))
    built = folder / "activations.so"
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    command = [compiler, *options, "-o", built, folder / "activations.cpp"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    library = ctypes.CDLL(str(built))

    def run(name: str | None, dtype: torch.dtype, x: torch.Tensor, units: int) -> torch.Tensor:
        y = x.clone()
        function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
        function(ctypes.c_void_p(y.data_ptr()), ctypes.c_long(y.numel()), ctypes.c_int(units))
        return y

    return run


@pytest.mark.parametrize("units", [-2, 0, 2])
@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("name", source.ACTIVATION_STRUCTS, ids=str)
def test_values(apply: Apply, name: str | None, dtype: torch.dtype, units: int):
    x = values(dtype, COUNT, torch.Generator().manual_seed(0))
    assert_accurate(name, x, apply(name, dtype, x.float(), units).to(dtype))


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_zero_keeps_its_sign(apply: Apply, name: str, dtype: torch.dtype):
    y = apply(name, dtype, torch.tensor([0.0, -0.0]), 0)
    assert torch.equal(y, torch.zeros(2))
    assert torch.equal(y.signbit(), torch.tensor([False, True]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gelu_before_rounding(apply: Apply, dtype: torch.dtype):
    """Rounding makes most of the error: sums of many results keep their accuracy."""
    x = torch.linspace(-14, 14, COUNT)
    error = apply("gelu", dtype, x, 0).double() - EXACT["gelu"](x.double())
    assert (error.abs() <= GELU_LOSS * UNIT_ROUNDOFF[dtype] * x.double().abs()).all()
