"""The launch before the fused fp32 block: templates/half_operands.cuh, compiled for the CPU by packing.cpp."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from block import Block
from problems import LAYOUTS, problem_of

from cutlass_sep import kernel, source
from cutlass_sep.block_schedule import FusedGeometry, candidates
from cutlass_sep.problem import SeparableBlock1dProblem

#: Precision -> fp16 numbers of an operand.
PARTS = {"ieee": 2, "tf32": 1}
#: What memory holds that nobody wrote, and on either side of tensors.
POISON, GUARD = 0xA5, 256

precisions = pytest.mark.parametrize("precision", PARTS)
laid_out = pytest.mark.parametrize("layout", LAYOUTS)


def geometry_of(case: Block, precision: str, layout: str) -> FusedGeometry:
    problem = problem_of(case, precision, layout)
    return FusedGeometry(problem, candidates(problem, "sm_90a", "sm90", "fused")[0].tile)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The packing kernel of a geometry, as a library."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler here (c++, g++, clang++)")
    probe = subprocess.run(
        [compiler, "-x", "c++", "-fsyntax-only", "-"], input=b"_Float16 half;", capture_output=True, check=False
    )
    if probe.returncode:
        pytest.skip(f"{compiler} knows no _Float16")

    @cache
    def build(constants: tuple[tuple[str, object], ...]) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("packing")
        lines = [
            f"static constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};\n"
            for name, value in constants
        ]
        (folder / "constants.inc").write_text("".join(lines))
        unit, target = Path(__file__).with_name("packing.cpp"), folder / "packing.so"
        # The sanitizer's library is not linked: the unit has the one function that is called of it.
        options = ["-std=c++17", "-O0", "-w", "-fPIC", "-fno-strict-aliasing", "-fsanitize=alignment"]
        for command in (
            [
                compiler,
                *options,
                f"-I{folder}",
                f"-I{source.templates()}",
                "-c",
                str(unit),
                "-o",
                str(folder / "unit.o"),
            ],
            [compiler, "-shared", str(folder / "unit.o"), "-o", str(target)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(target))

    return lambda g: build(tuple(source._fused_unit(g.problem, g.tile)["constants"].items()))


def guarded(count: int) -> np.ndarray:
    """Bytes on a 256-byte boundary between others."""
    memory = np.full(count + 3 * GUARD, POISON, np.uint8)
    start = -memory.ctypes.data % GUARD + GUARD
    return memory[start : start + count]


class Packed:
    """The workspace that a call leaves for the main kernel. `tensors`: x [N,C,L], weights, biases."""

    def __init__(self, library, g: FusedGeometry, tensors: list[np.ndarray]):
        p = self.problem = g.problem
        self.geometry = g
        memory = []
        for i, t in enumerate(tensors):
            raw = np.ascontiguousarray(t.transpose(0, 2, 1) if i == 0 and p.layout == "channels_last" else t)
            memory.append(guarded(raw.nbytes))
            memory[-1][:] = raw.astype(np.float32, copy=False).reshape(-1).view(np.uint8)
        workspace = self.workspace = guarded(g.x_bytes + g.workspace_bytes)
        x, expand, taps, project, expand_bias, taps_bias, _ = (m.ctypes.data for m in memory)
        at = workspace.ctypes.data
        arguments = kernel._ARGUMENTS.pack(
            at, taps, project, taps_bias, 0, 0, at + g.x_bytes, x, expand, expand_bias,
            p.n, 1, p.l, 1, p.l, 0, p.pads[0], 0,
        )  # fmt: skip
        assert library(g).pack(arguments, g.pack_blocks) == 0  # accesses that were not aligned
        start = at - workspace.base.ctypes.data
        assert (np.delete(workspace.base, np.s_[start : start + workspace.size]) == POISON).all()

    def read(self, dtype: type, offset: int, *shape: int) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.workspace[offset : offset + count].view(dtype).reshape(shape)

    def x(self) -> tuple[np.ndarray, np.ndarray]:
        """[N][L][part][C], and inverse scales by position, [N][L]."""
        p, parts = self.problem, self.geometry.parts
        halves = self.read(np.float16, 0, p.n, p.l, parts, p.c)
        groups = -(-p.l // 8)
        scales = self.read(np.float32, -(-halves.nbytes // 256) * 256, p.n, groups)
        return halves, scales.repeat(8, 1)[:, : p.l]

    def rows(self, offset: int, count: int, length: int) -> np.ndarray:
        """Weights, [part][row][length]."""
        return self.read(np.float16, self.geometry.x_bytes + offset, self.geometry.parts, count, length)

    def channels(self) -> np.ndarray:
        """Inverse scale, norm and bias of all hidden channels, those of the last chunk's end too."""
        g = self.geometry
        chunks = self.read(np.uint8, g.x_bytes, g.chunks, g.taps_bytes)[:, -64 * 12 :]
        return np.ascontiguousarray(chunks).view(np.float32).reshape(-1, 3)


