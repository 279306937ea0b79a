"""Picks that were timed on a device, kept in the disk cache: what `tune` found goes before the planner's estimates.

A pick holds for one problem on one kind of GPU under one driver and one set of package versions.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from . import arch as archs
from . import cache, compiler, planner, toolchain
from .planner import Plan
from .problem import Problem

_SUFFIX = ".tuned"
#: Whether a cache folder has any pick.
_any: dict[Path | None, bool] = {}


def pick(problem: Problem, device: torch.device) -> Plan | None:
    """What `tune` found to be fastest for this problem on this CUDA device, if it was asked to."""
    store = cache.store()
    # The key takes time, and most caches have no pick at all. What other processes find later is not seen by this one.
    if not _has_any(store):
        return None
    found = store.load(_key(problem, device), problem.op, _SUFFIX)
    if found is None:
        return None
    # Another state of this version may have written other fields, or schedules that are legal no more.
    return planner.read(problem, archs.of_device(device.index), found[0], tuned=True)


def _has_any(store: cache.Store) -> bool:
    if store.folder not in _any:
        _any[store.folder] = store.contains(_SUFFIX)
    return _any[store.folder]


def keep(problem: Problem, device: torch.device, plan: Plan) -> bool:
    """Remember `plan` as the pick for this problem; False where the cache keeps nothing (after a warning)."""
    store = cache.store()
    _any[store.folder] = True
    return store.save(_key(problem, device), problem.op, json.dumps(plan.to_json()).encode(), {}, _SUFFIX)


def _key(problem: Problem, device: torch.device) -> str:
    document = {"op": problem.op, "problem": problem.to_json(), "environment": _environment(device.index)}
    return compiler.digest(document)


@functools.lru_cache(maxsize=64)
def _environment(device: int) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": toolchain.driver_version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "nvrtc": str(toolchain.nvrtc()),
        "cutlass-sep": compiler.package_version(),
        "nvidia-cutlass": toolchain.version_of("nvidia-cutlass"),
    }
