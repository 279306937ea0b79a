"""Layers of public networks: through the planner's choice and forced on path portable, against float64.

Rows that the operator cannot express are skipped with the reason: squeeze-excite inside, padding that differs on
opposite sides. BatchNorm counts as folded into biases; residuals are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import cutlass_sep
from cutlass_sep import op
from cutlass_sep.bench import inputs
from cutlass_sep.bench.inputs import options
from cutlass_sep.functional import depthwise_separable_conv2d

from . import accuracy
from .calls import Poisoned, draw, reduced
from .test_numerics import REHEARSED_FLOPS

CASES, LEFT_OUT = inputs.layers(Path(__file__).parents[2] / "benchmarks" / "layers.jsonl")


@pytest.mark.parametrize("layer", CASES, ids=lambda layer: layer.id)
def test_planned(machine, generator, no_fallback, note_torch, layer: inputs.Case):
    problem = reduced(layer)
    if problem.flops > REHEARSED_FLOPS:
        machine.needs_gpu(problem)
    tensors = draw(problem, generator)
    said = cutlass_sep.explain(depthwise_separable_conv2d, *tensors, **options(problem))
    y = depthwise_separable_conv2d(*tensors, **options(problem))
    if said.path == "torch":
        note_torch(problem)
    accuracy.judge(problem, tensors, y, f"path {said.path}: {said.reason}")


@pytest.mark.parametrize("layer", CASES, ids=lambda layer: layer.id)
def test_portable(machine, generator, layer: inputs.Case):
    problem = reduced(layer)
    if problem.flops > REHEARSED_FLOPS:
        machine.needs_gpu(problem, path="portable")
    tensors = draw(problem, generator)
    operator = op.DepthwiseSeparableConv2d(*tensors, **options(problem), path="portable", arch=machine.arch)
    out = Poisoned.like(problem, machine.device)
    operator.run(*tensors, out=out.tensor)
    out.check()
    accuracy.judge(problem, tensors, out.tensor, f"path portable, {operator.schedule}")


@pytest.mark.parametrize("name", LEFT_OUT)
def test_not_expressible(name: str):
    pytest.skip(LEFT_OUT[name])
