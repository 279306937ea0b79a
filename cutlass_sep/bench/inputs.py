"""Problems to measure and fresh tensors for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..problem import KERNEL_DTYPES, Pads, SeparableConv2dProblem

#: The lead shape (public as KernelBench level 1 #86): id and extents.
LEAD_ID = "lead2d"
_LEAD = {
    "n": 16, "c": 64, "h": 512, "w": 512, "o": 128, "kernel": (3, 3), "stride": (1, 1), "padding": Pads(1, 1, 1, 1),
    "dilation": (1, 1),
}  # fmt: skip
_ACTIVATION_NAMES = {
    None: None, "ReLU": "relu", "ReLU6": "relu6", "SiLU": "silu", "Hardswish": "hardswish", "GELU": "gelu",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One problem to measure under a name. `note` says what of the named layer is left out."""

    id: str
    problem: SeparableConv2dProblem
    note: str | None = None


@dataclass(frozen=True)
class Tensors:
    """The arguments of one call: x [N,C,H,W], dw_weight [C,1,kh,kw], pw_weight [O,C,1,1], biases [C], [O] or None."""

    x: torch.Tensor
    dw_weight: torch.Tensor
    pw_weight: torch.Tensor
    dw_bias: torch.Tensor | None
    pw_bias: torch.Tensor | None

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter((self.x, self.dw_weight, self.pw_weight, self.dw_bias, self.pw_bias))


def lead(dtype: str = "float32", layout: str = "contiguous", fp32_precision: str = "ieee") -> Case:
    """The lead shape of the 2-D operator, without biases and activations."""
    problem = SeparableConv2dProblem(
        **_LEAD, dtype=dtype, layout=layout, dw_bias=False, pw_bias=False, mid_activation=None, activation=None,
        fp32_precision=fp32_precision if dtype == "float32" else None, alignment=1,
    )  # fmt: skip
    return Case(LEAD_ID, problem.with_alignment())


def is_lead(problem: SeparableConv2dProblem) -> bool:
    """Whether the extents are those of the lead shape."""
    return all(getattr(problem, name) == value for name, value in _LEAD.items())


def variant(case: Case, dtype: str, layout: str, fp32_precision: str | None) -> Case:
    """The case in another dtype, layout and precision (ignored unless float32)."""
    if dtype not in KERNEL_DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot be measured; it must be one of {', '.join(KERNEL_DTYPES)}")
    precision = (fp32_precision or "ieee") if dtype == "float32" else None
    problem = replace(case.problem, dtype=dtype, layout=layout, fp32_precision=precision)
    return replace(case, problem=problem.with_alignment())


def layers(path: Path) -> tuple[list[Case], dict[str, str]]:
    """The layer set of a JSON-lines file in float32: the cases, and {id: reason} of those that cannot be expressed.

    Raises OSError, or ValueError naming the line that is no layer.
    """
    cases, left_out = [], {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            reason = _inexpressible(row)
            if reason:
                left_out[row["id"]] = reason
            else:
                cases.append(_layer(row))
                # Whatever a call would refuse.
                problem = cases[-1].problem
                SeparableConv2dProblem.from_tensors(*tensors(problem, "meta"), **options(problem))
        except (ValueError, KeyError, TypeError, RuntimeError, ArithmeticError) as error:
            raise ValueError(f"line {number}: {type(error).__name__}: {error}") from error
    return cases, left_out


def _inexpressible(row: dict[str, Any]) -> str | None:
    if row["se"]:
        return "squeeze-excite (a global pool) sits between the two convolutions"
    if isinstance(row["padding"], list):
        return f"padding differs on opposite sides: {row['padding']} (top, bottom, left, right)"
    return None


def _layer(row: dict[str, Any]) -> Case:
    """A layer as the 2-D operator computes it: BatchNorm counts as folded into biases, 1-D layers have H = 1."""
    k, s, p, d = row["kernel"], row["stride"], row["padding"], row["dilation"]
    one_d = "l" in row
    notes = []
    if row["residual"]:
        notes.append("without the residual")
    if one_d:
        notes.append("1-D layer with H = 1")
    problem = SeparableConv2dProblem(
        n=row["batch"], c=row["cin"], h=1 if one_d else row["h"], w=row["l"] if one_d else row["w"], o=row["cout"],
        kernel=(1, k) if one_d else (k, k), stride=(1, s) if one_d else (s, s),
        padding=Pads(0, 0, p, p) if one_d else Pads(p, p, p, p), dilation=(1, d) if one_d else (d, d),
        dtype="float32", layout="contiguous",
        dw_bias=bool(row["bias"]) or row["mid_norm"] == "BN", pw_bias=bool(row["pw_bias"]) or row["out_norm"] == "BN",
        mid_activation=_ACTIVATION_NAMES[row["mid_activation"]], activation=_ACTIVATION_NAMES[row["out_activation"]],
        fp32_precision="ieee", alignment=1,
    )  # fmt: skip
    return Case(row["id"], problem.with_alignment(), "; ".join(notes) or None)


def padding_argument(problem: SeparableConv2dProblem) -> tuple[int, int] | str:
    """The `padding` argument of a call that makes this problem: a pair, or 'same' where opposite sides differ."""
    top, bottom, left, right = problem.padding
    return (top, left) if (top, left) == (bottom, right) else "same"


def options(problem: SeparableConv2dProblem) -> dict[str, Any]:
    """Keyword arguments of `functional.depthwise_separable_conv2d` and of `op.DepthwiseSeparableConv2d`."""
    return {
        "stride": problem.stride,
        "padding": padding_argument(problem),
        "dilation": problem.dilation,
        "mid_activation": problem.mid_activation,
        "activation": problem.activation,
        "fp32_precision": problem.fp32_precision or "ieee",
    }


def tensors(problem: SeparableConv2dProblem, device: torch.device | str, seed: int | None = None) -> Tensors:
    """Fresh random arguments of a call: x normal, weights and biases uniform as torch.nn.Conv2d initialises them.

    On device "meta" only shapes, dtypes and strides exist. `seed` None draws from torch's global generator.
    """
    device = torch.device(device)
    dtype = getattr(torch, problem.dtype)
    generator = None
    if seed is not None and device.type != "meta":
        generator = torch.Generator(device).manual_seed(seed)

    def uniform(*shape: int, fan_in: int) -> torch.Tensor:
        bound = 1 / math.sqrt(fan_in)
        return torch.empty(shape, dtype=dtype, device=device).uniform_(-bound, bound, generator=generator)

    format_ = torch.channels_last if problem.layout == "channels_last" else torch.contiguous_format
    x = torch.empty((problem.n, problem.c, problem.h, problem.w), dtype=dtype, device=device, memory_format=format_)
    x.normal_(generator=generator)
    taps = math.prod(problem.kernel)
    return Tensors(
        x=x,
        dw_weight=uniform(problem.c, 1, *problem.kernel, fan_in=taps),
        pw_weight=uniform(problem.o, problem.c, 1, 1, fan_in=problem.c),
        dw_bias=uniform(problem.c, fan_in=taps) if problem.dw_bias else None,
        pw_bias=uniform(problem.o, fan_in=problem.c) if problem.pw_bias else None,
    )
