"""Calls of the operator for tests: problems, fresh tensors surrounded by NaN, poisoned outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutlass_sep import op
from cutlass_sep.bench.inputs import Case, options
from cutlass_sep.problem import SeparableConv2dProblem, pair, resolve_padding
from cutlass_sep.schedule import Schedule

#: (dtype, fp32_precision) by the name that test ids use.
VARIANTS = {
    "fp32": ("float32", "ieee"),
    "tf32": ("float32", "tf32"),
    "fp16": ("float16", None),
    "bf16": ("bfloat16", None),
}
#: How x lies in memory. "plain": dense, 16-byte aligned. "offset": dense, one element on. The others are not dense.
FORMS = ("plain", "offset", "sliced", "transposed", "expanded")
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
#: Elements of NaN on either side of a tensor; a multiple of every alignment.
_GUARD = 256

Tensors = tuple[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"]


def make_problem(
    variant: str = "fp32",
    layout: str = "contiguous",
    *,
    n: int = 2,
    c: int = 8,
    h: int = 16,
    w: int = 16,
    o: int = 16,
    kernel: int | tuple[int, int] = 3,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 1,
    dilation: int | tuple[int, int] = 1,
    dw_bias: bool = True,
    pw_bias: bool = True,
    mid_activation: str | None = None,
    activation: str | None = None,
    form: str = "plain",
) -> SeparableConv2dProblem:
    """The problem of such a call; the defaults make a small one that every path takes."""
    dtype, precision = VARIANTS[variant]
    kernel, stride, dilation = (pair("an option", value, minimum=1) for value in (kernel, stride, dilation))
    problem = SeparableConv2dProblem(
        n=n, c=c, h=h, w=w, o=o, kernel=kernel, stride=stride,
        padding=resolve_padding(padding, kernel, stride, dilation), dilation=dilation, dtype=dtype, layout=layout,
        dw_bias=dw_bias, pw_bias=pw_bias, mid_activation=mid_activation, activation=activation,
        fp32_precision=precision, alignment=1,
    )  # fmt: skip
    return problem.with_alignment(problem.element_size if form == "offset" else 0)


def reduced(layer: Case) -> SeparableConv2dProblem:
    """A layer of the layer set with two images: its own batch is for timing."""
    return replace(layer.problem, n=2).with_alignment()


def describe(problem: SeparableConv2dProblem) -> str:
    """Everything that matters of a problem, in one line."""
    p = problem
    return (
        f"{p.dtype} {p.fp32_precision or ''} {p.layout} [{p.n},{p.c},{p.h},{p.w}] -> {p.o}, kernel {p.kernel}, "
        f"stride {p.stride}, padding {tuple(p.padding)}, dilation {p.dilation}, biases {p.dw_bias}/{p.pw_bias}, "
        f"activations {p.mid_activation}/{p.activation}, alignment {p.alignment}"
    )


def embed(value: Tensor, offset: int = 0) -> Tensor:
    """A copy of `value` with its strides, in the middle of NaN, `offset` elements past a 16-byte boundary."""
    numel = value.numel()
    flat = torch.full((numel + 2 * _GUARD + offset,), math.nan, dtype=value.dtype, device=value.device)
    return flat[_GUARD + offset : _GUARD + offset + numel].as_strided(value.shape, value.stride()).copy_(value)


def draw(problem: SeparableConv2dProblem, generator: torch.Generator, form: str = "plain") -> Tensors:
    """Fresh arguments x, dw_weight, pw_weight, dw_bias, pw_bias on the generator's device.

    All normal; hidden values have a standard deviation of about 2, so that every branch of an activation is met.
    """
    p = problem
    dtype = getattr(torch, p.dtype)
    offset = 1 if form == "offset" else 0

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=generator.device) * scale).to(dtype)

    x = normal(p.n, p.c, p.h, p.w)
    if form == "sliced":
        around = torch.full((p.n, p.c + 2, p.h + 3, p.w + 3), math.nan, dtype=dtype, device=x.device)
        x = around[:, 1:-1, 1:-2, 2:-1].copy_(x)
    elif form == "transposed":
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    elif form == "expanded":
        x = x[:1].expand(p.n, -1, -1, -1)
    else:
        x = embed(x.contiguous(memory_format=_FORMATS[p.layout]), offset)
    parameters = (
        normal(p.c, 1, *p.kernel, scale=2 / math.sqrt(math.prod(p.kernel))),
        normal(p.o, p.c, 1, 1, scale=1 / math.sqrt(p.c)),
        normal(p.c) if p.dw_bias else None,
        normal(p.o) if p.pw_bias else None,
    )
    return (x, *(None if t is None else embed(t, offset) for t in parameters))


@dataclass(frozen=True)
class Poisoned:
    """An output full of NaN with more NaN around it."""

    tensor: Tensor
    _flat: Tensor
    _start: int

    @classmethod
    def like(cls, problem: SeparableConv2dProblem, device: torch.device, offset: int = 0) -> Poisoned:
        p = problem
        numel = p.n * p.o * p.p * p.q
        flat = torch.full((numel + 2 * _GUARD + offset,), math.nan, dtype=getattr(torch, p.dtype), device=device)
        inside = flat[_GUARD + offset : _GUARD + offset + numel]
        if p.layout == "channels_last":
            return cls(inside.view(p.n, p.p, p.q, p.o).permute(0, 3, 1, 2), flat, _GUARD + offset)
        return cls(inside.view(p.n, p.o, p.p, p.q), flat, _GUARD + offset)

    def check(self) -> None:
        """Nothing was written outside, everything inside."""
        before, after = self._flat[: self._start], self._flat[self._start + self.tensor.numel() :]
        assert before.isnan().all(), "elements in front of y were written"
        assert after.isnan().all(), "elements behind y were written"
        missing = int(self.tensor.isnan().sum())
        assert missing == 0, f"{missing} of {self.tensor.numel()} elements of y are NaN or were not written"


def make_op(
    problem: SeparableConv2dProblem, arch: str, path: str | None = None, schedule: Schedule | None = None
) -> op.DepthwiseSeparableConv2d:
    """The op of a problem whose tensors are dense and 16-byte aligned, from meta tensors."""
    p = problem
    dtype = getattr(torch, p.dtype)

    def empty(*shape: int, **keywords: Any) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", **keywords)

    return op.DepthwiseSeparableConv2d(
        empty(p.n, p.c, p.h, p.w, memory_format=_FORMATS[p.layout]), empty(p.c, 1, *p.kernel), empty(p.o, p.c, 1, 1),
        empty(p.c) if p.dw_bias else None, empty(p.o) if p.pw_bias else None,
        **options(p), path=path, schedule=schedule, arch=arch,
    )  # fmt: skip
