"""Calls of the 1-D block for tests: tensors, an independent float64 reference, and error bounds as in separable.py."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from separable import ACTIVATION_ROUNDINGS, ACTIVATIONS, SLOPE, UNIT_ROUNDOFF, assert_within, double
from torch import Tensor

NAMES = ("x", "expand_weight", "dw_weight", "project_weight", "expand_bias", "dw_bias", "project_bias")


@dataclass(frozen=True)
class Block:
    """One call; the defaults make a small one. `o` None is C."""

    n: int = 2
    c: int = 6
    e: int = 10
    o: int | None = None
    l: int = 16  # noqa: E741
    kernel: int = 3
    dilation: int = 1
    expand_bias: bool = True
    dw_bias: bool = True
    project_bias: bool = True
    activation: str | None = "gelu"
    residual: bool = True

    def __str__(self) -> str:
        """What differs from the defaults, as a test id."""
        own = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return "-".join(own) or "default"

    @property
    def rows(self) -> int:
        return self.c if self.o is None else self.o

    @property
    def options(self) -> dict:
        return {name: getattr(self, name) for name in ("dilation", "activation", "residual")}

    @property
    def linear(self) -> Block:
        return dataclasses.replace(self, activation=None)

    def tensors(
        self, device: str = "cpu", dtype: torch.dtype = torch.float32, layout: str = "contiguous", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        """The tensors of NAMES, drawn anew from `seed` (meta tensors: shapes alone)."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            if device == "meta":
                return torch.empty(shape, device=device, dtype=dtype)
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device=device, dtype=dtype)

        x = draw(self.n, self.c, self.l)
        return (
            channels_last(x) if layout == "channels_last" else x,
            draw(self.e, self.c, 1, scale=1 / math.sqrt(self.c)),
            draw(self.e, 1, self.kernel, scale=1 / math.sqrt(self.kernel)),
            draw(self.rows, self.e, 1, scale=1 / math.sqrt(self.e)),
            draw(self.e) if self.expand_bias else None,
            draw(self.e) if self.dw_bias else None,
            draw(self.rows) if self.project_bias else None,
        )


def channels_last(x: Tensor) -> Tensor:
    """x [N,C,L] or [C,L] in [N,L,C] memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def is_channels_last(x: Tensor) -> bool:
    return x.transpose(-1, -2).is_contiguous() and not x.is_contiguous()


def plain(block: Block, tensors: tuple) -> Tensor:
    """The block as three torch convolutions in the tensors' own dtype; differentiable.

    The depthwise one is applied to expanded channels that are padded by hand: nothing but zeros lies outside.
    """
    x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias = tensors
    total = block.dilation * (block.kernel - 1)
    e = F.pad(F.conv1d(x, expand_weight, expand_bias), (total // 2, total - total // 2))
    m = F.conv1d(e, dw_weight, dw_bias, dilation=block.dilation, groups=dw_weight.shape[0])
    y = F.conv1d(ACTIVATIONS[block.activation](m), project_weight, project_bias)
    return x + y if block.residual else y


def assert_output_close(block: Block, tensors: tuple, y: Tensor) -> None:
    """y against float64. 16-bit tensors may be rounded after each convolution, activation and sum, as torch does."""
    magnitude = plain(block.linear, double(tensors, absolute=True))
    roundings = SLOPE * (block.c + block.kernel + 2) + ACTIVATION_ROUNDINGS + block.e + 2
    bound = roundings * UNIT_ROUNDOFF[torch.float32 if y.dtype != torch.float64 else y.dtype] * magnitude
    if y.dtype in (torch.float16, torch.bfloat16):
        bound = bound + (2 * SLOPE + 3) * UNIT_ROUNDOFF[y.dtype] * magnitude
    assert_within(y, plain(block, double(tensors)), bound, "y")


def assert_gradients_close(block: Block, tensors: tuple, grad: Tensor, gradients: tuple) -> None:
    """Gradients of the tensors for `grad`, None where not wanted, against float64."""
    expected = expected_gradients(block, tensors, grad)
    for name, got, (want, bound) in zip(NAMES, gradients, expected, strict=True):
        if got is not None:
            assert_within(got, want, UNIT_ROUNDOFF[got.dtype] * bound, f"gradient of {name}")


def expected_gradients(block: Block, tensors: tuple, grad: Tensor) -> list[tuple]:
    """For each tensor its gradient in float64, and its error bound in unit roundoffs."""
    grad = grad.detach().double().cpu()
    wanted = _gradients(block, double(tensors), grad)
    magnitudes = _gradients(block.linear, double(tensors, absolute=True), grad.abs())
    largest = plain(block.linear, double(tensors, absolute=True)).max().item()
    positions = grad.numel() // block.rows
    roundings = positions + block.c + block.e + block.rows + block.kernel + 2 * ACTIVATION_ROUNDINGS
    # Slopes bend by less than 1 a unit, so an error of the activation's argument counts once more.
    factor = SLOPE * roundings * (1 + largest)
    return [(want, None if m is None else factor * m) for want, m in zip(wanted, magnitudes, strict=True)]


def _gradients(block: Block, tensors: tuple, grad: Tensor) -> tuple:
    leaves = tuple(None if t is None else t.clone().requires_grad_() for t in tensors)
    plain(block, leaves).backward(grad)
    return tuple(None if t is None else t.grad for t in leaves)
