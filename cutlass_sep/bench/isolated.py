"""Peers measured in a process of their own, where one that crashes or hangs costs its own row alone.

torch.compile's search for the fastest kernels launches many that nobody has run before; one that reads beyond its
memory ends the CUDA context of its process, and with it every measurement behind it there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch

from . import runner
from .inputs import Case
from .runner import Outcome, Plan

#: The peers that are measured like this.
PEERS = ("compile-max-autotune",)
#: Of <sys/prctl.h>: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: How long a process whose pipe is closed may take to end by itself, in seconds.
_GRACE_SECONDS = 10


class _Lost(RuntimeError):
    """No answer came; the message says what became of the process."""


class Worker:
    """Measures one peer at a time in a process, which starts when it is needed and anew after a failure.

    seconds: how long one measurement may take, the start of a process included. measure: what it calls there.
    """

    def __init__(self, seconds: float, measure: Callable[..., Outcome] = runner.measure) -> None:
        self._seconds, self._measure = seconds, measure
        self._process, self._pipe = None, None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def measure(
        self, case: Case, impl: str, plan: Plan, limits: dict[str, float], where: dict[str, Any], device: torch.device
    ) -> Outcome:
        """The rows of one peer, and of eager interleaved with it; what was lost is a sentence in `problems`.

        `plan.compiled_layouts` are the layouts of both.
        """
        plan = Plan(
            layouts=(), peer_layouts=plan.compiled_layouts, compiled_layouts=plan.compiled_layouts,
            peers=("eager", impl), timings=plan.timings, samples=plan.samples,
        )  # fmt: skip
        try:
            outcome = self._ask(case, plan, limits, where, device)
        except _Lost as error:
            layouts = " ".join(plan.compiled_layouts)
            outcome = Outcome(problems=[f"{case.id} {impl} {layouts} {case.problem.dtype}: {error}"])
        if outcome.problems:
            self._stop()  # its CUDA context may be none any more
        return outcome

    def _ask(self, *arguments: Any) -> Outcome:
        if self._process is not None and not self._process.is_alive():
            self._stop()  # it ended while nobody asked, which the next peer is not to blame for
        if self._process is None:
            self._start()
        try:
            self._pipe.send(arguments)
            if not self._pipe.poll(self._seconds):
                raise _Lost(f"no result after {self._seconds:g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):  # the other end is closed, or a reset pipe says so
            self._process.join(_GRACE_SECONDS)
            raise _Lost(f"its process {_end_of(self._process.exitcode)}") from None
        if isinstance(answer, str):
            raise _Lost(answer)
        return answer

    def _start(self) -> None:
        context = get_context("spawn")  # torch's threads and CUDA's state would not survive a fork
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._measure, other), daemon=False)
        self._process.start()
        other.close()

    def _stop(self) -> None:
        """End the process, and those that it started: the compilers of torch.compile."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has not come as far as a group of its own
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None


def _end_of(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe"
    return f"was ended by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with status {exitcode}"


def _serve(measure: Callable[..., Outcome], pipe: Any) -> None:
    """The process: an outcome for each message, or a sentence and the end."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed session leaves nothing that hangs on the GPU
    os.dup2(2, 1)  # stdout belongs to the results of the command
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(measure(*arguments))
        except Exception as error:
            first_line, _, _ = str(error).partition("\n")  # CUDA's errors come with a page of advice
            pipe.send(f"{type(error).__name__}: {first_line}")
            return
