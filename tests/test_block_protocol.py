"""The fused block's barriers under random interleavings: no warp waits for ever, nothing is overwritten while read.

Each warp is a generator that waits, arrives, reads and writes in the order of templates/block1d_sm90.cuh (structs
Expand, Depthwise and Project): whoever changes it there changes it here. Warps advance in random order, some much more
slowly than others. TMA completes in any order, wgmma in the order of its warpgroup. A wait sees the parity of a
barrier's phase alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass

import pytest

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


@dataclass(frozen=True)
class Shape:
    """A launch as one block sees it. `atoms`: groups of 64 channels of x; slots as in FusedTile."""

    tiles: int = 3
    chunks: int = 8
    atoms: int = 4
    halves: int = 2
    residual: bool = True
    expand_slots: int = 3
    project_slots: int = 4
    hidden_slots: int = 3


class Machine:
    """The shared memory, the barriers and the warps of a block."""

    def __init__(self, shape: Shape):
        s = self.shape = shape
        self.chunks = s.tiles * s.chunks  # numbered through all tiles
        self.done: list[tuple[int, int]] = []  # (tile, warp of the project warpgroups)
        self._copies: list[Callable[[], None]] = []

        def ring(slots: int, arrivals: int) -> list[Barrier]:
            return [Barrier(arrivals) for _ in range(slots)]

        self.x_full, self.x_empty = ring(s.atoms, 1), ring(s.atoms, 4 + 8 * s.residual)
        self.expand_full, self.expand_empty = ring(s.expand_slots, 1), ring(s.expand_slots, 4)
        self.project_full, self.project_empty = ring(s.project_slots, 1), ring(s.project_slots, 8)
        self.taps_full, self.taps_empty = ring(s.hidden_slots, 1), ring(s.hidden_slots, 4)
        self.hidden_full, self.operand_full = ring(s.hidden_slots, 4), ring(s.hidden_slots, 4)
        self.operand_empty = ring(s.hidden_slots, 8)
        self.x = [Memory() for _ in range(s.atoms)]
        self.expand_weights = [Memory() for _ in range(s.expand_slots)]
        self.project_weights = [Memory() for _ in range(s.project_slots)]
        self.taps = [Memory() for _ in range(s.hidden_slots)]
        self.rows = [[Memory() for _ in range(4)] for _ in range(s.hidden_slots)]  # 16 channels each
        self.warpgroups = [Warpgroup() for _ in range(3)]  # of the first GEMM; of the second
        self.warps = [self.expand(warp) for warp in range(4)] + [self.depthwise(warp) for warp in range(4)]
        self.warps += [self.project(warp) for warp in range(8)]

    def copy(self, memory: Memory, full: Barrier, data) -> None:
        """TMA: the memory holds nothing that can be read until it has completed."""
        memory.write(("incoming", data))

        def complete() -> None:
            memory.write(data)
            full.arrive()

        self._copies.append(complete)

    def events(self) -> list[Callable[[], None]]:
        """What the hardware may complete next."""
        copies = [lambda i=i: self._copies.pop(i)() for i in range(len(self._copies))]
        return copies + [event for group in self.warpgroups for event in group.events()]

    def load_expand(self, i: int) -> None:
        slot = i % self.shape.expand_slots
        self.copy(self.expand_weights[slot], self.expand_full[slot], ("expand", i))

    def load_x(self, tile: int, atom: int) -> None:
        self.copy(self.x[atom], self.x_full[atom], ("x", tile, atom))

    def load_taps(self, chunk: int) -> Warp:
        slots = self.shape.hidden_slots
        if chunk < self.chunks:
            if chunk >= slots:
                yield self.taps_empty[chunk % slots].wait(chunk // slots - 1)
            self.copy(self.taps[chunk % slots], self.taps_full[chunk % slots], ("taps", chunk))

    def load_project(self, i: int) -> Warp:
        slots = self.shape.project_slots
        if i >= slots:
            yield self.project_empty[i % slots].wait(i // slots - 1)
        self.copy(self.project_weights[i % slots], self.project_full[i % slots], ("project", i))

    def expand(self, warp: int) -> Warp:
        s, group = self.shape, self.warpgroups[0]
        loads = self.chunks * s.atoms
        if warp == 0:
            for atom in range(s.atoms):
                self.load_x(0, atom)
            for i in range(min(s.expand_slots, loads)):
                self.load_expand(i)

        def done(chunk: int, atom: int) -> Warp:
            i, (tile, position) = chunk * s.atoms + atom, divmod(chunk, s.chunks)
            slot, last = i % s.expand_slots, position == s.chunks - 1
            self.expand_empty[slot].arrive()
            if last:
                self.x_empty[atom].arrive()
            if warp == 0 and i + s.expand_slots < loads:
                yield self.expand_empty[slot].wait(i // s.expand_slots)
                self.load_expand(i + s.expand_slots)
            if warp == 0 and last and chunk + 1 < self.chunks:
                yield self.x_empty[atom].wait(tile)
                self.load_x(tile + 1, atom)

        for chunk in range(self.chunks):
            tile, hidden = chunk // s.chunks, chunk % s.hidden_slots
            for atom in range(s.atoms):
                i = chunk * s.atoms + atom
                slot = i % s.expand_slots
                yield self.x_full[atom].wait(tile)
                yield self.expand_full[slot].wait(i // s.expand_slots)
                operands = [(self.x[atom], ("x", tile, atom)), (self.expand_weights[slot], ("expand", i))]
                yield from group.issue(warp, operands)
                if atom:
                    yield group.wait(1)
                    yield from done(chunk, atom - 1)
            yield group.wait(0)
            yield from done(chunk, s.atoms - 1)
            yield self.operand_empty[hidden].wait(chunk // s.hidden_slots + 1)
            self.rows[hidden][warp].write("incoming")
            yield None
            self.rows[hidden][warp].write(("hidden", chunk))
            self.hidden_full[hidden].arrive()

    def depthwise(self, warp: int) -> Warp:
        s = self.shape
        if warp == 0:
            for chunk in range(s.hidden_slots):
                yield from self.load_taps(chunk)
        for chunk in range(self.chunks):
            slot, turn = chunk % s.hidden_slots, chunk // s.hidden_slots
            if warp == 0:
                for half in range(s.halves):
                    yield from self.load_project(chunk * s.halves + half)
            yield self.taps_full[slot].wait(turn)
            yield self.hidden_full[slot].wait(turn)
            yield None
            self.taps[slot].read(("taps", chunk))
            self.rows[slot][warp].read(("hidden", chunk))
            self.rows[slot][warp].write(("operand", chunk))
            self.operand_full[slot].arrive()
            self.taps_empty[slot].arrive()
            if warp == 0:
                yield from self.load_taps(chunk + s.hidden_slots)

    def project(self, warp: int) -> Warp:
        s, group = self.shape, self.warpgroups[1 + warp // 4]
        i = 0
        for tile in range(s.tiles):
            if s.residual:
                for atom in range(s.atoms):
                    yield self.x_full[atom].wait(tile)
                yield None
                for atom in range(s.atoms):
                    self.x[atom].read(("x", tile, atom))
                    self.x_empty[atom].arrive()
            read: list[Barrier] = []  # by the wgmma in flight
            for chunk in range(tile * s.chunks, (tile + 1) * s.chunks):
                hidden = chunk % s.hidden_slots
                yield self.operand_full[hidden].wait(chunk // s.hidden_slots)
                for _ in range(s.halves):
                    slot = i % s.project_slots
                    yield self.project_full[slot].wait(i // s.project_slots)
                    operands = [(rows, ("operand", chunk)) for rows in self.rows[hidden]]
                    yield from group.issue(warp % 4, [*operands, (self.project_weights[slot], ("project", i))])
                    yield group.wait(1)
                    for barrier in read:
                        barrier.arrive()
                    read = [self.project_empty[slot]]
                    i += 1
                read.append(self.operand_empty[hidden])
            yield group.wait(0)
            for barrier in read:
                barrier.arrive()
            self.done.append((tile, warp))


def run(shape: Shape, seed: int) -> None:
    """One launch. AssertionError where it stops, overwrites or reads what is not there."""
    random_ = random.Random(seed)
    machine = Machine(shape)
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
    assert sorted(machine.done) == [(tile, warp) for tile in range(shape.tiles) for warp in range(8)]


def any_shape(seed: int) -> Shape:
    random_ = random.Random(seed)
    halves = random_.choice((1, 2))
    return Shape(
        tiles=random_.choice((1, 2, 4)),
        chunks=random_.choice((1, 2, 3, 5)),
        atoms=random_.randint(1, 4),
        halves=halves,
        residual=random_.random() < 0.7,
        expand_slots=random_.randint(2, 8),
        project_slots=random_.randint(halves + 1, 6),
        hidden_slots=random_.randint(3, 5),
    )


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_any_rings(first: int):
    for seed in range(first, first + 25):
        run(any_shape(seed), seed)


def test_the_rings_of_the_lead_shape():
    for seed in range(20):
        run(Shape(), seed)


def test_fewer_project_slots_than_check_allows_stop():
    """The rule for project_slots in block_schedule.check: more than the halves of a chunk."""
    with pytest.raises(AssertionError, match="wait for ever"):
        run(Shape(project_slots=2), 0)


def test_a_slot_given_back_early_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The model would show it."""
    monkeypatch.setattr(Warpgroup, "wait", lambda self, left: None)
    with pytest.raises(AssertionError, match="is read"):
        for seed in range(20):
            run(Shape(tiles=2), seed)
