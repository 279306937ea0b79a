"""Calls of the 2-D operator for tests: tensors, an independent float64 reference, and error bounds.

A bound is unit roundoff times the number of roundings on the way to a value times the sum of the magnitudes that are
added up there, which is what the operator gives on absolute values. Nothing in it is fitted.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

#: Half the spacing of numbers at 1: the relative error of one rounding to nearest.
UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
#: Largest slope of any activation (hardswish, at 3). None exceeds its argument in magnitude.
SLOPE = 1.5
#: Roundings in evaluating an activation once, counted high.
ACTIVATION_ROUNDINGS = 8

ACTIVATIONS = {
    None: lambda z: z,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


@dataclass(frozen=True)
class Case:
    """One call; the defaults make a small 3x3 one."""

    n: int = 2
    c: int = 8
    o: int = 16
    h: int = 10
    w: int = 12
    kernel: tuple[int, int] = (3, 3)
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] | str = 1
    dilation: int | tuple[int, int] = 1
    dw_bias: bool = True
    pw_bias: bool = True
    mid_activation: str | None = None
    activation: str | None = None

    def __str__(self) -> str:
        """What differs from the defaults, as a test id."""
        own = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return "-".join(own).replace(" ", "") or "default"

    @property
    def options(self) -> dict:
        names = ("stride", "padding", "dilation", "mid_activation", "activation")
        return {name: getattr(self, name) for name in names}

    def tensors(
        self, device: str = "cpu", dtype: torch.dtype = torch.float32, layout: str = "contiguous", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """x, dw_weight, pw_weight, dw_bias, pw_bias, drawn anew from `seed` (meta tensors: shapes alone)."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            if device == "meta":
                return torch.empty(shape, device=device, dtype=dtype)
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device=device, dtype=dtype)

        x = draw(self.n, self.c, self.h, self.w)
        if layout == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        dw_weight = draw(self.c, 1, *self.kernel, scale=1 / math.sqrt(math.prod(self.kernel)))
        pw_weight = draw(self.o, self.c, 1, 1, scale=1 / math.sqrt(self.c))
        return (
            x, dw_weight, pw_weight, draw(self.c) if self.dw_bias else None, draw(self.o) if self.pw_bias else None,
        )  # fmt: skip

    def linear(self) -> Case:
        return dataclasses.replace(self, mid_activation=None, activation=None)


def plain(case: Case, tensors: tuple) -> Tensor:
    """The operator as two torch convolutions in the tensors' own dtype; differentiable."""
    x, dw_weight, pw_weight, dw_bias, pw_bias = tensors
    m = F.conv2d(x, dw_weight, dw_bias, case.stride, case.padding, case.dilation, groups=dw_weight.shape[0])
    z = F.conv2d(ACTIVATIONS[case.mid_activation](m), pw_weight, pw_bias)
    return ACTIVATIONS[case.activation](z)


def double(tensors: tuple, *, absolute: bool = False) -> tuple:
    """Detached float64 copies on the CPU, of the magnitudes if `absolute`."""
    copies = (None if t is None else t.detach().double().cpu() for t in tensors)
    return tuple(t.abs() if absolute and t is not None else t for t in copies)


def assert_output_close(case: Case, tensors: tuple, y: Tensor, *, slack: float = 1.0) -> None:
    """y against float64. 16-bit tensors may be rounded after each convolution and activation, as torch does."""
    magnitude = plain(case.linear(), double(tensors, absolute=True))
    taps, channels = math.prod(case.kernel), tensors[2].shape[1]
    roundings = SLOPE * (channels + 1 + SLOPE * (taps + 1) + ACTIVATION_ROUNDINGS) + ACTIVATION_ROUNDINGS
    bound = roundings * UNIT_ROUNDOFF[torch.float32 if y.dtype != torch.float64 else y.dtype] * magnitude
    if y.dtype in (torch.float16, torch.bfloat16):
        bound = bound + 4 * SLOPE**2 * UNIT_ROUNDOFF[y.dtype] * magnitude
    assert_within(y, plain(case, double(tensors)), slack * bound, "y")


def assert_gradients_close(case: Case, tensors: tuple, grad: Tensor, gradients: tuple) -> None:
    """Gradients of (x, dw_weight, pw_weight, dw_bias, pw_bias) for `grad`, None where not wanted, against float64."""
    expected = expected_gradients(case, tensors, grad)
    for name, got, (want, magnitude) in zip(NAMES, gradients, expected, strict=True):
        if got is not None:
            assert_within(got, want, UNIT_ROUNDOFF[got.dtype] * magnitude, f"gradient of {name}")


def expected_gradients(case: Case, tensors: tuple, grad: Tensor) -> list[tuple]:
    """For each tensor its gradient in float64, and its error bound in unit roundoffs."""
    wanted = _gradients(case, double(tensors), grad.detach().double().cpu())
    magnitudes = _gradients(case.linear(), double(tensors, absolute=True), grad.detach().double().cpu().abs())
    largest = plain(case.linear(), double(tensors, absolute=True)).max().item()
    pixels = grad.shape[-1] * grad.shape[-2] * (grad.shape[0] if grad.dim() == 4 else 1)
    roundings = pixels + case.c + case.o + math.prod(case.kernel) + 2 * ACTIVATION_ROUNDINGS
    # Slopes bend by less than 1 a unit, so an error of an activation's argument counts once more.
    factor = SLOPE**2 * roundings * (1 + largest)
    return [(want, None if m is None else factor * m) for want, m in zip(wanted, magnitudes, strict=True)]


NAMES = ("x", "dw_weight", "pw_weight", "dw_bias", "pw_bias")


def _gradients(case: Case, tensors: tuple, grad: Tensor) -> tuple:
    leaves = tuple(None if t is None else t.clone().requires_grad_() for t in tensors)
    plain(case, leaves).backward(grad)
    return tuple(None if t is None else t.grad for t in leaves)


def assert_within(got: Tensor, want: Tensor, bound: Tensor, name: str) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    excess = (got.detach().double().cpu() - want).abs() - bound
    assert not excess.isnan().any(), f"{name} has NaN"
    assert excess.max().item() <= 0 if excess.numel() else True, (
        f"{name} exceeds its bound by {excess.max().item():.3g}"
    )
