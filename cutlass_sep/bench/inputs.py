"""Problems to measure and fresh tensors for them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import functional, op
from ..problem import KERNEL_DTYPES, Pads, Problem, SeparableBlock1dProblem, SeparableConv2dProblem

#: The lead shapes by operator: id and extents. The 2-D one is public as KernelBench level 1 #86.
LEAD_ID, LEAD1D_ID = "lead2d", "lead1d"
_LEADS = {
    "dwsep2d": {
        "n": 16, "c": 64, "h": 512, "w": 512, "o": 128, "kernel": (3, 3), "stride": (1, 1),
        "padding": Pads(1, 1, 1, 1), "dilation": (1, 1),
    },
    "sepblock1d": {"n": 32, "c": 256, "l": 4096, "e": 512, "o": 256, "kernel": 9, "dilation": 1},
}  # fmt: skip
_ACTIVATION_NAMES = {
    None: None, "ReLU": "relu", "ReLU6": "relu6", "SiLU": "silu", "Hardswish": "hardswish", "GELU": "gelu",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One problem to measure under a name. `note` says what of the named layer is left out."""

    id: str
    problem: Problem
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


@dataclass(frozen=True)
class BlockTensors:
    """The arguments of one call of the block: x [N,C,L], expand_weight [E,C,1], dw_weight [E,1,k], project_weight
    [O,E,1], biases [E], [E], [O] or None.
    """

    x: torch.Tensor
    expand_weight: torch.Tensor
    dw_weight: torch.Tensor
    project_weight: torch.Tensor
    expand_bias: torch.Tensor | None
    dw_bias: torch.Tensor | None
    project_bias: torch.Tensor | None

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        weights = (self.expand_weight, self.dw_weight, self.project_weight)
        return iter((self.x, *weights, self.expand_bias, self.dw_bias, self.project_bias))


AnyTensors = Tensors | BlockTensors


def lead(dtype: str = "float32", layout: str = "contiguous", fp32_precision: str = "ieee") -> Case:
    """The lead shape of the 2-D operator, without biases and activations."""
    problem = SeparableConv2dProblem(
        **_LEADS["dwsep2d"], dtype=dtype, layout=layout, dw_bias=False, pw_bias=False, mid_activation=None,
        activation=None, fp32_precision=fp32_precision if dtype == "float32" else None, alignment=1,
    )  # fmt: skip
    return Case(LEAD_ID, problem.with_alignment())


def lead1d(dtype: str = "float32", layout: str = "contiguous", fp32_precision: str = "ieee") -> Case:
    """The lead shape of the 1-D block, with every bias, GELU and the residual."""
    return variant(Case(LEAD1D_ID, block_problem(**_LEADS["sepblock1d"])), dtype, layout, fp32_precision)


def block_problem(n: int, c: int, l: int, e: int, kernel: int, dilation: int = 1, o: int | None = None):  # noqa: E741
    """A block with every bias, GELU and the residual in fp32-grade float32, as the module has it by default."""
    return SeparableBlock1dProblem(
        n=n, c=c, l=l, e=e, o=c if o is None else o, kernel=kernel, dilation=dilation, dtype="float32",
        layout="contiguous", expand_bias=True, dw_bias=True, project_bias=True, activation="gelu", residual=True,
        fp32_precision="ieee", alignment=1,
    ).with_alignment()  # fmt: skip


def sweep1d() -> list[Case]:
    """Blocks around the lead shape of the block, for a picture of where fusion pays; N*L is that of the lead shape.

    L = 64 to 131072 for each of k = 3, 9, 31; E/C = 1, 2, 4, 6 at C = 256; C = 64 to 512 with E = 2C.
    """
    lead = _LEADS["sepblock1d"]
    pixels = lead["n"] * lead["l"]
    shapes = [{"l": 2**power, "kernel": k} for k in (3, 9, 31) for power in range(6, 18)]
    shapes += [{"e": ratio * lead["c"]} for ratio in (1, 4, 6)]
    shapes += [{"c": c, "e": 2 * c, "o": c} for c in (64, 128, 512)]
    cases = []
    for shape in shapes:
        extents = lead | shape
        extents["n"] = pixels // extents["l"]
        name = "sweep1d." + ".".join(f"{short}{extents[short]}" for short in "ncel") + f".k{extents['kernel']}"
        cases.append(Case(name, block_problem(**extents)))
    return cases


def is_lead(problem: Problem) -> bool:
    """Whether the extents are those of the operator's lead shape."""
    return all(getattr(problem, name) == value for name, value in _LEADS[problem.op].items())


def function(problem: Problem) -> Callable[..., torch.Tensor]:
    """The function of this problem's operator; takes its tensors and `options`."""
    return functional.depthwise_separable_conv2d if problem.op == "dwsep2d" else functional.separable_conv_block1d


