"""What committed results of the GPU tests have to show; test_results.py checks that they are of these kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu import block_combinations
from gpu.combinations import runs
from gpu.test_cases import HELD

from cutlass_sep.bench import results
from cutlass_sep.block_schedule import FORMS
from cutlass_sep.problem import SeparableConv2dProblem

RESULTS = Path(__file__).parent / "gpu" / "results.json"


@pytest.fixture(scope="module")
def data() -> dict:
    if not RESULTS.exists():
        pytest.skip("no results of GPU tests are committed")
    data = json.loads(RESULTS.read_text())
    if "stale" in data:
        pytest.skip(f"the results are older than the kernels: {data['stale']}")
    return data


def passed(data: dict, file: str) -> set[str]:
    """Names of the tests of one file that passed, with their parameters."""
    prefix = f"tests/gpu/{file}::"
    return {test.removeprefix(prefix) for test, _ in data["passed"] if test.startswith(prefix)}


def test_schema(data: dict):
    assert {"schema", "digest", "environment", "problems", "paths", "passed", "failed", "skipped"} <= set(data)
    assert {"gpu", "driver", "torch", "cudnn", "nvrtc", "cutlass", "date"} <= set(data["environment"])
    for outcome in ("passed", "failed", "skipped"):
        assert all(len(entry) == 2 for entry in data[outcome])
    assert all(reason for _, reason in data["skipped"]), "a skip must say why"
    listed = [test for outcome in ("passed", "failed", "skipped") for test, _ in data[outcome]]
    assert len(listed) == len(set(listed))


def test_nothing_failed(data: dict):
    assert data["failed"] == []


def test_every_combination_ran_and_passed(data: dict):
    found = passed(data, "test_combinations.py")
    missing = [
        name
        for c, variant, path in runs("sm_90a")
        if (name := f"test_combination[{c.id}-{variant}-{path}]") not in found
    ]
    assert missing == []


def test_combinations_launched_the_kernels_they_say(data: dict):
    """What counts is what ran: a launch on the path that the test's name says, of the problem it stands for."""
    ran: dict[str, list[dict]] = {}
    for entry in data["problems"]:
        ran.setdefault(entry["test"], []).append(entry)
    for c, variant, path in runs("sm_90a"):
        entries = ran[f"tests/gpu/test_combinations.py::test_combination[{c.id}-{variant}-{path}]"]
        assert [e["path"] for e in entries] == [path]
        assert SeparableConv2dProblem.from_json(entries[0]["problem"]) == c.problem(variant)


def test_every_combination_of_the_block_ran_as_it_says(data: dict):
    found = passed(data, "test_block_combinations.py")
    ran: dict[str, list[dict]] = {}
    for entry in data["problems"]:
        ran.setdefault(entry["test"], []).append(entry)
    for c, variant, form, path in block_combinations.runs("sm_90a"):
        name = f"test_block[{c.id}-{variant}-{form}-{path}]"
        assert name in found
        (entry,) = ran[f"tests/gpu/test_block_combinations.py::{name}"]
        problem, schedule = results.what_ran(entry)
        assert problem == c.problem(variant)
        assert (entry["path"], schedule.path, schedule.form) == (path, path, form)


def test_every_row_of_the_collection_passed(data: dict):
    for where in HELD.values():
        file, test = where.split("::")
        assert any(name.split("[")[0] == test for name in passed(data, file)), where


def test_every_layer_ran(data: dict):
    from gpu.test_layers import BLOCKS, PAIRS

    found = passed(data, "test_layers.py")
    for case in PAIRS:
        assert {f"test_planned[{case.id}]", f"test_portable[{case.id}]"} <= found
    for case in BLOCKS:
        assert f"test_planned[{case.id}]" in found
        assert any(f"test_forms[{case.id}-{form}]" in found for form in FORMS)
