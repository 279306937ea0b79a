"""The barriers of the pointwise kernel with both operands in shared memory, of a pair of blocks, under random
interleavings.

The warps do what `produce_tiles` and `multiply_tiles` of templates/pointwise_sm90.cuh do: whoever changes them there
changes them here. Left out are a warp's own staging buffers and the sums.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import protocol
import pytest
from protocol import Barrier, EmptyBarrier, Memory, Wait, Warp, Warpgroup

PAIR = range(2)


class Pair(protocol.Machine):
    """Two blocks; stage number i of either holds its own pixels and the pair's weights, half of them from each."""

    def __init__(self, stages: int, steps: int, tiles: int, warpgroups: int):
        super().__init__(2 * warpgroups)
        self.stages, self.steps, self.count = stages, steps, steps * tiles
        # The producer arrives when it asks; then come the pixels and two halves of the weights.
        self.full = [[Barrier(4) for _ in range(stages)] for _ in PAIR]
        self.empty = [[EmptyBarrier(2 * 4 * warpgroups) for _ in range(stages)] for _ in PAIR]
        self.pixels = [[Memory() for _ in range(stages)] for _ in PAIR]
        self.weights = [[[Memory() for _ in PAIR] for _ in range(stages)] for _ in PAIR]
        self.ended = [False, False]
        self.warps = [self.produce(rank) for rank in PAIR] + [
            self.multiply(rank, warpgroup, warp)
            for rank in PAIR
            for warpgroup in range(warpgroups)
            for warp in range(4)
        ]

    def free(self, rank: int, i: int) -> Wait:
        """Both blocks have read what was in the slot of stage number i before."""
        return self.empty[rank][i % self.stages].wait(i // self.stages + 1)

    def load_weights(self, rank: int, i: int) -> Warp:
        slot = i % self.stages
        yield self.free(rank, i)
        self.full[rank][slot].arrive()
        for block in PAIR:
            self.copy(self.weights[block][slot][rank], self.full[block][slot], ("weights", i, rank))

    def produce(self, rank: int) -> Warp:
        early = min(self.stages, self.steps)
        for i in range(early):
            yield from self.load_weights(rank, i)
        yield None  # the kernel before ends
        for i in range(self.count):
            if i >= early:
                yield from self.load_weights(rank, i)
            slot = i % self.stages
            self.copy(self.pixels[rank][slot], self.full[rank][slot], ("pixels", i))
            yield None
        yield from self.stay(rank)
        self.ended[rank] = True

    def stay(self, rank: int) -> Warp:
        """Until the other block has come for the last time."""
        for i in range(self.count, self.count + self.stages):
            yield self.free(rank, i)

    def release(self, i: int, warp: tuple[int, ...]) -> None:
        for block in PAIR:
            assert not self.ended[block], f"warp {warp} arrives in a block that has ended"
            self.empty[block][i % self.stages].arrive_as(warp)

    def read(self, warpgroup: Warpgroup, left: int) -> Wait:
        """All MMAs but the last `left` batches have completed."""
        return warpgroup.wait(left)

    def come(self, rank: int, i: int) -> Wait:
        """Stage number i is there."""
        return self.full[rank][i % self.stages].wait(i // self.stages)

    def multiply(self, rank: int, number: int, warp: int) -> Warp:
        warpgroup = self.warpgroups[len(self.warpgroups) // 2 * rank + number]
        own = (rank, number, warp)
        for i in range(self.count):
            slot, step = i % self.stages, i % self.steps
            yield self.come(rank, i)
            halves = [(self.weights[rank][slot][half], ("weights", i, half)) for half in PAIR]
            yield from warpgroup.issue(warp, [(self.pixels[rank][slot], ("pixels", i)), *halves])
            yield self.read(warpgroup, 1)
            if step > 0:
                self.release(i - 1, own)
            if step == self.steps - 1:
                yield self.read(warpgroup, 0)
                self.release(i, own)


def random_pair(seed: int) -> Pair:
    draw = random.Random(seed)
    return Pair(draw.randint(2, 5), draw.randint(1, 7), draw.randint(1, 3), draw.choice((1, 2)))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_any_pair(first: int):
    for seed in range(first, first + 50):
        protocol.run(random_pair(seed), seed)


def no_wait(*_) -> Wait:
    return None


def no_warp(*_) -> Warp:
    yield None


@pytest.mark.parametrize(
    ("wait", "without", "found"),
    [
        ("read", no_wait, "is read"),  # a stage given back under MMAs
        ("come", no_wait, "was to be read"),
        ("stay", no_warp, "has ended"),
        ("free", no_wait, "is read|was to be read|wait for ever"),
    ],
)
def test_a_wait_left_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, wait: str, without: Callable[..., object], found: str
):
    """The model would show it."""
    monkeypatch.setattr(Pair, wait, without)
    with pytest.raises(AssertionError, match=found):
        for seed in range(60):
            protocol.run(random_pair(seed), seed)
