"""Generated combinations of every parameter, in every dtype, forced on either path, against float64."""

from __future__ import annotations

import pytest
import torch

from cutlass_sep import op
from cutlass_sep.bench.inputs import options

from . import accuracy
from .calls import Poisoned, draw
from .combinations import Combination, runs, schedule_of

#: Which runs there are is decided for the GPU that the fast path is made for; elsewhere that path says why it cannot.
RUNS = runs("sm_90a")


@pytest.mark.parametrize(
    ("combination", "variant", "path"), RUNS, ids=[f"{c.id}-{variant}-{path}" for c, variant, path in RUNS]
)
def test_combination(machine, generator: torch.Generator, combination: Combination, variant: str, path: str):
    problem = combination.problem(variant)
    schedule = schedule_of(combination.group, variant, path, machine.arch)
    if schedule is None:
        pytest.skip(f"path {path} is not for {machine.arch}")
    tensors = draw(problem, generator, combination.form)
    operator = op.DepthwiseSeparableConv2d(
        *tensors, **options(problem), path=path, schedule=schedule, arch=machine.arch
    )
    assert operator.problem == problem
    assert operator.path == path
    out = Poisoned.like(problem, machine.device, offset=1 if combination.form == "offset" else 0)
    assert operator.run(*tensors, out=out.tensor) is out.tensor
    out.check()
    accuracy.judge(problem, tensors, out.tensor, f"path {path}, {schedule}")
