"""The command line: exit status, what goes to stdout, and one clear sentence for each wrong use."""

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

import cutlass_sep
from cutlass_sep import cli, commands, compiler, errors, functional, op, planner, toolchain, tuned
from cutlass_sep.bench import inputs, results, session

SMALL = ["--shape", "2,8,12,12", "--out-channels", "16"]
#: The same where the test counts on a kernel of a known path, whatever the planner would rather do.
SMALL_SM90 = [*SMALL, "--path", "sm90"]
SMALL_BLOCK = ["--op", "sepblock1d", "--shape", "2,8,24", "--expanded", "16"]
GPU = torch.cuda.is_available()
LAYERS = str(Path(__file__).parents[1] / "benchmarks" / "layers.jsonl")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTLASS_SEP_ARCH", raising=False)
    compiler._memory.clear()  # each command line is a process of its own


@pytest.fixture
def run(capsys):
    """run(*arguments) -> (exit status, stdout, stderr)."""

    def call(*arguments):
        status = cli.main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run):
    def call(*arguments):
        status, out, _ = run(*arguments, "--json")
        return status, json.loads(out)

    return call


# --- what works anywhere


@pytest.mark.parametrize(
    ("arguments", "stage"),
    [
        (["--dtype", "float16", "--layout", "channels_last"], "path sm90, depthwise on tensor cores for sm_90a"),
        (["--dtype", "float32"], "path sm90, depthwise by FMA for sm_90a"),
        (
            ["--dtype", "float16", "--kernel", "13", "--padding", "6"],
            "path sm90, depthwise on tensor cores in a kernel of its own for sm_90a",
        ),
        (["--dtype", "float16", "--layout", "channels_last", "--path", "portable"], "portable, depthwise by FMA"),
    ],
)
def test_what_makes_the_depthwise_outputs_is_said(run, tmp_path, arguments, stage):
    shape = ["--shape", "2,64,32,32", "--out-channels", "128", "--kernel", "3", "--padding", "1", "--arch", "sm_90a"]
    status, out, _ = run("emit", *shape, *arguments, "--output", str(tmp_path / "kernel.cu"))
    assert status == 0 and stage in out


@pytest.mark.parametrize(
    ("precision", "stage"), [("tf32", "fused, depthwise on tensor cores"), ("ieee", "fused, depthwise by FMA")]
)
def test_what_makes_a_fused_blocks_depthwise_outputs_is_said(run, tmp_path, precision, stage):
    asked = ["emit", *SMALL_BLOCK, "--form", "fused", "--fp32-precision", precision, "--arch", "sm_90a"]
    status, out, _ = run(*asked, "--output", str(tmp_path / "kernel.cu"))
    assert status == 0 and stage in out


def test_emit_prints_the_source_and_nothing_else(run):
    status, out, err = run("emit", *SMALL)
    expected = op.DepthwiseSeparableConv2d(
        *inputs.tensors(commands._op(cli.parser().parse_args(["emit", *SMALL])).problem, "meta"), padding=1
    ).source
    assert status == 0
    assert out == expected
    assert 'extern "C" __global__' in out


def test_emit_to_a_file_and_as_json(run, run_json, tmp_path):
    path = tmp_path / "kernel.cu"
    status, out, _ = run("emit", *SMALL_SM90, "--output", str(path))
    lines = path.read_text().count("\n")
    assert (status, out) == (0, f"wrote {path}: {lines} lines of CUDA C++, path sm90, depthwise by FMA for sm_90a\n")
    status, data = run_json("emit", *SMALL_SM90)
    assert status == 0
    assert data["source"] == path.read_text()
    assert (data["arch"], data["problem"]["c"], data["problem"]["kernel"]) == ("sm_90a", 8, [3, 3])
    assert data["gpu"] is None or GPU


@pytest.mark.parametrize("problem", ["dwsep2d", "sepblock1d"])
def test_emit_hands_the_op_and_the_folder_to_the_emission(problem, run_json, monkeypatch, tmp_path):
    written = []
    fake = types.ModuleType("cutlass_sep.emit")
    fake.pytorch = lambda *arguments: written.append(arguments)
    monkeypatch.setitem(sys.modules, "cutlass_sep.emit", fake)
    monkeypatch.setattr(cutlass_sep, "emit", fake, raising=False)
    arguments = {"dwsep2d": SMALL, "sepblock1d": SMALL_BLOCK}[problem]
    status, data = run_json("emit", *arguments, "--project", str(tmp_path / "there"))
    assert status == 0 and data["project"] == str(tmp_path / "there") and "source" not in data
    ((built, name, folder),) = written
    assert built.problem.to_json() == data["problem"] and folder == tmp_path / "there"
    assert name == {"dwsep2d": "separable_conv2d", "sepblock1d": "separable_conv_block1d"}[problem]


