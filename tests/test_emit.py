"""Stand-alone projects: what is written, what the host code asks of the driver, and that PyTorch builds and loads it.

The launches are compared with those of `kernel.py` through a driver that only writes down what it is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from separable import Case, plain

import cutlass_sep
from cutlass_sep import arch as archs
from cutlass_sep import emit, kernel, toolchain

HERE = Path(__file__).parent
FILES = ["check.py", "my_conv.cpp", "my_conv.cu", "my_conv.cubin", "my_conv.hpp"]
#: Addresses that tests/standalone/main.cpp gives the tensors: x, weights, biases, y, workspace.
ADDRESSES = tuple(range(0x1000, 0x8000, 0x1000))


def make_op(case: Case, dtype=torch.float32, layout="contiguous", path=None, arch="sm_90a", **options):
    tensors = case.tensors("meta", dtype)
    if layout == "channels_last":
        tensors = (tensors[0].contiguous(memory_format=torch.channels_last), *tensors[1:])
    return cutlass_sep.op.DepthwiseSeparableConv2d(*tensors, **case.options, path=path, arch=arch, **options)


@pytest.fixture(scope="module")
def op():
    case = Case(n=3, c=64, o=96, h=17, w=32, mid_activation="relu", activation="gelu_tanh", pw_bias=False)
    return make_op(case, layout="channels_last", path="sm90")


@pytest.fixture(scope="module")
def project(op, tmp_path_factory):
    folder = tmp_path_factory.mktemp("project") / "made" / "here"
    emit.pytorch(op, "my_conv", folder)
    return folder


def test_writes_its_files_and_touches_no_other(op, project):
    assert sorted(path.name for path in project.iterdir()) == FILES
    assert (project / "my_conv.cubin").read_bytes() == op.compile().cubin
    before = {path.name: path.read_bytes() for path in project.iterdir()}
    (project / "my_conv.hpp").write_text("old")
    (project / "own.txt").write_text("mine")
    emit.pytorch(op, "my_conv", str(project))
    after = {path.name: path.read_bytes() for path in project.iterdir()}
    assert after.pop("own.txt") == b"mine"
    assert after == before
    (project / "own.txt").unlink()


@pytest.mark.parametrize("name", ["", "a-b", "1a", "a b", "../a", "class", "größe", None])
def test_refuses_a_name_that_is_no_identifier(op, tmp_path, name):
    with pytest.raises(ValueError, match="identifier"):
        emit.pytorch(op, name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refuses_an_op_without_a_kernel(tmp_path):
    with pytest.raises(cutlass_sep.Unsupported, match="path torch"):
        emit.pytorch(make_op(Case(), path="torch"), "my_conv", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_source_is_whole_and_keeps_both_licences(op, project):
    text = (project / "my_conv.cu").read_text()
    assert text.endswith(op.source)
    assert '#include "' not in text
    licence = (HERE.parent / "LICENSE").read_text().strip()
    assert licence in text
    first = header("cutlass/cutlass.h").read_text().split("**/")[0]
    notice = [re.sub(r"^ \* ?", "", line).strip() for line in first.splitlines() if re.match(r" \* ", line)]
    assert len(notice) > 20
    lines = [line.strip() for line in text.splitlines()]
    assert [line for line in notice if line not in lines] == []


def test_the_project_needs_no_package_and_no_cuda_header(project):
    for name in ("check.py", "my_conv.cpp", "my_conv.hpp"):
        for line in (project / name).read_text().splitlines():
            if re.match(r"\s*(import|from|#include)\b", line):
                assert "cutlass" not in line and "cuda" not in line, line


def test_the_host_states_the_arguments_of_the_kernel(op, project):
    def fields(text):
        body = re.search(r"struct Arguments \{(.*?)\};", text, re.DOTALL)[1]
        return re.sub(r"//.*", "", body).split()

    assert fields((project / "my_conv.hpp").read_text()) == fields(op.source)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The folder of a libcuda.so.1 that writes down its calls."""
    folder = tmp_path_factory.mktemp("driver")
    include = header("cuda.h").parent
    compile_cpp(HERE / "standalone" / "driver.cpp", folder / "libcuda.so.1", "-shared", "-fPIC", f"-I{include}")
    return folder


def header(name) -> Path:
    return next(path for folder in toolchain.include_paths() if (path := Path(folder) / name).is_file())


def compiler_or_skip() -> str:
    """The C++ compiler that check.py would take."""
    found = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return found or pytest.skip("no C++ compiler here (c++, g++, clang++)")


