"""Schedules: how a kernel cuts a problem into tiles, and which cuts are legal.

A schedule is CUTLASS's TileDescription (threadblock shape [output channels, pixels, channels], stages, warps, math
instruction, compute capability) plus what CUTLASS does not know: path, pixel-tile shape, rings. `Geometry` is the
arithmetic that follows from a problem and a schedule; the templates do the same arithmetic and the translation unit
asserts that both agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import arch as archs
from . import direct, planes
from . import estimate as estimates
from .direct import DirectGeometry
from .planes import PlaneGeometry
from .problem import KERNEL_DTYPES, MAX_ALIGNMENT, Problem, SeparableConv2dProblem, once, round_up

if TYPE_CHECKING:
    from cutlass_library import TileDescription

PATHS = ("sm90", "portable")
#: Widths (output channels) of the wgmma instructions that CuTe's basic set has.
TILE_OCS = (8, 16, 32, 64, 96, 128, 192, 256)
#: Output channels of a tile on portable.
PORTABLE_TILE_OCS = (16, 32, 48, 64, 96, 128)
#: Registers of a thread on portable.
PORTABLE_REGISTERS = 216
#: Schedules that `candidates` proposes on portable.
PORTABLE_CANDIDATES = 6
#: By how much the estimate of a portable schedule must be better than that of one on sm90: it is the rougher one.
PORTABLE_MARGIN = 1.1
#: sm90: sizes of a slot of the ring, in pixels, for windows of runs: few, so that few builds serve many maps; and by
#: how much runs must fill tiles better than rectangles, whose matrices serve several taps.
RUN_WINDOWS = (256, 384)
RUNS_FILL = 1.1
#: sm90: taps of a kernel row that the unrolled depthwise stage of contiguous 16-bit tiles takes (63 fit, 75 spill).
MOST_TAPS = 64
#: sm90: taps that the unrolled depthwise stage on tensor cores takes.
MOST_DIAGONAL_TAPS = 128
#: sm90: taps from which a depthwise kernel on planes is proposed, and how many of its tiles.
LEAST_PLANE_TAPS, PLANE_TILES = 33, 2
#: sm90: rows and columns of outputs of a thread of a depthwise kernel by FMA, and those for one row of taps.
DIRECT_TILES, DIRECT_ROW_TILES = ((2, 8), (2, 4), (2, 2), (1, 4), (1, 2)), ((1, 8), (1, 4), (1, 2))
#: sm90: pointwise kernels that are proposed behind a depthwise one; stages of one with x in shared memory, at most.
APART_POINTWISE, MOST_STAGES = 2, 8
#: Schedules that `candidates` proposes on sm90.
SM90_CANDIDATES = 8
#: Sizes (images, rows and columns of the output) whose best schedules a layer's calls choose from: those BUILDS of them
#: that lose least, so that many sizes need few builds. Contiguous rows are aligned for some sizes and not for others,
#: which need other kernels.
TYPICAL_SIZES = {
    "channels_last": ((1, 14), (32, 7), (32, 10), (32, 14), (32, 56), (16, 112), (32, 224)),
    "contiguous": ((16, 8), (16, 24), (16, 40), (16, 256)),
}
BUILDS = {"channels_last": 4, "contiguous": 2}
#: Registers of a consumer's and a producer's thread by number of consumer warpgroups (setmaxnreg; see
#: templates/separable2d_sm90.cuh), and where the warps beside the producer get more (Geometry.room_beside).
#: All together they are at most what the launch gives.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
PRODUCER_REGISTERS = {1: 32, 2: 24, 3: 32}
CONSUMERS_WITH_ROOM = {1: 240, 2: 232}
PRODUCER_WITH_ROOM = 40
#: Turned rows: output rows of a work item above which two items take less time than one, and what a longer item costs
#: beside one that is not, in percent ([16,64,512,512] in bf16, all blocks in one round: 498 us by 128 rows, 475 by 64).
LONG_ITEM, LONG_ITEM_PERCENT = 64, 105
#: Kernels count in 32 bits. Sums of two extents must fit, a tile's pixels times the stride, and four bytes for each
#: group of packed pointwise weights.
MAX_EXTENT = 2**28
MAX_STRIDE = 2**20
#: Work items of a persistent kernel, whose index goes on by as many as there are blocks.
MOST_ITEMS = 2**31 - 2**16
MAX_WEIGHTS = 2**36
#: The fields of a Schedule that are positive integers.
_COUNTS = (
    "tile_oc", "slot_channels", "blocks", "warps_q", "warpgroups", "row_slots", "weight_slots", "staging_groups",
)  # fmt: skip


@dataclass(frozen=True)
class Support:
    """A truth value with its reason."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Schedule:
    """One way to run a problem. Units: channels, MMA blocks of 16 pixels, warps, ring slots."""

    path: str
    tile_oc: int  # output channels of a tile
    slot_channels: int  # channels of x that one pass takes
    blocks: int  # 16-pixel MMA blocks of a warp
    warps_q: int  # warps of a warpgroup side by side; 4 / warps_q below each other
    warpgroups: int  # warpgroups that make depthwise outputs and run MMAs
    row_slots: int = 1  # sm90: rows of x in the ring, or windows (Geometry.slot_rows)
    weight_slots: int = 1  # sm90: chunks of weights in the ring
    staging_groups: int = 1  # sm90: groups of output channels that are staged at a time
    gather: bool = False  # portable: x is read from global memory tap by tap instead of through a tile in shared memory
    side_by_side: bool = False  # sm90: the warpgroups' tiles lie next to each other along W, not below each other
    split_channels: bool = False  # sm90: the warpgroups have one tile and take the passes over the channels in turn
    mma_q: int = 0  # sm90: columns of a 16-pixel block whose depthwise outputs are made by mma.sync; 0: by fp32 FMA
    packs_taps: bool = False  # sm90, mma_q: tables of taps come from a launch before, not from warps in each pass
    run_window: int = 0  # sm90: pixels of x in a ring slot, if tiles are runs of the map's pixels over its rows' ends
    # sm90: rows and columns of outputs that a tile of a depthwise kernel on planes of x has (planes.py); then all that
    # stands above is of a pointwise kernel behind it. 0: one kernel.
    plane_rows: int = 0
    plane_columns: int = 0
    # sm90: rows and columns of outputs that a thread of a depthwise kernel by FMA has (direct.py); the rest as above.
    thread_rows: int = 0
    thread_columns: int = 0
    # sm90, a pointwise convolution alone: both operands are in shared memory (templates/pointwise_sm90.cuh), in
    # `row_slots` stages.
    shared_x: bool = False

    @property
    def apart(self) -> bool:
        """Whether the depthwise stage is a kernel of its own, in front of a pointwise one."""
        return self.plane_rows > 0 or self.thread_rows > 0

    @property
    def pointwise(self) -> Schedule:
        """That of the pointwise kernel behind a depthwise one."""
        return replace(self, plane_rows=0, plane_columns=0, thread_rows=0, thread_columns=0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Schedule:
        """The schedule that `to_json` wrote. ValueError for anything but a dict of its fields; values are unchecked."""
        try:
            return cls(**data)
        except TypeError as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"schedule must be a dict of {names}; got {data!r} ({error})") from None

    def tile_description(self, problem: SeparableConv2dProblem) -> TileDescription:
        """This schedule as CUTLASS describes it, for `problem`'s data type."""
        from cutlass_library import TileDescription

        if self.apart:
            return self.pointwise.tile_description(problem.pointwise)
        geometry = Geometry(problem, self)
        pixel_warpgroups = 1 if self.split_channels else self.warpgroups
        minimum, maximum = (90, 90) if self.path == "sm90" else (80, 1024)
        return TileDescription(
            [self.tile_oc, geometry.tile_p * geometry.tile_q * pixel_warpgroups, self.slot_channels],
            self.row_slots,
            [1, 4 * pixel_warpgroups, self.warpgroups // pixel_warpgroups],
            math_instruction(problem, self),
            minimum,
            maximum,
        )


def tile_key(tile: TileDescription) -> tuple:
    """The fields of a TileDescription as a tuple: two equal TileDescriptions compare unequal by themselves."""
    math = tile.math_instruction
    return (
        tuple(tile.threadblock_shape), tile.stages, tuple(tile.warp_count), tile.minimum_compute_capability,
        tile.maximum_compute_capability, tuple(math.instruction_shape), math.element_a.name, math.element_b.name,
        math.element_accumulator.name, math.opcode_class.name, math.math_operation.name,
    )  # fmt: skip


def math_instruction(problem: SeparableConv2dProblem, schedule: Schedule):
    """CUTLASS's MathInstruction of the pointwise GEMM: on sm90 wgmma 64 x tile_oc x k, else mma.sync 16 x 8 x k."""
    from cutlass_library import DataType, MathInstruction, MathOperation, OpcodeClass

    element = {"ieee": DataType.f16, "tf32": DataType.tf32, "float16": DataType.f16, "bfloat16": DataType.bf16}[
        problem.fp32_precision or problem.dtype
    ]
    k = 8 if element == DataType.tf32 else 16
    shape = [64, schedule.tile_oc, k] if schedule.path == "sm90" else [16, 8, k]
    return MathInstruction(shape, element, element, DataType.f32, OpcodeClass.TensorOp, MathOperation.multiply_add)


@dataclass(frozen=True)
class Geometry:
    """What follows from a problem and a schedule. Mirrors templates/problem.cuh and each kernel's layout struct."""

    problem: SeparableConv2dProblem
    schedule: Schedule

    @once
    def channels_last(self) -> bool:
        return self.problem.layout == "channels_last"

    @property
    def split(self) -> bool:
        """Whether operands are split in two scaled fp16 parts (fp32-grade arithmetic on tensor cores)."""
        return self.problem.fp32_precision == "ieee"

    @property
    def parts(self) -> int:
        """Parts of an MMA operand."""
        return 2 if self.split else 1

    @once
    def mma_steps(self) -> int:
        """Steps of the depthwise stage (32 bytes of channels of x) whose MMAs are issued together.

        16 channels, or 32 where tensor cores make the depthwise outputs.
        """
        return 2 if self.schedule.mma_q else self.problem.element_size // 2

    @property
    def lane_q(self) -> int:
        return 2 if self.pixel_major else 2 * self.schedule.blocks

    @property
    def lane_p(self) -> int:
        return self.schedule.blocks if self.pixel_major else 1

    @once
    def pixel_major(self) -> bool:
        """Whether shared memory holds x as [pixel][channel]: always on portable, which transposes while it loads."""
        return self.channels_last or self.schedule.path == "portable" or self.turned

    @once
    def turned(self) -> bool:
        """sm90: whether contiguous rows are turned to pixel-major ones in shared memory (templates/turn_rows.cuh)."""
        return self.schedule.mma_q > 0 and not self.channels_last

    @property
    def packed(self) -> bool:
        """Whether a launch before packs the pointwise weights; where tensor cores make the depthwise outputs, they are
        taken as they are.
        """
        return not self.schedule.mma_q

    @once
    def fills_taps(self) -> bool:
        """Whether warps beside the producer make the table of taps of every pass (templates/diagonal_depthwise.cuh)."""
        return not self.packed and self.problem.depthwise and not self.schedule.packs_taps

    @once
    def runs(self) -> bool:
        """sm90: whether a tile's pixels are consecutive ones of the map, which is one row to tiles and stores."""
        return self.schedule.run_window > 0

    @once
    def map_p(self) -> int:
        """Rows of the map as tiles see it."""
        return 1 if self.runs or self.schedule.shared_x else self.problem.p

    @once
    def map_q(self) -> int:
        """Columns of it."""
        if self.schedule.shared_x:  # all images are one's
            return self.problem.n * self.problem.map_pixels
        return self.problem.map_pixels if self.runs else self.problem.q

    @once
    def run_rows(self) -> int:
        """Runs: rows of the map under a work item, at most."""
        q = self.problem.q
        last = q - math.gcd(q, self.item_q)  # column in which an item may start
        return min(self.problem.p, (last + self.item_q - 1) // q + 1)

    @once
    def warp_q(self) -> int:
        """Output columns of a warp's tile."""
        if self.turned:  # blocks side by side
            return self.schedule.blocks * self.schedule.mma_q
        return self.schedule.mma_q or 8 * self.lane_q

    @property
    def warp_p(self) -> int:
        """Output rows of a warp's tile."""
        return self.schedule.blocks * 16 // self.warp_q if self.schedule.mma_q else self.lane_p

    @once
    def tile_q(self) -> int:
        """Output columns of a warpgroup's tile."""
        return self.warp_q * self.schedule.warps_q

    @once
    def item_q(self) -> int:
        """Output columns of a work item."""
        return self.tile_q * (self.schedule.warpgroups if self.schedule.side_by_side else 1)

    @once
    def tiles_down(self) -> int:
        """Warpgroup tiles below each other that are worked on at a time."""
        s = self.schedule
        return 1 if s.side_by_side or s.split_channels else s.warpgroups

    @once
    def tile_p(self) -> int:
        """Output rows of a warpgroup's tile."""
        return 4 // self.schedule.warps_q * self.warp_p

    def window_rows(self, p: int) -> int:
        return (p - 1) * self.problem.stride[0] + (self.problem.kernel[0] - 1) * self.problem.dilation[0] + 1

    def window_cols(self, q: int) -> int:
        return (q - 1) * self.problem.stride[1] + (self.problem.kernel[1] - 1) * self.problem.dilation[1] + 1

    @once
    def chunks(self) -> int:
        return -(-self.problem.c // self.schedule.slot_channels)

    @once
    def oc_tiles(self) -> int:
        return -(-self.problem.o // self.schedule.tile_oc)

    @property
    def march(self) -> bool:
        """Whether a work item is marched down its strip, sharing rows of x in the ring."""
        return self.chunks == 1

    @property
    def phase(self) -> int:
        """sm90: columns from the start of a row in shared memory to the first pixel's first tap.

        TMA starts contiguous rows on 16-byte boundaries.
        """
        if self.channels_last or self.schedule.path != "sm90":
            return 0
        return -self.problem.padding[2] % (16 // self.problem.element_size)

    @once
    def row_parts(self) -> tuple[int, int, int]:
        """How TMA cuts a row that is turned: units of 8 columns, squares of 64, units (struct TurnedColumns)."""
        p = self.problem
        beside = ((p.kernel[1] - 1) * p.dilation[1] // 2 + self.phase + 4) // 8
        left = beside if beside <= 2 else 0
        squares, right = divmod(-(-(self.phase + self.window_cols(self.item_q)) // 8) - left, 8)
        return (left, squares + 1, 0) if right > 2 else (left, squares, right)

    @once
    def columns(self) -> int:
        """Columns of a row in shared memory on sm90."""
        if self.runs:
            return round_up(self.window_cols(self.problem.q), 8)
        if self.channels_last:
            return self.window_cols(self.item_q)
        if self.turned:
            left, squares, right = self.row_parts
            return 8 * (left + 8 * squares + right)
        size = self.problem.element_size
        unit = 16 // size
        size_bytes = -(-(self.phase + self.window_cols(self.item_q)) // unit) * unit * size
        rest = size_bytes % 128
        return (size_bytes + (32 if rest <= 32 else 96 if rest <= 96 else 160) - rest) // size

    @once
    def slot_rows(self) -> int:
        """Rows of x in a slot of the ring: one, or all of a work item's."""
        if self.runs:
            return self.window_rows(self.run_rows)
        whole = self.schedule.mma_q and not self.march
        return self.window_rows(self.tiles_down * self.tile_p) if whole else 1

    @once
    def slot_bytes(self) -> int:
        """Bytes of a slot of the ring."""
        if self.runs:
            return self.atoms * self.schedule.run_window * 128
        if self.pixel_major:
            return self.atoms * round_up(self.slot_rows * self.columns * 128, 1024)
        return round_up(self.schedule.slot_channels * self.columns * self.problem.element_size, 1024)

    @once
    def atoms(self) -> int:
        """128-byte groups of channels in a pass."""
        return self.schedule.slot_channels * self.problem.element_size // 128

    @once
    def stage_bytes(self) -> int:
        """Weights of one pass as they lie in shared memory (templates/pack_weights.cuh)."""
        return round_up(self.pointwise_weight_bytes + self.depthwise_weight_bytes, 1024)

    @once
    def pointwise_weight_bytes(self) -> int:
        """Pointwise weights of one pass, as MMA operands."""
        operand_size = 2 if self.split else self.problem.element_size
        return round_up(self.schedule.slot_channels * operand_size, 128) * self.parts * self.schedule.tile_oc

    @once
    def depthwise_weight_bytes(self) -> int:
        """Depthwise weights of one pass: struct DepthwiseWeights or DiagonalTaps of the templates."""
        if self.schedule.mma_q:
            # The table of taps and biases, and behind it what it is made from, if it is made there.
            p, channels = self.problem, self.schedule.slot_channels
            table = channels // 32 * (-(-p.taps // 2) + 1) * 128
            raw = channels * (p.taps + p.dw_bias) * 2
            return table + raw * self.fills_taps if p.depthwise else 0
        lane_channels = 8 // self.problem.element_size
        row_units = -(-self.problem.kernel[1] * lane_channels // 4)
        return self.schedule.slot_channels // lane_channels * ((self.problem.kernel[0] * row_units + 1) | 1) * 16

    @property
    def dw_shared(self) -> bool:
        """portable: whether the depthwise weights are read from shared memory, or (big kernels) from the workspace."""
        return self.depthwise_weight_bytes <= 16 * 1024 and not self.schedule.gather

    @property
    def workspace_bytes(self) -> int:
        if not self.packed:
            return round_up(self.schedule.packs_taps * self.chunks * self.depthwise_weight_bytes, 256)
        stages = self.oc_tiles * self.chunks
        channels = self.oc_tiles * self.schedule.tile_oc * 4 * (2 if self.split else 1)  # bias, scale of the split form
        flags = self.pack_blocks * 4 if self.split else 0
        return round_up(stages * self.stage_bytes + channels + flags, 256)

    @once
    def pack_blocks(self) -> int:
        """Blocks of pack_weights: 16 output channels of one pass each, or the taps of one pass."""
        if not self.packed:
            return self.schedule.packs_taps * self.chunks
        return self.oc_tiles * self.chunks * -(-self.schedule.tile_oc // 16)

    @once
    def store_bytes(self) -> int:
        """Bytes of a row of the epilogue's staging buffer: channels of a pixel, or the tile's pixels of a channel."""
        if not self.channels_last:
            return min(self.tile_q * self.problem.element_size, 128)
        pixel_bytes = self.schedule.tile_oc * self.problem.element_size
        return next(width for width in (128, 64, 32, 16) if pixel_bytes % width == 0)

    @property
    def group_oc(self) -> int:
        """Output channels of one TMA store."""
        if self.channels_last:
            return self.store_bytes // self.problem.element_size
        if self.turned:
            return next(width for width in (32, 16, 8) if self.schedule.tile_oc % width == 0)
        return 16 if self.schedule.tile_oc % 16 == 0 else 8

    @once
    def store_groups(self) -> int:
        """TMA stores that a tile's output channels take; `staging_groups` of them, a divisor, are staged at a time."""
        return self.schedule.tile_oc // self.group_oc

    @property
    def staging_bytes(self) -> int:
        if self.channels_last:
            group = 4 * self.schedule.blocks * round_up(16 * self.store_bytes, 1024)
        else:
            group = self.tile_p * self.tile_q * self.group_oc * self.problem.element_size
        warpgroups = 1 if self.schedule.split_channels else self.schedule.warpgroups
        return warpgroups * self.schedule.staging_groups * group

    @property
    def given_bytes(self) -> int:
        """Split channels: the sums that the other warpgroups give to the first."""
        s = self.schedule
        return (s.warpgroups - 1) * (s.blocks * s.tile_oc // 2 + 1) * 128 * 4 if s.split_channels else 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the main kernel."""
        s = self.schedule
        if s.path == "portable":
            weights = self.pointwise_weight_bytes + self.dw_shared * self.depthwise_weight_bytes
            window = self.window_rows(self.tile_p * s.warpgroups) * self.window_cols(self.tile_q) * self.atoms * 128
            return weights + (0 if s.gather else window) + 16
        if s.shared_x:
            return s.row_slots * (self.item_q * 128 + self.stage_bytes + 16) + self.staging_bytes
        barriers = ((3 if self.turned else 2) * s.row_slots + (3 if self.fills_taps else 2) * s.weight_slots) * 8
        rings = s.row_slots * self.slot_bytes + s.weight_slots * self.stage_bytes
        return rings + self.staging_bytes + self.given_bytes + barriers

    def steps(self, processors: int) -> int:
        """Warpgroup tiles down a work item; of runs, the map's rows under it. Marched: the split of P that takes the
        fewest rows of x over all rounds.
        """
        if self.runs:
            return self.run_rows
        if self.schedule.path == "portable" or self.schedule.shared_x or not self.march:
            return self.tiles_down
        p = self.problem
        columns = p.n * -(-p.q // self.item_q) * self.oc_tiles
        most = -(-p.p // self.tile_p)

        def cost(steps: int) -> int:
            rounds = -(-columns * -(-most // steps) // processors)
            percent = LONG_ITEM_PERCENT if self.turned and steps * self.tile_p > LONG_ITEM else 100
            return rounds * (self.window_rows(steps * self.tile_p) + 2) * percent

        splits = {-(-most // parts) for parts in range(1, min(most, 4 * processors) + 1)}
        return min(splits, key=lambda steps: (cost(steps), -steps))

    def items(self, steps: int) -> int:
        """Work items (sm90) or blocks (portable) of a launch: images x blocks of rows x strips x tiles of channels."""
        p = self.problem
        if self.schedule.shared_x:  # two blocks to each pair of tiles
            return 2 * -(-self.map_q // (2 * self.item_q)) * self.oc_tiles
        return p.n * -(-self.map_p // (steps * self.tile_p)) * -(-self.map_q // self.item_q) * self.oc_tiles

    @property
    def threads(self) -> int:
        return 128 * (self.schedule.warpgroups + (self.schedule.path == "sm90"))

    @property
    def resident_blocks(self) -> int:
        """portable: blocks that one multiprocessor should hold at a time; the compiler gets it as the launch bound."""
        by_registers = 65536 // (self.threads * round_up(self.registers, 8))
        by_shared = (max(archs.SHARED_BYTES.values()) + 1024) // (self.shared_bytes + 1024)
        return max(1, min(by_registers, by_shared, 2048 // self.threads))

    @property
    def room_beside(self) -> bool:
        """sm90: whether the warps beside the producer, which fill in taps and turn rows, get registers of consumers."""
        return self.fills_taps and self.schedule.warpgroups < 3

    @property
    def consumer_registers(self) -> int:
        """sm90: registers of a consumer's thread."""
        return (CONSUMERS_WITH_ROOM if self.room_beside else CONSUMER_REGISTERS)[self.schedule.warpgroups]

    @property
    def producer_registers(self) -> int:
        """sm90: registers of a thread of the producer's warpgroup."""
        return PRODUCER_WITH_ROOM if self.room_beside else PRODUCER_REGISTERS[self.schedule.warpgroups]

    @once
    def matrices(self) -> int:
        """mma.sync: matrices of 8 pixels and 8 channels that a warp's depthwise outputs need (struct PixelMatrices)."""
        if self.runs:
            return 2 * self.problem.taps
        (kernel_h, kernel_w), (stride_h, stride_w) = self.problem.kernel, self.problem.stride
        dilation_h, dilation_w = self.problem.dilation
        rows = range(0, 2 * self.schedule.blocks if self.schedule.mma_q == 8 else self.schedule.blocks)
        columns = range(0, self.schedule.mma_q, 8)
        needed_rows = {row * stride_h + r * dilation_h for row in rows for r in range(kernel_h)}
        needed_columns = {column * stride_w + s * dilation_w for column in columns for s in range(kernel_w)}
        return len(needed_rows) * len(needed_columns)

    @property
    def live_matrices(self) -> int:
        """mma.sync: matrices of 8 pixels that a warp holds at a time, one block deep (struct PixelMatrices)."""
        p, ahead = self.problem, 2
        if not p.depthwise:
            return 2
        if self.runs:
            return 4 + ahead
        if self.schedule.mma_q == 8:  # those of the window's rows between the two rows of pixels
            return p.kernel[1] * min(p.stride[0], p.kernel[0] * p.dilation[0]) + p.kernel[1] + ahead
        return min(p.kernel[1], -(-8 * p.stride[1] // p.dilation[1])) + 1 + ahead

    @once
    def registers(self) -> int:
        """Rough count of registers a consumer thread needs: accumulators, fragments and the depthwise window."""
        s = self.schedule
        lane_channels = 8 // self.problem.element_size
        if s.path == "portable":
            values = s.blocks * (2 * lane_channels + 4 * self.mma_steps * (2 if self.split else 1) + 8 * self.split)
            return s.blocks * s.tile_oc // 2 + values + min(self.window_cols(2), 16) * lane_channels + 48
        accumulators = s.blocks * s.tile_oc // 2 * (2 if self.split and self.chunks > 1 else 1)
        if s.mma_q:
            # Four words of each matrix of x that is in use. Spills begin a little above; with three warpgroups, if they
            # split the channels, or where windows are turned, sooner.
            others = 60 if s.warpgroups == 3 else 44
            if self.turned and not self.march:
                others = 80 if s.warpgroups == 3 or not s.side_by_side else 60
            return accumulators + 4 * self.live_matrices + max(others, 84 * s.split_channels)
        values = s.blocks * 2 * lane_channels * self.mma_steps
        fragments = s.blocks * 4 * (2 if self.split else self.mma_steps) + 2 * s.blocks
        scaling = s.blocks * 14 * self.split
        window = self.window_cols(self.lane_q) * (lane_channels if self.pixel_major else 1)
        # Contiguous 16-bit: the taps of a kernel row for all channels of the lane, as far as registers keep them.
        taps = 0 if self.pixel_major or lane_channels == 2 else min(4 * self.problem.kernel[1], 16)
        return accumulators + values + fragments + scaling + window + taps + 40


def supports(problem: SeparableConv2dProblem, path: str, arch: str, rows: dict[str, int] | None = None) -> Support:
    """Whether `path` has a kernel for `problem` on `arch`, and if not, why not.

    The one predicate of API, planner, tuner and tests. `rows`: of a kernel that is a part of a problem, the extents of
    innermost dimensions in that problem, by letter, for the reason. Raises ValueError for a path or an arch that does
    not exist.
    """
    if path not in PATHS:
        known = ", ".join(map(repr, PATHS))
        raise ValueError(f"path={path!r} is unknown; it must be one of {known} here ('torch' always runs)")
    archs.check(arch)
    if (reason := _out_of_reach(problem, path, arch, rows)) is not None:
        return Support(False, reason)
    found = (schedule for size in typical(problem) for schedule in ranked(size, path, arch))
    if path == "sm90" and not any(found):
        reason = "no tile's window of x and weights fit into shared memory and registers"
        if problem.element_size == 2 and problem.taps >= LEAST_PLANE_TAPS:
            least = Schedule("sm90", 8, 64, 1, 4, 1, plane_rows=2, plane_columns=64)
            reason += f", nor can two kernels run it: {_not_apart(problem, least)}"
        return Support(False, reason)
    return Support(True)


def _out_of_reach(problem: SeparableConv2dProblem, path: str, arch: str, rows: dict[str, int] | None) -> str | None:
    """Why no schedule of `path` can run this problem on `arch`, whatever its tiles are; None if one may."""
    if problem.dtype not in KERNEL_DTYPES:
        return f"dtype {problem.dtype} has no kernels"
    p = problem
    for what, largest, limit in (
        ("an extent or padding", max(p.n, p.c, p.h, p.w, p.o, p.p, p.q, *p.padding), MAX_EXTENT),
        ("a stride", max(p.stride), MAX_STRIDE),
        ("the number of pointwise weights", p.c * p.o, MAX_WEIGHTS),
    ):
        if largest > limit:
            return f"{what} of {largest} exceeds {limit}: kernels count in 32 bits"
    if path == "sm90":
        if arch != "sm_90a":
            return f"path sm90 needs wgmma and TMA of sm_90a, the target is {arch}"
        if problem.alignment < MAX_ALIGNMENT:
            own = zip("CO" if p.layout == "channels_last" else "WQ", p.pitches, strict=True)
            return unaligned(problem, rows or dict(own), "path portable")
        if p.n * p.p * -(-p.q // 8) * -(-p.o // 8) >= MOST_ITEMS:
            return "path sm90 counts work items in 32 bits, there may be more"
    return None


def unaligned(problem: Problem, rows: dict[str, int], instead: str) -> str:
    """Why TMA cannot copy tensors with innermost dimensions of these extents (by letter), and what runs `instead`."""
    unit = MAX_ALIGNMENT // problem.element_size
    odd = [f"{name} = {extent}" for name, extent in rows.items() if extent % unit]
    causes, remedies = [], []
    if odd:
        causes.append(f"{', '.join(odd)} {'is no multiple' if len(odd) == 1 else 'are no multiples'} of {unit}")
        remedies.append("pad it" if len(odd) == 1 else "pad them")
    if problem.alignment < math.gcd(MAX_ALIGNMENT, *(extent * problem.element_size for extent in rows.values())):
        causes.append(f"the address of x is a multiple of {problem.alignment} bytes alone")
        remedies.append("clone x")
    return (
        f"TMA needs {MAX_ALIGNMENT}-byte aligned tensors and rows: {', and '.join(causes)}; "
        f"{' and '.join(remedies)}, or take {instead}"
    )


def check(
    problem: SeparableConv2dProblem, schedule: Schedule, arch: str, rows: dict[str, int] | None = None
) -> Support:
    """Whether this schedule can run this problem on `arch`, and if not, why not. `rows` as in `supports`."""
    if (reason := _malformed(schedule)) is not None:
        return Support(False, reason)
    if (reason := _out_of_reach(problem, schedule.path, arch, rows)) is not None:
        return Support(False, reason)
    if schedule.apart:
        if (reason := _not_apart(problem, schedule)) is not None:
            name = "plane_rows" if schedule.plane_rows else "thread_rows"
            return Support(False, f"{name}={getattr(schedule, name)}: {reason}")
        return check(problem.pointwise, schedule.pointwise, arch)
    of_this_size = schedule.run_window or schedule.shared_x
    return _check_tiles(problem if of_this_size else _without_size(problem), schedule, arch)


@lru_cache(maxsize=4096)
def _check_tiles(problem: SeparableConv2dProblem, schedule: Schedule, arch: str) -> Support:
    """`check` of one kernel's tiles, which are the same at all sizes but for runs of pixels and `shared_x`."""
    geometry = Geometry(problem, schedule)
    if schedule.shared_x and (reason := _no_shared_x(geometry)) is not None:
        return Support(False, f"shared_x=True: {reason}")
    if schedule.slot_channels * problem.element_size % 128:
        return Support(False, f"slot_channels={schedule.slot_channels} is no multiple of 128 bytes")
    if schedule.path == "sm90":
        if geometry.split and schedule.slot_channels != 64:
            return Support(False, "the fp32-grade form takes 64 channels at a time: then its sums leave the MMAs")
        if geometry.store_groups % schedule.staging_groups:
            reason = f"staging_groups={schedule.staging_groups} is no divisor of the {geometry.store_groups} stores"
            return Support(False, reason)
        if schedule.split_channels and (reason := _no_split(geometry)) is not None:
            return Support(False, f"split_channels=True: {reason}")
        if schedule.mma_q and (reason := _no_diagonals(geometry)) is not None:
            return Support(False, f"mma_q={schedule.mma_q}: {reason}")
        if schedule.packs_taps and (reason := _no_packed_taps(geometry)) is not None:
            return Support(False, f"packs_taps=True: {reason}")
        if schedule.run_window and (reason := _no_runs(geometry)) is not None:
            return Support(False, f"run_window={schedule.run_window}: {reason}")
        if not geometry.channels_last and 128 % (row_bytes := geometry.warp_q * problem.element_size):
            return Support(False, f"a warp's rows of {row_bytes} bytes do not divide the 128 that TMA swizzles")
        if not geometry.pixel_major and schedule.blocks > 2:
            return Support(False, f"blocks={schedule.blocks} must be 1 or 2: a lane stages 16 bytes of a row at a time")
        window = geometry.window_rows(geometry.tile_p)
        if schedule.row_slots * geometry.slot_rows < window:
            return Support(False, f"{schedule.row_slots} row slots hold no window of {window} rows")
        box = geometry.columns, geometry.slot_rows, 0 if geometry.channels_last else schedule.slot_channels
        if not geometry.turned and max(box) > 256:
            many = f"{geometry.slot_rows} rows of " if geometry.slot_rows > 1 else ""
            size = f"{many}{geometry.columns} columns of {schedule.slot_channels} channels"
            return Support(False, f"{size} exceed TMA's box of 256")
        if not geometry.pixel_major and problem.element_size == 2 and problem.kernel[1] > MOST_TAPS:
            return Support(False, f"{problem.kernel[1]} taps a row of 16-bit contiguous x spill: at most {MOST_TAPS}")
        at_hand = geometry.consumer_registers
        if geometry.registers > at_hand:
            return Support(False, f"about {geometry.registers} registers a thread, {at_hand} at hand")
        if geometry.shared_bytes > archs.SHARED_BYTES[arch]:
            return Support(False, f"{geometry.shared_bytes} bytes of shared memory, {archs.SHARED_BYTES[arch]} at hand")
        return Support(True)
    if schedule.tile_oc % 16:
        return Support(False, f"tile_oc={schedule.tile_oc} is no multiple of 16, the output channels of one ldmatrix")
    if geometry.registers > PORTABLE_REGISTERS:
        return Support(False, f"about {geometry.registers} registers a thread, {PORTABLE_REGISTERS} at hand")
    if geometry.shared_bytes > archs.SHARED_BYTES[arch]:
        return Support(False, f"{geometry.shared_bytes} bytes of shared memory, {archs.SHARED_BYTES[arch]} at hand")
    return Support(True)


def _not_apart(problem: SeparableConv2dProblem, schedule: Schedule) -> str | None:
    """Why the depthwise stage cannot be this kernel of its own, or None."""
    if not problem.depthwise:
        return "only of a depthwise convolution"
    return (_no_planes if schedule.plane_rows else _no_direct)(problem, schedule)


def _no_direct(problem: SeparableConv2dProblem, schedule: Schedule) -> str | None:
    """Why a thread cannot make so many depthwise outputs by itself, or None."""
    p, g = problem, DirectGeometry(problem, schedule)
    if p.layout != "channels_last":
        return "threads have channels side by side: only for channels_last"
    if p.c % g.vector:
        return f"threads have {g.vector} channels each, not a part of {p.c}"
    if g.most_lanes == 0:
        return f"{p.taps} taps of {g.vector} channels do not fit into {direct.MOST_TAP_BYTES} bytes of shared memory"
    if schedule.thread_rows > 1 and (p.dilation[0] > 1 or p.stride[0] > p.kernel[0] or p.kernel[0] == 1):
        return "rows of outputs share no row of x, or have some without a tap between them: it must be 1"
    if g.registers > direct.REGISTERS:
        return f"about {g.registers} registers a thread, {direct.REGISTERS} at hand"
    if g.slabs > direct.MOST_BLOCKS:
        return f"{p.c} channels are more than the {direct.MOST_BLOCKS} blocks of a launch have"
    if p.pixels > MAX_EXTENT:
        return f"{p.pixels} pixels exceed {MAX_EXTENT}: kernels count in 32 bits"
    return None


def _no_shared_x(geometry: Geometry) -> str | None:
    """Why x cannot be an operand in shared memory as TMA leaves it, or None."""
    p, s = geometry.problem, geometry.schedule
    if p.depthwise or p.layout != "channels_last" or p.element_size != 2:
        return "only for a pointwise convolution alone, of 16 bit in channels_last"
    shape = (s.mma_q, s.warps_q, s.blocks, s.slot_channels, s.weight_slots)
    if shape != (16, 4, 1, 64, 1) or s.side_by_side != (s.warpgroups > 1) or s.split_channels:
        return "only 64 pixels a warpgroup side by side, 64 channels a stage: mma_q=16, warps_q=4, blocks=1"
    if s.row_slots < 2:
        return f"row_slots={s.row_slots} must be 2 or more: a stage is given back when the next has been issued"
    if s.tile_oc % 16:
        return f"tile_oc={s.tile_oc} must be a multiple of 16, of which each of two blocks brings half"
    if geometry.map_q > MAX_EXTENT:
        return f"{geometry.map_q} pixels exceed {MAX_EXTENT}: kernels count in 32 bits"
    return None


def _no_planes(problem: SeparableConv2dProblem, schedule: Schedule) -> str | None:
    """Why the depthwise outputs cannot be made on planes of x, or None."""
    p, g = problem, PlaneGeometry(problem, schedule)
    if p.element_size != 2:
        return f"mma.sync reads 16-bit tensors, not {p.dtype}"
    if p.c % 8:
        return f"channels are taken 8 at a time, not {p.c}"
    if p.stride != (1, 1):
        return f"planes are for stride 1, not {p.stride}"
    if p.dilation[0] != 1 and not g.one_row:
        return f"planes are for rows of taps side by side, not dilation {p.dilation}"
    if g.one_row and p.padding[:2] != (0, 0):
        return f"rows of all images are one image's: no padding of {p.padding[:2]} rows"
    if g.one_row and schedule.plane_columns != 64:
        return f"plane_columns={schedule.plane_columns} must be 64 where rows of all images are one image's"
    if g.window_columns > planes.MOST_BOX:
        return f"windows of {g.window_columns} columns exceed TMA's box of {planes.MOST_BOX}"
    if g.registers > (most := planes.REGISTERS[g.channels]):
        return f"about {g.registers} registers a thread for matrices and sums, {most} at hand"
    if g.mmas > planes.MOST_MMAS:
        return f"{g.mmas} MMAs of a tile are unrolled, at most {planes.MOST_MMAS}"
    if g.shared_bytes > (at_hand := archs.SHARED_BYTES["sm_90a"]):
        return f"{g.shared_bytes} bytes of shared memory, {at_hand} at hand"
    if max(g.workspace_bytes // 16, g.pack_blocks, g.groups * g.tiles) >= MOST_ITEMS or g.plane_offset >= 2**31:
        return "kernels count in 32 bits"
    return None


def _no_diagonals(geometry: Geometry) -> str | None:
    """Why tensor cores cannot make these depthwise outputs, or None."""
    p, s = geometry.problem, geometry.schedule
    if p.element_size != 2:
        return f"mma.sync reads 16-bit tensors, not {p.dtype}"
    if geometry.turned and (not p.depthwise or p.residual):
        return "contiguous rows are turned for a depthwise convolution alone, without a residual"
    if p.c % (unit := MAX_ALIGNMENT // p.element_size):
        return f"TMA needs rows of pointwise weights of a multiple of {unit} channels, not {p.c}"
    if geometry.turned and s.blocks > 2:
        return f"blocks={s.blocks} must be 1 or 2"
    if geometry.channels_last and p.depthwise and s.blocks != 1:
        return f"blocks={s.blocks} must be 1: the matrices of more do not fit into registers"
    if p.taps > MOST_DIAGONAL_TAPS:
        return f"{p.taps} taps are unrolled, at most {MOST_DIAGONAL_TAPS}"
    if p.mid_activation is not None and not p.depthwise:
        return "without a depthwise convolution x is the operand as it is"
    return None


def _no_packed_taps(geometry: Geometry) -> str | None:
    """Why no launch before makes tables of these taps, or None."""
    if not geometry.schedule.mma_q or not geometry.problem.depthwise:
        return "only where mma_q makes depthwise outputs"
    if geometry.turned:
        return "beside rows that are turned, the tables are made once for all passes"
    return None


def _no_runs(geometry: Geometry) -> str | None:
    """Why tiles cannot be runs of the map's pixels, or None."""
    p, s = geometry.problem, geometry.schedule
    if (s.mma_q, s.warps_q, s.blocks) != (16, 4, 1):
        return "only 64 pixels a warpgroup in one row: mma_q=16, warps_q=4, blocks=1"
    if not geometry.channels_last or not p.depthwise or p.residual:
        return "only for channels_last depthwise convolutions without a residual"
    if geometry.march:
        return f"slot_channels={s.slot_channels} take all channels in one pass, whose rows come one by one"
    if s.split_channels or s.side_by_side != (s.warpgroups > 1):
        return "the warpgroups' tiles must lie next to each other"
    if p.map_pixels > MAX_EXTENT:
        return f"a map of {p.map_pixels} pixels exceeds {MAX_EXTENT}: kernels count in 32 bits"
    if geometry.slot_rows * geometry.columns > s.run_window:
        return f"a window of {geometry.slot_rows} rows of {geometry.columns} columns is larger"
    return None


def _no_split(geometry: Geometry) -> str | None:
    """Why the warpgroups cannot take the channels in turn, or None."""
    s = geometry.schedule
    if not s.mma_q:
        return "only where mma_q makes the depthwise outputs"
    if s.side_by_side:
        return "side_by_side=True gives each warpgroup a tile of its own"
    if not 1 < s.warpgroups <= geometry.chunks:
        return f"{s.warpgroups} warpgroups cannot share {geometry.chunks} passes over the channels"
    return None


def _malformed(schedule: Schedule) -> str | None:
    """Why this is no schedule of any problem, or None."""
    if schedule.path not in PATHS:
        return f"path={schedule.path!r} must be one of {', '.join(map(repr, PATHS))}"
    for name in ("gather", "side_by_side", "split_channels", "packs_taps", "shared_x"):
        if type(getattr(schedule, name)) is not bool:
            return f"{name}={getattr(schedule, name)!r} must be True or False"
    for name in _COUNTS:
        value = getattr(schedule, name)
        if type(value) is not int or value < 1:
            return f"{name}={value!r} must be a positive integer"
    if schedule.warps_q not in (1, 2, 4):
        return f"warps_q={schedule.warps_q} must be 1, 2 or 4"
    if type(schedule.mma_q) is not int or schedule.mma_q not in (0, 8, 16):
        return f"mma_q={schedule.mma_q!r} must be 0, 8 or 16"
    for name, allowed in (("plane_rows", range(0, 17, 2)), ("plane_columns", (0, 8, 16, 32, 64))):
        if type(getattr(schedule, name)) is not int or getattr(schedule, name) not in allowed:
            return f"{name}={getattr(schedule, name)!r} must be one of {', '.join(map(str, allowed))}"
    for name, most in (("thread_rows", 8), ("thread_columns", 8)):
        if type(getattr(schedule, name)) is not int or not 0 <= getattr(schedule, name) <= most:
            return f"{name}={getattr(schedule, name)!r} must be an integer from 0 to {most}"
    for rows, columns in (("plane_rows", "plane_columns"), ("thread_rows", "thread_columns")):
        both = getattr(schedule, rows), getattr(schedule, columns)
        if (both[0] > 0) != (both[1] > 0):
            return f"{rows}={both[0]} and {columns}={both[1]} are of the same tile"
    if schedule.plane_rows and schedule.thread_rows:
        return f"plane_rows={schedule.plane_rows} and thread_rows={schedule.thread_rows}: of one depthwise kernel"
    if type(schedule.run_window) is not int or schedule.run_window < 0 or schedule.run_window % 8:
        return f"run_window={schedule.run_window!r} must be a multiple of 8"
    if schedule.path == "portable":
        if schedule.run_window:
            return f"run_window={schedule.run_window} must be 0: path portable has no rings"
        if schedule.mma_q:
            return f"mma_q={schedule.mma_q}: on path portable fp32 FMA makes the depthwise outputs"
        for name in ("row_slots", "weight_slots", "staging_groups"):
            if getattr(schedule, name) != 1:
                return f"{name}={getattr(schedule, name)} must be 1: path portable has no rings"
        if schedule.packs_taps:
            return "packs_taps=True: on path portable all weights are packed"
        for name in ("plane_rows", "thread_rows", "shared_x"):
            if getattr(schedule, name):
                return f"{name}={getattr(schedule, name)}: on path portable one kernel runs a problem, by mma.sync"
        if schedule.side_by_side or schedule.split_channels:
            name = "side_by_side" if schedule.side_by_side else "split_channels"
            return f"{name}=True: on path portable the warps' tiles are arranged by warps_q alone"
        # More threads than PORTABLE_REGISTERS of each leave room for do not fit into a multiprocessor.
        return None if schedule.warpgroups <= 2 else f"warpgroups={schedule.warpgroups} must be 1 or 2"
    if schedule.warpgroups not in CONSUMER_REGISTERS:
        return f"warpgroups={schedule.warpgroups} must be one of {', '.join(map(str, CONSUMER_REGISTERS))}"
    if schedule.tile_oc not in TILE_OCS:
        return f"tile_oc={schedule.tile_oc} must be one of {', '.join(map(str, TILE_OCS))}, the widths of wgmma"
    return "gather=True: only path portable gathers" if schedule.gather else None


def _legal(problem: SeparableConv2dProblem, path: str, arch: str) -> Iterator[Schedule]:
    """Legal schedules of one path, unordered."""
    if _out_of_reach(problem, path, arch, None) is not None:
        return
    tiles, turned = _of_all_sizes(_without_size(problem), path, arch)
    yield from tiles
    if path == "sm90":
        yield from (schedule for schedule in _of_this_size(problem, arch) if check(problem, schedule, arch))
    yield from turned


def _without_size(problem: SeparableConv2dProblem) -> SeparableConv2dProblem:
    """One problem for all sizes of a layer, in one row where tiles lie along one."""
    return replace(problem.layer, h=1) if is_one_row(problem) else problem.layer


@lru_cache(maxsize=256)
def _of_all_sizes(layer: SeparableConv2dProblem, path: str, arch: str) -> tuple[tuple[Schedule, ...], ...]:
    """What a layer's sizes have in common, and takes long to find: legal tiles, and those whose rows are turned."""
    found = (_tiles(layer, arch), _turned_tiles(layer, arch)) if path == "sm90" else (_portable(layer, arch), ())
    legal = _check_tiles.__wrapped__  # thousands, which would be all that the cache holds
    return tuple(tuple(s for s in schedules if legal(layer, s, arch)) for schedules in found)


def _tiles(problem: SeparableConv2dProblem, arch: str) -> Iterator[Schedule]:
    """sm90: rectangles of pixels."""
    slots, one_row = _slots(problem), is_one_row(problem)
    # Blocks of 16 columns share matrices between the taps of long rows, blocks of 8 between kernel rows.
    diagonals = (16,) if one_row else (8, 16) if problem.kernel[1] > 8 else (8,)
    mma_qs = (0, *diagonals) if problem.element_size == 2 and problem.layout == "channels_last" else (0,)
    warps_qs = (4,) if one_row else (4, 2, 1)
    shapes = itertools.product(_tile_ocs(problem.o), slots, (2, 1), warps_qs, (2, 3, 1), mma_qs, (False, True))
    for tile_oc, slot, blocks, warps_q, warpgroups, mma_q, split in shapes:
        base = Schedule(
            "sm90", tile_oc, slot, blocks, warps_q, warpgroups, side_by_side=one_row and warpgroups > 1 and not split,
            split_channels=split, mma_q=mma_q,
        )  # fmt: skip
        geometry = Geometry(problem, base)
        if split and _no_split(geometry) or mma_q and _no_diagonals(geometry):
            continue
        if geometry.registers <= geometry.consumer_registers:
            yield from _with_rings(problem, base, arch)
            if mma_q and problem.depthwise and not geometry.march:
                yield from _with_rings(problem, replace(base, packs_taps=True), arch)


def _slots(problem: SeparableConv2dProblem) -> list[int]:
    """sm90: channels of a pass worth trying."""
    atom = 128 // problem.element_size
    padded = round_up(problem.c, atom)
    if problem.fp32_precision == "ieee":
        return [64]
    return sorted({m * atom for m in (1, 2, 4) if m * atom <= padded} | {padded})


def _turned_tiles(problem: SeparableConv2dProblem, arch: str) -> Iterator[Schedule]:
    """sm90: tiles of contiguous rows that are turned."""
    if problem.element_size == 2 and problem.layout == "contiguous":
        for base in _turned(problem, round_up(problem.c, 128 // problem.element_size)):
            if not _no_diagonals(Geometry(problem, base)):
                yield from _with_rings(problem, base, arch)


def _of_this_size(problem: SeparableConv2dProblem, arch: str) -> Iterator[Schedule]:
    """sm90: what follows from the extents as well."""
    pixel_major = problem.element_size == 2 and problem.layout == "channels_last"
    if pixel_major and problem.depthwise and not is_one_row(problem):
        for base, packs in itertools.product(_runs(problem, _slots(problem)), (False, True)):
            if not (_no_diagonals(geometry := Geometry(problem, base)) or _no_runs(geometry)):
                yield from _with_rings(problem, replace(base, packs_taps=packs), arch)
    if not problem.depthwise and pixel_major:
        yield from _shared_x(problem, arch)
    yield from _direct(problem, arch)
    yield from _planes(problem, arch)


def _runs(problem: SeparableConv2dProblem, slots: list[int]) -> Iterator[Schedule]:
    """Runs of the map's pixels, where they fill tiles clearly better than the best rectangles of as many pixels do."""

    def fill(tile_p: int, tile_q: int, p: int, q: int) -> float:
        return p * q / (-(-p // tile_p) * tile_p * -(-q // tile_q) * tile_q)

    for warpgroups, tile_oc, slot in itertools.product((2, 3, 1), _tile_ocs(problem.o), slots):
        run = fill(1, 64 * warpgroups, 1, problem.map_pixels)
        tiles = ((2 * 4 // across * warpgroups, 8 * across) for across in (1, 2, 4))
        if run < RUNS_FILL * max(fill(*tile, problem.p, problem.q) for tile in tiles):
            continue
        base = Schedule("sm90", tile_oc, slot, 1, 4, warpgroups, side_by_side=warpgroups > 1, mma_q=16, run_window=8)
        geometry = Geometry(problem, base)
        pixels = geometry.slot_rows * geometry.columns
        window = next((size for size in RUN_WINDOWS if size >= pixels), None)
        if window is not None and geometry.registers <= geometry.consumer_registers:
            yield replace(base, run_window=window)


def _shared_x(problem: SeparableConv2dProblem, arch: str) -> Iterator[Schedule]:
    """A pointwise convolution alone with both operands in shared memory, which its stages fill."""
    tile_ocs = dict.fromkeys(max(16, tile_oc) for tile_oc in _tile_ocs(problem.o))
    for tile_oc, warpgroups in itertools.product(tile_ocs, (2, 1)):
        base = Schedule(
            "sm90", tile_oc, 64, 1, 4, warpgroups, side_by_side=warpgroups > 1, mma_q=16, row_slots=0, shared_x=True
        )
        groups = Geometry(problem, base).store_groups
        for staging in (count for count in (1, 2, 4) if groups % count == 0):
            partial = replace(base, staging_groups=staging)
            geometry = Geometry(problem, partial)
            stage = Geometry(problem, replace(partial, row_slots=1)).shared_bytes - geometry.shared_bytes
            stages = min((archs.SHARED_BYTES[arch] - geometry.shared_bytes) // stage, MOST_STAGES)
            if stages >= 2:
                yield replace(partial, row_slots=stages)


@lru_cache(maxsize=1024)
def behind(problem: SeparableConv2dProblem, arch: str) -> tuple[Schedule, ...]:
    """The best pointwise kernels behind a depthwise one, by the pixels and channels alone."""
    pointwise = problem.pointwise
    if problem.element_size == 2 and problem.layout == "channels_last":
        found = (schedule for schedule in _shared_x(pointwise, arch) if check(pointwise, schedule, arch))
        return tuple(sorted(found, key=lambda s: estimate(pointwise, s, arch)))[:APART_POINTWISE]
    return ranked(pointwise, "sm90", arch)[:APART_POINTWISE]


def _direct(problem: SeparableConv2dProblem, arch: str) -> Iterator[Schedule]:
    """Depthwise kernels by FMA with the best pointwise kernels."""
    tiles = DIRECT_ROW_TILES if problem.kernel[0] == 1 else DIRECT_TILES
    made = [Schedule("sm90", 8, 64, 1, 4, 1, thread_rows=p, thread_columns=q) for p, q in tiles]
    made = [schedule for schedule in made if _not_apart(problem, schedule) is None]
    best = sorted(made, key=lambda s: estimates.direct_us(DirectGeometry(problem, s)))[:1]
    for front, pointwise in itertools.product(best, behind(problem, arch) if best else ()):
        yield replace(pointwise, thread_rows=front.thread_rows, thread_columns=front.thread_columns)


def _planes(problem: SeparableConv2dProblem, arch: str) -> Iterator[Schedule]:
    """The best tiles of a depthwise kernel on planes, of equal ones the widest, with the best pointwise kernels."""
    if problem.taps < LEAST_PLANE_TAPS:
        return
    # Less than twice as wide as the map, but at least 8; of one row of taps, 64 (_no_planes).
    widths = [64] if problem.kernel[0] == 1 else [q for q in (64, 32, 16, 8) if q < 2 * problem.q or q == 8]
    tiles = (Schedule("sm90", 8, 64, 1, 4, 1, plane_rows=p, plane_columns=q) for q in widths for p in range(2, 17, 2))
    made = [PlaneGeometry(problem, tile) for tile in tiles if _not_apart(problem, tile) is None]
    best = sorted(made, key=lambda g: (estimates.planes_us(g), -g.schedule.plane_columns))[:PLANE_TILES]
    for g, pointwise in itertools.product(best, behind(problem, arch) if best else ()):
        yield replace(pointwise, plane_rows=g.schedule.plane_rows, plane_columns=g.schedule.plane_columns)


def _turned(problem: SeparableConv2dProblem, padded: int) -> Iterator[Schedule]:
    """Shapes for contiguous rows that are turned: up to 128 columns a warpgroup, for stores of up to 256 bytes.

    Beside as many sums as a warpgroup can have, registers suffice where the warpgroups do not take turns. Windows of
    more channels than a pass takes are slower than FMA (256 to 728 channels at 40 x 40: 193 against 172 us).
    """
    if padded > 128:
        return
    one_row = is_one_row(problem)
    shapes = [(2, 4, 16), (1, 4, 16)] if one_row else [(2, 4, 16), *itertools.product((2, 1), (4, 2, 1), (8,))]
    for tile_oc, (blocks, warps_q, mma_q) in itertools.product(_tile_ocs(problem.o), shapes):
        besides = {one_row, one_row or warps_q == 4} - ({False} if blocks * tile_oc >= 192 else set())
        for beside in sorted(besides):
            yield Schedule("sm90", tile_oc, padded, blocks, warps_q, 2, side_by_side=beside, mma_q=mma_q)


def _tile_ocs(o: int) -> list[int]:
    """sm90: tiles of `o` output channels worth trying: the smallest of those that take as many passes, if few."""
    smallest = {-(-o // tile_oc): tile_oc for tile_oc in reversed(TILE_OCS)}
    fewest = min(smallest)
    return [tile_oc for passes, tile_oc in smallest.items() if passes <= max(8, 2 * fewest)]


def _portable(problem: SeparableConv2dProblem, arch: str) -> Iterator[Schedule]:
    """Tiles whose window of x fits into shared memory; if there is none, the form that gathers from global memory."""
    atom = 128 // problem.element_size
    smaller = [oc for oc in PORTABLE_TILE_OCS if oc < problem.o]
    tile_ocs = [*smaller[-2:], *PORTABLE_TILE_OCS[len(smaller) : len(smaller) + 1]]
    slots = [atom, 2 * atom] if problem.c > atom else [atom]
    fits = False
    for tile_oc, slot, blocks, warps_q, warpgroups in itertools.product(tile_ocs, slots, (4, 2, 1), (4, 2, 1), (2, 1)):
        schedule = Schedule("portable", tile_oc, slot, blocks, warps_q, warpgroups)
        fits = fits or bool(_check_tiles.__wrapped__(problem, schedule, arch))
        yield schedule
    if not fits:
        for blocks, warps_q in ((1, 4), (1, 1)):
            yield Schedule("portable", tile_ocs[-1], atom, blocks, warps_q, 1, gather=True)


def _with_rings(problem: SeparableConv2dProblem, base: Schedule, arch: str) -> Iterator[Schedule]:
    """`base` with rings that fill shared memory: all weights or a few chunks of them, few or many stores staged."""
    geometry = Geometry(problem, base)
    window = geometry.window_rows(geometry.tile_p)
    # The ring never needs more than two steps of all warpgroups and the rows on their way.
    most = 2 * geometry.window_rows(geometry.tile_p * geometry.tiles_down) + 8 if geometry.slot_rows == 1 else 4
    groups = geometry.store_groups
    if groups <= 8:
        stagings = [count for count in (1, 2, 4, 8) if groups % count == 0]
    else:  # contiguous: of two buffers in turn one is free in time
        stagings = [1, groups if geometry.channels_last else 2]
    counts = {2, 3} if geometry.fills_taps else {2}  # the table of taps takes time before a stage is full
    if geometry.oc_tiles == 1:
        counts = {geometry.chunks, *(min(geometry.chunks, count) for count in counts)}
    for weight_slots in sorted(counts):
        for staging in stagings:
            partial = replace(base, weight_slots=weight_slots, staging_groups=staging, row_slots=0)
            room = archs.SHARED_BYTES[arch] - Geometry(problem, partial).shared_bytes
            rows = min(room // (geometry.slot_bytes + 16), most)
            if rows * geometry.slot_rows >= window:
                yield replace(partial, row_slots=rows)


def is_one_row(problem: SeparableConv2dProblem) -> bool:
    """Whether this is a 1-D convolution written in 2-D: its tiles lie along one row."""
    return problem.h == 1 and problem.kernel[0] == 1 and problem.p == 1


def typical(problem: SeparableConv2dProblem) -> list[SeparableConv2dProblem]:
    """The same layer at TYPICAL_SIZES, as aligned as `problem` is; 1-D convolutions at as many pixels in one row."""
    p = problem
    taps = [(k - 1) * d + 1 for k, d in zip(p.kernel, p.dilation, strict=True)]
    pads = p.padding.top + p.padding.bottom, p.padding.left + p.padding.right
    found = []
    for n, extent in TYPICAL_SIZES[p.layout]:
        extents = (1, extent * extent) if is_one_row(p) else (extent, extent)
        sizes = ((extents[i] - 1) * p.stride[i] + taps[i] - pads[i] for i in range(2))
        h, w = (min(max(size, 1), MAX_EXTENT) for size in sizes)
        found.append(replace(p, n=n, h=h, w=w, alignment=MAX_ALIGNMENT if p.alignment == MAX_ALIGNMENT else 1))
    return found


def candidates(problem: SeparableConv2dProblem, arch: str, path: str | None = None) -> list[Schedule]:
    """Legal schedules, of one path or of all: first those that the layer keeps, then the rest, both by `estimate`."""
    archs.check(arch)
    return list(_candidates(problem, arch, path))


@lru_cache(maxsize=256)
def _candidates(problem: SeparableConv2dProblem, arch: str, path: str | None) -> tuple[Schedule, ...]:
    """`candidates`, which a plan asks for several times."""
    sizes = typical(problem)
    return tuple(kept_first(problem, sizes, [for_size(size, arch, path) for size in sizes], arch, check, estimate))


@lru_cache(maxsize=1024)
def for_size(problem: SeparableConv2dProblem, arch: str, path: str | None = None) -> tuple[Schedule, ...]:
    """The schedules, of one path or of all, with the best estimates for this very size, best first."""
    paths = [name for name in PATHS if path in (None, name) and supports(problem, name, arch)]
    found = (schedule for name in paths for schedule in ranked(problem, name, arch))
    return tuple(preferred(found, lambda s: estimate(problem, s, arch)))


def preferred(schedules: Iterable, estimated: Callable[[Any], float]) -> list:
    """Schedules of both paths by their estimates, best first."""
    return sorted(schedules, key=lambda schedule: weighted(schedule, estimated(schedule)))


def weighted(schedule: Any, microseconds: float) -> float:
    """An estimate as it is compared with one of the other path."""
    return microseconds * (PORTABLE_MARGIN if schedule.path == "portable" else 1)


def kept_first(problem: Problem, sizes: list, rankings: list, arch: str, check: Callable, estimate: Callable) -> list:
    """All that is legal of the rankings of typical `sizes`: first what the layer keeps of the best of each, then the
    rest; both as preferred.
    """
    found = dict.fromkeys(itertools.chain.from_iterable(rankings))
    legal = {schedule for schedule in found if check(problem, schedule, arch)}
    best = tuple(dict.fromkeys(ranking[0] for ranking in rankings if ranking))
    # Chosen without a look at this size, so that all sizes of a layer keep the same.
    kept = [s for s in _lose_least(best, tuple(sizes), BUILDS[problem.layout], arch, check, estimate) if s in legal]
    rest = [schedule for schedule in found if schedule in legal and schedule not in kept]
    estimated = lambda schedule: estimate(problem, schedule, arch)  # noqa: E731
    return preferred(kept, estimated) + preferred(rest, estimated)


@lru_cache(maxsize=1024)
def _lose_least(best: tuple, sizes: tuple, count: int, arch: str, check: Callable, estimate: Callable) -> tuple:
    """The `count` of the schedules that lose least to the best of them all, summed over the sizes."""
    if len(best) <= count:
        return best
    losses = []
    for size in sizes:
        times = [weighted(s, estimate(size, s, arch)) if check(size, s, arch) else math.inf for s in best]
        if (least := min(times)) < math.inf:
            losses.append([time / least for time in times])
    chosen = itertools.combinations(range(len(best)), count)
    return tuple(best[i] for i in min(chosen, key=lambda some: sum(min(loss[i] for i in some) for loss in losses)))


@lru_cache(maxsize=1024)
def ranked(problem: SeparableConv2dProblem, path: str, arch: str) -> tuple[Schedule, ...]:
    """The best schedules of one path for this very size, best first. On sm90 they differ by more than their rings."""
    legal = _legal(problem, path, arch)
    found = sorted(legal, key=lambda s: (estimate(problem, s, arch), -s.row_slots, -s.staging_groups))
    if path == "portable":
        return tuple(found[:PORTABLE_CANDIDATES])
    best = {}
    for s in found:
        best.setdefault(replace(s, row_slots=1, weight_slots=1, staging_groups=1), s)
        if len(best) == SM90_CANDIDATES:
            break
    return tuple(best.values())


def packs(problem: SeparableConv2dProblem, schedule: Schedule) -> bool:
    """Whether a launch before packs weights for this problem's kernels."""
    of = problem.pointwise if schedule.apart else problem
    return Geometry(of, schedule.pointwise).pack_blocks > 0


@lru_cache(maxsize=4096)
def estimate(problem: SeparableConv2dProblem, schedule: Schedule, arch: str) -> float:
    """Estimated microseconds of a call on a large GPU: for choosing, not for predicting."""
    if schedule.apart:
        if schedule.plane_rows:
            depthwise = estimates.planes_us(PlaneGeometry(problem, schedule))
        else:
            depthwise = estimates.direct_us(DirectGeometry(problem, schedule)) - estimates.BEHIND_US
        return depthwise + estimate(problem.pointwise, schedule.pointwise, arch)
    geometry = Geometry(problem, schedule)
    if schedule.shared_x:
        return estimates.pointwise_us(geometry)
    if schedule.path == "sm90":
        return estimates.sm90_us(geometry)
    return estimates.portable_us(geometry, arch)
