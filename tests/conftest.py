"""Fixtures for every test; helpers that tests import lie beside this file."""

from __future__ import annotations

import os

import pytest
import torch

# Workers that each take every core spend their time waiting for each other.
torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param
