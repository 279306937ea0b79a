"""Estimated times on an H200, for choosing between schedules and paths: good for an order, not for a prediction.

For one multiprocessor, every unit's cycles are counted: bytes from device memory and through L2, issued instructions,
wavefronts of shared memory, tensor cores. What they take together is fitted to the timed schedules of two thirds of the
layers of benchmarks/layers.jsonl, and PyTorch's side to its times there. The rest is arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from . import arch as archs
from . import direct
from .problem import SeparableConv2dProblem
from .reference import depthwise_contiguous

if TYPE_CHECKING:
    from .block_schedule import FusedGeometry
    from .direct import DirectGeometry
    from .planes import PlaneGeometry
    from .schedule import Geometry

#: Multiprocessors, and cycles a microsecond under load.
MULTIPROCESSORS = 132
CYCLES_PER_US = 1700.0
#: Microseconds of a call beside its main kernel's work: the launches, the packing of weights, the first loads; on path
#: sm90, where these overlap, without packing; what of that two kernels of one call have in common; packing.
LAUNCH_US, OVERLAPPED_US, SHARED_US = 8.4, 4.1, 3.5
PACKING_US = 2.0
#: What a pointwise kernel takes less behind a depthwise one by FMA, than as a call of its own.
BEHIND_US = 2.5
#: Bytes a cycle and multiprocessor: device memory with all at work (4.07 TB/s), and L2 to one multiprocessor.
_DEVICE_BYTES, _L2_BYTES = 18.1, 64.0
#: sm90: bytes that a run of bytes side by side in device memory (a row of a contiguous item) takes beside its own.
_RUN = 37.6
#: sm90, cycles: from the request of a TMA copy to its data, with the barriers on both sides; a copy of the producer;
#: waiting for one row and giving it back; a work item beside its steps; a batch of a warp's stores, but the first,
#: until it has left the staging buffers.
_LATENCY, _COPY, _ROW, _ITEM, _STAGE = 1750.0, 141.0, 67.0, 800.0, 196.0
#: sm90: part of its instructions that a warp waits beside them; cycles of a step by FMA, and of a marched one by tensor
#: cores, that nothing else of its warpgroup hides: barriers, filling and draining of the MMAs.
_WAIT, _STEP, _MARCH = 0.52, 403.0, 930.0
#: sm90: part of its wgmmas' time on the tensor cores that a warp waits for them.
_MMA_WAIT = 0.87
#: sm90: cycles of a wavefront of shared memory. Marching: part of a step after which its oldest rows are given back.
_WAVEFRONT, _HELD = 1.27, 0.5
#: mma_q, cycles: of a warp for an mma.sync (latency of 33, four sums in turn), of the tensor cores for one; of an item
#: whose warpgroups split the channels, for an output channel and warpgroup.
_MMA_SYNC, _MMA_TENSOR, _SPLIT = 8.25, 4.0, 8.3
#: mma_q: cycles that the warps which make the table of taps take for a row of it, two taps of 32 channels (counted, not
#: fitted), and that a pass takes longer for each, as they share units (from 22 layers with and without).
_TABLE_ROW, _TABLE_BESIDE = 8.0, 8.0
#: mma_q in contiguous layout, whose rows are turned: cycles of a batch of 8 matrices for the warps that turn them.
_TURN = 30.0
#: Instructions of an activation on one value.
_ACTIVATION = {None: 0, "relu": 1, "relu6": 2, "hardswish": 4, "silu": 9, "gelu_tanh": 14, "gelu": 38}
#: portable: cycles of an instruction that are counted, of a wavefront of shared memory, of that for a vector of weights
#: in global memory; bytes of x and of y a cycle, by layout.
_PORTABLE_ISSUE, _PORTABLE_SHARED, _PORTABLE_GLOBAL = 0.84, 1.4, 2.9
_PORTABLE_LOADS = {"channels_last": 14.5, "contiguous": 8.0}
_PORTABLE_STORES = 30.0
#: portable: a warp's time alone over that among others; cycles of a chunk's barriers and first loads.
_PORTABLE_ALONE, _PORTABLE_CHUNK = 1.53, 1220.0
#: A depthwise kernel on planes, fitted to ten layers: cycles of an mma.sync of each scheduler, of a wavefront of
#: shared memory and of a tile beside these; by how much it takes longer with 8 warps; cycles of a row that TMA copies.
_PLANE_MMA, _PLANE_WAVEFRONT, _PLANE_TILE, _FEW_WARPS = 3.73, 0.573, 567.0, 1.19
_PLANE_COPY = 3.38
#: A pointwise kernel with x in shared memory: cycles of a cycle of tensor cores, bytes a cycle that arrive, cycles of a
#: tile beside its steps, and of an output channel.
_SHARED_X_TENSOR, _SHARED_X_BYTES, _SHARED_X_ITEM, _SHARED_X_OUTPUT = 1.1, 50.0, 1200.0, 4.0
#: A depthwise kernel by FMA, fitted to the times of 13 layers in bf16 and 14 in fp32. Instructions of a value that
#: leaves, of a vector that is loaded, of a thread's outputs beside these; cycles of a tap on its way to the table, of
#: an instruction and of a load's wavefront; of the first load, and part of that for each step; part of the loads that
#: L1 misses, and of the device's bandwidth; cycles to start; how much longer than evenly dealt the blocks take.
_DIRECT_OUTPUT, _DIRECT_LOAD, _DIRECT_UNIT, _DIRECT_TABLE = 1.5, 9.0, 50.0, 4.0
_DIRECT_ISSUE, _DIRECT_WAVEFRONT, _DIRECT_LATENCY, _DIRECT_STEP = 1.09, 0.5, 930.0, 0.85
_DIRECT_MISSES, _DIRECT_SHARE, _DIRECT_START, _DIRECT_TAIL = 0.2, 0.81, 4330.0, 0.29
#: Cycles of a chunk of a fused block's tile: fixed, a cycle of tensor cores, an mma.sync of each depthwise output.
_FUSED_CHUNK, _FUSED_TENSOR, _FUSED_DEPTHWISE = 1517.0, 0.957, 619.0
#: The same of fp32 tensors, from the lead shape and shapes around it: the depthwise stage by FMA (fixed, a tap); an
#: output channel of 128 positions as it leaves.
_FUSED_FMA, _FUSED_TAP, _FUSED_OUTPUT = 890.0, 16.0, 51.0
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
#: Microseconds of a tap of its channels_last kernel for extents above 5, which takes a channel's taps one by one.
_DEPTHWISE_TAP_US = 0.45
#: Matrix products: TFLOP/s of large ones by operand type, and channels that a tile's start takes as long as.
_TFLOPS = {"bfloat16": 430.0, "float16": 430.0, "tf32": 310.0, "ieee": 32.6}
_TILE_START = {"ieee": 10, "tf32": 90}
_TILE_START_16 = 186


def _soft_max(*times: float) -> float:
    """What units take together that work at the same time: the longest time, more if others come close to it."""
    return sum([time**5 for time in times]) ** 0.2


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


def _row_bytes(g: Geometry, channels: float) -> float:
    """Bytes of `channels` of one row of x under an item, as L2 brings them: contiguous rows in sectors of 32 bytes, one
    more on each side.
    """
    p, size = g.problem, g.problem.element_size
    if g.channels_last:
        return g.columns * channels * size
    useful = g.item_q * p.stride[1]
    return channels * (math.ceil(useful * size / 32) + (2 if p.kernel[1] > 1 else 0)) * 32


def _tile(g: Geometry, chunks: int) -> tuple[float, float, float, float]:
    """sm90, a warpgroup's tile and one pass over channels: cycles that its warps wait beside their instructions, the
    instructions of a warp, wavefronts of shared memory, cycles of tensor cores.
    """
    p, s = g.problem, g.schedule
    groups = -(-p.c // 16) / chunks  # on average: the last pass may have fewer
    issue, shared = _depthwise(g)
    end_issue, end_shared = _epilogue(g)
    promote = s.blocks * s.tile_oc / 2 if chunks > 1 and g.split else 0
    instructions = groups * issue + promote + end_issue / chunks
    mmas = groups * s.blocks * _products(g)
    shared = 4 * (groups * shared + end_shared / chunks) + mmas * s.tile_oc / 4
    tensor = mmas * max(s.tile_oc / 2, 16)
    return _STEP + _WAIT * instructions + _MMA_WAIT * tensor, instructions, shared, tensor


def _diagonal_tile(g: Geometry, chunks: int) -> tuple[float, float, float, float]:
    """The same with the depthwise stage on tensor cores, whose latency a warp waits for."""
    p, s = g.problem, g.schedule
    groups = -(-p.c // 32) / chunks
    pairs = -(-p.taps // 2)
    matrices = g.matrices
    wgmma, mmas = 2 * s.blocks * max(s.tile_oc / 2, 16), 4 * s.blocks * pairs
    end_issue, end_shared = _epilogue(g)
    # Instructions of a warp: an mma.sync takes 4 more that bring its operands together.
    issue = 5 * mmas + 2 * matrices + pairs + s.blocks * (16 * _ACTIVATION[p.mid_activation] + 40)
    instructions = groups * issue + end_issue / chunks
    waits = groups * (_MMA_WAIT * wgmma + _MMA_SYNC * mmas) + _WAIT * instructions + (_MARCH if chunks == 1 else 0)
    shared = 4 * (groups * (4 * matrices + pairs) + end_shared / chunks) + groups * s.blocks * s.tile_oc / 2
    return waits, instructions, shared, groups * (wgmma + _MMA_TENSOR * mmas)


def _memory(g: Geometry, chunks: int, items: int, rows: float, device_bytes: float) -> float:
    """sm90: cycles that the bytes of an item take, `rows` of x among them.

    x comes from device memory once; halos, and x for other tiles of output channels, come through L2, as weights do.
    """
    p, s, size = g.problem, g.schedule, g.problem.element_size
    x = p.n * min(p.p * p.stride[0], p.h) * min(p.q * p.stride[1], p.w) * p.c * size / items / g.oc_tiles
    y = p.n * p.p * p.q * p.o * size / items
    again = max(0, rows * _row_bytes(g, p.c / chunks) - x)
    if chunks > s.weight_slots or g.oc_tiles > 1:
        again += chunks * g.stage_bytes
    x_runs = 1 if g.channels_last else 1 + _RUN / (g.item_q * size)
    y_runs = 1 + _RUN / (g.tile_q * size) if g.turned else x_runs
    return (x * x_runs + y * y_runs) / device_bytes + again / _L2_BYTES


def sm90_us(g: Geometry) -> float:
    """Microseconds of a call on path sm90.

    A round is a step of every warpgroup, or a pass over a chunk of channels; an item is rounds one after the other. A
    round takes what its units take, or what the rings allow: a slot is empty until its copy has come, and then in use.
    Beside all that the device's memory has the bytes to move.
    """
    p, s, chunks = g.problem, g.schedule, g.chunks
    march, tile_p, tiles_down = chunks == 1, g.tile_p, g.tiles_down
    steps = g.steps(MULTIPROCESSORS)
    items = g.items(steps)
    before = OVERLAPPED_US + PACKING_US * (g.pack_blocks > 0)
    if items == 0:
        return before
    rounds = steps / tiles_down if march else chunks
    own_window, window = g.window_rows(tile_p), g.slot_rows if g.runs else g.window_rows(tile_p * tiles_down)
    new_rows = tile_p * tiles_down * p.stride[0] if march else window
    window_copies = bool(s.mma_q) and not march  # all rows at a time
    row_bytes = g.slot_bytes / g.slot_rows

    waits, instructions, shared, tensor = (_diagonal_tile if s.mma_q else _tile)(g, chunks)
    waits += 0 if window_copies else _ROW * (own_window + new_rows)
    # Contiguous rows are stored from buffers in turn, of which the next has left in time, unless there is only one.
    one_buffer = s.staging_groups == 1
    stores = g.store_groups // s.staging_groups - 1 if g.channels_last else (g.store_groups - 1) * one_buffer
    end = stores * _STAGE
    if s.split_channels:  # one tile, whose passes the warpgroups take in turn
        at_work = 1.0
        waits /= s.warpgroups
        end += s.warpgroups * s.tile_oc * _SPLIT
    else:  # warpgroups whose tile is outside the output have nothing to do
        tiles = p.n * -(-g.map_p // tile_p) * -(-g.map_q // g.tile_q) * g.oc_tiles
        at_work = tiles * chunks / (items * rounds)
    waits += end / chunks
    resident = chunks <= s.weight_slots and g.oc_tiles == 1
    table_rows = s.slot_channels / 32 * -(-p.taps // 2) * (g.fills_taps and not resident)
    waits += _TABLE_BESIDE * table_rows
    # By FMA the schedulers are what all warps wait for, beside their own waits; mma.sync leaves others the room.
    busy = (waits, at_work * instructions) if s.mma_q else (waits + at_work * instructions,)
    # 8 matrices of 8 pixels and 8 channels each, 16 wavefronts there and back.
    batches = new_rows * g.atoms * g.columns / 8 if g.turned else 0
    arriving = new_rows * row_bytes / 128 + 16 * batches
    compute = math.hypot(*busy, _WAVEFRONT * (at_work * shared + arriving), at_work * tensor)
    copies = (1 if window_copies else new_rows) * (_ROW + _COPY * (g.atoms if g.channels_last else 1))
    if g.turned:
        copies = max(new_rows * g.atoms * sum(g.row_parts) * _COPY, batches * _TURN)

    device_bytes = min(_L2_BYTES, _DEVICE_BYTES * MULTIPROCESSORS / min(items, MULTIPROCESSORS))
    memory = _memory(g, chunks, items, rounds * new_rows, device_bytes)
    # Of the rings: how many steps have their slots at a time, loading or in use, and how long.
    if march:
        ahead, held = 1 + (s.row_slots - own_window) * tiles_down / new_rows, _HELD * waits
        weights_ring = 0.0
    else:
        ahead, held = tiles_down * s.row_slots * g.slot_rows / window, waits
        arrival = _LATENCY + g.stage_bytes / _L2_BYTES + _TABLE_ROW * table_rows
        weights_ring = 0.0 if resident else (arrival + waits) / s.weight_slots
    rows_ring = (tiles_down * (_LATENCY + held) + memory / rounds) / ahead

    item = rounds * _soft_max(compute, copies, rows_ring, weights_ring) + _ITEM
    first = (own_window if march else window) * row_bytes + g.stage_bytes
    total = _soft_max(-(-items // MULTIPROCESSORS) * item, max(1, items / MULTIPROCESSORS) * memory)
    return (total + _LATENCY + first / device_bytes) / CYCLES_PER_US + before


def pointwise_us(g: Geometry) -> float:
    """Microseconds of a call of a pointwise convolution whose operands are both in shared memory."""
    p, s = g.problem, g.schedule
    steps, items = -(-p.c // 64), g.items(1)
    tensor = 2 * s.tile_oc * s.warpgroups
    arriving = (g.item_q * 128 + s.tile_oc * 64) / _SHARED_X_BYTES
    item = steps * _soft_max(tensor * _SHARED_X_TENSOR, arriving) + _SHARED_X_ITEM + _SHARED_X_OUTPUT * s.tile_oc
    rounds = -(-items // MULTIPROCESSORS)
    moved = g.map_q * (p.c + p.o * (1 + p.residual)) * 2 + p.c * p.o * 2
    device = moved / MULTIPROCESSORS / _DEVICE_BYTES
    return (_soft_max(rounds * item, device) + 2 * _LATENCY) / CYCLES_PER_US + OVERLAPPED_US


def direct_us(g: DirectGeometry) -> float:
    """Microseconds of the depthwise kernel by FMA, in front of another kernel."""
    p, s, size = g.problem, g.schedule, g.problem.element_size
    x, outputs = p.n * p.c * p.h * p.w * size, p.n * p.c * p.p * p.q * size
    rows = min((s.thread_rows - 1) * p.stride[0] + (p.kernel[0] - 1) * p.dilation[0] + 1, s.thread_rows * p.kernel[0])
    taps = -(-p.kernel[1] // g.row_steps)
    steps, pairs = rows * g.row_steps, s.thread_rows * p.kernel[0] * g.row_steps  # pairs: a step, a row of outputs
    loads, table_loads = steps * g.columns, pairs * taps * g.vector // 4
    unpack = g.vector * g.columns * pairs if size == 2 else 0
    values = g.vector * s.thread_rows * s.thread_columns
    issue = values * (p.kernel[0] * taps * g.row_steps + _DIRECT_OUTPUT + _ACTIVATION[p.mid_activation])
    issue += unpack + _DIRECT_LOAD * loads + 2 * table_loads + _DIRECT_UNIT
    # Blocks in turn, as many at a time as there is room for.
    blocks, resident = g.slabs * -(-g.thread_tiles // g.units), direct.BLOCKS * MULTIPROCESSORS
    turns = 1.0 if blocks <= resident else blocks / resident + _DIRECT_TAIL
    warps = max(1.0, min(blocks, resident) / MULTIPROCESSORS) * g.threads / 32
    table = g.lanes * p.taps * g.vector / g.threads * _DIRECT_TABLE * warps / 4
    busy = turns * warps / 4 * issue * _DIRECT_ISSUE
    shared = turns * warps * (4 * _DIRECT_WAVEFRONT * loads + min(4.0, g.lanes / 8) * table_loads)
    latency = turns * _DIRECT_LATENCY * (1 + _DIRECT_STEP * steps)
    threads = g.thread_tiles * -(-p.c // g.vector)
    through_l2 = (threads * loads * 16 * _DIRECT_MISSES + outputs) / MULTIPROCESSORS / _L2_BYTES
    device = (x + outputs) / MULTIPROCESSORS / (_DEVICE_BYTES * _DIRECT_SHARE)
    return (_soft_max(busy, shared, latency, through_l2, device) + table + _DIRECT_START) / CYCLES_PER_US


def planes_us(g: PlaneGeometry) -> float:
    """Microseconds of the depthwise kernel on planes and of the launch before it, in front of another kernel."""
    p = g.problem
    tiles = g.groups * g.tiles
    if tiles == 0:
        return PACKING_US
    per_block = -(-tiles // MULTIPROCESSORS)
    # Of a tile: MMAs and what lanes do with outputs, on 4 schedulers; what is read for the MMAs. Eight warps hide less.
    lanes = 2 * g.schedule.plane_rows * (14 + _ACTIVATION[p.mid_activation])
    work = g.channels / 4 * (_PLANE_MMA * g.mmas + lanes) + _PLANE_WAVEFRONT * g.channels * g.wavefronts + _PLANE_TILE
    tile = work * (_FEW_WARPS if g.channels == 8 else 1)
    if g.slots == g.window:  # the next tile's rows come when this one is done
        tile += _LATENCY
    down = -(-g.rows // g.schedule.plane_rows)
    strips = -(-per_block // down)
    copy = g.slot_bytes / _L2_BYTES + _PLANE_COPY * g.channels * g.schedule.plane_rows * g.tile_images
    strip = _LATENCY + g.window * copy
    planes, outputs = p.c * p.n * p.h * g.pitch * 2, p.n * p.c * p.p * p.q * 2
    device = _DEVICE_BYTES * MULTIPROCESSORS
    packing = (p.n * p.c * p.h * p.w * 2 + planes) / device
    busy = max(per_block * tile + strips * strip, (planes + outputs) / device)
    return (busy + packing) / CYCLES_PER_US + PACKING_US


def portable_us(g: Geometry, arch: str) -> float:
    """Microseconds of a call on path portable."""
    p, s, size = g.problem, g.schedule, g.problem.element_size
    warps, taps, lane_channels = 4 * s.warpgroups, math.prod(p.kernel), 8 // size
    tile_p = g.tile_p * s.warpgroups
    tiles_down = -(-p.p // tile_p)
    tiles = p.n * tiles_down * -(-p.q // g.tile_q) * g.oc_tiles
    groups = -(-p.c // 16)
    busy = p.p / (tiles_down * tile_p)  # warps with no row of the map have nothing to do
    # Of one warp and 16 channels: multiply-adds, MMAs with their FADDs, vectors read from shared memory.
    values = 8 * s.blocks
    mmas = s.blocks * s.tile_oc // 8 * (6 if g.split else g.mma_steps)
    rows = min(g.window_rows(s.blocks), p.kernel[0] * s.blocks)
    vectors = g.mma_steps * rows * min(g.window_cols(2), 2 * p.kernel[1])
    if s.gather:
        vectors = 4 * g.mma_steps * s.blocks * taps * lane_channels
    unpack = lane_channels * vectors if size == 2 else 0
    taps_read = g.mma_steps * taps * lane_channels // 4 * s.blocks
    weights = g.mma_steps * s.tile_oc // 16 * g.parts
    instructions = (
        values * (taps + _ACTIVATION[p.mid_activation]) + mmas * g.parts + vectors + unpack + taps_read + weights
    )
    read = vectors + weights + taps_read * (1 if g.dw_shared else _PORTABLE_GLOBAL)
    work = groups * max(instructions / 4 * _PORTABLE_ISSUE, read * 2 * _PORTABLE_SHARED, mmas * 2)
    window = g.window_rows(tile_p) * g.window_cols(g.tile_q) * p.c * size
    output = min(tile_p * g.tile_q, p.p * p.q) * min(s.tile_oc, p.o) * size
    move = window / _PORTABLE_LOADS[p.layout] + g.chunks * g.stage_bytes / 32 + output / _PORTABLE_STORES
    # Blocks by themselves, with one warp a scheduler at a time, as many as a multiprocessor has room for; what all of
    # them take of its units, and of the device's memory.
    resident = max(1, min(archs.SHARED_BYTES[arch] // (g.shared_bytes + 1024), g.resident_blocks))
    rounds = -(-tiles // MULTIPROCESSORS) / resident
    alone = max(rounds, math.ceil(rounds) if rounds <= 4 else 0) * (
        4 * work * _PORTABLE_ALONE + move + g.chunks * _PORTABLE_CHUNK
    )
    among = tiles / MULTIPROCESSORS * max(warps * busy * work, move)
    memory = p.bytes / (_DEVICE_BYTES * MULTIPROCESSORS)
    return math.hypot(alone, among, memory) / CYCLES_PER_US + LAUNCH_US


def fused_us(g: FusedGeometry) -> float:
    """Microseconds of a call of the block's fused form."""
    p = g.problem
    products = 3 if g.parts == 2 else 1
    tensor = 4 * products * (g.expand_atoms * g.positions / 2 + g.tile.tile_oc * g.tile_positions / 128)
    depthwise = _FUSED_FMA + _FUSED_TAP * p.kernel if g.parts == 2 else _FUSED_DEPTHWISE * g.depthwise_mmas
    tile = g.chunks * (_FUSED_CHUNK + _FUSED_TENSOR * tensor + depthwise)
    rounds = -(-g.tiles // MULTIPROCESSORS)
    moved, before = p.bytes, 0.0
    if g.scaled:
        tile += _FUSED_OUTPUT * g.tile.tile_oc * g.tile_positions / 128
        # A pass over x leaves it in fp16.
        before = p.n * p.l * p.c * (4 + 2 * g.parts)
    device = _DEVICE_BYTES * MULTIPROCESSORS
    return (max(rounds * tile, moved / device) + before / device) / CYCLES_PER_US + OVERLAPPED_US + PACKING_US


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
        latency = 0.0 if contiguous or max(p.kernel) <= 5 else _DEPTHWISE_TAP_US * math.prod(p.kernel)
        depthwise = max((x + m) / bandwidth / _DEPTHWISE_SHARE, arithmetic, latency)
    # Tiles of 64 x 64, a wave at least.
    tiles = -(-p.n * p.p * p.q // 64) * -(-p.o // 64)
    product = max(tiles, MULTIPROCESSORS) * 2 * 64 * 64 * (p.c + _TILE_START.get(precision, _TILE_START_16))
    pointwise = max((m + y) / bandwidth / _PASS_SHARE, product / _TFLOPS[precision] * 1e-6)
    return depthwise + pointwise + passes / bandwidth / _PASS_SHARE + launches * _TORCH_LAUNCH_US
