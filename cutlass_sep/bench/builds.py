"""Kernels compiled into the disk cache by a pool of processes, ahead of what will run them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from .. import compiler
from ..kernel import Kernel


def build(source: str, arch: str, name: str) -> bool:
    """In a process of a pool: compile one kernel; whether the cubin was there already."""
    return compiler.build(source, arch, name=name).cache_hit


def pool(processes: int | None = None) -> ProcessPoolExecutor:
    """Processes that compile, by default one a core. Not forked: torch's threads would not survive that."""
    return ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn"))


def compile_all(kernels: Iterable[Kernel], advance: Callable[[], None]) -> None:
    """Compile each source once, `advance` after each. One that fails raises where it is used, not here."""
    distinct = {kernel.source: kernel for kernel in kernels}
    with pool(min(len(distinct), os.cpu_count() or 1) or None) as processes:
        futures = [processes.submit(build, source, k.arch, k.name) for source, k in distinct.items()]
        for _ in as_completed(futures):
            advance()
