"""Target architectures: which kernels target, and which devices load them."""

from __future__ import annotations

import os

from .errors import EnvironmentProblem

#: arch -> (compute capability major, minor) of the devices its cubins run on. A suffix "a" means that family alone.
ARCHS = {
    "sm_80": (8, 0),
    "sm_86": (8, 6),
    "sm_89": (8, 9),
    "sm_90a": (9, 0),
    "sm_100a": (10, 0),
    "sm_120a": (12, 0),
}
#: Dynamic shared memory a block may use, bytes (CUDA C++ programming guide, table of technical specifications).
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_120a": 99 * 1024,
}


def check(arch: str) -> str:
    """`arch` if it is one that kernels are made for, else ValueError."""
    if not isinstance(arch, str) or arch not in ARCHS:
        raise ValueError(f"arch={arch!r} is not supported; it must be one of {', '.join(ARCHS)}")
    return arch


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a device of this compute capability loads cubins built for `arch`.

    It has the same capability, or for targets without the suffix "a" a higher minor of the same major.
    """
    major, minor = ARCHS[arch]
    if arch.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def of_capability(capability: tuple[int, int]) -> str:
    """The best target for a device of this compute capability; EnvironmentProblem if there is none."""
    fitting = [arch for arch in ARCHS if runs_on(arch, capability)]
    if not fitting:
        raise EnvironmentProblem(
            f"compute capability {capability[0]}.{capability[1]} has no kernels; targets are {', '.join(ARCHS)}"
        )
    return max(fitting, key=ARCHS.__getitem__)


def of_device(index: int) -> str:
    """The target for CUDA device `index`."""
    import torch

    return of_capability(torch.cuda.get_device_capability(index))


def default() -> str:
    """Target of emit and compile when none is named: CUTLASS_SEP_ARCH, else the current GPU's, else sm_90a."""
    named = os.environ.get("CUTLASS_SEP_ARCH")
    if named:
        return check(named)
    import torch

    return of_device(torch.cuda.current_device()) if torch.cuda.is_available() else "sm_90a"