def test_emit_refuses_a_folder_of_other_files(run, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    where = ["--project", str(tmp_path / "there"), "--output", str(tmp_path / "kernel.cu")]
    status, out, err = run("emit", *SMALL, *where)
    assert (status, out) == (2, "")
    assert err == (
        f"--project: {tmp_path / 'there'} has files that are not an earlier project separable_conv2d; give a new or an "
        "empty folder, or remove them\n"
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "notes.txt"]


def test_problem_arguments_reach_the_problem(run_json):
    status, data = run_json(
        "emit", "--shape", "2,8,12,16", "--out-channels", "5", "--kernel", "3,5", "--stride", "2,1", "--padding", "1,2",
        "--dilation", "1,2", "--bias", "--dtype", "bfloat16", "--layout", "channels_last", "--mid-activation", "relu6",
        "--activation", "gelu_tanh", "--arch", "sm_90a",
    )  # fmt: skip
    assert status == 0, data
    expected = {
        "n": 2, "c": 8, "h": 12, "w": 16, "o": 5, "kernel": [3, 5], "stride": [2, 1], "padding": [1, 1, 2, 2],
        "dilation": [1, 2], "dw_bias": True, "pw_bias": True, "dtype": "bfloat16", "layout": "channels_last",
        "mid_activation": "relu6", "activation": "gelu_tanh", "fp32_precision": None,
    }  # fmt: skip
    assert {name: data["problem"][name] for name in expected} == expected
    status, data = run_json("emit", *SMALL, "--kernel", "4", "--padding", "same", "--fp32-precision", "tf32")
    assert (status, data["problem"]["padding"], data["problem"]["fp32_precision"]) == (0, [1, 2, 1, 2], "tf32")


def test_problem_arguments_reach_the_problem_of_the_block(run_json):
    status, data = run_json("emit", *SMALL_BLOCK)
    assert status == 0, data
    expected = {
        "n": 2, "c": 8, "l": 24, "e": 16, "o": 8, "kernel": 9, "dilation": 1, "dtype": "float32",
        "layout": "contiguous", "expand_bias": True, "dw_bias": True, "project_bias": True, "activation": "gelu",
        "residual": True, "fp32_precision": "ieee", "alignment": 16,
    }  # fmt: skip
    assert data["problem"] == expected and data["form"] in ("fused", "two_kernel")
    assert 'extern "C" __global__' in data["source"] and data["schedule"]["form"] == data["form"]
    status, data = run_json(
        "emit", "--op", "sepblock1d", "--shape", "2,8,24", "--kernel", "4", "--dilation", "3", "--no-bias", "--dtype",
        "float16", "--layout", "channels_last", "--activation", "none", "--form", "two_kernel", "--path", "portable",
    )  # fmt: skip
    changed = {
        "kernel": 4, "dilation": 3, "dtype": "float16", "layout": "channels_last", "expand_bias": False,
        "dw_bias": False, "project_bias": False, "activation": None, "fp32_precision": None,
    }  # fmt: skip
    assert status == 0 and data["problem"] == expected | changed
    assert (data["path"], data["form"]) == ("portable", "two_kernel")


def test_the_block_is_of_its_lead_shape_unless_told_otherwise():
    assert commands._op(cli.parser().parse_args(["demo", "--op", "sepblock1d"])).problem == inputs.lead1d().problem


def test_compile_says_what_a_block_of_each_kernel_takes(run):
    """The kernel that mends fp16 takes no dynamic shared memory, the depthwise one before it most of what there is."""
    shape = ["--shape", "8,64,56,56", "--out-channels", "64", "--kernel", "13", "--padding", "6", "--arch", "sm_90a"]
    status, out, _ = run("compile", *shape, "--dtype", "float16", "--layout", "channels_last")
    assert status == 0
    found = dict(re.findall(r"a block of kernel (\w+) has \d+ threads, (\d+) bytes of shared memory", out))
    assert list(found) == ["pack_planes", "depthwise", "pointwise", "mend_outputs"]
    assert int(found["depthwise"]) > 50_000 and found["pack_planes"] == found["mend_outputs"] == "0"


def test_compile_of_a_block_reports_every_kernel(run, run_json):
    status, data = run_json("compile", *SMALL_BLOCK, "--form", "two_kernel")
    assert status == 0, data
    assert {"expand", "project"} < set(data["compile"]["resources"])
    assert data["compile"]["threads"] > 0 and data["compile"]["shared_bytes"] > 0
    status, out, _ = run("compile", *SMALL_BLOCK, "--form", "two_kernel")
    assert status == 0 and "form two_kernel" in out and "[2,8,24] -> 16 -> 8 channels, k 9" in out
    assert run_json("cache", "warm", *SMALL_BLOCK, "--form", "two_kernel")[1]["kernels"] == [
        {"name": f"sepblock1d-two_kernel-{data['path']}-float32-ncl-c8-e16-o8-k9", "key": data["compile"]["key"],
         "cache_hit": True}
    ]  # fmt: skip


def test_compile_reports_resources_and_then_hits_the_cache(run, run_json, tmp_path):
    path = tmp_path / "kernel.cubin"
    status, first = run_json("compile", *SMALL, "--output", str(path))
    assert status == 0
    used = first["compile"]["resources"]
    assert used and all(kernel["registers"] > 0 and kernel["spill_bytes"] == 0 for kernel in used.values())
    assert path.read_bytes()[:4] == b"\x7fELF" and len(path.read_bytes()) == first["compile"]["cubin_bytes"]
    assert not first["compile"]["cache_hit"]
    compiler._memory.clear()
    status, second = run_json("compile", *SMALL)
    assert status == 0 and second["compile"]["cache_hit"]
    assert second["compile"]["key"] == first["compile"]["key"]
    status, out, err = run("compile", *SMALL)
    assert status == 0 and "registers" in out and "compiling" in err


@pytest.mark.skipif(GPU, reason="asserts what happens without a GPU")
def test_demo_without_a_gpu_says_so_and_succeeds(run, run_json):
    status, data = run_json("demo", *SMALL)
    assert status == 0
    assert data["gpu"] is None and data["verify"] is None and data["rows"] is None
    assert data["arch"] == "sm_90a" and data["compile"]["resources"]
    status, out, _ = run("demo", *SMALL)
    assert status == 0 and "no GPU" in out and "CUDA C++" in out


def test_demo_is_of_the_lead_shape_unless_told_otherwise():
    assert commands._op(cli.parser().parse_args(["demo"])).problem == inputs.lead().problem


def test_cache_commands(run_json, tmp_path):
    status, empty = run_json("cache", "info")
    assert (status, empty["entries"], empty["path"]) == (0, 0, str(tmp_path / "cache"))
    status, warmed = run_json("cache", "warm", *SMALL_SM90)
    assert status == 0 and len(warmed["kernels"]) == 1 and not warmed["kernels"][0]["cache_hit"]
    status, listed = run_json("cache", "list")
    assert status == 0 and [entry["key"] for entry in listed["entries"]] == [warmed["kernels"][0]["key"]]
    status, cleared = run_json("cache", "clear")
    assert (status, cleared["removed"]["entries"]) == (0, 1)
    assert run_json("cache", "list")[1]["entries"] == []


def test_a_cache_that_keeps_nothing_is_said(run, run_json, monkeypatch):
    # Root may write there by its permissions alone.
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", "/proc/x")
    monkeypatch.setattr(commands.kernels, "make", lambda *args: pytest.fail("compiled"))
    reason = "nothing can be made in /proc: No such file or directory"
    status, data = run_json("cache", "info")
    assert (status, data["usable"], data["reason"]) == (0, False, reason)
    assert reason in run("cache", "info")[1]
    status, out, err = run("cache", "warm", *SMALL)
    assert (status, out) == (3, "") and reason in err and "CUTLASS_SEP_CACHE_DIR" in err
    status, data = run_json("cache", "warm", *SMALL)
    assert (status, data["error"]) == (3, "EnvironmentProblem")
    status, out, _ = run("doctor")
    assert status == 0 and reason in out and "remedy: set CUTLASS_SEP_CACHE_DIR" in out


def test_cache_warm_fails_if_the_disk_fills_up_meanwhile(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    status, out, err = run("cache", "warm", *SMALL_SM90)
    assert (status, out) == (3, "") and "No space left on device" in err


def test_one_of_a_thing_has_no_plural(run):
    said = "1 kernel for sm_90a: 1 built, 0 there before; 0 problems on path torch"
    assert said in run("cache", "warm", *SMALL_SM90)[1]
    assert "0 built, 1 there before" in run("cache", "warm", *SMALL_SM90)[1]
    assert run("cache", "list")[1].split("\n")[0].rstrip() == "1 kernel"
    assert "/cache, 1 kernel, " in run("doctor")[1]
    assert run("cache", "clear")[1].startswith("removed 2 kernels, "), "doctor's is there too"
    assert run("cache", "clear")[1] == "removed 0 kernels, 0 bytes\n"


def layer(**fields) -> dict:
    extents = {"batch": 1, "cin": 8, "cout": 8, "h": 8, "w": 8, "kernel": 3, "stride": 1, "padding": 1, "dilation": 1}
    names = ("bias", "pw_bias", "mid_norm", "out_norm", "mid_activation", "out_activation", "se", "residual")
    named = {"id": "a", "op": "dwsep2d", **dict.fromkeys(names), "mid_norm": "BN", "mid_activation": "ReLU"}
    return {**extents, **named, **fields}


def test_cache_warm_takes_a_file_of_layers(run_json, tmp_path):
    path = tmp_path / "layers.jsonl"
    path.write_text("\n\n".join(json.dumps(layer(id=name, batch=n)) for n, name in enumerate("abc", 1)) + "\n")
    status, data = run_json("cache", "warm", "--layers", str(path))
    assert status == 0
    assert len(data["kernels"]) == 3 and len({kernel["key"] for kernel in data["kernels"]}) == 1, (
        "the batch is no constant"
    )


@pytest.mark.parametrize(
    "fields",
    [{"cin": -1}, {"h": 0}, {"stride": 0}, {"kernel": 0}, {"kernel": 99}, {"cin": None}, {"cin": "8"}, {"cin": 8.5},
     {"padding": "same"}, {"cout": 10**30}, {"h": 2**31, "w": 2**31}, {"mid_activation": "Mish"}, None],
    ids=str,
)  # fmt: skip
def test_a_file_with_a_line_that_is_no_layer_is_wrong_usage(run_json, tmp_path, fields):
    path = tmp_path / "layers.jsonl"
    lines = [layer(), [1] if fields is None else layer(**fields)]
    path.write_text("\n".join(map(json.dumps, lines)))
    status, data = run_json("cache", "warm", "--layers", str(path))
    assert (status, data["error"]) == (2, "UsageError")
    assert f"{path} is no file of layers: line 2" in data["message"]


def test_doctor(run, run_json, monkeypatch):
    status, data = run_json("doctor")
    assert status == 0 and data["ok"]
    names = {check["name"] for check in data["checks"]}
    assert {"python", "torch", "gpu", "templates", "nvrtc", "headers", "cache", "compile"} <= names

    def missing():
        raise errors.EnvironmentProblem("no headers here")

    monkeypatch.setattr(toolchain, "include_paths", missing)
    status, out, _ = run("doctor")
    assert status == 3 and "MISSING" in out and "no headers here" in out and "remedy" in out


def test_doctor_reports_a_wrong_architecture(run_json, monkeypatch):
    monkeypatch.setenv("CUTLASS_SEP_ARCH", "sm_42")
    status, data = run_json("doctor")
    (check,) = (check for check in data["checks"] if check["name"] == "compile")
    assert status == 3 and not check["ok"] and "sm_42" in check["detail"]


def test_digest(run, run_json, tmp_path, monkeypatch):
    where = dict.fromkeys(("gpu", "driver", "torch", "cudnn", "nvrtc", "cutlass", "date"), "x")
    path = tmp_path / "gpu.json"
    results.save(path, {"schema": 1, "digest": "", "environment": where, "ceilings": {}, "rows": []})
    status, out, _ = run("digest", str(path))
    assert status == 0 and json.loads(path.read_text())["digest"] in out and "current" in out
    data = {**json.loads(path.read_text()), "digest": "0" * 64}
    path.write_text(json.dumps(data))
    status, report = run_json("digest", str(path))
    assert status == 1 and report["files"][0]["recorded"] != report["files"][0]["now"]
    path.write_text(json.dumps({**data, "stale": "kernels changed"}))
    status, out, _ = run("digest", str(path))
    assert status == 0 and "stale: kernels changed" in out
    row = {"impl": "cutlass_sep"}
    for wrong in ([], {"rows": 3}, {"rows": []}, {"rows": [row]}, {"problems": [1]}, {"problems": [{"problem": {}}]}):
        path.write_text(json.dumps(wrong))
        status, report = run_json("digest", str(path))
        assert status == 2 and f"{path} is no results file" in report["message"]
    assert run("digest", str(tmp_path / "absent.json"))[0] == 2


# --- what needs a GPU


@pytest.mark.skipif(GPU, reason="asserts what happens without a GPU")
@pytest.mark.parametrize("command", ["verify", "bench"])
def test_without_a_gpu_running_commands_exit_3(run, run_json, command):
    status, out, err = run(command, *SMALL)
    assert status == 3 and out == "" and "needs an NVIDIA GPU" in err
    status, data = run_json(command, *SMALL)
    assert (status, data["error"]) == (3, "EnvironmentProblem")


@pytest.fixture
def gpu_of_name(monkeypatch):
    """A GPU as far as plans ask for one: its name and compute capability, 9.0."""
    monkeypatch.setattr(commands, "_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Host")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(toolchain, "driver_version", lambda: "580.1")
    tuned._environment.cache_clear()
    yield torch.device("cuda", 0)
    tuned._environment.cache_clear()


def test_kernels_are_those_that_tune_found(gpu_of_name, run, run_json, tmp_path):
    problem = commands._op(cli.parser().parse_args(["emit", *SMALL])).problem
    planned = run_json("cache", "warm", *SMALL)[1]["kernels"]
    schedule = planner.candidates(problem, "sm_90a", "portable")[0]
    pick = planner.Plan("portable", schedule, "tuned on Host", tuned=True)
    tuned.keep(problem, gpu_of_name, pick)
    status, data = run_json("compile", *SMALL)
    found = (data["path"], data["schedule"], data["reason"])
    assert (status, found) == (0, ("portable", schedule.to_json(), "tuned on Host"))
    layers = tmp_path / "layers.jsonl"
    layers.write_text(json.dumps(layer(batch=2, cout=16, h=12, w=12, mid_activation=None, mid_norm=None)))
    for problems in (SMALL, ["--layers", str(layers)]):
        (warmed,) = run_json("cache", "warm", *problems)[1]["kernels"]
        assert warmed["key"] == data["compile"]["key"] != planned[0]["key"]
    # Not for another GPU, nor against what is asked for.
    for other in (["--arch", "sm_80"], ["--path", "sm90"]):
        assert run_json("emit", *SMALL, *other)[1]["reason"] != "tuned on Host"
    # An op is there to emit a kernel; what a call would run is PyTorch's.
    tuned.keep(problem, gpu_of_name, planner.Plan("torch", None, "tuned to torch", tuned=True))
    assert run_json("emit", *SMALL)[1]["path"] in ("sm90", "portable")
    assert run_json("cache", "warm", *SMALL)[1]["skipped"] == [
        {"problem": problem.to_json(), "reason": "tuned to torch"}
    ]


def test_a_gpu_of_another_kind_is_an_environment_that_lacks_something(gpu_of_name, run):
    status, out, err = run("verify", *SMALL, "--arch", "sm_120a")
    assert (status, out) == (3, "")
    assert err == "verify runs kernels; Host loads none for sm_120a (--arch, CUTLASS_SEP_ARCH)\n"


def test_verify_of_a_block(run_json, monkeypatch):
    monkeypatch.setattr(commands, "_require_device", lambda *_: torch.device("cpu"))
    block = op.SeparableConvBlock1d
    monkeypatch.setattr(block, "run", lambda self, *t, out: out.copy_(functional.separable_conv_block1d(*t)))
    for layout in ("contiguous", "channels_last"):
        status, data = run_json("verify", *SMALL_BLOCK, "--layout", layout)
        assert status == 0 and data["verify"]["ok"]
    monkeypatch.setattr(block, "run", lambda self, x, *t, out: out.copy_(functional.separable_conv_block1d(x, *t) - x))
    status, data = run_json("verify", *SMALL_BLOCK)
    assert status == 1 and not data["verify"]["ok"], "the residual is missing"


def test_verify_fails_on_wrong_and_on_unwritten_values(run, run_json, monkeypatch):
    monkeypatch.setattr(commands, "_require_device", lambda *_: torch.device("cpu"))

    def right(self, *tensors, out):
        return out.copy_(functional.depthwise_separable_conv2d(*tensors, padding=1))

    monkeypatch.setattr(op.DepthwiseSeparableConv2d, "run", right)
    status, data = run_json("verify", *SMALL, "--seed", "5")
    assert status == 0 and data["verify"]["ok"] and data["seed"] == 5
    assert run_json("verify", *SMALL, "--seed", "5")[1]["verify"] == data["verify"], "a seed repeats the data"
    assert run_json("verify", *SMALL)[1]["verify"]["rel_error"] != data["verify"]["rel_error"], "else it is fresh"

    monkeypatch.setattr(op.DepthwiseSeparableConv2d, "run", lambda self, *t, out: out)
    status, out, _ = run("verify", *SMALL)
    assert status == 1 and "WRONG" in out
    monkeypatch.setattr(op.DepthwiseSeparableConv2d, "run", lambda self, *t, out: out.zero_())
    status, data = run_json("verify", *SMALL)
    assert status == 1 and not data["verify"]["ok"] and data["verify"]["rel_error"] == 1.0


@pytest.mark.parametrize(("ok", "expected"), [(True, 0), (False, 1)])
def test_bench_exit_status_and_request(run_json, monkeypatch, tmp_path, ok, expected):
    asked = []

    class Finished:
        def __init__(self):
            self.ok = ok

        def to_json(self):
            return {"ok": ok}

    def fake(request, device, output):
        asked.append(request)
        return Finished()

    monkeypatch.setattr(commands, "_require_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(session, "run", fake)
    path = str(tmp_path / "out.json")
    status, _ = run_json("bench", "--suite", "lead", "--rows", "1:3", "--peers", "eager", "--append", "--output", path)
    assert status == expected
    (request,) = asked
    assert [case.problem.dtype for case in request.cases] == [dtype for dtype, _ in session.LEAD_VARIANTS[1:3]]
    assert all(case.id == "lead2d" for case in request.cases)
    assert request.peers == ("eager",) and request.append and str(request.output) == path
    run_json("bench", "--suite", "lead", "--dtype", "float32", "--fp32-precision", "tf32")
    assert [case.id for case in asked[-1].cases] == ["lead2d", "lead1d"]
    for suite in ("lead2d", "lead1d"):
        run_json("bench", "--suite", suite, "--dtype", "float32", "--fp32-precision", "tf32")
        (case,) = asked[-1].cases
        assert (case.id, case.problem.dtype, case.problem.fp32_precision) == (suite, "float32", "tf32")
        assert asked[-1].forms == (None,) and asked[-1].layouts == ("contiguous", "channels_last")
    run_json("bench", *SMALL)
    (case,) = asked[-1].cases
    assert (case.id, case.problem.c, case.problem.o) == ("custom", 8, 16)


def test_bench_of_blocks_asks_for_forms(run_json, monkeypatch):
    asked = []
    fake = types.SimpleNamespace(ok=True, to_json=lambda: {})
    monkeypatch.setattr(commands, "_require_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(session, "run", lambda request, device, output: asked.append(request) or fake)
    assert run_json("bench", *SMALL_BLOCK, "--form", "two_kernel")[0] == 0
    (case,) = asked[-1].cases
    assert (case.id, case.problem.op, asked[-1].forms) == ("custom", "sepblock1d", ("two_kernel",))
    assert run_json("bench", "--suite", "sweep1d")[0] == 0
    assert asked[-1].forms == (None, "fused", "two_kernel") and asked[-1].layouts == ("contiguous",)
    problems = {case.id: case.problem for case in asked[-1].cases}
    assert len(problems) == len(asked[-1].cases) == 42 and {p.dtype for p in problems.values()} == {"bfloat16"}
    assert {p.n * p.l for p in problems.values()} == {131072} and {p.o / p.c for p in problems.values()} == {1}
    assert {p.l for p in problems.values()} == {2**i for i in range(6, 18)}
    assert {p.kernel for p in problems.values()} == {3, 9, 31} and {p.c for p in problems.values()} == {
        64,
        128,
        256,
        512,
    }
    assert {p.e / p.c for p in problems.values()} == {1, 2, 4, 6}
    assert problems["sweep1d.n32.c256.e512.l4096.k9"] == inputs.lead1d("bfloat16").problem
    assert run_json("bench", "--suite", "lead", "--form", "fused")[0] == 0
    assert {case.id for case in asked[-1].cases} == {"lead1d"} and asked[-1].forms == ("fused",)
    for suite in (["--suite", "sweep1d"], SMALL_BLOCK):
        assert run_json("bench", *suite, "--layout", "channels_last")[0] == 0
        assert asked[-1].layouts == ("channels_last",)


def test_bench_of_layers_narrows_what_takes_long(run_json, monkeypatch, tmp_path):
    asked = []
    fake = types.SimpleNamespace(ok=True, to_json=lambda: {})
    monkeypatch.setattr(commands, "_require_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(session, "run", lambda request, device, output: asked.append(request) or fake)
    layers = ["bench", "--suite", LAYERS]
    narrowed = ["--dtype", "bfloat16", "--layout", "channels_last", "--batch", "1", "--rows", ":3"]
    output = ["--output", str(tmp_path / "out.json"), "--resume"]
    assert run_json(*layers, *narrowed, "--tune", "--timing", "cuda_graph", "--peer-seconds", "90", *output)[0] == 0
    (request,) = asked
    assert request.peer_seconds == 90
    assert {(case.problem.n, case.problem.dtype) for case in request.cases} == {(1, "bfloat16")}
    assert (request.layouts, request.compiled_layouts) == (("channels_last",), ("channels_last",))
    assert (request.tune, request.resume, request.append) == (True, True, True) and len(request.cases) == 3
    assert run_json(*layers)[0] == 0
    assert (asked[-1].layouts, asked[-1].tune, asked[-1].resume) == (("contiguous", "channels_last"), False, False)
    assert asked[-1].peer_seconds == session.Request(()).peer_seconds
    assert {case.problem.n for case in asked[-1].cases} >= {1, 8, 16, 32}
    for suite in (["--suite", "lead"], SMALL):
        status, data = run_json("bench", *suite, "--batch", "1")
        assert status == 2 and "--batch is for a file of layers" in data["message"]
    for asked in (["--path", "portable"], ["--form", "fused"]):
        status, data = run_json(*layers, "--tune", *asked)
        assert status == 2 and "--tune finds the path and form" in data["message"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path / "file"))
    status, data = run_json(*layers, "--tune")
    assert status == 3 and "--tune cannot keep its picks" in data["message"]


def test_bench_refuses_a_file_for_results_before_it_measures(run_json, monkeypatch, tmp_path):
    monkeypatch.setattr(commands, "_require_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(session, "run", lambda *args: pytest.fail("measured"))
    other = tmp_path / "notes.json"
    other.write_text("{}")
    for arguments in (
        ["--append"],
        ["--resume"],
        ["--output", str(other), "--resume"],
        ["--output", str(tmp_path)],
        ["--output", str(other / "out.json")],
        ["--output", str(other), "--append"],
    ):
        status, data = run_json("bench", *SMALL, *arguments)
        assert status == 2 and "--output" in data["message"]
    assert other.read_text() == "{}"
    # Results replace the file as a whole, which must not happen to a pipe or a device.
    os.mkfifo(pipe := tmp_path / "pipe")
    status, data = run_json("bench", *SMALL, "--output", str(pipe))
    assert (status, data["message"]) == (2, f"--output: {pipe} is no regular file") and pipe.is_fifo()


# --- wrong usage


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["frobnicate"], "frobnicate"),
        ([], "COMMAND"),
        (["emit", "--padding", "-1"], "--padding"),
        (
            ["emit", "--shape", "1,8,3,3", "--kernel", "5", "--padding", "0"],
            "--shape 1,8,3,3 --kernel 5 --padding 0 --dilation 1: the kernel's height (5 pixels: 5 taps, dilation 1) "
            "exceeds the padded height of x (3 + 0)",
        ),
        (["emit", *SMALL, "--dilation", "9"], "--shape 2,8,12,12 --kernel 3 --padding 1 --dilation 9: the kernel's"),
        (["emit", *SMALL, "--stride", "2", "--padding", "same"], "--stride 2 --padding same: padding='same' is not"),
        (
            ["emit", *SMALL, "--padding", f"{2**28}"],
            f"--shape 2,8,12,12 --out-channels 16 --kernel 3 --padding {2**28}",
        ),
        (
            ["emit", "--shape", f"1,{2**28},8,8", "--out-channels", "512"],
            f"--shape 1,{2**28},8,8 --out-channels 512: path sm90 cannot run it",
        ),
        (
            ["emit", "--shape", "1,8,9,9", "--path", "sm90"],
            "--shape 1,8,9,9 --dtype float32 --layout contiguous --path sm90",
        ),
        (
            ["emit", "--op", "sepblock1d", "--shape", "2,12,16", "--form", "fused"],
            "--form fused: path sm90: rows of fp16 that TMA copies are 16 bytes: C = 12 is no multiple of 8; pad",
        ),
        (
            ["emit", *SMALL_BLOCK, "--form", "fused", "--dtype", "float16", "--kernel", "99"],
            "--kernel 99 --dilation 1 --form fused: path sm90: a halo of 98 positions",
        ),
        (
            ["emit", "--op", "sepblock1d", "--form", "fused", "--dtype", "float16", "--kernel", "31"],
            "--shape 32,256,4096 --kernel 31 --dilation 1 --form fused: path sm90: x, the weights and the hidden "
            "channels of a tile do not fit",
        ),
        (
            ["compile", *SMALL, "--arch", "sm_80", "--path", "sm90"],
            "--path sm90 --arch sm_80: path sm90: path sm90 needs",
        ),
        (["cache", "warm", "--layers", "/nonexistent.jsonl"], "--layers: /nonexistent.jsonl is no file of layers"),
        (["bench", "--rows", "3"], "--rows"),
        (
            ["bench", "--suite", "nosuch"],
            "--suite: nosuch is no file of layers: [Errno 2] No such file or directory: 'nosuch'; it must be one, or "
            "lead, lead2d, lead1d or sweep1d",
        ),
        (["bench", "--suite", "/dev/null"], "--suite: /dev/null has no layer that these operators run; it must be one"),
        (["bench", "--suite", "lead", "--rows", "8:"], "--rows leaves none of 8 cases"),
        (["bench", "--rows", "1:"], "--rows leaves none of 1 case"),
        (
            ["bench", "--suite", "lead", "--kernel", "5", "--no-bias"],
            "--kernel, --bias would say what one problem is; --suite lead has its own",
        ),
        (
            ["bench", "--suite", "lead2d", "--form", "fused"],
            "--form fused is of the block, and --suite lead2d has none",
        ),
        (["bench", "--arch", "sm_80"], "--arch sm_80 is no argument of bench"),
        (["bench", "--tune", "--path", "sm90"], "--tune finds the path and form"),
        (["bench", "--append"], "--append needs --output"),
        (["bench", "--output", "/"], "--output: [Errno 21]"),
        (
            ["cache", "warm", "--layers", LAYERS, "--op", "sepblock1d"],
            "--op would say what one problem is; --layers has",
        ),
        (
            ["cache", "warm", "--layers", LAYERS, "--form", "fused"],
            "--form fused: layer quartznet.k33.c256_256.shape: path sm90: a halo of 32 positions makes windows of",
        ),
        (["verify", "--seed", "-1"], f"argument --seed: '-1' must be an integer from 0 to {2**63 - 1}"),
        (["bench", "--samples", "0"], "--samples"),
        (["bench", "--peer-seconds", "0"], "--peer-seconds"),
        (
            ["emit", "--shape", f"1,32,{2**28},{2**28}"],
            f"--shape 1,32,{2**28},{2**28} --out-channels 128 --kernel 3: S",
        ),
        (["emit", "--op", "sepblock1d", "--shape", "1,2,3,4"], "--shape must be N,C,L"),
        (["emit", "--shape", "1,2,3"], "--shape must be N,C,H,W"),
        (["emit", *SMALL_BLOCK, "--kernel", "3,3"], "--kernel"),
        # Shortened options are none: --js would print an object among other text.
        (["emit", "--js"], "--js"),
        (["emit", *SMALL, "--output", "/nonexistent/a.cu"], "--output: [Errno 2]"),
        (["emit", *SMALL, "--output", "/"], "--output: [Errno 21]"),
        (["emit", *SMALL, "--project", "/dev/null/project"], "--project: [Errno 20]"),
        (["compile", *SMALL, "--path", "portable", "--output", "/nonexistent/a.cubin"], "--output: [Errno 2]"),
    ],
)
def test_wrong_usage_exits_2_and_names_what(run, run_json, monkeypatch, arguments, named):
    monkeypatch.setattr("cutlass_sep.kernel.build", lambda *_, **__: pytest.fail("compiled"))
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert named in err
    status, data = run_json(*arguments)
    assert status == 2 and named in data["message"]


@pytest.mark.parametrize(
    ("arguments", "most"),
    [(["--kernel", "31"], 25), (["--kernel", "99", "--shape", "1,64,512"], 49),
     (["--kernel", "9", "--dilation", "12", "--shape", "1,64,512", "--path", "sm90"], 5)],
    ids=["shared_memory", "window", "dilated"],
)  # fmt: skip
def test_a_kernel_too_large_for_the_fused_form_is_told_what_fits(run, arguments, most):
    asked = ["emit", "--op", "sepblock1d", "--form", "fused", "--dtype", "float16", *arguments]
    status, _, err = run(*asked)
    assert status == 2 and err.endswith(f"; with the other values as they are, --kernel of up to {most} fits\n")
    assert [run(*asked, "--kernel", str(kernel))[0] for kernel in (most, most + 1)] == [0, 2]


@pytest.mark.parametrize("refused", [["--shape", "1,512,64"], ["--arch", "sm_80"], ["--path", "portable"]], ids=str)
def test_no_kernel_is_told_where_none_fits(run, refused):
    status, _, err = run("emit", "--op", "sepblock1d", "--form", "fused", "--dtype", "float16", *refused)
    assert status == 2 and "fits" not in err


@pytest.mark.parametrize(
    "command", [["emit"], ["bench"], ["bench", "--suite", "lead"], ["cache", "warm", "--layers", LAYERS]]
)
def test_a_precision_of_another_dtype_is_wrong_usage(run, command):
    for dtype in ("float16", "bfloat16"):
        status, out, err = run(*command, "--dtype", dtype, "--fp32-precision", "tf32")
        assert (status, out) == (2, "")
        assert err == f"--fp32-precision tf32 is for --dtype float32, got --dtype {dtype}\n"


def test_the_default_precision_may_be_stated_for_every_dtype(run_json):
    status, data = run_json("emit", *SMALL, "--dtype", "float16", "--fp32-precision", "ieee")
    assert (status, data["problem"]["fp32_precision"]) == (0, None)


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_is(run, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise errors.CompileError("kernel", "sm_90a", "13.0", (), "line 1: error", None)

    monkeypatch.setattr("cutlass_sep.kernel.build", fail)
    old, new, pipe = (tmp_path / name for name in ("old", "new", "pipe"))
    old.write_text("kept")
    os.mkfifo(pipe)  # opened for writing it would wait for a reader
    for path in (old, new, pipe):
        assert run("compile", *SMALL, "--output", str(path))[0] == 1
    assert old.read_text() == "kept" and not new.exists() and pipe.is_fifo()


#: For each flag of the problem: what is allowed, values that are not, and the operator that has the flag.
BAD_VALUES = {
    "--op": ("'dwsep2d', 'sepblock1d'", ["0", "conv3d"], None),
    "--shape": (
        f"3 or 4 integers from 1 to {2**28}",
        ["0,8,8,8", "1,8,0", "1,8,-8,8", "1,8", "1,2,3,4,5", "a", ""],
        None,
    ),
    "--out-channels": (f"an integer from 1 to {2**28}", ["0", "-1", "8,8", "many", "1.5", ""], "dwsep2d"),
    "--expanded": (f"an integer from 1 to {2**28}", ["0", "-1", "8,8", "many", "1.5", ""], "sepblock1d"),
    "--kernel": (f"1 or 2 integers from 1 to {2**28}", ["0", "3,0", "-1", "3,3,3", "three", "1.5", ""], None),
    "--stride": (f"1 or 2 integers from 1 to {2**20}", ["0", "-1", "1,1,1", "one", "1.5", f"{2**20 + 1}"], "dwsep2d"),
    "--padding": ("separated by commas, or same, or valid", ["-1", "1,1,1,1", "SAME", "1.5", ""], "dwsep2d"),
    "--dilation": (f"1 or 2 integers from 1 to {2**28}", ["0", "1,0", "-1", "1,1,1", "one", "1.5"], None),
    "--dtype": ("'float32', 'float16', 'bfloat16'", ["float64", "0", ""], None),
    "--layout": ("'contiguous', 'channels_last'", ["nhwc", "0", ""], None),
    "--mid-activation": ("'none', 'relu'", ["mish", "0", ""], "dwsep2d"),
    "--activation": ("'none', 'relu'", ["mish", "0", ""], None),
    "--fp32-precision": ("'ieee', 'tf32'", ["bf16", "0", ""], None),
    "--arch": ("'sm_80', 'sm_86'", ["sm_42", "90", ""], None),
    "--path": ("'sm90', 'portable'", ["torch", "0", ""], None),
    "--form": ("'fused', 'two_kernel'", ["three", "0", ""], "sepblock1d"),
}
TOO_BIG = [f"{2**28 + 1}", "9" * 30, "9" * 5000]


def test_bad_values_are_there_for_every_flag_of_the_problem():
    (group,) = (group for group in cli._problem_arguments()._action_groups if group.title == "problem")
    flags = {action.option_strings[0] for action in group._group_actions}
    assert flags == {*BAD_VALUES, "--bias"}


@pytest.mark.parametrize("op_name", ["dwsep2d", "sepblock1d"])
@pytest.mark.parametrize("flag", BAD_VALUES)
def test_a_bad_value_of_a_flag_is_refused_by_its_name(run, flag, op_name):
    allowed, values, only = BAD_VALUES[flag]
    if only not in (None, op_name):
        pytest.skip("not a flag of this operator")
    if "integer" in allowed or "commas" in allowed:
        values = [*values, *(f"1,8,{big},8" if flag == "--shape" else big for big in TOO_BIG)]
    for value in values:
        operator = [] if flag == "--op" else ["--op", op_name]
        status, out, err = run("emit", *operator, f"{flag}={value}")
        first, *_ = err.replace("'dwsep2d', 'sepblock1d'", "dwsep2d, sepblock1d").splitlines()
        assert (status, out) == (2, "")
        assert f"argument {flag}: " in first and repr(value) in first, first
        assert allowed.replace("'", "") in first.replace("'", ""), first


@pytest.mark.parametrize("flag", [flag for flag, (_, _, only) in BAD_VALUES.items() if only])
def test_a_flag_of_the_other_operator_is_refused_by_its_name(run, flag):
    value = {"--mid-activation": "relu", "--form": "fused"}.get(flag, "1")
    other = {"dwsep2d": "sepblock1d", "sepblock1d": "dwsep2d"}[BAD_VALUES[flag][2]]
    status, _, err = run("emit", "--op", other, flag, value)
    assert (status, err) == (2, f"{flag} {value} is no argument of --op {other}\n")


@pytest.mark.parametrize(
    ("option", "value", "allowed"), [("--peers", "tensorrt", "eager"), ("--timing", "wall", "events")]
)
def test_unknown_peers_and_timings_are_wrong_usage(run, option, value, allowed):
    for given in (value, f"{allowed},{value}"):
        status, _, err = run("bench", option, given)
        assert status == 2 and f"argument {option}: '{value}' is not one of {allowed}" in err


def test_a_peer_named_twice_is_measured_once():
    args = cli.parser().parse_args(["bench", "--peers", "compile,eager,compile", "--timing", "events,events"])
    assert (args.peers, args.timing) == (("compile", "eager"), ("events",))


def test_arch_from_the_environment(run_json, monkeypatch):
    monkeypatch.setenv("CUTLASS_SEP_ARCH", "sm_42")
    status, data = run_json("emit", *SMALL)
    assert status == 2 and data["message"].startswith("CUTLASS_SEP_ARCH: arch='sm_42' is not supported; it must be one")


def test_a_failed_compilation_exits_1(run, monkeypatch):
    def fail(*args, **kwargs):
        raise errors.CompileError("kernel", "sm_90a", "13.0", (), "line 1: error", None)

    monkeypatch.setattr("cutlass_sep.kernel.build", fail)
    status, _, err = run("compile", *SMALL)
    assert status == 1 and "line 1: error" in err


def test_python_dash_m_is_the_same_command(tmp_path):
    environment = {**os.environ, "CUTLASS_SEP_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "cutlass_sep", "cache", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout)["path"] == str(tmp_path)


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cutlass_sep", "emit", *SMALL]
    for arguments in (command, [*command, "--json"]):
        done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    os.close(writer)


def test_version(run, capsys):
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', text, re.MULTILINE)
    with pytest.raises(SystemExit) as ended:
        run("--version")
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out, captured.err) == (0, f"cutlass-sep {version}\n", "")


def test_without_an_installed_package_only_the_version_is_missing(run, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    fake = types.SimpleNamespace(version=missing, PackageNotFoundError=metadata.PackageNotFoundError)
    monkeypatch.setattr(cli, "metadata", fake)
    status, out, err = run("--version")
    assert (status, out) == (3, "") and "--version" in err and "installed" in err
    assert run("cache", "info")[0] == 0


def test_help_needs_no_compiler():
    code = (
        "import sys; from cutlass_sep.cli import parser; parser().format_help(); "
        "loaded = [m for m in ('cuda.core', 'cutlass_library', 'cutlass_cppgen', 'jinja2') if m in sys.modules]; "
        "sys.exit(','.join(loaded) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_readme_lists_every_command_and_option():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (commands_action,) = [a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)]
    for name, sub in commands_action.choices.items():
        assert f"`{name}" in readme, name
        if name == "demo":
            options = {option for action in sub._actions for option in action.option_strings if option.startswith("--")}
            missing = {o for o in options - {"--help", "--op", "--no-bias"} if o not in readme}
            assert missing == set()