def compile_cpp(path, target, *options):
    command = [compiler_or_skip(), "-std=c++17", "-Wall", "-Werror", str(path), "-o", str(target), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Host:
    """A program of an emitted launcher and tests/standalone/main.cpp."""

    def __init__(self, op, folder, driver):
        self.environment = {"LD_LIBRARY_PATH": str(driver), "FAKE_CAPABILITY": "{}.{}".format(*archs.ARCHS[op.arch])}
        if op.path == "sm90":
            self.environment["FAKE_TENSOR_MAPS"] = "1"
        emit.pytorch(op, "my_conv", folder)
        self.program = folder / "main"
        cubin = folder / "my_conv.cubin"
        compile_cpp(
            HERE / "standalone" / "main.cpp", self.program, f"-I{folder}", f'-DCUBIN_FILE="{cubin}"', "-ldl"
        )

    def run(self, *shapes, **environment):
        """(calls of the driver, message of the exception if there was one)."""
        command = [str(self.program), *(str(extent) for shape in shapes for extent in shape)]
        done = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == (1 if done.stderr else 0)
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


CASES = {
    "sm90-channels_last-ieee": (Case(n=2, c=64, o=128, h=64, w=64), torch.float32, "channels_last", "sm90", "sm_90a"),
    "sm90-contiguous-ieee": (
        Case(n=2, c=48, o=40, h=64, w=64, kernel=(3, 5), padding="same", dilation=(2, 1), dw_bias=False),
        torch.float32, "contiguous", "sm90", "sm_90a",
    ),
    "sm90-contiguous-bfloat16": (
        Case(n=2, c=192, o=64, h=64, w=64, stride=(2, 1), padding=(2, 1), pw_bias=False),
        torch.bfloat16, "contiguous", "sm90", "sm_90a",
    ),
    "sm90-channels_last-float16": (
        Case(n=1, c=256, o=512, h=14, w=14),
        torch.float16, "channels_last", "sm90", "sm_90a",
    ),
    "portable-contiguous-ieee": (Case(n=2, c=20, o=24, h=31, w=33), torch.float32, "contiguous", "portable", "sm_80"),
    "portable-channels_last-float16": (
        Case(n=2, c=64, o=64, h=32, w=32, kernel=(4, 4), padding="same"),
        torch.float16, "channels_last", "portable", "sm_90a",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_host_launches_as_kernel_py_does(name, tmp_path, driver, monkeypatch):
    case, dtype, layout, path, arch = CASES[name]
    op = make_op(case, dtype, layout, path, arch)
    host = Host(op, tmp_path, driver)
    p = op.problem
    shapes = [(p.n, p.h, p.w), (1, p.h + 1, p.w), (37, 5, p.w), (16, 512, 512)]
    calls, error = host.run(*shapes)
    assert error == ""
    assert calls.pop(0)["head"] == list(op.compile().cubin[:64])
    assert calls.pop(0) == {"call": "reserve", "kernel": 2, "bytes": op.kernel.geometry.shared_bytes}
    for n, h, w in shapes:
        problem = dataclasses.replace(p, n=n, h=h, w=w)
        expected = launches(kernel.Kernel(problem, op.schedule, op.arch), monkeypatch)
        assert calls[: len(expected)] == expected
        del calls[: len(expected)]
    assert calls == []


def launches(of: kernel.Kernel, monkeypatch) -> list[dict]:
    """The calls of the driver that one launch of a kernel makes, as tests/standalone/driver.cpp writes them."""
    from cuda.bindings import driver as d

    types, swizzles = d.CUtensorMapDataType, d.CUtensorMapSwizzle
    x, dw_weight, pw_weight, dw_bias, pw_bias, y, workspace = ADDRESSES
    encoded = []

    def record(dtype, address, extents, strides, box, swizzle_bytes):
        data_type = getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}")
        swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
        if swizzle_bytes in (32, 64, 128):
            swizzle = getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{swizzle_bytes}B")
        enums = [
            data_type, d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ]  # fmt: skip
        encoded.append(
            {
                "call": "encode", "address": address, "extents": list(extents), "strides": list(strides),
                "box": list(box), "every": [1] * len(box), "enums": [int(value) for value in enums],
            }  # fmt: skip
        )
        return b""

    monkeypatch.setattr(kernel, "_tensor_map", record)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    if of.schedule.path == "sm90":
        of._encode_x(x)
        of._encode_y(y)
    launcher = kernel._Launcher(SimpleNamespace(pack=1, main=2), of.geometry, 0)
    problem = of.problem
    arguments = kernel._ARGUMENTS.pack(
        x, dw_weight, pw_weight, dw_bias, pw_bias, y, workspace, *launcher.scalars
    )  # fmt: skip
    assert launcher.scalars[3:5] == (problem.p, problem.q)
    return encoded + [
        {
            "call": "launch", "kernel": int(handle), "grid": shape[:3], "block": shape[3:6], "shared": shape[6],
            "stream": 0x50, "contexts": 1, "arguments": list(arguments),
            "maps": [x, y] if of.schedule.path == "sm90" else None,
        }
        for handle, *shape in (launcher.pack, launcher.main)
    ]  # fmt: skip


def test_more_blocks_than_one_grid_dimension_takes(tmp_path, driver):
    op = make_op(Case(c=8, o=8), path="portable")
    g = op.kernel.geometry
    rows = g.tile_p * op.schedule.warpgroups
    host = Host(op, tmp_path, driver)
    calls, _ = host.run((2**21, rows * 2**10, 3))
    grid = calls[-1]["grid"]
    assert grid == [2**31 - 1, 2, 1]
    assert struct.unpack_from("8i", bytes(calls[-1]["arguments"]), 56)[-1] == op.schedule.warpgroups


def test_the_host_says_what_is_wrong(tmp_path, driver):
    host = Host(make_op(Case(n=2, c=64, o=64, h=16, w=16), layout="channels_last", path="sm90"), tmp_path, driver)
    shape = (2, 16, 16)
    for capability in ("8.0", "9.1", "5.0"):
        calls, error = host.run(shape, FAKE_CAPABILITY=capability)
        assert calls == [] and "sm_90a" in error and capability in error
    calls, error = host.run(shape, FAKE_CAPTURING="1")
    assert calls == [] and "captured" in error and "before" in error
    for function in ("cuInit", "cuLibraryLoadData", "cuTensorMapEncodeTiled", "cuLaunchKernel"):
        _, error = host.run(shape, FAKE_FAIL=function)
        assert "failed: a fake error (CUDA driver error 1)" in error
    _, error = host.run(shape, LD_LIBRARY_PATH=str(tmp_path))
    assert torch.cuda.is_available() or "NVIDIA driver cannot be loaded" in error


def test_a_higher_minor_runs_what_is_not_tied_to_one(tmp_path, driver):
    host = Host(make_op(Case(c=8, o=8), path="portable", arch="sm_86"), tmp_path, driver)
    assert host.run((1, 8, 8), FAKE_CAPABILITY="8.9")[1] == ""
    assert "compute capability 8.0" in host.run((1, 8, 8), FAKE_CAPABILITY="8.0")[1]
    assert "compute capability 9.0" in host.run((1, 8, 8), FAKE_CAPABILITY="9.0")[1]


@pytest.fixture(scope="module")
def checked(project, tmp_path_factory):
    """`python check.py --json` where neither cutlass_sep nor nvcc can be used: (its result, the library it built)."""
    compiler_or_skip()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "pyproject.toml").write_text("not TOML: nobody is to read it")
    (elsewhere / "cutlass_sep.py").write_text("raise ImportError('the project must not need cutlass_sep')")
    (elsewhere / "nvcc").write_text("#!/bin/sh\nexit 9\n")
    (elsewhere / "nvcc").chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(elsewhere), "PATH": f"{elsewhere}:{os.environ['PATH']}"}
    command = [sys.executable, str(project / "check.py"), "--json", "--seed", "5"]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    libraries = list(project.glob("build/**/*.so"))
    assert libraries, done.stderr
    return done, libraries[0]


