"""The depthwise stage as a kernel of its own, by fp32 FMA from global memory: what follows from a thread's outputs.

Mirrors struct DirectLayout of templates/direct_depthwise.cuh, which says how it works. A schedule with `thread_rows`
has this kernel in front of a pointwise one, which the schedule's other fields describe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .problem import SeparableConv2dProblem, round_up

if TYPE_CHECKING:
    from .schedule import Schedule

#: Vectors of channels that a block's threads have side by side, at most; bytes of their taps in shared memory, of which
#: a multiprocessor has those of two blocks.
MOST_LANES, MOST_TAP_BYTES = 32, 112 * 1024
#: Registers of a thread, at most.
REGISTERS = 232
#: Blocks of a launch for each multiprocessor.
BLOCKS = 2
#: Blocks of a launch, each of which has a flag (fp16).
MOST_BLOCKS = 8192


@dataclass(frozen=True)
class DirectGeometry:
    """What follows from a problem and a schedule with `thread_rows`, for the depthwise kernel."""

    problem: SeparableConv2dProblem
    schedule: Schedule

    @property
    def vector(self) -> int:
        """Channels of a thread: 16 bytes."""
        return 16 // self.problem.element_size

    @property
    def most_lanes(self) -> int:
        """Vectors of a slab of channels, at most: as many as have room for their taps."""
        return min(MOST_LANES, MOST_TAP_BYTES // (self.problem.taps * self.vector * 4))

    @property
    def slabs(self) -> int:
        """Slabs of channels; a block has one."""
        return -(-self.problem.c // (self.vector * self.most_lanes))

    @property
    def lanes(self) -> int:
        """Vectors of a slab."""
        return -(-self.problem.c // (self.vector * self.slabs))

    @property
    def units(self) -> int:
        """Threads' outputs of a block at a time, of each vector of channels."""
        return self.threads // self.lanes

    @property
    def row_steps(self) -> int:
        """Steps that a row of taps takes."""
        taps = self.problem.kernel[1]
        return 1 if taps <= 5 else -(-taps // 4)

    @property
    def columns(self) -> int:
        """Columns of x that a thread loads for a step."""
        p, s = self.problem, self.schedule
        taps = -(-p.kernel[1] // self.row_steps)
        reach = (s.thread_columns - 1) * p.stride[1] + (taps - 1) * p.dilation[1] + 1
        return min(reach, s.thread_columns * taps)

    @property
    def registers(self) -> int:
        """Registers of a thread: outputs, columns of this step and the next, taps, and what else there is."""
        s, taps = self.schedule, -(-self.problem.kernel[1] // self.row_steps)
        return self.vector * (s.thread_rows * s.thread_columns + taps) + 8 * self.columns + 40

    @property
    def threads(self) -> int:
        """Threads of a block, of which a multiprocessor has two."""
        return 256 if self.registers <= 128 else 192 if self.registers <= 168 else 128

    @property
    def thread_tiles(self) -> int:
        """Threads' outputs of one vector of channels."""
        p, s = self.problem, self.schedule
        return p.n * -(-p.p // s.thread_rows) * -(-p.q // s.thread_columns)

    def blocks(self, processors: int) -> int:
        """Of a launch: as many of each slab."""
        each = min(-(-self.thread_tiles // self.units), max(1, min(BLOCKS * processors, MOST_BLOCKS) // self.slabs))
        return self.slabs * each

    #: Where, in the workspace, the flags are.
    flag_offset = 0

    def flags(self, processors: int) -> int:
        """In the workspace: one of each block, whether fp16 does not hold all outputs."""
        return self.blocks(processors)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the taps of a slab in fp32."""
        return self.problem.taps * self.lanes * self.vector * 4

    @property
    def workspace_bytes(self) -> int:
        """fp16: a flag of each block, whether it made outputs that are not finite."""
        return MOST_BLOCKS * 4 if self.problem.dtype == "float16" else 0

    @property
    def outputs_bytes(self) -> int:
        """Depthwise outputs."""
        p = self.problem
        return round_up(p.n * p.c * p.p * p.q * p.element_size, 256)
