"""The functional operator: values, layouts, strides, gradients, errors, autocast, torch.compile, transforms."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from separable import (
    ACTIVATIONS,
    NAMES,
    UNIT_ROUNDOFF,
    Case,
    assert_gradients_close,
    assert_output_close,
    double,
    expected_gradients,
    plain,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cutlass_sep import Unsupported, dispatch, torch_ops
from cutlass_sep.functional import depthwise_separable_conv2d as separable
from cutlass_sep.reference import _cudnn_precision

CASES = [
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
]
LAYOUTS = ("contiguous", "channels_last")


@pytest.fixture(autouse=True)
def _fresh_dispatch():
    dispatch.clear()
    yield
    dispatch.clear()


def is_channels_last(t: Tensor) -> bool:
    return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def leaves(tensors: tuple, wanted: tuple[bool, ...] = (True,) * 5) -> tuple:
    """Copies that require a gradient where wanted, with the strides of the originals."""
    return tuple(
        None if t is None else t.detach().clone(memory_format=torch.preserve_format).requires_grad_(want)
        for t, want in zip(tensors, wanted, strict=True)
    )


# ---- values and layouts ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_layout(device: str, case: Case, layout: str, dtype: torch.dtype):
    tensors = case.tensors(device, dtype, layout)
    y = separable(*tensors, **case.options)
    assert (y.dtype, y.device) == (dtype, tensors[0].device)
    assert_output_close(case, tensors, y)
    assert y.is_contiguous() or is_channels_last(tensors[0])
    assert y.is_contiguous(memory_format=torch.channels_last) or not is_channels_last(tensors[0])


@pytest.mark.parametrize("weights", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_y_follows_x_and_not_the_weights(device: str, layout: str, weights: str):
    tensors = list(Case().tensors(device, layout=layout))
    if weights == "channels_last":
        tensors[1:3] = (w.to(memory_format=torch.channels_last) for w in tensors[1:3])
    y = separable(*tensors, **Case().options)
    assert is_channels_last(y) == (layout == "channels_last")
    assert_output_close(Case(), tuple(tensors), y)


def permuted(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


VIEWS = {
    "nhwc_permuted_to_nchw": (permuted, "channels_last"),
    "width_before_height": (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), "contiguous"),
    "every_second_pixel": (lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, ::2, ::2], "contiguous"),
    "some_channels": (lambda x: torch.cat([x, x, x], 1)[:, 8:16], "contiguous"),
    "one_image_expanded": (lambda x: x[:1].expand(2, -1, -1, -1), "contiguous"),
    "odd_offset": (lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), "contiguous"),
    "interior_of_nan": (lambda x: F.pad(x, (2, 3, 1, 2), value=math.nan)[:, :, 1:-2, 2:-3], "contiguous"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_x_give_what_their_copies_give(device: str, view: str, dtype: torch.dtype):
    make, layout = VIEWS[view]
    case = Case(mid_activation="silu")
    x, *parameters = case.tensors(device, dtype)
    seen = make(x)
    copy = seen.clone(memory_format=torch.preserve_format if layout == "channels_last" else torch.contiguous_format)
    y = separable(seen, *parameters, **case.options)
    assert torch.equal(y, separable(copy, *parameters, **case.options))
    assert is_channels_last(y) == (layout == "channels_last")

    leaf = seen.detach().requires_grad_()
    other = copy.detach().requires_grad_()
    grad = torch.randn_like(y)
    separable(leaf, *parameters, **case.options).backward(grad)
    separable(other, *parameters, **case.options).backward(grad)
    torch.testing.assert_close(leaf.grad, other.grad, rtol=0, atol=0)


def test_parameters_from_one_odd_buffer(device: str):
    tensors = Case().tensors(device)
    flat = torch.cat([tensors[0].new_zeros(1), *(t.flatten() for t in tensors[1:])])
    parts = flat[1:].split([t.numel() for t in tensors[1:]])
    views = [part.view(t.shape) for part, t in zip(parts, tensors[1:], strict=True)]
    strided = [torch.stack([t, t], -1)[..., 0] for t in tensors[1:]]
    for parameters in (views, strided):
        assert_output_close(Case(), tensors, separable(tensors[0], *parameters, **Case().options))


def test_unbatched(device: str):
    case = Case(c=4, o=6, h=6, w=6)
    tensors = case.tensors(device)
    x, parameters = tensors[0][0], tensors[1:]
    y = separable(x, *parameters, **case.options)
    assert y.shape == (6, 6, 6)
    assert torch.equal(y, separable(x[None], *parameters, **case.options)[0])
    last = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    y = separable(last, *parameters, **case.options)
    assert y.permute(1, 2, 0).is_contiguous()
    leaf = x.clone().requires_grad_()
    separable(leaf, *parameters, **case.options).sum().backward()
    assert leaf.grad.shape == x.shape


@pytest.mark.parametrize("kernel", [(2, 2), (4, 4), (1, 4), (2, 3)])
def test_same_puts_the_odd_pixel_right_and_below(device: str, kernel: tuple[int, int]):
    x = torch.zeros(1, 1, 5, 5, device=device)
    x[0, 0, 2, 2] = 1
    weight = torch.arange(1.0, 1 + math.prod(kernel), device=device).view(1, 1, *kernel)
    y = separable(x, weight, torch.ones(1, 1, 1, 1, device=device), padding="same")
    total = [k - 1 for k in kernel]
    pads = (total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2)
    assert torch.equal(y, F.conv2d(F.pad(x, pads), weight))


# ---- NaN, Inf and exact values ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_and_inf_stay_in_their_receptive_field(device: str, layout: str):
    def call(value: float, weight: Tensor) -> Tensor:
        x = torch.ones(1, 1, 8, 8, device=device)
        x[0, 0, 3, 3] = value
        x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
        return separable(x, weight, torch.ones(5, 1, 1, 1, device=device), padding=1)

    weight = torch.ones(1, 1, 3, 3, device=device)
    y = call(math.nan, weight)
    assert int(y.isnan().sum()) == 45
    assert y[:, :, 2:5, 2:5].isnan().all()
    weight[0, 0, 1, 1] = 0
    y = call(math.inf, weight)
    assert int(y.isnan().sum()) == 5
    assert int(y.isinf().sum()) == 40
    assert y[:, :, 3, 3].isnan().all()


def test_x_inside_nan_is_not_poisoned(device: str):
    buffer = torch.full((2, 5, 11, 11), math.nan, device=device)
    x = buffer[:, 1:4, 2:9, 2:9]
    x.copy_(torch.randn(x.shape))
    case = Case(c=3, o=5, h=7, w=7)
    tensors = (x, *case.tensors(device)[1:])
    assert_output_close(case, tensors, separable(*tensors, **case.options))


@pytest.fixture
def tf32_flags():
    """Puts torch's TF32 flags back."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul


