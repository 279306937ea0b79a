"""A tiny kernel, and building it as a new process would: for the tests of the compiler and of the cache."""

from __future__ import annotations

from cutlass_sep import cache, compiler

SOURCE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 3.0f; }\n'
ARCH = "sm_80"


def forget() -> None:
    """What a new process would not know."""
    compiler._memory.clear()
    compiler._walks.clear()
    cache._store.cache_clear()


def build(source: str = SOURCE, arch: str = ARCH) -> compiler.Cubin:
    """Build as a new process would."""
    forget()
    return compiler.build(source, arch, name="scale")
