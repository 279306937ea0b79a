"""The separable kernel with depthwise outputs by mma.sync, emulated lane by lane: the same values as the convolutions.

By hand from templates/diagonal_depthwise.cuh, turn_rows.cuh, pack_weights.cuh and separable2d_sm90.cuh: whoever changes
an offset there changes it here; what is a constant is compared with the templates' own. Values are small integers, so
that every sum is exact.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import problem_of
from separable import Case

from cutlass_sep import compiler, kernel, source
from cutlass_sep.errors import CompileError
from cutlass_sep.schedule import Geometry, Schedule, check, round_up

LANE = np.arange(32)
#: A lane's row and pair of columns in fragments.
G, T = LANE // 4, LANE % 4
#: Row of a 16 x 16 A or a 16 x 8 D that register pair `h` of a lane has; column of its first element in each 8.
FRAGMENT_ROW = [G, G + 8]


def swizzled(byte: np.ndarray | int) -> np.ndarray | int:
    """TMA's 128-byte swizzle: 16-byte units of a row of 128 bytes are turned by the row."""
    return byte ^ (byte >> 7 & 7) << 4


class Shared:
    """Shared memory of 16-bit values; NaN where nothing was written."""

    def __init__(self, size: int):
        self.values = np.full(size // 2, np.nan)

    def write(self, byte: np.ndarray, values: np.ndarray) -> None:
        self.values[byte // 2] = values

    def read(self, byte: np.ndarray) -> np.ndarray:
        return self.values[byte // 2]


def load_weights(g: Geometry, weight: np.ndarray, oc_tile: int, chunk: int) -> Shared:
    """TMA: of the pointwise weights [O,C] a box of tile_oc rows for each 64 channels, zeros outside."""
    s = g.schedule
    stage = Shared(g.pointwise_weight_bytes)
    row, k = np.mgrid[: s.tile_oc, : s.slot_channels]
    o, c = oc_tile * s.tile_oc + row, chunk * s.slot_channels + k
    inside = (c < g.problem.c) & (o < g.problem.o)
    values = np.where(inside, weight[np.where(inside, o, 0), np.where(inside, c, 0)], 0)
    stage.write(swizzled(k // 64 * s.tile_oc * 128 + row * 128 + k % 64 * 2), values)
    return stage


def fill_taps(g: Geometry, weight: np.ndarray, bias: np.ndarray, chunk: int) -> np.ndarray:
    """DiagonalTaps::fill of taps that load_taps brought, or of the tensor's (packs_taps): words of two taps, or of a
    bias and NaN; NaN where nothing was written.
    """
    first, groups, taps = chunk * g.schedule.slot_channels, g.schedule.slot_channels // 32, weight.shape[1]
    channels, pairs, lane = min(g.schedule.slot_channels, g.problem.c - first), -(-taps // 2), LANE
    warps = kernel.PACK_THREADS // 32 if g.schedule.packs_taps else 3
    raw = np.full(g.schedule.slot_channels * taps + 1, np.nan)
    raw[: channels * taps] = weight[first : first + channels].reshape(-1)
    words = np.full((groups * (pairs + 1) * 32, 2), np.nan)
    rows = groups * pairs
    batch = min(-(-rows // warps), 5)
    for warp, start in product(range(warps), range(0, rows, batch * warps)):
        for k in range(batch if start + warp < rows else 0):
            row = min(start + warp + k * warps, rows - 1)
            pair, c = row % pairs, row // pairs * 32 + lane
            own = np.minimum(c, channels - 1) * taps + 2 * pair
            second = raw[own + 1] if 2 * pair + 1 < taps else 0 * lane
            word = np.where(c < channels, [raw[own], second], 0)
            words[(row + row // pairs) * 32 + lane] = word.T
    for group in range(groups if g.problem.dw_bias else 0):
        c = group * 32 + lane % 8 // 2 * 8 + lane // 8 * 2 + lane % 2
        biases = np.where(c < channels, bias[np.minimum(first + c, g.problem.c - 1)], 0)
        words[(group * (pairs + 1) + pairs) * 32 + lane, 0] = biases
    return words


def values_at(x: np.ndarray, h: np.ndarray, w: np.ndarray, c: np.ndarray) -> np.ndarray:
    """x [H,W,C] as TMA reads it: zeros outside."""
    inside = (h >= 0) & (h < x.shape[0]) & (w >= 0) & (w < x.shape[1]) & (c < x.shape[2])
    return np.where(inside, x[np.where(inside, h, 0), np.where(inside, w, 0), np.where(inside, c, 0)], 0)


def atom_bytes_of(g: Geometry, rows: int) -> int:
    return g.schedule.run_window * 128 if g.runs else round_up(rows * g.columns * 128, 1024)


def load_window(g: Geometry, shared: Shared, base: int, x: np.ndarray, first: tuple[int, int], chunk: int, rows: int):
    """TMA: a box of `rows` x columns pixels from (h, w) on for each 64 channels."""
    atom_bytes, channel = atom_bytes_of(g, rows), chunk * g.schedule.slot_channels
    if g.turned:
        for atom, r in product(range(g.atoms), range(rows)):
            row = base + atom * atom_bytes + r * g.columns * 128
            load_row(g, shared, row, x, (first[0] + r, first[1]), channel + 64 * atom)
            turn_row(g, shared, row)
        return
    r, col, c = np.mgrid[:rows, : g.columns, : g.schedule.slot_channels]
    byte = base + c // 64 * atom_bytes + (r * g.columns + col) * 128 + c % 64 * 2
    shared.write(swizzled(byte), values_at(x, first[0] + r, first[1] + col, channel + c))


def load_row(g: Geometry, shared: Shared, row: int, x: np.ndarray, first: tuple[int, int], channel: int) -> None:
    """load_row, turned: boxes of 64 channels, each with 8 or 64 pixels side by side where these pixels' channels go."""
    column = 0
    left, squares, right = g.row_parts
    for width in [8] * left + [64] * squares + [8] * right:
        c, col = np.mgrid[:64, :width]
        byte = row + column * 128 + c * width * 2 + col * 2
        shared.write(
            swizzled(byte) if width == 64 else byte,
            values_at(x, first[0] + 0 * c, first[1] + column + col, channel + c),
        )
        column += width
    assert column == g.columns


def turn_row(g: Geometry, shared: Shared, row: int) -> None:
    """TurnedRow::turn of all batches: groups of four matrices, each a lane's row address for ldmatrix and stmatrix."""
    left, squares, right = g.row_parts
    r, m = LANE % 8, LANE // 8
    load, store = m // 2 * 1024 + r * 128 + (m % 2 ^ r) * 16, m % 2 * 1024 + r * 128 + (m // 2 ^ r) * 16
    unit_load, unit_store = LANE * 16, r * 128 + (m ^ r) * 16
    for batch in range(8 * squares + left + right):
        if batch < 8 * squares:
            square, other = row + left * 1024 + batch // 8 * 8192, batch % 8 // 2
            apart = max(other, 1)
            first = batch % 2 * (2 if apart == 1 else 1)
            moves = []
            for i in (first, first ^ apart):
                j = i ^ other
                moves.append((square + i * 2048 + (load ^ j * 32), square + j * 2048 + (store ^ i * 32)))
        else:
            unit = batch - 8 * squares
            address = row + unit * 1024 + (0 if unit < left else squares * 8192)
            moves = [(address + k * 512 + unit_load, address + (unit_store ^ k * 64)) for k in range(2)]
        read = [shared.read(source[:, None] + 2 * np.arange(8)).reshape(4, 8, 8) for source, _ in moves]
        for matrices, (_, target) in zip(read, moves, strict=True):
            shared.write(target[:, None] + 2 * np.arange(8), matrices.transpose(0, 2, 1).reshape(32, 8))


class Rows:
    """RingRows, or WindowRows where one slot holds the window: addresses of its rows."""

    def __init__(self, g: Geometry, first_slot: int, first_row: int):
        whole = g.slot_rows > 1 or g.runs
        self.g, self.whole = g, whole
        self.first = first_slot if whole else first_slot + first_row
        self.atom_bytes = atom_bytes_of(g, g.slot_rows if whole else 1)

    def address(self, r: int) -> int:
        if self.whole:
            return self.first * self.g.slot_bytes + r * self.g.columns * 128
        return (self.first + r) % self.g.schedule.row_slots * self.g.slot_bytes

    def phase(self, r: int) -> int:
        return r * self.g.columns % 8 if self.whole else 0


def follow(g: Geometry, first: int, window_p: int) -> list[np.ndarray]:
    """DiagonalDepthwise::follow: each lane's own pixel of the window, of each half of the block."""
    p, places = g.problem, []
    for half in range(2):
        pixel = np.minimum(first + 8 * half + LANE % 8, p.map_pixels - 1)
        row = (pixel // p.q - window_p) * p.stride[0]
        assert np.all((row >= 0) & (row + (p.kernel[0] - 1) * p.dilation[0] < g.slot_rows))
        places.append(row * g.columns + pixel % p.q * p.stride[1])
    return places


def ldmatrix(g: Geometry, shared: Shared, rows: Rows, own: np.ndarray, row: int, column: int, group: int) -> np.ndarray:
    """DiagonalDepthwise::load: [4 groups of 8 channels][lane][2 values]. `own`: the lanes' pixels."""
    offset = own * 128 + ((LANE // 8 ^ (own + (rows.phase(row) + column) % 8)) & 7) * 16
    address = rows.address(row) + group // 2 * rows.atom_bytes + (offset ^ group % 2 * 64) + column * 128
    assert not np.any(address % 16)
    matrices = shared.read(address[:, None] + 2 * np.arange(8)).reshape(
        4, 8, 8
    )  # lane 8j + r addresses row r of matrix j
    return matrices[:, G[:, None], 2 * T[:, None] + [0, 1]]


def mma(a: list[np.ndarray], b: list[np.ndarray], d: np.ndarray) -> None:
    """mma.sync 16 x 8 x 8 len(b), in place. a: [lane][2] of rows g and g + 8 for each 8 k; d: [h][lane][2]."""
    depth = 8 * len(b)
    left, right = np.zeros((16, depth)), np.zeros((depth, 8))
    for k in range(len(b)):
        for h in range(2):
            left[FRAGMENT_ROW[h][:, None], 8 * k + 2 * T[:, None] + [0, 1]] = a[2 * k + h]
        right[8 * k + 2 * T[:, None] + [0, 1], G[:, None]] = b[k]
    result = left @ right
    for h in range(2):
        d[h] += result[FRAGMENT_ROW[h][:, None], 2 * T[:, None] + [0, 1]]


def depthwise(
    g: Geometry, shared: Shared, rows: Rows, pixel: int | list, words: np.ndarray | None, group: int
) -> np.ndarray:
    """DiagonalDepthwise::compute: the A fragments [instruction][block][register][lane][2] of 32 channels. `pixel`: the
    warp's first, or of a run those of the lanes.
    """
    p, s = g.problem, g.schedule

    @cache
    def matrix(tap: int, b: int, h: int) -> np.ndarray:
        tap_row, tap_column = tap // p.kernel[1] * p.dilation[0], tap % p.kernel[1] * p.dilation[1]
        if g.runs:
            return ldmatrix(g, shared, rows, pixel[h], tap_row, tap_column, group)
        own = pixel + LANE % 8 * p.stride[1]
        down, beside = (0, b * s.mma_q) if g.turned else (b, 0)
        pixel_p, pixel_q = (2 * down + h, beside) if s.mma_q == 8 else (down, beside + 8 * h)
        row, column = pixel_p * p.stride[0] + tap_row, pixel_q * p.stride[1] + tap_column
        return ldmatrix(g, shared, rows, own, row, column, group)

    fragment = np.zeros((2, s.blocks, 4, 32, 2))
    for b in range(s.blocks):
        if not p.depthwise:
            for h in range(2):
                for j, values in enumerate(matrix(0, b, h)):
                    fragment[j // 2, b, j % 2 * 2 + h] = values
            continue
        taps = math.prod(p.kernel)
        pairs = -(-taps // 2)
        table = words.reshape(-1, pairs + 1, 32, 2)[group]
        for j in range(4):
            d = np.stack([table[pairs, 8 * T[:, None] + 2 * j + [0, 1], 0] if p.dw_bias else np.zeros((32, 2))] * 2)
            for pair in range(pairs):
                own = range(2 * pair, min(2 * pair + 2, taps))
                right = []
                for i in range(len(own)):
                    word = np.zeros((32, 2))
                    word[LANE, G % 2] = np.where(G // 2 == T, table[pair, 8 * j + G, i], 0)
                    right.append(word)
                mma([matrix(tap, b, h)[j] for tap in own for h in range(2)], right, d)
            for h in range(2):
                fragment[j // 2, b, j % 2 * 2 + h] = d[h]
    return fragment


def wgmma(fragment: np.ndarray, weights: Shared, g: Geometry, instruction: int) -> np.ndarray:
    """A warp's rows of one instruction: [block][16][tile_oc]."""
    n, k = np.mgrid[: g.schedule.tile_oc, :16]
    offset = instruction // 4 * g.schedule.tile_oc * 128 + instruction % 4 * 32
    right = weights.read(swizzled(offset + n * 128 + k * 2))
    left = np.zeros((g.schedule.blocks, 16, 16))
    for i in range(4):
        left[:, FRAGMENT_ROW[i % 2][:, None], i // 2 * 8 + 2 * T[:, None] + [0, 1]] = fragment[:, i]
    return left @ right.T


def warp_places(g: Geometry, down: int) -> list[tuple[int, int]]:
    """First pixel (p, q) of each warp's tile within a work item of `down` warpgroup tiles below each other."""
    s = g.schedule
    return [
        (step * g.tile_p + warp // s.warps_q * g.warp_p, beside * g.tile_q + warp % s.warps_q * g.warp_q)
        for step in range(down)
        for beside in range(s.warpgroups if s.side_by_side else 1)
        for warp in range(4)
    ]


def emulate(g: Geometry, x: np.ndarray, dw: np.ndarray, pw: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """y [P,Q,O] of one image x [H,W,C]. Of a strip that is marched down, the window of one step lies in the ring."""
    p, s = g.problem, g.schedule
    y = np.full((g.map_p, g.map_q, p.o), np.nan)
    down = 1 if g.march else g.tiles_down
    tops, strips = range(0, g.map_p, down * g.tile_p), range(0, g.map_q, g.item_q)
    for oc_tile, top, left, chunk in product(range(g.oc_tiles), tops, strips, range(g.chunks)):
        words = fill_taps(g, dw, bias, chunk) if p.depthwise else None
        stage = load_weights(g, pw, oc_tile, chunk)
        shared = Shared(s.row_slots * g.slot_bytes)
        first = top * p.stride[0] - p.padding.top, left * p.stride[1] - p.padding.left - g.phase
        if g.runs:
            first = left // p.q * p.stride[0] - p.padding.top, -p.padding.left
        slot = (top + chunk) % s.row_slots  # where the ring has come to
        for i in range(0, 1 if g.runs else g.window_rows(down * g.tile_p), g.slot_rows):
            base = (slot + i // g.slot_rows) % s.row_slots * g.slot_bytes
            load_window(g, shared, base, x, (first[0] + i, first[1]), chunk, g.slot_rows)
        channels = min(s.slot_channels, p.c - chunk * s.slot_channels)
        tiles = []
        for warp_p, warp_q in warp_places(g, down):
            row = warp_p * p.stride[0]
            pixel = g.phase + warp_q * p.stride[1] + (row * g.columns if g.slot_rows > 1 else 0)
            if g.runs:
                if left + warp_q // g.tile_q * g.tile_q >= p.map_pixels:
                    continue
                pixel = follow(g, left + warp_q, left // p.q)
            rows, sums = Rows(g, slot, row), 0
            for group in range(-(-channels // 32)):
                for i, fragment in enumerate(depthwise(g, shared, rows, pixel, words, group)):
                    sums = sums + wgmma(fragment, stage, g, 2 * group + i)
            if not g.turned:
                add(g, y, sums, top + warp_p, left + warp_q, oc_tile * s.tile_oc, chunk == 0)
            elif len(tiles := [*tiles, sums]) == 4:
                tile_p, tile_q = warp_p // g.tile_p * g.tile_p, warp_q // g.tile_q * g.tile_q
                store_tile(g, y, tiles, top + tile_p, left + tile_q, oc_tile * s.tile_oc, chunk == 0)
                tiles = []
    return y.reshape(p.p, p.q, p.o)


def store_tile(g: Geometry, y: np.ndarray, sums: list, top: int, left: int, oc: int, first: bool) -> None:
    """Sm90Epilogue::store_tile, pass by pass: the warps' sums [block][16][tile_oc] through the staged boxes to y."""
    s, width = g.schedule, g.store_bytes
    store_q, mma_q = width // 2, s.mma_q
    stores_q, box_bytes = g.tile_q // store_q, g.group_oc * width

    def staged(row: np.ndarray | int, unit: np.ndarray | int) -> np.ndarray | int:
        return row * width + (unit ^ row * width >> 7 & width // 16 - 1) * 16

    pairs = min(g.group_oc // 8, 2)
    for group in range(0, s.tile_oc, g.group_oc):
        shared = Shared(g.tile_p * stores_q * box_bytes)
        for warp, b, k in product(range(4), range(s.blocks), range(0, g.group_oc // 8, pairs)):
            lane = LANE[: 16 * pairs]  # those whose addresses count
            h = lane // 8 % 2
            row = warp // s.warps_q * g.warp_p + (h if mma_q == 8 else 0)
            column = warp % s.warps_q * g.warp_q + b * mma_q + (0 if mma_q == 8 else 8 * h)
            box = row * stores_q + column // store_q
            offset = staged(lane // 16 % pairs * 8 + lane % 8, column % store_q // 8)
            matrices = [sums[warp][b, 8 * (m % 2) : 8 * (m % 2) + 8, group + 8 * (k + m // 2) :][:, :8].T
                        for m in range(2 * pairs)]  # fmt: skip
            address = box * box_bytes + offset + k * 8 * width
            assert not np.any(address % 16)
            shared.write(address[:, None] + 2 * np.arange(8), np.concatenate(matrices))
        o, q = np.mgrid[: g.group_oc, :store_q]
        for box in range(g.tile_p * stores_q):
            # TMA: 16-byte units swizzled by the address, here within the box.
            byte = box * box_bytes + o * width + q * 2
            values = shared.read(byte ^ (byte >> 7 & width // 16 - 1) << 4)
            p_, q_ = top + box // stores_q, left + box % stores_q * store_q
            own = y[p_ : p_ + 1, q_ : q_ + store_q, oc + group : oc + group + g.group_oc]
            own[:] = values.T[None, : own.shape[1], : own.shape[2]] + (0 if first else own)


def add(g: Geometry, y: np.ndarray, sums: np.ndarray, top: int, left: int, oc: int, first: bool) -> None:
    """Sm90Epilogue::store, pass by pass: boxes of mma_q columns, clipped at the ends of y."""
    columns = g.schedule.mma_q
    for b, m in np.ndindex(g.schedule.blocks, 16):
        p, q = top + b * (16 // columns) + m // columns, left + m % columns
        if p < y.shape[0] and q < y.shape[1]:
            own = y[p, q, oc : oc + g.schedule.tile_oc]
            own[:] = sums[b, m, : len(own)] + (0 if first else own)


def random_geometry(draw: random.Random) -> Geometry:
    """A small layer under any legal schedule with mma_q."""
    layout = draw.choice(("channels_last", "contiguous"))
    while True:
        kernel = draw.choice([(1, 1), (3, 3), (2, 4), (5, 2), (1, 5)])
        dilation = draw.choice([(1, 1), (1, 1), (2, 3), (4, 1)])
        span = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        w = draw.randint(1, 11) if layout == "channels_last" else 8 * draw.randint(1, 25)
        case = Case(
            n=1, c=8 * draw.randint(1, 17), o=8 * draw.randint(1, 3), h=draw.randint(1, 7), w=w,
            kernel=kernel, stride=(draw.randint(1, 3), draw.randint(1, 3)),
            padding=tuple(s // 2 + draw.randint(s % 2, 2) for s in span), dilation=dilation, pw_bias=False,
        )  # fmt: skip
        problem = problem_of(case, "bf16", layout)
        if kernel == (1, 1) and draw.random() < 0.5:
            problem = replace(problem, depthwise=False, dw_bias=False)
        schedule = Schedule(
            "sm90", draw.choice((8, 16, 64)), draw.choice((64, 128, 192)), draw.choice((1, 1, 2)),
            draw.choice((1, 2, 4)), draw.choice((1, 2, 3)), draw.choice((1, 3, 20)), 1,
            side_by_side=draw.random() < 0.4, split_channels=draw.random() < 0.3, mma_q=draw.choice((8, 16)),
            packs_taps=draw.random() < 0.3,
        )  # fmt: skip
        if check(problem, schedule, "sm_90a"):
            return Geometry(problem, schedule)


def random_runs(draw: random.Random) -> Geometry:
    """A small layer whose tiles are runs of the map's pixels."""
    while True:
        kernel = draw.choice([(3, 3), (3, 3), (2, 4), (5, 2), (1, 5)])
        dilation = draw.choice([(1, 1), (1, 1), (2, 3), (4, 1)])
        span = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        case = Case(
            n=1, c=8 * draw.randint(9, 17), o=8 * draw.randint(1, 3), h=draw.randint(1, 24), w=draw.randint(1, 24),
            kernel=kernel, stride=(draw.randint(1, 2), draw.randint(1, 2)),
            padding=tuple(s // 2 + draw.randint(s % 2, 2) for s in span), dilation=dilation, pw_bias=False,
        )  # fmt: skip
        warpgroups = draw.randint(1, 3)
        schedule = Schedule(
            "sm90", draw.choice((8, 16)), 64, 1, 4, warpgroups, draw.choice((1, 2)), 1, side_by_side=warpgroups > 1,
            mma_q=16, run_window=draw.choice((128, 256, 384)),
        )  # fmt: skip
        if check(problem := problem_of(case, "bf16", "channels_last"), schedule, "sm_90a"):
            return Geometry(problem, schedule)


def test_the_templates_compile_to_the_same_arithmetic(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """What is emulated is what the compiler makes of the templates: static assertions behind the translation unit."""
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path))
    problem = problem_of(Case(c=72, o=64, kernel=(3, 5), stride=(2, 1), dilation=(1, 2)), "bf16", "channels_last")
    g = Geometry(problem, Schedule("sm90", 64, 64, 1, 2, 2, 2, 2, mma_q=8))
    assert check(problem, g.schedule, "sm_90a")
    config = "<Separable2dConfig>"
    equal = {
        f"cutlass_sep::DiagonalTaps{config}::kGroupBytes": 9 * 128,
        f"cutlass_sep::DiagonalTaps{config}::kBytes": g.depthwise_weight_bytes,
        f"cutlass_sep::DiagonalDepthwise{config}::kCount": g.matrices,
        f"cutlass_sep::Sm90Layout{config}::kSlotBytes": g.slot_bytes,
        f"cutlass_sep::WindowRows{config}::phase(3)": 3 * g.columns % 8,
        f"cutlass_sep::PackedWeights{config}::kPointwiseBytes": g.pointwise_weight_bytes,
        f"cutlass_sep::PackedWeights{config}::instruction_offset(6, 0)": g.schedule.tile_oc * 128 + 2 * 32,
    }
    lines = [f'static_assert({left} == {right}, "{left}");\n' for left, right in equal.items()]
    text = source.render_anew(problem, g.schedule, "sm_90a")
    compiler.build(text + "".join(lines), "sm_90a", name="layout-test")
    with pytest.raises(CompileError, match="instruction_offset"):
        compiler.build(text + lines[-1].replace("==", "!="), "sm_90a", name="layout-test")


@pytest.mark.parametrize("draw", [random_geometry, random_runs])
@pytest.mark.parametrize("first", range(0, 24, 4))
def test_emulated_values(first: int, draw):
    for seed in range(first, first + 4):
        g = draw(random.Random(seed))
        p, values = g.problem, np.random.default_rng(seed)
        x, pw = values.integers(-4, 5, (p.h, p.w, p.c)), values.integers(-4, 5, (p.o, p.c))
        dw = values.integers(-4, 5, (p.c, math.prod(p.kernel))) if p.depthwise else np.ones((p.c, 1), int)
        bias = values.integers(-4, 5, p.c) * p.dw_bias
        padded = F.pad(torch.tensor(x).permute(2, 0, 1), (*p.padding[2:], *p.padding[:2]))
        kernel = torch.tensor(dw).view(p.c, 1, *p.kernel)
        m = F.conv2d(padded, kernel, torch.tensor(bias), p.stride, 0, p.dilation, groups=p.c)
        expected = np.einsum("oc,cpq->pqo", pw, m.numpy())
        np.testing.assert_array_equal(emulate(g, x, dw, pw, bias), expected, err_msg=f"{p}, {g.schedule}")
