"""The planner: which path and schedule run a problem, decided from the shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Unsupported
from .problem import SeparableConv2dProblem
from .schedule import PATHS, Schedule, candidates, supports


@dataclass(frozen=True)
class Plan:
    """What runs a problem and why. `schedule` is None on path "torch"."""

    path: str
    schedule: Schedule | None
    reason: str


def plan(problem: SeparableConv2dProblem, arch: str, path: str | None = None) -> Plan:
    """Choose a path (or take the one asked for) and its best schedule.

    Raises Unsupported if the path asked for cannot run this problem.
    """
    if path == "torch":
        return Plan("torch", None, "asked for")
    reasons = []
    for candidate in PATHS if path is None else (path,):
        support = supports(problem, candidate, arch)
        if support:
            return Plan(candidate, candidates(problem, arch, candidate)[0], "asked for" if path else "first path that supports it")
        reasons.append(f"{candidate}: {support.reason}")
    if path is not None:
        raise Unsupported(f"path {reasons[0]}")
    return Plan("torch", None, "; ".join(reasons))
