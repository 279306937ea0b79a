"""The block as a function: values at every position, layouts, gradients, errors, autocast, torch.compile, kernels."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from block import (
    NAMES,
    Block,
    assert_gradients_close,
    assert_output_close,
    channels_last,
    expected_gradients,
    is_channels_last,
    plain,
)
from separable import ACTIVATIONS, double
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cutlass_sep import Unsupported, dispatch, reference, torch_ops
from cutlass_sep.functional import separable_conv_block1d as run_block
from cutlass_sep.operators import BLOCK1D

CASES = [
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
]
LAYOUTS = ("contiguous", "channels_last")


@pytest.fixture(autouse=True)
def _fresh_dispatch():
    dispatch.clear()
    yield
    dispatch.clear()


def leaves(tensors: tuple, wanted: tuple[bool, ...] = (True,) * 7) -> tuple:
    """Copies that require a gradient where wanted, with the strides of the originals."""
    return tuple(
        None if t is None else t.detach().clone(memory_format=torch.preserve_format).requires_grad_(want)
        for t, want in zip(tensors, wanted, strict=True)
    )


# ---- values and layouts ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_layout(device: str, case: Block, layout: str, dtype: torch.dtype):
    tensors = case.tensors(device, dtype, layout)
    y = run_block(*tensors, **case.options)
    assert (y.shape, y.dtype, y.device) == ((case.n, case.rows, case.l), dtype, tensors[0].device)
    assert_output_close(case, tensors, y)
    assert y.is_contiguous() or is_channels_last(tensors[0])
    assert y.transpose(1, 2).is_contiguous() or not is_channels_last(tensors[0])


@pytest.mark.parametrize("kernel", [2, 3, 4, 7])
def test_the_bias_of_outside_stays_outside(device: str, kernel: int):
    """x = 0, so the expanded channels are their bias inside the sequence; outside they are 0, not the bias."""
    case = Block(n=1, c=4, e=8, l=8, kernel=kernel, activation=None, residual=False, dw_bias=False, project_bias=False)
    x, expand_weight, _, project_weight, expand_bias, *_ = case.tensors(device)
    dw_weight = torch.ones(8, 1, kernel, device=device)
    expand_bias = torch.ones_like(expand_bias)
    y = run_block(
        torch.zeros_like(x), expand_weight, dw_weight, project_weight, expand_bias, **case.options
    )  # fmt: skip
    left = (kernel - 1) // 2
    inside = torch.tensor([sum(0 <= p + r - left < 8 for r in range(kernel)) for p in range(8)], device=device)
    torch.testing.assert_close(y, project_weight.sum(1)[None] * inside, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel, dilation", [(2, 1), (4, 1), (4, 3), (3, 2), (5, 1)])
def test_length_is_kept_and_the_odd_position_lies_on_the_right(device: str, kernel: int, dilation: int):
    x = torch.zeros(1, 1, 15, device=device)
    x[0, 0, 7] = 1
    one = torch.ones(1, 1, 1, device=device)
    weight = torch.arange(1.0, 1 + kernel, device=device).view(1, 1, kernel)
    y = run_block(x, one, weight, one, dilation=dilation, activation=None, residual=False)
    left = dilation * (kernel - 1) // 2
    want = torch.zeros_like(x)
    for tap in range(kernel):
        want[0, 0, 7 + left - tap * dilation] = tap + 1
    assert torch.equal(y, want)
    assert torch.equal(y, F.conv1d(x, weight, padding="same", dilation=dilation))


@pytest.mark.parametrize("length", [1, 5, 13, 257])
@pytest.mark.parametrize("c", [1, 3, 7, 66])
def test_transposed_sequences(device: str, c: int, length: int):
    """x as attention layers have it, [N,L,C]: values, gradients, and y in the same memory."""
    case = Block(c=c, e=10, l=length)
    for dtype in (torch.float16, torch.float32):
        x, *parameters = case.tensors(device, dtype)
        memory = x.transpose(1, 2).contiguous().requires_grad_()
        y = run_block(memory.transpose(1, 2), *parameters, **case.options)
        assert y.transpose(1, 2).is_contiguous()
        assert_output_close(case, (x, *parameters), y)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        y.backward(grad)
        if dtype == torch.float32:
            assert_gradients_close(
                case, (x, *parameters), grad, (memory.grad.transpose(1, 2), *(None for _ in parameters))
            )


VIEWS = {
    "transposed": (channels_last, "channels_last"),
    "batch_inside": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
    "every_second_position": (lambda x: x.repeat_interleave(2, 2)[:, :, ::2], "contiguous"),
    "some_channels": (lambda x: torch.cat([x, x, x], 1)[:, 6:12], "contiguous"),
    "some_channels_transposed": (lambda x: channels_last(torch.cat([x, x], 1))[:, :6], "contiguous"),
    "one_sequence_expanded": (lambda x: x[:1].expand(2, -1, -1), "contiguous"),
    "odd_offset": (lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), "contiguous"),
    "interior_of_nan": (lambda x: F.pad(x, (2, 3), value=math.nan)[:, :, 2:-3], "contiguous"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_x_give_what_their_copies_give(device: str, view: str, dtype: torch.dtype):
    make, layout = VIEWS[view]
    case = Block()
    x, *parameters = case.tensors(device, dtype)
    seen = make(x)
    copy = seen.clone(memory_format=torch.preserve_format if layout == "channels_last" else torch.contiguous_format)
    y = run_block(seen, *parameters, **case.options)
    assert torch.equal(y, run_block(copy, *parameters, **case.options))
    assert is_channels_last(y) == (layout == "channels_last")

    if dtype == torch.float32:
        leaf, grad = seen.detach().requires_grad_(), torch.randn_like(y)
        run_block(leaf, *parameters, **case.options).backward(grad)
        assert_gradients_close(case, (seen, *parameters), grad, (leaf.grad, *(None for _ in parameters)))


@pytest.mark.parametrize("residual", [True, False])
def test_unbatched(device: str, residual: bool):
    case = Block(c=4, l=9, residual=residual)
    tensors = case.tensors(device)
    x, parameters = tensors[0][0], tensors[1:]
    y = run_block(x, *parameters, **case.options)
    assert y.shape == (4, 9)
    assert torch.equal(y, run_block(x[None], *parameters, **case.options)[0])
    assert is_channels_last(run_block(channels_last(x), *parameters, **case.options))
    leaf = x.clone().requires_grad_()
    y = run_block(leaf, *parameters, **case.options)
    y.backward(torch.ones_like(y))
    assert_gradients_close(
        case, (x, *parameters), torch.ones_like(y), (leaf.grad, *(None for _ in parameters))
    )  # fmt: skip


def test_y_is_memory_of_its_own(device: str):
    """Neither a view, which autograd would refuse to edit in place, nor x."""
    for case, grad in itertools.product((Block(), Block(residual=False)), (False, True)):
        tensors = case.tensors(device)
        before = tensors[0].clone()
        y = run_block(*leaves(tensors) if grad else tensors, **case.options)
        assert not y._is_view()
        y.mul_(2)
        assert torch.equal(tensors[0], before)
        assert_output_close(case, tensors, y / 2)


def test_parameters_from_one_odd_buffer(device: str):
    case = Block()
    tensors = case.tensors(device)
    flat = torch.cat([tensors[0].new_zeros(1), *(t.flatten() for t in tensors[1:])])
    parts = flat[1:].split([t.numel() for t in tensors[1:]])
    views = [part.view(t.shape) for part, t in zip(parts, tensors[1:], strict=True)]
    strided = [torch.stack([t, t], -1)[..., 0] for t in tensors[1:]]
    for parameters in (views, strided):
        assert_output_close(case, tensors, run_block(tensors[0], *parameters, **case.options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_batch(device: str, layout: str):
    case = Block(n=0)
    tensors = leaves(case.tensors(device, layout=layout))
    y = run_block(*tensors, **case.options)
    assert y.shape == (0, 6, 16)
    y.sum().backward()
    for t in tensors:
        assert torch.equal(t.grad, torch.zeros_like(t))
    assert run_block(*Block(n=0, o=4, residual=False).tensors(device), residual=False).shape == (0, 4, 16)


# ---- exact values, NaN, Inf ----


@pytest.fixture
def tf32_flags():
    """Puts torch's TF32 flags back."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul


