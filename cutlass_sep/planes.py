"""The depthwise stage of large kernels as a kernel of its own, on planes of x: what follows from a tile.

Mirrors struct PlaneLayout of templates/plane_depthwise.cuh, which says how it works. A schedule with `plane_rows` has
this kernel in front of a pointwise one, which the schedule's other fields describe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from . import arch as archs
from .problem import SeparableConv2dProblem, round_up

if TYPE_CHECKING:
    from .schedule import Schedule

#: Channels of a block, one for each of its warps: the first that fits; and matrices of x, of taps and sums that a
#: thread's registers then hold beside all else.
REGISTERS = {16: 104, 8: 210}
#: Slots of the ring beside those of a window, at most.
MOST_AHEAD = 3
#: Extent of a box that TMA copies.
MOST_BOX = 256
#: MMAs of a tile, which are unrolled.
MOST_MMAS = 1024
_AT_HAND = archs.SHARED_BYTES["sm_90a"]


@dataclass(frozen=True)
class PlaneGeometry:
    """What follows from a problem and a schedule with `plane_rows`, for the depthwise kernel."""

    problem: SeparableConv2dProblem
    schedule: Schedule

    @property
    def one_row(self) -> bool:
        """Whether the kernel has one row of taps: then all rows of all images are one image's."""
        return self.problem.kernel[0] == 1

    @property
    def images(self) -> int:
        return 1 if self.one_row else self.problem.n

    @property
    def rows(self) -> int:
        """Rows of outputs of an image."""
        return self.problem.n * self.problem.p if self.one_row else self.problem.p

    @property
    def tile_images(self) -> int:
        return 64 // self.schedule.plane_columns

    @property
    def matrices(self) -> int:
        """8 x 8 matrices of x that the taps of a row reach."""
        reach = (self.problem.kernel[1] - 1) * self.problem.dilation[1] + 1
        return -(-(reach + 7) // 8)

    @property
    def window(self) -> int:
        """Slots of the ring, of `plane_rows` rows of x each, under a tile."""
        rows = self.schedule.plane_rows
        return -(-(rows + self.problem.kernel[0] - 1) // rows)

    @property
    def window_columns(self) -> int:
        """Columns of a row in the ring. Rows of further images start where the rows of a matrix are in other banks."""
        columns = self.schedule.plane_columns
        halo = 8 * (self.matrices - 1)
        return columns + (halo if self.tile_images == 1 else round_up(halo, 2 * columns))

    @property
    def mmas(self) -> int:
        """mma.sync of a channel's tile."""
        return self.problem.kernel[0] * self.schedule.plane_rows // 2 * -(-self.matrices // 2)

    @property
    def wavefronts(self) -> int:
        """Of shared memory, that a channel's tile reads for its MMAs."""
        rows, taps = self.schedule.plane_rows, self.problem.kernel[0]
        pairs = rows // 2 if self.one_row else rows + taps - 2
        return (2 * pairs + taps) * self.matrices

    @property
    def registers(self) -> int:
        """Registers of a thread for matrices of x and of taps, and for sums."""
        rows = self.schedule.plane_rows
        taps = 1 if self.one_row else rows
        ahead = 0 if self.matrices > 12 else 2
        return (2 + ahead + taps) * self.matrices + 2 * rows

    @property
    def taps_bytes(self) -> int:
        """Taps of a channel as they lie in shared memory."""
        reach = (self.problem.kernel[1] - 1) * self.problem.dilation[1] + 1
        return self.problem.kernel[0] * (reach + 2) * 4

    @property
    def row_bytes(self) -> int:
        """A row of a channel in the ring."""
        return self.tile_images * self.window_columns * 2

    def _shared_bytes(self, channels: int, slots: int) -> int:
        rows = self.schedule.plane_rows
        staging = (rows * 128 + 16) * (self.problem.layout == "channels_last")
        return channels * (slots * rows * self.row_bytes + self.taps_bytes + staging) + (1 + slots) * 8

    @cached_property
    def channels(self) -> int:
        """Channels of a block."""
        fits = (n for n, most in REGISTERS.items() if self.registers <= most)
        return next((n for n in fits if self._shared_bytes(n, self.window) <= _AT_HAND), min(REGISTERS))

    @cached_property
    def slots(self) -> int:
        """Slots of the ring: a window's, and more if they fit into shared memory."""
        ahead = (n for n in range(MOST_AHEAD, 0, -1) if self._shared_bytes(self.channels, self.window + n) <= _AT_HAND)
        return self.window + next(ahead, 0)

    @property
    def slot_bytes(self) -> int:
        return self.channels * self.schedule.plane_rows * self.row_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the kernel."""
        return self._shared_bytes(self.channels, self.slots)

    @property
    def groups(self) -> int:
        """Groups of channels, a block's."""
        return -(-self.problem.c // self.channels)

    @property
    def shift(self) -> int:
        """Zeros before the first pixel of a row, by which TMA starts on 16 bytes."""
        return self.problem.padding.left % 8

    @property
    def pitch(self) -> int:
        """Columns of a row of a plane."""
        return round_up(self.problem.w + self.shift, 8)

    @property
    def plane_offset(self) -> int:
        """Where planes start in the workspace, behind the taps and a flag."""
        return round_up(self.flag_offset + 4, 256)

    @property
    def flag_offset(self) -> int:
        """Where, in the workspace, the flag is."""
        return self.groups * self.channels * self.taps_bytes

    @property
    def workspace_bytes(self) -> int:
        """Taps and planes."""
        p = self.problem
        return round_up(self.plane_offset + p.c * p.n * p.h * self.pitch * 2, 256)

    @property
    def outputs_bytes(self) -> int:
        """Depthwise outputs."""
        p = self.problem
        return round_up(p.n * p.c * p.p * p.q * 2, 256)

    @property
    def pack_blocks(self) -> int:
        """Blocks of the launch before that make tables of taps and planes."""
        p, units, tables = self.problem, self.pitch // 8, self.groups * self.channels
        if p.layout == "channels_last":
            return tables + p.n * p.h * -(-units // 8) * -(-p.c // 64)
        return tables + -(-p.c * p.n * p.h * units // 256)

    @property
    def tiles(self) -> int:
        """Tiles of a group of channels."""
        s = self.schedule
        across = -(-self.problem.q // s.plane_columns)
        return -(-self.images // self.tile_images) * -(-self.rows // s.plane_rows) * across

    @property
    def threads(self) -> int:
        return 32 * self.channels

    def flags(self, processors: int) -> int:
        """In the workspace, before the planes: one, whether fp16 does not hold all outputs."""
        return 1
