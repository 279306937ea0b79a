"""Time from nothing to the first result: once with an empty disk cache, once with the cubin in it, a new process each.

`python -m cutlass_sep.bench.startup PROBLEM-JSON` is the process that is timed; it prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from ..problem import SeparableConv2dProblem


def measure(problem: SeparableConv2dProblem) -> dict[str, Any]:
    """{"cold": ..., "warm": ...}, each {"emit_ms", "compile_ms", "load_and_run_ms", "total_ms", "cache_hit"}.

    `total_ms` runs from the call to the finished result, with torch imported and the CUDA context there. Raises
    RuntimeError with the child's error.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CUTLASS_SEP_CACHE_DIR": folder}
        # The first process leaves its bytecode to the second, as Python does and as pip does when it installs.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return {name: _child(problem, environment) for name in ("cold", "warm")}


def _child(problem: SeparableConv2dProblem, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "cutlass_sep.bench.startup", json.dumps(problem.to_json())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that was timed failed:\n{done.stderr}")
    return json.loads(done.stdout)


def _time_here(problem: SeparableConv2dProblem) -> dict[str, Any]:
    import torch

    from . import inputs

    with torch.no_grad():
        tensors = inputs.tensors(problem, "cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        # Imported inside the clock: the modules that a compile needs belong to the first result.
        from .. import op

        built = op.DepthwiseSeparableConv2d(*tensors, **inputs.options(problem))
        _ = built.source
        emitted = time.perf_counter()
        kernel = built.compile()
        compiled = time.perf_counter()
        built.run(*tensors)
        torch.cuda.synchronize()
        end = time.perf_counter()
    return {
        "emit_ms": 1e3 * (emitted - begin),
        "compile_ms": 1e3 * (compiled - emitted),
        "load_and_run_ms": 1e3 * (end - compiled),
        "total_ms": 1e3 * (end - begin),
        "cache_hit": kernel.cache_hit,
    }


if __name__ == "__main__":
    print(json.dumps(_time_here(SeparableConv2dProblem.from_json(json.loads(sys.argv[1])))))
