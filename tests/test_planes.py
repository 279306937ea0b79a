"""The depthwise kernel on planes: what is legal, what follows, and the ring that its rows of x come in."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from block import Block
from problems import problem_of
from separable import Case

from cutlass_sep import arch as archs
from cutlass_sep import planner
from cutlass_sep.kernel import make as kernel_of
from cutlass_sep.planes import PlaneGeometry
from cutlass_sep.problem import round_up
from cutlass_sep.schedule import Schedule, candidates, check, for_size, ranked

LARGE = Case(n=32, c=128, o=128, h=56, w=56, kernel=(31, 31), padding=15)
LONG = Case(n=32, c=512, o=512, h=1, w=840, kernel=(1, 63), padding=(0, 31))


def plane(case: Case, rows: int, columns: int, kind: str = "bf16", layout: str = "channels_last"):
    """The problem, and a schedule of it with such tiles."""
    problem = problem_of(case, kind, layout)
    pointwise = ranked(problem.pointwise, "sm90", "sm_90a")[0]
    return problem, replace(pointwise, plane_rows=rows, plane_columns=columns)


def geometry(*arguments, **options) -> PlaneGeometry:
    return PlaneGeometry(*plane(*arguments, **options))


def test_what_follows_from_a_tile():
    g = geometry(LARGE, 8, 64)
    # 38 columns from a block's first on, 38 rows of x under 8.
    assert (g.matrices, g.window, g.window_columns, g.tile_images) == (5, 5, 64 + 32, 1)
    assert (g.channels, g.slots, g.groups, g.tiles) == (16, 6, 8, 32 * 7)
    assert g.mmas == 31 * 4 * 3 and g.wavefronts == (2 * 37 + 31) * 5
    assert g.taps_bytes == 31 * 33 * 4 and g.slot_bytes == 16 * 8 * 96 * 2
    assert (
        g.shared_bytes == 6 * g.slot_bytes + 16 * (g.taps_bytes + 8 * 128 + 16) + 7 * 8 <= archs.SHARED_BYTES["sm_90a"]
    )
    # A pixel of padding is 7 zeros before a row: TMA starts at -15 + 7.
    assert (g.shift, g.pitch) == (7, 64)
    assert g.plane_offset == round_up(128 * g.taps_bytes + 4, 256)
    assert g.workspace_bytes == round_up(g.plane_offset + 32 * 128 * 56 * 64 * 2, 256)
    assert g.outputs_bytes == 32 * 128 * 56 * 56 * 2
    assert g.pack_blocks == 128 + 32 * 56 * 1 * 2


@pytest.mark.parametrize(("columns", "images"), [(8, 8), (16, 4), (32, 2), (64, 1)])
def test_rows_of_a_matrix_are_in_banks_of_their_own(columns: int, images: int):
    """Of eight blocks of 16 bytes that ldmatrix reads, no two lie 128 bytes apart or a multiple of it."""
    for kernel in range(6, 46):
        g = geometry(replace(LARGE, kernel=(kernel, kernel), padding=kernel // 2), 2, columns)
        units = g.window_columns // 8
        assert g.tile_images == images and units >= columns // 8 + g.matrices - 1
        found = {(image * units + block) % 8 for image, block in itertools.product(range(images), range(columns // 8))}
        assert len(found) == 8


def test_one_row_of_taps_takes_all_images_as_one():
    g = geometry(LONG, 8, 64)
    assert g.one_row and (g.images, g.rows, g.window, g.tiles) == (1, 32, 1, 4 * 14)
    h = geometry(replace(LONG, n=3, h=5), 8, 64)
    assert (h.images, h.rows) == (1, 15)


def test_the_pointwise_kernel_sees_one_row_of_pixels():
    p = problem_of(LARGE, "bf16", "channels_last")
    assert (p.pointwise.n, p.pointwise.h, p.pointwise.w) == (1, 1, 32 * 56 * 56)
    assert not p.pointwise.depthwise and p.pointwise.y_shape == (1, 128, 1, 32 * 56 * 56)
    q = problem_of(LARGE, "bf16", "contiguous")
    assert (q.pointwise.n, q.pointwise.h, q.pointwise.w, q.pointwise.alignment) == (32, 1, 56 * 56, 16)


@pytest.mark.parametrize(
    ("case", "tile", "kind", "reason"),
    [
        (LARGE, (8, 64), "ieee", "mma.sync reads 16-bit tensors, not float32"),
        (replace(LARGE, stride=2), (8, 64), "bf16", "planes are for stride 1"),
        (replace(LARGE, dilation=(2, 1), kernel=(15, 15)), (8, 64), "bf16", "rows of taps side by side"),
        (replace(LONG, padding=(1, 31)), (8, 64), "bf16", "no padding of (1, 1) rows"),
        (LONG, (8, 32), "bf16", "plane_columns=32 must be 64"),
        (replace(LARGE, kernel=(61, 61), padding=30), (2, 64), "bf16", "bytes of shared memory"),
        (replace(LONG, kernel=(1, 63), dilation=(1, 4), padding=(0, 124)), (8, 64), "bf16", "exceed TMA's box of 256"),
        (LARGE, (7, 64), "bf16", "plane_rows=7 must be one of 0, 2, 4"),
        (LARGE, (8, 24), "bf16", "plane_columns=24 must be one of 0, 8, 16"),
        (LARGE, (8, 0), "bf16", "are of the same tile"),
    ],
)
def test_what_it_does_not_take(case: Case, tile: tuple[int, int], kind: str, reason: str):
    problem = problem_of(case, kind, "channels_last")
    schedule = Schedule("sm90", 64, 64, 1, 4, 1, 2, 2, mma_q=16, plane_rows=tile[0], plane_columns=tile[1])
    refused = check(problem, schedule, "sm_90a")
    assert not refused and reason in refused.reason, refused.reason
    portable = Schedule("portable", 64, 64, 1, 4, 1, plane_rows=8, plane_columns=64)
    assert "one kernel runs a problem" in check(problem, portable, "sm_90a").reason


def test_the_pointwise_schedule_is_checked_too():
    problem, schedule = plane(LARGE, 8, 64)
    assert check(problem, schedule, "sm_90a")
    assert "64 channels a stage" in check(problem, replace(schedule, slot_channels=128), "sm_90a").reason


@pytest.mark.parametrize(
    "case", [LARGE, LONG, replace(LARGE, n=32, c=256, o=256, h=28, w=28, kernel=(29, 29), padding=14)]
)
def test_large_kernels_run_on_planes(case: Case):
    """Where one kernel has no schedule, or takes longer by its estimate."""
    problem = problem_of(case, "bf16", "channels_last")
    chosen = planner.plan(problem, "sm_90a")
    assert chosen.path == "sm90" and chosen.schedule.plane_rows
    assert not any(
        s.plane_rows
        for s in for_size(problem_of(replace(case, kernel=(3, 3), padding=1), "bf16", "channels_last"), "sm_90a")
    )
    assert not any(s.plane_rows for s in candidates(problem_of(case, "ieee", "channels_last"), "sm_90a"))


@pytest.mark.parametrize(
    ("case", "layout", "reason"),
    [
        (replace(LARGE, w=64, stride=2), "contiguous", "planes are for stride 1, not (2, 2)"),
        (replace(LARGE, kernel=(61, 61), padding=30), "channels_last", "bytes of shared memory"),
    ],
)
def test_the_reason_says_why_there_are_no_planes(case: Case, layout: str, reason: str):
    refused = planner.supports(problem_of(case, "bf16", layout), "sm90", "sm_90a")
    assert not refused and "nor can two kernels run it" in refused.reason and reason in refused.reason


def test_a_plan_says_that_it_has_two_kernels():
    assert "path sm90 in two kernels" in planner.plan(problem_of(LARGE, "bf16", "channels_last"), "sm_90a").reason
    small = replace(LARGE, kernel=(3, 3), padding=1)
    assert "kernels" not in planner.plan(problem_of(small, "bf16", "channels_last"), "sm_90a").reason


def test_a_schedule_is_described_by_its_pointwise_kernel():
    problem, schedule = plane(LARGE, 8, 64)
    tile, alone = (s.tile_description(p) for p, s in ((problem, schedule), (problem.pointwise, schedule.pointwise)))
    assert tile.threadblock_shape == alone.threadblock_shape and tile.stages == alone.stages
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize("kernel", [51, 63])
def test_a_block_runs_on_planes(kernel: int):
    """Its second half is a problem of the same kind; the residual is the pointwise kernel's."""
    problem = problem_of(Block(n=32, c=512, e=1024, l=840, kernel=kernel), "bf16", "channels_last")
    planned = planner.plan(problem, "sm_90a")
    assert planned.form == "two_kernel" and planned.schedule.project.plane_rows
    assert "two_kernel in three kernels" in planned.reason
    stages = kernel_of(problem, planned.schedule, "sm_90a").stages
    assert [stage.name for stage in stages] == ["expand", "pack_planes", "depthwise", "pointwise"]
    assert stages[-1].geometry.problem.residual


