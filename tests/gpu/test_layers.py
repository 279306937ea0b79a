"""Layers of public networks: as planned, pairs also on path portable, blocks also in each form; against float64.

Rows that no operator can express are skipped with the reason: squeeze-excite inside, padding that differs on
opposite sides. BatchNorm counts as folded into biases; residuals are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import cutlass_sep
from cutlass_sep.bench import inputs
from cutlass_sep.bench.inputs import options
from cutlass_sep.block_schedule import FORMS

from . import accuracy
from .calls import Poisoned, draw, reduced
from .test_numerics import REHEARSED_FLOPS

CASES, LEFT_OUT = inputs.layers(Path(__file__).parents[2] / "benchmarks" / "layers.jsonl")

BLOCKS = [case for case in CASES if case.problem.op == "sepblock1d"]
PAIRS = [case for case in CASES if case not in BLOCKS]


@pytest.mark.parametrize("layer", CASES, ids=lambda layer: layer.id)
def test_planned(machine, generator, no_fallback, note_torch, layer: inputs.Case):
    problem = reduced(layer)
    if problem.flops > REHEARSED_FLOPS:
        machine.needs_gpu(problem)
    tensors = draw(problem, generator)
    function = inputs.function(problem)
    said = cutlass_sep.explain(function, *tensors, **options(problem))
    y = function(*tensors, **options(problem))
    if said.path == "torch":
        note_torch(problem)
    accuracy.judge(problem, tensors, y, f"path {said.path}: {said.reason}")


@pytest.mark.parametrize("layer", PAIRS, ids=lambda layer: layer.id)
def test_portable(machine, generator, layer: inputs.Case):
    problem = reduced(layer)
    if problem.flops > REHEARSED_FLOPS:
        machine.needs_gpu(problem, path="portable")
    tensors = draw(problem, generator)
    operator = inputs.operation(problem)(*tensors, **options(problem), path="portable", arch=machine.arch)
    out = Poisoned.like(problem, machine.device)
    operator.run(*tensors, out=out.tensor)
    out.check()
    accuracy.judge(problem, tensors, out.tensor, f"path portable, {operator.schedule}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", BLOCKS, ids=lambda layer: layer.id)
def test_forms(machine, generator, layer: inputs.Case, form: str):
    problem = reduced(inputs.variant(layer, "bfloat16", "contiguous", None))
    machine.require(problem, form=form)
    if problem.flops > REHEARSED_FLOPS:
        machine.needs_gpu(problem, form=form)
    tensors = draw(problem, generator)
    operator = inputs.operation(problem)(*tensors, **options(problem), form=form, arch=machine.arch)
    assert operator.form == form
    out = Poisoned.like(problem, machine.device)
    operator.run(*tensors, out=out.tensor)
    out.check()
    accuracy.judge(problem, tensors, out.tensor, f"form {form}, {operator.schedule}")


@pytest.mark.parametrize("name", LEFT_OUT)
def test_not_expressible(name: str):
    pytest.skip(LEFT_OUT[name])
