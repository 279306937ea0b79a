"""The machine and the versions that a measurement depends on."""

from __future__ import annotations

import datetime
from importlib import metadata
from typing import Any

import torch

from .. import toolchain
from ..toolchain import driver_version


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
