"""The 2-D operator under a schedule that a test states."""

from __future__ import annotations

import pytest
import torch

from cutlass_sep import op
from cutlass_sep.bench.inputs import options
from cutlass_sep.problem import SeparableConv2dProblem
from cutlass_sep.schedule import Schedule, check

from . import accuracy
from .calls import Poisoned, draw
from .test_special_values import compare


def run(machine, problem: SeparableConv2dProblem, schedule: Schedule, tensors: tuple, out: torch.Tensor | None = None):
    """y, which is `out` if given."""
    if machine.arch != "sm_90a":
        pytest.skip(f"path sm90 is for sm_90a, not for {machine.arch}")
    supported = check(problem, schedule, machine.arch)
    assert supported, supported.reason
    operator = op.DepthwiseSeparableConv2d(
        *tensors, **options(problem), path="sm90", schedule=schedule, arch=machine.arch
    )
    return operator.run(*tensors, out=out)


def check_values(machine, problem: SeparableConv2dProblem, schedule: Schedule, generator: torch.Generator) -> None:
    """Fresh data, an output that is poisoned before, float64."""
    tensors = draw(problem, generator)
    out = Poisoned.like(problem, machine.device)
    run(machine, problem, schedule, tensors, out.tensor)
    out.check()
    accuracy.judge(problem, tensors, out.tensor, f"{schedule}")


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
