"""What the block has of its own: zeros outside the sequence, a kept length, defaults. The rest: test_functional.py."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from block import Block, assert_gradients_close, assert_output_close, channels_last
from subjects import leaves

from cutlass_sep import dispatch
from cutlass_sep.functional import separable_conv_block1d as run_block

LAYOUTS = ("contiguous", "channels_last")


@pytest.fixture(autouse=True)
def _fresh_dispatch():
    dispatch.clear()
    yield
    dispatch.clear()


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


@pytest.mark.parametrize(
    "case",
    [Block(), Block(kernel=4, dilation=2, activation="silu"), Block(residual=False, o=9, activation=None)],
    ids=str,
)
def test_gradcheck(device: str, case: Block):
    tensors = leaves(case.tensors(device, torch.float64))
    assert torch.autograd.gradcheck(lambda *t: run_block(*t, **case.options), tensors)


def test_defaults_are_those_of_the_module(device: str):
    tensors = Block().tensors(device)
    want = run_block(*tensors, dilation=1, activation="gelu", residual=True, fp32_precision="ieee")
    assert torch.equal(run_block(*tensors), want)


def test_errors_do_not_depend_on_earlier_calls():
    """1 equals True and 1.0, also as a key of a table and in a tuple."""
    tensors = Block().tensors()
    for dilation in (1, (1,)):
        run_block(*tensors, dilation=dilation, residual=True)
    wrong = ({"dilation": True}, {"dilation": 1.0}, {"dilation": (1.0,)}, {"residual": 1}, {"residual": 1.0})
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            run_block(*tensors, **options)


def test_a_tuple_of_one_is_a_dilation_as_nn_conv1d_keeps_it(device: str):
    tensors = Block(dilation=2).tensors(device)
    want = run_block(*tensors, dilation=2)
    for dilation in ((2,), [2]):
        assert torch.equal(run_block(*tensors, dilation=dilation), want)
