"""Estimated times on an H200, for choosing between schedules and paths: good for an order, not for a prediction.

For one multiprocessor, every unit's cycles are counted: bytes from device memory and through L2, issued instructions,
wavefronts of shared memory, tensor cores. What they take together is fitted to 21 schedules of the lead shape measured
on an H200 (met to about 5 %), PyTorch's side to eight measurements of that shape. The rest is arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .problem import SeparableConv2dProblem

if TYPE_CHECKING:
    from .block_schedule import FusedGeometry
    from .schedule import Geometry

#: Multiprocessors, and cycles a microsecond under load.
MULTIPROCESSORS = 132
CYCLES_PER_US = 1700.0
#: Microseconds of a call beside its main kernel: the launch, and the packing of weights before it.
LAUNCH_US = 4.0
#: Bytes a cycle and multiprocessor: device memory with all at work (4.07 TB/s), and L2 to one multiprocessor.
_DEVICE_BYTES = 18.1
_L2_BYTES = 45.0
#: Cycles from a load of x to its arrival, as far as nothing hides them.
_LATENCY = 1000.0
#: Cycles that one warp of a scheduler takes for an instruction while no other warp is there.
_LONE_WARP = 2.0
#: Cycles of a step that nothing else of its warpgroup hides: barriers, filling and draining of the MMAs.
_STEP = 1250.0
#: Cycles that waiting for one row, or giving it back, takes a warp; and that a TMA copy takes the producer.
_ROW = 85.0
_COPY = 95.0
#: Cycles that a warp waits for each batch of its stores but the first to leave the staging buffers.
_STAGE = 250.0
#: Part of the second longest of several units' times that the longest does not hide.
_EXPOSED = 0.23
#: Part of the time by which rows come late that the warpgroups wait.
_LATE = 0.3
#: Instructions of an activation on one value.
_ACTIVATION = {None: 0, "relu": 1, "relu6": 2, "hardswish": 4, "silu": 9, "gelu_tanh": 14, "gelu": 28}
#: The same in the forms for 16-bit tensors.
_ACTIVATION_16 = _ACTIVATION | {"silu": 6, "gelu_tanh": 10, "gelu": 10}
#: Cycles of a chunk of the fused block that nothing hides: barriers, filling and draining of the MMAs. Cycles of a tile
#: beside its chunks: sums that start from x, the first depthwise outputs, the epilogue.
_FUSED_CHUNK_CYCLES = 2300.0
_FUSED_TILE_CYCLES = 4000.0
#: PyTorch: microseconds of a launch among others; share of the device's bandwidth that elementwise passes and pointwise
#: convolutions reach.
_TORCH_LAUNCH_US = 3.0
_PASS_SHARE = 0.85
#: channels_last: the share of cuDNN's depthwise kernels.
_DEPTHWISE_SHARE = 0.74
#: Picoseconds a tap and output of PyTorch's depthwise kernels: contiguous ones are bound by it, not by bytes.
_TAP_PS = {"float32": 0.3, "float16": 0.49, "bfloat16": 1.27}
_TAP_PS_CHANNELS_LAST = (0.1, 0.3)  # up to 25 taps, beyond
#: Matrix products: TFLOP/s of large ones by operand type.
_TFLOPS = {"bfloat16": 650.0, "float16": 640.0, "tf32": 340.0, "ieee": 45.0}


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


def _lines(g: Geometry, channels: int) -> float:
    """Lines of 128 bytes that `channels` of one row of x under a tile touch; contiguous rows one more on each side."""
    p, size = g.problem, g.problem.element_size
    if g.channels_last:
        return g.columns * channels * size / 128
    useful = g.item_q * p.stride[1]
    return channels * (math.ceil(useful * size / 128) + (2 if p.kernel[1] > 1 else 0))


def _compute(g: Geometry, new_rows: int) -> float:
    """sm90: cycles of arithmetic in a round (one step of every warpgroup, over one chunk of channels)."""
    p, s = g.problem, g.schedule
    groups = -(-min(s.slot_channels, p.c) // 16)
    ends = 1 / g.chunks  # share of an epilogue
    issue, shared = _depthwise(g)
    end_issue, end_shared = _epilogue(g)
    promote = s.blocks * s.tile_oc / 2 if g.split and g.chunks > 1 else 0
    instructions = groups * issue + promote + ends * end_issue
    waits = _STEP + _ROW * (g.window_rows(g.tile_p) + new_rows)
    stage = ends * (g.store_groups // s.staging_groups - 1) * _STAGE
    mmas = s.warpgroups * groups * s.blocks * _products(g)
    return stage + _combine(
        max(s.warpgroups, _LONE_WARP) * instructions + waits,
        4 * s.warpgroups * (groups * shared + ends * end_shared) + mmas * s.tile_oc / 4 + new_rows * g.row_bytes / 128,
        mmas * max(s.tile_oc / 2, 16),
        new_rows * (_ROW + _COPY * (g.atoms if g.channels_last else 1)),
    )


def _memory(g: Geometry, new_rows: int, steps: int, active: int) -> float:
    """sm90: cycles that the bytes of a round take, with `active` multiprocessors at work.

    x comes from device memory once; halos, and x for other tiles of output channels, come through L2, as weights do.
    """
    p, s, size = g.problem, g.schedule, g.problem.element_size
    channels = min(s.slot_channels, p.c)
    rows, columns = min(g.tile_p * g.tiles_down, p.p), min(g.item_q, p.q)
    own = rows * columns * math.prod(p.stride) * channels * size / g.oc_tiles
    output = rows * columns * min(s.tile_oc, p.o) * size / g.chunks
    resident = g.chunks <= s.weight_slots and g.oc_tiles == 1
    weights = 0 if resident else g.stage_bytes / max(1, steps / g.tiles_down)
    again = max(0, new_rows * _lines(g, channels) * 128 - own + weights)
    device_bytes = min(_L2_BYTES, _DEVICE_BYTES * MULTIPROCESSORS / active)
    return (own + output) / device_bytes + again / _L2_BYTES


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
        # Rows are on their way in the slots beyond the windows at work.
        late = _LATE * max(0.0, _LATENCY - (s.row_slots - window) * max(memory, compute) / new_rows)
        rounds = steps / g.tiles_down * (_combine(memory, compute) + late)
        fill = _LATENCY + g.window_rows(g.tile_p) * g.row_bytes / _L2_BYTES
    else:
        # The next chunk loads during this one as far as there are slots for it.
        load = _LATENCY + memory
        behind = 1 - min(1.0, max(0.0, s.row_slots / window - 1))
        rounds = g.chunks * (_combine(load, compute) + behind * min(load, compute))
        fill = _LATENCY
    return -(-items // MULTIPROCESSORS) * (rounds + fill) / CYCLES_PER_US + LAUNCH_US


def fused_us(g: FusedGeometry) -> float:
    """Microseconds of a call of the block's fused form."""
    block = g.problem
    # Cycles of a tile and chunk of 64 hidden channels: tensor cores, and instructions of the eight warps that make
    # depthwise outputs, 8 channels x 128 positions each.
    tensor = 4 * (g.expand_atoms * g.positions / 2 + g.tile.tile_oc)
    instructions = 32 * (2 + _ACTIVATION_16[block.activation]) + 24 * g.depthwise_mmas + 60
    tile = g.chunks * (_combine(tensor, 2 * instructions) + _FUSED_CHUNK_CYCLES) + _FUSED_TILE_CYCLES
    rounds = -(-g.tiles // MULTIPROCESSORS)
    memory = block.bytes / (_DEVICE_BYTES * MULTIPROCESSORS)
    return max(rounds * tile, memory) / CYCLES_PER_US + LAUNCH_US


def torch_us(p: SeparableConv2dProblem) -> float:
    """Microseconds of the same call as PyTorch's two convolutions and the elementwise passes beside them."""
    size, channels_last = p.element_size, p.layout == "channels_last"
    bandwidth = _DEVICE_BYTES * MULTIPROCESSORS * CYCLES_PER_US  # bytes a microsecond
    x, m, y = (p.n * c * h * w * size for c, h, w in ((p.c, p.h, p.w), (p.c, p.p, p.q), (p.o, p.p, p.q)))
    taps = math.prod(p.kernel)
    tap = _TAP_PS_CHANNELS_LAST[taps > 25] if channels_last else _TAP_PS[p.dtype]
    depthwise = max((x + m) / bandwidth / _DEPTHWISE_SHARE, m / size * taps * tap * 1e-6) if p.depthwise else 0.0
    precision = p.fp32_precision or p.dtype
    # A wave of 128 x 128 tiles at a time; the fp32 ones are slow to start (16 TFLOP/s at 64 channels).
    tiles = -(-p.n * p.p * p.q // 128) * -(-p.o // 128)
    padded = 2 * 128 * 128 * (p.c + (100 if precision == "ieee" else 0))
    product = -(-tiles // MULTIPROCESSORS) * padded * MULTIPROCESSORS / _TFLOPS[precision] * 1e-6
    pointwise = max((m + y) / bandwidth / _PASS_SHARE, product)
    # Elementwise passes over m and over y: activations, and the biases that no kernel takes along.
    over_m = (p.mid_activation is not None) + (p.dw_bias and channels_last)
    over_y = (p.activation is not None) + p.pw_bias
    passes = 2 * m * over_m + (2 * over_y + 3 * p.residual) * y
    launches = 1 + p.depthwise + over_m + over_y + p.residual
    if not channels_last and precision != "ieee":  # tensor cores take channels_last: both sides are transposed
        passes += 2 * (m + y)
        launches += 2
    return depthwise + pointwise + passes / bandwidth / _PASS_SHARE + launches * _TORCH_LAUNCH_US