@pytest.mark.parametrize("flag", [False, True])
def test_fp32_keeps_twelve_bits_whatever_torch_says(device: str, flag: bool, tf32_flags):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = flag
    x = torch.full((1, 1, 4), 2077.0, device=device, requires_grad=True)
    one = torch.ones(1, 1, 1, device=device)
    y = run_block(x, one, one, one, activation=None, residual=False)
    assert torch.equal(y, torch.full_like(y, 2077.0))
    y.backward(torch.full_like(y, 2077.0))
    assert torch.equal(x.grad, torch.full_like(x, 2077.0))


def test_gelu_is_erf_and_gelu_tanh_is_tanh(device: str):
    z = torch.cat([torch.linspace(-6, 6, 2001), torch.tensor([1e4, -1e4, -0.0, math.nan])]).to(device).view(1, 1, -1)
    one = torch.ones(1, 1, 1, device=device)
    for name, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        want = F.gelu(z.double(), approximate=approximate)
        error = (run_block(z, one, one, one, activation=name, residual=False).double() - want).abs()
        assert error.isnan().sum() == 1  # where z is NaN
        assert error.nan_to_num().max().item() < 2e-6
    assert torch.equal(
        run_block(z, one, one, one, residual=False).nan_to_num(),
        run_block(z, one, one, one, activation="gelu", residual=False).nan_to_num(),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_stay_in_their_receptive_field(device: str, layout: str, value: float):
    x = torch.ones(1, 3, 12, device=device)
    x[0, 1, 5] = value
    x = channels_last(x) if layout == "channels_last" else x
    ones = (torch.ones(4, 3, 1), torch.ones(4, 1, 3), torch.ones(3, 4, 1))
    y = run_block(x, *(w.to(device) for w in ones), activation="relu")
    reached = torch.zeros(12, dtype=torch.bool)
    reached[4:7] = True
    assert torch.equal(y.isfinite().cpu(), ~reached.expand(1, 3, 12))
    assert torch.equal(y.isnan().cpu(), (reached & math.isnan(value)).expand(1, 3, 12))


# ---- gradients ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(device: str, case: Block, layout: str):
    tensors = leaves(case.tensors(device, layout=layout))
    y = run_block(*tensors, **case.options)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device)
    y.backward(grad)
    assert_gradients_close(case, tensors, grad, tuple(t if t is None else t.grad for t in tensors))
    assert tensors[0].grad.stride() == tensors[0].stride()


