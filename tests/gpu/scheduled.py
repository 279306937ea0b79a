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
