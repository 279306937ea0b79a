"""The fused block's barriers under random interleavings: no warp waits for ever, nothing is overwritten while read.

The warps do what structs Expand, Depthwise and Project of templates/block1d_sm90.cuh do: whoever changes it there
changes it here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import protocol
import pytest
from protocol import Barrier, Memory, Warp, Warpgroup


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
    #: Of an operand. With two, each project warpgroup has half of the output channels and a slot for either part.
    parts: int = 1
    scaled: bool = False  # what is known of hidden channels comes with their taps


class Machine(protocol.Machine):
    """The shared memory, the barriers and the warps of a block."""

    def __init__(self, shape: Shape):
        super().__init__(warpgroups=3)  # of the first GEMM; of the second
        s = self.shape = shape
        self.chunks = s.tiles * s.chunks  # numbered through all tiles
        self.done: list[tuple[int, int]] = []  # (tile, warp of the project warpgroups)

        def ring(slots: int, arrivals: int) -> list[Barrier]:
            return [Barrier(arrivals) for _ in range(slots)]

        self.x_full, self.x_empty = ring(s.atoms, 1), ring(s.atoms, 4 + 8 * s.residual)
        # Four for a slot: of each warp's quarter.
        self.expand_full = [ring(4, 1) for _ in range(s.expand_slots)]
        self.taps_full, self.hidden_full = ([ring(4, 1) for _ in range(s.hidden_slots)] for _ in range(2))
        self.project_full, self.project_empty = ring(s.project_slots, 1), ring(s.project_slots, 8 // s.parts)
        self.operand_full, self.operand_empty = ring(s.hidden_slots, 4), ring(s.hidden_slots, 8)
        self.x = [Memory() for _ in range(s.atoms)]
        self.expand_weights = [[Memory() for _ in range(4)] for _ in range(s.expand_slots)]
        self.project_weights = [Memory() for _ in range(s.project_slots)]
        self.taps = [[Memory() for _ in range(4)] for _ in range(s.hidden_slots)]
        self.rows = [[Memory() for _ in range(4)] for _ in range(s.hidden_slots)]  # 16 channels each
        self.warps = [self.expand(warp) for warp in range(4)] + [self.depthwise(warp) for warp in range(4)]
        self.warps += [self.project(warp) for warp in range(8)]

    def load_expand(self, i: int, warp: int) -> None:
        slot = i % self.shape.expand_slots
        self.copy(self.expand_weights[slot][warp], self.expand_full[slot][warp], ("expand", i))

    def load_x(self, tile: int, atom: int) -> None:
        self.copy(self.x[atom], self.x_full[atom], ("x", tile, atom))

    def load_taps(self, chunk: int, warp: int) -> None:
        slot = chunk % self.shape.hidden_slots
        if chunk < self.chunks:
            self.copy(self.taps[slot][warp], self.taps_full[slot][warp], ("taps", chunk))

    def load_project(self, i: int) -> None:
        slot = i % self.shape.project_slots
        self.copy(self.project_weights[slot], self.project_full[slot], ("project", i))

    def expand(self, warp: int) -> Warp:
        s, group = self.shape, self.warpgroups[0]
        loads = self.chunks * s.atoms
        if warp == 0:
            for atom in range(s.atoms):
                self.load_x(0, atom)
        for i in range(min(s.expand_slots, loads)):
            self.load_expand(i, warp)

        def done(chunk: int, atom: int) -> Warp:
            i, (tile, position) = chunk * s.atoms + atom, divmod(chunk, s.chunks)
            last = position == s.chunks - 1
            if i + s.expand_slots < loads:
                self.load_expand(i + s.expand_slots, warp)
            if last:
                self.x_empty[atom].arrive()
            if warp == 0 and last and chunk + 1 < self.chunks:
                yield self.x_empty[atom].wait(tile)
                self.load_x(tile + 1, atom)

        for chunk in range(self.chunks):
            tile, hidden = chunk // s.chunks, chunk % s.hidden_slots
            for atom in range(s.atoms):
                # In two parts sums are added up before every second group of 64 channels, once two of them are full.
                merged = s.parts == 2 and atom % 2 == 0 and atom > 2
                if merged:
                    yield group.wait(0)
                    yield from done(chunk, atom - 1)
                i = chunk * s.atoms + atom
                slot = i % s.expand_slots
                if chunk % s.chunks == 0:
                    yield self.x_full[atom].wait(tile)
                yield self.expand_full[slot][warp].wait(i // s.expand_slots)
                operands = [(self.x[atom], ("x", tile, atom)), (self.expand_weights[slot][warp], ("expand", i))]
                yield from group.issue(warp, operands)
                if atom and not merged:
                    yield group.wait(1)
                    yield from done(chunk, atom - 1)
            yield group.wait(0)
            yield from done(chunk, s.atoms - 1)
            yield self.operand_empty[hidden].wait(chunk // s.hidden_slots + 1)
            if s.scaled:
                yield self.taps_full[hidden][warp].wait(chunk // s.hidden_slots)
                self.taps[hidden][warp].read(("taps", chunk))
            self.rows[hidden][warp].write("incoming")
            yield None
            self.rows[hidden][warp].write(("hidden", chunk))
            self.hidden_full[hidden][warp].arrive()

    def depthwise(self, warp: int) -> Warp:
        s = self.shape
        for chunk in range(s.hidden_slots):
            self.load_taps(chunk, warp)
        for chunk in range(self.chunks):
            slot, turn = chunk % s.hidden_slots, chunk // s.hidden_slots
            yield self.taps_full[slot][warp].wait(turn)
            yield self.hidden_full[slot][warp].wait(turn)
            yield None
            self.taps[slot][warp].read(("taps", chunk))
            self.rows[slot][warp].read(("hidden", chunk))
            self.rows[slot][warp].write(("operand", chunk))
            self.operand_full[slot].arrive()
            self.load_taps(chunk + s.hidden_slots, warp)

    def project_parts(self, warp: int) -> Warp:
        """A warp of a project warpgroup that has half of the output channels: slot 2 * warpgroup + part is its own."""
        s, warpgroup = self.shape, warp // 4
        group = self.warpgroups[1 + warpgroup]

        def load(chunk: int, slot: int) -> None:
            self.copy(self.project_weights[slot], self.project_full[slot], ("project", chunk, slot))

        def give_back(chunk: int, slot: int) -> Warp:
            self.project_empty[slot].arrive()
            if warp % 4 == 0 and chunk + 1 < self.chunks:
                yield self.project_empty[slot].wait(chunk)
                load(chunk + 1, slot)

        high, low = 2 * warpgroup, 2 * warpgroup + 1
        if warp % 4 == 0:
            load(0, high)
            load(0, low)
        for chunk in range(self.chunks):
            hidden = chunk % s.hidden_slots
            yield self.operand_full[hidden].wait(chunk // s.hidden_slots)
            operands = [(rows, ("operand", chunk)) for rows in self.rows[hidden]]
            for slot in (high, low):
                yield self.project_full[slot].wait(chunk)
                yield from group.issue(warp % 4, [*operands, (self.project_weights[slot], ("project", chunk, slot))])
            yield group.wait(1)
            yield from give_back(chunk, high)
            yield group.wait(0)
            yield from give_back(chunk, low)
            self.operand_empty[hidden].arrive()
            if chunk % s.chunks == s.chunks - 1:
                self.done.append((chunk // s.chunks, warp))

    def project(self, warp: int) -> Warp:
        if self.shape.parts == 2:
            yield from self.project_parts(warp)
            return
        s, group = self.shape, self.warpgroups[1 + warp // 4]
        loads = self.chunks * s.halves
        if warp == 0:
            for i in range(min(s.project_slots, loads)):
                self.load_project(i)

        def give_back(i: int) -> Warp:
            slot = i % s.project_slots
            self.project_empty[slot].arrive()
            if warp == 4 * (i % s.halves) and i + s.project_slots < loads:
                yield self.project_empty[slot].wait(i // s.project_slots)
                self.load_project(i + s.project_slots)

        i = 0
        for tile in range(s.tiles):
            if s.residual:
                for atom in range(s.atoms):
                    yield self.x_full[atom].wait(tile)
                yield None
                for atom in range(s.atoms):
                    self.x[atom].read(("x", tile, atom))
                    self.x_empty[atom].arrive()
            for chunk in range(tile * s.chunks, (tile + 1) * s.chunks):
                hidden = chunk % s.hidden_slots
                yield self.operand_full[hidden].wait(chunk // s.hidden_slots)
                for half in range(s.halves):
                    slot = i % s.project_slots
                    yield self.project_full[slot].wait(i // s.project_slots)
                    operands = [(rows, ("operand", chunk)) for rows in self.rows[hidden]]
                    yield from group.issue(warp % 4, [*operands, (self.project_weights[slot], ("project", i))])
                    yield group.wait(1)
                    first = chunk % s.chunks == half == 0
                    if half == 0 and not first:
                        self.operand_empty[(chunk - 1) % s.hidden_slots].arrive()
                    if not first:
                        yield from give_back(i - 1)
                    i += 1
            yield group.wait(0)
            self.operand_empty[hidden].arrive()
            yield from give_back(i - 1)
            self.done.append((tile, warp))


def run(shape: Shape, seed: int) -> None:
    """One launch: see `protocol.run`."""
    machine = Machine(shape)
    protocol.run(machine, seed)
    assert sorted(machine.done) == [(tile, warp) for tile in range(shape.tiles) for warp in range(8)]


def any_shape(seed: int) -> Shape:
    random_ = random.Random(seed)
    parts = random_.choice((1, 1, 2))
    if parts == 2:
        return Shape(
            tiles=random_.choice((1, 2, 4)),
            chunks=random_.choice((1, 2, 3, 5)),
            atoms=random_.randint(1, 8),
            residual=False,  # added from global memory
            expand_slots=random_.randint(2, 8),
            hidden_slots=random_.randint(2, 4),
            parts=2,
            scaled=True,
        )
    halves = random_.choice((1, 2))
    scaled = random_.random() < 0.3
    return Shape(
        tiles=random_.choice((1, 2, 4)),
        chunks=random_.choice((1, 2, 3, 5)),
        atoms=random_.randint(1, 8),
        halves=halves,
        residual=not scaled and random_.random() < 0.7,
        expand_slots=random_.randint(2, 8),
        project_slots=random_.randint(2, 6),
        hidden_slots=random_.randint(3, 5),
        scaled=scaled,
    )


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_any_rings(first: int):
    for seed in range(first, first + 25):
        run(any_shape(seed), seed)


def test_the_rings_of_the_lead_shape():
    for seed in range(20):
        run(Shape(), seed)
        run(Shape(residual=False, scaled=True, parts=2, expand_slots=2, hidden_slots=2), seed)


def test_fewer_project_slots_than_check_allows_stop():
    """One slot of project weights is given back when the next one has been used."""
    with pytest.raises(AssertionError, match="wait for ever"):
        run(Shape(project_slots=1), 0)


def test_a_slot_given_back_early_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The model would show it."""
    monkeypatch.setattr(Warpgroup, "wait", lambda self, left: None)
    with pytest.raises(AssertionError, match="is read"):
        for seed in range(20):
            run(Shape(tiles=2), seed)
