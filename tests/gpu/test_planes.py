"""The depthwise stage as a kernel of its own on planes, in each way that its tiles are cut, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from cutlass_sep import planner
from cutlass_sep.planes import PlaneGeometry
from cutlass_sep.problem import SeparableConv2dProblem
from cutlass_sep.schedule import Schedule, check, ranked

from . import accuracy
from .calls import draw, embed, make_problem
from .scheduled import check_beyond_fp16, check_not_finite, check_values, run
from .test_special_values import compare, place


class Cut(NamedTuple):
    """Rows and columns of a tile, and a layer with sizes that leave tiles and groups of channels ragged."""

    name: str
    rows: int
    columns: int
    layer: dict
    layout: str = "channels_last"


CUTS = [
    # One image side by side: strips of several tiles, several strips, a window that starts anew inside a strip.
    Cut("strips", 4, 64, {"c": 40, "o": 24, "h": 37, "w": 150, "kernel": 9, "padding": 4}),
    Cut("tall-tiles", 16, 64, {"c": 24, "o": 16, "h": 45, "w": 70, "kernel": 7, "padding": 3}),
    Cut("two-rows", 2, 64, {"c": 16, "o": 72, "h": 11, "w": 67, "kernel": (11, 5), "padding": (5, 2)}),
    Cut("31x31", 8, 64, {"c": 40, "o": 16, "h": 29, "w": 57, "kernel": 31, "padding": 15}),
    Cut("8-channels", 14, 64, {"c": 24, "o": 40, "h": 33, "w": 41, "kernel": 31, "padding": 15}),
    Cut("even", 8, 64, {"c": 16, "o": 24, "h": 21, "w": 66, "kernel": (6, 8), "padding": "same"}),
    Cut("no-padding", 6, 64, {"c": 24, "o": 16, "h": 23, "w": 90, "kernel": (8, 13), "padding": 0}),
    Cut("far-padding", 4, 64, {"c": 8, "o": 8, "h": 9, "w": 20, "kernel": 9, "padding": (30, 25)}),
    Cut("dilated", 4, 64,
        {"c": 16, "o": 16, "h": 14, "w": 70, "kernel": (7, 9), "dilation": (1, 3), "padding": (3, 12)}),
    Cut("51x5", 8, 64, {"c": 16, "o": 24, "h": 30, "w": 65, "kernel": (51, 5), "padding": (25, 2)}),
    Cut("5x51", 8, 64, {"c": 16, "o": 24, "h": 30, "w": 65, "kernel": (5, 51), "padding": (2, 25)}),
    # Images beside each other in a tile.
    Cut("two-images", 14, 32, {"n": 3, "c": 24, "o": 16, "h": 28, "w": 28, "kernel": 29, "padding": 14}),
    Cut("two-images-across", 4, 32, {"n": 5, "c": 40, "o": 24, "h": 13, "w": 50, "kernel": 13, "padding": 6}),
    Cut("four-images", 14, 16, {"n": 6, "c": 24, "o": 16, "h": 14, "w": 14, "kernel": 27, "padding": 13}),
    Cut("eight-images", 8, 8, {"n": 11, "c": 24, "o": 16, "h": 7, "w": 7, "kernel": 13, "padding": 6}),
    # One row of taps: rows of all images are one image's.
    Cut("row", 8, 64, {"n": 5, "c": 40, "o": 72, "h": 1, "w": 203, "kernel": (1, 63), "padding": (0, 31)}),
    Cut("row-alone", 16, 64, {"n": 1, "c": 16, "o": 24, "h": 1, "w": 33, "kernel": (1, 41), "padding": (0, 20)}),
    Cut("row-dilated", 4, 64,
        {"n": 3, "c": 24, "o": 16, "h": 1, "w": 190, "kernel": (1, 87), "dilation": (1, 2), "padding": (0, 86)}),
    Cut("rows-of-one", 8, 64, {"n": 3, "c": 16, "o": 24, "h": 5, "w": 70, "kernel": (1, 33), "padding": (0, 16)}),
    # Contiguous.
    Cut("contiguous", 8, 64, {"c": 24, "o": 40, "h": 21, "w": 72, "kernel": 13, "padding": 6}, "contiguous"),
    Cut("contiguous-images", 6, 16,
        {"n": 7, "c": 40, "o": 24, "h": 15, "w": 16, "kernel": 7, "padding": 3}, "contiguous"),
    Cut("contiguous-row", 8, 64,
        {"n": 5, "c": 16, "o": 24, "h": 1, "w": 200, "kernel": (1, 63), "padding": (0, 31)}, "contiguous"),
]  # fmt: skip
cuts = pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)


def cut_problem(cut: Cut, variant: str, **more) -> tuple[SeparableConv2dProblem, Schedule]:
    problem = make_problem(variant, cut.layout, **{"n": 2} | cut.layer | more)
    pointwise = ranked(problem.pointwise, "sm90", "sm_90a")[0]
    return problem, replace(pointwise, plane_rows=cut.rows, plane_columns=cut.columns)


def test_the_cuts_are_what_their_names_say():
    for cut in CUTS:
        problem, schedule = cut_problem(cut, "bf16")
        g = PlaneGeometry(problem, schedule)
        assert check(problem, schedule, "sm_90a"), cut
        assert g.one_row == ("row" in cut.name and "rows" not in cut.name or cut.name == "rows-of-one"), cut
        assert (g.tile_images > 1) == ("images" in cut.name), cut
        # The last tile, image or group of channels is ragged somewhere.
        ragged = (problem.q % cut.columns, g.rows % cut.rows, g.images % g.tile_images, problem.c % g.channels)
        assert any(ragged), cut
    assert {PlaneGeometry(*cut_problem(cut, "bf16")).channels for cut in CUTS} == {8, 16}


@cuts
@pytest.mark.parametrize("variant", ["bf16", "fp16"])
def test_values(machine, generator: torch.Generator, variant: str, cut: Cut):
    problem, schedule = cut_problem(cut, variant, mid_activation="relu6", activation="silu")
    check_values(machine, problem, schedule, generator)


@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("mid_activation", [None, "gelu"])
def test_without_a_bias(machine, generator: torch.Generator, biases: tuple[bool, bool], mid_activation: str | None):
    dw_bias, pw_bias = biases
    more = {"dw_bias": dw_bias, "pw_bias": pw_bias, "mid_activation": mid_activation}
    problem, schedule = cut_problem(CUTS[0], "bf16", **more)
    check_values(machine, problem, schedule, generator)


@pytest.mark.parametrize("kernel", [(31, 31), (7, 7), (1, 63)], ids=str)
def test_more_tiles_than_blocks(machine, generator: torch.Generator, kernel: tuple[int, int]):
    """A block's share crosses groups of channels, and strips in their middle."""
    h, w = (1, 840) if kernel[0] == 1 else (40, 40)
    padding = tuple(k // 2 for k in kernel)
    problem = make_problem("bf16", "channels_last", n=24, c=72, o=64, h=h, w=w, kernel=kernel, padding=padding)
    schedule = next(s for s in planner.contenders(problem, "sm_90a", 8) if s.plane_rows)
    g = PlaneGeometry(problem, schedule)
    assert g.groups * g.tiles > 132
    check_values(machine, problem, schedule, generator)


@pytest.mark.parametrize("offset", [1, 4])
def test_weights_wherever_they_are(machine, generator: torch.Generator, offset: int):
    problem, schedule = cut_problem(CUTS[0], "bf16")
    x, *parameters = tensors = draw(problem, generator)
    moved = (x, *(embed(t, offset) for t in parameters))
    accuracy.judge(problem, tensors, run(machine, problem, schedule, moved), str(offset))
    # Written in place, as an optimizer does.
    fresh = draw(problem, generator)
    for own, new in zip(moved[1:], fresh[1:], strict=True):
        own.copy_(new)
    accuracy.judge(problem, (x, *fresh[1:]), run(machine, problem, schedule, moved), "written in place")


@cuts
def test_values_that_are_not_finite(machine, generator: torch.Generator, cut: Cut):
    """Zeros of the Toeplitz matrices turn them to NaN in other columns of their block, which must not show."""
    problem, schedule = cut_problem(cut, "bf16", mid_activation="relu6", activation="silu")
    check_not_finite(machine, problem, schedule, generator)


def test_a_tap_that_is_not_finite(machine, generator: torch.Generator):
    """Near the border a tap lies on padding; backends differ on whether Inf * 0 counts there."""
    problem, schedule = cut_problem(CUTS[0], "bf16")
    tensors = draw(problem, generator)
    place(tensors[1], math.inf, 1, generator)
    inner = (..., slice(8, problem.p - 8), slice(8, problem.q - 8))
    compare(problem, tensors, run(machine, problem, schedule, tensors), inner)


@cuts
def test_depthwise_outputs_beyond_fp16(machine, generator: torch.Generator, cut: Cut):
    """Memory between the kernels does not hold them, but y has them in it."""
    problem, schedule = cut_problem(cut, "fp16")
    check_beyond_fp16(machine, problem, schedule, generator)
    # A call behind it, in the same workspace.
    check_values(machine, problem, schedule, generator)