@pytest.mark.parametrize("case", [Block(), Block(kernel=4, dilation=2, activation="silu"), CASES[6]], ids=str)
def test_gradcheck(device: str, case: Block):
    tensors = leaves(case.tensors(device, torch.float64))
    assert torch.autograd.gradcheck(lambda *t: run_block(*t, **case.options), tensors)


@pytest.mark.parametrize("how", ["sum", "transposed", "expanded"])
def test_gradients_of_any_stride(device: str, how: str):
    case = Block(c=16, l=16)
    tensors = leaves(case.tensors(device))
    y = run_block(*tensors, **case.options)
    grad = {
        "sum": torch.ones(1, 1, 1).expand(y.shape),
        "transposed": torch.randn(y.shape).transpose(1, 2),
        "expanded": torch.randn(1, 1, 16).expand(y.shape),
    }[how].to(device)
    if how == "sum":
        y.sum().backward()
    else:
        y.backward(grad)
    assert_gradients_close(case, tensors, grad, tuple(t.grad for t in tensors))


@pytest.mark.parametrize("activation, residual", [(None, False), ("gelu", True)])
def test_exactly_the_gradients_asked_for(device: str, activation: str | None, residual: bool):
    case = Block(l=6, kernel=2, activation=activation, residual=residual)
    expected = expected_gradients(case, case.tensors(device), torch.ones(2, 6, 6))
    for wanted in itertools.product((False, True), repeat=7):
        tensors = leaves(case.tensors(device), wanted)
        y = run_block(*tensors, **case.options)
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.sum().backward()
            assert tuple(t.grad is not None for t in tensors) == wanted
            for t, (want, bound) in zip(tensors, expected, strict=True):
                assert t.grad is None or ((t.grad.cpu() - want).abs() <= 2.0**-24 * bound).all()


