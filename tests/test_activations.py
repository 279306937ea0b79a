"""The device code of every activation, compiled for the host and held against PyTorch in float64."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from separable import ACTIVATIONS

from cutlass_sep import source


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """One C function an activation name, over the struct that a source with that name instantiates."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler here (c++, g++, clang++)")
    folder: Path = tmp_path_factory.mktemp("activations")
    functions = "".join(
        f'extern "C" float {name} (float x) {{ return cutlass_sep::{struct}::apply(x); }}\n'
        for name, struct in ((f"f_{name}", struct) for name, struct in source.ACTIVATION_STRUCTS.items())
    )
    text = "#include <cmath>\nusing std::erfc;\n#define CUTLASS_DEVICE\n#define erfcf(x) std::erfc(float(x))\n"
    text += (source.templates() / "activation.cuh").read_text().replace("#pragma once", "") + functions
    (folder / "activations.cpp").write_text(text)
    built = folder / "activations.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", built, folder / "activations.cpp"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(built))


@pytest.mark.parametrize("name", source.ACTIVATION_STRUCTS, ids=str)
def test_values(library: ctypes.CDLL, name: str | None):
    apply = getattr(library, f"f_{name}")
    apply.restype, apply.argtypes = ctypes.c_float, [ctypes.c_float]
    x = np.concatenate([np.linspace(-12, 12, 4801), np.geomspace(1e-30, 1e30, 241), -np.geomspace(1e-30, 20, 241)])
    x = x.astype(np.float32)
    got = torch.tensor([apply(float(v)) for v in x], dtype=torch.float64)
    exact = ACTIVATIONS[name](torch.from_numpy(x).double())
    # A handful of fp32 roundings, each relative to the argument: gelu_tanh cancels in 1 + tanh, gelu's tail does not.
    bound = 8 * 2.0**-24 * torch.from_numpy(np.abs(x)).double() + 2.0**-149
    assert ((got - exact).abs() <= bound).all(), (name, x[int(((got - exact).abs() - bound).argmax())])
    assert np.isnan(apply(float("nan")))
