"""Both operators as the tests see them: what a test that is written once has to know of each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType

import block
import separable
import torch
import torch.nn.functional as F
from block import Block
from separable import ACTIVATIONS, Case
from torch import Tensor

from cutlass_sep import functional, torch_ops
from cutlass_sep.operators import BLOCK1D, SEPARABLE2D, Operator


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """One operator: its public function, its operator in torch.ops, its calls (a class), and what goes with those."""

    operator: Operator
    case: type
    #: plain, assert_output_close, assert_gradients_close, expected_gradients of these calls.
    calls: ModuleType
    cases: tuple
    #: Weights with strides of their own, as (weights) -> weights.
    restride: Callable[[list[Tensor]], list[Tensor]]

    def __str__(self) -> str:
        return self.operator.problem.op

    @property
    def run(self) -> Callable[..., Tensor]:
        """The public function."""
        return getattr(functional, self.operator.name)

    @property
    def op(self) -> torch_ops.TorchOp:
        return {SEPARABLE2D: torch_ops.separable2d, BLOCK1D: torch_ops.block1d}[self.operator]

    @property
    def spatial(self) -> int:
        return self.operator.problem.spatial

    @property
    def count(self) -> int:
        """Number of tensors of a call, the biases that may be absent too."""
        return len(self.operator.tensors)

    @property
    def weights(self) -> int:
        """Number of weights; they follow x."""
        return sum(name.endswith("weight") for name in self.operator.tensors)

    def channels_last(self, x: Tensor) -> Tensor:
        return x.movedim(-self.spatial - 1, -1).contiguous().movedim(-1, -self.spatial - 1)

    def is_channels_last(self, x: Tensor) -> bool:
        return x.movedim(-self.spatial - 1, -1).is_contiguous() and not x.is_contiguous()

    def identity(self, device: str) -> tuple[list[Tensor], dict]:
        """Weights of one channel and one tap, and options, with which y is x."""
        one = torch.ones((1, 1, *(1,) * self.spatial), device=device)
        nothing = {"mid_activation": None, "activation": None, "residual": False}
        return [one] * self.weights, {k: v for k, v in nothing.items() if k in self.operator.options}


def leaves(tensors: tuple, wanted: tuple[bool, ...] | None = None) -> tuple:
    """Copies that require a gradient where wanted (default: all), with the strides of the originals."""
    return tuple(
        None if t is None else t.detach().clone(memory_format=torch.preserve_format).requires_grad_(want)
        for t, want in zip(tensors, wanted or (True,) * len(tensors), strict=True)
    )


SEPARABLE = Subject(
    SEPARABLE2D,
    Case,
    separable,
    (
        Case(),
        Case(dw_bias=False, pw_bias=False),
        Case(dw_bias=False),
        Case(pw_bias=False, mid_activation="relu6"),
        Case(kernel=(1, 1), padding=0),
        Case(kernel=(5, 3), padding=(2, 1), stride=(2, 1)),
        Case(kernel=(2, 4), padding="same"),
        Case(kernel=(4, 2), padding="same", dilation=(3, 1)),
        Case(kernel=(3, 3), padding="valid", dilation=2),
        Case(kernel=(3, 3), padding=5),
        Case(n=1, c=1, o=1, h=1, w=1),
        Case(n=3, c=3, o=5, h=7, w=7),
        Case(n=1, c=7, o=66, h=1, w=13, kernel=(1, 5), padding=(0, 2)),
        Case(c=256, o=8, h=4, w=4),
        *(Case(mid_activation=name, activation=name) for name in ACTIVATIONS if name),
    ),
    lambda weights: [
        weights[0].transpose(2, 3).contiguous().transpose(2, 3),
        weights[1].to(memory_format=torch.channels_last),
    ],
)
BLOCK = Subject(
    BLOCK1D,
    Block,
    block,
    (
        Block(),
        Block(expand_bias=False, dw_bias=False, project_bias=False),
        Block(expand_bias=False),
        Block(dw_bias=False, activation="silu"),
        Block(project_bias=False),
        Block(residual=False),
        Block(residual=False, o=9, activation=None),
        Block(kernel=1),
        Block(kernel=2),
        Block(kernel=4, dilation=3),
        Block(kernel=9, dilation=2),
        Block(kernel=31),  # longer than the sequence
        Block(kernel=3, dilation=40),  # both outer taps outside everywhere
        Block(kernel=2, dilation=40),
        Block(n=1, c=1, e=1, l=1),
        Block(n=3, c=7, e=66, l=13, kernel=5),
        Block(c=3, e=10, l=257, kernel=9),
        Block(c=64, e=8, l=5),
        *(Block(activation=name) for name in ACTIVATIONS if name),
    ),
    lambda weights: [
        w.transpose(0, axis).contiguous().transpose(0, axis) for w, axis in zip(weights, (1, 2, 1), strict=True)
    ],
)
SUBJECTS = (SEPARABLE, BLOCK)


def of(case: Case | Block) -> Subject:
    """The operator that a call is one of."""
    return BLOCK if isinstance(case, Block) else SEPARABLE


def name_of(case: object) -> str:
    """Test id of a call, with its operator."""
    return f"{of(case)}-{case}" if isinstance(case, (Case, Block)) else str(case)


# ---- views of x ----


def _swapped(x: Tensor, a: int, b: int) -> Tensor:
    return x.transpose(a, b).contiguous().transpose(a, b)


def _every_second(x: Tensor) -> Tensor:
    for axis in range(2, x.dim()):
        x = x.repeat_interleave(2, axis)
    return x[(..., *(slice(None, None, 2) for _ in range(2, x.dim())))]


def _interior_of_nan(x: Tensor) -> Tensor:
    spatial = x.dim() - 2
    return F.pad(x, (2, 3) * spatial, value=math.nan)[(..., *(slice(2, -3),) * spatial)]


#: (subject, x) -> x with other strides, and the layout of y then.
VIEWS = {
    "contiguous": (lambda s, x: x, "contiguous"),
    "channels_last": (lambda s, x: s.channels_last(x), "channels_last"),
    "batch_inside": (lambda s, x: _swapped(x, 0, 1), "contiguous"),
    "width_before_height": (lambda s, x: _swapped(x, 2, 3), "contiguous"),
    "every_second_position": (lambda s, x: _every_second(x), "contiguous"),
    "some_channels": (lambda s, x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]], "contiguous"),
    "some_channels_last": (lambda s, x: s.channels_last(torch.cat([x, x], 1))[:, : x.shape[1]], "contiguous"),
    "one_element_expanded": (lambda s, x: x[:1].expand(2, *x.shape[1:]), "contiguous"),
    "odd_offset": (lambda s, x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), "contiguous"),
    "interior_of_nan": (lambda s, x: _interior_of_nan(x), "contiguous"),
}


def views(*names: str) -> list[tuple[Subject, str]]:
    """Operators and names of VIEWS (default: all) that they have."""
    pairs = itertools.product(SUBJECTS, names or VIEWS)
    return [(subject, name) for subject, name in pairs if subject.spatial > 1 or name != "width_before_height"]


# ---- wrong calls: error, pattern of the message, tensors, options ----


def _zeros(*shape: int, **options) -> Tensor:
    return torch.zeros(shape, **options)


def _separable_errors() -> dict[str, tuple]:
    z = _zeros
    x, dw, pw = z(1, 4, 8, 8), z(4, 1, 3, 3), z(6, 4, 1, 1)
    return {
        "kernel_exceeds": (RuntimeError, "exceeds", (z(1, 4, 3, 3), z(4, 1, 5, 5), pw), {}),
        "dilated_kernel_exceeds": (RuntimeError, r"9 pixels.*\(8 \+ 0\)", (x, dw, pw), {"dilation": 4}),
        "channels": (RuntimeError, "dw_weight", (z(1, 5, 8, 8), dw, pw), {}),
        "pointwise_channels": (RuntimeError, "pw_weight", (x, dw, z(6, 5, 1, 1)), {}),
        "pointwise_kernel": (RuntimeError, "pw_weight", (x, dw, z(6, 4, 3, 3)), {}),
        "depth_multiplier": (ValueError, "depth multiplier", (x, z(8, 1, 3, 3), pw), {}),
        "grouped_weight": (RuntimeError, "dw_weight", (x, z(4, 2, 3, 3), pw), {}),
        "rank_of_x": (RuntimeError, "x must be", (z(1, 1, 4, 8, 8), dw, pw), {}),
        "rank_of_weight": (RuntimeError, "dw_weight", (x, z(4, 3, 3), pw), {}),
        "bias": (RuntimeError, "dw_bias", (x, dw, pw, z(5)), {}),
        "pointwise_bias": (RuntimeError, "pw_bias", (x, dw, pw, None, z(4)), {}),
        "mixed_dtypes": (RuntimeError, "float16.*float32", (x.half(), dw, pw), {}),
        "mixed_devices": (RuntimeError, "cpu.*meta", (x, dw.to("meta"), pw), {}),
        "integer": (TypeError, "int32", (x.int(), dw.int(), pw.int()), {}),
        "complex": (TypeError, "complex64", tuple(t.to(torch.complex64) for t in (x, dw, pw)), {}),
        "sparse": (TypeError, "sparse", (x.to_sparse(), dw, pw), {}),
        "sparse_weight": (TypeError, "sparse", (x, dw.to_sparse(), pw), {}),
        "quantised": (TypeError, "q", (torch.quantize_per_tensor(x, 1.0, 0, torch.quint8), dw, pw), {}),
        "no_tensor": (TypeError, "dw_weight", (x, [1.0], pw), {}),
        "x_is_none": (TypeError, "x must be a torch.Tensor, got NoneType", (None, dw, pw), {}),
        "weight_is_none": (TypeError, "dw_weight must be a torch.Tensor, got NoneType", (x, None, pw), {}),
        "pointwise_is_none": (TypeError, "pw_weight must be a torch.Tensor, got NoneType", (x, dw, None), {}),
        "bias_is_false": (TypeError, "dw_bias must be a torch.Tensor, got bool", (x, dw, pw, False), {}),
        "bias_is_text": (TypeError, "pw_bias must be a torch.Tensor, got str", (x, dw, pw, None, "zeros"), {}),
        "stride_zero": (RuntimeError, "stride", (x, dw, pw), {"stride": 0}),
        "dilation_zero": (RuntimeError, "dilation", (x, dw, pw), {"dilation": (1, 0)}),
        "negative_padding": (RuntimeError, "padding", (x, dw, pw), {"padding": -1}),
        "four_paddings": (ValueError, "padding", (x, dw, pw), {"padding": (1, 1, 1, 1)}),
        "float_stride": (ValueError, "stride", (x, dw, pw), {"stride": 1.5}),
        "same_upper_case": (ValueError, "SAME", (x, dw, pw), {"padding": "SAME"}),
        "same_strided": (RuntimeError, "same", (x, dw, pw), {"padding": "same", "stride": 2}),
        "mid_activation": (ValueError, "mid_activation", (x, dw, pw), {"mid_activation": "relu8"}),
        "activation": (ValueError, "activation", (x, dw, pw), {"activation": "GELU"}),
        "precision": (ValueError, "fp32_precision", (x, dw, pw), {"fp32_precision": "high"}),
        "empty_height": (RuntimeError, "height", (z(2, 4, 0, 5), z(4, 1, 2, 2), pw), {"padding": 1}),
        "no_channels": (RuntimeError, "channel", (z(2, 0, 5, 5), z(0, 1, 3, 3), z(6, 0, 1, 1)), {}),
    }


def _block_errors() -> dict[str, tuple]:
    z = _zeros
    x, expand, dw, project = z(2, 4, 9), z(8, 4, 1), z(8, 1, 3), z(4, 8, 1)
    four = (x, expand, dw, project)
    return {
        "x_rank": (RuntimeError, r"x must be \[N,C,L\]", (z(2, 4, 9, 1), expand, dw, project), {}),
        "x_vector": (RuntimeError, r"x must be \[N,C,L\]", (z(4), expand, dw, project), {}),
        "channels": (RuntimeError, "expand_weight", (z(2, 5, 9), expand, dw, project), {}),
        "expand_rank": (RuntimeError, "expand_weight", (x, z(8, 4), dw, project), {}),
        "expand_of_two_taps": (RuntimeError, "expand_weight", (x, z(8, 4, 2), dw, project), {}),
        "depthwise_rank": (RuntimeError, "dw_weight", (x, expand, z(8, 1, 3, 1), project), {}),
        "depthwise_channels": (RuntimeError, "dw_weight", (x, expand, z(9, 1, 3), project), {}),
        "not_depthwise": (RuntimeError, "dw_weight", (x, expand, z(8, 8, 3), project), {}),
        "multiplier": (ValueError, "depth multiplier", (x, expand, z(16, 1, 3), project), {}),
        "no_taps": (RuntimeError, "dw_weight", (x, expand, z(8, 1, 0), project), {}),
        "project_channels": (RuntimeError, "project_weight", (x, expand, dw, z(4, 7, 1)), {}),
        "project_taps": (RuntimeError, "project_weight", (x, expand, dw, z(4, 8, 3)), {}),
        "other_rows": (RuntimeError, "project_weight must have 4 rows", (x, expand, dw, z(5, 8, 1)), {}),
        "one_row": (RuntimeError, "project_weight must have 4 rows", (x, expand, dw, z(1, 8, 1)), {}),
        "expand_bias": (RuntimeError, "expand_bias", (*four, z(4)), {}),
        "dw_bias": (RuntimeError, "dw_bias", (*four, None, z(8, 1)), {}),
        "project_bias": (RuntimeError, "project_bias", (*four, None, None, z(8)), {}),
        "mixed_dtypes": (RuntimeError, "float32.*float16", (x, expand, dw.half(), project), {}),
        "mixed_devices": (RuntimeError, "cpu.*meta", (x, expand, dw, z(4, 8, 1, device="meta")), {}),
        "integer": (TypeError, "int32", tuple(t.int() for t in four), {}),
        "complex": (TypeError, "complex64", tuple(t.to(torch.complex64) for t in four), {}),
        "sparse": (TypeError, "dense", (x.to_sparse(), expand, dw, project), {}),
        "no_tensor": (TypeError, "x must be a torch.Tensor, got list", ([1.0], expand, dw, project), {}),
        "weight_is_none": (TypeError, "project_weight must be a torch.Tensor, got NoneType", (x, expand, dw, None), {}),
        "bias_is_text": (TypeError, "dw_bias must be a torch.Tensor, got str", (*four, None, "zeros"), {}),
        "dilation_zero": (RuntimeError, "dilation must be at least 1", four, {"dilation": 0}),
        "dilation_pair": (ValueError, "dilation", four, {"dilation": (1, 1)}),
        "dilation_float": (ValueError, "dilation", four, {"dilation": 1.5}),
        "activation": (ValueError, "activation", four, {"activation": "GELU"}),
        "residual": (ValueError, "residual", four, {"residual": "yes"}),
        "residual_none": (ValueError, "residual", four, {"residual": None}),
        "activation_is_a_number": (ValueError, "activation=3", four, {"activation": 3}),
        "precision": (ValueError, "fp32_precision", four, {"fp32_precision": "high"}),
        "precision_none": (ValueError, "fp32_precision=None", four, {"fp32_precision": None}),
        "no_length": (RuntimeError, "length", (z(2, 4, 0), expand, dw, project), {}),
        "no_channels": (RuntimeError, "channel", (z(2, 0, 9), z(8, 0, 1), dw, z(0, 8, 1)), {}),
    }


ERRORS = {SEPARABLE: _separable_errors(), BLOCK: _block_errors()}


def odd(parameters: list[Tensor]) -> list[Tensor]:
    """The parameters as parts of one buffer, which begin one element behind an aligned address."""
    flat = torch.cat([parameters[0].new_zeros(1), *(t.flatten() for t in parameters)])
    parts = flat[1:].split([t.numel() for t in parameters])
    return [part.view(t.shape) for part, t in zip(parts, parameters, strict=True)]


def strided(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The tensors as every second element of others."""
    return tuple(t if t is None else torch.stack([t, t], -1)[..., 0] for t in tensors)
