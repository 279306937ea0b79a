"""The module as a drop-in for two nn.Conv2d."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from separable import ACTIVATIONS, Case, assert_output_close
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval, parametrizations
from torch.nn.utils import weight_norm as legacy_weight_norm

import cutlass_sep
from cutlass_sep import DepthwiseSeparableConv2d, functional


class Plain(nn.Module):
    """What DepthwiseSeparableConv2d replaces."""

    def __init__(self, module: DepthwiseSeparableConv2d) -> None:
        super().__init__()
        self.depthwise, self.pointwise = module.depthwise, module.pointwise
        self.mid, self.out = ACTIVATIONS[module.mid_activation], ACTIVATIONS[module.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.pointwise(self.mid(self.depthwise(x))))


def make(device: str = "cpu", **options) -> DepthwiseSeparableConv2d:
    torch.manual_seed(0)
    return DepthwiseSeparableConv2d(8, 16, 3, **{"padding": 1, "bias": True, "device": device} | options)


def close(got: Tensor, want: Tensor) -> None:
    """Both fp32, 8 channels and 9 taps: two results of at most 3e-6 error each on values of size 1."""
    torch.testing.assert_close(got, want, rtol=0, atol=6e-6)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """Arguments of the fused calls made."""
    made = []
    call = functional.call

    def record(*args):
        made.append(args)
        return call(*args)

    monkeypatch.setattr(functional, "call", record)
    return made


@pytest.mark.parametrize("mid_activation, activation", [(None, None), ("relu6", "hardswish"), ("gelu_tanh", "gelu")])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_pair(device: str, bias: bool, mid_activation: str | None, activation: str | None, calls: list):
    module = make(device, bias=bias, mid_activation=mid_activation, activation=activation)
    x = torch.randn(2, 8, 9, 11, device=device)
    close(module(x), Plain(module)(x))
    close(module(x[0]), Plain(module)(x[0]))
    case = Case(dw_bias=bias, pw_bias=bias, mid_activation=mid_activation, activation=activation)
    conv = module.depthwise, module.pointwise
    assert_output_close(case, (x, conv[0].weight, conv[1].weight, conv[0].bias, conv[1].bias), module(x))
    assert len(calls) == 3


def test_options_are_those_of_conv2d(calls: list):
    options = {"stride": (2, 1), "padding": (3, 2), "dilation": (1, 2), "bias": False}
    module = DepthwiseSeparableConv2d(4, 6, (5, 2), **options)
    close(module(torch.ones(1, 4, 12, 12)), Plain(module)(torch.ones(1, 4, 12, 12)))
    assert module.depthwise.weight.shape == (4, 1, 5, 2)
    assert module.pointwise.weight.shape == (6, 4, 1, 1)
    positional = DepthwiseSeparableConv2d(4, 6, 3, 2, 1, 1, True)
    assert (positional.depthwise.stride, positional.depthwise.padding) == ((2, 2), (1, 1))
    assert positional.pointwise.bias is not None
    module = DepthwiseSeparableConv2d(4, 6, 3, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.float16)}


def test_state_dict_keys_and_round_trip():
    assert list(make(bias=False).state_dict()) == ["depthwise.weight", "pointwise.weight"]
    module = make()
    keys = ["depthwise.weight", "depthwise.bias", "pointwise.weight", "pointwise.bias"]
    assert list(module.state_dict()) == keys
    assert not list(module.buffers())
    plain = Plain(copy.deepcopy(module))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    assert module.load_state_dict(plain.state_dict()).missing_keys == []
    x = torch.randn(1, 8, 6, 6)
    close(module(x), plain(x))
    assert plain.load_state_dict(make().state_dict(), strict=True).unexpected_keys == []
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh = make()
    fresh.load_state_dict(torch.load(buffer))
    assert torch.equal(fresh(x), module(x))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))


CHANGES = {
    "optimizer_step": lambda m: torch.optim.SGD(m.parameters(), 0.5).step(),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "data_copy": lambda m: m.depthwise.weight.data.copy_(torch.ones_like(m.depthwise.weight)),
    "data_replaced": lambda m: setattr(m.pointwise.weight, "data", torch.ones_like(m.pointwise.weight)),
    "new_parameter": lambda m: setattr(m.pointwise, "bias", nn.Parameter(torch.ones_like(m.pointwise.bias))),
    "plain_attribute": lambda m: (
        delattr(m.depthwise, "weight"),
        setattr(m.depthwise, "weight", torch.ones(8, 1, 3, 3)),
    ),
    "bias_removed": lambda m: setattr(m.depthwise, "bias", None),
    "stride_set": lambda m: setattr(m.depthwise, "stride", (2, 2)),
    "other_pointwise": lambda m: setattr(m, "pointwise", nn.Conv2d(8, 5, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_are_read_at_each_call(change: str, calls: list):
    module = make()
    x = torch.randn(2, 8, 6, 6)
    before = module(x)
    before.sum().backward()
    CHANGES[change](module)
    after = module(x)
    close(after, Plain(module)(x))
    assert after.shape != before.shape or not torch.equal(after, before)
    assert len(calls) == 2


@pytest.mark.parametrize("folded", ["depthwise", "pointwise", "both"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_batch_norm_folded_by_torch(device: str, bias: bool, folded: str, calls: list):
    """It gives a child the bias that it lacks, and scales the one that it has."""
    module = make(device, bias=bias, mid_activation="relu6", activation="silu").eval()
    plain = Plain(copy.deepcopy(module)).eval()
    for name in ("depthwise", "pointwise") if folded == "both" else (folded,):
        child = getattr(module, name)
        norm = nn.BatchNorm2d(child.out_channels, device=device).eval()
        for parameter in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(parameter)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        setattr(plain, name, nn.Sequential(getattr(plain, name), norm))
        setattr(module, name, fuse_conv_bn_eval(child, norm))
    x = torch.randn(2, 8, 6, 7, device=device)
    y = module(x)
    assert len(calls) == 1
    assert {k for k in module.state_dict() if k.endswith("bias")} == {
        f"{name}.bias" for name in ("depthwise", "pointwise") if bias or folded in (name, "both")
    }
    # As `close`, of values that a norm has scaled by some 3 and shifted.
    torch.testing.assert_close(y, plain(x), rtol=2e-6, atol=6e-6)


def double_output(module, args, output):
    return 2 * output


PLAIN_WAYS = {
    "legacy_weight_norm": lambda m: legacy_weight_norm(m.depthwise),
    "weight_norm": lambda m: parametrizations.weight_norm(m.depthwise),
    "forward_hook": lambda m: m.pointwise.register_forward_hook(double_output),
    "forward_pre_hook": lambda m: m.depthwise.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "full_backward_hook": lambda m: m.pointwise.register_full_backward_hook(lambda module, gi, go: None),
    "backward_pre_hook": lambda m: m.pointwise.register_full_backward_pre_hook(lambda module, go: None),
    "forward_replaced": lambda m: setattr(m.pointwise, "forward", lambda x: x[:, :3]),
    "another_class": lambda m: setattr(m, "pointwise", nn.Sequential(nn.Conv2d(8, 5, 1), nn.ReLU())),
    "wide_pointwise": lambda m: setattr(m, "pointwise", nn.Conv2d(8, 5, 3)),
    "strided_pointwise": lambda m: setattr(m, "pointwise", nn.Conv2d(8, 5, 1, stride=2)),
    "grouped_pointwise": lambda m: setattr(m, "pointwise", nn.Conv2d(8, 4, 1, groups=2)),
    "full_depthwise": lambda m: setattr(m, "depthwise", nn.Conv2d(8, 8, 3)),
    "reflecting_depthwise": lambda m: setattr(
        m, "depthwise", nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", groups=8)
    ),
}


@pytest.mark.parametrize("change", PLAIN_WAYS)
def test_changed_children_are_called_the_plain_way(change: str, calls: list):
    module = make(mid_activation="relu", activation="silu")
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    module(x)
    PLAIN_WAYS[change](module)
    explanation = cutlass_sep.explain(module, x)
    y = module(x)
    assert len(calls) == 1
    close(y, Plain(module)(x))
    y.sum().backward()
    assert (explanation.path, explanation.schedule) == ("torch", None)
    assert "child" in explanation.reason


def test_weight_norm_is_applied_after_a_step(calls: list):
    module = make()
    legacy_weight_norm(module.depthwise)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x = torch.randn(2, 8, 6, 6)
    module(x).square().mean().backward()
    optimizer.step()
    close(module(x), Plain(module)(x))


def test_a_removed_hook_restores_the_fused_call(calls: list):
    module = make()
    x = torch.randn(1, 8, 6, 6)
    handle = module.pointwise.register_forward_hook(double_output)
    doubled = module(x)
    handle.remove()
    close(2 * module(x), doubled)
    assert len(calls) == 1


def test_global_hooks_see_the_children(calls: list):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    try:
        make()(torch.randn(1, 8, 6, 6))
    finally:
        handle.remove()
    assert seen == [nn.Conv2d, nn.Conv2d, DepthwiseSeparableConv2d]
    assert calls == []


def test_functional_call_and_training(device: str):
    module = make(device)
    x = torch.randn(2, 8, 6, 6, device=device)
    others = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    y = torch.func.functional_call(module, others, (x,))
    twin = make(device)
    twin.load_state_dict(others)
    close(y, twin(x))
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.05), []
    target = torch.randn(2, 16, 6, 6, device=device)
    for _ in range(5):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("kernel", [(2, 2), (4, 4), (1, 4), (2, 3)])
def test_same_and_valid(device: str, kernel: tuple[int, int]):
    x = torch.randn(1, 8, 5, 5, device=device)
    for padding in ("same", "valid"):
        module = DepthwiseSeparableConv2d(8, 4, kernel, padding=padding, device=device)
        assert module.depthwise.padding == padding
        assert f"padding={padding}" in repr(module)
        close(module(x), Plain(module)(x))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"padding": "SAME"}, "padding"),
        ({"padding": "same", "stride": 2}, "same"),
        ({"padding": (1, 1, 1, 1)}, "padding"),
        ({"padding": -1}, "padding"),
        ({"stride": 0}, "stride"),
        ({"stride": 1.5}, "stride"),
        ({"dilation": (1, 0)}, "dilation"),
        ({"kernel_size": 0}, "kernel_size"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size"),
        ({"in_channels": 0}, "in_channels"),
        ({"in_channels": None}, "in_channels"),
        ({"in_channels": True}, "in_channels"),
        ({"out_channels": "4"}, "out_channels"),
        ({"out_channels": 4.0}, "out_channels"),
        ({"out_channels": -2}, "out_channels"),
        ({"mid_activation": "relu8"}, "mid_activation"),
        ({"activation": "GELU"}, "activation"),
        ({"fp32_precision": "high"}, "fp32_precision"),
    ],
    ids=str,
)
def test_constructor_refuses(options: dict, match: str):
    with pytest.raises(ValueError, match=match):
        DepthwiseSeparableConv2d(**{"in_channels": 8, "out_channels": 4, "kernel_size": 3} | options)


@pytest.mark.parametrize("three", [(3,), [3, 3], np.int64(3), (np.int64(3), 3)], ids=repr)
def test_integers_of_any_kind(three):
    module = DepthwiseSeparableConv2d(np.int64(8), 4, three, stride=three, padding=three, dilation=three)
    assert module.depthwise.weight.shape == (8, 1, 3, 3)
    x = torch.randn(1, 8, 5, 6)
    close(module(x), Plain(module)(x))
    assert repr(module) == repr(DepthwiseSeparableConv2d(8, 4, 3, stride=3, padding=3, dilation=3))


def test_other_padding_modes_are_no_argument():
    with pytest.raises(TypeError, match="padding_mode"):
        DepthwiseSeparableConv2d(4, 4, 3, padding_mode="reflect")


def test_repr_tells_the_activations():
    text = repr(make(mid_activation="relu6", activation="gelu", fp32_precision="tf32"))
    for part in ("mid_activation='relu6'", "activation='gelu'", "fp32_precision='tf32'", "groups=8"):
        assert part in text


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_compile_fullgraph(device: str, layout: torch.memory_format):
    module = make(device, mid_activation="relu6").to(memory_format=layout)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for n in (2, 3):
        x = torch.randn(n, 8, 6, 6, device=device).contiguous(memory_format=layout)
        y, want = compiled(x), module(x)
        assert torch.equal(y, want)
        assert y.stride() == want.stride()
    y.sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    want.sum().backward()
    for got, p in zip(gradients, module.parameters(), strict=True):
        assert torch.equal(got, p.grad)


def test_export(device: str):
    module = make(device)
    x = torch.randn(2, 8, 6, 6, device=device)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: batch},))
    other = torch.randn(5, 8, 6, 6, device=device)
    assert torch.equal(program.module()(other), module(other))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast(device: str, given: torch.dtype, low: torch.dtype):
    module = make(device)
    with torch.autocast(device, dtype=low):
        y = module(torch.randn(2, 8, 6, 6, device=device, dtype=given))
    assert y.dtype == low
    y.float().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
