"""Host time of a call: what Python and the dispatcher cost before anything runs on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from .. import functional, op
from ..problem import SeparableConv2dProblem
from . import inputs
from .inputs import Tensors
from .timing import Times

#: Small enough that the device is done before the host asks again, so the queue never fills and never blocks the host.
SHAPE = {"n": 1, "c": 16, "h": 16, "w": 16, "o": 16}
_CALLS = 200
_ROUNDS = 30


def measure(device: torch.device) -> dict[str, float]:
    """Medians of host microseconds per call, interleaved: {"functional", "op.run", "F.conv2d", "F.conv2d pair"}."""
    problem = replace(inputs.lead().problem, **SHAPE).with_alignment()
    with torch.cuda.device(device), torch.no_grad():
        tensors = inputs.tensors(problem, device)
        calls = _calls(problem, tensors)
        return {name: 1e3 * times.median_ms for name, times in host_times(calls, torch.cuda.synchronize).items()}


def _calls(problem: SeparableConv2dProblem, tensors: Tensors) -> dict[str, Callable[[], object]]:
    options = inputs.options(problem)
    built = op.DepthwiseSeparableConv2d(*tensors, **options, path="portable")
    padding, groups = inputs.padding_argument(problem), problem.c
    x, dw_weight, pw_weight, _, _ = tensors
    return {
        "functional": lambda: functional.depthwise_separable_conv2d(*tensors, **options),
        "op.run": lambda: built.run(*tensors),
        "F.conv2d": lambda: F.conv2d(x, dw_weight, None, 1, padding, 1, groups),
        "F.conv2d pair": lambda: F.conv2d(F.conv2d(x, dw_weight, None, 1, padding, 1, groups), pw_weight),
    }


def host_times(calls: dict[str, Callable[[], object]], wait: Callable[[], object]) -> dict[str, Times]:
    """Host milliseconds per call of each, interleaved in rounds; `wait` drains the device between samples."""
    for call in calls.values():
        for _ in range(10):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            for _ in range(_CALLS):
                call()
            samples[name].append(1e3 * (time.perf_counter() - begin) / _CALLS)
    return {name: Times(tuple(values)) for name, values in samples.items()}
