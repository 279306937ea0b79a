"""Schedules of the 1-D block: which form and tiles run a problem, and which are legal.

The fused form is one kernel (templates/block1d_sm90.cuh). The two-kernel form is two kernels of the separable operator
on maps of one row: a pointwise one, and one whose depthwise stage reads the hidden channels that the first left in the
workspace (so that its zero padding is that of the hidden channels), with the residual in its epilogue. The second one
is in fact two where its depthwise stage is a kernel of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import arch as archs
from . import estimate as estimates
from . import schedule as separable
from .problem import KERNEL_DTYPES, MAX_ALIGNMENT, SeparableBlock1dProblem, SeparableConv2dProblem, round_up
from .schedule import PATHS, Schedule, Support

if TYPE_CHECKING:
    from cutlass_library import MathInstruction, TileDescription

FORMS = ("fused", "two_kernel")
#: fused: hidden channels of a chunk, and tiles of output channels.
FUSED_CHUNK = 64
#: fused: positions of x that a block of the launch before turns to fp16 (templates/half_operands.cuh).
PACK_POSITIONS = 32
FUSED_TILE_OCS = (16, 32, 64, 96, 128, 192, 256)
#: fused: columns of the first GEMM whose sums fit into the registers of its warpgroup, by parts of an operand.
MOST_POSITIONS = {1: 176, 2: 80}
#: Sizes (sequences, positions) whose best schedules a block's calls choose from; see TYPICAL_SIZES.
TYPICAL_LENGTHS = {
    "channels_last": (*itertools.product((1, 32), (64, 256, 1024, 4096)), (32, 16384)),
    "contiguous": ((1, 1024), (32, 4096)),
}
#: Of each of the two kernels, how many of the best schedules are combined.
_EACH = 3


@dataclass(frozen=True)
class FusedTile:
    """The fused form's tile and its rings in shared memory."""

    tile_oc: int  # output channels: all of them
    hidden_slots: int  # chunks of 64 hidden channels
    project_slots: int  # chunks of project weights, of half of the output channels where those are more than 128
    expand_slots: int  # tiles of 64 x 64 expand weights

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class BlockSchedule:
    """One way to run a block. two_kernel: `expand` and `project`, a schedule for each kernel. fused: `tile`."""

    form: str
    path: str
    expand: Schedule | None = None
    project: Schedule | None = None
    tile: FusedTile | None = None

    def to_json(self) -> dict[str, Any]:
        parts = {"expand": self.expand, "project": self.project, "tile": self.tile}
        return {"form": self.form, "path": self.path} | {k: v.to_json() for k, v in parts.items() if v is not None}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BlockSchedule:
        """The schedule that `to_json` wrote. ValueError for anything else; values are unchecked."""
        try:
            data = dict(data)
            for name, part in (
                ("expand", Schedule.from_json),
                ("project", Schedule.from_json),
                ("tile", _tile_from_json),
            ):
                if data.get(name) is not None:
                    data[name] = part(data[name])
            return cls(**data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"schedule must be what BlockSchedule.to_json writes; got {data!r} ({error})") from None

    def tile_description(self, problem: SeparableBlock1dProblem) -> TileDescription:
        """The tile of the second GEMM as CUTLASS describes it, for `problem`'s data type."""
        if self.tile is None:
            return self.project.tile_description(problem.project)
        from cutlass_library import TileDescription

        geometry = FusedGeometry(problem, self.tile)
        shape = [self.tile.tile_oc, geometry.tile_positions, FUSED_CHUNK]
        return TileDescription(shape, self.tile.hidden_slots, [1, 8, 1], geometry.math_instruction, 90, 90)


def _tile_from_json(data: dict[str, Any]) -> FusedTile:
    return FusedTile(**data)


