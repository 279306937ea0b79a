"""Problems of both operators for tests that need no tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from block import Block
from separable import Case

from cutlass_sep.problem import Problem, SeparableBlock1dProblem, SeparableConv2dProblem
from cutlass_sep.schedule import BUILDS, Schedule, check, estimate, ranked, typical

#: The four arithmetics of the kernels, by short names, and the element type of each.
KINDS = {"ieee": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("contiguous", "channels_last")
LEAD = Case(n=16, c=64, o=128, h=512, w=512, dw_bias=False, pw_bias=False)
LEAD_BLOCK = Block(n=32, c=256, e=512, l=4096, kernel=9)


def problem_of(
    case: Case | Block = LEAD, kind: str = "ieee", layout: str = "contiguous", alignment: int = 16
) -> Problem:
    """`kind`: a key of KINDS. `alignment`: of the tensors' addresses, bytes; the problem's may be less."""
    operator = SeparableBlock1dProblem if isinstance(case, Block) else SeparableConv2dProblem
    precision = {"fp32_precision": kind} if kind in ("ieee", "tf32") else {}
    tensors = case.tensors("meta", KINDS[kind], layout)
    return operator.from_tensors(*tensors, **case.options, **precision).with_alignment(alignment)


def in_one_kernel(found: Iterable[Schedule]) -> list[Schedule]:
    """Those whose depthwise stage is no kernel of its own."""
    return [schedule for schedule in found if not schedule.apart]


def best_first(problem: SeparableConv2dProblem, arch: str, path: str, found: list[Schedule]) -> bool:
    """Whether `found` is what the layer keeps of the best legal schedules of its typical sizes, no choice of as many of
    which loses less over these sizes, and then the rest, both in order of estimates.
    """
    sizes = typical(problem)
    legal = [[s for s in ranked(size, path, arch) if check(problem, s, arch)] for size in sizes]
    best = {ranking[0] for ranking in legal if ranking}
    count = min(BUILDS[problem.layout], len(best))

    def time(size: SeparableConv2dProblem, some: Iterable[Schedule]) -> float:
        return min((estimate(size, s, arch) for s in some if check(size, s, arch)), default=math.inf)

    def loss(some: Iterable[Schedule]) -> float:
        return sum(time(size, some) / time(size, best) for size in sizes if time(size, best) < math.inf)

    kept, rest = found[:count], found[count:]
    times = [[estimate(problem, schedule, arch) for schedule in part] for part in (kept, rest)]
    return (
        best.issuperset(kept)
        and loss(kept) <= min(map(loss, itertools.combinations(best, count)), default=0) + 1e-9
        and set(found) == set().union(*legal)
        and all(part == sorted(part) for part in times)
    )
