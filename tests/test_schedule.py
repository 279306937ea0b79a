"""Schedules: which are legal, what follows from one, and that portable has one for every problem."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from problems import KINDS, LAYOUTS, LEAD, best_first, in_one_kernel, problem_of
from separable import Case

from cutlass_sep.arch import ARCHS, SHARED_BYTES
from cutlass_sep.problem import Pads, SeparableConv2dProblem
from cutlass_sep.schedule import (
    PATHS,
    TYPICAL_SIZES,
    Geometry,
    Schedule,
    candidates,
    check,
    for_size,
    supports,
    tile_key,
    typical,
)
from cutlass_sep.source import constants


def portable(**fields) -> Schedule:
    defaults = {"tile_oc": 64, "slot_channels": 32, "blocks": 1, "warps_q": 2, "warpgroups": 1}
    return Schedule("portable", **defaults | fields)


def random_problem(draw: random.Random) -> SeparableConv2dProblem:
    """Any layer that PyTorch takes, small or large, common or odd."""
    kernel = draw.choice([(1, 1), (3, 3), (5, 5), (2, 4), (7, 7), (1, 31), (13, 3), (31, 31), (1, 87)])
    dilation = draw.choice([(1, 1), (1, 1), (2, 2), (1, 3), (7, 64)])
    span = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    case = Case(
        n=draw.choice([1, 3, 64]), c=draw.choice([1, 3, 8, 37, 64, 100, 512, 2048]),
        o=draw.choice([1, 5, 16, 40, 96, 128, 200, 1000]), h=draw.randint(1, 200), w=draw.randint(1, 600),
        kernel=kernel, stride=draw.choice([1, 1, 2, (2, 1), (3, 4)]),
        padding=tuple(s // 2 + draw.randint(s % 2, 2) for s in span),
        dilation=dilation, dw_bias=draw.random() < 0.5, mid_activation=draw.choice([None, "relu6", "gelu"]),
    )  # fmt: skip
    return problem_of(case, draw.choice(list(KINDS)), draw.choice(LAYOUTS), draw.choice([16, 4]))


RANDOM = [random_problem(random.Random(seed)) for seed in range(150)]


# ---- what is supported


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_maps_of_one_row_have_tiles_along_it(layout: str):
    row = replace(problem_of(LEAD, "bf16", layout), h=1, w=4096, kernel=(1, 9), padding=Pads(0, 0, 4, 4), c=256, o=256)
    sizes = typical(row)
    assert [(size.n, size.h, size.p, size.q) for size in sizes] == [(n, 1, 1, e * e) for n, e in TYPICAL_SIZES[layout]]
    assert sizes == typical(replace(row, n=7, w=8000))
    for schedule in candidates(row, "sm_90a", "sm90"):
        across = 1 if schedule.split_channels else schedule.warpgroups
        assert (schedule.warps_q, schedule.side_by_side) == (4, across > 1)
        assert schedule.mma_q in (0, 16)
        geometry = Geometry(row, schedule)
        assert (geometry.item_q, geometry.tiles_down) == (geometry.tile_q * across, 1)
    square = candidates(problem_of(LEAD, "bf16", layout), "sm_90a", "sm90")
    turned = [schedule for schedule in square if layout == "contiguous" and schedule.mma_q]
    assert not any(schedule.side_by_side for schedule in square if schedule not in turned)


def test_portable_supports_everything_everywhere():
    for i, problem in enumerate(RANDOM):
        arch = list(ARCHS)[i % len(ARCHS)]
        assert supports(problem, "portable", arch), problem
        found = candidates(problem, arch, "portable")
        assert 1 <= len(found) == len(set(found)), problem
        for schedule in found:
            g = Geometry(problem, schedule)
            assert schedule.path == "portable"
            assert check(problem, schedule, arch), (problem, schedule)
            assert g.shared_bytes <= SHARED_BYTES[arch]
            # The launch bound: what the compiler is told to fit into one multiprocessor's 2048 threads.
            assert 1 <= g.resident_blocks <= 2048 // g.threads
        assert best_first(problem, arch, "portable", found), problem


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", KINDS)
def test_common_layers_have_several_schedules(kind: str, arch: str):
    late, middle = Case(n=32, c=512, o=512, h=14, w=14), Case(c=240, o=80, h=28, w=28, kernel=(5, 5), padding=2)
    for layout in LAYOUTS:
        for case in (LEAD, late, middle):
            assert len(candidates(problem_of(case, kind, layout), arch, "portable")) >= 2


def test_x_is_gathered_only_where_no_window_fits():
    dilated = problem_of(Case(c=64, o=64, h=64, w=64, padding=200, dilation=200))
    for arch in ARCHS:
        assert {s.gather for s in candidates(problem_of(), arch, "portable")} == {False}
        assert {s.gather for s in candidates(dilated, arch, "portable")} == {True}
    # 31 x 31: fits into 227 KB, not into 99 KB beside the weights of 32 channels.
    big = problem_of(Case(c=64, o=64, h=56, w=56, kernel=(31, 31), padding=15))
    assert not candidates(big, "sm_90a", "portable")[0].gather
    for schedule in candidates(big, "sm_86", "portable"):
        tile = replace(schedule, gather=False)
        assert schedule.gather and not check(big, tile, "sm_86") and check(big, schedule, "sm_86")


def test_refusals_say_why():
    problem = problem_of()
    assert supports(problem, "sm90", "sm_90a")
    for arch in set(ARCHS) - {"sm_90a"}:
        assert arch in supports(problem, "sm90", arch).reason
    assert "16-byte" in supports(replace(problem, alignment=8), "sm90", "sm_90a").reason
    for path in PATHS:
        assert "float64" in supports(replace(problem, dtype="float64", fp32_precision=None), path, "sm_90a").reason
    with pytest.raises(ValueError, match="path='sm80'.*'sm90', 'portable'"):
        supports(problem, "sm80", "sm_90a")
    with pytest.raises(ValueError, match="arch='sm_70'"):
        supports(problem, "portable", "sm_70")


@pytest.mark.parametrize(
    ("schedule", "arch", "reason"),
    [
        (portable(slot_channels=16), "sm_80", "slot_channels=16 is no multiple of 128 bytes"),
        (portable(tile_oc=24), "sm_80", "tile_oc=24 is no multiple of 16"),
        (portable(blocks=4, tile_oc=128), "sm_80", "registers a thread"),
        (portable(slot_channels=512), "sm_80", "bytes of shared memory"),
        (portable(slot_channels=64, blocks=2, warps_q=1, warpgroups=2), "sm_86", "bytes of shared memory"),
        (portable(tile_oc=0), "sm_80", "tile_oc=0 must be a positive integer"),
        (portable(row_slots=2), "sm_80", "row_slots=2 must be 1: path portable has no rings"),
        (portable(staging_groups=10**9), "sm_80", "staging_groups=1000000000 must be 1"),
        (portable(side_by_side=True), "sm_80", "side_by_side=True: on path portable"),
        (portable(tile_oc="64"), "sm_80", "tile_oc='64' must be a positive integer"),
        (portable(slot_channels=-32), "sm_80", "slot_channels=-32 must be a positive integer"),
        (portable(blocks=1.5), "sm_80", "blocks=1.5 must be a positive integer"),
        (portable(warps_q=3), "sm_80", "warps_q=3 must be 1, 2 or 4"),
        (portable(warpgroups=3), "sm_80", "warpgroups=3 must be 1 or 2"),
        (portable(gather="no"), "sm_80", "gather='no' must be True or False"),
        (replace(portable(), path="torch"), "sm_80", "path='torch' must be one of 'sm90', 'portable'"),
    ],
)
def test_illegal_on_portable(schedule: Schedule, arch: str, reason: str):
    refused = check(problem_of(), schedule, arch)
    assert not refused and reason in refused.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"slot_channels": 32}, "64 channels at a time"),
        ({"row_slots": 2}, "2 row slots hold no window"),
        ({"blocks": 3}, "a warp's rows of 192 bytes do not divide the 128 that TMA swizzles"),
        ({"tile_oc": 256}, "registers a thread"),
        ({"row_slots": 50}, "bytes of shared memory"),
        # A ring without a slot would wait for ever; stores that are no whole number of groups would be left out.
        ({"weight_slots": 0}, "weight_slots=0 must be a positive integer"),
        ({"staging_groups": 3}, "staging_groups=3 is no divisor of the 8 stores"),
        ({"warpgroups": 4}, "warpgroups=4 must be one of 1, 2, 3"),
        ({"warps_q": 0}, "warps_q=0 must be a positive integer"),
        ({"tile_oc": 72}, "tile_oc=72 must be one of"),
        ({"gather": True}, "only path portable gathers"),
    ],
)
def test_illegal_on_sm90(change: dict, reason: str):
    problem = problem_of()
    legal = candidates(problem, "sm_90a", "sm90")[0]
    assert check(problem, legal, "sm_90a")
    refused = check(problem, replace(legal, **change), "sm_90a")
    assert not refused and reason in refused.reason


def test_contiguous_lanes_stage_at_most_a_swizzled_unit():
    """Four blocks of 16-bit pixels are 32 bytes of a row: the swizzle may put the second 16 before the first."""
    problem = problem_of(Case(n=2, c=64, o=32, h=56, w=64), "bf16", "contiguous")
    schedule = Schedule("sm90", 32, 64, 2, 1, 2, row_slots=8)
    assert check(problem, schedule, "sm_90a")
    assert "blocks=4 must be 1 or 2" in check(problem, replace(schedule, blocks=4), "sm_90a").reason


def test_contiguous_tiles_of_many_channels_are_stored_from_two_buffers():
    """More are never waited for; one is, between the 16 groups of 256 output channels."""
    problem = problem_of(Case(n=32, c=256, o=256, h=1, w=4096, kernel=(1, 3), padding=(0, 1)), "bf16", "contiguous")
    found = [s for s in candidates(problem, "sm_90a", "sm90") if s.tile_oc == 256]
    assert found and {s.staging_groups for s in found} == {2}


def diagonal(**fields) -> Schedule:
    """Depthwise outputs by mma.sync, windows of x."""
    defaults = {
        "tile_oc": 64, "slot_channels": 64, "blocks": 1, "warps_q": 2, "warpgroups": 2, "row_slots": 2,
        "weight_slots": 2, "mma_q": 8,
    }  # fmt: skip
    return Schedule("sm90", **defaults | fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mma_q": 4}, "mma_q=4 must be 0, 8 or 16"),
        ({"mma_q": True}, "mma_q=True must be 0, 8 or 16"),
        ({"blocks": 2}, "mma_q=8: blocks=2 must be 1"),
        ({"row_slots": 9}, "bytes of shared memory"),
        ({"split_channels": True, "warpgroups": 1}, "split_channels=True: 1 warpgroups cannot share 4 passes"),
        ({"split_channels": True, "slot_channels": 256}, "split_channels=True: 2 warpgroups cannot share 1 passes"),
        ({"split_channels": True, "side_by_side": True}, "side_by_side=True gives each warpgroup a tile of its own"),
        ({"split_channels": True, "mma_q": 0}, "split_channels=True: only where mma_q makes the depthwise outputs"),
        ({"split_channels": True, "tile_oc": 256}, "registers a thread"),
        ({"split_channels": 1}, "split_channels=1 must be True or False"),
        ({"packs_taps": 1}, "packs_taps=1 must be True or False"),
        ({"packs_taps": True, "mma_q": 0}, "packs_taps=True: only where mma_q makes depthwise outputs"),
    ],
)
def test_illegal_on_tensor_cores(change: dict, reason: str):
    problem = problem_of(Case(c=256, o=256, h=38, w=38), "bf16", "channels_last")
    assert check(problem, diagonal(), "sm_90a")
    assert check(problem, diagonal(split_channels=True), "sm_90a")
    refused = check(problem, diagonal(**change), "sm_90a")
    assert not refused and reason in refused.reason


@pytest.mark.parametrize(
    ("case", "kind", "layout", "reason"),
    [
        (Case(c=256), "tf32", "channels_last", "mma.sync reads 16-bit tensors, not float32"),
        (Case(c=256, kernel=(13, 13), padding=6), "fp16", "channels_last", "169 taps are unrolled, at most 128"),
        # TMA reads the weights as they are.
        (Case(c=44, o=64, w=64), "bf16", "contiguous", "rows of pointwise weights of a multiple of 8 channels, not 44"),
    ],
)
def test_what_tensor_cores_do_not_take(case: Case, kind: str, layout: str, reason: str):
    problem = problem_of(case, kind, layout)
    refused = check(problem, diagonal(), "sm_90a")
    assert not refused and reason in refused.reason
    assert not any(schedule.mma_q for schedule in in_one_kernel(candidates(problem, "sm_90a")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_packed_but_for_tensor_cores(layout: str):
    problem = problem_of(LEAD, "bf16", layout)
    found = [Geometry(problem, schedule) for schedule in candidates(problem, "sm_90a", "sm90")]
    assert {g.packed for g in found} == {True, False}
    for g in found:
        assert g.packed == (g.pack_blocks > 0) == (g.workspace_bytes > 0) == (g.schedule.mma_q == 0)


def test_tables_of_taps_are_packed_where_shared_memory_is_short_or_taps_are_many():
    strided = problem_of(Case(n=32, c=256, o=256, h=836, w=40, stride=2), "bf16", "channels_last")
    long = problem_of(Case(n=32, c=512, o=512, h=1, w=1500, kernel=(1, 63), padding=(0, 31)), "bf16", "channels_last")
    small = problem_of(Case(n=32, c=384, o=64, h=14, w=14), "bf16", "channels_last")
    for problem, packs in ((strided, True), (long, True), (small, False)):
        best = in_one_kernel(for_size(problem, "sm_90a", "sm90"))[0]
        g, made = Geometry(problem, best), Geometry(problem, replace(best, packs_taps=False))
        assert best.mma_q and best.packs_taps == packs
        assert g.pack_blocks == packs * g.chunks and g.workspace_bytes >= packs * g.chunks * g.depthwise_weight_bytes
        # Without, taps as they are lie beside the table that warps make of them.
        raw = best.slot_channels * (problem.taps + problem.dw_bias) * 2
        assert made.depthwise_weight_bytes - g.depthwise_weight_bytes == packs * raw
    turned = problem_of(replace(LEAD, n=2), "bf16", "contiguous")
    best = next(s for s in candidates(turned, "sm_90a", "sm90") if s.mma_q)
    assert "made once for all passes" in check(turned, replace(best, packs_taps=True), "sm_90a").reason
    portable = Schedule("portable", 64, 64, 1, 4, 1, packs_taps=True)
    assert "all weights are packed" in check(turned, portable, "sm_80").reason


RUN = {"warps_q": 4, "side_by_side": True, "mma_q": 16, "run_window": 384}


def test_runs_fill_small_maps():
    small = problem_of(Case(n=32, c=728, o=1024, h=19, w=19), "bf16", "channels_last")
    best = in_one_kernel(for_size(small, "sm_90a", "sm90"))[0]
    g = Geometry(small, best)
    assert g.runs and (g.map_p, g.map_q, g.tile_q) == (1, 361, 64)
    # 128 pixels touch at most 8 rows of the map, under three of taps 10 of x; 21 columns are 24.
    assert best.warpgroups == 2 and (g.run_rows, g.slot_rows, g.columns) == (8, 10, 24)
    assert g.items(g.steps(132)) == 32 * 3 * g.oc_tiles
    assert g.slot_bytes == best.run_window * 128 >= 10 * 24 * 128
    # Rectangles fill these as well.
    for h, w in ((8, 8), (14, 14), (16, 32)):
        even = problem_of(Case(n=32, c=728, o=1024, h=h, w=w), "bf16", "channels_last")
        assert not any(schedule.run_window for schedule in for_size(even, "sm_90a", "sm90"))


@pytest.mark.parametrize(
    ("change", "case", "reason"),
    [
        ({}, {"h": 40, "w": 200}, "a window of 4 rows of 208 columns is larger"),
        ({"mma_q": 8}, {}, "only 64 pixels a warpgroup in one row"),
        ({"warps_q": 2}, {}, "only 64 pixels a warpgroup in one row"),
        ({"side_by_side": False}, {}, "the warpgroups' tiles must lie next to each other"),
        ({"slot_channels": 256}, {}, "slot_channels=256 take all channels in one pass"),
        ({"run_window": -8}, {}, "run_window=-8 must be"),
        ({"run_window": 380}, {}, "run_window=380 must be"),
        ({"run_window": True}, {}, "run_window=True must be"),
    ],
)
def test_illegal_runs(change: dict, case: dict, reason: str):
    problem = problem_of(Case(**{"c": 256, "o": 256, "h": 19, "w": 19} | case), "bf16", "channels_last")
    refused = check(problem, diagonal(**RUN | change), "sm_90a")
    assert not refused and reason in refused.reason
    assert case or check(problem, diagonal(**RUN), "sm_90a")


def test_16_bit_channels_last_layers_run_on_tensor_cores():
    """Wide layers in windows; the pointwise half of a block too, whose x is the operand as it is."""
    wide = problem_of(Case(n=32, c=728, o=728, h=38, w=38), "bf16", "channels_last")
    best = in_one_kernel(for_size(wide, "sm_90a", "sm90"))[0]
    assert (best.mma_q, best.blocks, Geometry(wide, best).slot_rows > 1) == (8, 1, True)
    small = problem_of(Case(n=32, c=1152, o=192, h=7, w=7), "fp16", "channels_last")
    assert in_one_kernel(for_size(small, "sm_90a", "sm90"))[0].split_channels
    pointwise = replace(wide, h=1, w=4096, kernel=(1, 1), padding=Pads(0, 0, 0, 0), dw_bias=False, depthwise=False)
    assert candidates(pointwise, "sm_90a", "sm90")[0].mma_q == 16


def matrices_one_by_one(problem: SeparableConv2dProblem, schedule: Schedule) -> set[tuple[int, int]]:
    """(row, column) of the first pixel of each 8 x 8 matrix under a warp's pixels, by its definition."""
    found = set()
    for r in range(problem.kernel[0]):
        for s in range(problem.kernel[1]):
            for block in range(schedule.blocks):
                for half in range(2):
                    p, q = (2 * block + half, 0) if schedule.mma_q == 8 else (block, 8 * half)
                    row = p * problem.stride[0] + r * problem.dilation[0]
                    found.add((row, q * problem.stride[1] + s * problem.dilation[1]))
    return found


