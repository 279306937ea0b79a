"""The wheel: it carries the templates, and compiles from them where there is no checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds the wheel's contents and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def python(code, installed, folder, **environment):
    """Run code in `folder` with the installed wheel in front of sys.path."""
    environment = {
        **os.environ, "PYTHONPATH": str(installed), "CUTLASS_SEP_CACHE_DIR": str(folder / "cache"), **environment
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_carries_every_template_and_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    parts = (path.relative_to(ROOT / "templates") for path in (ROOT / "templates").rglob("*") if path.is_file())
    templates = {f"cutlass_sep/_templates/{path}" for path in parts}
    package = (path for pattern in ("*.py", "*.j2") for path in (ROOT / "cutlass_sep").rglob(pattern))
    modules = {str(path.relative_to(ROOT)) for path in package if "__pycache__" not in path.parts}
    assert "cutlass_sep/bench/report.html.j2" in modules
    assert templates and templates <= names
    assert modules <= names
    outside = {name for name in names if not name.startswith(("cutlass_sep/", "cutlass_sep-"))}
    assert outside == set(), "tests and benchmarks stay out"


def test_an_installed_wheel_compiles_from_its_own_templates(installed, tmp_path):
    code = (
        "import torch, cutlass_sep\n"
        "from cutlass_sep import source\n"
        "with torch.device('meta'):\n"
        "    t = torch.empty(1, 8, 16, 16), torch.empty(8, 1, 3, 3), torch.empty(16, 8, 1, 1)\n"
        "op = cutlass_sep.op.DepthwiseSeparableConv2d(*t, padding=1, arch='sm_90a')\n"
        "k = op.compile()\n"
        "print(cutlass_sep.__file__, source.templates(), len(k.cubin), k.cache_hit, sep='\\n')\n"
    )
    module, templates, size, hit = python(code, installed, tmp_path).split()
    assert Path(module).is_relative_to(installed)
    assert Path(templates) == installed / "cutlass_sep" / "_templates"
    assert int(size) > 1000 and hit == "False"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"], "nothing is written into the current folder"


def test_the_console_script_runs(installed, tmp_path):
    script = installed / "bin" / "cutlass-sep"
    environment = {**os.environ, "PYTHONPATH": str(installed), "CUTLASS_SEP_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), "cache", "info"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
