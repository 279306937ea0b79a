"""What this machine has of what cutlass_sep needs: one check a line, each with its remedy."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from . import arch, cache, compiler, source, toolchain
from .console import counted
from .errors import EnvironmentProblem

#: A translation unit that needs every header tree: CUTLASS, CUDA and CCCL.
_PROBE = """#include <cute/arch/copy_sm90_tma.hpp>
#include <cuda_fp16.h>
extern "C" __global__ void probe(__half* out) { *out = __float2half(1.0f); }
"""


@dataclass(frozen=True)
class Check:
    """`ok` None: absent and not needed for what this machine can do (a GPU, for one)."""

    name: str
    ok: bool | None
    detail: str
    remedy: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Check]:
    """All checks, in the order in which a kernel meets them."""
    cu = f"cu{(torch.version.cuda or '13').split('.')[0]}"
    install = f"pip install 'cutlass-sep[{cu}]'"
    return [
        Check("python", sys.version_info >= (3, 10), platform.python_version(), "use Python 3.10 or newer"),
        Check("torch", True, f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"),
        _gpu(),
        _tried("templates", lambda: str(source.templates()), "install the wheel again: its templates are missing"),
        _tried("nvidia-cutlass", lambda: metadata.version("nvidia-cutlass"), "pip install nvidia-cutlass==4.2.0.0"),
        _tried("cuda-core", lambda: metadata.version("cuda-core"), "pip install 'cuda-core>=1.0'"),
        _tried("nvrtc", lambda: str(toolchain.load()), install),
        _tried("headers", lambda: ", ".join(toolchain.include_paths()), install),
        _cache(),
        _tried("compile", _compile, "see the message; the checks above say what is missing"),
    ]


def healthy(checks: list[Check]) -> bool:
    """Whether nothing that is needed is missing."""
    return all(check.ok is not False for check in checks)


def _tried(name: str, probe: Callable[[], str], remedy: str) -> Check:
    try:
        return Check(name, True, probe())
    except (EnvironmentProblem, OSError, RuntimeError, ValueError, metadata.PackageNotFoundError) as error:
        return Check(name, False, str(error), remedy)


def _gpu() -> Check:
    if not torch.cuda.is_available():
        return Check("gpu", None, "none: emission and compilation work, running does not")
    index = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(index)
    found = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    remedy = "use a GPU that one of the targets is for"
    return _tried("gpu", lambda: f"{found}, target {arch.of_device(index)}", remedy)


def _cache() -> Check:
    about = cache.store().info()
    if not about["usable"]:
        # Slower starts, nothing wrong.
        detail = f"kernels are cached in memory only, {about['path'] or 'no folder'} cannot be used ({about['reason']})"
        return Check("cache", None, detail, cache.REMEDY)
    kept = counted(about["entries"], "kernel")
    return Check("cache", True, f"{about['path']}, {kept}, {about['bytes']} of {about['cap_bytes']} bytes")


def _compile() -> str:
    target = arch.default()
    cubin = compiler.build(_PROBE, target, name="doctor")
    how = "from the cache" if cubin.cache_hit else f"in {cubin.build_seconds:.2f} s"
    return f"a kernel for {target} {how}, {len(cubin.code)} bytes"
