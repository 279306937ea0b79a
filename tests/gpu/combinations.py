"""The generated parameter combinations: always the same ones, with fresh data in each run.

N, H, W and padding are arguments of a kernel, all else is compiled into it. So combinations come in groups that share
all else: a few hundred combinations need far fewer builds. `wide` groups keep every row of x and y on 16-byte
boundaries, so that path sm90 can take them; the others are made of odd sizes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from cutlass_sep.problem import ACTIVATIONS, SeparableConv2dProblem
from cutlass_sep.schedule import Schedule, candidates, supports

from .calls import FORMS, VARIANTS, make_problem

_SEED = 2026
_WIDE_GROUPS, _WIDE_SIZES = 14, 10
_ODD_GROUPS, _ODD_SIZES = 24, 8
#: Most elements of x, of y, and multiply-adds of the depthwise, so that a run stays short.
_MOST_ELEMENTS, _MOST_WORK = 1 << 19, 1 << 28


@dataclass(frozen=True)
class Group:
    """What is compiled in. `mixed`: one of its kernels is a legal schedule drawn at random instead of the best."""

    number: int
    wide: bool
    layout: str
    c: int
    o: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    dw_bias: bool
    pw_bias: bool
    mid_activation: str | None
    activation: str | None
    wide_padding: int | str  # left and right, of a wide contiguous group: it decides where rows start

    @property
    def extent(self) -> tuple[int, int]:
        """Pixels under the kernel, less one."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(VARIANTS) if self.number % 3 == 0 else tuple(v for v in VARIANTS if v != "tf32")


@dataclass(frozen=True)
class Combination:
    """One call, in every variant of its group."""

    group: Group
    number: int
    n: int
    h: int
    w: int
    padding: tuple[int, int] | str
    form: str

    @property
    def id(self) -> str:
        g = self.group
        layout = "nhwc" if g.layout == "channels_last" else "nchw"
        kernel = "x".join(map(str, g.kernel))
        return f"g{g.number:02}.{self.number}-{layout}-{self.n}x{g.c}x{self.h}x{self.w}-o{g.o}-k{kernel}-{self.form}"

    def problem(self, variant: str) -> SeparableConv2dProblem:
        g = self.group
        return make_problem(
            variant, g.layout, n=self.n, c=g.c, h=self.h, w=self.w, o=g.o, kernel=g.kernel, stride=g.stride,
            padding=self.padding, dilation=g.dilation, dw_bias=g.dw_bias, pw_bias=g.pw_bias,
            mid_activation=g.mid_activation, activation=g.activation, form=self.form,
        )  # fmt: skip


