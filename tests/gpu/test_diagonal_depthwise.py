"""The depthwise stage on tensor cores, in each way that its kernels are cut, against float64, NaN and Inf too."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from cutlass_sep.problem import SeparableConv2dProblem
from cutlass_sep.schedule import Geometry, Schedule, check

from . import accuracy
from .calls import draw, embed, make_problem
from .scheduled import check_beyond_fp16, check_values, run
from .test_special_values import compare, place


class Cut(NamedTuple):
    """A schedule's fields that differ, and a layer with sizes that leave tiles, passes and channel groups ragged."""

    name: str
    schedule: dict
    layer: dict
    layout: str = "channels_last"


ROW = {"h": 1, "w": 203, "kernel": (1, 9), "padding": (0, 4)}
RUNS = {"warps_q": 4, "warpgroups": 2, "side_by_side": True, "mma_q": 16, "run_window": 256}
ALONE = RUNS | {"warpgroups": 1, "side_by_side": False}
BESIDE = {"warps_q": 4, "warpgroups": 2, "side_by_side": True}
CUTS = [
    # One pass over the channels: rows of x in the ring.
    Cut("rows", {"warps_q": 2, "warpgroups": 3, "row_slots": 16}, {"c": 40, "o": 24, "h": 23, "w": 37}),
    Cut("rows-stride2", {"warps_q": 2, "warpgroups": 2, "row_slots": 20}, {"c": 64, "o": 64, "stride": 2, "w": 51}),
    Cut("rows-7x7", {"warps_q": 1, "warpgroups": 2, "row_slots": 24}, {"c": 24, "o": 40, "kernel": 7, "padding": 3}),
    Cut("rows-dilated", {"warps_q": 2, "warpgroups": 2, "row_slots": 24},
        {"c": 64, "o": 16, "dilation": (2, 3), "padding": (2, 3), "w": 40}),
    # Several: windows.
    Cut("windows", {"warps_q": 1, "warpgroups": 2}, {"c": 200, "o": 136, "h": 19, "w": 21}),
    Cut("windows-wide", {"tile_oc": 256, "warps_q": 2, "warpgroups": 2, "row_slots": 1}, {"c": 136, "o": 264}),
    Cut("windows-alone", {"warps_q": 2, "warpgroups": 1, "weight_slots": 1, "row_slots": 1}, {"c": 104, "o": 40}),
    Cut("windows-resident", {"warps_q": 1, "warpgroups": 2, "weight_slots": 3}, {"c": 136, "o": 56, "n": 3}),
    Cut("windows-two-atoms", {"slot_channels": 128, "warps_q": 2, "warpgroups": 3}, {"c": 328, "o": 72}),
    Cut("windows-even", {"warps_q": 4, "warpgroups": 2},
        {"c": 72, "o": 64, "kernel": (2, 4), "stride": (2, 1), "padding": "valid", "w": 70}),
    Cut("windows-5x5", {"warps_q": 2, "warpgroups": 2},
        {"c": 96, "o": 96, "kernel": 5, "padding": 2, "h": 14, "w": 14}),
    Cut("windows-7x7-maps", {"warps_q": 1, "warpgroups": 2}, {"c": 192, "o": 64, "h": 7, "w": 7, "n": 5}),
    # Runs of the map's pixels.
    Cut("runs", RUNS, {"c": 200, "o": 136, "h": 19, "w": 21, "n": 3}),
    Cut("runs-one-tile", ALONE | {"run_window": 128},
        {"c": 136, "o": 72, "h": 6, "w": 7, "n": 5}),
    Cut("runs-idle-warpgroup", RUNS | {"warpgroups": 3, "tile_oc": 64}, {"c": 72, "o": 136, "h": 9, "w": 10, "n": 99}),
    Cut("runs-stride2", ALONE | {"run_window": 512}, {"c": 104, "o": 40, "stride": 2, "h": 37, "w": 29}),
    Cut("runs-dilated", RUNS | {"run_window": 384},
        {"c": 136, "o": 64, "dilation": (2, 3), "padding": (2, 3), "h": 17, "w": 19}),
    Cut("runs-even", RUNS, {"c": 72, "o": 64, "kernel": (2, 4), "padding": "valid", "h": 14, "w": 23}),
    Cut("runs-two-atoms", RUNS | {"slot_channels": 128, "row_slots": 1, "weight_slots": 1, "run_window": 384},
        {"c": 328, "o": 72, "h": 38, "w": 38}),
    Cut("runs-resident", RUNS | {"weight_slots": 3}, {"c": 136, "o": 56, "h": 15, "w": 13, "n": 150}),
    # The warpgroups take the passes in turn.
    Cut("split", {"warps_q": 1, "warpgroups": 2, "split_channels": True},
        {"c": 328, "o": 72, "h": 7, "w": 9, "n": 140}),
    Cut("split3", {"warps_q": 2, "warpgroups": 3, "split_channels": True, "row_slots": 1, "weight_slots": 2},
        {"c": 456, "o": 40, "h": 14, "w": 14}),
    Cut("split-resident", {"warps_q": 1, "warpgroups": 2, "split_channels": True, "weight_slots": 3},
        {"c": 168, "o": 24, "n": 150, "h": 8, "w": 8}),
    # Maps of one row.
    Cut("row", {"side_by_side": True, "warps_q": 4, "warpgroups": 2}, ROW | {"c": 264, "o": 136}),
    Cut("row-long", {"side_by_side": True, "warps_q": 4, "warpgroups": 2},
        ROW | {"c": 72, "o": 64, "kernel": (1, 63), "padding": (0, 31)}),
    Cut("row-dilated", {"warps_q": 4, "warpgroups": 1, "row_slots": 3},
        ROW | {"c": 72, "o": 64, "kernel": (1, 43), "dilation": (1, 2), "padding": "same"}),
    Cut("row-stride2", {"warps_q": 4, "warpgroups": 1}, ROW | {"c": 136, "o": 64, "stride": (1, 2)}),
    Cut("row-one-pass", {"side_by_side": True, "warps_q": 4, "warpgroups": 3}, ROW | {"c": 64, "o": 96}),
    Cut("row-split", {"split_channels": True, "warps_q": 4, "warpgroups": 2}, ROW | {"c": 200, "o": 64}),
    # Contiguous rows, turned: two blocks of 16 columns or 8, one; warpgroups beside and below each other.
    Cut("rows-turned-wide",
        BESIDE | {"blocks": 2, "mma_q": 16, "row_slots": 5, "weight_slots": 1},
        {"c": 40, "o": 120, "h": 21, "w": 304}, "contiguous"),
    Cut("rows-turned-buffers",
        {"blocks": 2, "mma_q": 16, "warps_q": 4, "warpgroups": 2, "row_slots": 8, "staging_groups": 2},
        {"c": 64, "o": 128, "h": 19, "w": 144, "n": 3}, "contiguous"),
    Cut("rows-turned-beside", BESIDE | {"blocks": 2, "row_slots": 9}, {"c": 64, "o": 40, "w": 136}, "contiguous"),
    Cut("rows-turned-stride2", {"warps_q": 4, "warpgroups": 2, "row_slots": 12},
        {"c": 64, "o": 64, "stride": 2, "h": 31, "w": 144}, "contiguous"),
    Cut("rows-turned-dilated", {"blocks": 2, "warps_q": 2, "warpgroups": 2, "row_slots": 16},
        {"c": 24, "o": 16, "dilation": (2, 3), "padding": (2, 3), "w": 40}, "contiguous"),
    Cut("rows-turned-7x7", {"warps_q": 1, "warpgroups": 2, "row_slots": 24},
        {"c": 24, "o": 40, "kernel": 7, "padding": 3, "w": 40}, "contiguous"),
    Cut("rows-turned-two-atoms", {"slot_channels": 128, "warps_q": 4, "warpgroups": 2, "row_slots": 6},
        {"c": 104, "o": 72, "w": 56}, "contiguous"),
    Cut("rows-turned-oc-tiles", {"tile_oc": 64, "warps_q": 4, "warpgroups": 1, "row_slots": 9, "staging_groups": 2},
        {"c": 32, "o": 136, "w": 72}, "contiguous"),
    Cut("windows-turned-wide",
        BESIDE | {"tile_oc": 256, "row_slots": 3, "staging_groups": 4},
        {"c": 200, "o": 264, "w": 88}, "contiguous"),
    Cut("windows-turned-down", {"warps_q": 2, "warpgroups": 2}, {"c": 136, "o": 96, "w": 24, "h": 21}, "contiguous"),
    Cut("windows-turned-stride2", {"warps_q": 4, "warpgroups": 2, "row_slots": 1},
        {"c": 72, "o": 64, "stride": 2, "h": 27, "w": 80}, "contiguous"),
    Cut("row-turned", BESIDE | {"blocks": 2, "row_slots": 3},
        ROW | {"c": 72, "o": 64, "w": 200}, "contiguous"),
]  # fmt: skip
#: The same with tables of taps from the launch before.
CUTS += [
    cut._replace(name=f"{cut.name}-packed", schedule=cut.schedule | {"packs_taps": True})
    for cut in CUTS
    if cut.name
    in ("rows-7x7", "windows", "windows-two-atoms", "windows-even", "split3", "split-resident", "row-long", "runs")
]
cuts = pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
#: Names of cuts that differ in how rows come.
SOME = ("rows", "windows", "windows-packed", "rows-turned-beside")
#: Weights and biases elsewhere in memory.
WEIGHTS = {
    "offset1": lambda t: embed(t, 1),
    "offset4": lambda t: embed(t, 4),
    "stepped": lambda t: t.repeat_interleave(2, 0)[::2],
}


