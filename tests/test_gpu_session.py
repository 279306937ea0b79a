"""The program for a GPU's machine, as far as no GPU is needed: what its steps run."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "benchmarks" / "gpu_session.py"


@pytest.fixture(scope="module")
def gpu_session():
    spec = spec_from_file_location("gpu_session", PROGRAM)
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def arguments_of(gpu_session, kernel_list: Path | None, name: str = "tests") -> list[str]:
    (step,) = [step for step in gpu_session.steps(Path("results.json"), kernel_list) if step.name == name]
    return step.arguments


def test_without_a_list_the_tests_compile_ahead(gpu_session):
    plain = arguments_of(gpu_session, None)
    assert (plain[0], plain[-2:]) == ("pytest", ["--build-ahead", "tests/gpu"])


@pytest.mark.parametrize("xdist", [True, False])
def test_a_list_is_compiled_before_the_tests(gpu_session, tmp_path: Path, monkeypatch, xdist: bool):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_session, "find_spec", lambda name: xdist or None)
    monkeypatch.setattr(gpu_session.os, "cpu_count", lambda: 4)
    # A step runs in the checkout, whatever folder the program was called from.
    listed = Path("kernels.json")
    assert arguments_of(gpu_session, listed, "kernels") == ["tests.gpu.builds", str(tmp_path / "kernels.json")]
    shared = ["-n", "4"] if xdist else []
    assert arguments_of(gpu_session, listed) == arguments_of(gpu_session, None)[:-2] + [*shared, "tests/gpu"]


def test_pytest_takes_the_arguments(gpu_session, tmp_path: Path):
    # --version: pytest reads its arguments and does no more.
    arguments = [*arguments_of(gpu_session, tmp_path / "kernels.json"), "--version", "--version"]
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_kernel_list_that_is_no_file_is_wrong_usage(tmp_path: Path):
    command = [sys.executable, str(PROGRAM), "--kernel-list", str(tmp_path / "missing.json"), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--kernel-list" in done.stderr and "missing.json" in done.stderr
