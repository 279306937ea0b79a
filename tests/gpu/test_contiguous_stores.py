"""Contiguous tiles by FMA: the rows of a warpgroup's tile are staged and stored together, in each way they are cut."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from cutlass_sep.problem import SeparableConv2dProblem
from cutlass_sep.schedule import Geometry, Schedule, check

from .calls import draw, make_problem
from .scheduled import check_values, run
from .test_special_values import compare, place


class Cut(NamedTuple):
    """A schedule's fields that differ, and sizes that leave tiles and channel groups ragged."""

    name: str
    variants: tuple[str, ...]
    schedule: dict
    layer: dict


CUTS = [
    # A row of four warps, or two rows of two, or four; one buffer or several in turn.
    Cut("row-of-boxes", ("fp32", "tf32", "bf16"), {"blocks": 2, "warps_q": 4, "row_slots": 4, "staging_groups": 2},
        {"o": 120, "h": 21, "w": 304}),
    Cut("one-buffer", ("fp32",), {"blocks": 2, "warps_q": 4, "row_slots": 4}, {"o": 72, "h": 9, "w": 136, "n": 3}),
    Cut("four-buffers", ("tf32",), {"blocks": 2, "warps_q": 4, "row_slots": 3, "staging_groups": 4},
        {"o": 128, "h": 9, "w": 200}),
    Cut("two-rows", ("fp32", "bf16"), {"blocks": 2, "warps_q": 2, "row_slots": 6, "staging_groups": 2},
        {"o": 56, "h": 19, "w": 72}),
    Cut("four-rows", ("fp32", "fp16"), {"blocks": 2, "warps_q": 1, "row_slots": 9, "staging_groups": 2},
        {"o": 64, "h": 22, "w": 40}),
    Cut("two-warps-a-box", ("fp32", "tf32"), {"blocks": 1, "warps_q": 4, "warpgroups": 3, "row_slots": 5},
        {"o": 40, "h": 17, "w": 88}),
    Cut("narrow", ("fp32", "bf16"), {"blocks": 1, "warps_q": 1, "row_slots": 12}, {"o": 8, "h": 15, "w": 24}),
    Cut("beside", ("fp32", "bf16"), {"blocks": 1, "warps_q": 4, "row_slots": 3, "side_by_side": True},
        {"o": 24, "h": 5, "w": 152}),
    # Several passes over the channels, several tiles of output channels.
    Cut("passes", ("fp32", "tf32", "bf16"), {"blocks": 1, "warps_q": 2, "row_slots": 8, "weight_slots": 2,
        "tile_oc": 64, "staging_groups": 2}, {"c": 136, "o": 136, "h": 13, "w": 40}),
]  # fmt: skip
CALLS = [(cut, variant) for cut in CUTS for variant in cut.variants]
calls = pytest.mark.parametrize(("cut", "variant"), CALLS, ids=[f"{cut.name}-{variant}" for cut, variant in CALLS])


def cut_problem(cut: Cut, variant: str, **more) -> tuple[SeparableConv2dProblem, Schedule]:
    problem = make_problem(variant, "contiguous", **{"n": 2, "c": 40} | cut.layer | more)
    tile_oc = next(oc for oc in (8, 16, 32, 64, 96, 128) if oc >= min(problem.o, 128))
    base = {"path": "sm90", "tile_oc": tile_oc, "slot_channels": 64, "warpgroups": 2}
    return problem, Schedule(**base | cut.schedule)


def test_tiles_are_ragged():
    for cut, variant in CALLS:
        problem, schedule = cut_problem(cut, variant)
        supported = check(problem, schedule, "sm_90a")
        assert supported, f"{cut}: {supported.reason}"
        g = Geometry(problem, schedule)
        assert problem.q % g.tile_q or problem.p % g.tile_p or problem.o % schedule.tile_oc, cut


@calls
def test_values(machine, generator: torch.Generator, cut: Cut, variant: str):
    problem, schedule = cut_problem(cut, variant, mid_activation="relu6", activation="silu")
    check_values(machine, problem, schedule, generator)


@calls
def test_values_that_are_not_finite(machine, generator: torch.Generator, cut: Cut, variant: str):
    """One warp's pixels are written anew, when the stores of its warpgroup have landed."""
    problem, schedule = cut_problem(cut, variant)
    tensors = draw(problem, generator)
    for value in (math.nan, math.inf, -math.inf):
        place(tensors[0], value, 2, generator)
    compare(problem, tensors, run(machine, problem, schedule, tensors))
