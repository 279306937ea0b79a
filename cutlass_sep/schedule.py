"""Schedules: how a kernel cuts a problem into tiles, and which cuts are legal.

A schedule is CUTLASS's TileDescription (threadblock shape [output channels, pixels, channels], stages, warps, math instruction, compute
capability) plus what CUTLASS does not know: path, pixel-tile shape, rings. `Geometry` is the arithmetic that follows from a problem
and a schedule; the templates do the same arithmetic and the translation unit asserts that both agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from . import arch as archs
from .problem import KERNEL_DTYPES, SeparableConv2dProblem

if TYPE_CHECKING:
    from cutlass_library import TileDescription

PATHS = ("sm90", "portable")
#: Widths (output channels) of the wgmma instructions that CuTe's basic set has.
TILE_OCS = (8, 16, 32, 64, 96, 128, 192, 256)
#: Registers of a consumer thread by number of consumer warpgroups (setmaxnreg; see templates/separable2d_sm90.cuh).
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}


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
    row_slots: int = 1  # sm90: rows of x in the ring
    weight_slots: int = 1  # sm90: chunks of weights in the ring
    staging_groups: int = 0  # sm90, channels_last: 128-byte groups of output channels staged at a time
    gather: bool = False  # portable: x is read from global memory tap by tap instead of through a tile in shared memory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Schedule:
        return cls(**data)

    def tile_description(self, problem: SeparableConv2dProblem) -> TileDescription:
        """This schedule as CUTLASS describes it, for `problem`'s data type."""
        from cutlass_library import TileDescription

        geometry = Geometry(problem, self)
        minimum, maximum = (90, 90) if self.path == "sm90" else (80, 1024)
        return TileDescription(
            [self.tile_oc, geometry.tile_p * geometry.tile_q * self.warpgroups, self.slot_channels],
            self.row_slots,
            [1, 4 * self.warpgroups, 1],
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
    """CUTLASS's MathInstruction of the pointwise GEMM: wgmma 64 x tile_oc x k on sm90, mma.sync 16 x 8 x k on portable."""
    from cutlass_library import DataType, MathInstruction, MathOperation, OpcodeClass

    element = {"float32": DataType.tf32, "float16": DataType.f16, "bfloat16": DataType.bf16}[problem.dtype]
    k = 8 if problem.dtype == "float32" else 16
    shape = [64, schedule.tile_oc, k] if schedule.path == "sm90" else [16, 8, k]
    return MathInstruction(shape, element, element, DataType.f32, OpcodeClass.TensorOp, MathOperation.multiply_add)


@dataclass(frozen=True)
class Geometry:
    """What follows from a problem and a schedule. Mirrors templates/problem.cuh and the layout struct of each kernel."""

    problem: SeparableConv2dProblem
    schedule: Schedule

    @property
    def channels_last(self) -> bool:
        return self.problem.layout == "channels_last"

    @property
    def split(self) -> bool:
        """Whether operands are split in hi and lo (fp32-grade arithmetic on TF32 tensor cores)."""
        return self.problem.fp32_precision == "ieee"

    @property
    def mma_channels(self) -> int:
        return 32 // self.problem.element_size

    @property
    def mma_steps(self) -> int:
        """MMA steps issued together: 16 channels."""
        return 16 // self.mma_channels

    @property
    def lane_q(self) -> int:
        return 2 if self.pixel_major else 2 * self.schedule.blocks

    @property
    def lane_p(self) -> int:
        return self.schedule.blocks if self.pixel_major else 1

    @property
    def pixel_major(self) -> bool:
        """Whether shared memory holds x as [pixel][channel]: always on portable, which transposes while it loads."""
        return self.channels_last or self.schedule.path == "portable"

    @property
    def tile_q(self) -> int:
        """Output columns of a warpgroup's tile."""
        return 8 * self.lane_q * self.schedule.warps_q

    @property
    def tile_p(self) -> int:
        """Output rows of a warpgroup's tile."""
        return 4 // self.schedule.warps_q * self.lane_p

    def window_rows(self, p: int) -> int:
        return (p - 1) * self.problem.stride[0] + (self.problem.kernel[0] - 1) * self.problem.dilation[0] + 1

    def window_cols(self, q: int) -> int:
        return (q - 1) * self.problem.stride[1] + (self.problem.kernel[1] - 1) * self.problem.dilation[1] + 1

    @property
    def chunks(self) -> int:
        return -(-self.problem.c // self.schedule.slot_channels)

    @property
    def oc_tiles(self) -> int:
        return -(-self.problem.o // self.schedule.tile_oc)

    @property
    def march(self) -> bool:
        """Whether a work item is marched down its strip, sharing rows of x in the ring."""
        return self.chunks == 1

    @property
    def phase(self) -> int:
        """Columns from the start of a contiguous row in shared memory to the first pixel's first tap: TMA starts on 16-byte boundaries."""
        return -self.problem.padding[2] % (16 // self.problem.element_size)

    @property
    def columns(self) -> int:
        """Columns of a row in shared memory on sm90."""
        if self.channels_last:
            return self.window_cols(self.tile_q)
        size = self.problem.element_size
        unit = 16 // size
        size_bytes = -(-(self.phase + self.window_cols(self.tile_q)) // unit) * unit * size
        rest = size_bytes % 128
        return (size_bytes + (32 if rest <= 32 else 96 if rest <= 96 else 160) - rest) // size

    @property
    def row_bytes(self) -> int:
        if self.channels_last:
            return self.atoms * _round_up(self.columns * 128, 1024)
        return _round_up(self.schedule.slot_channels * self.columns * self.problem.element_size, 1024)

    @property
    def atoms(self) -> int:
        """128-byte groups of channels in a pass."""
        return self.schedule.slot_channels * self.problem.element_size // 128

    @property
    def stage_bytes(self) -> int:
        """Packed weights of one pass (templates/pack_weights.cuh)."""
        pointwise = self.atoms * (2 if self.split else 1) * self.schedule.tile_oc * 128
        return _round_up(pointwise + self.depthwise_weight_bytes, 1024)

    @property
    def depthwise_weight_bytes(self) -> int:
        """Depthwise weights of one pass (struct DepthwiseWeights of templates/depthwise_operand.cuh)."""
        lane_channels = 8 // self.problem.element_size
        row_units = -(-self.problem.kernel[1] * lane_channels // 4)
        return self.schedule.slot_channels // lane_channels * ((self.problem.kernel[0] * row_units + 1) | 1) * 16

    @property
    def workspace_bytes(self) -> int:
        stages = self.oc_tiles * self.chunks
        return _round_up(stages * self.stage_bytes + self.oc_tiles * self.schedule.tile_oc * 4 + stages * 4, 256)

    @property
    def store_bytes(self) -> int:
        """Bytes of output channels in one row of the epilogue's staging buffer."""
        total = self.schedule.tile_oc * self.problem.element_size
        return next(width for width in (128, 64, 32, 16) if total % width == 0)

    @property
    def staging_bytes(self) -> int:
        if not self.channels_last:
            return 0
        warp = self.schedule.blocks * self.schedule.staging_groups * _round_up(16 * self.store_bytes, 1024)
        return 4 * self.schedule.warpgroups * warp

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the main kernel."""
        s = self.schedule
        if s.path == "portable":
            raise NotImplementedError
        barriers = 2 * (s.row_slots + s.weight_slots) * 8
        return s.row_slots * self.row_bytes + s.weight_slots * self.stage_bytes + self.staging_bytes + barriers + 1024

    @property
    def vector_store(self) -> bool:
        """contiguous: whether a lane's adjacent pixels of one output channel are stored as one vector."""
        return self.problem.alignment == 16

    @property
    def threads(self) -> int:
        return 128 * (self.schedule.warpgroups + (self.schedule.path == "sm90"))

    @cached_property
    def registers(self) -> int:
        """Rough count of registers a consumer thread needs: accumulators, fragments and the depthwise window."""
        s = self.schedule
        accumulators = s.blocks * s.tile_oc // 2 * (2 if self.split and self.chunks > 1 else 1)
        lane_channels = 8 // self.problem.element_size
        values = s.blocks * 2 * lane_channels * self.mma_steps
        fragments = s.blocks * 4 * self.mma_steps * (2 if self.split else 1)
        window = self.window_cols(self.lane_q) * (lane_channels if self.pixel_major else 1)
        return accumulators + values + fragments + window + 40


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def supports(problem: SeparableConv2dProblem, path: str, arch: str) -> Support:
    """Whether `path` has a kernel for `problem` on `arch`, and if not, why not. The one predicate of API, planner, tuner and tests."""
    if path not in PATHS:
        raise ValueError(f"path={path!r} is unknown; it must be one of {', '.join(map(repr, PATHS))} here ('torch' always runs)")
    archs.check(arch)
    if problem.dtype not in KERNEL_DTYPES:
        return Support(False, f"dtype {problem.dtype} has no kernels")
    if path == "sm90":
        if arch != "sm_90a":
            return Support(False, f"path sm90 needs wgmma and TMA of sm_90a, the target is {arch}")
        if problem.alignment < 16:
            inner = "C and O" if problem.layout == "channels_last" else "W and Q"
            return Support(False, f"TMA needs 16-byte aligned tensors and rows: {inner} times {problem.element_size} bytes, and the addresses")
        if next(_legal(problem, path, arch), None) is None:
            return Support(False, "no tile's window of x and weights fit into shared memory and registers")
        return Support(True)
    return Support(True)


def check(problem: SeparableConv2dProblem, schedule: Schedule, arch: str) -> Support:
    """Whether this schedule can run this problem on `arch`, and if not, why not."""
    geometry = Geometry(problem, schedule)
    if schedule.slot_channels * problem.element_size % 128:
        return Support(False, f"slot_channels={schedule.slot_channels} is no multiple of 128 bytes")
    if schedule.path == "sm90":
        if geometry.split and schedule.slot_channels > 64:
            return Support(False, "fp32-grade sums leave the tensor core at least every 64 channels")
        if schedule.row_slots < geometry.window_rows(geometry.tile_p):
            return Support(False, f"{schedule.row_slots} row slots hold no window of {geometry.window_rows(geometry.tile_p)} rows")
        if geometry.columns > 256:
            return Support(False, f"a row of {geometry.columns} columns exceeds TMA's box of 256")
        if geometry.registers > CONSUMER_REGISTERS[schedule.warpgroups]:
            return Support(False, f"about {geometry.registers} registers a thread, {CONSUMER_REGISTERS[schedule.warpgroups]} at hand")
        if geometry.shared_bytes > archs.SHARED_BYTES[arch]:
            return Support(False, f"{geometry.shared_bytes} bytes of shared memory, {archs.SHARED_BYTES[arch]} at hand")
    return Support(True)


def _legal(problem: SeparableConv2dProblem, path: str, arch: str) -> Iterator[Schedule]:
    """Legal schedules of one path, unordered."""
    for schedule in _enumerate(problem, path, arch):
        if check(problem, schedule, arch):
            yield schedule


def _enumerate(problem: SeparableConv2dProblem, path: str, arch: str) -> Iterator[Schedule]:
    atom = 128 // problem.element_size
    padded = _round_up(problem.c, atom)
    tile_ocs = [oc for oc in TILE_OCS if oc < problem.o] [-2:] + [oc for oc in TILE_OCS if oc >= problem.o][:1]
    slots = {atom, padded} | {m * atom for m in (2, 4) if m * atom < padded}
    for tile_oc, slot, blocks, warps_q, warpgroups in itertools.product(
        reversed(tile_ocs), sorted(slots, reverse=True), (2, 1), (4, 2, 1), (2, 3, 1)
    ):
        base = Schedule(path, tile_oc, slot, blocks, warps_q, warpgroups)
        yield from _with_rings(problem, base, arch)


def _with_rings(problem: SeparableConv2dProblem, base: Schedule, arch: str) -> Iterator[Schedule]:
    """`base` with rings that fill shared memory: all weights resident if that leaves room for the rows, else two chunks at a time."""
    from dataclasses import replace

    geometry = Geometry(problem, base)
    if base.slot_channels * problem.element_size % 128:
        return
    groups = base.tile_oc * problem.element_size // geometry.store_bytes if geometry.channels_last else 0
    for weight_slots in sorted({geometry.chunks, 2} if geometry.oc_tiles == 1 else {2}, reverse=True):
        for staging in sorted({groups, 1 if groups else 0}, reverse=True):
            partial = replace(base, weight_slots=weight_slots, staging_groups=staging, row_slots=0)
            room = archs.SHARED_BYTES[arch] - Geometry(problem, partial).shared_bytes
            window = geometry.window_rows(geometry.tile_p)
            wanted = geometry.window_rows(geometry.tile_p * base.warpgroups)
            rows = room // (geometry.row_bytes + 16) if room > 0 else 0
            # The ring never needs more than the rows of two steps ahead.
            rows = min(rows, 2 * wanted + 8)
            if rows >= window:
                yield replace(partial, row_slots=rows)
                break


def candidates(problem: SeparableConv2dProblem, arch: str, path: str | None = None) -> list[Schedule]:
    """Legal schedules, best first by an estimate of bytes, arithmetic and waves (`_cost`)."""
    paths = PATHS if path is None else (path,)
    found = [s for name in paths if supports(problem, name, arch) for s in _legal(problem, name, arch)]
    return sorted(found, key=lambda s: _cost(problem, s))


def _cost(problem: SeparableConv2dProblem, schedule: Schedule) -> float:
    """Relative cost: pixels computed (with those past the edges) times rows re-read, over what runs at once."""
    g = Geometry(problem, schedule)
    return 0.0