def test_check_builds_compares_and_says_so(checked):
    done, _ = checked
    answer = json.loads(done.stdout)
    assert answer["name"] == "my_conv" and answer["seed"] == 5
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        assert (done.returncode, answer["ok"], answer["missing"]) == (0, True, None), done.stderr
        assert [result["x"] for result in answer["results"]] == [[3, 64, 17, 32], [1, 64, 18, 32]]
        assert all(0 < result["share_of_bound"] <= 1 for result in answer["results"])
    else:
        assert (done.returncode, answer["ok"], answer["results"]) == (3, None, []), done.stderr
        assert answer["missing"] in done.stderr


def test_check_says_that_there_is_no_compiler(project):
    environment = {k: v for k, v in os.environ.items() if k != "CXX"} | {"PATH": str(project)}
    command = [sys.executable, str(project / "check.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert "C++ compiler" in done.stderr


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """check.py of a project as a module, and the library of its operator, to be implemented on the CPU by a test."""
    folder = tmp_path_factory.mktemp("judge")
    case = Case(n=2, c=24, o=16, h=9, w=8, kernel=(2, 3), padding="same", mid_activation="silu", activation="hardswish")
    emit.pytorch(make_op(case, path="portable"), "judged_conv", folder)
    spec = importlib.util.spec_from_file_location("judged_check", folder / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = torch.library.Library("judged_conv", "DEF")
    signature = "Tensor x, Tensor dw_weight, Tensor pw_weight, Tensor? dw_bias=None, Tensor? pw_bias=None"
    library.define(f"run({signature}) -> Tensor")
    library.define(f"run.out({signature}, *, Tensor(a!) out) -> Tensor(a!)")
    state = SimpleNamespace(module=module, case=case, flaw=lambda y: None, library=library)

    def run(*tensors):
        return plain(case, tensors)

    def run_out(*tensors, out):
        out.copy_(plain(case, tensors))
        state.flaw(out)
        return out

    library.impl("run", run, "CPU")
    library.impl("run.out", run_out, "CPU")
    return state


def wrong_by_a_tf32_rounding(y):
    y[1, 3, 8, 7] += 2.0**-9


def left_unwritten(y):
    y[0, 0, 0, 0] = float("nan")


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("flaw", [None, wrong_by_a_tf32_rounding, left_unwritten])
def test_check_tells_right_from_wrong(judge, flaw):
    judge.flaw = flaw or (lambda y: None)
    result = judge.module.compare(2, 9, 8, torch.Generator().manual_seed(3))
    assert (result["x"], result["y"]) == ([2, 24, 9, 8], [2, 16, 9, 8])
    assert result["ok"] == (flaw is None)
    assert result["not_finite"] == (flaw is left_unwritten)
    if flaw is None:
        assert 0 < result["share_of_bound"] < 1 and 0 < result["rel_error"] < 1e-6
    assert ("right" if flaw is None else "WRONG") in judge.module.describe(result)


def test_the_operator_checks_its_tensors(checked, op):
    """On meta tensors, as torch.compile calls it; the process is shared, the operator's name is its own."""
    _, library = checked
    torch.ops.load_library(library)
    run = torch.ops.my_conv.run
    with torch.device("meta"):
        x = torch.empty(5, 64, 9, 8).contiguous(memory_format=torch.channels_last)
        dw, pw, bias = torch.empty(64, 1, 3, 3), torch.empty(96, 64, 1, 1), torch.empty(64)
    y = run(x, dw, pw, bias)
    assert (y.shape, y.dtype) == ((5, 96, 9, 8), torch.float32)
    assert y.is_contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(y)
    assert run(x, dw, pw, bias, out=out) is out

    for message, arguments in {
        "x must be .N,64,H,W., got shape .64, 9, 8.": (x[0], dw, pw, bias),
        "x must have shape .5, 64, 9, 8., got .5, 32, 9, 8.": (x[:, :32], dw, pw, bias),
        "x must have dtype Float, got Half": (x.half(), dw, pw, bias),
        "x must be contiguous in memory format ChannelsLast": (x.contiguous(), dw, pw, bias),
        "dw_weight must have shape .64, 1, 3, 3., got .64, 1, 3, 2.": (x, dw[..., :2], pw, bias),
        "pw_weight must have dtype Float, got BFloat16": (x, dw, pw.bfloat16(), bias),
        "dw_bias is missing; the kernel was emitted with one": (x, dw, pw),
        "pw_bias was given; the kernel was emitted without one": (x, dw, pw, bias, torch.empty(96, device="meta")),
        "is empty or too large": (x[:, :, :0], dw, pw, bias),
    }.items():
        with pytest.raises(ValueError, match=message):
            run(*arguments)
    with pytest.raises(ValueError, match="out must have shape .5, 96, 9, 8., got .5, 96, 9, 4."):
        run(x, dw, pw, bias, out=out[..., :4])
    with pytest.raises(ValueError, match="out must be contiguous in memory format ChannelsLast"):
        run(x, dw, pw, bias, out=out.contiguous())
    with pytest.raises(NotImplementedError, match="CPU"):
        run(*(torch.empty_like(t, device="cpu") for t in (x, dw, pw, bias)))

