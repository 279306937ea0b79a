"""Benchmark modules: what can be checked without a GPU, above all that dishonest measurements are refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cutlass_sep.bench import accuracy, ceilings, inputs, overhead, peers, results, runner, timing
from cutlass_sep.bench.peers import Unfair
from cutlass_sep.problem import Pads

LAYERS = Path(__file__).parent.parent / "benchmarks" / "layers.jsonl"
CEILINGS = {"copy_TBps": 4.0, "bf16_TFLOPS": 700.0, "fp16_TFLOPS": 700.0, "tf32_TFLOPS": 350.0, "fp32_TFLOPS": 50.0}
#: The input that cases.md names for benchmarks: B8 C64 56x56 fp16.
SMALL = {"n": 8, "c": 64, "h": 56, "w": 56, "o": 64}


def small(dtype="float16", layout="contiguous", **changes):
    return replace(inputs.lead(dtype, layout).problem, **{**SMALL, **changes}).with_alignment()


def small_block(dtype="float32", layout="contiguous", **changes):
    extents = {"n": 3, "c": 24, "l": 40, "e": 48, "o": 24}
    return replace(inputs.lead1d(dtype, layout).problem, **{**extents, **changes}).with_alignment()


def ours(problem):
    options = inputs.options(problem)
    return lambda t: inputs.function(problem)(*t, **options)


def check_values(impl, call, problem, tensors):
    """The errors of one call, as a measurement checks them."""
    verdict = accuracy.judge_one(problem, tensors, runner._output(call, problem, tensors))
    return runner._accepted(impl, problem, verdict)


# --- inputs


def test_lead_shape_has_the_bytes_and_flops_of_its_definition():
    problem = inputs.lead().problem
    elements = 16 * 64 * 512 * 512 + 16 * 128 * 512 * 512 + 64 * 9 + 128 * 64
    assert problem.bytes == 4 * elements
    assert problem.flops == 2 * 16 * 512 * 512 * 64 * (9 + 128)
    assert inputs.is_lead(problem)
    assert not inputs.is_lead(replace(problem, h=511))


def test_lead_shape_of_the_block_has_the_bytes_and_flops_of_its_definition():
    problem = inputs.lead1d().problem
    elements = 2 * 32 * 256 * 4096 + 512 * 256 + 512 * 9 + 256 * 512 + 512 + 512 + 256
    assert problem.bytes == 4 * elements
    assert problem.flops == 2 * 32 * 4096 * 512 * (256 + 9 + 256)
    assert (problem.activation, problem.residual, problem.alignment) == ("gelu", True, 16)
    assert problem.expand_bias and problem.dw_bias and problem.project_bias
    assert inputs.is_lead(problem) and inputs.is_lead(inputs.lead1d("float16", "channels_last").problem)
    assert not inputs.is_lead(replace(problem, l=4095))


def test_layers_are_all_accounted_for():
    cases, left_out = inputs.layers(LAYERS)
    assert len(cases) + len(left_out) == len(LAYERS.read_text().splitlines()) == 90
    assert set(left_out) == {"efficientnet_b0.0.0.ds", "fcm.mob_v1.5_6.dwpw", "fcm.gprox_3.7_8.dwpw"}
    by_id = {case.id: case for case in cases}
    folded = by_id["mobilenetv1.1.0.ds"].problem
    assert (folded.dw_bias, folded.pw_bias) == (True, True), "BatchNorm counts as folded"
    assert (folded.n, folded.c, folded.o, folded.h, folded.stride) == (32, 64, 128, 112, (2, 2))
    assert (folded.mid_activation, folded.activation) == ("relu6", "relu6")
    plain = by_id["kernelbench.l1.86"].problem
    assert plain == inputs.lead().problem
    one_d = by_id["quartznet.k87.c512_512.d2"]
    assert (one_d.problem.h, one_d.problem.p, one_d.problem.q) == (1, 1, 840)
    assert (one_d.problem.kernel, one_d.problem.dilation, one_d.problem.padding) == (
        (1, 87),
        (1, 2),
        Pads(0, 0, 86, 86),
    )
    assert "H = 1" in one_d.note
    blocks = {name: case for name, case in by_id.items() if case.problem.op == "sepblock1d"}
    assert len(blocks) == 25 and all(name.endswith(".shape") and "shape" in c.note for name, c in blocks.items())
    wide = blocks["quartznet.k87.c512_512.d2.shape"].problem
    assert (wide.n, wide.c, wide.e, wide.o, wide.l, wide.kernel, wide.dilation) == (32, 512, 1024, 512, 840, 87, 2)
    assert blocks["convtasnet.d128.shape"].problem.e == 512, "the network's own width, where it expands"
    assert "residual" in by_id["mobilenetv2.1.1.tail"].note


def test_same_seed_same_tensors_and_meta_needs_none():
    problem = small("float32", dw_bias=True)
    first, again, other = (inputs.tensors(problem, "cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x) and torch.equal(first.dw_bias, again.dw_bias)
    assert not torch.equal(first.x, other.x)
    assert first.pw_bias is None
    meta = inputs.tensors(replace(problem, layout="channels_last"), "meta")
    assert meta.x.is_contiguous(memory_format=torch.channels_last) and not meta.x.is_contiguous()
    assert first.dw_weight.abs().max() <= 1 / 3 and first.pw_weight.abs().max() <= 1 / 8


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_tensors_of_a_block_make_its_problem(layout):
    for changes in ({}, {"o": 7, "residual": False}, {"expand_bias": False, "project_bias": False, "activation": None}):
        problem = small_block("bfloat16", layout, kernel=4, dilation=3, **changes)
        for device in ("meta", "cpu"):
            tensors = inputs.tensors(problem, device)
            assert type(problem).from_tensors(*tensors, **inputs.options(problem)) == problem
        assert (tensors.expand_bias is None, tensors.dw_bias is None) == (not problem.expand_bias, False)
        assert tensors.expand_weight.abs().max() <= 1 / math.sqrt(24)
        assert tensors.dw_weight.abs().max() <= 1 / 2 and tensors.project_weight.abs().max() <= 1 / math.sqrt(48)


def test_even_same_padding_is_stated_as_same():
    problem = replace(small(), kernel=(2, 4), padding=Pads(0, 1, 1, 2))
    assert inputs.padding_argument(problem) == "same"
    assert inputs.padding_argument(small()) == (1, 1)


# --- accuracy


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_right_values_pass_and_one_wrong_element_does_not(dtype):
    problem = small(dtype, n=2, h=20, w=20)
    tensors = inputs.tensors(problem, "cpu")
    y = ours(problem)(tensors)
    assert accuracy.judge_one(problem, tensors, y).ok
    unwritten = y.clone()
    unwritten[-1, -1, -1, -1] = math.nan
    verdict = accuracy.judge_one(problem, tensors, unwritten)
    assert not verdict.ok and math.isnan(verdict.ours.rel)
    assert verdict.to_json()["rel_error"] is None, "JSON has no NaN"
    wrong = y.clone()
    wrong[0, 0] = 0
    assert not accuracy.judge_one(problem, tensors, wrong).ok


def test_errors_are_those_of_the_definition():
    problem = small("float32", n=3, h=9, w=9)
    tensors = inputs.tensors(problem, "cpu")
    exact = peers.eager(problem)(*(t if t is None else t.double() for t in tensors))
    shifted = exact + 1e-3
    found = accuracy.errors(problem, tensors, {"y": shifted})["y"]
    assert found.max_abs == pytest.approx(1e-3, rel=1e-9)
    assert found.rel == pytest.approx(1e-3 * math.sqrt(exact.numel()) / exact.norm().item(), rel=1e-9)


def test_errors_do_not_depend_on_the_images_taken_at_a_time(monkeypatch):
    problem = small("float32", n=5, h=9, w=9)
    tensors = inputs.tensors(problem, "cpu")
    y = ours(problem)(tensors)
    whole = accuracy.errors(problem, tensors, {"y": y})["y"]
    monkeypatch.setattr(accuracy, "_CHUNK_ELEMENTS", 1)
    split = accuracy.errors(problem, tensors, {"y": y})["y"]
    assert split.max_abs == whole.max_abs
    assert split.rel == pytest.approx(whole.rel, rel=1e-12)


def test_limits_are_those_of_the_contract():
    base, rounding = accuracy.Errors(1.5e-7, 1e-6), accuracy.Errors(3e-8, 1e-7)
    assert accuracy.limits(inputs.lead().problem, base, rounding) == (6e-7, 1e-5)
    assert accuracy.limits(small("float32"), base, rounding) == (6e-7, None)
    assert accuracy.limits(small("float32"), accuracy.Errors(1e-8, 0), rounding) == (5e-7, None)
    assert accuracy.limits(small("bfloat16"), accuracy.Errors(3e-3, 0), rounding) == (1.1 * 3e-3, None)
    tf32 = replace(small("float32"), fp32_precision="tf32")
    assert accuracy.limits(tf32, base, rounding) == (2.0**-10, None)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "changes", [{}, {"kernel": 6, "dilation": 3}, {"kernel": 1, "residual": False, "o": 5}, {"dw_bias": False}], ids=str
)
def test_peers_of_the_block_compute_it_in_its_layout(layout, changes):
    problem = small_block("float32", layout, **changes)
    tensors = inputs.tensors(problem, "cpu")
    y = peers.eager(problem)(*tensors)
    assert y.shape == problem.y_shape
    assert (y.transpose(1, 2) if layout == "channels_last" else y).is_contiguous()
    assert accuracy.errors(problem, tensors, {"y": y})["y"].rel <= accuracy.peer_limit(problem)
    assert accuracy.judge_one(problem, tensors, y).ok
    # The bias of the first convolution does not reach the padding of the second.
    x, expand_weight, dw_weight, project_weight, *biases = (t if t is None else t.double() for t in tensors)
    hidden = torch.einsum("ec,ncl->nel", expand_weight[:, :, 0], x) + biases[0][:, None]
    left, right = problem.pads
    windows = torch.nn.functional.pad(hidden, (left, right)).unfold(2, problem.dilation * (problem.kernel - 1) + 1, 1)
    taps = (windows[..., :: problem.dilation] * dw_weight[:, 0, None, :]).sum(3)
    taps = taps if biases[1] is None else taps + biases[1][:, None]
    want = torch.einsum("oe,nel->nol", project_weight[:, :, 0], torch.nn.functional.gelu(taps)) + biases[2][:, None]
    assert (y - (want + x if problem.residual else want)).abs().max() < 1e-5


def test_limits_of_the_block():
    base, rounding = accuracy.Errors(6.5e-8, 1e-6), accuracy.Errors(3e-8, 1e-7)
    lead = inputs.lead1d().problem
    assert accuracy.limits(lead, base, rounding) == (4 * 6.5e-8, 1e-5)
    assert accuracy.limits(small_block(), base, rounding) == (5e-7, None)
    assert accuracy.limits(replace(lead, fp32_precision="tf32"), base, rounding) == (2.0**-9, None)
    assert accuracy.limits(small_block("float16"), accuracy.Errors(3e-4, 0), rounding) == (1.1 * 3e-4, None)
    assert accuracy.peer_limit(lead) == (256 + 9 + 512 + 4) * 2.0**-24


# --- honesty


def test_a_stub_that_returns_at_once_is_refused():
    problem = small()
    tensors = inputs.tensors(problem, "cpu")
    shape = (problem.n, problem.o, problem.p, problem.q)
    stale = ours(problem)(inputs.tensors(problem, "cpu"))
    for stub in (lambda t: torch.empty(shape, dtype=torch.float16).fill_(math.nan), lambda t: stale):
        with pytest.raises(runner.WrongValues, match="relative error"):
            check_values("cutlass_sep", stub, problem, tensors)
        with pytest.raises(runner.WrongValues, match="relative error"):
            check_values("eager", stub, problem, tensors)
    with pytest.raises(runner.WrongValues, match="returned"):
        check_values("cutlass_sep", lambda t: t.x[:, :1], problem, tensors)
    assert check_values("cutlass_sep", ours(problem), problem, tensors).rel < 1e-3


def test_a_peer_at_a_lower_precision_is_refused():
    problem = small("float32", n=2, h=20, w=20)
    tensors = inputs.tensors(problem, "cpu")

    def as_tf32(t):  # operands with 10 bits of mantissa, as TF32 has
        rounded = [v if v is None else v.half().float() for v in t]
        return peers.eager(problem)(*rounded)

    with pytest.raises(runner.WrongValues, match="at this precision"):
        check_values("compile", as_tf32, problem, tensors)
    check_values("compile", lambda t: peers.eager(problem)(*t), problem, tensors)


def test_bandwidth_above_the_peak_is_refused():
    problem = small()
    least = problem.bytes / CEILINGS["copy_TBps"] / 1e9
    ceilings.check_possible("ours", problem, 1.01 * least, CEILINGS)
    with pytest.raises(Unfair, match="TB/s"):
        ceilings.check_possible("ours", problem, 0.5 * least, CEILINGS)


def test_a_block_without_its_residual_is_refused():
    problem = small_block("float16")
    tensors = inputs.tensors(problem, "cpu")
    peer = peers.eager(replace(problem, residual=False))
    with pytest.raises(runner.WrongValues, match="relative error"):
        check_values("cutlass_sep", lambda t: peer(*t), problem, tensors)
    assert check_values("cutlass_sep", ours(problem), problem, tensors).rel < 1e-3


def test_unequal_precision_is_refused():
    row = {"id": "a", "op": "dwsep2d", "shape": {}, "dtype": "float32", "fp32_precision": "ieee", "timing": "events"}
    peers.comparable({**row, "impl": "cutlass_sep"}, {**row, "impl": "eager"})
    with pytest.raises(Unfair, match="fp32_precision is 'tf32' and 'ieee'"):
        peers.comparable({**row, "impl": "cutlass_sep", "fp32_precision": "tf32"}, {**row, "impl": "eager"})


@pytest.mark.parametrize("precision", ["ieee", "tf32", None])
def test_flags_are_set_and_put_back(precision):
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark)
    with peers.flags(precision):
        assert (cudnn.allow_tf32, matmul.allow_tf32) == (precision == "tf32",) * 2
        assert cudnn.benchmark
    assert (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark) == before


def test_code_that_changes_the_flags_while_timed_is_refused():
    before = torch.backends.cudnn.allow_tf32
    with pytest.raises(Unfair, match="TF32 flags"), peers.flags("ieee"):
        torch.backends.cudnn.allow_tf32 = True
    assert torch.backends.cudnn.allow_tf32 == before


# --- timing


def test_rotation_goes_past_the_l2_cache():
    l2 = 60 << 20
    for set_bytes in (1 << 20, 5 << 20, 100 << 20, 3 << 30):
        sets = timing.rotation(set_bytes, l2)
        assert sets >= 2
        # What is touched between two uses of one set.
        assert (sets - 1) * set_bytes >= min(3 * l2, (timing.MAX_ROTATION - 1) * set_bytes)
    assert timing.rotation(1, l2) == timing.MAX_ROTATION


def test_quantiles_interpolate():
    times = timing.Times((4.0, 1.0, 3.0, 2.0, 5.0))
    assert times.median_ms == 3.0
    assert times.quantile(0.1) == pytest.approx(1.4)
    assert times.to_json() == {"median_ms": 3.0, "p10_ms": pytest.approx(1.4), "p90_ms": pytest.approx(4.6), "runs": 5}
    assert timing.Times((7.0,)).to_json()["p90_ms"] == 7.0


def test_host_times_count_calls():
    counts = {"a": 0, "b": 0}

    def call(name):
        counts[name] += 1

    times = overhead.host_times({name: (lambda name=name: call(name)) for name in counts}, wait=lambda: None)
    assert counts["a"] == counts["b"] == 10 + overhead._CALLS * overhead._ROUNDS
    assert 0 < times["a"].median_ms < 1


# --- floors and comparisons


def test_floor_is_the_larger_of_bytes_and_tensor_time():
    lead = inputs.lead().problem
    floor_ms, kind = ceilings.floor(lead, {**CEILINGS, "copy_TBps": 4.28})
    assert kind == "bytes" and floor_ms == pytest.approx(0.752, abs=1e-3)
    wide = small("float32", c=2048, o=2048)
    floor_ms, kind = ceilings.floor(wide, CEILINGS)
    assert kind == "tensor" and floor_ms == pytest.approx(3 * 2 * 8 * 56 * 56 * 2048**2 / 350e9)
    once = ceilings.floor(replace(wide, fp32_precision="tf32"), CEILINGS)[0]
    assert once == pytest.approx(floor_ms / 3)


def test_floor_of_the_block_counts_both_products():
    lead = inputs.lead1d().problem
    flops = 2 * 32 * 4096 * 512 * (256 + 256)
    assert ceilings.floor(lead, CEILINGS) == (pytest.approx(3 * flops / 700e9), "tensor")
    for problem, rate in (
        (replace(lead, fp32_precision="tf32"), 350e9),
        (inputs.lead1d("float16").problem, 700e9),
        (inputs.lead1d("bfloat16", "channels_last").problem, 700e9),
    ):
        assert ceilings.floor(problem, CEILINGS) == (pytest.approx(flops / rate), "tensor")
    narrow = small_block("float16", e=8, n=64, l=4096)
    assert ceilings.floor(narrow, CEILINGS) == (pytest.approx(narrow.bytes / 4e9), "bytes")


def test_own_rows_are_held_against_the_best_peer():
    row = {"id": "a", "op": "dwsep2d", "shape": {}, "dtype": "float16", "fp32_precision": None, "timing": "events"}
    own = {**row, "impl": "cutlass_sep", "path": "sm90", "median_ms": 1.0}
    slow, fast = ({**row, "impl": impl, "median_ms": ms} for impl, ms in (("eager", 2.0), ("compile", 0.98)))
    other = {**fast, "timing": "cuda_graph", "median_ms": 0.1}
    (comparison,) = runner.compare([own, slow, fast, other])
    assert comparison.peer is fast and comparison.speedup == pytest.approx(0.98) and comparison.ok
    (comparison,) = runner.compare([{**own, "median_ms": 1.02}, slow, fast])
    assert not comparison.ok
    (comparison,) = runner.compare([{**own, "path": "torch", "median_ms": 2.05}, slow, fast])
    assert comparison.peer is slow and comparison.ok, "path torch is held against eager"
    assert runner.compare([own]) == []


def test_names_of_one_problem_share_compiled_peers():
    about = {**results.about(small("float16")), "timing": "events"}

    def peer(name, impl, ms, **changes):
        return {**about, "id": name, "impl": impl, "median_ms": ms, **changes}

    rows = [
        peer("a", "cutlass_sep", 0.5),
        peer("a", "eager", 2.0),
        peer("a", "compile", 1.5),
        peer("b", "eager", 2.05),
        peer("b", "compile", 1.4),
        peer("b", "compile-max-autotune", 1.0),
    ]
    found = peers.with_lent(rows)
    assert found[:-1] == rows, "each keeps its own"
    assert found[-1] == {**rows[-1], "id": "a", "lent_by": "b"}
    (comparison,) = runner.compare(row | {"path": "sm90"} for row in found if row["id"] == "a")
    assert comparison.speedup == 2.0
    for changes in (
        {"median_ms": 2.07},  # eager has drifted
        {"layout": "channels_last"},  # and in this layout it is not known
        {"timing": "cuda_graph"},
        {"activation": "relu"},
        {"shape": about["shape"] | {"N": 1}},
    ):
        assert peers.with_lent([*rows[:3], rows[3] | changes, *rows[4:]]) == [*rows[:3], rows[3] | changes, *rows[4:]]


def test_peers_by_name():
    problem = small("float32", n=1, h=8, w=8)
    tensors = inputs.tensors(problem, "cpu")
    assert torch.equal(peers.build("eager", problem)(*tensors), peers.eager(problem)(*tensors))
    with pytest.raises(ValueError, match="compile-max-autotune"):
        peers.build("tensorrt", problem)
