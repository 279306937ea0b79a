"""Estimated times on an H200, for choosing between schedules and paths: good for an order, not for a prediction.

For one multiprocessor, every unit's cycles are counted: bytes from device memory and through L2, issued instructions,
wavefronts of shared memory, tensor cores. What they take together is fitted to the timed schedules of two thirds of the
layers of benchmarks/layers.jsonl, and PyTorch's side to its times there. The rest is arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from . import arch as archs
from .problem import SeparableConv2dProblem
from .reference import depthwise_contiguous

if TYPE_CHECKING:
    from .block_schedule import FusedGeometry
    from .schedule import Geometry

#: Multiprocessors, and cycles a microsecond under load.
MULTIPROCESSORS = 132
CYCLES_PER_US = 1700.0
#: Microseconds of a call beside its main kernel's work: the launches, the packing of weights, the first loads; on path
#: sm90, where these overlap; and what of it two kernels of one call have in common.
LAUNCH_US, OVERLAPPED_US, SHARED_US = 8.4, 7.6, 6.8
#: Bytes a cycle and multiprocessor: device memory with all at work (4.07 TB/s), and L2 to one multiprocessor.
_DEVICE_BYTES = 18.1
_L2_BYTES = 67.0
#: The same of a work item's first window and weights, for which everything waits.
_FILL_BYTES = 46.0
#: Cycles that one warp of a scheduler takes for an instruction while no other warp is there.
_LONE_WARP = 1.29
#: Cycles of a step that nothing else of its warpgroup hides: barriers, filling and draining of the MMAs.
_STEP = 1010.0
#: Cycles that waiting for one row, or giving it back, takes a warp; and that a TMA copy takes the producer.
_ROW = 31.0
_COPY = 166.0
#: mma_q: cycles of 32 channels of a warpgroup that nothing else of it hides, beside its MMAs; of a pass over channels;
#: of tensor cores for an mma.sync of each warp; of an item whose warpgroups split the channels, for an output channel.
_DIAGONAL_STEP, _DIAGONAL_CHUNK, _DIAGONAL_MMA, _SPLIT = 127.0, 275.0, 8.0, 31.0
#: Cycles of a work item beside its steps; and that a warp waits for a batch of its stores, but the first, to leave the
#: staging buffers.
_ITEM = 190.0
_STAGE = 105.0
#: Marching: part of the time by which a ring that does not hold the windows of all warpgroups delays them. Otherwise:
#: part of a pass's loads that waits for the pass before where the ring does not hold two windows.
_LATE, _BEHIND = 0.6, 0.5
#: Part of the second longest of several units' times that the longest does not hide.
_EXPOSED = 0.42
#: Instructions of an activation on one value.
_ACTIVATION = {None: 0, "relu": 1, "relu6": 2, "hardswish": 4, "silu": 9, "gelu_tanh": 14, "gelu": 38}
#: portable: cycles of an instruction that are counted and of a wavefront of shared memory; instructions that a value
#: takes to become fp32; bytes of x and of y a cycle, by layout.
_PORTABLE_ISSUE, _PORTABLE_SHARED, _PORTABLE_UNPACK = 0.85, 1.65, 6.4
_PORTABLE_LOADS = {"channels_last": 14.0, "contiguous": 8.2}
_PORTABLE_STORES = {"channels_last": 33.0, "contiguous": 23.0}
#: portable: a block's time alone over that of its arithmetic and its bytes among others; the part of the shorter of the
#: two that is not hidden there.
_PORTABLE_ALONE, _PORTABLE_EXPOSED = 1.74, 0.53
#: portable: the share of the device's bandwidth that it reaches.
_PORTABLE_SHARE = 0.5
#: Cycles of a chunk of a fused block's tile: fixed, a cycle of tensor cores, an mma.sync of each depthwise output.
_FUSED_CHUNK, _FUSED_TENSOR, _FUSED_DEPTHWISE = 1710.0, 1.08, 1120.0
#: PyTorch: microseconds of a launch among others; shares of the device's bandwidth that elementwise passes and
#: pointwise convolutions reach, and depthwise ones.
_TORCH_LAUNCH_US = 3.1
_PASS_SHARE, _DEPTHWISE_SHARE = 0.61, 0.6
#: Picoseconds of an output, and of each of its taps, of PyTorch's depthwise kernels by layout and bytes of an element.
_DEPTHWISE_PS = {
    ("contiguous", 4): (5.4, 0.27),
    ("contiguous", 2): (4.6, 0.29),
    ("channels_last", 4): (2.7, 0.32),
    ("channels_last", 2): (0.0, 0.19),
}
#: Matrix products: TFLOP/s of large ones by operand type, and channels that a tile's start takes as long as.
_TFLOPS = {"bfloat16": 430.0, "float16": 430.0, "tf32": 310.0, "ieee": 32.6}
_TILE_START = {"ieee": 10, "tf32": 90}
_TILE_START_16 = 186


def _combine(*times: float) -> float:
    """What several units take together."""
    first, second = sorted(times, reverse=True)[:2]
    return first + _EXPOSED * second


def _depthwise(g: Geometry) -> tuple[float, float]:
    """sm90, one warp, 16 channels of one step: instructions, and shared-memory wavefronts."""
    p, s, size = g.problem, g.schedule, g.problem.element_size
    kernel_h, kernel_w = p.kernel
    lane_channels = 8 // size
    values = 8 * s.blocks
    row_units = -(-kernel_w * lane_channels // 4)
    weights = g.mma_steps * (kernel_h * row_units + p.dw_bias)
    if g.pixel_major:
        rows = min(g.window_rows(g.lane_p), kernel_h * g.lane_p)
        loads = g.mma_steps * rows * min(g.window_cols(g.lane_q), kernel_w * g.lane_q)
        read = 2 * loads
        unpack = lane_channels * loads if size == 2 else 0
        weights *= 1.5 if s.blocks > 1 else 1
    else:
        vector = 4 if g.lane_q * p.stride[1] % 4 == 0 else 2
        loads = 4 * kernel_h * -(-(g.phase % vector + g.window_cols(g.lane_q)) // vector)
        read = loads * vector * size / 4
        unpack = vector * loads if size == 2 else 0
    convert = {"ieee": 5 * values, "tf32": 2 * values}.get(p.fp32_precision, values)
    issue = values * math.prod(p.kernel) + loads + unpack + weights + convert + _ACTIVATION[p.mid_activation] * values
    return issue + 3 * s.blocks * _products(g) + 30, read + weights


def _products(g: Geometry) -> int:
    """Products of operand parts for one product of operands, in MMAs at the 16-bit rate."""
    if g.problem.fp32_precision == "tf32":
        return 2
    return g.parts * (g.parts + 1) // 2


def _epilogue(g: Geometry) -> tuple[float, float]:
    """sm90, one warp's tile: instructions, and shared-memory wavefronts."""
    p, s, size = g.problem, g.schedule, g.problem.element_size
    values = s.blocks * s.tile_oc // 2
    issue = values * (1 + p.pw_bias + _ACTIVATION[p.activation])
    if size == 4:
        return issue + values, values * 1.25
    return issue + values * (1.0 if g.channels_last else 1.6), values * (0.75 if g.channels_last else 1.0)