def test_gradients_take_the_strides_of_their_tensors(device: str):
    x, expand_weight, dw_weight, project_weight, *biases = Block().tensors(device)
    tensors = leaves(
        (
            channels_last(x),
            expand_weight.transpose(0, 1).contiguous().transpose(0, 1),
            dw_weight.transpose(0, 2).contiguous().transpose(0, 2),
            project_weight.transpose(0, 1).contiguous().transpose(0, 1),
            *biases,
        )
    )
    y = run_block(*tensors)
    gradients = torch.autograd.grad(y, tensors, torch.ones_like(y))
    assert [g.stride() for g in gradients] == [t.stride() for t in tensors]
    wide = torch.cat([x, x], 1)[:, :6].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(run_block(wide, *tensors[1:]).sum(), wide)
    assert gradient.is_contiguous()


def test_no_grad_inference_mode_and_checkpoint(device: str):
    case = Block()
    tensors = leaves(case.tensors(device))
    with torch.no_grad():
        assert not run_block(*tensors, **case.options).requires_grad
    with torch.inference_mode():
        y = run_block(*tensors, **case.options)
        assert y.is_inference()
        assert_output_close(case, tensors, y)
    y = checkpoint(lambda *t: run_block(*t, **case.options), *tensors, use_reentrant=False)
    y.sum().backward()
    assert_gradients_close(case, tensors, torch.ones_like(y), tuple(t.grad for t in tensors))


