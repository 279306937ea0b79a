"""Fused separable convolutions for PyTorch, emitted on CUTLASS/CuTe for each problem and compiled by NVRTC.

Importing this does no CUDA, compiler or disk work.
"""

from typing import Any

from . import kept as kept  # before all others: it notes when the package was loaded

# isort: split

from . import emit, functional, op
from .errors import CompileError, EnvironmentProblem, Unsupported
from .explain import explain, supports, warmup
from .module import DepthwiseSeparableConv2d, SeparableConvBlock1d

__all__ = [
    "CompileError",
    "DepthwiseSeparableConv2d",
    "EnvironmentProblem",
    "SeparableConvBlock1d",
    "Unsupported",
    "emit",
    "explain",
    "functional",
    "op",
    "supports",
    "tune",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """`tune` on first use: it needs what no other call does, the timing of the benchmarks and a progress bar."""
    if name == "tune":
        from .tuner import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
