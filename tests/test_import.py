"""What `import cutlass_sep` does not do, and the names that it gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cutlass_sep

REPOSITORY = Path(__file__).parents[1]


def test_import_is_light_and_writes_nothing(tmp_path: Path):
    """No CUDA context, no compiler, no CUTLASS, no file: in an empty, unwritable folder with an empty home."""
    cwd = tmp_path / "cwd"
    home = tmp_path / "home"
    for folder in (cwd, home):
        folder.mkdir()
        folder.chmod(0o555)
    code = """
import sys, torch
before = set(sys.modules)
import cutlass_sep
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = {"cutlass_cppgen", "cutlass_library", "cutlass", "cuda", "jinja2", "rich", "matplotlib"} & loaded
assert not heavy, heavy
assert not torch.cuda.is_initialized()
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUTLASS_SEP", "XDG"))}
    environment |= {"PYTHONPATH": str(REPOSITORY), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(cwd.iterdir()) == list(home.iterdir()) == []


def test_the_time_of_loading_is_noted_first():
    """Before any other module of the package, and before torch, whose import takes seconds."""
    code = "import sys, cutlass_sep; print(*(n for n in sys.modules if n == 'torch' or n.startswith('cutlass_sep.')))"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split()[0] == "cutlass_sep.kept", done.stderr


def test_public_names():
    assert callable(cutlass_sep.functional.depthwise_separable_conv2d)
    assert isinstance(cutlass_sep.op.DepthwiseSeparableConv2d, type)
    assert isinstance(cutlass_sep.DepthwiseSeparableConv2d, type)
    for name in ("explain", "supports", "tune", "warmup"):
        assert callable(getattr(cutlass_sep, name))
    for name in cutlass_sep.__all__:
        assert hasattr(cutlass_sep, name)
