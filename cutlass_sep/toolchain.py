"""What a compile needs from the machine: the NVRTC library and the header trees of CUTLASS, CUDA and CCCL.

Everything is found beside the installed distributions. CUDA_HOME, CUDA_PATH and nvcc are never consulted.

Loading NVRTC takes longer than all else that a kernel out of the disk cache needs on the host, and such a kernel needs
of NVRTC only what is part of its key. So `nvrtc` says which one it is without loading it where that can be told.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import EnvironmentProblem, UnsupportedArch


@dataclass(frozen=True)
class Tree:
    """One include folder: its distribution, its path inside site-packages and a file that proves it is there."""

    distribution: str
    folder: str
    probe: str


@dataclass(frozen=True)
class Nvrtc:
    """An NVRTC: version and a build identity that does not depend on where it is installed."""

    major: int
    minor: int
    build: str

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


#: Wheels of NVRTC; the probe is the library's name. pathfinder looks for them before all else but a loaded library.
_NVRTC_WHEELS = (
    Tree("nvidia-cuda-nvrtc", "nvidia/cu13/lib", "libnvrtc.so.13"),
    Tree("nvidia-cuda-nvrtc-cu12", "nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"),
)
_CUTLASS = Tree("nvidia-cutlass", "cutlass_library/source/include", "cutlass/version.h")

# Per CUDA major version: the CUDA headers, then CCCL and the CCCL distribution versions [low, high) that CUTLASS 4.2
# compiles with. CCCL's own cuda/std folder is never an include path: its <tuple> would hide the compiler's.
_TREES: dict[int, tuple[Tree, Tree, tuple[int, int], tuple[int, int]]] = {
    12: (
        Tree("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/include", "cuda_fp16.h"),
        Tree("nvidia-cuda-cccl-cu12", "nvidia/cuda_cccl/include", "cuda/std/type_traits"),
        (12, 9),
        (13, 0),
    ),
    13: (
        Tree("nvidia-cuda-runtime", "nvidia/cu13/include", "cuda_fp16.h"),
        Tree("nvidia-cuda-cccl", "nvidia/cu13/include/cccl", "cuda/std/type_traits"),
        (13, 0),
        (13, 2),
    ),
}


def _bindings() -> Any:
    """The module cuda.bindings.nvrtc, imported on first use. Raises EnvironmentProblem."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise EnvironmentProblem(
            f"cuda-bindings cannot be imported ({error}); install cutlass_sep[cu13] or cutlass_sep[cu12]"
        ) from error
    return nvrtc


def nvrtc() -> Nvrtc:
    """The NVRTC that compiles here: the one loaded, else the one that `load` is expected to find, and without either
    what it finds. Raises EnvironmentProblem.

    Whoever compiles calls `load` first and asks again: what was expected may not be what came.
    """
    expected = None if load.cache_info().currsize else _expected()
    return expected or load()


@functools.cache
def load() -> Nvrtc:
    """Load NVRTC by cuda.bindings (torch's own copy where torch has loaded one). Raises EnvironmentProblem."""
    bindings = _bindings()
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        status, major, minor = bindings.nvrtcVersion()
    except RuntimeError as error:  # pathfinder's message lists the places it searched
        raise EnvironmentProblem(
            f"NVRTC was not found; install cutlass_sep[cu13] or cutlass_sep[cu12], whichever torch uses.\n{error}"
        ) from error
    if status != 0:
        raise EnvironmentProblem(f"NVRTC at {path} does not answer: {status!r}")
    return Nvrtc(major, minor, _library_build(path))


@functools.cache
def _expected() -> Nvrtc | None:
    """The NVRTC of the one wheel that is installed; None where there is none or are two, or a library is loaded."""
    for wheel in _NVRTC_WHEELS:
        with contextlib.suppress(OSError):
            ctypes.CDLL(wheel.probe, mode=os.RTLD_NOLOAD)
            return None
    found = [(wheel, folder) for wheel in _NVRTC_WHEELS if (folder := _folder(wheel)) is not None]
    if len(found) != 1:
        return None
    wheel, folder = found[0]
    return Nvrtc(*_major_minor(version_of(wheel.distribution)), _library_build(f"{folder}/{wheel.probe}"))


def version_of(distribution: str) -> str:
    """`metadata.version`, which parses the whole METADATA as an e-mail: a millisecond for each distribution."""
    text = metadata.distribution(distribution).read_text("METADATA") or ""
    found = re.search(r"^Version: *(\S+)$", text, re.MULTILINE)
    return found[1] if found else metadata.version(distribution)


