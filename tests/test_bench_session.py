"""A benchmark session from request to results file, with the host standing in for a GPU: its clock, its convolutions.

The times mean nothing. What is tested is that values are checked, rows are whole, and files are merged as they must be.
"""

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cutlass_sep import arch, functional
from cutlass_sep.bench import builds, ceilings, environment, inputs, overhead, results, runner, session, startup, timing
from cutlass_sep.bench.inputs import Case
from cutlass_sep.console import Output
from cutlass_sep.errors import Unsupported
from cutlass_sep.explain import Explanation

DEVICE = torch.device("cpu")
LIMITS = {"copy_TBps": 4.0, "bf16_TFLOPS": 700.0, "fp16_TFLOPS": 700.0, "tf32_TFLOPS": 350.0, "fp32_TFLOPS": 50.0}


class HostEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream=None):
        self.seconds = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.seconds - self.seconds)


@pytest.fixture(autouse=True)
def host_as_gpu(monkeypatch):
    properties = type("Properties", (), {"L2_cache_size": 1 << 16})()
    for name, stand_in in {
        "Event": HostEvent,
        "_sleep": lambda cycles: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "get_device_properties": lambda device: properties,
        "get_device_name": lambda device: "Host",
        "mem_get_info": lambda device: (1 << 22, 1 << 22),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(arch, "of_device", lambda index: "sm_90a")
    monkeypatch.setattr(environment, "driver_version", lambda: "0")


@pytest.fixture
def ceilings_known(monkeypatch):
    monkeypatch.setattr(ceilings, "measure", lambda device: LIMITS)


def case(name="a", dtype="float32", **changes):
    problem = replace(inputs.lead(dtype).problem, **{"n": 1, "c": 8, "h": 10, "w": 10, "o": 8, **changes})
    return Case(name, problem.with_alignment(), "a note")


def block(name="block", dtype="float32", **changes):
    problem = replace(inputs.lead1d(dtype).problem, **{"n": 2, "c": 8, "l": 30, "e": 16, "o": 8, **changes})
    return Case(name, problem.with_alignment())


def request(*cases, **changes):
    return session.Request(**{"cases": cases, "samples": 3, "peers": ("eager",), **changes})


def run(*cases, **changes):
    return session.run(request(*cases, **changes), DEVICE, Output(as_json=True))


def test_a_session_writes_whole_rows(ceilings_known, tmp_path, capsys):
    path = tmp_path / "host.json"
    finished = run(case(), case("b", "bfloat16"), output=path)
    assert finished.problems == []
    data = results.load(path)
    assert data == {**finished.results, "digest": data["digest"]} == json.loads(path.read_text())
    measured = {(r["id"], r["dtype"], r["fp32_precision"], r["layout"], r["impl"]) for r in data["rows"]}
    assert measured == {
        (id_, dtype, precision, layout, impl)
        for id_, dtype, precision in (("a", "float32", "ieee"), ("b", "bfloat16", None))
        for layout in ("contiguous", "channels_last")
        for impl in ("cutlass_sep", "eager")
    }
    for row in data["rows"]:
        assert row["runs"] == 3 and row["rel_error"] < 1e-2 and row["note"] == "a note"
        assert ("measured" in row) == (row["impl"] == "eager")
        assert row["path"] == ("torch" if row["impl"] == "cutlass_sep" else None)
    assert "over best peer" in capsys.readouterr().err, "the table goes to stderr with --json"
    assert json.loads(json.dumps(finished.to_json(), allow_nan=False))["gpu"] == "Host"


def test_a_block_has_rows_of_its_own(ceilings_known, tmp_path):
    path = tmp_path / "host.json"
    finished = run(case(), block(), block("even", "bfloat16", kernel=4, dilation=2), output=path)
    assert finished.problems == []
    rows = [row for row in results.load(path)["rows"] if row["op"] == "sepblock1d"]
    assert {(row["id"], row["layout"], row["impl"]) for row in rows} == {
        (id_, layout, impl)
        for id_ in ("block", "even")
        for layout in ("contiguous", "channels_last")
        for impl in ("cutlass_sep", "eager")
    }
    (row,) = (r for r in rows if (r["id"], r["layout"], r["impl"]) == ("even", "channels_last", "cutlass_sep"))
    assert row["shape"] == {"N": 2, "C": 8, "E": 16, "L": 30, "kernel": 4, "dilation": 2}
    assert (row["activation"], row["expand_bias"], row["dw_bias"], row["project_bias"]) == ("gelu", True, True, True)
    assert (row["path"], row["form"], row["schedule"], row["fp32_precision"]) == ("torch", None, None, None)
    assert (
        results.problem_of(row)
        == inputs.variant(block(kernel=4, dilation=2), "bfloat16", "channels_last", None).problem
    )


def test_a_form_that_is_the_pick_is_measured_once(ceilings_known, monkeypatch):
    monkeypatch.setattr(runner.block_schedule, "supports", lambda problem, path, arch, form: form == "fused")
    real = runner.own

    def own(name, problem, path, form, example):
        made = real(name, problem, None, None, example)
        about = {"path": "sm90", "form": "fused", "schedule": {}, "arch": "sm_90a"}
        return replace(made, about=about | ({"forced": True} if form else {}))

    monkeypatch.setattr(runner, "own", own)
    monkeypatch.setattr(results, "digest", lambda rows: "0")
    finished = run(block(), forms=(None, "fused", "two_kernel"), peers=())
    assert [(row["layout"], row.get("forced")) for row in finished.measured] == [
        ("contiguous", None), ("channels_last", None),
    ]  # fmt: skip


def test_forms_that_were_forced_inform_and_do_not_fail(ceilings_known, monkeypatch, tmp_path):
    problem = block().problem
    schedule = {"fused": 0.0, "two_kernel": 0.02}

    class Forced:
        def __init__(self, *tensors, form, **options):
            self.path, self.form, self.tuned, self.options = "portable", form, False, options
            self.schedule = type("S", (), {"to_json": lambda self: {"form": form}})()

        def run(self, *tensors):
            time.sleep(schedule[self.form])
            return inputs.function(problem)(*tensors, **self.options)

    monkeypatch.setattr(inputs, "operation", lambda problem: Forced)
    monkeypatch.setattr(runner.block_schedule, "supports", lambda problem, path, arch, form: path == "portable")
    monkeypatch.setattr(results, "digest", lambda rows: "0")
    finished = run(block(), forms=(None, "fused", "two_kernel"), layouts=("contiguous",), output=tmp_path / "host.json")
    own = [row for row in finished.measured if row["impl"] == "cutlass_sep"]
    assert [(row["form"], row.get("forced", False)) for row in own] == [
        (None, False), ("fused", True), ("two_kernel", True),
    ]  # fmt: skip
    assert {row["layout"] for row in own} == {"contiguous"}
    slow = [c for c in runner.compare(finished.measured) if not c.ok]
    assert any(c.row["form"] == "two_kernel" for c in slow)
    assert "two_kernel" not in {entry.get("form") for entry in finished.to_json()["slower"]}
    assert all(c.row.get("forced") is None for c in finished._judged())
    alone = run(block(), forms=("two_kernel",), layouts=("contiguous",))
    assert not alone.ok, "asked for alone, it is what is judged"


def test_appending_keeps_other_rows_and_drops_changed_kernels(ceilings_known, tmp_path):
    path = tmp_path / "host.json"
    run(case(), output=path)
    run(case("b"), output=path, append=True)
    assert {row["id"] for row in results.load(path)["rows"]} == {"a", "b"}
    data = results.load(path)
    for row in data["rows"]:
        if row["id"] == "a" and row["impl"] == "cutlass_sep":
            row["digest"] = "of an older kernel"
    results.save(path, data)
    run(case("c"), output=path, append=True)
    rows = results.load(path)["rows"]
    assert {row["id"] for row in rows if row["impl"] == "cutlass_sep"} == {"b", "c"}
    run(case("d"), output=path)
    assert {row["id"] for row in results.load(path)["rows"]} == {"d"}


def test_wrong_values_get_no_row(ceilings_known, monkeypatch):
    right = functional.depthwise_separable_conv2d
    calls = []

    def wrong(*args, **kwargs):
        calls.append(1)
        return right(*args, **kwargs) + 1e-3

    monkeypatch.setattr(
        runner,
        "explain",
        lambda f, *a, **k: Explanation("torch", "", None),
    )
    monkeypatch.setattr(functional, "depthwise_separable_conv2d", wrong)
    finished = run(case())
    assert {row["impl"] for row in finished.measured} == {"eager"}
    assert len(finished.problems) == 2 and all("relative error" in sentence for sentence in finished.problems)
    assert not finished.ok
    assert len(calls) == 2, "refused at the first call of each layout, and not timed"


def test_impossible_times_get_no_row(monkeypatch):
    monkeypatch.setattr(ceilings, "measure", lambda device: {**LIMITS, "copy_TBps": 1e-9})
    finished = run(case())
    assert finished.measured == []
    assert len(finished.problems) == 4 and all("TB/s" in sentence for sentence in finished.problems)


def test_a_peer_that_fails_costs_only_its_row(ceilings_known, monkeypatch):
    def build(impl, problem):
        raise RuntimeError("inductor is unwell")

    monkeypatch.setattr(runner.peers, "build", build)
    finished = run(case())
    assert {row["impl"] for row in finished.measured} == {"cutlass_sep"}
    assert any("inductor is unwell" in sentence for sentence in finished.problems)


def test_slower_rows_fail_the_session(ceilings_known, monkeypatch):
    right = functional.depthwise_separable_conv2d

    def slow(*args, **kwargs):
        time.sleep(0.02)
        return right(*args, **kwargs)

    monkeypatch.setattr(
        runner,
        "explain",
        lambda f, *a, **k: Explanation("torch", "", None),
    )
    monkeypatch.setattr(functional, "depthwise_separable_conv2d", slow)
    finished = run(case())
    assert finished.problems == [] and not finished.ok
    assert {entry["layout"] for entry in finished.to_json()["slower"]} == {"contiguous", "channels_last"}


def test_starts_and_calls_are_reported(ceilings_known, monkeypatch, tmp_path, capsys):
    times = {"emit_ms": 1.0, "compile_ms": 2.0, "load_and_run_ms": 3.0, "total_ms": 6.0, "cache_hit": False}
    monkeypatch.setattr(startup, "measure", lambda problem: {"cold": times, "warm": times})
    monkeypatch.setattr(overhead, "measure", lambda device: {"functional": 4.5})
    path = tmp_path / "host.json"
    run(case(), output=path, startup=True)
    assert results.load(path)["startup"]["cold"] == times
    text = capsys.readouterr().err
    assert "cold start to the first result: 6 ms" in text and "functional: 4.50 us" in text
    run(case("b"), output=path, append=True)
    assert results.load(path)["overhead_us"] == {"functional": 4.5}


def test_the_lead_shape_has_every_peer_and_others_eager(ceilings_known):
    unsaid = request(peers=None)
    assert session._peers(unsaid, inputs.lead()) == ("eager", "compile", "compile-max-autotune")
    assert session._peers(unsaid, inputs.lead1d("float16")) == ("eager", "compile", "compile-max-autotune")
    assert session._peers(unsaid, case()) == session._peers(unsaid, block()) == ("eager",)


def test_ceilings_are_measured(monkeypatch):
    monkeypatch.setattr(ceilings, "_MATMUL", 32)
    monkeypatch.setattr(ceilings, "_SAMPLES", 2)
    found = ceilings.measure(DEVICE)
    assert set(found) == set(LIMITS) and all(value > 0 for value in found.values())


def test_resuming_leaves_out_what_the_file_has(ceilings_known, monkeypatch, tmp_path):
    path = tmp_path / "host.json"
    run(case(), case("b", "bfloat16"), output=path)
    finished = run(case(), case("b"), case("c"), output=path, append=True, resume=True)
    assert {(row["id"], row["dtype"]) for row in finished.measured} == {("b", "float32"), ("c", "float32")}
    data = results.load(path)
    assert {(row["id"], row["dtype"]) for row in data["rows"]} == {
        ("a", "float32"), ("b", "bfloat16"), ("b", "float32"), ("c", "float32"),
    }  # fmt: skip
    data["rows"] = [
        row for row in data["rows"] if (row["id"], row["layout"], row["impl"]) != ("a", "contiguous", "eager")
    ]
    results.save(path, data)
    finished = run(case(), case("c"), output=path, append=True, resume=True)
    assert {row["id"] for row in finished.measured} == {"a"}, "one row was missing"
    monkeypatch.setattr(timing, "as_graph", lambda call, sets, device: timing.Candidate(call))
    finished = run(case("c"), output=path, append=True, resume=True, timings=("events", "cuda_graph"), peers=())
    assert {row["timing"] for row in finished.measured} == {"events", "cuda_graph"}


def test_resuming_takes_a_path_or_form_that_was_asked_for_as_another_measurement(ceilings_known, monkeypatch):
    def is_there(rows, **asked):
        found = {"rows": rows, "environment": {}}
        return not session._wanted(request(block(), resume=True, **asked), block(), found, DEVICE)

    supported = {"fused"}
    monkeypatch.setattr(runner.block_schedule, "supports", lambda problem, path, arch, form: form in supported)
    rows = run(block()).measured
    of_peers = [row for row in rows if row["impl"] == "eager"]
    fused = [row | {"path": "sm90", "form": "fused"} for row in rows if row["impl"] == results.OWN]
    forced = [row | {"forced": True} for row in fused]
    assert is_there(rows) and not is_there(rows, path="portable") and not is_there(rows, forms=("fused",))
    assert not is_there(of_peers + forced) and not is_there(rows, tune=True)
    assert is_there([row | {"tuned": True} for row in rows], tune=True)
    both = (None, "fused", "two_kernel")
    assert not is_there(rows, forms=both) and not is_there(of_peers + forced, forms=both)
    assert is_there(rows + forced, forms=both), "the other form cannot run"
    assert is_there(of_peers + fused, forms=both), "the form asked for is the pick"
    assert is_there(of_peers + forced, forms=("fused",)) and is_there(of_peers + forced, path="sm90")
    assert not is_there(of_peers + forced, path="portable")
    supported.add("two_kernel")
    assert not is_there(rows + forced, forms=both)


def test_a_case_without_a_kernel_costs_nothing_but_its_own(ceilings_known, monkeypatch):
    def choose(problem, device):
        raise Unsupported("no kernel")

    monkeypatch.setattr(session.dispatch, "choose", choose)
    assert session._kernels(request(case()), case(), DEVICE) == []


def test_each_source_is_compiled_once_and_a_failure_is_left_to_its_user(monkeypatch):
    def build(source, arch, name):
        built.append((source, arch, name))
        if source == "bad":
            raise RuntimeError("no such luck")

    built, steps = [], []
    monkeypatch.setattr(builds, "build", build)
    monkeypatch.setattr(builds, "pool", ThreadPoolExecutor)
    kernels = [SimpleNamespace(source=source, arch="sm_90a", name="k") for source in ("a", "bad", "a", "b")]
    builds.compile_all(kernels, lambda: steps.append(1))
    assert sorted(built) == [(source, "sm_90a", "k") for source in ("a", "b", "bad")] and len(steps) == 3


def test_drift_is_of_one_shape(ceilings_known, monkeypatch, tmp_path):
    """The same layer with another batch has peers of its own."""
    path = tmp_path / "host.json"
    monkeypatch.setattr(runner.peers, "build", lambda impl, problem: runner.peers.eager(problem))
    run(case(), case(n=2), output=path, peers=("eager", "compile"), compiled_layouts=("channels_last",))
    data = results.load(path)
    for row in data["rows"]:
        if row["impl"] == "eager" and row["shape"]["N"] == 1:
            row |= dict.fromkeys(("p10_ms", "median_ms", "p90_ms"), 1e-06)
    results.save(path, data)
    finished = run(case(), output=path, append=True)
    assert len(finished.problems) == 1
    rows = results.load(path)["rows"]
    assert [row["shape"]["N"] for row in rows if row["impl"] == "compile"] == [2]


def test_compiled_peers_of_an_earlier_run_are_used_again_until_eager_drifts(ceilings_known, monkeypatch, tmp_path):
    path = tmp_path / "host.json"
    monkeypatch.setattr(runner.peers, "build", lambda impl, problem: runner.peers.eager(problem))
    run(case(), output=path, peers=("eager", "compile"), compiled_layouts=("channels_last",))
    data = results.load(path)
    assert [row["layout"] for row in data["rows"] if row["impl"] == "compile"] == ["channels_last"]

    def again(factor: float) -> tuple[list[str], list[str]]:
        """(sentences, compiled peers left) after a run in which eager takes `factor` of what it did."""
        results.save(path, data)
        medians = {results.pick_key(row): row["median_ms"] for row in data["rows"]}
        real = runner._row

        def row(*args):
            made = real(*args)
            if made["impl"] == "eager":
                time = factor * medians[results.pick_key(made)]
                made |= {"p10_ms": time, "median_ms": time, "p90_ms": time}
            return made

        with monkeypatch.context() as patch:
            patch.setattr(runner, "_row", row)
            finished = run(case(), output=path, append=True)
        return finished.problems, [row["impl"] for row in results.load(path)["rows"] if row["impl"] == "compile"]

    assert again(1.02) == ([], ["compile"])
    sentences, left = again(1.05)
    assert left == [] and len(sentences) == 1 and "eager has drifted" in sentences[0]


def test_one_peer_and_eager_in_one_layout_are_measured_alone(ceilings_known, monkeypatch):
    """What isolated.Worker asks for."""
    judged, judge = [], runner.accuracy.judge
    monkeypatch.setattr(runner.accuracy, "judge", lambda *args: judged.append(args[0].layout) or judge(*args))
    monkeypatch.setattr(runner.peers, "build", lambda impl, problem: runner.peers.eager(problem))
    layouts = ("channels_last",)
    plan = runner.Plan(
        layouts=(), peer_layouts=layouts, compiled_layouts=layouts, peers=("eager", "compile-max-autotune"), samples=3
    )
    outcome = runner.measure(case(), plan, LIMITS, {"gpu": "Host"}, DEVICE)
    assert outcome.problems == [] and judged == ["channels_last"] * 2
    assert [(row["impl"], row["layout"], row["measured"]) for row in outcome.rows] == [
        (impl, "channels_last", {"gpu": "Host"}) for impl in plan.peers
    ]


class Apart:
    """Stands in for isolated.Worker: measures in this process, with eager as the peer, unless the peer `fails`."""

    def __init__(self, monkeypatch, factor=1.0):
        self.factor, self.fails, self.asked = factor, False, []
        monkeypatch.setattr(session.isolated, "Worker", lambda seconds: contextlib.nullcontext(self))

    def measure(self, case, impl, plan, limits, where, device):
        self.asked.append((case.id, impl, *plan.compiled_layouts))
        if self.fails:
            return runner.Outcome(problems=[f"{case.id} {impl}: its process was ended by SIGSEGV"])
        about = {"floor_ms": 0.1, "floor_kind": "bytes", "runs": 3, "rel_error": 0.0, "max_abs_error": 0.0}
        rows = []
        for name, ms in (("eager", self.factor), (impl, 0.5)):
            how = dict.fromkeys(("path", "form", "schedule", "arch")) | {"measured": where} | about
            times = dict.fromkeys(("p10_ms", "median_ms", "p90_ms"), ms)
            rows.append(session._about(case, name, *plan.compiled_layouts, "events") | how | times)
        return runner.Outcome(rows=rows)


@pytest.fixture
def eager_takes_one_ms(monkeypatch):
    def row(*args):
        made = real(*args)
        return made | (dict.fromkeys(("p10_ms", "median_ms", "p90_ms"), 1.0) if made["impl"] == "eager" else {})

    real = runner._row
    monkeypatch.setattr(runner, "_row", row)


AUTOTUNED = {"peers": ("eager", "compile-max-autotune"), "compiled_layouts": ("channels_last",)}


def autotuned(path):
    return [
        (row["id"], row["median_ms"]) for row in results.load(path)["rows"] if row["impl"] in session.isolated.PEERS
    ]


def test_a_peer_that_crashes_costs_its_row_and_is_noted(
    ceilings_known, eager_takes_one_ms, monkeypatch, tmp_path, capsys
):
    path, apart = tmp_path / "host.json", Apart(monkeypatch)
    apart.fails = True
    finished = run(case(), output=path, **AUTOTUNED)
    assert finished.problems == ["a compile-max-autotune: its process was ended by SIGSEGV"] and not finished.ok
    assert {(row["impl"], row["layout"]) for row in results.load(path)["rows"]} == {
        (impl, layout) for impl in ("cutlass_sep", "eager") for layout in ("contiguous", "channels_last")
    }
    (failed,) = results.load(path)["failed_peers"]
    assert (failed["id"], failed["impl"], failed["layout"]) == ("a", "compile-max-autotune", "channels_last")
    assert failed["reason"] == finished.problems[0] and failed["measured"]["gpu"] == "Host"
    assert f"{finished.problems[0]} (0 s)" in capsys.readouterr().err, "progress is told"

    apart.fails = False
    again = run(case(), output=path, append=True, resume=True, **AUTOTUNED)
    assert again.measured == [] and len(apart.asked) == 1, "what failed is not tried again"
    monkeypatch.setattr(environment, "driver_version", lambda: "1")
    run(case(), output=path, append=True, resume=True, **AUTOTUNED)
    assert len(apart.asked) == 2, "unless a version differs"
    assert autotuned(path) == [("a", 0.5)] and results.load(path)["failed_peers"] == []


def test_peers_apart_are_added_to_what_is_there(ceilings_known, eager_takes_one_ms, monkeypatch, tmp_path, capsys):
    path, apart = tmp_path / "host.json", Apart(monkeypatch, factor=1.02)
    run(case(), case("b"), output=path)
    before = results.load(path)["rows"]
    asked = {**AUTOTUNED, "peers": ("compile-max-autotune",), "append": True, "resume": True}
    finished = run(case(), case("b"), output=path, **asked)
    assert finished.problems == [] and autotuned(path) == [("a", 0.5), ("b", 0.5)]
    assert [row for row in results.load(path)["rows"] if row["impl"] not in session.isolated.PEERS] == before
    assert "b compile-max-autotune channels_last float32: 0.5000 ms (0 s)" in capsys.readouterr().err
    assert [row["impl"] for row in finished.measured] == ["compile-max-autotune"] * 2, "the others were there"
    run(case(), case("b"), output=path, **asked)
    assert apart.asked == [(name, "compile-max-autotune", "channels_last") for name in ("a", "b")]


def test_a_peer_apart_is_dropped_if_eager_beside_it_took_another_time(
    ceilings_known, eager_takes_one_ms, monkeypatch, tmp_path
):
    path = tmp_path / "host.json"
    Apart(monkeypatch, factor=1.04)
    finished = run(case(), output=path, **AUTOTUNED)
    (sentence,) = finished.problems
    assert sentence.endswith("dropped, eager beside it took 1.04 ms and not 1 ms")
    assert autotuned(path) == [] and "failed_peers" not in results.load(path)


def test_eager_comes_with_a_peer_apart_where_there_is_none(ceilings_known, monkeypatch, tmp_path):
    path = tmp_path / "host.json"
    Apart(monkeypatch, factor=7.0)
    run(case(), output=path, **AUTOTUNED | {"peers": ("compile-max-autotune",)})
    rows = [row for row in results.load(path)["rows"] if row["impl"] == "eager"]
    assert [(row["layout"], row["median_ms"]) for row in rows] == [("channels_last", 7.0)]
