"""Device times: events over many launches, candidates interleaved, inputs rotated past the L2 cache.

A sample is one event pair around several launches. A spin kernel before the first event keeps the device busy while
the host queues them, so that the host's own time per call is not in the figure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Other data touched before an input set comes round again, in sizes of the L2 cache.
_L2_SIZES = 3
#: Most input sets held at a time.
MAX_ROTATION = 128
#: Length of one sample that is aimed at, in milliseconds, and the most launches it may take.
_SAMPLE_MS = 1.0
_MAX_LAUNCHES = 64
#: Upper bound of the SM clock, for turning host time into spin cycles.
_CLOCK_HZ = 2.0e9


@dataclass(frozen=True)
class Candidate:
    """`call(i)` queues `launches` evaluations, the first of them on input set i, and returns what must stay alive."""

    call: Callable[[int], Any]
    launches: int = 1


@dataclass(frozen=True)
class Times:
    """Timed samples in milliseconds per evaluation."""

    samples: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """Linear interpolation between the ordered samples."""
        ordered = sorted(self.samples)
        position = q * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    def to_json(self) -> dict[str, float | int]:
        return {
            "median_ms": self.median_ms,
            "p10_ms": self.quantile(0.1),
            "p90_ms": self.quantile(0.9),
            "runs": len(self.samples),
        }


def rotation(set_bytes: int, l2_bytes: int) -> int:
    """Input sets needed so that one has left the L2 cache when its turn comes again; a call moves `set_bytes`."""
    return min(MAX_ROTATION, max(2, math.ceil(_L2_SIZES * l2_bytes / set_bytes) + 1))


def interleaved(
    candidates: Mapping[str, Candidate], *, sets: int, samples: int, device: torch.device
) -> dict[str, Times]:
    """Time every candidate `samples` times, round robin with the order turning, on `device`.

    `sets` is the number of input sets the candidates rotate through. Candidates must be warm (compiled, loaded).
    """
    stream = torch.cuda.current_stream(device)
    plans = {name: _plan(candidate, sets, device) for name, candidate in candidates.items()}
    names = list(candidates)
    collected: dict[str, list[float]] = {name: [] for name in names}
    for position in range(samples):
        turn = position % len(names)
        for name in names[turn:] + names[:turn]:
            calls, spin = plans[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(spin)
            start.record(stream)
            kept = _queue(candidates[name], calls, position, sets)
            end.record(stream)
            end.synchronize()
            del kept
            collected[name].append(start.elapsed_time(end) / (calls * candidates[name].launches))
    return {name: Times(tuple(values)) for name, values in collected.items()}


def _queue(candidate: Candidate, calls: int, position: int, sets: int) -> list[Any]:
    """Queue `calls` calls; the last `sets` outputs stay alive, so that the allocator rotates them like the inputs."""
    kept: list[Any] = [None] * sets
    for i in range(calls):
        index = (position + i) % sets
        kept[index] = candidate.call(index)
    return kept


def _plan(candidate: Candidate, sets: int, device: torch.device) -> tuple[int, int]:
    """(calls per sample, spin cycles that outlast the queueing of them)."""
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    probes = 3
    start.record()
    begin = time.perf_counter()
    _queue(candidate, probes, 0, sets)
    host_seconds = (time.perf_counter() - begin) / probes
    end.record()
    end.synchronize()
    device_ms = max(start.elapsed_time(end) / probes, 1e-3)
    calls = max(1, min(math.ceil(_SAMPLE_MS / device_ms), math.ceil(_MAX_LAUNCHES / candidate.launches)))
    return calls, int(1.5 * host_seconds * calls * _CLOCK_HZ) + 10_000


def as_graph(call: Callable[[int], Any], sets: int, device: torch.device) -> Candidate:
    """The same work as one CUDA graph of `sets` launches, one on each input set. `call` must be warm."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        outputs = [call(i) for i in range(sets)]

    def replay(_: int) -> Any:
        graph.replay()
        return outputs

    return Candidate(replay, launches=sets)