@pytest.mark.parametrize("case", [LARGE, LONG, replace(LARGE, kernel=(7, 7), padding=3)])
def test_an_empty_batch_has_a_plan(case: Case):
    assert planner.plan(problem_of(replace(case, n=0), "bf16", "channels_last"), "sm_90a").reason


# ---- the ring: PlaneLoads and the loop over tiles in templates/plane_depthwise.cuh


def strip_of(tile: int, down: int) -> int:
    return tile // down


def requests(first: int, last: int, down: int, window: int):
    """(strip, block of rows) in the order in which PlaneLoads asks for them."""
    index, slots = first, 0
    while index < last:
        yield strip_of(index, down), index % down + slots
        slots += 1
        if slots >= window:
            slots = 0 if index % down == down - 1 else window - 1
            index += 1


@pytest.mark.parametrize("seed", range(200))
def test_tiles_find_their_rows_in_the_ring(seed: int):
    """Whatever a block's share of the tiles is, a window holds its tile's rows in time; nothing waits for ever."""
    draw = random.Random(seed)
    down, window = draw.randint(1, 6), draw.randint(1, 6)
    count, first = window + draw.randint(0, 3), draw.randint(0, 20)
    last = first + draw.randint(0, 20)
    asked = requests(first, last, down, window)
    ring, free, to, start, waited = [None] * count, count, 0, 0, 0

    def ask():
        nonlocal free, to
        while free > 0 and (block := next(asked, None)) is not None:
            ring[to], to, free = block, (to + 1) % count, free - 1

    ask()
    for tile in range(first, last):
        waited = window
        found = [ring[(start + i) % count] for i in range(waited)]
        assert found == [(strip_of(tile, down), tile % down + i) for i in range(window)]
        done = window if tile % down == down - 1 or tile == last - 1 else 1
        start, free = (start + done) % count, free + done
        ask()
    assert next(asked, None) is None
    assert last == first or free == count