def _library_build(path: str | None) -> str:
    """The GNU build id of a shared library, else its size: two builds of one NVRTC version may emit different code."""
    if path is None:
        return "unknown"
    with open(path, "rb") as file:
        head = file.read(65536)
        note = re.search(rb"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0(.{20})", head, re.DOTALL)
        return note[1].hex() if note else f"size {file.seek(0, 2)}"


@functools.cache
def supported_archs() -> tuple[str, ...]:
    """Architectures NVRTC, loaded for that, compiles for, oldest first, e.g. ("sm_75", ..., "sm_90", "sm_90a", ...)."""
    version = load()
    status, numbers = _bindings().nvrtcGetSupportedArchs()
    if status != 0:
        raise EnvironmentProblem(f"NVRTC {version} does not list its architectures: {status!r}")
    # NVRTC lists numbers only; from 90 on each number also has its architecture-specific variant.
    return tuple(f"sm_{n}{suffix}" for n in sorted(numbers) for suffix in (("", "a") if n >= 90 else ("",)))


def check_arch_name(arch: str) -> None:
    """Raise ValueError for a malformed arch."""
    if not isinstance(arch, str) or not re.fullmatch(r"sm_\d{2,3}[a-z]?", arch):
        raise ValueError(f"arch must look like 'sm_80' or 'sm_90a', got {arch!r}")


def check_arch(arch: str) -> None:
    """Raise UnsupportedArch for an arch that NVRTC, which is loaded for that, does not know."""
    known = supported_archs()
    if arch not in known:
        raise UnsupportedArch(
            f"NVRTC {load()} cannot compile for {arch}; it knows {', '.join(known)}. "
            "For a newer GPU install a newer nvidia-cuda-nvrtc, for an older one a PyTorch of an older CUDA"
        )


def include_paths() -> tuple[str, ...]:
    """Include folders in search order: CUTLASS, CUDA, CCCL. Raises EnvironmentProblem for a missing or wrong one."""
    return include_paths_of(nvrtc())


@functools.cache
def include_paths_of(version: Nvrtc) -> tuple[str, ...]:
    """The same for one NVRTC."""
    if version.major not in _TREES:
        raise EnvironmentProblem(f"NVRTC {version} was found; cutlass_sep knows CUDA {' and '.join(map(str, _TREES))}")
    runtime, cccl, low, high = _TREES[version.major]
    folders, missing = [], []
    for tree in (_CUTLASS, runtime, cccl):
        folder = _folder(tree)
        if folder is None:
            missing.append(f"{tree.distribution} ({tree.folder})")
        folders.append(folder)
    if missing:
        raise EnvironmentProblem(
            f"headers are missing for NVRTC {version}: {', '.join(missing)}; install cutlass_sep[cu{version.major}]. "
            f"Searched: {', '.join(entry for entry in sys.path if entry)}"
        )
    found = version_of(cccl.distribution)
    if not low <= _major_minor(found) < high:
        allowed = f"{cccl.distribution}>={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        raise EnvironmentProblem(
            f"{cccl.distribution} {found} does not work with CUTLASS 4.2: install '{allowed}' (pip install '{allowed}')"
        )
    if version.major >= 13:
        # CUTLASS names CUDA 13's library headers <cccl/cuda/std/...>: the parent counts too where CCCL is not beside
        # the CUDA headers.
        folders.append(str(Path(folders[-1] or "").parent))
    return tuple(dict.fromkeys(folder for folder in folders if folder is not None))


def _folder(tree: Tree) -> str | None:
    """The tree's folder on this machine, or None."""
    try:
        folder = Path(str(metadata.distribution(tree.distribution).locate_file(tree.folder)))
    except metadata.PackageNotFoundError:
        return None
    return str(folder.absolute()) if (folder / tree.probe).is_file() else None


def _major_minor(version: str) -> tuple[int, int]:
    major, minor, *_ = (*version.split("."), "0")
    return int(major), int(re.match(r"\d*", minor)[0] or 0)


@functools.lru_cache(maxsize=1)
def driver_version() -> str | None:
    """The NVIDIA driver's version, e.g. "580.95.05", or None where neither the kernel nor nvidia-smi says."""
    with contextlib.suppress(OSError, IndexError):
        # NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ...
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        if (found := re.search(r"\b\d+\.\d+(\.\d+)?\b", line)) is not None:
            return found[0]
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None
