"""The peers: PyTorch's own convolutions, eager and compiled, at a stated precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ..problem import Problem, SeparableBlock1dProblem, SeparableConv2dProblem
from ..reference import activate
from . import results
from .inputs import padding_argument

#: Implementations that can be measured beside cutlass_sep, by the name in a results row.
PEERS = ("eager", "compile", "compile-max-autotune")
#: What two results rows must have in common to be compared.
ALIKE = ("id", "op", "shape", "dtype", "fp32_precision", "timing")
#: By how much eager may differ between two measurements of a problem of which one takes the other's compiled peers.
DRIFT_ALLOWED = 0.03


class Unfair(RuntimeError):
    """Two measurements that must not be compared, or one that does not measure what it says."""


@contextlib.contextmanager
def flags(fp32_precision: str | None) -> Iterator[None]:
    """Run PyTorch's own convolutions at this precision, with cudnn.benchmark on; every flag is put back.

    Raises Unfair at the end if the code inside changed the precision.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark)
    wanted = fp32_precision == "tf32"
    cudnn.allow_tf32 = matmul.allow_tf32 = wanted
    cudnn.benchmark = True
    try:
        yield
        found = (cudnn.allow_tf32, matmul.allow_tf32)
        if found != (wanted, wanted):
            raise Unfair(
                f"measured as fp32_precision={fp32_precision!r}, but the code timed left torch's TF32 flags at "
                f"cudnn={found[0]}, matmul={found[1]}"
            )
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


def alike(row: dict[str, Any]) -> str:
    """Canonical text of what a row has in common with those that it may be compared with."""
    return results.canonical([row[name] for name in ALIKE])


def comparable(row: dict[str, Any], peer: dict[str, Any]) -> None:
    """Raise Unfair unless two results rows are of the same computation at the same precision, timed the same way."""
    for field in ALIKE:
        if row[field] != peer[field]:
            raise Unfair(
                f"{row['impl']} and {peer['impl']} cannot be compared: {field} is {row[field]!r} and {peer[field]!r}"
            )


def drifted(eager: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether eager was not the same in two measurements of it."""
    return abs(eager["median_ms"] / other["median_ms"] - 1) > DRIFT_ALLOWED


def with_lent(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and compiled peers that one of two names of a problem has and the other lacks, under that name too.

    A lead shape is also a layer of a network, or part of the sweep. `lent_by` of an added row is the id that it was
    measured under. Only where eager, measured under both in the peer's layout, has not drifted in between.
    """
    rows = list(rows)
    plain, compiled, ids = {}, {}, {}
    for row in rows:
        problem = results.problem_key(row)
        ids.setdefault(problem, {})[row["id"]] = None
        if row["impl"] == "eager":
            plain[problem, row["id"], row["layout"]] = row
        elif row["impl"] in PEERS:
            compiled[problem, row["id"], row["layout"], row["impl"]] = row
    lent = {}
    for (problem, lender, layout, impl), row in compiled.items():
        for name in ids[problem]:
            taken = problem, name, layout, impl
            own, other = plain.get((problem, name, layout)), plain.get((problem, lender, layout))
            if taken not in compiled and taken not in lent and own and other and not drifted(own, other):
                lent[taken] = row | {"id": name, "lent_by": lender}
    return [*rows, *lent.values()]


def eager(problem: Problem) -> Callable[..., torch.Tensor]:
    """The operator as PyTorch's convolutions; takes the problem's tensors in the operator's order.

    The block is written with conv1d, for channels_last with conv2d on [N,C,1,L], for which cuDNN has such kernels.
    """
    if problem.op == "dwsep2d":
        return _pair(problem)
    return _block_channels_last(problem) if problem.layout == "channels_last" else _block(problem)


def _pair(problem: SeparableConv2dProblem) -> Callable[..., torch.Tensor]:
    stride, padding, dilation, groups = problem.stride, padding_argument(problem), problem.dilation, problem.c
    mid, out = problem.mid_activation, problem.activation

    def pair(x, dw_weight, pw_weight, dw_bias, pw_bias):
        hidden = activate(F.conv2d(x, dw_weight, dw_bias, stride, padding, dilation, groups), mid)
        return activate(F.conv2d(hidden, pw_weight, pw_bias), out)

    return pair


def _block(problem: SeparableBlock1dProblem) -> Callable[..., torch.Tensor]:
    padding, dilation, groups = _block_padding(problem), problem.dilation, problem.e
    activation, residual = problem.activation, problem.residual

    def block(x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias):
        hidden = F.conv1d(x, expand_weight, expand_bias)
        hidden = activate(F.conv1d(hidden, dw_weight, dw_bias, 1, padding, dilation, groups), activation)
        y = F.conv1d(hidden, project_weight, project_bias)
        return y + x if residual else y

    return block


def _block_channels_last(problem: SeparableBlock1dProblem) -> Callable[..., torch.Tensor]:
    padding, dilation, groups = _block_padding(problem), (1, problem.dilation), problem.e
    padding = padding if isinstance(padding, str) else (0, padding)
    activation, residual = problem.activation, problem.residual

    def block(x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias):
        # A view: [N,L,C] memory is channels_last memory of [N,C,1,L].
        x = x.unsqueeze(2)
        hidden = F.conv2d(x, expand_weight.unsqueeze(2), expand_bias)
        hidden = F.conv2d(hidden, dw_weight.unsqueeze(2), dw_bias, 1, padding, dilation, groups)
        y = F.conv2d(activate(hidden, activation), project_weight.unsqueeze(2), project_bias)
        return (y + x if residual else y).squeeze(2)

    return block


def _block_padding(problem: SeparableBlock1dProblem) -> int | str:
    left, right = problem.pads
    return left if left == right else "same"


def build(impl: str, problem: Problem) -> Callable[..., torch.Tensor]:
    """A peer by name, called like `eager`'s. Compiled ones compile on first use: do that under the timing's `flags`.

    Call torch.compiler.reset() between problems: all share one code object, whose compilations are limited.
    """
    convolutions = eager(problem)
    if impl == "eager":
        return convolutions
    if impl not in PEERS:
        raise ValueError(f"peer {impl!r} is not known; peers are {', '.join(PEERS)}")
    # Without CUDA graphs inside: they would return one buffer over and over, and graphs are a way of timing here.
    mode = "max-autotune-no-cudagraphs" if impl == "compile-max-autotune" else "default"
    return torch.compile(convolutions, dynamic=False, fullgraph=True, mode=mode)
