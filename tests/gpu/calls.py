"""Calls of the operator for tests: problems, fresh tensors surrounded by NaN, poisoned outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutlass_sep.bench import inputs
from cutlass_sep.bench.inputs import Case, options
from cutlass_sep.block_schedule import BlockSchedule
from cutlass_sep.problem import Problem, SeparableBlock1dProblem, SeparableConv2dProblem, pair, resolve_padding
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
#: The same of the block's x. "exchanged": N and C have changed places. "stepped": every second position.
STORAGES = ("plain", "offset", "sliced", "exchanged", "stepped", "expanded")
#: Elements of NaN on either side of a tensor; a multiple of every alignment.
_GUARD = 256

#: In the operator's order: x, weights, biases.
Tensors = tuple["Tensor | None", ...]


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


def make_block(
    variant: str = "fp32",
    layout: str = "contiguous",
    *,
    n: int = 2,
    c: int = 16,
    l: int = 64,  # noqa: E741
    e: int = 32,
    o: int | None = None,
    kernel: int = 5,
    dilation: int = 1,
    expand_bias: bool = True,
    dw_bias: bool = True,
    project_bias: bool = True,
    activation: str | None = "gelu",
    residual: bool = True,
    storage: str = "plain",
) -> SeparableBlock1dProblem:
    """The block of such a call; `o` None is c. The defaults make a small one that every path takes."""
    dtype, precision = VARIANTS[variant]
    problem = SeparableBlock1dProblem(
        n=n, c=c, l=l, e=e, o=c if o is None else o, kernel=kernel, dilation=dilation, dtype=dtype, layout=layout,
        expand_bias=expand_bias, dw_bias=dw_bias, project_bias=project_bias, activation=activation, residual=residual,
        fp32_precision=precision, alignment=1,
    )  # fmt: skip
    return problem.with_alignment(problem.element_size if storage == "offset" else 0)


def reduced(layer: Case) -> Problem:
    """A layer of the layer set with two images: its own batch is for timing."""
    return replace(layer.problem, n=2).with_alignment()


def describe(problem: Problem) -> str:
    """Everything that matters of a problem, in one line."""
    p = problem
    if isinstance(p, SeparableBlock1dProblem):
        return (
            f"{p.dtype} {p.fp32_precision or ''} {p.layout} [{p.n},{p.c},{p.l}] -> {p.e} -> {p.o}, kernel {p.kernel}, "
            f"dilation {p.dilation}, biases {p.expand_bias}/{p.dw_bias}/{p.project_bias}, activation {p.activation}, "
            f"residual {p.residual}, alignment {p.alignment}"
        )
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


def draw(problem: Problem, generator: torch.Generator, storage: str = "plain") -> Tensors:
    """Fresh arguments in the operator's order on the generator's device; `storage`: one of FORMS or of STORAGES.

    All normal; hidden values have a standard deviation of about 2, so that every branch of an activation is met.
    """
    p = problem
    dtype = getattr(torch, p.dtype)
    offset = 1 if storage == "offset" else 0

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=generator.device) * scale).to(dtype)

    if isinstance(p, SeparableBlock1dProblem):
        x = _block_x(p, normal(p.n, p.c, p.l), storage)
        parameters = (
            normal(p.e, p.c, 1, scale=1 / math.sqrt(p.c)),
            normal(p.e, 1, p.kernel, scale=2 / math.sqrt(p.kernel)),
            normal(p.o, p.e, 1, scale=1 / math.sqrt(p.e)),
            normal(p.e) if p.expand_bias else None,
            normal(p.e) if p.dw_bias else None,
            normal(p.o) if p.project_bias else None,
        )
    else:
        x = _pair_x(p, normal(p.n, p.c, p.h, p.w), storage)
        parameters = (
            normal(p.c, 1, *p.kernel, scale=2 / math.sqrt(math.prod(p.kernel))),
            normal(p.o, p.c, 1, 1, scale=1 / math.sqrt(p.c)),
            normal(p.c) if p.dw_bias else None,
            normal(p.o) if p.pw_bias else None,
        )
    return (x, *(None if t is None else embed(t, offset) for t in parameters))


def _pair_x(p: SeparableConv2dProblem, x: Tensor, form: str) -> Tensor:
    if form == "sliced":
        around = torch.full((p.n, p.c + 2, p.h + 3, p.w + 3), math.nan, dtype=x.dtype, device=x.device)
        return around[:, 1:-1, 1:-2, 2:-1].copy_(x)
    if form == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if form == "expanded":
        return x[:1].expand(p.n, -1, -1, -1)
    return embed(_dense(p, x), 1 if form == "offset" else 0)


def _block_x(p: SeparableBlock1dProblem, x: Tensor, storage: str) -> Tensor:
    if storage == "sliced":
        around = torch.full((p.n, p.c + 2, p.l + 3), math.nan, dtype=x.dtype, device=x.device)
        return around[:, 1:-1, 2:-1].copy_(x)
    if storage == "exchanged":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if storage == "stepped":
        around = torch.full((p.n, p.c, 2 * p.l), math.nan, dtype=x.dtype, device=x.device)
        return around[:, :, ::2].copy_(x)
    if storage == "expanded":
        return x[:1].expand(p.n, -1, -1)
    return embed(_dense(p, x), 1 if storage == "offset" else 0)


def _dense(problem: Problem, x: Tensor) -> Tensor:
    """x in the problem's layout."""
    return inputs.empty(tuple(x.shape), problem.layout, x.dtype, x.device).copy_(x)


@dataclass(frozen=True)
class Poisoned:
    """An output full of NaN with more NaN around it."""

    tensor: Tensor
    _flat: Tensor
    _start: int

    @classmethod
    def like(cls, problem: Problem, device: torch.device, offset: int = 0) -> Poisoned:
        y = inputs.empty(problem.y_shape, problem.layout, getattr(torch, problem.dtype), "meta")
        start = _GUARD + offset
        flat = torch.full((start + y.numel() + _GUARD,), math.nan, dtype=y.dtype, device=device)
        return cls(flat[start : start + y.numel()].as_strided(y.shape, y.stride()), flat, start)

    def check(self) -> None:
        """Nothing was written outside, everything inside."""
        before, after = self._flat[: self._start], self._flat[self._start + self.tensor.numel() :]
        assert before.isnan().all(), "elements in front of y were written"
        assert after.isnan().all(), "elements behind y were written"
        missing = int(self.tensor.isnan().sum())
        assert missing == 0, f"{missing} of {self.tensor.numel()} elements of y are NaN or were not written"


def make_op(
    problem: Problem,
    arch: str,
    path: str | None = None,
    schedule: Schedule | BlockSchedule | None = None,
    **asked: Any,
):
    """The op of a problem whose tensors are dense and 16-byte aligned, from meta tensors. `asked`: `form`."""
    tensors = inputs.tensors(problem, "meta")
    return inputs.operation(problem)(
        *tensors, **options(problem), path=path, schedule=schedule, arch=arch, **asked
    )  # fmt: skip
