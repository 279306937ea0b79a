"""The depthwise stage as a kernel of its own by FMA, and the pointwise kernel with both operands in shared memory, in
each way that their tiles are cut, against float64; alone and in the block.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from cutlass_sep.block_schedule import BlockSchedule
from cutlass_sep.direct import DirectGeometry
from cutlass_sep.problem import SeparableBlock1dProblem, SeparableConv2dProblem
from cutlass_sep.schedule import Geometry, Schedule, behind, check

from . import accuracy
from .calls import draw, embed, make_block, make_problem
from .scheduled import check_beyond_fp16, check_not_finite, check_values, run
from .test_special_values import compare, place

VARIANTS = ("bf16", "fp16", "fp32", "tf32")


class Cut(NamedTuple):
    """Rows and columns of outputs of a thread, and a layer with sizes that leave them and slabs of channels ragged."""

    name: str
    rows: int
    columns: int
    layer: dict


CUTS = [
    Cut("3x3", 2, 4, {"c": 40, "o": 24, "h": 13, "w": 19, "kernel": 3, "padding": 1}),
    Cut("slabs", 1, 4, {"c": 520, "o": 72, "h": 9, "w": 11, "kernel": 3, "padding": 1}),
    Cut("uneven-slabs", 2, 2, {"c": 264, "o": 40, "h": 7, "w": 9, "kernel": 3, "padding": 1}),
    Cut("strided", 2, 2, {"c": 24, "o": 264, "h": 21, "w": 14, "kernel": 3, "stride": 2, "padding": 1}),
    Cut("strides-apart", 1, 2, {"c": 16, "o": 16, "h": 17, "w": 30, "kernel": 3, "stride": (2, 5), "padding": 0}),
    Cut("dilated", 1, 2, {"c": 24, "o": 16, "h": 19, "w": 23, "kernel": (3, 5), "dilation": (2, 3), "padding": (2, 6)}),
    Cut("dilated-far", 1, 2, {"c": 24, "o": 16, "h": 31, "w": 9, "kernel": 3, "dilation": (11, 1), "padding": (11, 1)}),
    Cut("dilated-columns", 2, 2,
        {"c": 24, "o": 16, "h": 9, "w": 23, "kernel": 3, "dilation": (1, 2), "padding": (1, 2)}),
    Cut("5x5", 1, 4, {"c": 72, "o": 40, "h": 15, "w": 13, "kernel": 5, "padding": 2}),
    Cut("7x7", 2, 4, {"c": 24, "o": 16, "h": 15, "w": 18, "kernel": 7, "padding": 3}),
    Cut("31x31", 2, 4, {"c": 40, "o": 16, "h": 29, "w": 21, "kernel": 31, "padding": 15}),
    Cut("even", 2, 4, {"c": 16, "o": 24, "h": 11, "w": 14, "kernel": (4, 6), "padding": "same"}),
    Cut("far-padding", 1, 4, {"c": 8, "o": 8, "h": 5, "w": 6, "kernel": 3, "padding": (7, 9)}),
    Cut("one-tap", 1, 2, {"c": 16, "o": 16, "h": 5, "w": 7, "kernel": 1, "padding": 0}),
    Cut("two-pixels", 2, 4, {"n": 1, "c": 16, "o": 24, "h": 2, "w": 1, "kernel": 3, "padding": 1}),
    Cut("row", 1, 8, {"n": 3, "c": 40, "o": 136, "h": 1, "w": 203, "kernel": (1, 7), "padding": (0, 3)}),
    Cut("row-of-31", 1, 8, {"c": 24, "o": 16, "h": 1, "w": 90, "kernel": (1, 31), "padding": (0, 15)}),
    Cut("row-strided", 1, 4,
        {"c": 24, "o": 16, "h": 1, "w": 95, "kernel": (1, 33), "stride": (1, 2), "padding": (0, 16)}),
    Cut("row-dilated", 1, 4,
        {"c": 24, "o": 16, "h": 1, "w": 95, "kernel": (1, 9), "dilation": (1, 9), "padding": (0, 36)}),
]  # fmt: skip
cuts = pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)


def cut_problem(cut: Cut, variant: str, **more) -> tuple[SeparableConv2dProblem, Schedule]:
    problem = make_problem(variant, "channels_last", **{"n": 2} | cut.layer | more)
    pointwise = behind(problem, "sm_90a")[0]
    return problem, replace(pointwise, thread_rows=cut.rows, thread_columns=cut.columns)


def test_the_cuts_are_what_their_names_say():
    for cut, variant in itertools.product(CUTS, VARIANTS):
        problem, schedule = cut_problem(cut, variant)
        g = DirectGeometry(problem, schedule)
        assert check(problem, schedule, "sm_90a"), cut
        assert g.slabs == -(-problem.c // (g.vector * g.most_lanes)), cut
        assert (g.slabs > 1) == ("slabs" in cut.name or g.most_lanes < problem.c // g.vector), cut
        if problem.element_size == 2:  # in fp32 rows are a multiple of other tiles
            ragged = (problem.q % cut.columns, problem.p % cut.rows, g.thread_tiles % g.units, problem.c % g.slabs)
            assert any(ragged), cut
        assert schedule.shared_x == (problem.element_size == 2)


@cuts
@pytest.mark.parametrize("variant", VARIANTS)
def test_values(machine, generator: torch.Generator, variant: str, cut: Cut):
    problem, schedule = cut_problem(cut, variant, mid_activation="relu6", activation="silu")
    check_values(machine, problem, schedule, generator)


@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("variant", ["bf16", "fp32"])
def test_without_a_bias(machine, generator: torch.Generator, variant: str, biases: tuple[bool, bool]):
    dw_bias, pw_bias = biases
    problem, schedule = cut_problem(CUTS[0], variant, dw_bias=dw_bias, pw_bias=pw_bias, mid_activation="gelu")
    check_values(machine, problem, schedule, generator)


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("tile_oc", [16, 32, 64, 96, 128, 192, 256])
def test_tiles_of_the_pointwise_kernel(machine, generator: torch.Generator, tile_oc: int, warpgroups: int):
    """Pairs of blocks with one tile of pixels or two, tiles of output channels that are not full, channels that are no
    multiple of a stage's 64.
    """
    for n, c, o in ((1, 72, tile_oc + 8), (2, 64, tile_oc), (5, 200, 2 * tile_oc - 8)):
        problem = make_problem("bf16", "channels_last", n=n, c=c, o=o, h=9, w=14, kernel=3, padding=1)
        schedule = replace(
            behind(problem, "sm_90a")[0], tile_oc=tile_oc, warpgroups=warpgroups, side_by_side=warpgroups > 1,
            row_slots=3, staging_groups=1, thread_rows=1, thread_columns=2,
        )  # fmt: skip
        check_values(machine, problem, schedule, generator)


def test_more_tiles_than_blocks(machine, generator: torch.Generator):
    """Pairs and blocks take several tiles each, in rings that go round."""
    problem = make_problem("bf16", "channels_last", n=24, c=200, o=264, h=40, w=40, kernel=3, padding=1)
    pointwise = behind(problem, "sm_90a")[0]
    schedule = replace(pointwise, tile_oc=128, row_slots=4, staging_groups=1, thread_rows=2, thread_columns=2)
    assert Geometry(problem.pointwise, schedule.pointwise).items(1) > 3 * 132
    g = DirectGeometry(problem, schedule)
    assert g.thread_tiles > 3 * g.units * g.blocks(132)
    check_values(machine, problem, schedule, generator)


@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("variant", ["bf16", "fp32"])
def test_weights_wherever_they_are(machine, generator: torch.Generator, variant: str, offset: int):
    problem, schedule = cut_problem(CUTS[0], variant)
    x, *parameters = tensors = draw(problem, generator)
    moved = (x, *(embed(t, offset) for t in parameters))
    accuracy.judge(problem, tensors, run(machine, problem, schedule, moved), str(offset))


@cuts
@pytest.mark.parametrize("variant", ["bf16", "fp32"])
def test_values_that_are_not_finite(machine, generator: torch.Generator, variant: str, cut: Cut):
    problem, schedule = cut_problem(cut, variant, mid_activation="relu6", activation="silu")
    check_not_finite(machine, problem, schedule, generator)


@pytest.mark.parametrize("variant", ["bf16", "fp32"])
def test_a_tap_that_is_not_finite(machine, generator: torch.Generator, variant: str):
    """Near the border a tap lies on padding; backends differ on whether Inf * 0 counts there."""
    problem, schedule = cut_problem(CUTS[0], variant)
    tensors = draw(problem, generator)
    place(tensors[1], math.inf, 1, generator)
    inner = (..., slice(2, problem.p - 2), slice(2, problem.q - 2))
    compare(problem, tensors, run(machine, problem, schedule, tensors), inner)


@cuts
def test_depthwise_outputs_beyond_fp16(machine, generator: torch.Generator, cut: Cut):
    """Memory between the kernels does not hold them, but y has them in it."""
    problem, schedule = cut_problem(cut, "fp16")
    check_beyond_fp16(machine, problem, schedule, generator)
    # A call behind it, in the same workspace.
    check_values(machine, problem, schedule, generator)


#: Of the block: the depthwise stage by FMA, dilated too, and on planes.
BLOCKS = {
    "direct": {"kernel": 7, "thread_rows": 1, "thread_columns": 8},
    "dilated": {"kernel": 5, "dilation": 9, "thread_rows": 1, "thread_columns": 2},
    "planes": {"kernel": 33, "plane_rows": 8, "plane_columns": 64},
}
blocks = pytest.mark.parametrize("block", BLOCKS)


def block_problem(block: str, variant: str, **more) -> tuple[SeparableBlock1dProblem, BlockSchedule]:
    layer = {"n": 3, "c": 40, "e": 72, "l": 203} | BLOCKS[block] | more
    tile = {name: layer.pop(name) for name in tuple(layer) if name.startswith(("thread", "plane"))}
    problem = make_block(variant, "channels_last", **layer)
    expand, pointwise = behind(problem.expand, "sm_90a")[0], behind(problem.project, "sm_90a")[0]
    return problem, BlockSchedule("two_kernel", "sm90", expand=expand, project=replace(pointwise, **tile))


@pytest.mark.parametrize(
    ("block", "variant"),
    [(block, variant) for block in BLOCKS for variant in (VARIANTS if block != "planes" else VARIANTS[:2])],
)
def test_the_block(machine, generator: torch.Generator, block: str, variant: str):
    problem, schedule = block_problem(block, variant)
    check_values(machine, problem, schedule, generator)
    check_values(machine, *block_problem(block, variant, residual=False, o=24, activation="relu"), generator)


@blocks
def test_hidden_values_beyond_fp16(machine, generator: torch.Generator, block: str):
    """What memory between the kernels does not hold is made anew from x."""
    problem, schedule = block_problem(block, "fp16", activation="relu")
    x, expand, *_ = tensors = draw(problem, generator)
    x[0, :, 40:43] *= 2.0**12
    x[1, :, -1] *= 2.0**12
    expand.mul_(2.0**6)
    tensors[3].mul_(2.0**-12)
    hidden = accuracy.project(expand.double(), x.double(), tensors[4].double())
    assert 1e5 < hidden.abs().max() < 1e7
    want = compare(problem, tensors, run(machine, problem, schedule, tensors))
    assert want.isfinite().all()
    check_values(machine, problem, schedule, generator)


@blocks
@pytest.mark.parametrize("variant", ["bf16", "fp16"])
def test_a_block_with_values_that_are_not_finite(machine, generator: torch.Generator, variant: str, block: str):
    problem, schedule = block_problem(block, variant, activation="relu6")
    tensors = draw(problem, generator)
    for value in (math.nan, math.inf, -math.inf):
        place(tensors[0], value, 1, generator)
    want = compare(problem, tensors, run(machine, problem, schedule, tensors))
    assert want.isnan().any() and want.isfinite().any()
