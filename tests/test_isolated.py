"""Peers in a process of their own: what crashes, hangs or raises there is a sentence, and the next one is measured."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cutlass_sep.bench import inputs, isolated
from cutlass_sep.bench.inputs import Case
from cutlass_sep.bench.runner import Outcome, Plan

DEVICE = torch.device("cpu")


def stand_in(case, plan, limits, where, device):
    """Measures nothing, and does what the case's id says."""
    if case.id == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if case.id == "exit":
        os._exit(7)
    if case.id == "raise":
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with advice")
    if case.id == "hang":
        child = subprocess.Popen(["sleep", "600"])
        Path(where["file"]).write_text(f"{child.pid}")
        time.sleep(600)
    if case.id == "wrong":
        return Outcome(problems=["wrong values"])
    print("a library prints")
    return Outcome(rows=[{"pid": os.getpid(), "plan": plan, "device": device, "limits": limits}])


def ask(worker, name, **where):
    case = Case(name, replace(inputs.lead("bfloat16").problem, n=1))
    plan = Plan(compiled_layouts=("channels_last",), samples=5, tune=True)
    return worker.measure(case, "compile-max-autotune", plan, {"copy_TBps": 4.0}, where, DEVICE)


def runs(pid: int) -> bool:
    """Whether a process is there that has not ended (one that nobody waited for is a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def within(seconds: float, condition) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(found)


def test_one_process_measures_one_peer_beside_eager_after_the_other(capfd):
    with isolated.Worker(60, stand_in) as worker:
        first, second = (ask(worker, name).rows[0] for name in ("a", "b"))
        assert first["pid"] == second["pid"] != os.getpid()
        assert runs(first["pid"])
    assert not runs(first["pid"])
    layouts = ("channels_last",)
    assert first["plan"] == Plan(
        layouts=(), peer_layouts=layouts, compiled_layouts=layouts, peers=("eager", "compile-max-autotune"), samples=5
    )
    assert (first["device"], first["limits"]) == (DEVICE, {"copy_TBps": 4.0})
    out, err = capfd.readouterr()
    assert (out, err.count("a library prints")) == ("", 2), "stdout is the command's"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crash", "its process was ended by SIGSEGV"),
        ("exit", "its process ended with status 7"),
        ("raise", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_what_is_lost_is_a_sentence_and_the_next_has_a_new_process(name, reason):
    with isolated.Worker(60, stand_in) as worker:
        before = ask(worker, "a").rows[0]["pid"]
        assert ask(worker, name) == Outcome(problems=[f"{name} compile-max-autotune channels_last bfloat16: {reason}"])
        assert ask(worker, "a").rows[0]["pid"] != before


def test_a_refused_result_ends_its_process_too():
    with isolated.Worker(60, stand_in) as worker:
        before = ask(worker, "a").rows[0]["pid"]
        assert ask(worker, "wrong").problems == ["wrong values"]
        assert not runs(before), "its CUDA context may be broken"


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    file = tmp_path / "pid"
    with isolated.Worker(60, stand_in) as worker:
        ask(worker, "a")
        worker._seconds = 1.0
        begin = time.monotonic()
        (sentence,) = ask(worker, "hang", file=str(file)).problems
        assert sentence.endswith(": no result after 1 s") and time.monotonic() - begin < 20
        assert within(10, lambda: not runs(int(file.read_text())))


def test_an_interrupted_session_leaves_no_process():
    with pytest.raises(KeyboardInterrupt), isolated.Worker(60, stand_in) as worker:
        pid = ask(worker, "a").rows[0]["pid"]
        raise KeyboardInterrupt
    assert not runs(pid)


def test_a_killed_session_leaves_no_process(tmp_path):
    file = tmp_path / "pid"
    program = tmp_path / "session.py"
    program.write_text(
        "import sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "if __name__ == '__main__':\n"
        "    import test_isolated as here\n"
        "    with here.isolated.Worker(600, here.stand_in) as worker:\n"
        f"        here.ask(worker, 'hang', file={str(file)!r})\n"
    )
    session = subprocess.Popen([sys.executable, str(program)])
    try:
        assert within(60, lambda: file.exists() and file.read_text())
        (worker,) = (
            int(pid)
            for pid in Path(f"/proc/{session.pid}/task/{session.pid}/children").read_text().split()
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        assert runs(worker)
    finally:
        session.kill()
        session.wait()
    assert within(10, lambda: not runs(worker))
    os.kill(int(file.read_text()), signal.SIGKILL)  # what it started ends by itself as a rule; this one sleeps


def test_a_process_that_ended_while_idle_costs_no_peer_its_row():
    with isolated.Worker(60, stand_in) as worker:
        first = ask(worker, "a").rows[0]["pid"]
        os.kill(first, signal.SIGKILL)
        assert within(10, lambda: not worker._process.is_alive())
        again = ask(worker, "b")
        assert again.problems == [] and again.rows[0]["pid"] != first
