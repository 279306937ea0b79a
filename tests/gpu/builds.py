"""Kernels compiled into the disk cache by a pool of processes, beside the tests or, as a program, before them:

python -m tests.gpu.builds kernels.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from cutlass_sep import kernel
from cutlass_sep.bench import results
from cutlass_sep.bench.builds import build, pool
from cutlass_sep.kernel import Kernel


class Builds:
    """Compiles sources, each once. A test that needs one in the meantime waits for it at the cache's lock.

    With `listing` it compiles nothing and only remembers the kernels.
    """

    def __init__(self, listing: bool = False) -> None:
        self._pool = None if listing else pool()
        self._futures: dict[str, tuple[Kernel, Future | None]] = {}
        self._started = time.monotonic()

    def submit(self, k: Kernel) -> None:
        if k.source not in self._futures:
            future = self._pool.submit(build, k.source, k.arch, k.name) if self._pool else None
            self._futures[k.source] = (k, future)

    def save(self, path: Path) -> None:
        """Write what was submitted, for `submit_saved` in another run."""
        kernels = [results.ran(k.problem, k.schedule.path, k.schedule, k.arch) for k, _ in self._futures.values()]
        path.write_text(json.dumps(kernels))

    def submit_saved(self, path: Path) -> None:
        for entry in json.loads(path.read_text()):
            self.submit(kernel.make(*results.what_ran(entry), entry["arch"]))

    def finish(self, write: Callable[[str], None]) -> list[str]:
        """Wait for all, telling `write` how far it is now and then; the errors, one line each."""
        failed, compiled, told = [], 0, time.monotonic()
        for done, (k, future) in enumerate(self._futures.values()):
            try:
                compiled += not future.result()
            except Exception as error:
                failed.append(f"{k.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
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


def main() -> int:
    """Compile what a rehearsal listed; 1 if a kernel could not be."""
    builds = Builds()
    builds.submit_saved(Path(sys.argv[1]))
    failed = builds.finish(lambda line: print(line, flush=True))
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
