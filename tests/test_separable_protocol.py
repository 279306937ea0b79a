"""The separable kernel's barriers under random interleavings, for any schedule that `check` allows.

The warps do what `produce`, `help`, `consume`, `accumulate`, `store_tile` and SplitSums of
templates/separable2d_sm90.cuh do, once setmaxnreg has given them their registers: whoever changes it there changes it
here. Left out are a warp's own staging buffers (channels_last) and the values themselves: a sum is the list of the
passes over an item's channels that entered it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import protocol
import pytest
from problems import in_one_kernel, problem_of
from protocol import Barrier, EmptyBarrier, Memory, Registers, Wait, Warp, Warpgroup
from separable import Case

from cutlass_sep.schedule import CONSUMER_REGISTERS, Geometry, Schedule, candidates, check

ARCH = "sm_90a"
LATE = Case(n=1, c=512, o=512, h=7, w=7)
HELPER_WARPS = 3


class NamedBarrier:
    """Where warps meet, or those of one warpgroup wait for those of another. A warp stays until all have come."""

    def __init__(self, warps: int = 8):
        self._warps = warps
        self._come: set[tuple[int, int]] = set()
        self._rounds = 0

    @property
    def idle(self) -> bool:
        return not self._come

    def arrive(self, warp: tuple[int, int]) -> None:
        assert warp not in self._come, f"warp {warp} is counted twice in a round"
        self._come.add(warp)
        if len(self._come) == self._warps:
            self._come, self._rounds = set(), self._rounds + 1

    def sync(self, warp: tuple[int, int]) -> Wait:
        own = self._rounds
        self.arrive(warp)
        return lambda: self._rounds > own


class Item:
    """Struct WorkItem: an output tile's place, and how many warpgroup tiles down it there are."""

    def __init__(self, g: Geometry, most: int, index: int):
        p = g.problem
        self.index = index
        index, self.oc_tile = divmod(index, g.oc_tiles)
        index, strip = divmod(index, -(-p.q // g.item_q))
        block = index % -(-p.p // (most * g.tile_p))
        self.q, self.p = strip * g.item_q, block * most * g.tile_p
        self.steps = min(most, -(-(p.p - self.p) // g.tile_p)) if g.march else g.tiles_down
        self.slots = 1 if whole_window(g) else g.window_rows(self.steps * g.tile_p)

    def outside(self, g: Geometry, step: int, warpgroup: int) -> bool:
        first_q = self.q + warpgroup * g.tile_q * g.schedule.side_by_side
        return not g.march and (self.p + step * g.tile_p >= g.problem.p or first_q >= g.problem.q)


def whole_window(g: Geometry) -> bool:
    return g.schedule.mma_q > 0 and not g.march


class Machine(protocol.Machine):
    """One block of a launch on `processors`: rows (or windows) and weights in rings, sums between warpgroups."""

    def __init__(self, g: Geometry, processors: int = 1, block: int = 0):
        s = g.schedule
        super().__init__(s.warpgroups)
        self.g, most = g, g.steps(processors)
        self.items = [Item(g, most, index) for index in range(block, g.items(most), processors)]
        self.resident = g.chunks <= s.weight_slots and g.oc_tiles == 1
        #: Whether helper warps make the table of taps, which else comes with the weights.
        self.fills = g.fills_taps
        #: Tiles (item, step down, place side by side), each with a warp and the passes in its sums.
        self.done: list[tuple] = []

        self.row_full = [Barrier(HELPER_WARPS if g.turned else 1) for _ in range(s.row_slots)]
        self.row_landed = [Barrier(1) for _ in range(s.row_slots)] if g.turned else self.row_full
        self.row_empty = [EmptyBarrier(4 * s.warpgroups) for _ in range(s.row_slots)]
        self.weight_full = [Barrier(1 + HELPER_WARPS * self.fills) for _ in range(s.weight_slots)]
        self.weight_empty = [EmptyBarrier(4 * s.warpgroups) for _ in range(s.weight_slots)]
        self.given_full = [NamedBarrier() for _ in range(s.warpgroups)]
        self.given_free = [NamedBarrier() for _ in range(s.warpgroups)]
        #: Each slot in parts, as many as are turned by different warps.
        self.rows = [[Memory() for _ in range(HELPER_WARPS if g.turned else 1)] for _ in range(s.row_slots)]
        self.weights = [Memory() for _ in range(s.weight_slots)]
        #: Of each slot the taps as TMA brings them, and the parts of their table that helper warps fill.
        self.raw, self.taps_landed = ([kind() for _ in range(s.weight_slots)] for kind in (Memory, lambda: Barrier(1)))
        self.taps = [[Memory() for _ in range(HELPER_WARPS * self.fills)] for _ in range(s.weight_slots)]
        self.given = [[Memory() for _ in range(4)] for _ in range(s.warpgroups)]
        self.together = [NamedBarrier(4) for _ in range(s.warpgroups)]
        #: Each warpgroup's buffers, in parts that a warp fills.
        self.staging = [[[Memory() for _ in range(4)] for _ in range(s.staging_groups)] for _ in range(s.warpgroups)]
        #: Warp -> its stores that still read a buffer, oldest first.
        self.stores = {(group, warp): [] for group in range(s.warpgroups) for warp in range(4)}
        self.registers, launched = Registers(), 65536 // g.threads // 8 * 8
        beside = [self.help(warp) if self.fills else iter(()) for warp in range(HELPER_WARPS)]
        consumers = [self.consume(warpgroup, warp) for warpgroup in range(s.warpgroups) for warp in range(4)]
        self.warps = [self.resized(warp, launched, g.producer_registers) for warp in (self.produce(), *beside)]
        self.warps += [self.resized(warp, launched, g.consumer_registers) for warp in consumers]

    def resized(self, warp: Warp, held: int, wanted: int) -> Warp:
        yield from self.registers.change(held, wanted)
        yield from warp

    def produce(self) -> Warp:
        s = self.g.schedule
        row = weight = 0
        for item in self.items:
            for chunk in range(self.g.chunks):
                if not self.resident or item is self.items[0]:
                    slot = weight % s.weight_slots
                    yield self.weight_empty[slot].wait(weight // s.weight_slots + 1)
                    self.copy(self.weights[slot], self.weight_full[slot], ("weights", item.oc_tile, chunk))
                    if self.fills:
                        self.copy(self.raw[slot], self.taps_landed[slot], ("raw", item.oc_tile, chunk))
                    weight += 1
                for r in range(item.slots):
                    slot, turn = row % s.row_slots, row // s.row_slots
                    yield self.row_empty[slot].wait(turn + 1)
                    data = ("rows", item.index, chunk, r)
                    self.copy(self.rows[slot], self.row_landed[slot], ("landed", data) if self.g.turned else data)
                    row += 1

    def help(self, warp: int) -> Warp:
        """A helper warp's part of every stage's taps, and of every slot to be turned."""
        row = weight = 0
        for item in self.items:
            for chunk in range(self.g.chunks):
                if not self.resident or item is self.items[0]:
                    yield from self.fill(warp, weight, item.oc_tile, chunk)
                    weight += 1
                for _ in range(item.slots if self.g.turned else 0):
                    yield from self.turn(warp, row)
                    row += 1
            if self.resident and not self.g.turned:
                return

    def fill(self, warp: int, weight: int, oc_tile: int, chunk: int) -> Warp:
        """A warp's part of the table of taps of stage number `weight`."""
        slot = weight % self.g.schedule.weight_slots
        yield self.landed(weight)
        part = self.taps[slot][warp]
        part.write("filling")
        yield from self.read([(self.raw[slot], ("raw", oc_tile, chunk))])
        part.write(("taps", oc_tile, chunk))
        self.weight_full[slot].arrive()

    def landed(self, weight: int) -> Wait:
        """The taps of stage number `weight` are there."""
        slots = self.g.schedule.weight_slots
        return self.taps_landed[weight % slots].wait(weight // slots)

    def turn(self, warp: int, row: int) -> Warp:
        """A warp's part of row number `row`, in place."""
        slots = self.g.schedule.row_slots
        yield self.row_landed[row % slots].wait(row // slots)
        part = self.rows[row % slots][warp]
        kind, data = part.data
        assert kind == "landed", f"{part.data} is turned"
        yield from self.read([(part, part.data)])
        part.write("turning")
        yield None
        part.write(data)
        self.row_full[row % slots].arrive()

    def seen(self, row: int) -> Wait:
        """Row number `row` is there."""
        slots = self.g.schedule.row_slots
        return self.row_full[row % slots].wait(row // slots)

    def read(self, operands: Iterable[tuple[Memory, object]]) -> Warp:
        for memory, data in operands:
            memory.read(data)
            memory.readers += 1
        yield None
        for memory, data in operands:
            memory.read(data)
            memory.readers -= 1

    def accumulate(self, warpgroup: int, warp: int, rows: list, weights: tuple, taps: list) -> Warp:
        """Depthwise outputs, whose taps lie behind the weights, then MMAs; the last are left in flight."""
        group = self.warpgroups[warpgroup]
        for _ in range(2):
            yield from self.read([*rows, *taps])
            yield group.wait(0)
            yield from group.issue(warp, [weights])

    def give(self, warpgroup: int, warp: int, sums: list[tuple[int, int]]) -> Warp:
        memory = self.given[warpgroup][warp]
        memory.write("incoming")
        yield None
        memory.write(sums)
        self.given_full[warpgroup].arrive((warpgroup, warp))

    def take(self, warp: int, sums: list[tuple[int, int]]) -> Warp:
        for warpgroup in range(1, self.g.schedule.warpgroups):
            yield self.given_full[warpgroup].sync((0, warp))
            memory = self.given[warpgroup][warp]
            given = memory.data
            yield from self.read([(memory, given)])
            sums += given
            self.given_free[warpgroup].arrive((0, warp))

    def taken(self, warpgroup: int, warp: int) -> Warp:
        yield self.given_free[warpgroup].sync((warpgroup, warp))

    def events(self) -> list[Callable[[], None]]:
        return super().events() + [lambda own=own: own.pop(0)() for own in self.stores.values() if own]

    def left(self, warpgroup: int, warp: int, most: int) -> Wait:
        """At most so many of the warp's stores still read."""
        return lambda: len(self.stores[warpgroup, warp]) <= most

    def meet(self, warpgroup: int, warp: int) -> Wait:
        return self.together[warpgroup].sync((warpgroup, warp))

    def store_tile(self, warpgroup: int, warp: int, tile: object) -> Warp:
        """Contiguous: staged by all warps, stored by those that have a box, which can hold pixels of any."""
        g = self.g
        boxes = g.tile_p * g.tile_q * g.problem.element_size // g.store_bytes
        for group in range(g.store_groups):
            buffer = self.staging[warpgroup][group % g.schedule.staging_groups]
            yield self.left(warpgroup, warp, g.schedule.staging_groups - 1)
            yield self.meet(warpgroup, warp)
            buffer[warp].write("incoming")
            yield None
            buffer[warp].write((tile, group))
            yield self.meet(warpgroup, warp)
            for _ in range(warp, boxes, 4):
                self.store(warpgroup, warp, buffer, (tile, group))
        if hash(tile) % 4 == 0:  # values that did not survive: the stores land before pixels are written anew
            yield self.left(warpgroup, warp, 0)
            yield self.meet(warpgroup, warp)
            assert not any(self.stores[warpgroup, other] for other in range(4)), f"a store overtakes {tile}"

    def store(self, warpgroup: int, warp: int, buffer: list[Memory], data: object) -> None:
        for part in buffer:
            part.read(data)
            part.readers += 1

        def complete() -> None:
            for part in buffer:
                part.read(data)
                part.readers -= 1

        self.stores[warpgroup, warp].append(complete)

    def consume(self, warpgroup: int, warp: int) -> Warp:
        g, s = self.g, self.g.schedule
        stride, me = g.problem.stride[0], (warpgroup, warp)
        warp_p = warp // s.warps_q * g.warp_p
        base = weight = released = turn = 0
        given = False

        def release(end: int) -> Warp:
            nonlocal released
            for row in range(base + released, base + end):
                yield self.seen(row)
                self.row_empty[row % s.row_slots].arrive_as(me)
            released = max(released, end)

        def release_chunk(item: Item) -> Warp:
            nonlocal base, released
            yield from release(item.slots)
            base, released = base + item.slots, 0

        def release_weights() -> Warp:
            nonlocal weight
            slot = weight % s.weight_slots
            yield self.weight_full[slot].wait(weight // s.weight_slots)
            self.weight_empty[slot].arrive_as(me)
            weight += 1

        def skip(item: Item) -> Warp:
            yield from release_chunk(item)
            if not self.resident:
                yield from release_weights()

        for item in self.items:
            first = 0 if g.tiles_down == 1 else (warpgroup - turn) % s.warpgroups if g.march else warpgroup
            turn = (turn + item.steps) % s.warpgroups
            for step in range(first, item.steps, g.tiles_down):
                first_row = 0 if whole_window(g) else step * g.tile_p * stride
                if item.outside(g, step, warpgroup):
                    for _ in range(g.chunks):
                        yield from skip(item)
                    continue
                sums = [(-1, -1)]  # whatever the registers held
                for chunk in range(g.chunks):
                    if s.split_channels and chunk % s.warpgroups != warpgroup:
                        yield from skip(item)
                        continue
                    slot = chunk if self.resident else weight % s.weight_slots
                    yield self.weight_full[slot].wait(0 if self.resident else weight // s.weight_slots)
                    yield from release(first_row)
                    for r in range(1 if whole_window(g) else g.window_rows(g.tile_p)):
                        yield self.seen(base + first_row + r)
                    # The rows of the warp's own pixels.
                    top = first_row + warp_p * stride
                    own = [0] if whole_window(g) else range(top, top + g.window_rows(g.warp_p))
                    rows = [
                        (part, ("rows", item.index, chunk, r))
                        for r in own
                        for part in self.rows[(base + r) % s.row_slots]
                    ]
                    weights = (self.weights[slot], ("weights", item.oc_tile, chunk))
                    taps = [(part, ("taps", item.oc_tile, chunk)) for part in self.taps[slot]] or [weights]
                    yield from self.accumulate(warpgroup, warp, rows, weights, taps)
                    if chunk < (s.warpgroups if s.split_channels else 1):
                        sums.clear()  # the first MMA overwrites
                    sums.append((item.index, chunk))
                    if g.march:
                        yield from release(min(item.slots, first_row + g.tiles_down * g.tile_p * stride))
                    else:
                        yield from release_chunk(item)
                        if not self.resident:
                            yield self.warpgroups[warpgroup].wait(0)
                            yield from release_weights()
                yield self.warpgroups[warpgroup].wait(0)
                if s.split_channels:
                    if warpgroup > 0:
                        if given:
                            yield from self.taken(warpgroup, warp)
                        given = True
                        yield from self.give(warpgroup, warp, sums)
                        continue
                    yield from self.take(warp, sums)
                if not g.channels_last:
                    yield from self.store_tile(warpgroup, warp, (item.index, step, warpgroup))
                self.done.append((item.index, step, warpgroup * s.side_by_side, warp, sorted(sums)))
            if g.march:
                yield from skip(item)
        if given:
            yield from self.taken(warpgroup, warp)


def run(machine: Machine, seed: int) -> None:
    """One block of a launch: see `protocol.run`. All warps of all tiles inside have all passes, once."""
    protocol.run(machine, seed)
    g = machine.g
    barriers = machine.given_full + machine.given_free + machine.together
    assert all(barrier.idle for barrier in barriers), "a barrier outlives the warps"
    places = [
        (item.index, step, beside, warp, [(item.index, chunk) for chunk in range(g.chunks)])
        for item in machine.items
        for step in range(item.steps)
        for beside in (range(g.schedule.warpgroups) if g.schedule.side_by_side else [0])
        for warp in range(4)
        if not item.outside(g, step, beside)
    ]
    assert sorted(machine.done) == places


def random_case(draw: random.Random) -> Case:
    """A small layer of up to 7 passes of 64 channels."""
    kernel = draw.randint(1, 5), draw.randint(1, 3)
    return Case(
        n=draw.choice((1, 2)), c=8 * draw.randint(1, 56), o=draw.choice((8, 16, 24)), h=draw.randint(9, 24),
        w=8 * draw.randint(1, 5), kernel=kernel, stride=(draw.randint(1, 3), 1),
        padding=tuple((k - 1) // 2 * 2 for k in kernel), dilation=(draw.choice((1, 1, 2)), 1),
    )  # fmt: skip


def random_geometry(draw: random.Random) -> Geometry:
    """A small layer under any legal schedule, often with the fewest slots that `check` allows."""
    while True:
        kind, layout = draw.choice(
            (("bf16", "channels_last"),) * 3
            + (("bf16", "contiguous"),) * 3
            + (("ieee", "contiguous"), ("tf32", "channels_last"))
        )
        problem = problem_of(random_case(draw), kind, layout)
        diagonal = kind == "bf16"
        schedule = Schedule(
            "sm90", draw.choice((8, 8, 16, 32, 64)), draw.choice((64, 64, 128, 448)), draw.choice((1, 1, 2)),
            draw.choice((1, 2, 4)), draw.choice((1, 2, 2, 3, 3)), 1, draw.randint(1, 4), draw.choice((1, 1, 2)),
            side_by_side=draw.random() < 0.3, split_channels=diagonal and draw.random() < 0.5,
            mma_q=draw.choice((0, 8, 8, 16)) if diagonal else 0, packs_taps=diagonal and draw.random() < 0.2,
        )  # fmt: skip
        legal = (replace(schedule, row_slots=slots) for slots in range(1, 64))
        fewest = next((s for s in legal if check(problem, s, ARCH)), None)
        if fewest is not None:
            more = replace(fewest, row_slots=fewest.row_slots + draw.choice((0, 0, 1, 2, 5)))
            return Geometry(problem, more if check(problem, more, ARCH) else fewest)


def random_machine(seed: int) -> Machine:
    """A block of a launch on as many multiprocessors as leave it at most 5 items."""
    draw = random.Random(seed)
    g = random_geometry(draw)
    processors = -(-g.items(g.steps(1)) // draw.randint(1, 5))
    return Machine(g, processors, draw.randrange(min(processors, g.items(g.steps(processors)))))


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_any_schedule(first: int):
    for seed in range(first, first + 50):
        run(random_machine(seed), seed)


@pytest.mark.parametrize("case", [Case(n=2, c=64, o=64, h=40, w=40), Case(n=1, c=240, o=80, h=28, w=28), LATE], ids=str)
@pytest.mark.parametrize("kind", ["bf16", "tf32"])
def test_proposed_schedules(case: Case, kind: str):
    problem = problem_of(case, kind, "channels_last")
    for seed, schedule in enumerate(in_one_kernel(candidates(problem, ARCH, "sm90"))):
        g = Geometry(problem, schedule)
        run(Machine(g, -(-g.items(g.steps(1)) // 3)), seed)


def split(**fields) -> Machine:
    """Three warpgroups that share the eight passes of LATE, over three items."""
    problem = problem_of(LATE, "bf16", "channels_last")
    schedule = Schedule("sm90", 64, 64, 1, 4, 3, 2, 2, split_channels=True, mma_q=8)
    assert check(problem, replace(schedule, **fields), ARCH)
    return Machine(Geometry(problem, replace(schedule, **fields)), 14)


def test_fewer_row_slots_than_check_allows_stop():
    """The rule for row_slots in schedule.check: a tile's window."""
    problem = problem_of(Case(c=64, o=64, h=32, w=32), "bf16", "channels_last")
    for mma_q in (0, 8):
        schedule = Schedule("sm90", 64, 64, 1, 2, 2, 1, 1, mma_q=mma_q)
        window = Geometry(problem, schedule).window_rows(Geometry(problem, schedule).tile_p)
        enough, fewer = replace(schedule, row_slots=window), replace(schedule, row_slots=window - 1)
        assert check(problem, enough, ARCH) and "hold no window" in check(problem, fewer, ARCH).reason
        run(Machine(Geometry(problem, enough)), 0)
        with pytest.raises(AssertionError, match="wait for ever"):
            run(Machine(Geometry(problem, fewer)), 0)


@pytest.mark.parametrize("warpgroups", CONSUMER_REGISTERS)
def test_more_registers_than_a_launch_gives_stop(monkeypatch: pytest.MonkeyPatch, warpgroups: int):
    """setmaxnreg takes them from what the launch gave to the block, not from the multiprocessor."""
    problem = problem_of(Case(c=64, o=64, h=32, w=32), "bf16", "contiguous")
    schedule = Schedule("sm90", 64, 64, 1, 2, warpgroups, 8, 1, mma_q=8)
    assert check(problem, schedule, ARCH)
    run(Machine(Geometry(problem, schedule)), 0)
    launched = 65536 // (128 * (warpgroups + 1)) // 8 * 8
    room = (warpgroups + 1) * launched - warpgroups * Geometry(problem, schedule).consumer_registers
    for registers in (room, room + 8):
        monkeypatch.setattr(Geometry, "producer_registers", registers)
        if registers == room:
            run(Machine(Geometry(problem, schedule)), 0)
        else:
            with pytest.raises(AssertionError, match="wait for ever"):
                run(Machine(Geometry(problem, schedule)), 0)


def contiguous() -> Machine:
    """Two warpgroups whose warps stage and store together, in two buffers."""
    problem = problem_of(Case(n=1, c=64, o=64, h=16, w=64), "ieee", "contiguous")
    schedule = Schedule("sm90", 64, 64, 1, 4, 2, 4, 1, 2)
    assert check(problem, schedule, ARCH)
    return Machine(Geometry(problem, schedule))


@pytest.mark.parametrize(
    ("machine", "owner", "wait", "found"),
    [
        (split, Warpgroup, "wait", "is read"),  # weights given back under MMAs
        (split, Machine, "taken", "is read|counted twice"),  # sums given again
        (split, Machine, "seen", "counted twice|was to be read"),  # rows given back that had not come
        (contiguous, Machine, "left", "is read|overtakes"),  # a buffer staged anew under its store
        (contiguous, Machine, "meet", "is read|was to be read"),  # a group stored that other warps still stage
        (split, Machine, "landed", "is read|was to be read"),  # taps filled in over others
    ],
)
def test_a_wait_left_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[], Machine], owner: type, wait: str, found: str
):
    """The model would show it."""
    for seed in range(5):
        run(machine(), seed)
    monkeypatch.setattr(owner, wait, lambda *arguments: iter(()) if wait == "taken" else None)
    with pytest.raises(AssertionError, match=found):
        for seed in range(40):
            run(machine(), seed)