def cut_problem(cut: Cut, variant: str, **more) -> tuple[SeparableConv2dProblem, Schedule]:
    fields = {"n": 2, "h": 30, "w": 33, "kernel": 3, "padding": 1} | cut.layer | more
    problem = make_problem(variant, cut.layout, **fields)
    tile_oc = next(oc for oc in (16, 32, 64, 96, 128, 192, 256) if oc >= min(problem.o, 128))
    base = {"path": "sm90", "tile_oc": tile_oc, "slot_channels": 64, "blocks": 1, "row_slots": 2, "weight_slots": 2}
    schedule = Schedule(**base | {"mma_q": 16 if problem.p == 1 else 8} | cut.schedule)
    return problem, schedule


def test_the_cuts_are_what_their_names_say():
    for cut in CUTS:
        problem, schedule = cut_problem(cut, "bf16")
        g = Geometry(problem, schedule)
        assert check(problem, schedule, "sm_90a"), cut
        assert g.march == (cut.name.startswith("rows") or cut.name == "row-one-pass"), cut
        assert (g.slot_rows == 1) == cut.name.startswith("row"), cut
        assert ("split" in cut.name) == schedule.split_channels, cut
        assert ("turned" in cut.name) == g.turned, cut
        assert ("packed" in cut.name) == (g.pack_blocks > 0), cut
        assert ("runs" in cut.name) == g.runs, cut
        # The last tile, pass or group of channels is ragged somewhere.
        ragged = (g.map_q % g.tile_q, g.map_p % g.tile_p, problem.c % 64, problem.o % schedule.tile_oc)
        assert any(ragged), cut