def test_in_place_edit_after_forward_raises(device: str):
    for index in range(4):
        tensors = leaves(Block().tensors(device))
        y = run_block(*tensors)
        with torch.no_grad():
            tensors[index].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_second_derivative_raises(device: str):
    tensors = leaves(Block().tensors(device))
    for loss in (lambda y: y.square().sum(), torch.sum):
        (gradient,) = torch.autograd.grad(loss(run_block(*tensors)), tensors[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="separable_conv_block1d has no second derivative"):
            gradient.sum().backward()


# ---- errors ----


def error_cases() -> list:
    def z(*shape: int, **options) -> Tensor:
        return torch.zeros(shape, **options)

    x, expand, dw, project = z(2, 4, 9), z(8, 4, 1), z(8, 1, 3), z(4, 8, 1)
    four = (x, expand, dw, project)
    return [
        ("x_rank", RuntimeError, r"x must be \[N,C,L\]", (z(2, 4, 9, 1), expand, dw, project), {}),
        ("x_vector", RuntimeError, r"x must be \[N,C,L\]", (z(4), expand, dw, project), {}),
        ("channels", RuntimeError, "expand_weight", (z(2, 5, 9), expand, dw, project), {}),
        ("expand_rank", RuntimeError, "expand_weight", (x, z(8, 4), dw, project), {}),
        ("expand_of_two_taps", RuntimeError, "expand_weight", (x, z(8, 4, 2), dw, project), {}),
        ("depthwise_rank", RuntimeError, "dw_weight", (x, expand, z(8, 1, 3, 1), project), {}),
        ("depthwise_channels", RuntimeError, "dw_weight", (x, expand, z(9, 1, 3), project), {}),
        ("not_depthwise", RuntimeError, "dw_weight", (x, expand, z(8, 8, 3), project), {}),
        ("multiplier", ValueError, "depth multiplier", (x, expand, z(16, 1, 3), project), {}),
        ("no_taps", RuntimeError, "dw_weight", (x, expand, z(8, 1, 0), project), {}),
        ("project_channels", RuntimeError, "project_weight", (x, expand, dw, z(4, 7, 1)), {}),
        ("project_taps", RuntimeError, "project_weight", (x, expand, dw, z(4, 8, 3)), {}),
        ("other_rows", RuntimeError, "project_weight must have 4 rows", (x, expand, dw, z(5, 8, 1)), {}),
        ("one_row", RuntimeError, "project_weight must have 4 rows", (x, expand, dw, z(1, 8, 1)), {}),
        ("expand_bias", RuntimeError, "expand_bias", (*four, z(4)), {}),
        ("dw_bias", RuntimeError, "dw_bias", (*four, None, z(8, 1)), {}),
        ("project_bias", RuntimeError, "project_bias", (*four, None, None, z(8)), {}),
        ("dtype", RuntimeError, "float32.*float16", (x, expand, dw.half(), project), {}),
        ("device", RuntimeError, "cpu.*meta", (x, expand, dw, z(4, 8, 1, device="meta")), {}),
        ("integers", TypeError, "int32", tuple(t.int() for t in four), {}),
        ("complex", TypeError, "complex64", tuple(t.to(torch.complex64) for t in four), {}),
        ("sparse", TypeError, "dense", (x.to_sparse(), expand, dw, project), {}),
        ("list", TypeError, "x must be a torch.Tensor, got list", ([1.0], expand, dw, project), {}),
        ("none", TypeError, "project_weight must be a torch.Tensor, got NoneType", (x, expand, dw, None), {}),
        ("bias_is_text", TypeError, "dw_bias must be a torch.Tensor, got str", (*four, None, "zeros"), {}),
        ("dilation_zero", RuntimeError, "dilation must be at least 1", four, {"dilation": 0}),
        ("dilation_pair", ValueError, "dilation", four, {"dilation": (1, 1)}),
        ("dilation_float", ValueError, "dilation", four, {"dilation": 1.5}),
        ("activation", ValueError, "activation", four, {"activation": "GELU"}),
        ("residual", ValueError, "residual", four, {"residual": "yes"}),
        ("residual_none", ValueError, "residual", four, {"residual": None}),
        ("activation_is_a_number", ValueError, "activation=3", four, {"activation": 3}),
        ("precision", ValueError, "fp32_precision", four, {"fp32_precision": "high"}),
        ("precision_none", ValueError, "fp32_precision=None", four, {"fp32_precision": None}),
        ("no_length", RuntimeError, "length", (z(2, 4, 0), expand, dw, project), {}),
        ("no_channels", RuntimeError, "channel", (z(2, 0, 9), z(8, 0, 1), dw, z(0, 8, 1)), {}),
    ]


ERRORS = {name: rest for name, *rest in error_cases()}


@pytest.mark.parametrize("how", ["direct", "autograd", "autocast", "compiled"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str, how: str):
    error, match, tensors, options = ERRORS[name]
    if how == "autograd":
        tensors = tuple(
            t.clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors
        )
    if how == "autocast" and name == "dtype":
        pytest.skip("autocast casts to one dtype")
    if how == "compiled" and name == "sparse":
        pytest.skip("torch.compile refuses it first")
    if how == "compiled":
        torch._dynamo.reset()
        error, match = Exception, match.split(".*")[0]
        run = torch.compile(run_block, fullgraph=True, backend="aot_eager")
    else:
        run = run_block
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(error, match=match):
            run(*tensors, **options)
    assert not dispatch._launchers


def test_errors_do_not_depend_on_earlier_calls():
    """1 equals True and 1.0, also as a key of a table."""
    tensors = Block().tensors()
    run_block(*tensors, dilation=1, residual=True)
    for options in ({"dilation": True}, {"dilation": 1.0}, {"residual": 1}, {"residual": 1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            run_block(*tensors, **options)


def test_autocast_casts_no_type_that_no_convolution_takes():
    tensors = Block(residual=False).tensors()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match="x has dtype torch.float8_e4m3fn"):
            run_block(*(t.to(torch.float8_e4m3fn) for t in tensors), residual=False)
        with pytest.raises(TypeError, match="x must be a dense strided tensor, got layout torch._mkldnn"):
            run_block(tensors[0].to_mkldnn(), *tensors[1:])


def test_a_tuple_of_one_is_a_dilation_as_nn_conv1d_keeps_it(device: str):
    tensors = Block(dilation=2).tensors(device)
    want = run_block(*tensors, dilation=2)
    for dilation in ((2,), [2]):
        assert torch.equal(run_block(*tensors, dilation=dilation), want)


# ---- autocast ----


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_autocast(device: str, given: torch.dtype, low: torch.dtype, residual: bool):
    """The three convolutions in the low precision; x is added in its own."""
    case = Block(residual=residual)
    x, *parameters = leaves(case.tensors(device))
    x = x.detach().to(given).requires_grad_()
    with torch.autocast(device, dtype=low):
        y = run_block(x, *parameters, **case.options)
        last = run_block(channels_last(x), *parameters, **case.options)
        exchanged = run_block(x.detach().transpose(0, 1).contiguous().transpose(0, 1), *parameters, **case.options)
    assert y.dtype == (given if residual else low)
    assert y.is_contiguous() and is_channels_last(last) and exchanged.is_contiguous()
    y.float().sum().backward()
    assert [t.grad.dtype for t in (x, *parameters)] == [given] + [torch.float32] * 6
    cast = [t.detach().to(low) for t in (x, *parameters)]
    if given == low:
        want = run_block(*cast, **case.options)
    else:
        want = run_block(*cast, residual=False)
        want = (want + x.detach()).to(given) if residual else want
    for got in (y, last, exchanged):
        torch.testing.assert_close(got, want, rtol=0, atol=0 if got is y else 0.1)


def test_autocast_leaves_float64_and_backward_keeps_the_forward_dtype(device: str):
    case = Block()
    tensors = leaves(case.tensors(device, torch.float64))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_output_close(case, tensors, run_block(*tensors, **case.options))
    tensors = leaves(case.tensors(device))
    y = run_block(*tensors, **case.options)
    with torch.autocast(device, dtype=torch.bfloat16):  # not where a backward pass belongs, but common
        y.backward(torch.ones_like(y))
    assert_gradients_close(case, tensors, torch.ones_like(y), tuple(t.grad for t in tensors))


# ---- torch.library, torch.compile, transforms ----

OP_INPUTS = {
    "contiguous": lambda x: x,
    "channels_last": channels_last,
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "batch_inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("view", OP_INPUTS)
def test_opcheck(device: str, view: str, residual: bool, grad: bool):
    op = torch_ops.block1d
    x, *parameters = Block(kernel=4).tensors(device)
    tensors = [t.detach().requires_grad_(grad) for t in (OP_INPUTS[view](x), *parameters)]
    options = (3, "silu", residual, "ieee")
    torch.library.opcheck(op.forward, (*tensors, *options))
    y = op.forward(*tensors, *options).detach()
    for needed in ((True,) * 7, (True, *(False,) * 6), (False, True, False, True, False, True, True)):
        plain_tensors = [t.detach() for t in tensors]
        torch.library.opcheck(op.backward, (torch.randn_like(y), *plain_tensors, *options, needed))


def test_compile_fullgraph(device: str):
    case = Block(kernel=4, dilation=2, activation="hardswish")
    for layout in LAYOUTS:
        tensors = leaves(case.tensors(device, layout=layout))
        others = leaves(tensors)
        compiled = torch.compile(lambda *t: run_block(*t, **case.options) * 2, fullgraph=True, backend="aot_eager")
        y, want = compiled(*tensors), run_block(*others, **case.options) * 2
        torch.testing.assert_close(y, want, rtol=0, atol=0)
        assert y.stride() == want.stride()
        for loss in (y, want):
            loss.square().sum().backward()
        for got, expected in zip(tensors, others, strict=True):
            # A GPU may add up the gradient of a bias in another order: as many roundings as it has terms, at most.
            terms = 0 if device == "cpu" else case.n * case.l
            bound = terms * torch.finfo(torch.float32).eps / 2 * expected.grad.abs().max().item()
            torch.testing.assert_close(got.grad, expected.grad, rtol=0, atol=bound)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compile_takes_other_sizes_without_recompiling(device: str, layout: str):
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run_block, fullgraph=True, backend=count)
    for n, length in ((2, 16), (3, 20), (5, 33), (8, 300)):
        tensors = Block(n=n, l=length).tensors(device, layout=layout)
        assert torch.equal(compiled(*tensors), run_block(*tensors))
    assert count.frame_count <= 2


@pytest.mark.parametrize("residual", [True, False])
def test_compile_under_autocast(device: str, residual: bool):
    case = Block(residual=residual)
    tensors = leaves(case.tensors(device))

    def under_autocast(*t):
        with torch.autocast(device, dtype=torch.bfloat16):
            return run_block(*t, **case.options)

    y = torch.compile(under_autocast, fullgraph=True, backend="aot_eager")(*tensors)
    assert y.dtype == (torch.float32 if residual else torch.bfloat16)
    assert torch.equal(y, under_autocast(*tensors))


def test_fake_and_meta_tensors_agree_with_the_real_call(device: str):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for view, dtype, residual in itertools.product(
        OP_INPUTS.values(), (torch.float32, torch.float16), (False, True)
    ):  # fmt: skip
        case = Block(kernel=4, residual=residual, o=None if residual else 5)
        x, *parameters = case.tensors(device, dtype)
        tensors = (view(x), *parameters)
        y = run_block(*tensors, **case.options)
        meta = run_block(*(t.to("meta") for t in tensors), **case.options)
        assert meta.is_meta
        assert (meta.shape, meta.dtype) == (y.shape, y.dtype)
        with FakeTensorMode() as mode:
            fake = run_block(*(mode.from_tensor(t) for t in tensors), **case.options)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (y.shape, y.stride(), y.dtype, y.device)


def test_transforms_and_subclasses_see_the_call(device: str):
    case = Block()
    tensors = case.tensors(device)
    want = plain(case, double(tensors))

    grad = torch.func.grad(lambda x: run_block(x, *tensors[1:]).sum())(tensors[0])
    leaf = tensors[0].clone().requires_grad_()
    run_block(leaf, *tensors[1:]).sum().backward()
    torch.testing.assert_close(grad, leaf.grad, rtol=0, atol=0)

    def gradient_sum(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: run_block(x, *tensors[1:]).square().sum())(x).sum()

    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(gradient_sum)(tensors[0])

    stacked = torch.stack([tensors[0], 2 * tensors[0]])
    per_item = torch.vmap(torch.func.grad(lambda x: run_block(x, *tensors[1:]).sum()))(stacked)
    torch.testing.assert_close(per_item[0], grad, rtol=0, atol=0)
    batched = torch.vmap(lambda x: run_block(x, *tensors[1:]))(stacked)
    assert torch.equal(batched[0], run_block(*tensors))

    class Logged(Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += func is run_block
            return super().__torch_function__(func, types, args, kwargs or {})

    y = run_block(tensors[0].as_subclass(Logged), *tensors[1:], **case.options)
    assert Logged.calls == 1
    assert isinstance(y, Logged)

    with torch.device(device):  # a function mode
        y = run_block(*tensors, **case.options)
    assert (y.double().cpu() - want).abs().max() < 1e-4
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
            run_block(dual, *tensors[1:], **case.options)


def test_negated_views_are_resolved():
    x, *parameters = Block().tensors(dtype=torch.float64)
    imaginary = torch.complex(x, x).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(run_block(imaginary, *parameters), run_block(-x, *parameters))


def test_the_operator_takes_batches_alone():
    tensors = Block().tensors()
    with pytest.raises(RuntimeError, match="x must be batched: 3-D"):
        torch_ops.block1d.forward(tensors[0][0], *tensors[1:], 1, None, True, "ieee")


# ---- the way to a kernel, with one that stands in for it ----


class StandIn:
    """Kernel that checks the contract of Kernel.launch and computes through ATen."""

    def __init__(self, problem):
        self.problem, self.launches = problem, 0

    def launch(self, x, *parameters_and_y: Tensor | None) -> None:
        *parameters, y = parameters_and_y
        p = self.problem
        self.launches += 1
        assert x.shape == (p.n, p.c, p.l)
        assert y.shape == (p.n, p.o, p.l)
        for t in (x, y):
            assert (t if p.layout == "contiguous" else t.transpose(1, 2)).is_contiguous()
            assert t.data_ptr() % p.alignment == 0
        assert tuple(t is not None for t in parameters[3:]) == (p.expand_bias, p.dw_bias, p.project_bias)
        for t in parameters:
            assert t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)
        y.copy_(reference.separable_conv_block1d(x, *parameters, *BLOCK1D.options_of(p)))


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
    case = Block()
    tensors = case.tensors()
    for seed in range(3):
        again = case.tensors(seed=seed)
        assert_output_close(case, again, run_block(*again))
    assert [k.launches for k in stand_ins] == [3]
    run_block(*tensors, dilation=2)
    run_block(*tensors, activation="gelu_tanh")
    run_block(*tensors, residual=False)
    run_block(*tensors, fp32_precision="tf32")
    run_block(*case.tensors(layout="channels_last"))
    run_block(*tensors[:4], None, *tensors[5:])
    run_block(*tensors[:5], None, tensors[6])
    run_block(*Block(l=17).tensors())
    assert [k.launches for k in stand_ins] == [3] + [1] * 8
    assert len({k.problem for k in stand_ins}) == 9
    assert stand_ins[4].problem.fp32_precision == "tf32"
    assert (stand_ins[6].problem.expand_bias, stand_ins[7].problem.dw_bias) == (False, False)


def test_kernels_get_dense_aligned_tensors(stand_ins: list[StandIn]):
    case = Block()
    tensors = case.tensors()
    for view, _ in VIEWS.values():
        changed = (view(tensors[0]), *tensors[1:])
        assert_output_close(case, changed, run_block(*changed))
    assert {k.problem.alignment for k in stand_ins} == {4, 8, 16}
    flat = torch.cat([tensors[0].new_zeros(1), *(t.flatten() for t in tensors[1:])])
    parts = flat[1:].split([t.numel() for t in tensors[1:]])
    parameters = [part.view(t.shape) for part, t in zip(parts, tensors[1:], strict=True)]
    assert_output_close(case, tensors, run_block(tensors[0], *parameters))
    bare = Block(expand_bias=False, project_bias=False)
    strided = tuple(t if t is None else torch.stack([t, t], -1)[..., 0] for t in bare.tensors())
    assert_output_close(bare, strided, run_block(*strided))


def test_training_and_autocast_use_the_kernel_too(stand_ins: list[StandIn]):
    case = Block()
    tensors = leaves(case.tensors())
    y = run_block(*tensors)
    y.backward(torch.ones_like(y))
    assert_gradients_close(case, tensors, torch.ones_like(y), tuple(t.grad for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        run_block(*tensors)
        run_block(tensors[0].bfloat16(), *tensors[1:])
    assert [(k.problem.dtype, k.problem.residual) for k in stand_ins] == [
        ("float32", True), ("bfloat16", False), ("bfloat16", True),
    ]  # fmt: skip


def test_an_empty_batch_needs_no_kernel(stand_ins: list[StandIn]):
    assert run_block(*Block(n=0).tensors()).shape == (0, 6, 16)
    assert stand_ins == []


def test_fallback_warns_once_a_reason(monkeypatch: pytest.MonkeyPatch):
    def refuse(problem, device):
        raise Unsupported(f"no kernel for {problem.e} channels")

    monkeypatch.setattr(dispatch, "choose", refuse)
    case, other = Block(), Block(e=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_output_close(case, case.tensors(), run_block(*case.tensors()))
        run_block(*Block(n=3).tensors())
        run_block(*other.tensors())
    assert [str(w.message).split(": ")[1] for w in caught] == ["no kernel for 10 channels", "no kernel for 4 channels"]
    assert {w.filename for w in caught} == {__file__}
    monkeypatch.setenv("CUTLASS_SEP_FALLBACK", "0")
    for case in (Block(), Block(n=5)):  # known and new
        with pytest.raises(Unsupported, match="no kernel for 10 channels"):
            run_block(*case.tensors())


def test_names_are_those_of_the_problem_and_of_the_operator():
    assert BLOCK1D.tensors == NAMES
    assert set(BLOCK1D.options) == {"fp32_precision", *Block().options}
