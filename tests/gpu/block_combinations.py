"""The generated parameter combinations of the block: always the same ones, with fresh data in each run.

As in combinations.py they come in groups that share what is compiled in; N, L and how x lies differ within one.
`wide` groups keep every row of x and y on 16-byte boundaries, so that path sm90 can take them; the others are odd.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from cutlass_sep.block_schedule import FORMS, BlockSchedule, candidates, supports
from cutlass_sep.problem import ACTIVATIONS, SeparableBlock1dProblem
from cutlass_sep.schedule import PATHS

from .calls import STORAGES, VARIANTS, make_block
from .combinations import _deck

_SEED = 2027
_WIDE_GROUPS, _ODD_GROUPS, _SIZES = 12, 16, 8
#: Most elements of x, of the expanded channels, and multiply-adds of the depthwise, so that a run stays short.
_MOST_ELEMENTS, _MOST_WORK = 1 << 19, 1 << 28
#: Taps: 1 to 65, odd and even.
_WIDE_KERNELS = [9, 3, 1, 31, 4, 5, 7, 2, 9, 15, 17, 33]
_ODD_KERNELS = [1, 2, 3, 4, 6, 8, 9, 10, 11, 13, 22, 27, 31, 48, 64, 65]
_WIDE_DILATIONS = [1, 1, 1, 1, 2, 1, 3, 8, 1, 1, 16, 2]
_ODD_DILATIONS = [1, 2, 1, 3, 1, 128, 4, 1, 7, 1, 2, 64, 1, 5, 1, 2]
_WIDE_C = [8, 16, 24, 32, 64, 64, 72, 128, 256, 40, 96, 16]
_WIDE_E = [8, 16, 40, 48, 64, 96, 128, 136, 256, 512, 72, 32]
_ODD_C = [1, 2, 3, 5, 7, 9, 17, 31, 33, 66, 100, 129, 10, 4, 65, 13]
_ODD_E = [1, 2, 3, 6, 7, 10, 15, 33, 65, 99, 130, 257, 20, 8, 34, 5]
_LENGTHS = {
    True: [8, 16, 24, 32, 40, 64, 72, 120, 128, 136, 184, 256, 264, 520, 1032],
    False: [1, 3, 5, 7, 9, 13, 17, 31, 33, 63, 65, 101, 127, 129, 191, 255, 257, 515, 1031],
}


@dataclass(frozen=True)
class Group:
    """What is compiled in."""

    number: int
    wide: bool
    layout: str
    c: int
    e: int
    o: int
    kernel: int
    dilation: int
    expand_bias: bool
    dw_bias: bool
    project_bias: bool
    activation: str | None
    residual: bool

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(VARIANTS) if self.number % 3 == 0 else tuple(v for v in VARIANTS if v != "tf32")


@dataclass(frozen=True)
class Combination:
    """One call, in every variant of its group."""

    group: Group
    number: int
    n: int
    l: int  # noqa: E741
    storage: str

    @property
    def id(self) -> str:
        g = self.group
        layout = "nlc" if g.layout == "channels_last" else "ncl"
        shape = f"{self.n}x{g.c}x{self.l}-e{g.e}-o{g.o}-k{g.kernel}-d{g.dilation}"
        return f"b{g.number:02}.{self.number}-{layout}-{shape}-{self.storage}"

    def problem(self, variant: str) -> SeparableBlock1dProblem:
        g = self.group
        return make_block(
            variant, g.layout, n=self.n, c=g.c, l=self.l, e=g.e, o=g.o, kernel=g.kernel, dilation=g.dilation,
            expand_bias=g.expand_bias, dw_bias=g.dw_bias, project_bias=g.project_bias, activation=g.activation,
            residual=g.residual, storage=self.storage,
        )  # fmt: skip


@functools.cache
def groups() -> tuple[Group, ...]:
    """All groups; together they meet every activation, every set of biases and taps from 1 to 65."""
    rng = random.Random(_SEED)
    count = _WIDE_GROUPS + _ODD_GROUPS
    activations = _deck(rng, list(ACTIVATIONS), count)
    biases = _deck(rng, [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)], count)
    residuals = _deck(rng, [True, True, False], count)
    layouts = _deck(rng, ["contiguous", "channels_last"], _WIDE_GROUPS) + _deck(
        rng, ["contiguous", "contiguous", "channels_last"], _ODD_GROUPS
    )
    made = []
    for i in range(count):
        wide, j = i < _WIDE_GROUPS, i if i < _WIDE_GROUPS else i - _WIDE_GROUPS
        kernels, dilations, cs, es = (
            (_WIDE_KERNELS, _WIDE_DILATIONS, _WIDE_C, _WIDE_E)
            if wide
            else (_ODD_KERNELS, _ODD_DILATIONS, _ODD_C, _ODD_E)
        )
        c, e, layout, residual = cs[j], es[j], layouts[i], residuals[i]
        step = 8 if wide and layout == "channels_last" else 1
        if layout == "channels_last" and not wide:
            c, e = max(c | 1, 3), max(e | 1, 3)  # odd rows of channels; [N,1,L] is contiguous in either layout
        o = c if residual else c + step * rng.choice([1, 2, 8])
        if layout == "channels_last" and not wide:
            o |= 1
        made.append(
            Group(i, wide, layout, c, e, o, kernels[j], dilations[j], *biases[i], activations[i], residual)
        )  # fmt: skip
    return tuple(made)


@functools.cache
def combinations() -> tuple[Combination, ...]:
    """Every combination, in order."""
    return tuple(c for group in groups() for c in _of_group(group))


def _of_group(group: Group) -> Iterator[Combination]:
    rng = random.Random(_SEED + 1000 * (group.number + 1))
    lengths = _LENGTHS[group.wide]
    if group.layout == "channels_last":  # any length has rows of channels; [N,C,1] is contiguous as well
        lengths = [length for length in (*_LENGTHS[True], *_LENGTHS[False], 2, 85, 150) if length > 1]
    seen: set[tuple[int, int]] = set()
    while len(seen) < _SIZES:
        n = rng.choice([1, 1, 2, 3, 5])
        # The shortest and the longest ones always: less than a tile and than the kernel, and more than a tile.
        number = len(seen)
        length = min(lengths) if number == 0 else rng.choice(sorted(lengths)[-4:] if number == 1 else lengths)
        work = n * group.e * length * group.kernel
        if (n, length) in seen or work > _MOST_WORK or n * max(group.c, group.e, group.o) * length > _MOST_ELEMENTS:
            continue
        seen.add((n, length))
        yield Combination(group, number, n, length, _storage(group, rng, n, length))


def _storage(group: Group, rng: random.Random, n: int, length: int) -> str:
    """How x lies. What is not dense is copied to NCL first, so only that layout has such storages."""
    storages = ["plain", "plain"]
    if not group.wide:
        storages += ["offset"]
    if group.layout == "contiguous" and min(group.c, length) > 1:
        storages += ["sliced", "stepped"] + (["expanded", "exchanged"] if n > 1 else [])
    assert set(storages) <= set(STORAGES)
    return rng.choice(storages)


@functools.cache
def schedule_of(group: Group, variant: str, form: str, path: str, arch: str) -> BlockSchedule | None:
    """The one schedule that the group's combinations run in a variant, or None where `path` has none of `form`.

    The best one by turns, and else any legal one: those are kernels too.
    """
    problem = max((c.problem(variant) for c in _group(group)), key=lambda p: p.bytes)
    if not supports(problem, path, arch, form):
        return None
    legal = candidates(problem, arch, path, form)
    if (group.number + list(VARIANTS).index(variant)) % 2 == 0:
        return legal[0]
    return random.Random(_SEED + group.number).choice(sorted(legal, key=lambda s: str(s.to_json())))


@functools.cache
def _group(group: Group) -> tuple[Combination, ...]:
    return tuple(c for c in combinations() if c.group is group)


def runs(arch: str) -> list[tuple[Combination, str, str, str]]:
    """(combination, variant, form, path): each in every form on every path that supports it."""
    return [
        (c, variant, form, path)
        for c in combinations()
        for variant in c.group.variants
        for form in FORMS
        for path in PATHS
        if schedule_of(c.group, variant, form, path, arch)
    ]
