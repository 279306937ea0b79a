"""Kernels compiled into the disk cache by a pool of processes, beside the tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

from cutlass_sep import compiler
from cutlass_sep.kernel import Kernel


class Builds:
    """Compiles sources, each once. A test that needs one in the meantime waits for it at the cache's lock."""

    def __init__(self) -> None:
        # Not forked: torch's threads would not survive that.
        self._pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
        self._futures: dict[str, tuple[str, Future]] = {}
        self._started = time.monotonic()

    def submit(self, k: Kernel) -> None:
        if k.source not in self._futures:
            self._futures[k.source] = (k.name, self._pool.submit(_build, k.source, k.arch, k.name))

    def finish(self, write: Callable[[str], None]) -> list[str]:
        """Wait for all, telling `write` how far it is now and then; the errors, one line each."""
        failed, compiled, told = [], 0, time.monotonic()
        for done, (name, future) in enumerate(self._futures.values()):
            try:
                compiled += not future.result()
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            if time.monotonic() - told > 10:
                told = time.monotonic()
                write(f"kernels: {done + 1} of {len(self._futures)} compiled")
        self._pool.shutdown()
        seconds = time.monotonic() - self._started
        write(f"kernels: {len(self._futures)} in all, {compiled} compiled now, {len(failed)} failed, {seconds:.0f} s")
        return failed

    def abandon(self) -> None:
        """Start no more of them. What failed shows in the test that needed it."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _build(source: str, arch: str, name: str) -> bool:
    """In a process of the pool; whether the cubin was there."""
    return compiler.build(source, arch, name=name).cache_hit