@pytest.mark.parametrize("mma_q", [8, 16])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(kernel=(5, 5)), Case(stride=2), Case(kernel=(1, 9)), Case(w=200, kernel=(1, 43), dilation=(1, 2)),
     Case(kernel=(2, 4), dilation=(3, 1), stride=(2, 1)), Case(w=200, kernel=(1, 3), dilation=(1, 32))],
    ids=str,
)  # fmt: skip
def test_matrices_of_a_window(case: Case, mma_q: int):
    problem, schedule = problem_of(case, "bf16", "channels_last"), diagonal(mma_q=mma_q)
    g = Geometry(problem, schedule)
    assert g.matrices == len(matrices_one_by_one(problem, schedule))
    assert (g.warp_p, g.warp_q) == (16 // mma_q, mma_q)


def test_a_schedule_does_not_lift_what_its_path_asks_for():
    """wgmma compiles for other architectures too, into a trap."""
    problem = problem_of()
    fast = candidates(problem, "sm_90a", "sm90")[0]
    assert check(problem, fast, "sm_90a")
    assert "sm_100a" in check(problem, fast, "sm_100a").reason
    assert "16-byte" in check(replace(problem, alignment=4), fast, "sm_90a").reason
    assert "float64" in check(replace(problem, dtype="float64", fp32_precision=None), portable(), "sm_90a").reason


@pytest.mark.parametrize(
    ("change", "named"),
    [({"h": 2**30}, 2**30), ({"padding": Pads(2**31, 0, 0, 0)}, 2**31 + 510), ({"stride": (1, 2**31)}, 2**31),
     ({"o": 2**30}, 2**30), ({"c": 2**19, "o": 2**18}, 2**37)],
)  # fmt: skip
def test_numbers_that_kernels_cannot_count(change: dict, named: int):
    problem = replace(problem_of(), **change)
    for path in PATHS:
        assert str(named) in supports(problem, path, "sm_90a").reason
    assert candidates(problem, "sm_90a") == []


@pytest.mark.parametrize(
    "sizes",
    [
        {"n": 2**14, "h": 2**14, "w": 2**10},
        {"n": 2**28 - 1, "h": 1, "w": 8, "kernel": (1, 1), "padding": Pads(0, 0, 0, 0), "o": 64},
    ],
    ids=["more", "almost as many"],
)
def test_more_work_items_than_sm90_counts_run_on_portable(sizes: dict):
    """Also if the index of the last one fits, as a block goes on from it by as many as there are blocks."""
    problem = replace(problem_of(), **sizes)
    assert "32 bits" in supports(problem, "sm90", "sm_90a").reason
    assert supports(problem, "portable", "sm_90a")


def test_json():
    schedule = candidates(problem_of(), "sm_90a")[0]
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule
    for wrong in ({}, schedule.to_json() | {"slots": 3}, "sm90", [1], None):
        with pytest.raises(ValueError, match="schedule must be a dict of path, tile_oc"):
            Schedule.from_json(wrong)


# ---- what follows from a schedule


@pytest.mark.parametrize("case", [Case(stride=(2, 1), kernel=(3, 5), dilation=(1, 2)), Case(kernel=(4, 2), dilation=3)])
def test_window_covers_every_tap(case: Case):
    """The rows and columns of x that p x q outputs read, counted one by one."""
    problem = problem_of(case)
    for tile_p, tile_q in ((1, 1), (4, 16), (3, 64)):
        g = Geometry(problem, portable())
        for i, (extent, size) in enumerate(((tile_p, g.window_rows(tile_p)), (tile_q, g.window_cols(tile_q)))):
            taps = {
                o * problem.stride[i] + r * problem.dilation[i] for o in range(extent) for r in range(problem.kernel[i])
            }
            assert (min(taps), max(taps)) == (0, size - 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(1, 1), (7, 7), (30, 100), (512, 512)])