@dataclass(frozen=True)
class FusedGeometry:
    """What follows from a block and a fused tile. Mirrors struct BlockLayout of templates/block1d_sm90.cuh."""

    problem: SeparableBlock1dProblem
    tile: FusedTile

    @property
    def channels_last(self) -> bool:
        return self.problem.layout == "channels_last"

    @property
    def scaled(self) -> bool:
        """Whether MMAs take tensors as fp16 with scales (templates/half_operands.cuh): those of fp32."""
        return self.problem.dtype == "float32"

    @property
    def pixel_major(self) -> bool:
        """Whether TMA brings x as [position][channel]: in channels_last, and scaled, where packing turns it."""
        return self.channels_last or self.scaled

    @property
    def parts(self) -> int:
        """fp16 numbers that an MMA's operand is the sum of: two for fp32-grade products."""
        return 2 if self.problem.fp32_precision == "ieee" else 1

    @property
    def tile_positions(self) -> int:
        return 128 // self.parts

    @property
    def operand(self) -> str:
        """dtype of the MMAs' operands."""
        return "float16" if self.scaled else self.problem.dtype

    @property
    def math_instruction(self) -> MathInstruction:
        """CUTLASS's MathInstruction of the second GEMM: wgmma, two side by side where a tile is wider than 128."""
        from cutlass_library import DataType, MathInstruction, MathOperation, OpcodeClass

        element = {"float16": DataType.f16, "bfloat16": DataType.bf16}[self.operand]
        columns = self.half_oc
        operation = MathOperation.multiply_add
        return MathInstruction([64, columns, 16], element, element, DataType.f32, OpcodeClass.TensorOp, operation)

    @property
    def halves(self) -> int:
        """Instructions side by side that the output channels take. In two parts, each is a warpgroup's."""
        return 2 if self.parts == 2 or self.tile.tile_oc > 128 else 1

    @property
    def half_oc(self) -> int:
        return self.tile.tile_oc // self.halves

    @property
    def lane_oc(self) -> int:
        """Output channels side by side that a lane of a project warpgroup has.

        wgmma gives it two; channels_last, the rows of the project weights come in an order that makes them more.
        """
        if not self.channels_last:
            return 2
        return next((oc for oc in (8, 4) if self.problem.o % (4 * oc) == 0 == self.half_oc % (4 * oc)), 2)

    @property
    def chunks(self) -> int:
        return -(-self.problem.e // FUSED_CHUNK)

    @property
    def halo(self) -> int:
        return self.problem.dilation * (self.problem.kernel - 1)

    @property
    def phase(self) -> int:
        """Positions from the start of the window to the first tap: TMA starts on 16 bytes, unless x is pixel-major;
        positions that share a scale come in pairs.
        """
        if self.pixel_major:
            return self.problem.pads[0] % 2 if self.scaled else 0
        return -self.problem.pads[0] % 8

    @property
    def positions(self) -> int:
        """Positions of the window, columns of the first GEMM."""
        return round_up(self.phase + self.tile_positions + self.halo, 8 if self.pixel_major else 16)

    @property
    def expand_atoms(self) -> int:
        """Groups of 64 channels of x."""
        return -(-self.problem.c // 64)

    @property
    def expand_slot_bytes(self) -> int:
        return self.parts * 64 * 128

    @property
    def reach(self) -> int:
        """Positions from the start of a row of hidden channels to the end of the first output's taps."""
        return self.phase % 2 + self.halo + 1

    @property
    def depthwise_mmas(self) -> int:
        """mma.sync instructions that the depthwise outputs of a channel take."""
        return -(-(self.reach + 7) // 16)

    @property
    def taps_bytes(self) -> int:
        """Packed taps of a chunk (struct ToeplitzTaps of templates/toeplitz_depthwise.cuh), and what is known of its
        channels.
        """
        of_channels = self.scaled * 64 * 12  # (struct HiddenChannel of templates/numeric.cuh)
        if self.parts == 2:  # (struct Fp32Taps of templates/fp32_depthwise.cuh)
            return 64 * round_up(1 + self.problem.kernel, 4) * 4 + of_channels
        return 16 * (self.reach + 3 + self.scaled) * 16 + of_channels

    # Scaled: where parts of the packed weights start (struct HalfOperands of templates/half_operands.cuh).

    @property
    def packed_expand(self) -> int:
        return self.chunks * self.taps_bytes

    @property
    def packed_project(self) -> int:
        return self.packed_expand + round_up(self.parts * self.problem.e * self.problem.c * 2, 256)

    @property
    def packed_scales(self) -> int:
        return self.packed_project + round_up(self.parts * self.problem.o * self.problem.e * 2, 256)

    @property
    def workspace_bytes(self) -> int:
        """Packed weights."""
        if not self.scaled:
            return self.chunks * self.taps_bytes
        return round_up(self.packed_scales + self.tile.tile_oc * 4 + -(-self.problem.e // 16) * 8, 256)

    @property
    def x_bytes(self) -> int:
        """Bytes of the workspace before the packed weights: scaled, x in fp16 and the scales of its positions."""
        p = self.problem
        if not self.scaled:
            return 0
        return round_up(self.parts * p.n * p.c * p.l * 2, 256) + round_up(p.n * -(-p.l // 8) * 4, 256)

    @property
    def weight_blocks(self) -> int:
        """Blocks of pack_weights that pack weights."""
        return -(-self.problem.e // 16) + -(-self.problem.o // 16) if self.scaled else self.chunks

    @property
    def pack_blocks(self) -> int:
        """Blocks of pack_weights."""
        x_blocks = self.problem.n * -(-self.problem.l // PACK_POSITIONS) if self.scaled else 0
        return self.weight_blocks + x_blocks

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the kernel."""
        t = self.tile
        rows = 2 * 64 * 128 + (2 * self.depthwise_mmas - 1) * 64 * 16
        if self.parts == 2:
            rows = 64 * self.positions * 4
        hidden = t.hidden_slots * round_up(rows + self.taps_bytes, 1024)
        x = round_up(self.parts * self.expand_atoms * 64 * 2 * self.positions, 1024)
        expand = t.expand_slots * self.expand_slot_bytes
        barriers = (2 * (self.expand_atoms + t.project_slots) + 4 * t.expand_slots + 10 * t.hidden_slots) * 8
        project = t.project_slots * self.half_oc * 128
        outputs = t.tile_oc * 4 + self.scaled * (t.tile_oc * 4 + 8 + 8 * t.hidden_slots)
        return x + expand + project + hidden + outputs + barriers

    @property
    def threads(self) -> int:
        return 512

    @property
    def tiles(self) -> int:
        """Work items of a launch."""
        return self.problem.n * -(-self.problem.l // self.tile_positions)


def typical(problem: SeparableBlock1dProblem) -> list[SeparableBlock1dProblem]:
    """The same block at TYPICAL_LENGTHS, as aligned as `problem` is."""
    alignment = MAX_ALIGNMENT if problem.alignment == MAX_ALIGNMENT else 1
    return [replace(problem, n=n, l=length, alignment=alignment) for n, length in TYPICAL_LENGTHS[problem.layout]]


def supports(problem: SeparableBlock1dProblem, path: str, arch: str, form: str | None = None) -> Support:
    """Whether `path` has a kernel of `form` (None: of any) for `problem` on `arch`, and if not, why not.

    Raises ValueError for a path, a form or an arch that does not exist.
    """
    if path not in PATHS:
        known = ", ".join(map(repr, PATHS))
        raise ValueError(f"path={path!r} is unknown; it must be one of {known} here ('torch' always runs)")
    if form not in (None, *FORMS):
        raise ValueError(f"form={form!r} is unknown; it must be None or one of {', '.join(map(repr, FORMS))}")
    archs.check(arch)
    if problem.dtype not in KERNEL_DTYPES:
        return Support(False, f"dtype {problem.dtype} has no kernels")
    if form == "fused":
        return _supports_fused(problem, path, arch)
    for name, half in (("expand", problem.expand), ("project", problem.project)):
        if not (support := separable.supports(half, path, arch, _rows(problem))):
            if form is None and _supports_fused(problem, path, arch):
                return Support(True)
            return Support(False, f"kernel {name}: {support.reason}")
    return Support(True)


def _rows(problem: SeparableBlock1dProblem) -> dict[str, int]:
    """Extents of the innermost dimensions of x, of the hidden channels and of y, by letter."""
    p = problem
    return {"C": p.c, "E": p.e, "O": p.o} if p.layout == "channels_last" else {"L": p.l}


def _supports_fused(problem: SeparableBlock1dProblem, path: str, arch: str) -> Support:
    if (reason := _fused_out_of_reach(problem, path, arch)) is not None:
        return Support(False, reason)
    if not _fused(problem, arch):
        return Support(False, "x, the weights and the hidden channels of a tile do not fit into shared memory")
    return Support(True)


def _fused_out_of_reach(problem: SeparableBlock1dProblem, path: str, arch: str) -> str | None:
    """Why no fused schedule can run this problem, whatever its rings are; None if one may."""
    p = problem
    if path != "sm90" or arch != "sm_90a":
        return f"the fused form needs path sm90 and sm_90a, not {arch if path == 'sm90' else 'path ' + path}"
    if p.alignment < MAX_ALIGNMENT or (p.element_size == 2 and (p.c % 8 or p.e % 8)):
        return separable.unaligned(p, {"C": p.c, "E": p.e} | _rows(p), "form two_kernel on path portable")
    if odd := [f"{name} = {extent}" for name, extent in (("C", p.c), ("E", p.e)) if extent % 8]:
        what = "is no multiple" if len(odd) == 1 else "are no multiples"
        return f"rows of fp16 that TMA copies are 16 bytes: {', '.join(odd)} {what} of 8; pad, or take form two_kernel"
    if p.o > FUSED_TILE_OCS[-1]:
        return f"{p.o} output channels exceed the {FUSED_TILE_OCS[-1]} whose sums the registers hold"
    geometry = FusedGeometry(p, _least_tile(p))
    if geometry.positions > (most := MOST_POSITIONS[geometry.parts]):
        return f"a halo of {geometry.halo} positions makes windows of {geometry.positions}: at most {most}"
    if max(p.n, p.l, p.e) > separable.MAX_EXTENT or max(geometry.tiles, geometry.pack_blocks) >= separable.MOST_ITEMS:
        return "kernels count in 32 bits"
    widest = FusedGeometry(p, replace(_least_tile(p), tile_oc=FUSED_TILE_OCS[-1]))
    if widest.workspace_bytes >= 2**31:  # the template counts its bytes in int
        return f"{p.e} hidden channels make {widest.workspace_bytes} bytes of packed weights: less than 2 GiB fit"
    return None


def _least_tile(problem: SeparableBlock1dProblem) -> FusedTile:
    """Rings in which one slot fills while another is in use, since project weights are given back when the MMAs of the
    next ones have been issued; a slot more where a chunk takes two of them, and a chunk of hidden channels more, as two
    are in use. In two parts one chunk of project weights: each warpgroup has a slot for either part of its own.
    """
    tile_oc = next((oc for oc in FUSED_TILE_OCS if oc >= problem.o), FUSED_TILE_OCS[-1])
    if problem.fp32_precision == "ieee":
        return FusedTile(tile_oc, hidden_slots=2, project_slots=4, expand_slots=2)
    return FusedTile(tile_oc, hidden_slots=3, project_slots=3 if tile_oc > 128 else 2, expand_slots=2)


@lru_cache(maxsize=1024)
def _fused(problem: SeparableBlock1dProblem, arch: str) -> tuple[BlockSchedule, ...]:
    """The fused schedules that fit, the fastest first: more project weights where there is room for them, more chunks
    of hidden channels, or more expand weights.
    """
    found = []
    least = _least_tile(problem)
    halves, parts = FusedGeometry(problem, least).halves, FusedGeometry(problem, least).parts
    if parts == 2:
        rings = ((2, 4), (3, 4))
    elif halves == 1:
        rings = ((3, 3), (3, 2), (4, 2))
    else:  # fp32, whose depthwise stage takes longer, gains from more hidden channels
        rings = ((3, 6), (4, 3), (3, 3), (3, 4)) if problem.dtype == "float32" else ((3, 6), (3, 3), (4, 3), (3, 4))
    for hidden, project in rings:
        tile = replace(least, hidden_slots=hidden, project_slots=project, expand_slots=0)
        geometry = FusedGeometry(problem, tile)
        room = archs.SHARED_BYTES[arch] - geometry.shared_bytes
        slots = min(room // (geometry.expand_slot_bytes + 32), 2 * geometry.expand_atoms)
        if slots > geometry.expand_atoms:  # a slot always has the same channels
            slots -= slots % geometry.expand_atoms
        if slots >= 2:
            found.append(BlockSchedule("fused", "sm90", tile=replace(tile, expand_slots=slots)))
    return tuple(found)


def check(problem: SeparableBlock1dProblem, schedule: BlockSchedule, arch: str) -> Support:
    """Whether this schedule can run this problem on `arch`, and if not, why not."""
    if schedule.form not in FORMS:
        return Support(False, f"form={schedule.form!r} must be one of {', '.join(map(repr, FORMS))}")
    parts = {"expand": Schedule, "project": Schedule} if schedule.form == "two_kernel" else {"tile": FusedTile}
    for name in ("expand", "project", "tile"):
        part = getattr(schedule, name)
        if type(part) is not parts.get(name, type(None)):
            wanted = f"a {parts[name].__name__}" if name in parts else "None"
            return Support(False, f"{name} must be {wanted} in form {schedule.form}, got {part!r}")
    if schedule.form == "fused":
        return _check_fused(problem, schedule, arch)
    for name, half in (("expand", problem.expand), ("project", problem.project)):
        part = getattr(schedule, name)
        if part.path != schedule.path:
            return Support(False, f"kernel {name} is scheduled for path {part.path}, the block for {schedule.path}")
        if not (support := separable.check(half, part, arch, _rows(problem))):
            return Support(False, f"kernel {name}: {support.reason}")
    return Support(True)


def _check_fused(problem: SeparableBlock1dProblem, schedule: BlockSchedule, arch: str) -> Support:
    if (reason := _fused_out_of_reach(problem, schedule.path, arch)) is not None:
        return Support(False, reason)
    least = _least_tile(problem).to_json()
    for name, value in schedule.tile.to_json().items():
        if type(value) is not int or value < least[name]:
            return Support(False, f"{name}={value!r} must be an integer of at least {least[name]}")
    if schedule.tile.tile_oc not in FUSED_TILE_OCS:
        return Support(False, f"tile_oc={schedule.tile.tile_oc} must be one of {', '.join(map(str, FUSED_TILE_OCS))}")
    geometry = FusedGeometry(problem, schedule.tile)
    if geometry.parts == 2 and schedule.tile.project_slots != 4:
        return Support(False, f"project_slots={schedule.tile.project_slots} must be 4: two parts for two warpgroups")
    shared_bytes = geometry.shared_bytes
    if shared_bytes > archs.SHARED_BYTES[arch]:
        return Support(False, f"{shared_bytes} bytes of shared memory, {archs.SHARED_BYTES[arch]} at hand")
    return Support(True)


def candidates(
    problem: SeparableBlock1dProblem, arch: str, path: str | None = None, form: str | None = None
) -> list[BlockSchedule]:
    """Legal schedules, of one path and form or of all: first those that the block keeps, then the rest, both by
    `estimate`.
    """
    archs.check(arch)
    sizes = typical(problem)
    rankings = [for_size(size, arch, path, form) for size in sizes]
    return separable.kept_first(problem, sizes, rankings, arch, check, estimate)


@lru_cache(maxsize=1024)
def for_size(
    problem: SeparableBlock1dProblem, arch: str, path: str | None = None, form: str | None = None
) -> tuple[BlockSchedule, ...]:
    """The schedules, of one path and form or of all, with the best estimates for this very size, best first."""
    found = []
    for name in PATHS:
        if path not in (None, name):
            continue
        if form in (None, "fused") and _supports_fused(problem, name, arch):
            found += _fused(problem, arch)
        if form in (None, "two_kernel") and supports(problem, name, arch, "two_kernel"):
            found += _two_kernel(problem, name, arch)
    return tuple(separable.preferred(found, lambda schedule: estimate(problem, schedule, arch)))


def _two_kernel(problem: SeparableBlock1dProblem, path: str, arch: str) -> list[BlockSchedule]:
    def best(half: SeparableConv2dProblem) -> list[Schedule]:
        return separable.ranked(half, path, arch)[:_EACH]

    expands, projects = best(problem.expand), best(problem.project)
    return [BlockSchedule("two_kernel", path, expand, project) for project in projects for expand in expands]


def estimate(problem: SeparableBlock1dProblem, schedule: BlockSchedule, arch: str) -> float:
    """Estimated microseconds of a call on a large GPU: for choosing, not for predicting."""
    if schedule.form == "fused":
        return estimates.fused_us(FusedGeometry(problem, schedule.tile))
    halves = ((problem.expand, schedule.expand), (problem.project, schedule.project))
    both_pack = all(separable.packs(half, part) for half, part in halves)  # by one launch
    total = sum(separable.estimate(half, part, arch) for half, part in halves)
    return total - estimates.SHARED_US - estimates.PACKING_US * both_pack
