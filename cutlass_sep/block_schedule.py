"""Schedules of the 1-D block: which form and tiles run a problem, and which are legal.

The fused form is one kernel (templates/block1d_sm90.cuh). The two-kernel form is two kernels of the separable operator
on maps of one row: a pointwise one, and one whose depthwise stage reads the hidden channels that the first left in the
workspace (so that its zero padding is that of the hidden channels), with the residual in its epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import arch as archs
from . import estimate as estimates
from . import schedule as separable
from .problem import KERNEL_DTYPES, MAX_ALIGNMENT, SeparableBlock1dProblem
from .schedule import PATHS, Geometry, Schedule, Support

if TYPE_CHECKING:
    from cutlass_library import TileDescription

FORMS = ("fused", "two_kernel")
#: fused: positions of a tile (two warpgroups of 64), and tiles of output channels.
FUSED_TILE = 128
FUSED_TILE_OCS = (16, 32, 64, 96, 128, 192, 256)
#: fused: columns of the first GEMM whose sums fit into the registers of its warpgroup.
MOST_POSITIONS = 144
#: The lengths that stand for all in the choice of a schedule.
SHORT, LONG = 256, 4096
#: Of each of the two kernels, how many of the best schedules are combined.
_EACH = 3


@dataclass(frozen=True)
class BlockSchedule:
    """One way to run a block. two_kernel: a schedule for each kernel.

    fused: `project` states the tile of the second GEMM (its `row_slots` hold hidden channels instead of rows of x).
    """

    form: str
    path: str
    project: Schedule
    expand: Schedule | None = None  # two_kernel
    expand_slots: int = 0  # fused: 64 x 64 tiles of expand weights in the ring

    def to_json(self) -> dict[str, Any]:
        data = {"form": self.form, "path": self.path, "project": self.project.to_json()}
        if self.form == "fused":
            return data | {"expand_slots": self.expand_slots}
        return data | {"expand": self.expand.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BlockSchedule:
        """The schedule that `to_json` wrote. ValueError for anything else; values are unchecked."""
        try:
            parts = {k: Schedule.from_json(v) if k in ("expand", "project") else v for k, v in data.items()}
            return cls(**parts)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"schedule must be what BlockSchedule.to_json writes; got {data!r} ({error})") from None

    def tile_description(self, problem: SeparableBlock1dProblem) -> TileDescription:
        """The tile of the second GEMM as CUTLASS describes it, for `problem`'s data type."""
        return self.project.tile_description(problem.project)


