"""The tests of the PyTorch layer that take a device, here on the GPU: gradients, autocast, compile, opcheck."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import test_block
import test_functional
import test_module
import test_op
import torch
from test_module import calls  # noqa: F401 - a fixture that its tests ask for

#: Not here: the generated combinations say more about values; views may get another kernel than their copies.
_ELSEWHERE = {"test_values_and_layout", "test_views_of_x_give_what_their_copies_give"}


def _borrowed() -> dict[str, Callable]:
    return {
        f"test_{module.__name__.removeprefix('test_')}_{name.removeprefix('test_')}": test
        for module in (test_functional, test_block, test_module, test_op)
        for name, test in vars(module).items()
        if name.startswith("test_") and inspect.isfunction(test) and name not in _ELSEWHERE
        if "device" in inspect.signature(test).parameters
    }


globals().update(_borrowed())


@pytest.fixture(autouse=True)
def _strict_reference(fused) -> Iterator[None]:
    """Kernels; and as the reference PyTorch's convolutions in strict fp32, with the same bits each time."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic = False, False, True
    yield
    cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic = before