@pytest.mark.parametrize("flag", [False, True])
def test_fp32_keeps_twelve_bits_whatever_torch_says(device: str, flag: bool, tf32_flags):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = flag
    x = torch.full((1, 1, 4, 4), 2077.0, device=device, requires_grad=True)
    one = torch.ones(1, 1, 1, 1, device=device)
    y = separable(x, one, one)
    assert torch.equal(y, torch.full_like(y, 2077.0))
    y.backward(torch.full_like(y, 2077.0))
    assert torch.equal(x.grad, torch.full_like(x, 2077.0))


def test_backward_states_its_precision_and_puts_the_flags_back():
    def now() -> str:
        if hasattr(torch.backends.cudnn, "conv"):
            return torch.backends.cudnn.conv.fp32_precision
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"

    before = now()
    for tf32 in (True, False):
        with _cudnn_precision(tf32):
            assert now() == ("tf32" if tf32 else "ieee")
        assert now() == before


@pytest.mark.parametrize("where", ["mid_activation", "activation"])
def test_gelu_is_erf_and_gelu_tanh_is_tanh(device: str, where: str):
    z = torch.cat([torch.linspace(-6, 6, 2001), torch.tensor([1e4, -1e4, -0.0, math.nan])]).to(device).view(1, 1, 1, -1)
    one = torch.ones(1, 1, 1, 1, device=device)
    for name, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        want = F.gelu(z.double(), approximate=approximate)
        error = (separable(z, one, one, **{where: name}).double() - want).abs()
        assert error.isnan().sum() == 1  # where z is NaN
        assert error.nan_to_num().max().item() < 2e-6