@dataclass(frozen=True)
class FusedGeometry(Geometry):
    """What follows from a block and a fused schedule. Mirrors struct BlockLayout of templates/block1d_sm90.cuh.

    `problem` and `schedule` are those of the second GEMM, to which a slot of hidden channels is a row of x.
    """

    block: SeparableBlock1dProblem
    expand_slots: int

    @classmethod
    def of(cls, block: SeparableBlock1dProblem, schedule: BlockSchedule) -> FusedGeometry:
        return cls(block.project, schedule.project, block, schedule.expand_slots)

    @property
    def pixel_major(self) -> bool:
        return True

    @property
    def phase(self) -> int:
        """Positions from the start of the window to the first tap: contiguous TMA starts on 16 bytes."""
        return 0 if self.channels_last else -self.block.pads[0] % 8

    @property
    def positions(self) -> int:
        """Positions of the window, columns of the first GEMM."""
        needed = self.phase + FUSED_TILE + self.block.dilation * (self.block.kernel - 1)
        return _round_up(needed, 8 if self.channels_last else 16)

    @property
    def expand_atoms(self) -> int:
        """Groups of 64 channels of x."""
        return -(-self.block.c // 64)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the kernel."""
        s = self.schedule
        x = self.expand_atoms * 64 * 2 * self.positions
        hidden = _round_up(self.positions * 128, 1024)
        barriers = 2 * (1 + self.expand_slots + s.row_slots + s.weight_slots) * 8
        return x + self.expand_slots * 64 * 128 + s.row_slots * hidden + s.weight_slots * self.stage_bytes + barriers

    @property
    def threads(self) -> int:
        return 512

    @property
    def tiles(self) -> int:
        """Work items of a launch."""
        return self.block.n * -(-self.block.l // FUSED_TILE)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def representative(problem: SeparableBlock1dProblem) -> SeparableBlock1dProblem:
    """The problem that stands for `problem` in the choice of a schedule: the same layer at one of two lengths."""
    aligned = problem.alignment == MAX_ALIGNMENT
    length = LONG if problem.l > SHORT else SHORT
    return replace(problem, n=32, l=length, alignment=MAX_ALIGNMENT if aligned else 1)


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
        if not (support := separable.supports(half, path, arch)):
            if form is None and _supports_fused(problem, path, arch):
                return Support(True)
            return Support(False, f"kernel {name}: {support.reason}")
    return Support(True)


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
        return f"the fused form is there on path sm90 for sm_90a alone, not on path {path} for {arch}"
    if p.element_size != 2:
        return f"the fused form takes 16-bit tensors, not {p.dtype}"
    if p.alignment < MAX_ALIGNMENT or p.c % 8:
        inner = "C and O" if p.layout == "channels_last" else "C and L"
        return f"TMA needs 16-byte aligned tensors and rows: {inner} times {p.element_size} bytes, addresses"
    if p.o > FUSED_TILE_OCS[-1]:
        return f"{p.o} output channels exceed the {FUSED_TILE_OCS[-1]} whose sums the registers hold"
    halo = p.dilation * (p.kernel - 1)
    positions = FusedGeometry.of(p, _fused_base(p)).positions
    if positions > MOST_POSITIONS:
        return f"a halo of {halo} positions makes windows of {positions}: at most {MOST_POSITIONS}"
    if max(p.n, p.l, p.e) > separable.MAX_EXTENT or p.n * -(-p.l // FUSED_TILE) >= 2**31 or p.e * p.o > 2**36:
        return "kernels count in 32 bits"
    return None


def _fused_base(problem: SeparableBlock1dProblem) -> BlockSchedule:
    tile_oc = next((oc for oc in FUSED_TILE_OCS if oc >= problem.o), FUSED_TILE_OCS[-1])
    project = Schedule("sm90", tile_oc, 64, 1, 4, 2, row_slots=2, weight_slots=2)
    return BlockSchedule("fused", "sm90", project)


@lru_cache(maxsize=1024)
def _fused(problem: SeparableBlock1dProblem, arch: str) -> tuple[BlockSchedule, ...]:
    """The fused schedules whose rings fit: more hidden slots or more weights, and expand weights in what is left."""
    found = []
    for row_slots, weight_slots in ((2, 2), (3, 2), (2, 3)):
        base = _fused_base(problem)
        base = replace(base, project=replace(base.project, row_slots=row_slots, weight_slots=weight_slots))
        geometry = FusedGeometry.of(problem, base)
        room = archs.SHARED_BYTES[arch] - geometry.shared_bytes
        slots = min(room // (64 * 128 + 16), 2 * geometry.expand_atoms)
        if slots >= 2:
            found.append(replace(base, expand_slots=slots))
    return tuple(found)


def check(problem: SeparableBlock1dProblem, schedule: BlockSchedule, arch: str) -> Support:
    """Whether this schedule can run this problem on `arch`, and if not, why not."""
    if schedule.form not in FORMS:
        return Support(False, f"form={schedule.form!r} must be one of {', '.join(map(repr, FORMS))}")
    if schedule.form == "fused":
        return _check_fused(problem, schedule, arch)
    if schedule.expand_slots != 0:
        return Support(False, f"expand_slots={schedule.expand_slots!r} belongs to the fused form")
    for name, half in (("expand", problem.expand), ("project", problem.project)):
        part = getattr(schedule, name)
        if not isinstance(part, Schedule) or part.path != schedule.path:
            return Support(False, f"{name} must be a schedule of path {schedule.path}, got {part!r}")
        if not (support := separable.check(half, part, arch)):
            return Support(False, f"kernel {name}: {support.reason}")
    return Support(True)


def _check_fused(problem: SeparableBlock1dProblem, schedule: BlockSchedule, arch: str) -> Support:
    if (reason := _fused_out_of_reach(problem, schedule.path, arch)) is not None:
        return Support(False, reason)
    if schedule.expand is not None:
        return Support(False, "expand belongs to the two-kernel form")
    slots = ("expand_slots", schedule.expand_slots), ("row_slots", schedule.project.row_slots)
    for name, value in (*slots, ("weight_slots", schedule.project.weight_slots)):
        if type(value) is not int or value < 2:
            return Support(False, f"{name}={value!r} must be an integer of at least 2: one fills while one is in use")
    allowed = replace(
        _fused_base(problem).project,
        row_slots=schedule.project.row_slots, weight_slots=schedule.project.weight_slots,
    )  # fmt: skip
    if schedule.project != allowed:
        return Support(False, f"project must be {allowed} but for its slots, got {schedule.project}")
    shared_bytes = FusedGeometry.of(problem, schedule).shared_bytes
    if shared_bytes > archs.SHARED_BYTES[arch]:
        return Support(False, f"{shared_bytes} bytes of shared memory, {archs.SHARED_BYTES[arch]} at hand")
    return Support(True)


def candidates(
    problem: SeparableBlock1dProblem, arch: str, path: str | None = None, form: str | None = None
) -> list[BlockSchedule]:
    """Legal schedules (of one path and form, or of all), best first by `estimate` for `representative(problem)`."""
    archs.check(arch)
    return list(_ranked(representative(problem), arch, path, form))


@lru_cache(maxsize=1024)
def _ranked(
    problem: SeparableBlock1dProblem, arch: str, path: str | None, form: str | None
) -> tuple[BlockSchedule, ...]:
    found = []
    for name in PATHS:
        if path not in (None, name):
            continue
        if form in (None, "fused") and _supports_fused(problem, name, arch):
            found += _fused(problem, arch)
        if form in (None, "two_kernel") and supports(problem, name, arch, "two_kernel"):
            found += _two_kernel(problem, name, arch)
    return tuple(sorted(found, key=lambda schedule: estimate(problem, schedule, arch)))


def _two_kernel(problem: SeparableBlock1dProblem, path: str, arch: str) -> list[BlockSchedule]:
    expands, projects = (separable.candidates(half, arch, path)[:_EACH] for half in (problem.expand, problem.project))
    return [BlockSchedule("two_kernel", path, project, expand) for project in projects for expand in expands]


def estimate(problem: SeparableBlock1dProblem, schedule: BlockSchedule, arch: str) -> float:
    """Estimated microseconds of a call on a large GPU: for choosing, not for predicting."""
    if schedule.form == "fused":
        return estimates.fused_us(FusedGeometry.of(problem, schedule))
    halves = ((problem.expand, schedule.expand), (problem.project, schedule.project))
    return sum(separable.estimate(half, part, arch) for half, part in halves)