def _lines(g: Geometry, channels: float) -> float:
    """Lines of 128 bytes that `channels` of one row of x under a tile touch; contiguous rows one more on each side."""
    p, size = g.problem, g.problem.element_size
    if g.channels_last:
        return g.columns * channels * size / 128
    useful = g.item_q * p.stride[1]
    return channels * (math.ceil(useful * size / 128) + (2 if p.kernel[1] > 1 else 0))


def _diagonal_compute(g: Geometry, new_rows: int) -> float:
    """The same with the depthwise stage on tensor cores, which a warpgroup leaves to the others now and then."""
    p, s = g.problem, g.schedule
    groups = -(-p.c // 32) / g.chunks
    ends = 1 / g.chunks
    pairs = -(-p.taps // 2)
    matrices = g.matrices
    wgmma, mma = 2 * s.blocks * max(s.tile_oc / 2, 16), 4 * s.blocks * pairs * _DIAGONAL_MMA
    # Instructions of a warp: an mma.sync takes 6 more that bring its operands together.
    issue = 4 * s.blocks * pairs * 7 + 2 * matrices + pairs + s.blocks * (16 * _ACTIVATION[p.mid_activation] + 60)
    shared = 4 * matrices * math.gcd(p.stride[1], 4) + pairs  # of a matrix whose columns lie apart, some share banks
    end_issue, end_shared = _epilogue(g)
    waits = _DIAGONAL_CHUNK + (_ROW * (g.window_rows(g.tile_p) + new_rows) if g.march else 0)
    own = groups * (_DIAGONAL_STEP + wgmma + _LONE_WARP * mma) + waits + ends * end_issue
    copies = new_rows * (_ROW + _COPY * g.atoms) if g.march else g.atoms * _COPY
    stage = ends * (g.store_groups // s.staging_groups - 1) * _STAGE
    split = ends * s.warpgroups * s.tile_oc * _SPLIT if s.split_channels else 0
    wgmmas = groups * 2 * s.blocks * s.tile_oc / 4
    arriving = new_rows * g.slot_bytes / g.slot_rows / 128
    return stage + split + _combine(
        own,
        s.warpgroups * (groups * issue + ends * end_issue),
        s.warpgroups * (4 * (groups * shared + ends * end_shared) + wgmmas) + arriving,
        s.warpgroups * groups * (wgmma + mma),
        copies,
    )  # fmt: skip


def _compute(g: Geometry, new_rows: int) -> float:
    """sm90: cycles of arithmetic in a round (one step of every warpgroup, over one chunk of channels)."""
    p, s = g.problem, g.schedule
    if s.mma_q:
        return _diagonal_compute(g, new_rows)
    groups = -(-p.c // 16) / g.chunks  # on average: the last pass may have fewer
    ends = 1 / g.chunks  # share of an epilogue
    issue, shared = _depthwise(g)
    end_issue, end_shared = _epilogue(g)
    promote = s.blocks * s.tile_oc / 2 if g.split and g.chunks > 1 else 0
    instructions = groups * issue + promote + ends * end_issue
    waits = _STEP + _ROW * (g.window_rows(g.tile_p) + new_rows)
    stage = ends * (g.store_groups // s.staging_groups - 1) * _STAGE
    mmas = s.warpgroups * groups * s.blocks * _products(g)
    arriving = new_rows * g.slot_bytes / g.slot_rows / 128
    return stage + _combine(
        max(s.warpgroups, _LONE_WARP) * instructions + waits,
        4 * s.warpgroups * (groups * shared + ends * end_shared) + mmas * s.tile_oc / 4 + arriving,
        mmas * max(s.tile_oc / 2, 16),
        new_rows * (_ROW + _COPY * (g.atoms if g.channels_last else 1)),
    )


def _memory(g: Geometry, new_rows: int, steps: int, active: int) -> float:
    """sm90: cycles that the bytes of a round take, with `active` multiprocessors at work.

    x comes from device memory once; halos, and x for other tiles of output channels, come through L2, as weights do.
    """
    p, s, size = g.problem, g.schedule, g.problem.element_size
    channels = p.c / g.chunks
    rows, columns = min(g.tile_p * g.tiles_down, p.p), min(g.item_q, p.q)
    own = rows * columns * math.prod(p.stride) * channels * size / g.oc_tiles
    output = rows * columns * min(s.tile_oc, p.o) * size / g.chunks
    resident = g.chunks <= s.weight_slots and g.oc_tiles == 1
    weights = 0 if resident else g.stage_bytes / max(1, steps / g.tiles_down)
    at_a_time = s.warpgroups if s.split_channels else 1  # chunks
    again = max(0, new_rows * _lines(g, channels) * 128 - own + weights)
    device_bytes = min(_L2_BYTES, _DEVICE_BYTES * MULTIPROCESSORS / active)
    return at_a_time * ((own + output) / device_bytes + again / _L2_BYTES)


def sm90_us(g: Geometry) -> float:
    """Microseconds of a call on path sm90."""
    s = g.schedule
    steps = g.steps(MULTIPROCESSORS)
    items = g.items(steps)
    window = g.window_rows(g.tile_p * g.tiles_down)
    new_rows = g.tile_p * g.tiles_down * g.problem.stride[0] if g.march else window
    active = max(1, min(items, MULTIPROCESSORS))
    compute, memory = _compute(g, new_rows), _memory(g, new_rows, steps, active)
    if g.march:
        late = 1 + _LATE * max(0.0, 1 - s.row_slots / window)
        rounds = steps / g.tiles_down * _combine(memory, compute) * late
        fill = (g.window_rows(g.tile_p) * g.slot_bytes / g.slot_rows + g.stage_bytes) / _FILL_BYTES
    else:
        # The next chunk loads during this one as far as there are slots for it.
        behind = _BEHIND * (1 - min(1.0, max(0.0, s.row_slots * g.slot_rows / window - 1)))
        passes = g.chunks / s.warpgroups if s.split_channels else g.chunks
        rounds, fill = passes * (_combine(memory, compute) + behind * min(memory, compute)), 0.0
    return -(-items // MULTIPROCESSORS) * (rounds + fill + _ITEM) / CYCLES_PER_US + OVERLAPPED_US


def portable_us(g: Geometry, arch: str) -> float:
    """Microseconds of a call on path portable."""
    p, s, size = g.problem, g.schedule, g.problem.element_size
    warps, taps, lane_channels = 4 * s.warpgroups, math.prod(p.kernel), 8 // size
    tile_p = g.tile_p * s.warpgroups
    tiles_down = -(-p.p // tile_p)
    tiles = p.n * tiles_down * -(-p.q // g.tile_q) * g.oc_tiles
    groups = -(-p.c // 16) * p.p / (tiles_down * tile_p)  # warps with no row of the map have nothing to do
    # Of one warp and 16 channels: multiply-adds, MMAs with their FADDs, vectors read from shared memory.
    values = 8 * s.blocks
    mmas = s.blocks * s.tile_oc // 8 * (6 if g.split else g.mma_steps)
    rows = min(g.window_rows(s.blocks), p.kernel[0] * s.blocks)
    vectors = g.mma_steps * rows * min(g.window_cols(2), 2 * p.kernel[1])
    if s.gather:
        vectors = 4 * g.mma_steps * s.blocks * taps * lane_channels
    unpack = _PORTABLE_UNPACK * lane_channels * vectors if size == 2 else 0
    weights = g.mma_steps * taps * lane_channels // 4 * s.blocks + g.mma_steps * s.tile_oc // 16 * g.parts
    instructions = values * (taps + _ACTIVATION[p.mid_activation]) + mmas * g.parts + vectors + unpack + weights
    work = groups * warps * max(
        instructions / 4 * _PORTABLE_ISSUE, (vectors + weights) * 2 * _PORTABLE_SHARED, mmas * 2
    )  # fmt: skip
    window = g.window_rows(tile_p) * g.window_cols(g.tile_q) * p.c * size
    output = min(tile_p * g.tile_q, p.p * p.q) * min(s.tile_oc, p.o) * size
    move = window / _PORTABLE_LOADS[p.layout] + g.chunks * g.stage_bytes / 32 + output / _PORTABLE_STORES[p.layout]
    # Blocks on one multiprocessor hide each other's loads and latencies; the last ones may be fewer.
    resident = max(1, min(archs.SHARED_BYTES[arch] // (g.shared_bytes + 1024), g.resident_blocks))
    among = tiles / MULTIPROCESSORS * (max(work, move) + _PORTABLE_EXPOSED * min(work, move))
    rounds = -(-tiles // MULTIPROCESSORS) / resident
    alone = max(rounds, math.ceil(rounds) if rounds <= 4 else 0) * _PORTABLE_ALONE * (work + move)
    memory = p.bytes / (_DEVICE_BYTES * MULTIPROCESSORS) / _PORTABLE_SHARE
    return max(among, alone, memory) / CYCLES_PER_US + LAUNCH_US


def fused_us(g: FusedGeometry) -> float:
    """Microseconds of a call of the block's fused form."""
    tensor = 4 * (g.expand_atoms * g.positions / 2 + g.tile.tile_oc)
    chunk = _FUSED_CHUNK + _FUSED_TENSOR * tensor + _FUSED_DEPTHWISE * g.depthwise_mmas
    rounds = -(-g.tiles // MULTIPROCESSORS)
    memory = g.problem.bytes / (_DEVICE_BYTES * MULTIPROCESSORS)
    return max(rounds * g.chunks * chunk, memory) / CYCLES_PER_US + OVERLAPPED_US


def torch_us(p: SeparableConv2dProblem) -> float:
    """Microseconds of the same call on path "torch": two convolutions and the elementwise passes beside them."""
    size, channels_last = p.element_size, p.layout == "channels_last"
    bandwidth = _DEVICE_BYTES * MULTIPROCESSORS * CYCLES_PER_US  # bytes a microsecond
    x, m, y = (p.n * c * h * w * size for c, h, w in ((p.c, p.h, p.w), (p.c, p.p, p.q), (p.o, p.p, p.q)))
    # Elementwise passes over m and over y: activations, and the biases that no kernel takes along.
    over_m = (p.mid_activation is not None) + (p.dw_bias and channels_last)
    over_y = (p.activation is not None) + p.pw_bias
    passes = 2 * m * over_m + (2 * over_y + 3 * p.residual) * y
    launches = 1 + p.depthwise + over_m + over_y + p.residual
    precision = p.fp32_precision or p.dtype
    if not channels_last and precision != "ieee":  # tensor cores take channels_last: both sides are transposed
        passes += 2 * (m + y)
        launches += 2
    depthwise = 0.0
    if p.depthwise:
        contiguous = not channels_last or depthwise_contiguous(p.kernel, p.dilation, size)
        if contiguous and channels_last:
            passes += 2 * (x + m)
            launches += 2
        each, tap = _DEPTHWISE_PS["contiguous" if contiguous else "channels_last", size]
        arithmetic = m / size * (each + math.prod(p.kernel) * tap) * 1e-6
        depthwise = max((x + m) / bandwidth / _DEPTHWISE_SHARE, arithmetic)
    # Tiles of 64 x 64, a wave at least.
    tiles = -(-p.n * p.p * p.q // 64) * -(-p.o // 64)
    product = max(tiles, MULTIPROCESSORS) * 2 * 64 * 64 * (p.c + _TILE_START.get(precision, _TILE_START_16))
    pointwise = max((m + y) / bandwidth / _PASS_SHARE, product / _TFLOPS[precision] * 1e-6)
    return depthwise + pointwise + passes / bandwidth / _PASS_SHARE + launches * _TORCH_LAUNCH_US
