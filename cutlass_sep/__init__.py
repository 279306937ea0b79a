"""Fused separable convolutions for PyTorch, emitted on CUTLASS/CuTe for each problem and compiled by NVRTC.

Importing this does no CUDA, compiler or disk work.
"""

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
    "warmup",
]
