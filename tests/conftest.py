"""Fixtures for every test; helpers that tests import lie beside this file."""

from __future__ import annotations

import os

import pytest
import torch

from cutlass_sep import kept

# Workers that each take every core spend their time waiting for each other.
torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and sources are made anew: a test may falsify what they follow from, and other processes would see it."""
    monkeypatch.setattr(kept, "_digest", lambda folder: None)


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