# ---- gradients ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(device: str, case: Case, layout: str):
    tensors = leaves(case.tensors(device, layout=layout))
    y = separable(*tensors, **case.options)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device)
    y.backward(grad)
    assert_gradients_close(case, tensors, grad, tuple(t if t is None else t.grad for t in tensors))
    assert tensors[0].grad.stride() == tensors[0].stride()


@pytest.mark.parametrize("how", ["sum", "mean", "transposed", "expanded"])
def test_gradients_of_any_stride(device: str, how: str):
    case = Case(h=16, w=16)
    tensors = leaves(case.tensors(device))
    y = separable(*tensors, **case.options)
    grad = {
        "sum": torch.ones(1, 1, 1, 1).expand(y.shape),
        "mean": torch.full((1, 1, 1, 1), 1 / y.numel()).expand(y.shape),
        "transposed": torch.randn(y.shape).transpose(2, 3),
        "expanded": torch.randn(1, 16, 1, 16).expand(y.shape),
    }[how].to(device)
    if how in ("sum", "mean"):
        getattr(y, how)().backward()
    else:
        y.backward(grad)
    assert_gradients_close(case, tensors, grad, tuple(t.grad for t in tensors))


@pytest.mark.parametrize("mid_activation, activation", [(None, None), ("gelu", None), (None, "silu")])
def test_exactly_the_gradients_asked_for(device: str, mid_activation: str | None, activation: str | None):
    case = Case(h=6, w=6, mid_activation=mid_activation, activation=activation)
    expected = expected_gradients(case, case.tensors(device), torch.ones(2, 16, 6, 6))
    for wanted in itertools.product((False, True), repeat=5):
        tensors = leaves(case.tensors(device), wanted)
        y = separable(*tensors, **case.options)
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.sum().backward()
            assert tuple(t.grad is not None for t in tensors) == wanted
            for t, (want, bound) in zip(tensors, expected, strict=True):
                assert t.grad is None or ((t.grad.cpu() - want).abs() <= 2.0**-24 * bound).all()


def test_gradients_take_the_strides_of_their_tensors(device: str):
    case = Case(kernel=(3, 3), c=8)
    x, dw_weight, pw_weight, *biases = case.tensors(device)
    wide = torch.cat([x, x], 1)[:, :8]
    tensors = leaves(
        (
            x.contiguous(memory_format=torch.channels_last),
            dw_weight.transpose(2, 3).contiguous().transpose(2, 3),
            pw_weight.to(memory_format=torch.channels_last),
            *biases,
        )
    )
    y = separable(*tensors, **case.options)
    gradients = torch.autograd.grad(y, tensors, torch.ones_like(y))
    assert [g.stride() for g in gradients] == [t.stride() for t in tensors]
    wide = wide.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(separable(wide, *tensors[1:], **case.options).sum(), wide)
    assert gradient.is_contiguous()


def test_no_grad_inference_mode_and_checkpoint(device: str):
    case = Case()
    tensors = leaves(case.tensors(device))
    with torch.no_grad():
        assert not separable(*tensors, **case.options).requires_grad
    with torch.inference_mode():
        y = separable(*tensors, **case.options)
        assert y.is_inference()
        assert_output_close(case, tensors, y)
    y = checkpoint(lambda *t: separable(*t, **case.options), *tensors, use_reentrant=False)
    y.sum().backward()
    assert_gradients_close(case, tensors, torch.ones_like(y), tuple(t.grad for t in tensors))