def draw(p: SeparableBlock1dProblem, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = (p.n, p.c, p.l), (p.e, p.c), (p.e, p.kernel), (p.o, p.e), (p.e,), (p.e,), (p.o,)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def whole(halves: np.ndarray, inverse: np.ndarray, axis: int) -> np.ndarray:
    """What scaled parts along `axis` stand for."""
    return halves.astype(np.float64).sum(axis) * inverse.astype(np.float64)


def assert_held(got: np.ndarray, want: np.ndarray, largest: np.ndarray, parts: int) -> None:
    """As the heading of half_operands.cuh says of operands; `largest` of each value's group."""
    assert got.shape == want.shape
    own = {1: 2.0**-11, 2: 2.0**-22}[parts] * np.abs(want)
    error = np.abs(got - want.astype(np.float64))
    # fp32's own smallest numbers, half as far apart, where no power of two takes the largest further.
    assert (error <= np.maximum(own, np.maximum(2.0**-39 * largest, 2.0**-151))).all()


def largest_of_groups(x: np.ndarray) -> np.ndarray:
    """Of 8 positions of x [N,C,L], by position: [N][L][1]."""
    n, _, length = x.shape
    padded = np.pad(np.abs(x).max(1), ((0, 0), (0, -length % 8)))
    return padded.reshape(n, -1, 8).max(2).repeat(8, 1)[:, :length, None]


CASES = [
    Block(n=2, c=8, e=16, l=4, kernel=3),
    Block(n=2, c=40, e=72, l=68, kernel=4, o=24, residual=False),
    Block(n=1, c=256, e=64, l=96, kernel=9, o=16, residual=False),
    Block(n=2, c=264, e=8, l=36, kernel=2, o=8, residual=False),
    Block(n=1, c=576, e=8, l=40, kernel=1, o=8, residual=False),
]


@precisions
@laid_out
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_is_packed_and_nothing_else(library, case: Block, layout: str, precision: str):
    g = geometry_of(case, precision, layout)
    tensors = draw(g.problem)
    packed = Packed(library, g, tensors)
    halves, inverse = packed.x()
    x = tensors[0].transpose(0, 2, 1)
    assert_held(whole(halves, inverse[..., None], 2), x, largest_of_groups(tensors[0]), g.parts)
    p = g.problem
    channels = packed.channels()
    expand = packed.rows(g.packed_expand, p.e, p.c)
    largest = np.abs(tensors[1]).max(1, keepdims=True)
    assert_held(whole(expand, channels[: p.e, :1], 0), tensors[1], largest, g.parts)
    np.testing.assert_allclose(channels[: p.e, 1], np.abs(tensors[1]).sum(1), rtol=1e-5)
    assert (channels[: p.e, 2] == tensors[4]).all() and (channels[p.e :] == 0).all()
    project = packed.rows(g.packed_project, p.o, p.e)
    inverse = packed.read(np.float32, g.x_bytes + g.packed_scales, p.o)
    largest = np.abs(tensors[3]).max(1, keepdims=True)
    assert_held(whole(project, inverse[:, None], 0), tensors[3], largest, g.parts)
    bounds = packed.read(np.float32, g.x_bytes + g.packed_scales + 4 * g.tile.tile_oc, -(-p.e // 16), 2)
    taps = np.abs(tensors[2]).sum(1)
    np.testing.assert_allclose(bounds[:, 0].max(), (np.abs(tensors[1]).sum(1) * taps).max(), rtol=1e-5)
    np.testing.assert_allclose(bounds[:, 1].max(), (np.abs(tensors[4]) * taps + np.abs(tensors[5])).max(), rtol=1e-5)


@precisions
def test_both_layouts_are_packed_alike(library, precision: str):
    """Any length that both take: the main kernel reads the same x."""
    case = Block(n=2, c=72, e=16, l=100, kernel=6, o=8, residual=False)
    both = [geometry_of(case, precision, layout) for layout in LAYOUTS]
    contiguous, channels_last = (Packed(library, g, draw(g.problem)) for g in both)
    assert both[0].x_bytes == both[1].x_bytes
    assert contiguous.workspace.tobytes() == channels_last.workspace.tobytes()


@laid_out
def test_a_last_group_may_be_short(library, layout: str):
    """channels_last takes any length."""
    lengths = (2, 7, 33) if layout == "channels_last" else (4, 12, 28, 36)
    for length in lengths:
        g = geometry_of(Block(n=3, c=16, e=8, l=length, kernel=3), "ieee", layout)
        tensors = draw(g.problem, length)
        halves, inverse = Packed(library, g, tensors).x()
        want = tensors[0].transpose(0, 2, 1)
        assert_held(whole(halves, inverse[..., None], 2), want, largest_of_groups(tensors[0]), 2)


@precisions
@laid_out
@pytest.mark.parametrize("exponent", [78, 60, 0, -86, -100, -112, -113, -126, -140, -148])
def test_groups_of_any_size_are_held(library, exponent: int, layout: str, precision: str):
    """Down to fp32's smallest numbers nothing is lost that a group's largest value does not hide."""
    g = geometry_of(Block(n=1, c=24, e=8, l=32, kernel=3), precision, layout)
    tensors = draw(g.problem)
    for i in (0, 1, 3):
        tensors[i] = (np.clip(tensors[i], -1.9, 1.9).astype(np.float64) * 2.0**exponent).astype(np.float32)
    packed = Packed(library, g, tensors)
    halves, inverse = packed.x()
    want = tensors[0].transpose(0, 2, 1)
    assert np.isfinite(halves).all() and (np.frexp(inverse)[0] == 0.5).all()
    assert_held(whole(halves, inverse[..., None], 2), want, largest_of_groups(tensors[0]), g.parts)
    for weights, offset, inverse in (
        (tensors[1], g.packed_expand, packed.channels()[: g.problem.e, 0]),
        (tensors[3], g.packed_project, packed.read(np.float32, g.x_bytes + g.packed_scales, g.problem.o)),
    ):
        rows = packed.rows(offset, *weights.shape)
        largest = np.abs(weights).max(1, keepdims=True)
        assert_held(whole(rows, inverse[:, None], 0), weights, largest, g.parts)


@precisions
@laid_out
def test_groups_of_zeros_and_groups_that_are_computed_again(library, layout: str, precision: str):
    """Zeros stay zeros, under scales that leave their bound small. What is too large or not finite is NaN, in its own
    group alone if that is not finite as a whole, and does not count in the largest value of the window.
    """
    g = geometry_of(Block(n=1, c=24, e=8, l=40, kernel=3), precision, layout)
    tensors = draw(g.problem)
    x = tensors[0][0]
    x[:, :8] = 0
    x[3, 9], x[7, 17], x[5, 26] = 2.0**79, np.inf, np.nan
    tensors[1][2], tensors[3][4] = 0, 0
    packed = Packed(library, g, tensors)
    halves, inverse = packed.x()
    assert (halves[0, :8] == 0).all() and (inverse[0, :8] > 0).all() and (inverse[0, :8] <= 2.0**-100).all()
    groups = np.isnan(halves).any((0, 2)).reshape(5, 8, 24)
    assert not groups[[0, 4]].any() and groups[[1, 2]].all()
    assert groups[3].sum() == 1 and groups[3, 2, 5]
    assert not (inverse[0, 8:24] > 0).any() and (inverse[0, 24:] > 0).all()
    assert (packed.rows(g.packed_expand, 8, 24)[:, 2] == 0).all() and (
        packed.rows(g.packed_project, 24, 8)[:, 4] == 0
    ).all()
