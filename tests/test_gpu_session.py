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


def arguments_of_tests(gpu_session, kernel_list: Path | None) -> list[str]:
    (step,) = [step for step in gpu_session.steps(Path("results.json"), kernel_list) if step.name == "tests"]
    return step.arguments


def test_the_tests_compile_ahead(gpu_session, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = arguments_of_tests(gpu_session, None)
    assert (plain[0], plain[-2:]) == ("pytest", ["--build-ahead", "tests/gpu"])
    # A step runs in the checkout, whatever folder the program was called from.
    listed = ["--kernel-list", str(tmp_path / "kernels.json"), "tests/gpu"]
    assert arguments_of_tests(gpu_session, Path("kernels.json")) == plain[:-1] + listed


def test_pytest_takes_the_arguments(gpu_session, tmp_path: Path):
    # --version: pytest reads its arguments and does no more.
    arguments = [*arguments_of_tests(gpu_session, tmp_path / "kernels.json"), "--version", "--version"]
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_kernel_list_that_is_no_file_is_wrong_usage(tmp_path: Path):
    command = [sys.executable, str(PROGRAM), "--kernel-list", str(tmp_path / "missing.json"), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--kernel-list" in done.stderr and "missing.json" in done.stderr
