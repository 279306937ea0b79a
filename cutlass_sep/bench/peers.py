"""The peers: PyTorch's own pair of convolutions, eager and compiled, at a stated precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ..problem import SeparableConv2dProblem
from ..reference import activate
from .inputs import padding_argument

#: Implementations that can be measured beside cutlass_sep, by the name in a results row.
PEERS = ("eager", "compile", "compile-max-autotune")


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


def comparable(row: dict[str, Any], peer: dict[str, Any]) -> None:
    """Raise Unfair unless two results rows are of the same computation at the same precision, timed the same way."""
    for field in ("id", "op", "shape", "dtype", "fp32_precision", "timing"):
        if row[field] != peer[field]:
            raise Unfair(
                f"{row['impl']} and {peer['impl']} cannot be compared: {field} is {row[field]!r} and {peer[field]!r}"
            )


def eager(problem: SeparableConv2dProblem) -> Callable[..., torch.Tensor]:
    """f(x, dw_weight, pw_weight, dw_bias, pw_bias): depthwise, activation, pointwise, activation."""
    stride, padding, dilation, groups = problem.stride, padding_argument(problem), problem.dilation, problem.c
    mid, out = problem.mid_activation, problem.activation

    def pair(x, dw_weight, pw_weight, dw_bias, pw_bias):
        hidden = activate(F.conv2d(x, dw_weight, dw_bias, stride, padding, dilation, groups), mid)
        return activate(F.conv2d(hidden, pw_weight, pw_bias), out)

    return pair


def build(impl: str, problem: SeparableConv2dProblem) -> Callable[..., torch.Tensor]:
    """A peer by name, called like `eager`'s. Compiled ones compile on first use: do that under the timing's `flags`.

    Call torch.compiler.reset() between problems: all share one code object, whose compilations are limited.
    """
    pair = eager(problem)
    if impl == "eager":
        return pair
    if impl not in PEERS:
        raise ValueError(f"peer {impl!r} is not known; peers are {', '.join(PEERS)}")
    # Without CUDA graphs inside: they would return one buffer over and over, and graphs are a way of timing here.
    mode = "max-autotune-no-cudagraphs" if impl == "compile-max-autotune" else "default"
    return torch.compile(pair, dynamic=False, fullgraph=True, mode=mode)