@cuts
@pytest.mark.parametrize("variant", ["bf16", "fp16"])
def test_values(machine, generator: torch.Generator, variant: str, cut: Cut):
    problem, schedule = cut_problem(cut, variant, mid_activation="relu6", activation="silu")
    check_values(machine, problem, schedule, generator)


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut.name in SOME], ids=lambda cut: cut.name)
@pytest.mark.parametrize("where", WEIGHTS)
def test_weights_wherever_they_are(machine, generator: torch.Generator, where: str, cut: Cut):
    """TMA reads them as they are where it can."""
    problem, schedule = cut_problem(cut, "bf16")
    x, *parameters = tensors = draw(problem, generator)
    moved = (x, *map(WEIGHTS[where], parameters))
    assert all(t.data_ptr() % 16 or not t.is_contiguous() for t in moved[1:])
    y = run(machine, problem, schedule, moved)
    accuracy.judge(problem, tensors, y, where)
    # Written in place, as an optimizer does.
    fresh = draw(problem, generator)
    for own, new in zip(moved[1:], fresh[1:], strict=True):
        own.copy_(new)
    accuracy.judge(problem, (x, *fresh[1:]), run(machine, problem, schedule, moved), f"{where}, written in place")


@cuts
def test_values_that_are_not_finite(machine, generator: torch.Generator, cut: Cut):
    """Zeros of the diagonals turn them to NaN in other channels of their pixel, which must not show."""
    problem, schedule = cut_problem(cut, "bf16", mid_activation="relu6", activation="silu")
    tensors = draw(problem, generator)
    for value in (math.nan, math.inf, -math.inf):
        place(tensors[0], value, 2, generator)
    compare(problem, tensors, run(machine, problem, schedule, tensors))
    for which in (1, 3):  # a tap, a bias of the depthwise convolution
        tensors = draw(problem, generator)
        place(tensors[which], math.inf, 1, generator)
        # Near the border a tap lies on padding; backends differ on whether Inf * 0 counts there.
        spans = zip(problem.dilation, problem.kernel, problem.y_shape[2:], strict=True)
        inner = [slice(d * (k - 1), extent - d * (k - 1)) for d, k, extent in spans]
        where = (..., *inner) if which == 1 else (...,)
        compare(problem, tensors, run(machine, problem, schedule, tensors), where)


@cuts
def test_depthwise_outputs_beyond_fp16(machine, generator: torch.Generator, cut: Cut):
    """They are no operand of the MMA, but y has them in it."""
    problem, schedule = cut_problem(cut, "fp16")
    check_beyond_fp16(machine, problem, schedule, generator)