def test_work_items_cover_the_output(size: tuple[int, int], layout: str, path: str):
    problem = problem_of(replace(LEAD, n=3, h=size[0], w=size[1], o=200), "bf16", layout)
    for schedule in in_one_kernel(candidates(replace(problem, alignment=16), "sm_90a", path)):
        g = Geometry(problem, schedule)
        for processors in (1, 132):
            steps = g.steps(processors)
            items = g.items(steps)
            per_image, rest = divmod(items, problem.n * g.oc_tiles)
            down = -(-problem.p // (steps * g.tile_p))
            across, uneven = divmod(per_image, down)
            assert rest == uneven == 0
            assert (across - 1) * g.item_q < problem.q <= across * g.item_q
            assert g.oc_tiles * schedule.tile_oc >= problem.o


def test_long_items_of_turned_rows_are_halved_where_that_costs_little():
    """[16,64,512,512] in bf16 took 475 us by 64 rows and 498 by 128, which are one round of the grid."""
    wide = Schedule("sm90", 128, 64, 2, 4, 2, row_slots=5, staging_groups=2, side_by_side=True, mma_q=16)

    def rows(problem, schedule) -> int:
        g = Geometry(problem, schedule)
        return g.steps(132) * g.tile_p

    assert rows(problem_of(LEAD, "bf16"), wide) == 64
    # Rows as they are: one round.
    by_fma = replace(wide, row_slots=4, side_by_side=False, mma_q=0)
    assert rows(problem_of(LEAD, "ieee"), by_fma) == 256
    # Two items of 33 rows would read 6 of 68 rows of x again.
    assert rows(problem_of(replace(LEAD, n=64, h=66), "bf16"), wide) == 66


def test_portable_does_not_depend_on_padding_or_sizes():
    """One source for all of them, and one for every alignment below 16 bytes."""
    for kind in KINDS:
        for layout in LAYOUTS:
            problem = problem_of(LEAD, kind, layout)
            schedule = candidates(problem, "sm_80", "portable")[0]
            pads = problem.padding._replace(left=0, top=2)
            other = replace(problem, n=1, h=9, w=70, padding=pads)
            assert constants(Geometry(problem, schedule)) == constants(Geometry(other, schedule))
            aligned = [replace(problem, alignment=alignment) for alignment in (16, 8, 4, 2)]
            texts = [constants(Geometry(case, schedule)) for case in aligned]
            assert texts[0] != texts[1] == texts[2] == texts[3]


def test_few_portable_schedules_for_many_sizes():
    draw = random.Random(3)
    for kind in KINDS:
        for layout in LAYOUTS:
            sizes = [(draw.randint(1, 64), draw.randint(1, 300), draw.randint(1, 300)) for _ in range(60)]
            problems = [problem_of(replace(LEAD, n=n, h=h, w=w), kind, layout) for n, h, w in sizes]
            picks = {(candidates(p, "sm_80", "portable")[0], p.alignment == 16) for p in problems}
            assert len(picks) <= 4


# ---- schedules as data


def test_json_round_trip():
    for path in PATHS:
        schedule = candidates(problem_of(), "sm_90a", path)[0]
        assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


@pytest.mark.parametrize(
    ("kind", "element", "k"), [("ieee", "f16", 16), ("tf32", "tf32", 8), ("fp16", "f16", 16), ("bf16", "bf16", 16)]
)
@pytest.mark.parametrize("path", PATHS)
def test_tile_description(path: str, kind: str, element: str, k: int):
    problem = problem_of(LEAD, kind)
    schedule = candidates(problem, "sm_90a", path)[0]
    tile = schedule.tile_description(problem)
    pixels = 64 * schedule.blocks * schedule.warpgroups
    assert tile.threadblock_shape == [schedule.tile_oc, pixels, schedule.slot_channels]
    assert tile.warp_count == [1, 4 * schedule.warpgroups, 1]
    math = tile.math_instruction
    assert math.instruction_shape == ([64, schedule.tile_oc, k] if path == "sm90" else [16, 8, k])
    assert (math.element_a.name, math.element_b.name, math.element_accumulator.name) == (element, element, "f32")
    assert tile_key(tile) == tile_key(schedule.tile_description(problem))
    other = replace(schedule, slot_channels=2 * schedule.slot_channels)
    assert tile_key(tile) != tile_key(other.tile_description(problem))
