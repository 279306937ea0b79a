"""Generated combinations of every parameter of the block, in every dtype, form and path, against float64."""

from __future__ import annotations

import pytest
import torch

from cutlass_sep import op
from cutlass_sep.bench.inputs import options

from . import accuracy
from .block_combinations import Combination, runs, schedule_of
from .calls import Poisoned, draw

#: Which runs there are is decided for the GPU that the fast path is made for; elsewhere that path says why it cannot.
RUNS = runs("sm_90a")


@pytest.mark.parametrize(
    ("block", "variant", "form", "path"),
    RUNS,
    ids=[f"{block.id}-{variant}-{form}-{path}" for block, variant, form, path in RUNS],
)
def test_block(machine, generator: torch.Generator, block: Combination, variant: str, form: str, path: str):
    problem = block.problem(variant)
    schedule = schedule_of(block.group, variant, form, path, machine.arch)
    if schedule is None:
        pytest.skip(f"form {form} of path {path} is not for {machine.arch}")
    tensors = draw(problem, generator, block.storage)
    operator = op.SeparableConvBlock1d(
        *tensors, **options(problem), form=form, path=path, schedule=schedule, arch=machine.arch
    )
    assert operator.problem == problem
    assert (operator.form, operator.path) == (form, path)
    out = Poisoned.like(problem, machine.device, offset=1 if block.storage == "offset" else 0)
    assert operator.run(*tensors, out=out.tensor) is out.tensor
    out.check()
    accuracy.judge(problem, tensors, out.tensor, f"form {form}, path {path}, {schedule}")
