"""Stand-alone projects: what is written, what the host code asks of the driver, and that PyTorch builds and loads it.

The launches are compared with those of `kernel.py` through a driver that only writes down what it is asked for.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import block
import pytest
import separable
import torch
import torch.nn.functional as F
from block import Block
from separable import Case

import cutlass_sep
from cutlass_sep import arch as archs
from cutlass_sep import emit, kernel, operators, toolchain
from cutlass_sep.block_schedule import BlockSchedule
from cutlass_sep.schedule import Schedule, behind

HERE = Path(__file__).parent
FILES = ["check.py", "my_conv.cpp", "my_conv.cu", "my_conv.cubin", "my_conv.hpp"]
#: Address that tests/standalone/main.cpp gives the first tensor (of x, weights, biases, y, workspace), and the distance
#: from one to the next.
FIRST_ADDRESS = 0x1000


def make_op(case: Case | Block, dtype=torch.float32, layout="contiguous", path=None, arch="sm_90a", **options):
    of = cutlass_sep.op.SeparableConvBlock1d if isinstance(case, Block) else cutlass_sep.op.DepthwiseSeparableConv2d
    return of(*case.tensors("meta", dtype, layout), **case.options, path=path, arch=arch, **options)


def uncompiled(op):
    """`op` with other bytes in place of its cubin: what is launched, and how, does not depend on them."""
    op.compile = lambda: SimpleNamespace(cubin=bytes(range(64, 192)))
    return op


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


@pytest.mark.parametrize("there", ["README.md", "check.py", "my_conv.cu", "other project", "empty check.py"])
def test_refuses_a_folder_of_other_files(op, project, there, tmp_path, monkeypatch):
    if there == "other project":
        emit.pytorch(uncompiled(copy.copy(op)), "another", tmp_path)
    else:
        (tmp_path / there.split()[-1]).write_text("" if "empty" in there else "mine\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    built = copy.copy(op)
    built.compile = lambda: pytest.fail("compiled for nothing")
    with pytest.raises(FileExistsError, match=r"not an earlier project my_conv; give a new or an empty folder"):
        emit.pytorch(built, "my_conv", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_in_place_of_the_folder_is_refused_before_compiling(op, tmp_path):
    built, file = copy.copy(op), tmp_path / "file"
    file.write_text("mine")
    built.compile = lambda: pytest.fail("compiled for nothing")
    with pytest.raises(FileExistsError, match="file is no folder"):
        emit.pytorch(built, "my_conv", file)
    assert file.read_text() == "mine"


def test_an_interrupted_emission_is_taken_up_again(op, tmp_path, monkeypatch):
    def failing(path, *arguments, **options):
        if path.name != "check.py":
            raise OSError("no space left")
        return write(path, *arguments, **options)

    built, write = uncompiled(copy.copy(op)), Path.write_text
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(Path, "write_text", failing)
        emit.pytorch(built, "my_conv", tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "check.py"]
    emit.pytorch(built, "my_conv", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_refuses_what_is_no_op(tmp_path):
    with pytest.raises(TypeError, match="op must be an op of cutlass_sep, got a Tensor"):
        emit.pytorch(torch.ones(1), "name", tmp_path)
    assert not any(tmp_path.iterdir())


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
        stages = op.kernel.stages
        kernels = [f"{stage.name} 1 {len(stage.maps)}" for stage in stages]
        if packing := sum(stage.packs for stage in stages):
            kernels.append(f"pack_weights {packing} 0")
        self.environment = {
            "LD_LIBRARY_PATH": str(driver),
            "FAKE_CAPABILITY": "{}.{}".format(*archs.ARCHS[op.arch]),
            "FAKE_KERNELS": " ".join(kernels),
        }
        emit.pytorch(op, "my_conv", folder)
        self.program = folder / "main"
        cubin = folder / "my_conv.cubin"
        compile_cpp(HERE / "standalone" / "main.cpp", self.program, f"-I{folder}", f'-DCUBIN_FILE="{cubin}"', "-ldl")

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
    "sm90-contiguous-bfloat16-turned": (
        Case(n=2, c=64, o=128, h=64, w=512), torch.bfloat16, "contiguous", "sm90", "sm_90a",
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
    "fused-channels_last-bfloat16": (
        Block(c=256, e=200, l=640, kernel=4, dilation=2), torch.bfloat16, "channels_last", "sm90", "sm_90a", "fused",
    ),
    "fused-contiguous-float16": (
        Block(c=72, e=128, o=40, l=320, kernel=9, residual=False),
        torch.float16, "contiguous", "sm90", "sm_90a", "fused",
    ),
    "fused-channels_last-ieee": (
        Block(c=256, e=200, l=641, kernel=4, dilation=2), torch.float32, "channels_last", "sm90", "sm_90a", "fused",
    ),
    "fused-contiguous-tf32": (
        Block(c=72, e=128, o=40, l=324, kernel=9, residual=False),
        torch.float32, "contiguous", "sm90", "sm_90a", "fused", "tf32",
    ),
    "two_kernel-sm90-contiguous-ieee": (
        Block(c=64, e=192, l=640, kernel=4), torch.float32, "contiguous", "sm90", "sm_90a", "two_kernel",
    ),
    "two_kernel-sm90-channels_last-float16": (
        Block(c=256, e=512, l=640, kernel=3, dilation=3),
        torch.float16, "channels_last", "sm90", "sm_90a", "two_kernel",
    ),
    "two_kernel-portable-contiguous-ieee": (
        Block(c=20, e=36, l=333, kernel=6), torch.float32, "contiguous", "portable", "sm_80", "two_kernel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_host_launches_as_kernel_py_does(name, tmp_path, driver, monkeypatch):
    case, dtype, layout, path, arch, *more = CASES[name]
    op = uncompiled(
        make_op(case, dtype, layout, path, arch, **dict(zip(("form", "fp32_precision"), more, strict=False)))
    )
    assert name.endswith("turned") == (path == "sm90" and getattr(op.kernel.stages[-1].geometry, "turned", False))
    compare_launches(op, tmp_path, driver, monkeypatch)


@pytest.mark.parametrize("packs", [(True, True), (True, False), (False, True), (False, False)])
def test_the_host_packs_for_the_kernels_that_ask_for_it(packs, tmp_path, driver, monkeypatch):
    """Of the two kernels of a block, those whose depthwise outputs tensor cores do not make."""
    case = Block(c=64, e=128, o=72, l=640, kernel=5, residual=False)
    half = Schedule("sm90", 64, 64, 1, 4, 2, row_slots=4, weight_slots=2)
    halves = (replace(half, mma_q=0 if own else 16) for own in packs)
    schedule = BlockSchedule("two_kernel", "sm90", *halves)
    op = uncompiled(make_op(case, torch.bfloat16, "channels_last", schedule=schedule))
    assert tuple(stage.packs for stage in op.kernel.stages) == packs
    compare_launches(op, tmp_path, driver, monkeypatch)
    text = (tmp_path / "my_conv.hpp").read_text()
    assert ("pack" in text.replace("packed", "")) == any(packs)


def test_the_host_packs_tables_of_taps(tmp_path, driver, monkeypatch):
    schedule = Schedule("sm90", 64, 64, 1, 2, 2, 2, 2, mma_q=8, packs_taps=True)
    op = uncompiled(make_op(Case(n=2, c=136, o=64, h=19, w=21), torch.bfloat16, "channels_last", schedule=schedule))
    assert op.kernel.stages[0].packs
    compare_launches(op, tmp_path, driver, monkeypatch)


def test_the_host_launches_runs_of_pixels(tmp_path, driver, monkeypatch):
    """Their box is that of the size; windows that do not fit into the slot are refused."""
    schedule = Schedule("sm90", 64, 64, 1, 4, 2, 2, 2, side_by_side=True, mma_q=16, run_window=256)
    op = uncompiled(make_op(Case(n=2, c=136, o=64, h=19, w=21), torch.bfloat16, "channels_last", schedule=schedule))
    host = compare_launches(op, tmp_path, driver, monkeypatch, [(2, 19, 21), (1, 20, 21), (37, 5, 21), (1, 20000, 16)])
    calls, error = host.run((1, 64, 64))
    assert not any(call["call"] == "launch" for call in calls)
    assert "windows that do not fit into shared memory" in error


@pytest.mark.parametrize(
    "case, dtype, layout, tile",
    [
        (
            Case(n=3, c=40, o=64, h=14, w=14, kernel=(27, 27), padding=(13, 13)),
            torch.bfloat16,
            "channels_last",
            (14, 16),
        ),
        (Case(n=3, c=40, o=64, h=14, w=14, kernel=(27, 27), padding=(13, 13)), torch.float16, "channels_last", (4, 8)),
        (Case(n=2, c=16, o=24, h=30, w=72, kernel=(13, 7), padding=(6, 3)), torch.bfloat16, "contiguous", (8, 64)),
        (Case(n=5, c=24, o=16, h=1, w=96, kernel=(1, 51), padding=(0, 25)), torch.bfloat16, "channels_last", (4, 64)),
    ],
)
def test_the_host_launches_a_depthwise_kernel_on_planes(case, dtype, layout, tile, tmp_path, driver, monkeypatch):
    problem = make_op(case, dtype, layout, "sm90").problem
    schedule = replace(behind(problem, "sm_90a")[0], plane_rows=tile[0], plane_columns=tile[1])
    op = uncompiled(make_op(case, dtype, layout, schedule=schedule))
    names = [stage.name for stage in op.kernel.stages]
    assert names == ["pack_planes", "depthwise", "pointwise", "mend_outputs"][: 3 + (dtype == torch.float16)]
    h, w, odd = problem.h, problem.w, 8 if layout == "contiguous" else 3
    host = compare_launches(op, tmp_path, driver, monkeypatch, [(problem.n, h, w), (1, h, w + odd), (70, h, w)])
    # One row of pixels, as the pointwise kernel sees them, ends somewhere: here check() ends too.
    calls, error = host.run((1, 2**15, 2**14))
    assert "too many pixels" in error and not any(call["call"] == "launch" for call in calls)


@pytest.mark.parametrize(
    "case, dtype, tile",
    [
        (Case(n=3, c=40, o=64, h=14, w=14), torch.bfloat16, (2, 4)),
        (Case(n=3, c=520, o=264, h=15, w=13, kernel=(5, 3), stride=2), torch.float16, (1, 2)),
        (Case(n=2, c=264, o=72, h=30, w=17, kernel=(31, 31), padding=15), torch.float32, (2, 4)),
    ],
)
def test_the_host_launches_a_depthwise_kernel_by_fma(case, dtype, tile, tmp_path, driver, monkeypatch):
    problem = make_op(case, dtype, "channels_last", "sm90").problem
    schedule = replace(behind(problem, "sm_90a")[0], thread_rows=tile[0], thread_columns=tile[1])
    op = uncompiled(make_op(case, dtype, "channels_last", schedule=schedule))
    names = [stage.name for stage in op.kernel.stages]
    assert names == ["depthwise", "pointwise", "mend_outputs"][: 2 + (dtype == torch.float16)]
    host = compare_launches(
        op, tmp_path, driver, monkeypatch, [(problem.n, problem.h, problem.w), (1, 40, 33), (90, 60, 50)]
    )
    calls, error = host.run((1, 2**16, 2**15))
    assert "too many pixels" in error and not any(call["call"] == "launch" for call in calls)


BY_FMA, ON_PLANES = {"thread_rows": 1, "thread_columns": 4}, {"plane_rows": 8, "plane_columns": 64}


@pytest.mark.parametrize(
    "tile, dtype",
    [
        *((BY_FMA, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        *((ON_PLANES, dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_the_host_launches_a_block_in_three_kernels(tile, dtype, tmp_path, driver, monkeypatch):
    case = Block(n=3, c=256, e=520, l=333, kernel=33)
    problem = make_op(case, dtype, "channels_last", "sm90", form="two_kernel").problem
    expand, pointwise = behind(problem.expand, "sm_90a")[0], behind(problem.project, "sm_90a")[0]
    schedule = BlockSchedule("two_kernel", "sm90", expand, replace(pointwise, **tile))
    op = uncompiled(make_op(case, dtype, "channels_last", schedule=schedule))
    assert op.kernel.stages[0].name == "expand" and "depthwise" in [stage.name for stage in op.kernel.stages]
    compare_launches(op, tmp_path, driver, monkeypatch)


@pytest.mark.parametrize("mma_q", [0, 8])
def test_a_kernel_without_a_workspace_gets_none(mma_q, tmp_path):
    """Nothing is allocated for it, not even an empty tensor."""
    schedule = Schedule("sm90", 64, 64, 1, 2, 2, row_slots=16, mma_q=mma_q)
    op = make_op(Case(c=64, o=64, h=16, w=16), torch.float16, "channels_last", schedule=schedule)
    emit.pytorch(uncompiled(op), "my_conv", tmp_path)
    binding = (tmp_path / "my_conv.cpp").read_text()
    assert ("workspace" in binding) == (mma_q == 0)
    assert binding.count("at::empty(") == (2 if mma_q == 0 else 1)


def compare_launches(op, folder, driver, monkeypatch, shapes=None):
    """What an emitted host asks the driver for, and what `kernel.py` does, for several sizes. Returns the host."""
    host, p, arch = Host(op, folder, driver), op.problem, op.arch
    if p.spatial == 2:
        shapes = shapes or [(p.n, p.h, p.w), (1, p.h + 1, p.w), (37, 5, p.w), (16, 512, 512), (1, 20000, 16)]
        problems = [replace(p, n=n, h=h, w=w) for n, h, w in shapes]
    else:
        shapes = [(p.n, 1, p.l), (1, 1, p.l + 8), (37, 1, 8), (300, 1, 4096)]
        problems = [replace(p, n=n, l=length) for n, _, length in shapes]
    calls, error = host.run(*shapes)
    assert error == ""
    expected = [call for problem in problems for call in launches(kernel.make(problem, op.schedule, arch), monkeypatch)]
    # The cubin is loaded between the first launch's workspace, if there is one, and its launch.
    load = [call["call"] for call in expected].count("allocate") // len(shapes)
    assert calls[load]["head"] == list(op.compile().cubin[:64])
    reserved = [stage.shared_bytes for stage in op.kernel.stages]
    assert calls[load + 1 : load + 1 + len(reserved)] == [
        {"call": "reserve", "kernel": 1 + i, "bytes": size} for i, size in enumerate(reserved)
    ]
    del calls[load : load + 1 + len(reserved)]
    assert calls == expected
    return host


def launches(of: kernel.Kernel, monkeypatch) -> list[dict]:
    """What one launch of a kernel asks for, as tests/standalone/driver.cpp and main.cpp write it."""
    from cuda.bindings import driver as d

    calls = []
    addresses = [FIRST_ADDRESS * (i + 1) for i in range(len(operators.of(of.problem).tensors) + 2)]

    def encode(dtype, address, extents, strides, box, swizzle_bytes):
        swizzle = d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE
        if swizzle_bytes in (32, 64, 128):
            swizzle = getattr(d.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle_bytes}B")
        enums = [
            getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"),
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ]  # fmt: skip
        calls.append({
            "call": "encode", "address": address, "extents": list(extents), "strides": list(strides), "box": list(box),
            "every": [1] * len(box), "enums": [int(value) for value in enums],
        })  # fmt: skip
        return struct.pack("Q120x", address)

    def launch(configuration, function, parameters, _):
        names = ("gridDim", "blockDim")
        shape = [getattr(configuration, f"{name}{axis}") for name in names for axis in "XYZ"]
        shape.append(configuration.sharedMemBytes)
        stream, index = configuration.hStream, int(function)
        packing = sum(stage.packs for stage in of.stages)
        arguments, maps = (1, len(of.stages[index - 1].maps)) if index <= len(of.stages) else (packing, 0)
        pointers = struct.unpack(f"{arguments + maps}Q", ctypes.string_at(parameters, 8 * (arguments + maps)))
        calls.append({
            "call": "launch", "kernel": index, "grid": shape[:3], "block": shape[3:6], "shared": shape[6],
            "stream": int(stream), "contexts": 1,
            "arguments": [list(ctypes.string_at(at, kernel._ARGUMENTS.size)) for at in pointers[:arguments]],
            "maps": [struct.unpack("Q", ctypes.string_at(at, 8))[0] for at in pointers[arguments:]],
        })  # fmt: skip
        return (0,)

    def new_empty(count):
        calls.append({"call": "allocate", "bytes": count * of.problem.element_size})
        return tensor_at(addresses[-1])

    def tensor_at(address):
        return SimpleNamespace(data_ptr=lambda: address, get_device=lambda: 0, new_empty=new_empty)

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0x50, raising=False)
        patch.setattr(kernel, "_tensor_map", encode)
        patch.setattr(kernel._thread, "has_context", True, raising=False)
        count = len(of.stages)
        module = SimpleNamespace(pack=count + 1, mains=list(range(1, count + 1)))
        launcher = of._launchers[0] = kernel._Launcher(module, of.stages, 0)
        launcher.run = launch
        *tensors, y = map(tensor_at, addresses[:-1])
        of.launch(tuple(tensors), y, addresses[:-2])
    return calls


def test_more_blocks_than_one_grid_dimension_takes(tmp_path, driver):
    op = uncompiled(make_op(Case(c=8, o=8), path="portable"))
    g = op.kernel.stages[0].geometry
    rows = g.tile_p * op.schedule.warpgroups
    host = Host(op, tmp_path, driver)
    calls, _ = host.run((2**21, rows * 2**10, 3))
    grid = calls[-1]["grid"]
    assert grid == [2**31 - 1, 2, 1]
    assert kernel._ARGUMENTS.unpack(bytes(calls[-1]["arguments"][0]))[-1] == op.schedule.warpgroups


def test_the_host_says_what_is_wrong(tmp_path, driver):
    op = make_op(Case(n=2, c=64, o=64, h=16, w=16), layout="channels_last", path="sm90")
    host = Host(uncompiled(op), tmp_path, driver)
    shape = (2, 16, 16)
    for capability in ("8.0", "9.1", "5.0"):
        calls, error = host.run(shape, FAKE_CAPABILITY=capability)
        assert len(calls) == 1 and "sm_90a" in error and capability in error
    calls, error = host.run(shape, FAKE_CAPTURING="1")
    assert len(calls) == 1 and "captured" in error and "before" in error
    for function in ("cuInit", "cuLibraryLoadData", "cuTensorMapEncodeTiled", "cuLaunchKernel"):
        _, error = host.run(shape, FAKE_FAIL=function)
        assert "failed: a fake error (CUDA driver error 1)" in error
    _, error = host.run(shape, LD_LIBRARY_PATH=str(tmp_path))
    assert torch.cuda.is_available() or "NVIDIA driver cannot be loaded" in error


def test_a_higher_minor_runs_what_is_not_tied_to_one(tmp_path, driver):
    host = Host(uncompiled(make_op(Case(c=8, o=8), path="portable", arch="sm_86")), tmp_path, driver)
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


class Judged:
    """check.py of a project as a module, and the library of its operator, to be implemented on the CPU by a test."""

    def __init__(self, case: Case | Block, name: str, folder: Path):
        op = uncompiled(make_op(case, path="portable"))
        emit.pytorch(op, name, folder)
        spec = importlib.util.spec_from_file_location(f"{name}_check", folder / "check.py")
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.library = torch.library.Library(name, "DEF")
        names = operators.of(op.problem).tensors
        signature = ", ".join(f"Tensor? {name}=None" if "bias" in name else f"Tensor {name}" for name in names)
        self.library.define(f"run({signature}) -> Tensor")
        self.library.define(f"run.out({signature}, *, Tensor(a!) out) -> Tensor(a!)")
        self.library.impl("run", lambda *tensors: plain(case, tensors), "CPU")
        self.library.impl("run.out", self.run_out, "CPU")
        self.case, self.flaw = case, None

    def run_out(self, *tensors, out):
        out.copy_(plain(self.case, tensors))
        if self.flaw is not None:
            self.flaw(self.case, tensors, out)
        return out

    def compare(self, flaw, n: int, *extents: int) -> dict:
        self.flaw = flaw
        return self.module.compare(n, extents, torch.Generator().manual_seed(3))


def plain(case: Case | Block, tensors: tuple) -> torch.Tensor:
    # The dispatcher leaves out what is None at the end.
    tensors += (None,) * ((7 if isinstance(case, Block) else 5) - len(tensors))
    return (block if isinstance(case, Block) else separable).plain(case, tensors)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    case = Case(n=2, c=24, o=16, h=9, w=8, kernel=(2, 3), padding="same", mid_activation="silu", activation="hardswish")
    return Judged(case, "judged_conv", tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def block_judge(tmp_path_factory):
    case = Block(n=2, c=24, e=40, l=12, kernel=4, dilation=2, activation="silu", project_bias=False)
    return Judged(case, "judged_block", tmp_path_factory.mktemp("block_judge"))


def wrong_by_a_tf32_rounding(case, tensors, y):
    y[1, 3, ..., 7] += 2.0**-9


def left_unwritten(case, tensors, y):
    y[0, 0, ..., 0] = float("nan")


def expanded_outside_the_sequence(case, tensors, y):
    """As if x were padded with zeros, which the expand bias makes values of, and not the expanded channels."""
    total = case.dilation * (case.kernel - 1)
    left, right = total // 2, total - total // 2
    padded = F.pad(tensors[0], (left + total, right + total))
    y.copy_(plain(case, (padded, *tensors[1:]))[..., left + total : -right - total])


def without_the_residual(case, tensors, y):
    y.copy_(plain(replace(case, residual=False), tensors))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("flaw", [None, wrong_by_a_tf32_rounding, left_unwritten])
def test_check_tells_right_from_wrong(judge, flaw):
    result = judge.compare(flaw, 2, 9, 8)
    assert (result["x"], result["y"]) == ([2, 24, 9, 8], [2, 16, 9, 8])
    judged(judge, result, flaw)


@pytest.mark.parametrize(
    "flaw",
    [None, wrong_by_a_tf32_rounding, left_unwritten, expanded_outside_the_sequence, without_the_residual],
)
def test_check_tells_right_from_wrong_blocks(block_judge, flaw):
    result = block_judge.compare(flaw, 2, 12)
    assert (result["x"], result["y"]) == ([2, 24, 12], [2, 24, 12])
    judged(block_judge, result, flaw)


def judged(judge, result, flaw):
    assert result["ok"] == (flaw is None)
    assert (result["not_finite"] > 0) == (flaw is left_unwritten)
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


@pytest.fixture(scope="module")
def block_library(tmp_path_factory):
    """Of a block whose tensors are [N,L,C] in memory."""
    compiler_or_skip()
    folder = tmp_path_factory.mktemp("block")
    case = Block(c=24, e=40, l=12, kernel=4, dw_bias=False)
    emit.pytorch(uncompiled(make_op(case, torch.float16, "channels_last", "portable")), "my_block", folder)
    done = subprocess.run([sys.executable, str(folder / "check.py")], capture_output=True, text=True, check=False)
    libraries = list(folder.glob("build/**/*.so"))
    assert libraries, done.stderr
    torch.ops.load_library(libraries[0])


def test_the_block_checks_its_tensors(block_library):
    run = torch.ops.my_block.run
    with torch.device("meta"):
        shapes = (5, 9, 24), (40, 24, 1), (40, 1, 4), (24, 40, 1), (40,)
        x, expand, dw, project, bias = (torch.empty(shape, dtype=torch.float16) for shape in shapes)
    x = x.transpose(1, 2)
    biases = {"expand_bias": bias, "project_bias": bias[:24]}
    y = run(x, expand, dw, project, **biases)
    assert (y.shape, y.stride(), y.dtype) == ((5, 24, 9), x.stride(), torch.float16)
    out = torch.empty_like(y)
    assert run(x, expand, dw, project, **biases, out=out) is out

    for message, arguments in {
        "x must be .N,24,L., got shape .24, 9.": (x[0], expand, dw, project),
        "x must have shape .5, 24, 9., got .5, 12, 9.": (x[:, :12], expand, dw, project),
        "x must be contiguous in memory format ChannelsLast as .N,C,1,L.": (x.contiguous(), expand, dw, project),
        "expand_weight must have shape .40, 24, 1., got .40, 24.": (x, expand[..., 0], dw, project),
        "is empty or too large": (x[..., :0], expand, dw, project),
    }.items():
        with pytest.raises(ValueError, match=message):
            run(*arguments, **biases)
    with pytest.raises(ValueError, match="project_bias is missing; the kernel was emitted with one"):
        run(x, expand, dw, project, bias)
    with pytest.raises(ValueError, match="dw_bias was given; the kernel was emitted without one"):
        run(x, expand, dw, project, **biases, dw_bias=bias)
    with pytest.raises(ValueError, match="out must be contiguous in memory format ChannelsLast"):
        run(x, expand, dw, project, **biases, out=out.contiguous())
