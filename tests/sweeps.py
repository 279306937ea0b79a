"""Activations over the values of a type: which values, their results in float64, how close these have to be met."""

from __future__ import annotations

import math

import torch
from separable import ACTIVATIONS
from torch import Tensor

#: As ACTIVATIONS, where float64 has to keep its relative accuracy also in the left tail.
EXACT = ACTIVATIONS | {
    "gelu": lambda z: 0.5 * z * torch.special.erfc(-z / math.sqrt(2)),
    "gelu_tanh": lambda z: z / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}
#: Significant bits and the exponent of the smallest number.
FORMATS = {torch.float32: (24, -149), torch.float16: (11, -24), torch.bfloat16: (8, -133)}
#: Largest error of GELU for a 16-bit type before it is rounded to that, in unit roundoffs of the type, relative to x.
GELU_LOSS = 0.05


def values(dtype: torch.dtype, count: int, generator: torch.Generator) -> Tensor:
    """Every value of a 16-bit type; of fp32 `count`: half over [-20, 20], a quarter in [-6, 6], else any bits."""
    if dtype != torch.float32:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=generator.device).view(dtype)
    where = {"generator": generator, "device": generator.device}
    even = torch.linspace(-20, 20, count // 2, device=generator.device)
    inner = torch.rand(count // 4, **where) * 12 - 6
    bits = torch.randint(-(1 << 31), 1 << 31, (count // 4,), dtype=torch.int64, **where)
    return torch.cat([even, inner, bits.to(torch.int32).view(torch.float32)])


def unit_in_last_place(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours of type dtype around float64 values, as float64."""
    bits, smallest = FORMATS[dtype]
    exponent = torch.frexp(values).exponent - bits
    return torch.ldexp(torch.ones_like(values), exponent.clamp(min=smallest))


def assert_accurate(name: str | None, x: Tensor, y: Tensor) -> None:
    """y = activation(x), both of one dtype: NaN and Inf exactly where they belong; finite values

    - of 16-bit types to one unit in the last place,
    - of fp32 GELU to two units of max(|y|, 2^-20 |x|), or to 1e-9 where x < -6,
    - of fp32 otherwise to eight roundings relative to x: 1 + tanh cancels in tanh GELU.
    """
    z = x.double()
    exact = EXACT[name](z)
    rounded = exact.to(y.dtype)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = kind(y) != kind(rounded)
        assert not wrong.any(), (name, kind.__name__, x[wrong][0].item(), y[wrong][0].item())
    if y.dtype != torch.float32:
        bound = unit_in_last_place(exact, y.dtype)
    elif name == "gelu":
        bound = 2 * unit_in_last_place(torch.maximum(exact.abs(), z.abs() * 2.0**-20), y.dtype)
        bound = torch.where(z < -6, 1e-9, bound)
    else:
        bound = 8 * 2.0**-24 * z.abs() + 2.0**-149
    excess = torch.where(rounded.isfinite(), (y.double() - exact).abs() / bound, 0.0)
    worst = int(excess.argmax())
    assert excess[worst] <= 1, (name, x[worst].item(), y[worst].item(), exact[worst].item(), excess[worst].item())