def operation(problem: Problem) -> type:
    """The class of `op` for this problem's operator."""
    return op.DepthwiseSeparableConv2d if problem.op == "dwsep2d" else op.SeparableConvBlock1d


def empty(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An uninitialised x or y [N,C,H,W] or [N,C,L] in this layout."""
    if layout == "contiguous":
        return torch.empty(shape, dtype=dtype, device=device)
    n, c, *spatial = shape
    return torch.empty((n, *spatial, c), dtype=dtype, device=device).movedim(-1, 1)


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
                type(problem).from_tensors(*tensors(problem, "meta"), **options(problem))
        except (ValueError, KeyError, TypeError, RuntimeError, ArithmeticError) as error:
            raise ValueError(f"line {number}: {type(error).__name__}: {error}") from error
    return cases, left_out


def _is_block(row: dict[str, Any]) -> bool:
    return row["op"] == "sepblock1d" and row["cexp"] is not None


def _inexpressible(row: dict[str, Any]) -> str | None:
    if _is_block(row):
        return None
    if row["se"]:
        return "squeeze-excite (a global pool) sits between the two convolutions"
    if isinstance(row["padding"], list):
        return f"padding differs on opposite sides: {row['padding']} (top, bottom, left, right)"
    return None


def _layer(row: dict[str, Any]) -> Case:
    """A layer as the operators compute it: BatchNorm counts as folded into biases, 1-D layers that expand nothing have
    H = 1. Of a 1-D block only the shape is taken: activations, norms and padding are the block's own.
    """
    k, s, p, d = row["kernel"], row["stride"], row["padding"], row["dilation"]
    if _is_block(row):
        problem = block_problem(n=row["batch"], c=row["cin"], l=row["l"], e=row["cexp"], kernel=k, dilation=d)
        return Case(row["id"], problem, "the shape alone: biases, GELU and residual are the block's")
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


def options(problem: Problem) -> dict[str, Any]:
    """Keyword arguments of the problem's `function` and `operation`."""
    if problem.op == "sepblock1d":
        names = ("dilation", "activation", "residual")
        return {name: getattr(problem, name) for name in names} | {"fp32_precision": problem.fp32_precision or "ieee"}
    return {
        "stride": problem.stride,
        "padding": padding_argument(problem),
        "dilation": problem.dilation,
        "mid_activation": problem.mid_activation,
        "activation": problem.activation,
        "fp32_precision": problem.fp32_precision or "ieee",
    }


def tensors(problem: Problem, device: torch.device | str, seed: int | None = None) -> AnyTensors:
    """Fresh random arguments of a call: x normal, weights and biases uniform as PyTorch's convolutions initialise them.

    On device "meta" only shapes, dtypes and strides exist. `seed` None draws from torch's global generator.
    """
    device = torch.device(device)
    dtype = getattr(torch, problem.dtype)
    generator = None
    if seed is not None and device.type != "meta":
        generator = torch.Generator(device).manual_seed(seed)

    def uniform(*shape: int, fan_in: int, wanted: bool = True) -> torch.Tensor | None:
        bound = 1 / math.sqrt(fan_in)
        if not wanted:
            return None
        return torch.empty(shape, dtype=dtype, device=device).uniform_(-bound, bound, generator=generator)

    p = problem
    if p.op == "sepblock1d":
        x = empty((p.n, p.c, p.l), p.layout, dtype, device).normal_(generator=generator)
        return BlockTensors(
            x=x,
            expand_weight=uniform(p.e, p.c, 1, fan_in=p.c),
            dw_weight=uniform(p.e, 1, p.kernel, fan_in=p.kernel),
            project_weight=uniform(p.o, p.e, 1, fan_in=p.e),
            expand_bias=uniform(p.e, fan_in=p.c, wanted=p.expand_bias),
            dw_bias=uniform(p.e, fan_in=p.kernel, wanted=p.dw_bias),
            project_bias=uniform(p.o, fan_in=p.e, wanted=p.project_bias),
        )
    x = empty((p.n, p.c, p.h, p.w), p.layout, dtype, device).normal_(generator=generator)
    taps = math.prod(p.kernel)
    return Tensors(
        x=x,
        dw_weight=uniform(p.c, 1, *p.kernel, fan_in=taps),
        pw_weight=uniform(p.o, p.c, 1, 1, fan_in=p.c),
        dw_bias=uniform(p.c, fan_in=taps, wanted=p.dw_bias),
        pw_bias=uniform(p.o, fan_in=p.c, wanted=p.pw_bias),
    )


def input_sets(problem: Problem, sets: int, device: torch.device) -> list[AnyTensors]:
    """Fresh tensors for each of several calls; weights are the same tensors in all of them, as in a layer."""
    first = tensors(problem, device)
    return [first, *(replace(first, x=torch.randn_like(first.x)) for _ in range(sets - 1))]