def _deck(rng: random.Random, values: list, count: int) -> list:
    """`count` values, each about equally often, shuffled."""
    deck = (values * (count // len(values) + 1))[:count]
    rng.shuffle(deck)
    return deck


@functools.cache
def groups() -> tuple[Group, ...]:
    """All groups; together they meet every kernel extent from 1 to 31 and every activation in either place."""
    rng = random.Random(_SEED)
    count = _WIDE_GROUPS + _ODD_GROUPS
    mid = _deck(rng, list(ACTIVATIONS), count)
    out = _deck(rng, list(ACTIVATIONS), count)
    biases = _deck(rng, [(True, True), (True, False), (False, True), (False, False)], count)
    layouts = _deck(rng, ["contiguous", "channels_last"], _WIDE_GROUPS) + _deck(
        rng, ["contiguous", "contiguous", "channels_last"], _ODD_GROUPS
    )
    wide_kernels = [
        (3, 3),
        (1, 1),
        (5, 5),
        (2, 2),
        (1, 7),
        (7, 1),
        (3, 5),
        (4, 3),
        (3, 3),
        (2, 4),
        (1, 3),
        (5, 2),
        (3, 3),
        (7, 7),
    ]
    wide_strides = _deck(rng, [(1, 1), (1, 1), (2, 2), (1, 2), (1, 1), (2, 1), (3, 1)], _WIDE_GROUPS)
    # Every extent up to 31 once, and small ones in between.
    extents = [*range(1, 32), *(3, 5, 1, 2, 3, 7, 4, 3, 2, 6, 1, 3, 5, 1, 2, 3, 4)]
    rng.shuffle(extents)
    wide_channels = _deck(rng, [8, 16, 24, 32, 40, 64, 96, 128, 200, 256], _WIDE_GROUPS)
    wide_outputs = _deck(rng, [8, 16, 24, 32, 64, 72, 96, 128, 136, 192, 256], _WIDE_GROUPS)
    odd_channels = _deck(rng, [1, 2, 3, 5, 7, 9, 17, 31, 33, 66, 100, 129], _ODD_GROUPS)
    odd_outputs = _deck(rng, [1, 2, 3, 5, 7, 10, 15, 33, 65, 99, 130, 257], _ODD_GROUPS)
    made = []
    for i in range(count):
        wide, layout = i < _WIDE_GROUPS, layouts[i]
        if wide:
            kernel, stride, c, o = wide_kernels[i], wide_strides[i], wide_channels[i], wide_outputs[i]
            # On NCHW no channel count is odd to TMA.
            c, o = (c + rng.choice((0, 1, 3)), o + rng.choice((0, 1, 5))) if layout == "contiguous" else (c, o)
            dilation = rng.choice([(1, 1), (1, 1), (2, 2), (1, 2), (3, 1)])
        else:
            j = i - _WIDE_GROUPS
            kernel = (extents[2 * j], extents[2 * j + 1])
            stride = rng.choice([(1, 1), (1, 1), (2, 2), (1, 3), (4, 1), (3, 2)])
            dilation = rng.choice([(1, 1), (1, 1), (2, 1), (1, 3), (5, 2)])
            c, o = odd_channels[j], odd_outputs[j]
            if layout == "channels_last":
                c = max(c | 1, 3)  # odd rows of channels; [N,1,H,W] is contiguous in either layout
        # Where the padding keeps a row of y as aligned as one of x (see _wide).
        extent = dilation[1] * (kernel[1] - 1)
        wide_padding = "same" if stride == (1, 1) and extent % 2 else extent // 2
        if wide and layout == "contiguous" and stride[1] == 1 and extent % 2 and stride[0] > 1:
            stride, wide_padding = (1, 1), "same"
        made.append(
            Group(i, wide, layout, c, o, kernel, stride, dilation, *biases[i], mid[i], out[i], wide_padding)
        )  # fmt: skip
    return tuple(made)


@functools.cache
def combinations() -> tuple[Combination, ...]:
    """Every combination, in order."""
    return tuple(c for group in groups() for c in _of_group(group))


def _of_group(group: Group) -> Iterator[Combination]:
    rng = random.Random(_SEED + 1000 * (group.number + 1))
    wanted = _WIDE_SIZES if group.wide else _ODD_SIZES
    seen = set()
    while len(seen) < wanted:
        sizes = (_wide if group.wide else _odd)(group, rng, len(seen))
        if sizes is None or sizes in seen:
            continue
        n, h, w, padding = sizes
        candidate = Combination(group, len(seen), n, h, w, padding, _form(group, rng, n, h, w))
        problem = candidate.problem("fp32")
        work = problem.n * problem.c * problem.p * problem.q * group.kernel[0] * group.kernel[1]
        if min(problem.p, problem.q) < 1 or work > _MOST_WORK:
            continue
        if max(n * group.c * h * w, n * group.o * problem.p * problem.q) > _MOST_ELEMENTS:
            continue
        seen.add(sizes)
        yield candidate


def _wide(group: Group, rng: random.Random, index: int) -> tuple | None:
    """Sizes that keep 16-byte rows; on channels_last those are rows of channels and any size does."""
    n = rng.choice([1, 1, 2, 3, 5])
    extent_h, extent_w = group.extent
    h = 1 if index == 0 else rng.choice([1, 2, 3, 6, 9, 14, 20, 33])
    if group.layout == "channels_last":
        w = rng.choice([1, 2, 5, 7, 8, 15, 17, 24, 30, 56]) if h > 1 else rng.choice([2, 5, 16, 31])
        padding = _padding(group, rng, h, w)
        return n, h, w, padding
    w = 8 * group.stride[1] * rng.choice([1, 2, 3, 4, 5, 7, 9, 16])
    if group.wide_padding == "same":
        return n, h, w, "same"
    left = group.wide_padding + (8 if rng.random() < 0.2 else 0) * group.stride[1]
    least = max(0, -(-(extent_h + 1 - h) // 2))
    return n, h, w, (least + rng.choice([0, 0, 1, 2]), left)


def _odd(group: Group, rng: random.Random, index: int) -> tuple | None:
    """Sizes that are no multiple of anything; rows of x on NCHW have an odd width."""
    n = rng.choice([1, 1, 2, 3, 7])
    sizes = [1, 3, 5, 7, 9, 11, 13, 17, 21, 27, 35, 45, 63]
    h, w = rng.choice([*sizes, 2, 6, 10, 28]), rng.choice(sizes)
    if index == 0:
        n, h, w = 1, 1, rng.choice(sizes[1:])
    elif index == 1:
        h, w = rng.choice(sizes[1:]), 1
    elif index == 2 and group.layout == "contiguous":
        n, h, w = 1, 1, 1
    return n, h, w, _padding(group, rng, h, w)


def _padding(group: Group, rng: random.Random, h: int, w: int) -> tuple[int, int] | str:
    kinds = ["free", "free", "free"]
    if group.stride == (1, 1):
        kinds += ["same", "same"]
    if h > group.extent[0] and w > group.extent[1]:
        kinds += ["valid", "valid"]
    kind = rng.choice(kinds)
    if kind != "free":
        return kind
    least = (max(0, -(-(e + 1 - size) // 2)) for e, size in zip(group.extent, (h, w), strict=True))
    return tuple(pad + rng.choice([0, 0, 1, 2, 5]) for pad in least)


def _form(group: Group, rng: random.Random, n: int, h: int, w: int) -> str:
    """How x lies. What is not dense is copied to NCHW first, so only that layout has such forms."""
    forms = ["plain", "plain"]
    if not group.wide:
        forms += ["offset"]
    if group.layout == "contiguous" and min(group.c, h, w) > 1:
        forms += ["sliced", "transposed"] + (["expanded"] if n > 1 else [])
    assert set(forms) <= set(FORMS)
    return rng.choice(forms)


@functools.cache
def schedule_of(group: Group, variant: str, path: str, arch: str) -> Schedule | None:
    """The one schedule that the group's combinations run in a variant, or None where `path` cannot.

    The best one by turns, and else any legal one: those are kernels too.
    """
    problem = max((c.problem(variant) for c in _group(group)), key=lambda p: p.bytes)
    if not supports(problem, path, arch):
        return None
    legal = candidates(problem, arch, path)
    if (group.number + list(VARIANTS).index(variant)) % 2 == 0:
        return legal[0]
    return random.Random(_SEED + group.number).choice(sorted(legal, key=lambda s: str(s.to_json())))


@functools.cache
def _group(group: Group) -> tuple[Combination, ...]:
    return tuple(c for c in combinations() if c.group is group)


def runs(arch: str) -> list[tuple[Combination, str, str]]:
    """(combination, variant, path): each on portable, and on sm90 wherever that supports it."""
    return [
        (c, variant, path)
        for c in combinations()
        for variant in c.group.variants
        for path in ("portable", "sm90")
        if path == "portable" or schedule_of(c.group, variant, path, arch)
    ]
