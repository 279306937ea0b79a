"""The float64 result and how far from it a kernel may be.

The bound of an element is a worst case: the unit roundoff of each step times the magnitudes that meet in it, with as
many roundings as the reduction is long. It tells a wrong element from a rounded one. How accurate all of y is together
is judged by ||y - y64|| / ||y64||, beside PyTorch's own figure on the same data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from separable import ACTIVATION_ROUNDINGS, ACTIVATIONS
from sweeps import GELU_LOSS
from torch import Tensor

from cutlass_sep import reference
from cutlass_sep.problem import Problem, SeparableBlock1dProblem, SeparableConv2dProblem

from .calls import Tensors, describe

#: Unit roundoff (half the spacing at 1) of memory's types, and of TF32 with its 10 stored bits.
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
TF32_UNIT = 2.0**-11
#: The tensor core cuts fp32 sums off instead of rounding them.
TRUNCATION = 2.0**-23
#: fp32-grade products of split operands: each lo part is at most 2^-11 of its operand and is cut to 10 stored bits,
#: which loses 2^-21 of either operand; the product of both lo parts, 2^-22, is left out.
SPLIT_LOSS = 2.0**-21 + 2.0**-21 + 2.0**-22
#: Channels after which an fp32-grade sum leaves the tensor core at the latest (design: precision).
PROMOTION, BLOCK_PROMOTION = 64, 128
#: Half the distance of fp16's smallest numbers.
FP16_TINY = 2.0**-25
#: Largest slope of each activation, rounded up.
SLOPES = {None: 1.0, "relu": 1.0, "relu6": 1.0, "silu": 1.1, "hardswish": 1.5, "gelu": 1.13, "gelu_tanh": 1.13}
#: fp32-grade: largest relative error (norms) whatever strict fp32 has, else this many times strict fp32's.
FP32_GRADE, TIMES_STRICT = 5e-7, 4
TIMES_EAGER = 1.1
#: Elements of y from which on the ratio of two norms of rounding errors is a matter of arithmetic and not of luck.
ENOUGH_FOR_NORMS, ENOUGH_FOR_EAGER = 1 << 10, 1 << 14
#: Elements of float64 worked on at a time.
_CHUNK = 1 << 27


def depthwise(problem: SeparableConv2dProblem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    top, bottom, left, right = problem.padding
    padded = F.pad(x, (left, right, top, bottom))
    return F.conv2d(padded, weight, bias, problem.stride, 0, problem.dilation, groups=problem.c)


def pointwise(weight: Tensor, a: Tensor, bias: Tensor | None) -> Tensor:
    z = torch.matmul(weight.flatten(1), a.flatten(2)).unflatten(2, a.shape[2:])
    return z if bias is None else z + bias[:, None, None]


def taps(problem: SeparableBlock1dProblem, e: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The block's depthwise convolution, on expanded channels that are padded with zeros."""
    return F.conv1d(F.pad(e, problem.pads), weight, bias, 1, 0, problem.dilation, groups=problem.e)


def project(weight: Tensor, a: Tensor, bias: Tensor | None) -> Tensor:
    """A pointwise convolution of [N,C,L]."""
    z = torch.matmul(weight.flatten(1), a)
    return z if bias is None else z + bias[:, None]


def exact(problem: Problem, tensors: Tensors) -> Tensor:
    """y in float64, by convolution on explicitly padded values and matrix products."""
    if isinstance(problem, SeparableBlock1dProblem):
        x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias = _double(tensors)
        m = taps(problem, project(expand_weight, x, expand_bias), dw_weight, dw_bias)
        y = project(project_weight, ACTIVATIONS[problem.activation](m), project_bias)
        return y + x if problem.residual else y
    x, dw_weight, pw_weight, dw_bias, pw_bias = _double(tensors)
    m = depthwise(problem, x, dw_weight, dw_bias)
    z = pointwise(pw_weight, ACTIVATIONS[problem.mid_activation](m), pw_bias)
    return ACTIVATIONS[problem.activation](z)


def _double(tensors: Tensors) -> Tensors:
    return tuple(None if t is None else t.double() for t in tensors)


