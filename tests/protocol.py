"""Blocks of warps under random interleavings, for tests of the kernels' barriers.

A warp is a generator that waits, arrives, reads and writes in a kernel's order. Warps advance in random order, some
much more slowly than others. TMA completes in any order, wgmma in the order of its warpgroup. A wait on an mbarrier
sees the parity of its phase alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

#: What a warp cannot go on without; None: a moment passes.
Wait = Callable[[], bool] | None
Warp = Generator[Wait, None, None]


class Barrier:
    """An mbarrier: a phase ends with its last arrival."""

    def __init__(self, arrivals: int):
        self._arrivals = self._pending = arrivals
        self._phase = 0

    def arrive(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._phase, self._pending = self._phase + 1, self._arrivals

    def wait(self, parity: int) -> Wait:
        return lambda: self._phase % 2 != parity % 2


class EmptyBarrier(Barrier):
    """An mbarrier on which every warp arrives once a phase."""

    def __init__(self, arrivals: int):
        super().__init__(arrivals)
        self._come: set[tuple[int, ...]] = set()

    def arrive_as(self, warp: tuple[int, ...]) -> None:
        assert warp not in self._come, f"warp {warp} is counted twice in a round"
        self._come.add(warp)
        if len(self._come) == self._arrivals:
            self._come = set()
        self.arrive()


class Registers:
    """Those of a block, a warp's thread each, that no warp holds. setmaxnreg gives back, or waits for what it takes."""

    def __init__(self):
        self._free = 0

    def change(self, held: int, wanted: int) -> Warp:
        yield lambda: self._free >= wanted - held
        self._free -= wanted - held


class Memory:
    """Shared memory that is filled and read as a whole; `readers`: wgmma that have not completed."""

    def __init__(self):
        self.data, self.readers = None, 0

    def write(self, data) -> None:
        assert not self.readers, f"{data} overwrites {self.data}, which is read"
        self.data = data

    def read(self, data) -> None:
        assert self.data == data, f"{data} was to be read, {self.data} is there"


class Warpgroup:
    """Four warps that issue wgmma together."""

    def __init__(self):
        self._arrived = self._issued = self._done = 0
        self._pending: list[Callable[[], None]] = []

    def _together(self) -> Warp:
        """wgmma starts when all warps have come."""
        self._arrived += 1
        all_here = -(-self._arrived // 4) * 4
        yield lambda: self._arrived >= all_here

    def issue(self, warp: int, operands: list[tuple[Memory, object]]) -> Warp:
        yield from self._together()
        if warp == 0:
            for memory, data in operands:
                memory.read(data)
                memory.readers += 1
            self._issued += 1
            self._pending.append(lambda: self._complete(operands))
        yield from self._together()

    def _complete(self, operands: list[tuple[Memory, object]]) -> None:
        for memory, data in operands:
            memory.read(data)
            memory.readers -= 1
        self._done += 1

    def wait(self, left: int) -> Wait:
        target = self._issued - left
        return lambda: self._done >= target

    def events(self) -> list[Callable[[], None]]:
        return [lambda: self._pending.pop(0)()] if self._pending else []


class Machine:
    """What a block of any kernel has: warps, and what the hardware does for them."""

    def __init__(self, warpgroups: int):
        self.warpgroups = [Warpgroup() for _ in range(warpgroups)]  # that issue wgmma
        self.warps: list[Warp] = []
        self._copies: list[Callable[[], None]] = []

    def copy(self, memory: Memory | list[Memory], full: Barrier, data) -> None:
        """TMA: the memory, or all parts of it, holds nothing that can be read until it has completed."""
        parts = memory if isinstance(memory, list) else [memory]
        for part in parts:
            part.write(("incoming", data))

        def complete() -> None:
            for part in parts:
                part.write(data)
            full.arrive()

        self._copies.append(complete)

    def events(self) -> list[Callable[[], None]]:
        """What the hardware may complete next."""
        copies = [lambda i=i: self._copies.pop(i)() for i in range(len(self._copies))]
        return copies + [event for group in self.warpgroups for event in group.events()]


def run(machine: Machine, seed: int) -> None:
    """All warps to their ends. AssertionError where they stop, overwrite or read what is not there."""
    random_ = random.Random(seed)
    waits: dict[int, Wait] = dict.fromkeys(range(len(machine.warps)))
    slowness = [random_.choice((1, 1, 4, 16)) for _ in waits]
    hardware = random_.choice((1, 1, 4, 16))
    while waits:
        able = [warp for warp, wait in waits.items() if wait is None or wait()]
        events = machine.events()
        assert able or events, f"warps {sorted(waits)} wait for ever"
        weights = [1 / slowness[warp] for warp in able] + [1 / hardware] * bool(events)
        (chosen,) = random_.choices([*able, *["event"] * bool(events)], weights)
        if chosen == "event":
            random_.choice(events)()
            continue
        try:
            waits[chosen] = next(machine.warps[chosen])
        except StopIteration:
            del waits[chosen]
