"""Pytest plugin: writes what the GPU tests ran, and how it came out, to a results file.

    python -m pytest -p tests.gpu_results --gpu-results tests/gpu/results.json tests/gpu

A test states what it ran by `record_property("ran", results.ran(problem, path, schedule, arch))`, as often as it likes.
The file is written again every few tests, so that a run that is cut short leaves what it has. With --gpu-results-append
the outcomes of other tests in the file are kept, if the file was made with the same kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_WRITE_EVERY = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-results", type=Path, help="write a results file of the GPU tests there")
    parser.addoption("--gpu-results-append", action="store_true", help="keep the file's outcomes of other tests")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-results")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path, config.getoption("--gpu-results-append")))


class Recorder:
    """Outcomes by test id: ("passed" | "failed" | "skipped", reason, what ran)."""

    def __init__(self, path: Path, append: bool) -> None:
        self._path = path
        self._outcomes: dict[str, tuple[str, str, list[dict[str, Any]]]] = {}
        if append and path.exists():
            self._outcomes = _outcomes_of(json.loads(path.read_text()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            ran = [value for name, value in report.user_properties if name == "ran"]
            self._outcomes[report.nodeid] = (report.outcome, _reason(report), ran)
            if len(self._outcomes) % _WRITE_EVERY == 0:
                self._write()

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        from cutlass_sep.bench import results

        results.write_json(self._path, document(self._outcomes))


def document(outcomes: dict[str, tuple[str, str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The results file of these outcomes."""
    import torch

    from cutlass_sep.bench import environment, results

    problems = [{"test": test, **entry} for test, (_, _, ran) in sorted(outcomes.items()) for entry in ran]
    paths = {path: sum(entry["path"] == path for entry in problems) for path in ("sm90", "portable", "torch")}
    where = environment.describe(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    lists = {
        outcome: [[test, reason] for test, (found, reason, _) in sorted(outcomes.items()) if found == outcome]
        for outcome in ("passed", "failed", "skipped")
    }
    digest = results.digest_of_problems(problems)
    return {
        "schema": results.SCHEMA,
        "digest": digest,
        "environment": where,
        "paths": paths,
        **lists,
        "problems": problems,
    }


def _outcomes_of(data: dict[str, Any]) -> dict[str, tuple[str, str, list[dict[str, Any]]]]:
    """The outcomes in a results file; none if its kernels have changed since."""
    from cutlass_sep.bench import results

    if data["digest"] != results.digest_of_problems(data["problems"]):
        return {}
    ran: dict[str, list[dict[str, Any]]] = {}
    for entry in data["problems"]:
        ran.setdefault(entry["test"], []).append({name: value for name, value in entry.items() if name != "test"})
    return {
        test: (outcome, reason, ran.get(test, []))
        for outcome in ("passed", "failed", "skipped")
        for test, reason in data[outcome]
    }


def _reason(report: pytest.TestReport) -> str:
    """Why a test failed or was skipped, in one line; empty for one that passed."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0] if crash else str(report.longrepr).splitlines()[-1]
