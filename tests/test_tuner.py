"""Tuning: what is timed, what wins, who takes it, and how long it holds. The host stands in for a GPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from block import Block
from problems import problem_of
from separable import Case

import cutlass_sep
from cutlass_sep import arch, cache, compiler, dispatch, planner, toolchain, tuned, tuner
from cutlass_sep.bench import timing
from cutlass_sep.errors import CompileError, EnvironmentProblem, Unsupported
from cutlass_sep.planner import Plan

ARCH = "sm_90a"
DRIVER_VERSION = toolchain.driver_version
DEVICE = SimpleNamespace(type="cuda", index=0)
PROBLEMS = {"2-D": problem_of(Case(n=4, c=64, o=64, h=32, w=32), "bf16"), "block": problem_of(Block(), "fp16")}


@pytest.fixture(autouse=True)
def host_as_gpu(monkeypatch, tmp_path):
    """A GPU by name, and a cache folder of its own."""
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Host")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    properties = SimpleNamespace(L2_cache_size=1 << 16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(arch, "of_device", lambda index: ARCH)
    monkeypatch.setattr(toolchain, "driver_version", lambda: "580.1")
    tuned._environment.cache_clear()
    yield
    tuned._environment.cache_clear()
    dispatch.clear()


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_pick_is_found_again_by_its_problem_alone(problem):
    assert tuned.pick(problem, DEVICE) is None
    schedule = planner.candidates(problem, ARCH)[3]
    assert tuned.keep(problem, DEVICE, Plan(schedule.path, schedule, "timed", tuned=True))
    found = tuned.pick(problem, DEVICE)
    assert (found.path, found.schedule, found.reason, found.tuned) == (schedule.path, schedule, "timed", True)
    assert dispatch.choose(problem, DEVICE) == found
    other = problem_of(Case(n=5, c=64, o=64, h=32, w=32), "bf16")
    assert tuned.pick(other, DEVICE) is None
    assert not dispatch.choose(other, DEVICE).tuned


def test_a_pick_may_be_pytorch():
    problem = PROBLEMS["2-D"]
    tuned.keep(problem, DEVICE, Plan("torch", None, "timed", tuned=True))
    assert dispatch.choose(problem, DEVICE) == Plan("torch", None, "timed", tuned=True)


@pytest.mark.parametrize("what", ["gpu", "driver", "torch"])
def test_another_machine_has_other_picks(what, monkeypatch):
    problem = PROBLEMS["2-D"]
    tuned.keep(problem, DEVICE, Plan("torch", None, "timed", tuned=True))
    assert tuned.pick(problem, DEVICE) is not None
    tuned._environment.cache_clear()
    if what == "gpu":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Another")
    elif what == "driver":
        monkeypatch.setattr(toolchain, "driver_version", lambda: "580.2")
    else:
        monkeypatch.setattr(torch, "__version__", "9.9")
    assert tuned.pick(problem, DEVICE) is None


def test_a_pick_that_is_no_longer_legal_is_not_taken(monkeypatch):
    problem = PROBLEMS["2-D"]
    schedule = planner.candidates(problem, ARCH, "sm90")[0]
    tuned.keep(problem, DEVICE, Plan("sm90", schedule, "timed", tuned=True))
    monkeypatch.setattr(arch, "of_device", lambda index: "sm_80")
    assert tuned.pick(problem, DEVICE) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record | {"schedule": record["schedule"] | {"since_then": 1}},
        lambda record: record | {"schedule": {"path": "sm90"}},
        lambda record: record | {"schedule": "sm90"},
        lambda record: record | {"schedule": {name: [value] for name, value in record["schedule"].items()}},
        lambda record: {"schedule": record["schedule"]},
        lambda record: [record],
        lambda record: None,
    ],
    ids=["another field", "fields missing", "text", "lists", "no reason", "list", "null"],
)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_pick_of_another_form_is_not_taken(problem, damage):
    schedule = planner.candidates(problem, ARCH)[0]
    tuned.keep(problem, DEVICE, Plan(schedule.path, schedule, "timed", tuned=True))
    store, key = cache.store(), tuned._key(problem, DEVICE)
    payload, _ = store.load(key, problem.op, ".tuned")
    store.save(key, problem.op, json.dumps(damage(json.loads(payload))).encode(), {}, ".tuned")
    assert tuned.pick(problem, DEVICE) is None
    assert dispatch.choose(problem, DEVICE) == planner.plan(problem, ARCH)


def test_a_checkout_that_is_not_installed_has_picks_too(monkeypatch):
    def distribution(name):
        if name.replace("_", "-") == "cutlass-sep":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    found = metadata.distribution
    compiler.package_version.cache_clear()
    monkeypatch.setattr(metadata, "distribution", distribution)
    problem = PROBLEMS["2-D"]
    tuned.keep(problem, DEVICE, Plan("torch", None, "timed", tuned=True))
    assert tuned.pick(problem, DEVICE).reason == "timed"
    compiler.package_version.cache_clear()


@pytest.mark.parametrize(
    "error", [subprocess.TimeoutExpired("nvidia-smi", 60), PermissionError("no"), subprocess.CalledProcessError(9, "")]
)
def test_a_driver_that_does_not_say_its_version_has_none(monkeypatch, error):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(toolchain, "Path", lambda _: SimpleNamespace(read_text=lambda: ""))
    monkeypatch.setattr(toolchain.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(toolchain.subprocess, "run", run)
    assert DRIVER_VERSION.__wrapped__() is None


def test_picks_are_cleared_with_the_cache():
    problem = PROBLEMS["2-D"]
    tuned.keep(problem, DEVICE, Plan("torch", None, "timed", tuned=True))
    assert cache.store().contains(".tuned") and cache.store().info()["entries"] == 0
    cache.store().clear()
    assert tuned.pick(problem, DEVICE) is None


def test_contenders_hold_the_pick_and_the_best_of_this_size():
    for problem in PROBLEMS.values():
        found = tuner.contenders(problem, DEVICE)
        assert 2 <= len(found) == len(set(found)) <= tuner.CONTENDERS
        assert found[0] == planner.candidates(problem, ARCH)[0]
        assert set(found[1:]) <= set(planner.rules(problem).for_size(problem, ARCH))
        assert all(planner.rules(problem).check(problem, schedule, ARCH) for schedule in found)


@pytest.fixture
def timed(monkeypatch):
    """Tuning on the host: every schedule is PyTorch's arithmetic, its time is what the test says."""
    times: dict = {}
    errors: dict = {}

    def compiled(problem, schedules, device, advance=lambda: None):
        real = tuner_compiled(problem, [], torch.device("cpu"))
        for schedule in schedules:
            off = errors.get(schedule, 0.0)
            real[schedule] = lambda *tensors, off=off: real[None](*tensors) + off
        return real

    tuner_compiled = tuner.compiled
    monkeypatch.setattr(tuner, "compiled", compiled)
    monkeypatch.setattr(
        timing, "interleaved",
        lambda candidates, **_: {name: timing.Times((times.get(name, 9.0),)) for name in candidates},
    )  # fmt: skip
    real_sets = tuner.inputs.input_sets
    monkeypatch.setattr(
        tuner.inputs, "input_sets", lambda problem, sets, device: real_sets(problem, 2, torch.device("cpu"))
    )
    return times, errors


