"""An operator under a schedule that a test states."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cutlass_sep import planner
from cutlass_sep.bench import inputs
from cutlass_sep.bench.inputs import options
from cutlass_sep.block_schedule import BlockSchedule
from cutlass_sep.problem import Problem, SeparableConv2dProblem
from cutlass_sep.schedule import Schedule

from . import accuracy
from .calls import Poisoned, draw
from .test_special_values import compare, place


def run(machine, problem: Problem, schedule: Schedule | BlockSchedule, tensors: tuple, out: Tensor | None = None):
    """y, which is `out` if given."""
    if machine.arch != "sm_90a":
        pytest.skip(f"path sm90 is for sm_90a, not for {machine.arch}")
    supported = planner.rules(problem).check(problem, schedule, machine.arch)
    assert supported, supported.reason
    operator = inputs.operation(problem)(
        *tensors, **options(problem), path="sm90", schedule=schedule, arch=machine.arch
    )
    return operator.run(*tensors, out=out)


def check_values(machine, problem: Problem, schedule: Schedule | BlockSchedule, generator: torch.Generator) -> None:
    """Fresh data, an output that is poisoned before, float64."""
    tensors = draw(problem, generator)
    out = Poisoned.like(problem, machine.device)
    run(machine, problem, schedule, tensors, out.tensor)
    out.check()
    accuracy.judge(problem, tensors, out.tensor, f"{schedule}")


def check_not_finite(machine, problem: SeparableConv2dProblem, schedule: Schedule, generator: torch.Generator) -> None:
    """In x, and in a bias of the depthwise convolution."""
    tensors = draw(problem, generator)
    for value in (math.nan, math.inf, -math.inf):
        place(tensors[0], value, 2, generator)
    compare(problem, tensors, run(machine, problem, schedule, tensors))
    tensors = draw(problem, generator)
    place(tensors[3], math.inf, 1, generator)
    compare(problem, tensors, run(machine, problem, schedule, tensors))


def check_beyond_fp16(machine, problem: SeparableConv2dProblem, schedule: Schedule, generator: torch.Generator) -> None:
    """Depthwise outputs beyond fp16, which y has in it: they make no finite value of it wrong."""
    x, dw_weight, pw_weight, *biases = draw(problem, generator)
    dw_weight[1], pw_weight[:, 1] = 300.0, 2.0**-10
    x[-1, 1, problem.h // 2, problem.w // 2] = 300.0
    tensors = x, dw_weight, pw_weight, *biases
    hidden = accuracy.depthwise(problem, x.double(), dw_weight.double(), biases[0].double())
    assert hidden.abs().max() > 65504
    want = compare(problem, tensors, run(machine, problem, schedule, tensors))
    assert want.isfinite().all()
