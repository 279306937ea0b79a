"""The machine and the versions that a measurement depends on."""

from __future__ import annotations

import datetime
import shutil
import subprocess
from importlib import metadata
from typing import Any

import torch

from .. import toolchain


def driver_version() -> str | None:
    """The NVIDIA driver's version, e.g. "580.95.05", or None where nvidia-smi does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout.split("\n")[0].strip() or None if answer.returncode == 0 else None


def describe(device: torch.device) -> dict[str, Any]:
    """The `environment` of a results file. No host names."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "nvrtc": str(toolchain.nvrtc()),
        "cutlass": metadata.version("nvidia-cutlass"),
        "date": datetime.date.today().isoformat(),
    }