def _absolute(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.abs()


def exact_and_bound(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """y in float64, and the most that an element may differ from it."""
    return (_block_bound if isinstance(problem, SeparableBlock1dProblem) else _pair_bound)(problem, _double(tensors))


def _product_loss(problem: Problem, length: int) -> float:
    """What a tensor-core product of `length` terms may lose, relative to the sum of their magnitudes: rounded operands
    (of a 16-bit type none, of TF32 the weights: the other operand's loss is counted where it is made) and the sum.
    """
    if problem.fp32_precision == "ieee":
        promotion = BLOCK_PROMOTION if problem.op == "sepblock1d" else PROMOTION
        sums = 3 * min(length, promotion) * TRUNCATION + math.ceil(length / promotion) * UNIT["float32"]
        return SPLIT_LOSS + sums + UNIT["float32"]
    return (TF32_UNIT if problem.dtype == "float32" else 0) + length * TRUNCATION + UNIT["float32"]


def _operand_loss(problem: Problem, a: Tensor) -> Tensor | float:
    """What rounding values to an MMA's operand may lose."""
    if problem.fp32_precision == "ieee":
        return 0.0
    unit = TF32_UNIT if problem.dtype == "float32" else UNIT[problem.dtype]
    return unit * a.abs() + (FP16_TINY if problem.dtype == "float16" else 0)


def _activation_loss(problem: Problem, argument: Tensor) -> Tensor:
    """What evaluating an activation may lose, before the result is rounded."""
    shown = "float16" if problem.fp32_precision == "tf32" and problem.op == "sepblock1d" else problem.dtype
    gelu = GELU_LOSS * UNIT[shown] if shown != "float32" else 0.0
    return (ACTIVATION_ROUNDINGS * UNIT["float32"] + gelu) * argument.abs()


def _block_bound(p: SeparableBlock1dProblem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The two-kernel form keeps the expanded channels in memory in x's dtype, so 16-bit ones may be rounded once."""
    x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias = tensors
    unit32 = UNIT["float32"]
    e = project(expand_weight, x, expand_bias)
    e_size = project(expand_weight.abs(), x.abs(), _absolute(expand_bias))
    e_error = _product_loss(p, p.c) * e_size
    if p.fp32_precision == "tf32":
        # x, and in the fused form, which makes the depthwise outputs on the tensor cores as well, what they start from.
        e_error += TF32_UNIT * e_size
        e_error += TF32_UNIT * (e.abs() + e_error)
    if p.dtype != "float32":
        e_error += _operand_loss(p, e.abs() + e_error)
    m = taps(p, e, dw_weight, dw_bias)
    m_size = taps(p, e.abs() + e_error, dw_weight.abs(), _absolute(dw_bias))
    # But for fp32-grade sums, the taps may be added up by a tensor core, which in tf32 takes them rounded.
    rounding = unit32 if p.fp32_precision == "ieee" else TRUNCATION
    m_error = taps(p, e_error, dw_weight.abs(), None) + (p.kernel + 1) * rounding * m_size
    if p.fp32_precision == "tf32":
        m_error += TF32_UNIT * m_size
    del e, e_size, e_error, m_size
    a = ACTIVATIONS[p.activation](m)
    a_error = SLOPES[p.activation] * m_error
    if p.activation is not None:
        a_error += _activation_loss(p, m)
    a_error += _operand_loss(p, a.abs() + a_error)
    y = project(project_weight, a, project_bias)
    size = project(project_weight.abs(), a.abs() + a_error, _absolute(project_bias))
    bound = project(project_weight.abs(), a_error, None)
    if p.residual:
        y, size = y + x, size + x.abs()
    bound += (_product_loss(p, p.e) + unit32) * size
    bound += UNIT[p.dtype] * (y.abs() + bound) + (FP16_TINY if p.dtype == "float16" else 0)
    return y, bound


def _pair_bound(p: SeparableConv2dProblem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    unit32 = UNIT["float32"]
    x, dw_weight, pw_weight, dw_bias, pw_bias = tensors
    m = depthwise(p, x, dw_weight, dw_bias)
    m_size = depthwise(p, x.abs(), dw_weight.abs(), None if dw_bias is None else dw_bias.abs())
    a = ACTIVATIONS[p.mid_activation](m)
    a_error = SLOPES[p.mid_activation] * (math.prod(p.kernel) + 1) * unit32 * m_size
    if p.mid_activation is not None:
        a_error += _activation_loss(p, m)
    # What the MMA takes in place of a.
    a_error += _operand_loss(p, a.abs() + a_error)
    del m, m_size
    z = pointwise(pw_weight, a, pw_bias)
    z_size = pointwise(pw_weight.abs(), a.abs() + a_error, None if pw_bias is None else pw_bias.abs())
    z_error = pointwise(pw_weight.abs(), a_error, None) + _product_loss(p, p.c) * z_size
    y = ACTIVATIONS[p.activation](z)
    bound = SLOPES[p.activation] * z_error
    if p.activation is not None:
        bound += _activation_loss(p, z)
    bound += UNIT[p.dtype] * (y.abs() + bound) + (FP16_TINY if p.dtype == "float16" else 0)
    return y, bound


@dataclass(frozen=True)
class Found:
    """Errors of one output: relative in norms, and the largest absolute one."""

    relative: float
    largest: float


def _images_at_a_time(p: Problem) -> int:
    if isinstance(p, SeparableBlock1dProblem):
        return max(1, _CHUNK // (p.l * (p.c + 2 * p.e + p.o)))
    return max(1, _CHUNK // (p.o * p.p * p.q + p.c * p.h * p.w))


def judge(problem: Problem, tensors: Tensors, y: Tensor, context: str = "") -> Found:
    """Assert that y is as accurate as its kernel has to be; `context` goes into the messages."""
    p = problem
    where = f"{context}\n{describe(p)}"
    assert tuple(y.shape) == p.y_shape, f"y has shape {tuple(y.shape)}\n{where}"
    step = _images_at_a_time(p)
    square = total = largest = 0.0
    for first in range(0, p.n, step):
        images = slice(first, first + step)
        want, bound = exact_and_bound(p, (tensors[0][images], *tensors[1:]))
        error = (y[images].double() - want).abs_()
        excess = error - bound
        worst = int(excess.argmax())
        if not excess.flatten()[worst] <= 0:  # also for NaN
            at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape))
            in_y = (first + at[0], *at[1:])
            wrong = int((~(excess <= 0)).sum())
            raise AssertionError(
                f"{wrong} of {excess.numel()} elements are out of bounds; worst: y[{','.join(map(str, in_y))}] = "
                f"{y[in_y].item():.9g}, float64 has {want[at].item():.9g}, "
                f"allowed error {bound[at].item():.3g}\n{where}"
            )
        largest = max(largest, error.max().item())
        square += error.square_().sum().item()
        total += want.square_().sum().item()
    relative = math.sqrt(square / total) if total else 0.0
    if y.numel() >= ENOUGH_FOR_NORMS:
        limit, kind = _limit(p, tensors, y.numel(), relative)
        assert relative <= limit, f"relative error {relative:.3g}, allowed {limit:.3g} ({kind})\n{where}"
    return Found(relative, largest)


def _limit(problem: Problem, tensors: Tensors, numel: int, relative: float) -> tuple[float, str]:
    """The largest relative error allowed and why; PyTorch runs only if the answer depends on it."""
    p = problem
    if p.fp32_precision == "tf32":
        products = 2 if isinstance(p, SeparableBlock1dProblem) else 1
        return 2 * products * TF32_UNIT, "both operands of each product rounded to TF32"
    if p.fp32_precision == "ieee":
        if relative <= FP32_GRADE:
            return FP32_GRADE, "fp32-grade"
        return max(FP32_GRADE, TIMES_STRICT * eager_error(p, tensors)), f"{TIMES_STRICT} times strict fp32"
    if numel < ENOUGH_FOR_EAGER:
        # Each element stays within its own bound, checked before.
        return math.inf, "too few elements to compare with eager"
    return TIMES_EAGER * eager_error(p, tensors), f"{TIMES_EAGER} times eager"


def eager_error(problem: Problem, tensors: Tensors) -> float:
    """Relative error of PyTorch's own convolutions on the same data, at the problem's precision."""
    p = problem
    square = total = 0.0
    step = _images_at_a_time(p)
    for first in range(0, p.n, step):
        part = (tensors[0][first : first + step], *tensors[1:])
        y = _eager(p, part)
        want = exact(p, part)
        square += (y.double() - want).square_().sum().item()
        total += want.square_().sum().item()
    return math.sqrt(square / total)


def _eager(problem: Problem, tensors: Tensors) -> Tensor:
    p = problem
    dtype = tensors[0].dtype
    precision = p.fp32_precision or "ieee"
    if tensors[0].is_cuda or dtype == torch.float32:
        if isinstance(p, SeparableBlock1dProblem):
            return reference.separable_conv_block1d(*tensors, p.dilation, p.activation, p.residual, precision)
        return reference.depthwise_separable_conv2d(
            *tensors, p.stride, p.padding, p.dilation, p.mid_activation, p.activation, precision
        )
    # Some 16-bit convolutions take minutes on a CPU: each step in fp32 and then rounded, which is what they compute.
    x, *parameters = (None if t is None else t.float() for t in tensors)
    if isinstance(p, SeparableBlock1dProblem):
        expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias = parameters
        steps = (
            lambda t: project(expand_weight, t, expand_bias),
            lambda t: taps(p, t, dw_weight, dw_bias),
            ACTIVATIONS[p.activation],
            lambda t: project(project_weight, t, project_bias),
            (lambda t: t + x) if p.residual else (lambda t: t),
        )
    else:
        dw_weight, pw_weight, dw_bias, pw_bias = parameters
        steps = (
            lambda t: depthwise(p, t, dw_weight, dw_bias),
            ACTIVATIONS[p.mid_activation],
            lambda t: pointwise(pw_weight, t, pw_bias),
            ACTIVATIONS[p.activation],
        )
    y = x
    for step in steps:
        y = step(y).to(dtype).float()
    return y
