"""Everything that needs a GPU, in one program that fits a time limit: the GPU tests and the benchmarks.

    python benchmarks/gpu_session.py --minutes 9
    python benchmarks/gpu_session.py --minutes 9 --steps tests,peers-1,layers-bfloat16-0
    python benchmarks/gpu_session.py --minutes 9 --kernel-list kernels.json

Every core compiles: first the kernels that a rehearsal listed on any machine (`python -m pytest tests/gpu --rehearse
--kernel-list kernels.json`), or without a list, while the tests run, those that their parameters tell. With a list and
pytest-xdist, several processes run the tests.

Needs torch and the package's dependencies and installs nothing. Steps run in the order below, most important first,
each under a timeout; results are added to tests/gpu/results.json and benchmarks/results/<gpu>.json.
The end lists the steps that did not run or did not finish, for the next call.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ROOT / "benchmarks" / "layers.jsonl"
#: Cases of the layer file measured by one step.
CASES_A_STEP = 30
#: Less time than this is not worth starting a step, in seconds.
_LEAST_SECONDS = 20
#: How long an interrupted step may take to end, in seconds.
_GRACE_SECONDS = 15
#: Processes that share the GPU in the tests.
_MOST_TEST_PROCESSES = 10


@dataclass(frozen=True)
class Step:
    """One program: its arguments after `python -m`, and the seconds it may take at most."""

    name: str
    arguments: list[str]
    seconds: int


def steps(results: Path, kernel_list: Path | None = None) -> list[Step]:
    """All steps; `results` is the benchmarks' results file, `kernel_list` what a rehearsal of the GPU tests wrote."""
    sys.path.insert(0, str(ROOT))
    from cutlass_sep.bench import inputs, session

    def bench(*arguments: str) -> list[str]:
        return ["cutlass_sep", "bench", *arguments, "--output", str(results), "--append"]

    tests = [
        "pytest",
        "-q",
        "-p",
        "tests.gpu_results",
        "--gpu-results",
        "tests/gpu/results.json",
        "--gpu-results-append",
    ]
    planned = [
        Step("verify", ["cutlass_sep", "verify"], 120),
        Step("lead", bench("--suite", "lead", "--peers", "eager", "--startup"), 240),
    ]
    if kernel_list is None:
        planned.append(Step("tests", [*tests, "--build-ahead", "tests/gpu"], 560))
    else:
        shared = ["-n", str(min(_MOST_TEST_PROCESSES, os.cpu_count()))] if find_spec("xdist") else []
        planned.append(Step("kernels", ["tests.gpu.builds", str(kernel_list.resolve())], 400))  # a step runs in ROOT
        planned.append(Step("tests", [*tests, *shared, "tests/gpu"], 560))
    for i in range(len(session.LEAD_VARIANTS)):
        for name, suite in (("peers", "lead2d"), ("peers1d", "lead1d")):
            planned.append(Step(f"{name}-{i}", bench("--suite", suite, "--rows", f"{i}:{i + 1}"), 400))
    for i, first in enumerate(range(0, len(inputs.sweep1d()), CASES_A_STEP)):
        rows = f"{first}:{first + CASES_A_STEP}"
        planned.append(Step(f"sweep1d-{i}", bench("--suite", "sweep1d", "--rows", rows), 400))
    # bf16 where the tensor cores want it; each peer in both layouts, compiled ones in channels_last.
    autotuned = []  # last: some 20 seconds a layer, and what is left of the time before
    for dtype, own in (("bfloat16", ("--layout", "channels_last")), ("float32", ())):
        for i, first in enumerate(range(0, len(inputs.layers(LAYERS)[0]), CASES_A_STEP)):
            chosen = (
                "--suite",
                str(LAYERS),
                "--dtype",
                dtype,
                *own,
                "--rows",
                f"{first}:{first + CASES_A_STEP}",
                "--resume",
            )
            name = f"{dtype}-{i}"
            planned.append(Step(f"layers-{name}", bench(*chosen, "--tune", "--peers", "eager,compile"), 560))
            planned.append(Step(f"batch1-{name}", bench(*chosen, "--batch", "1", "--timing", "cuda_graph"), 400))
            if dtype == "bfloat16":
                autotuned.append(Step(f"autotune-{name}", bench(*chosen, "--peers", "compile-max-autotune"), 560))
    return planned + autotuned


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="stop starting steps, and cut the last one, by then")
    parser.add_argument("--steps", type=lambda text: text.split(","), help="only these, in this order; default: all")
    parser.add_argument("--copy-to", type=Path, help="a folder that gets a copy of the results files and of each log")
    parser.add_argument("--kernel-list", type=Path, help="kernels that a rehearsal of the tests listed, compiled first")
    parser.add_argument("--list", action="store_true", help="print the names of the steps and stop")
    args = parser.parse_args()
    if args.kernel_list is not None and not args.kernel_list.is_file():
        parser.error(f"--kernel-list {args.kernel_list} must be a file; `pytest tests/gpu --rehearse` writes one")
    deadline = time.monotonic() + 60 * args.minutes
    gpu = _gpu_name()
    results = ROOT / "benchmarks" / "results" / f"{gpu}.json"
    planned = {step.name: step for step in steps(results, args.kernel_list)}
    if args.list:
        print("\n".join(planned))
        return 0
    unknown = [name for name in args.steps or () if name not in planned]
    if unknown:
        parser.error(f"unknown steps {', '.join(unknown)}; steps are {', '.join(planned)}")
    if gpu == "none":
        print("no GPU: nothing can be run here", file=sys.stderr)
        return 3
    outcomes = {name: _run(planned[name], deadline, args.copy_to) for name in args.steps or planned}
    for path in (results, ROOT / "tests" / "gpu" / "results.json"):
        if args.copy_to and path.exists():
            shutil.copy(path, args.copy_to / f"{path.parent.name}-{path.name}")
    print("\n".join(f"{name:10} {outcome}" for name, outcome in outcomes.items()))
    rest = [name for name, outcome in outcomes.items() if outcome in ("not run", "cut short")]
    if rest:
        listed = "" if args.kernel_list is None else f" --kernel-list {args.kernel_list}"
        print(f"to go on: python benchmarks/gpu_session.py --steps {','.join(rest)}{listed}")
    return 0 if all(outcome == "exit 0" for outcome in outcomes.values()) else 1


def _gpu_name() -> str:
    """File name of this GPU's results: "h200" for "NVIDIA H200"."""
    import torch

    if not torch.cuda.is_available():
        return "none"
    words = torch.cuda.get_device_name().lower().removeprefix("nvidia").split()
    return re.sub(r"[^a-z0-9]+", "-", words[0] if words else "gpu")


def _run(step: Step, deadline: float, copy_to: Path | None) -> str:
    """Run one step with its output shown; "exit N", "cut short" or "not run"."""
    left = deadline - time.monotonic()
    if left < _LEAST_SECONDS:
        return "not run"
    print(f"==== {step.name}: python -m {' '.join(step.arguments)}", flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    log = None
    if copy_to is not None:
        copy_to.mkdir(parents=True, exist_ok=True)
        log = open(copy_to / f"{step.name}.log", "w")  # noqa: SIM115 - shared with the child, closed below
    command = [sys.executable, "-m", *step.arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT if log else None
    )
    try:
        process.wait(min(step.seconds, left))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then writes its results
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return "cut short"
    finally:
        if log is not None:
            log.close()
            print("\n".join((copy_to / f"{step.name}.log").read_text().splitlines()[-40:]), flush=True)
    return f"exit {process.returncode}"


if __name__ == "__main__":
    sys.exit(main())