def test_the_fastest_right_candidate_wins_and_later_calls_take_it(timed, caplog):
    times, errors = timed
    problem = PROBLEMS["2-D"]
    wrong, best, slow, *_ = tuner.contenders(problem, DEVICE)
    times |= {wrong: 0.1, best: 0.2, slow: 0.4, None: 0.3}
    errors[wrong] = 1.0
    result = tuner.choose(problem, tuner.compiled(problem, [wrong, best, slow], DEVICE), DEVICE)
    assert [(t.schedule, t.median_ms) for t in result.trials] == [(best, 0.2), (None, 0.3), (slow, 0.4)]
    assert [t.path for t in result.trials][1] == "torch"
    assert result.pick.schedule == best and "Host" in result.pick.reason and "torch 300.0" in result.pick.reason
    assert dispatch.choose(problem, DEVICE) == result.pick
    assert "its values are wrong" in caplog.text
    assert result.trials[1].to_json() == {"path": "torch", "schedule": None, "median_ms": 0.3}


def test_tuning_forgets_what_calls_were_planned_to_run(timed, monkeypatch):
    problem = PROBLEMS["2-D"]
    dispatch._launchers["a call"] = lambda *_: None
    tuner.choose(problem, tuner.compiled(problem, tuner.contenders(problem, DEVICE)[:1], DEVICE), DEVICE)
    assert not dispatch._launchers


def test_a_schedule_that_does_not_compile_is_left_out(monkeypatch, caplog):
    class Kernel:
        def load(self, device):
            raise CompileError("no such luck", arch=ARCH, nvrtc="13.0", options=(), log="", source_path=None)

    monkeypatch.setattr(tuner, "kernel_for", lambda *_: Kernel())
    problem = PROBLEMS["2-D"]
    steps = []
    found = tuner.compiled(problem, tuner.contenders(problem, DEVICE)[:2], DEVICE, lambda: steps.append(1))
    assert list(found) == [None] and len(steps) == 2 and "no such luck" in caplog.text


def test_nothing_is_timed_for_a_pick_that_would_not_be_kept(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tuner, "problem_of_call", lambda *_: (PROBLEMS["2-D"], DEVICE))
    monkeypatch.setattr(tuner, "compiled", lambda *_: pytest.fail("compiled"))
    with pytest.raises(EnvironmentProblem, match="tune cannot keep its pick: .*CUTLASS_SEP_CACHE_DIR"):
        cutlass_sep.tune(cutlass_sep.functional.depthwise_separable_conv2d)


def test_what_cannot_be_tuned_is_refused():
    x, dw, pw = torch.randn(1, 4, 8, 8), torch.randn(4, 1, 3, 3), torch.randn(4, 4, 1, 1)
    f = cutlass_sep.functional.depthwise_separable_conv2d
    with pytest.raises(RuntimeError, match="x must be on a CUDA device to be tuned for it, got cpu"):
        cutlass_sep.tune(f, x, dw, pw)
    with pytest.raises(TypeError, match="f must be a function, module or op"):
        cutlass_sep.tune(print, x)
    with pytest.raises(TypeError, match="an op keeps its schedule"):
        cutlass_sep.tune(cutlass_sep.op.DepthwiseSeparableConv2d(x, dw, pw))
    module = cutlass_sep.DepthwiseSeparableConv2d(4, 4, 3)
    module.depthwise.register_forward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="nothing to tune"):
        cutlass_sep.tune(module, x)
