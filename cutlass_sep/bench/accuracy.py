"""Errors against float64 and what is allowed of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from .. import operators
from ..problem import Problem
from .inputs import AnyTensors, is_lead
from .peers import eager, flags

#: Unit roundoff of TF32: 10 stored bits of mantissa, rounded to nearest.
_TF32_UNIT = 2.0**-11
#: Values of the float64 reference held at a time.
_CHUNK_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Errors:
    """rel = ||y - y64|| / ||y64||, max_abs = max |y - y64|; both NaN unless every element of y is finite."""

    rel: float
    max_abs: float


@dataclass(frozen=True)
class Verdict:
    """An output's errors beside the figure of PyTorch's own arithmetic on the same input, and the limits that follow.

    `baseline` is PyTorch's eager convolutions: strict fp32 for "ieee", TF32 for "tf32", the same dtype for 16 bit.
    """

    ours: Errors
    baseline: Errors
    rel_limit: float
    max_abs_limit: float | None

    @property
    def ok(self) -> bool:
        within = self.ours.rel <= self.rel_limit  # False for NaN
        return within and (self.max_abs_limit is None or self.ours.max_abs <= self.max_abs_limit)

    def to_json(self) -> dict:
        return {
            "ok": self.ok,
            "rel_error": finite_or_none(self.ours.rel),
            "rel_limit": self.rel_limit,
            "max_abs_error": finite_or_none(self.ours.max_abs),
            "max_abs_limit": self.max_abs_limit,
            "baseline_rel_error": finite_or_none(self.baseline.rel),
            "baseline_max_abs_error": finite_or_none(self.baseline.max_abs),
        }


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def errors(problem: Problem, tensors: AnyTensors, outputs: Mapping[str, torch.Tensor]) -> dict[str, Errors]:
    """Errors of each named y against the float64 result, and, as "rounding", of that result rounded.

    The reference is computed a few images at a time on the tensors' device.
    """
    step = max(1, _CHUNK_ELEMENTS // _elements_per_image(problem))
    square: dict[str, float] = dict.fromkeys((*outputs, "rounding"), 0.0)
    largest = dict(square)
    total = 0.0
    for start in range(0, problem.n, step):
        images = slice(start, start + step)
        with _without_search():
            exact = oracle(problem, (tensors.x[images], *tuple(tensors)[1:]))
        total += exact.square().sum().item()
        candidates = {name: y[images] for name, y in outputs.items()}
        candidates["rounding"] = exact.to(tensors.x.dtype)
        for name, y in candidates.items():
            difference = (y.double() - exact).abs_()
            # max() of a tensor with a NaN is NaN, but Python's max() of two floats is not.
            worst = difference.max().item() if difference.numel() else 0.0
            largest[name] = worst if math.isnan(worst) else max(largest[name], worst)
            square[name] += difference.square_().sum().item()
    return {name: _errors(square[name], total, largest[name]) for name in square}


def _elements_per_image(problem: Problem) -> int:
    p = problem
    if p.op == "sepblock1d":
        return p.l * (p.c + 2 * p.e + p.o)
    return p.o * p.p * p.q + p.c * p.h * p.w


def oracle(problem: Problem, tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """y in float64, by PyTorch's form of the operator."""
    operator = operators.of(problem)
    exact = (None if t is None else t.detach().double() for t in tensors)
    *options, _ = operator.options_of(problem)
    return operator.forward(*exact, *options, "ieee")


@contextlib.contextmanager
def _without_search() -> Iterator[None]:
    """cudnn.benchmark off: in float64 it would try slow algorithms for seconds, to no purpose."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _errors(square: float, total: float, largest: float) -> Errors:
    if not (math.isfinite(square) and math.isfinite(largest)):
        return Errors(math.nan, math.nan)
    if total == 0:
        return Errors(0.0 if square == 0 else math.inf, largest)
    return Errors(math.sqrt(square / total), largest)


def baseline(problem: Problem, tensors: AnyTensors) -> torch.Tensor:
    """PyTorch's eager convolutions on these tensors, at the problem's precision."""
    with torch.no_grad(), flags(problem.fp32_precision):
        return eager(problem)(*tensors)


def limits(problem: Problem, base: Errors, rounding: Errors) -> tuple[float, float | None]:
    """(largest ||y - y64|| / ||y64||, largest |y - y64| or None) allowed.

    fp32-grade: 4x strict fp32 and at most 1e-5 on the lead shapes, max(4x strict, 5e-7) elsewhere.
    TF32: each of two operands of a matrix product is rounded once, so 2 units a product. 16 bit: 1.1x eager, or 1.1x
    one rounding of the exact result where eager does better than that (all of its own roundings being exact).
    """
    if problem.dtype != "float32":
        return 1.1 * max(base.rel, rounding.rel), None
    if problem.fp32_precision == "tf32":
        return 2 * _products(problem) * _TF32_UNIT, None
    if is_lead(problem):
        return 4 * base.rel, 1e-5
    return max(4 * base.rel, 5e-7), None


def _products(problem: Problem) -> int:
    """Matrix products of the operator."""
    return 2 if problem.op == "sepblock1d" else 1


def peer_limit(problem: Problem) -> float:
    """||y - y64|| / ||y64|| above which a peer computes something else, or at a lower precision than its row says.

    16 bit: four roundings (2-D: hidden value, activation, output, activation) or five (block: both hidden values,
    activation, output, residual). TF32: as in `limits`, and the block's depthwise convolution rounds its operands too.
    fp32: the usual bound n*u of a sum of n products, n over all convolutions.
    """
    p = problem
    block = p.op == "sepblock1d"
    if p.dtype != "float32":
        return (5 if block else 4) * torch.finfo(getattr(torch, p.dtype)).eps / 2
    if p.fp32_precision == "tf32":
        return 2 * (3 if block else 1) * _TF32_UNIT
    products = p.c + p.kernel + p.e if block else math.prod(p.kernel) + p.c
    return (products + 4) * 2.0**-24


def judge(problem: Problem, tensors: AnyTensors, outputs: Mapping[str, torch.Tensor]) -> dict[str, Verdict]:
    """A verdict for each named output of this call."""
    found = errors(problem, tensors, {**outputs, "baseline": baseline(problem, tensors)})
    rel_limit, max_abs_limit = limits(problem, found["baseline"], found["rounding"])
    return {name: Verdict(found[name], found["baseline"], rel_limit, max_abs_limit) for name in outputs}


def judge_one(problem: Problem, tensors: AnyTensors, y: torch.Tensor) -> Verdict:
    """The verdict on one output; see `judge`."""
    return judge(problem, tensors, {"y": y})["y"]