def test_in_place_edit_after_forward_raises(device: str):
    for index in (0, 1, 2):
        tensors = leaves(Case(mid_activation="relu").tensors(device))
        y = separable(*tensors, **Case(mid_activation="relu").options)
        with torch.no_grad():
            tensors[index].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_second_derivative_raises(device: str):
    tensors = leaves(Case().tensors(device))
    y = separable(*tensors, **Case().options)
    (gradient,) = torch.autograd.grad(y.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("of", ["hvp", "jvp", "gradient_penalty"])
def test_second_derivative_is_not_taken_for_zero(device: str, of: str):
    """The incoming gradient is a constant here: only the saved tensors carry the dependence."""
    x, dw_weight, *rest = leaves(Case().tensors(device))

    def f(x: Tensor) -> Tensor:
        return separable(x, dw_weight, *rest, **Case().options | {"activation": "silu"})

    with pytest.raises(NotImplementedError, match="no second derivative"):
        if of == "hvp":
            torch.autograd.functional.hvp(lambda x: f(x).sum(), x.detach(), x.detach())
        elif of == "jvp":
            torch.autograd.functional.jvp(f, x.detach(), x.detach())
        else:
            (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
            gradient.square().sum().backward()


def test_create_graph_gives_the_same_gradients(device: str):
    tensors = leaves(Case().tensors(device))
    y = separable(*tensors, **Case().options).sum()
    plain = torch.autograd.grad(y, tensors, retain_graph=True)
    recorded = torch.autograd.grad(y, tensors, create_graph=True)
    assert all(g.requires_grad for g in recorded) and not any(g.requires_grad for g in plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


# ---- empty batches and errors ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_batch(device: str, layout: str):
    tensors = leaves(Case(n=0, c=32, o=8, h=5, w=5, kernel=(2, 2)).tensors(device, layout=layout))
    y = separable(*tensors, padding=1)
    assert y.shape == (0, 8, 6, 6)
    y.sum().backward()
    assert tensors[0].grad.shape == (0, 32, 5, 5)
    for parameter in tensors[1:]:
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def error_cases() -> list:
    z = torch.zeros
    x, dw, pw = z(1, 4, 8, 8), z(4, 1, 3, 3), z(6, 4, 1, 1)
    half = torch.float16
    return [
        ("kernel_exceeds", RuntimeError, "exceeds", (z(1, 4, 3, 3), z(4, 1, 5, 5), pw), {}),
        ("dilated_kernel_exceeds", RuntimeError, r"9 pixels.*\(8 \+ 0\)", (x, dw, pw), {"dilation": 4}),
        ("channels", RuntimeError, "dw_weight", (z(1, 5, 8, 8), dw, pw), {}),
        ("pointwise_channels", RuntimeError, "pw_weight", (x, dw, z(6, 5, 1, 1)), {}),
        ("pointwise_kernel", RuntimeError, "pw_weight", (x, dw, z(6, 4, 3, 3)), {}),
        ("depth_multiplier", ValueError, "depth multiplier", (x, z(8, 1, 3, 3), pw), {}),
        ("grouped_weight", RuntimeError, "dw_weight", (x, z(4, 2, 3, 3), pw), {}),
        ("rank_of_x", RuntimeError, "x must be", (z(1, 1, 4, 8, 8), dw, pw), {}),
        ("rank_of_weight", RuntimeError, "dw_weight", (x, z(4, 3, 3), pw), {}),
        ("bias", RuntimeError, "dw_bias", (x, dw, pw, z(5)), {}),
        ("pointwise_bias", RuntimeError, "pw_bias", (x, dw, pw, None, z(4)), {}),
        ("mixed_dtypes", RuntimeError, "float16.*float32", (x.to(half), dw, pw), {}),
        ("mixed_devices", RuntimeError, "cpu.*meta", (x, dw.to("meta"), pw), {}),
        ("integer", TypeError, "int32", (x.int(), dw.int(), pw.int()), {}),
        ("complex", TypeError, "complex64", tuple(t.to(torch.complex64) for t in (x, dw, pw)), {}),
        ("sparse", TypeError, "sparse", (x.to_sparse(), dw, pw), {}),
        ("sparse_weight", TypeError, "sparse", (x, dw.to_sparse(), pw), {}),
        ("quantised", TypeError, "q", (torch.quantize_per_tensor(x, 1.0, 0, torch.quint8), dw, pw), {}),
        ("no_tensor", TypeError, "dw_weight", (x, [1.0], pw), {}),
        ("x_is_none", TypeError, "x must be a torch.Tensor, got NoneType", (None, dw, pw), {}),
        ("weight_is_none", TypeError, "dw_weight must be a torch.Tensor, got NoneType", (x, None, pw), {}),
        ("pointwise_is_none", TypeError, "pw_weight must be a torch.Tensor, got NoneType", (x, dw, None), {}),
        ("bias_is_false", TypeError, "dw_bias must be a torch.Tensor, got bool", (x, dw, pw, False), {}),
        ("bias_is_text", TypeError, "pw_bias must be a torch.Tensor, got str", (x, dw, pw, None, "zeros"), {}),
        ("stride_zero", RuntimeError, "stride", (x, dw, pw), {"stride": 0}),
        ("dilation_zero", RuntimeError, "dilation", (x, dw, pw), {"dilation": (1, 0)}),
        ("negative_padding", RuntimeError, "padding", (x, dw, pw), {"padding": -1}),
        ("four_paddings", ValueError, "padding", (x, dw, pw), {"padding": (1, 1, 1, 1)}),
        ("float_stride", ValueError, "stride", (x, dw, pw), {"stride": 1.5}),
        ("same_upper_case", ValueError, "SAME", (x, dw, pw), {"padding": "SAME"}),
        ("same_strided", RuntimeError, "same", (x, dw, pw), {"padding": "same", "stride": 2}),
        ("mid_activation", ValueError, "mid_activation", (x, dw, pw), {"mid_activation": "relu8"}),
        ("activation", ValueError, "activation", (x, dw, pw), {"activation": "GELU"}),
        ("precision", ValueError, "fp32_precision", (x, dw, pw), {"fp32_precision": "high"}),
        ("empty_height", RuntimeError, "height", (z(2, 4, 0, 5), z(4, 1, 2, 2), pw), {"padding": 1}),
        ("no_channels", RuntimeError, "channel", (z(2, 0, 5, 5), z(0, 1, 3, 3), z(6, 0, 1, 1)), {}),
    ]


ERRORS = {name: rest for name, *rest in error_cases()}


@pytest.mark.parametrize("grad", [False, True], ids=["direct", "dispatched"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str, grad: bool):
    error, match, tensors, options = ERRORS[name]
    if grad:  # any tensor that can, so that the call goes through autograd
        tensors = tuple(
            t.clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() and not t.is_quantized else t
            for t in tensors
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(error, match=match):
            separable(*tensors, **options)
    assert not dispatch._launchers


def test_what_only_looks_wrong_works(device: str):
    x, dw_weight, pw_weight = (torch.ones(1, 1, k, k, device=device) for k in (9, 3, 1))
    assert separable(x, dw_weight, pw_weight, dilation=4).shape == (1, 1, 1, 1)
    assert separable(x[:, :, :3, :3], dw_weight, pw_weight, padding=5).shape == (1, 1, 11, 11)
    assert separable(x, dw_weight, pw_weight, stride=[2, 1], padding=[1, 0]).shape == (1, 1, 5, 7)


# ---- autocast ----


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast(device: str, given: torch.dtype, low: torch.dtype):
    case = Case(mid_activation="relu")
    x, *parameters = leaves(case.tensors(device))
    x = x.detach().to(given).requires_grad_()
    with torch.autocast(device, dtype=low):
        y = separable(x, *parameters, **case.options)
    assert y.dtype == low
    y.float().sum().backward()
    assert [t.grad.dtype for t in (x, *parameters)] == [given] + [torch.float32] * 4
    cast = tuple(t.detach().to(low) for t in (x, *parameters))
    assert torch.equal(y, separable(*cast, **case.options))


def test_autocast_leaves_float64_and_backward_keeps_the_forward_dtype(device: str):
    case = Case()
    tensors = leaves(case.tensors(device, torch.float64))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert separable(*tensors, **case.options).dtype == torch.float64
    tensors = leaves(case.tensors(device))
    y = separable(*tensors, **case.options)
    with torch.autocast(device, dtype=torch.bfloat16):  # not where a backward pass belongs, but common
        y.backward(torch.ones_like(y))
    assert_gradients_close(case, tensors, torch.ones_like(y), tuple(t.grad for t in tensors))


def test_mixed_dtypes_raise_without_autocast(device: str):
    x, *parameters = Case().tensors(device)
    with pytest.raises(RuntimeError, match="float16.*float32"):
        separable(x.half(), *parameters, **Case().options)


# ---- torch.library, torch.compile, transforms ----

OP_INPUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": permuted,
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("view", OP_INPUTS)
def test_opcheck(device: str, view: str, grad: bool):
    x, *parameters = Case(kernel=(3, 2)).tensors(device)
    tensors = [t.detach().requires_grad_(grad) for t in (OP_INPUTS[view](x), *parameters)]
    options = ((1, 1), (1, 1, 0, 1), (1, 1), "relu6", "silu", "ieee")
    torch.library.opcheck(torch_ops.separable2d.forward, (*tensors, *options))
    y = torch_ops.separable2d.forward(*tensors, *options).detach()
    for needed in ((True,) * 5, (True, False, False, False, False), (False, True, True, False, True)):
        plain_tensors = [t.detach() for t in tensors]
        torch.library.opcheck(torch_ops.separable2d.backward, (torch.randn_like(y), *plain_tensors, *options, needed))


def test_compile_fullgraph(device: str):
    case = Case(kernel=(3, 4), padding="same", mid_activation="gelu", activation="hardswish")
    for layout in LAYOUTS:
        tensors = leaves(case.tensors(device, layout=layout))
        others = leaves(tensors)
        compiled = torch.compile(lambda *t: separable(*t, **case.options) * 2, fullgraph=True, backend="aot_eager")
        y, want = compiled(*tensors), separable(*others, **case.options) * 2
        torch.testing.assert_close(y, want, rtol=0, atol=0)
        assert y.stride() == want.stride()
        for loss in (y, want):
            loss.square().sum().backward()
        for got, expected in zip(tensors, others, strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compile_takes_other_batches_without_recompiling(device: str, layout: str):
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *t: separable(*t, **Case().options), fullgraph=True, backend=count)
    for n in (2, 3, 5, 8):
        tensors = Case(n=n).tensors(device, layout=layout)
        assert torch.equal(compiled(*tensors), separable(*tensors, **Case().options))
    assert count.frame_count <= 2


def test_compile_under_autocast(device: str):
    case = Case()
    tensors = leaves(case.tensors(device))

    def under_autocast(*t):
        with torch.autocast(device, dtype=torch.bfloat16):
            return separable(*t, **case.options)

    y = torch.compile(under_autocast, fullgraph=True, backend="aot_eager")(*tensors)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, under_autocast(*tensors))


def test_fake_and_meta_tensors_agree_with_the_real_call(device: str):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for view, dtype in itertools.product(OP_INPUTS.values(), (torch.float32, torch.float16)):
        x, *parameters = Case(kernel=(4, 3), stride=(1, 2)).tensors(device, dtype)
        tensors = (view(x), *parameters)
        y = separable(*tensors, stride=(1, 2), padding=1)
        meta = separable(*(t.to("meta") for t in tensors), stride=(1, 2), padding=1)
        assert meta.is_meta
        assert (meta.shape, meta.dtype) == (y.shape, y.dtype)
        with FakeTensorMode() as mode:
            fake = separable(*(mode.from_tensor(t) for t in tensors), stride=(1, 2), padding=1)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (y.shape, y.stride(), y.dtype, y.device)


def test_transforms_and_subclasses_see_the_call(device: str):
    case = Case()
    tensors = case.tensors(device)
    want = plain(case, double(tensors))

    grad = torch.func.grad(lambda x: separable(x, *tensors[1:], **case.options).sum())(tensors[0])
    leaf = tensors[0].clone().requires_grad_()
    separable(leaf, *tensors[1:], **case.options).sum().backward()
    torch.testing.assert_close(grad, leaf.grad, rtol=0, atol=0)

    def gradient_sum(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: separable(x, *tensors[1:], **case.options).square().sum())(x).sum()

    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(gradient_sum)(tensors[0])

    stacked = torch.stack([tensors[0], 2 * tensors[0]])
    per_image = torch.vmap(torch.func.grad(lambda x: separable(x, *tensors[1:], **case.options).sum()))(stacked)
    torch.testing.assert_close(per_image[0], grad, rtol=0, atol=0)
    batched = torch.vmap(lambda x: separable(x, *tensors[1:], **case.options))(stacked)
    assert torch.equal(batched[0], separable(*tensors, **case.options))

    class Logged(Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += func is separable
            return super().__torch_function__(func, types, args, kwargs or {})

    y = separable(tensors[0].as_subclass(Logged), *tensors[1:], **case.options)
    assert Logged.calls == 1
    assert isinstance(y, Logged)

    with torch.device(device):  # a function mode
        y = separable(*tensors, **case.options)
    assert (y.double().cpu() - want).abs().max() < 1e-4
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
            separable(dual, *tensors[1:], **case.options)


def test_vmap_over_a_dimension_of_size_0(device: str):
    case = Case(stride=2)
    tensors = case.tensors(device)
    y = separable(*tensors, **case.options)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return separable(x, weight, *tensors[2:], **case.options)

    none_at_1 = tensors[0].new_empty((tensors[0].shape[0], 0, *tensors[0].shape[1:]))
    none = torch.vmap(forward, (1, None))(none_at_1, tensors[1])
    assert (none.shape, none.dtype, none.device) == ((0, *y.shape), y.dtype, y.device)
    gradients = torch.func.grad(lambda x, weight: forward(x, weight).sum(), (0, 1))
    none_x, none_weight = torch.vmap(gradients, (1, None))(none_at_1, tensors[1])
    assert none_x.shape == (0, *tensors[0].shape) and none_weight.shape == (0, *tensors[1].shape)
    # What no element of a mapped dimension could be is refused as for one element.
    with pytest.raises(RuntimeError, match="dw_weight"):
        torch.vmap(forward, (1, None))(none_at_1, tensors[1][1:])


def test_negated_views_are_resolved():
    x, *parameters = Case(n=1, c=1, o=1, h=1, w=1, kernel=(1, 1), padding=0).tensors(dtype=torch.float64)
    imaginary = torch.complex(x, x).conj().imag
    assert imaginary.is_neg()
    assert imaginary.is_contiguous()
    assert torch.equal(separable(imaginary, *parameters), separable(-x, *parameters))


# ---- the way to a kernel, with one that stands in for it ----


class StandIn:
    """Kernel that checks the contract of Kernel.launch and computes through ATen."""

    def __init__(self, problem):
        self.problem, self.launches = problem, 0

    def launch(self, x, dw_weight, pw_weight, dw_bias, pw_bias, y) -> None:
        p = self.problem
        self.launches += 1
        formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
        assert x.shape == (p.n, p.c, p.h, p.w)
        assert y.shape == (p.n, p.o, p.p, p.q)
        assert x.is_contiguous(memory_format=formats[p.layout])
        assert y.is_contiguous(memory_format=formats[p.layout])
        for t in (dw_weight, pw_weight, dw_bias, pw_bias):
            assert t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)
        assert x.data_ptr() % p.alignment == 0
        m = F.conv2d(x, dw_weight, dw_bias, p.stride, p.padding[::2], p.dilation, groups=p.c)
        y.copy_(F.conv2d(m, pw_weight, pw_bias))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Plans every problem on path sm90 and hands out stand-ins, also for CPU tensors; yields those made so far."""
    from cutlass_sep import kernel, planner

    made: list[StandIn] = []

    def kernel_for(problem, device, plan):
        made.append(StandIn(problem))
        return made[-1]

    monkeypatch.setattr(dispatch, "choose", lambda problem, device: planner.Plan("sm90", None, "stand-in"))
    monkeypatch.setattr(kernel, "kernel_for", kernel_for)
    return made


def test_equal_calls_share_one_kernel_and_different_ones_do_not(stand_ins: list[StandIn]):
    case = Case()
    tensors = case.tensors()
    for seed in range(3):
        again = case.tensors(seed=seed)
        assert_output_close(case, again, separable(*again, **case.options))
    assert [k.launches for k in stand_ins] == [3]
    separable(*tensors, **case.options | {"stride": 2})
    separable(*case.tensors(layout="channels_last"), **case.options)
    separable(*tensors[:3], None, tensors[4], **case.options)
    separable(*tensors, **case.options, fp32_precision="tf32")
    separable(*Case(n=3).tensors(), **case.options)
    assert [k.launches for k in stand_ins] == [3, 1, 1, 1, 1, 1]
    assert stand_ins[4].problem.fp32_precision == "tf32"
    assert (stand_ins[2].problem.layout, stand_ins[3].problem.dw_bias) == ("channels_last", False)


def test_kernels_get_dense_aligned_tensors(stand_ins: list[StandIn]):
    case = Case()
    tensors = case.tensors()
    for view in VIEWS.values():
        changed = (view[0](tensors[0]), *tensors[1:])
        assert_output_close(case, changed, separable(*changed, **case.options))
    alignments = {k.problem.alignment for k in stand_ins}
    assert alignments == {4, 16}
    flat = torch.cat([tensors[0].new_zeros(1), *(t.flatten() for t in tensors[1:])])
    parts = flat[1:].split([t.numel() for t in tensors[1:]])
    parameters = [part.view(t.shape) for part, t in zip(parts, tensors[1:], strict=True)]
    assert_output_close(case, tensors, separable(tensors[0], *parameters, **case.options))


def test_training_uses_the_kernel_too(stand_ins: list[StandIn]):
    case = Case()
    tensors = leaves(case.tensors())
    y = separable(*tensors, **case.options)
    y.backward(torch.ones_like(y))
    assert [k.launches for k in stand_ins] == [1]
    assert_gradients_close(case, tensors, torch.ones_like(y), tuple(t.grad for t in tensors))


def test_an_empty_batch_needs_no_kernel(stand_ins: list[StandIn]):
    assert separable(*Case(n=0).tensors(), **Case().options).shape == (0, 16, 10, 12)
    assert stand_ins == []


@pytest.fixture
def unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem, device):
        raise Unsupported(f"no kernel for {problem.c} channels")

    monkeypatch.setattr(dispatch, "choose", refuse)


def test_fallback_warns_once_a_reason(unsupported: None):
    case, other = Case(), Case(c=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_output_close(case, case.tensors(), separable(*case.tensors(), **case.options))
        separable(*Case(n=3).tensors(), **case.options)
        separable(*other.tensors(), **other.options)
    assert [str(w.message).split(": ")[1] for w in caught] == ["no kernel for 8 channels", "no kernel for 4 channels"]
    assert {w.filename for w in caught} == {__file__}


def test_no_fallback_where_it_is_forbidden(unsupported: None, monkeypatch: pytest.MonkeyPatch):
    tensors = Case().tensors()
    with pytest.warns(RuntimeWarning):
        separable(*tensors, **Case().options)
    monkeypatch.setenv("CUTLASS_SEP_FALLBACK", "0")
    for case in (Case(), Case(n=5)):  # known and new
        with pytest.raises(Unsupported, match="no kernel for 8 channels"):
            separable(*case.tensors(), **case.options)


def test_errors_of_a_launch_are_not_hidden(stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch):
    def cold(self, *tensors):
        raise RuntimeError("cannot be built while a CUDA graph is captured")

    monkeypatch.setattr(StandIn, "launch", cold)
    with pytest.raises(RuntimeError, match="graph"):
        separable(*Case().tensors(), **Case().options)
    assert not dispatch._launchers


def test_the_table_is_bounded(stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "_MAX_LAUNCHERS", 4)
    for w in range(5, 16):
        separable(*Case(w=w).tensors(), **Case().options)
        assert len(dispatch._launchers) <= 4


def test_roundoff_table_is_right():
    for dtype, unit in UNIT_ROUNDOFF.items():
        assert torch.finfo(dtype).eps == 2 * unit
    assert NAMES[0] == "x"
