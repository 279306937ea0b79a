"""Results files: the schema, merging, the digest, and that committed results are those of the kernels as they are."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_sep import compiler, planner
from cutlass_sep.bench import inputs, results
from cutlass_sep.schedule import candidates

ROOT = Path(__file__).parent.parent
BENCHMARKS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
GPU_TESTS = ROOT / "tests" / "gpu" / "results.json"
ARCH = "sm_90a"


def make_row(case=None, schedule=None, **changes):
    case = case or inputs.lead()
    problem = case.problem
    if schedule is None:
        schedule = planner.plan(problem, ARCH).schedule
    row = {
        "id": case.id,
        **results.about(problem),
        "impl": "cutlass_sep",
        "timing": "events",
        "path": schedule.path,
        "form": getattr(schedule, "form", None),
        "schedule": schedule.to_json(),
        "arch": ARCH,
        "median_ms": 1.0,
        "p10_ms": 0.9,
        "p90_ms": 1.1,
        "runs": 40,
        "floor_ms": 0.75,
        "floor_kind": "bytes",
        "rel_error": 4e-7,
        "max_abs_error": 1e-6,
    }
    row["digest"] = results.digest([row])
    return {**row, **changes}


def make_peer(**changes):
    row = make_row()
    del row["digest"]
    return {**row, "impl": "eager", "path": None, "schedule": None, "arch": None, "measured": {}, **changes}


def make_results(*rows):
    where = dict.fromkeys(("gpu", "driver", "torch", "cudnn", "nvrtc", "cutlass", "date"), "x")
    return {"schema": 1, "digest": "", "environment": where, "ceilings": {}, "rows": list(rows)}


def test_a_row_gives_back_its_problem():
    leads = (inputs.lead("bfloat16", "channels_last"), inputs.lead1d("float16", "channels_last"), inputs.lead1d())
    for case in (*leads, *inputs.layers(ROOT / "benchmarks" / "layers.jsonl")[0]):
        row = json.loads(json.dumps(results.about(case.problem)))
        assert results.problem_of(row) == case.problem


def test_save_and_load(tmp_path):
    path = tmp_path / "deep" / "h200.json"
    data = make_results(make_row(), make_peer())
    results.save(path, data)
    loaded = results.load(path)
    assert loaded["digest"] == results.digest(data["rows"]) != ""
    assert loaded["rows"] == data["rows"]
    assert [p.name for p in path.parent.iterdir()] == ["h200.json"], "no temporary file stays"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"layout": "nhwc"}, "layout"),
        ({"impl": "magic"}, "impl"),
        ({"timing": "wall"}, "timing"),
        ({"floor_kind": "flops"}, "floor_kind"),
        ({"fp32_precision": None}, "fp32_precision"),
        ({"median_ms": None}, "median_ms"),
        ({"rel_error": float("nan")}, "rel_error"),
        ({"p10_ms": 1.05}, "out of order"),
        ({"median_ms": 0.0, "p10_ms": 0.0}, "out of order"),
        ({"path": None}, "own rows name one"),
        ({"path": "torch"}, "schedule"),
        ({"shape": {"N": 1}}, "shape"),
        ({"form": "fused"}, "form"),
        ({"form": "half"}, "form"),
        ({"op": "sepblock1d"}, "expand_bias"),
    ],
)
def test_rows_that_break_the_format_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        results.validate(make_results(make_row(**change)))


def test_files_that_break_the_format_are_named(tmp_path):
    for missing in ("schema", "digest", "environment", "ceilings", "rows"):
        data = make_results()
        del data[missing]
        with pytest.raises(ValueError, match=missing):
            results.validate(data)
    with pytest.raises(ValueError, match="schema 2"):
        results.validate({**make_results(), "schema": 2})
    with pytest.raises(ValueError, match="twice"):
        results.validate(make_results(make_row(), make_row()))
    with pytest.raises(ValueError, match="measured"):
        peer = make_peer()
        del peer["measured"]
        results.validate(make_results(peer))
    broken = tmp_path / "x.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"x\.json"):
        results.load(broken)


def test_merging_replaces_the_same_measurement_whatever_was_planned():
    first, second, *_ = candidates(inputs.lead().problem, ARCH, "sm90")
    data = make_results(make_row(schedule=first), make_peer())
    results.merge(data, [make_row(schedule=second, median_ms=0.95)])
    own = [row for row in data["rows"] if row["impl"] == "cutlass_sep"]
    assert [row["schedule"] for row in own] == [second.to_json()]
    assert len(data["rows"]) == 2
    results.merge(data, [make_row(schedule=first, forced=True), make_peer(layout="channels_last")])
    assert len(data["rows"]) == 4, "a forced path is another measurement, and so is another layout"
    results.merge(data, [make_row(schedule=second, forced=True)])
    assert len(data["rows"]) == 4, "what the planner picks may be asked for as well"
    results.validate(data)


def test_digest_follows_what_a_kernel_is_made_from(monkeypatch):
    rows = [make_row(), make_row(inputs.lead("bfloat16", "channels_last")), make_peer()]
    base = results.digest(rows)
    assert results.digest(list(reversed(rows))) == base, "order does not count"
    assert results.digest([*rows, make_peer(layout="channels_last")]) == base, "peers do not count"
    faster = copy.deepcopy(rows)
    faster[0]["median_ms"] = 0.95
    assert results.digest(faster) == base, "what came out does not count"
    assert results.digest(rows[:1]) != base
    second = candidates(inputs.lead().problem, ARCH, "sm90")[1]
    assert results.digest([make_row(schedule=second), *rows[1:]]) != base

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "option_strings", lambda arch: (f"-arch={arch}", "--use_fast_math"))
        assert results.digest(rows) != base
        assert not results.is_current(rows[0])
    with monkeypatch.context() as patch:
        render = results.render_anew
        patch.setattr(results, "render_anew", lambda *a: render(*a) + "// edited\n")
        assert results.digest(rows) != base
    with monkeypatch.context() as patch:
        patch.setattr(results.metadata, "version", lambda name: "4.3.0")
        assert results.digest(rows) != base
    assert results.digest(rows) == base
    assert results.is_current(rows[0]) and results.is_current(rows[2])


def test_prose_does_not_count_in_the_launch_module():
    plain = 'import os\n\n\nclass A:\n    x = "# no comment"\n\n    def f(self):\n        return f"{self.x}#"\n'
    told = (
        '"""A module.\n\nOf two paragraphs, with an é.\n"""\nimport os  # the system\n\n# A class\nclass A:\n'
        '    """Of attributes."""\n\n    x = "# no comment"\n\n    def f(self):\n        """Give x."""\n'
        '        # é here\n        return f"{self.x}#"  # é there\n'
    )
    assert results.strip_prose(told) == results.strip_prose(plain)
    assert results.strip_prose(plain) == "\n".join(line for line in plain.splitlines() if line)
    assert results.strip_prose(plain.replace("self.x}#", "self.x}!")) != results.strip_prose(plain)


def test_digest_of_problems_counts_what_ran():
    case = inputs.lead()
    schedule = planner.plan(case.problem, ARCH).schedule
    entry = results.ran(case.problem, schedule.path, schedule, ARCH)
    assert json.loads(json.dumps(entry)) == entry
    base = results.digest_of_problems([entry])
    assert results.digest_of_problems([]) != base
    assert results.digest_of_problems([results.ran(case.problem, "torch", None, ARCH)]) != base


def test_blocks_are_counted_as_they_ran(monkeypatch):
    problem = inputs.lead1d("bfloat16").problem
    digests = set()
    for form in ("fused", "two_kernel"):
        chosen = planner.plan(problem, ARCH, "sm90", form)
        entry = json.loads(json.dumps(results.ran(problem, chosen.path, chosen.schedule, ARCH)))
        assert results.what_ran(entry) == (problem, chosen.schedule)
        row = make_row(inputs.lead1d("bfloat16"), chosen.schedule)
        results.validate(make_results(row))
        digests |= {results.digest_of_problems([entry]), row["digest"]}
        with monkeypatch.context() as patch:
            render = results.render_anew
            patch.setattr(results, "render_anew", lambda *a, render=render: render(*a) + "// edited\n")
            digests.add(results.digest_of_problems([entry]))
            assert not results.is_current(row)
        assert results.is_current(json.loads(json.dumps(row)))
    assert len(digests) == 6


# --- the README's table


def table_module():
    spec = importlib.util.spec_from_file_location("table", ROOT / "benchmarks" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_shows_own_rows_beside_their_best_peer():
    own = make_row(median_ms=1.0, rel_error=4.6e-7)
    slow, fast = make_peer(median_ms=5.0, rel_error=1.5e-7), make_peer(impl="compile", median_ms=2.9)
    data = make_results(own, slow, fast, make_row(timing="cuda_graph", median_ms=0.5))
    data["startup"] = {"cold": {"total_ms": 2500.2}, "warm": {"total_ms": 40.4}}
    data["overhead_us"] = {"functional": 9.04, "F.conv2d": 12.0, "F.conv2d pair": 24.0}
    text = table_module().table(data)
    row = "| float32 ieee, contiguous | 1.000 | 75 % | 2.900 (compile, contiguous) | 2.90x | 4.6e-07 | 1.5e-07 |"
    assert text.splitlines()[2:] == [
        row,
        "",
        "From the first call to the first result: 2500 ms with an empty disk cache, 40 ms with a warm one.",
        "Host time of a call: 9.0 us, beside 12.0 us of one `F.conv2d` and 24.0 us of the pair.",
    ]


def make_block_rows(case, floor_ms, eager_ms, **own_ms):
    """Rows of a block: `own_ms` by form, the first one being the planner's pick."""
    about = {"id": case.id, **results.about(case.problem), "timing": "events", "floor_ms": floor_ms, "rel_error": 2e-3}
    rows = []
    for form, ms in own_ms.items():
        how = {"path": "sm90", "form": form} if form != "torch" else {"path": "torch", "form": None}
        rows.append({**about, "impl": "cutlass_sep", "median_ms": ms, **how} | ({"forced": True} if rows else {}))
    peer = {**about, "impl": "eager", "path": None, "form": None, "median_ms": eager_ms}
    return [*rows, peer, {**peer, "layout": "channels_last", "median_ms": 2 * eager_ms}]


def test_the_table_of_the_block_follows():
    rows = make_block_rows(inputs.lead1d("bfloat16"), 0.1, 1.0, fused=0.125, two_kernel=0.5)
    data = make_results(make_row(median_ms=1.0), make_peer(median_ms=2.0), *rows)
    _, _, _, empty, heading, _, *table = table_module().table(data).splitlines()
    assert empty == "" and "[32,256,4096]" in heading
    assert table[2:] == [
        "| bfloat16, contiguous, fused | 0.125 | 80 % | 1.000 (eager, contiguous) | 8.00x | 2.0e-03 | 2.0e-03 |",
        "| bfloat16, contiguous, two_kernel, path sm90 asked for | 0.500 | 20 % | 1.000 (eager, contiguous) | 2.00x "
        "| 2.0e-03 | 2.0e-03 |",
    ]


def test_the_table_takes_a_peer_that_the_sweep_has_of_the_same_block():
    case = inputs.lead1d("bfloat16")
    swept = next(c for c in inputs.sweep1d() if inputs.is_lead(c.problem))
    own, eager, _ = make_block_rows(case, 0.1, 1.0, fused=0.125)
    tuned = eager | {"id": swept.id, "impl": "compile-max-autotune", "median_ms": 0.5}
    rows = [own, eager, eager | {"id": swept.id, "median_ms": 1.02}, tuned]
    data = make_results(make_row(median_ms=1.0), make_peer(median_ms=2.0), *rows)
    *_, line = table_module().table(data).splitlines()
    peer = "0.500 (compile-max-autotune, contiguous) | 4.00x"
    assert line == f"| bfloat16, contiguous, fused | 0.125 | 80 % | {peer} | 2.0e-03 | 2.0e-03 |"


@pytest.mark.skipif(not (ROOT / "benchmarks/results/h200.json").exists(), reason="no results of an H200 are committed")
def test_the_readme_has_the_committed_numbers():
    module = table_module()
    assert module.section(module.README.read_text()) == module.table(results.load(module.RESULTS))


# --- the results of GPU tests

GPU_TEST_FILE = """
import pytest
from cutlass_sep import planner
from cutlass_sep.bench import inputs, results

PROBLEM = inputs.lead().problem


def test_runs(record_property):
    schedule = planner.plan(PROBLEM, "sm_90a").schedule
    record_property("ran", results.ran(PROBLEM, schedule.path, schedule, "sm_90a"))
    record_property("ran", results.ran(PROBLEM, "torch", None, "sm_90a"))


def test_fails():
    assert 1 == 2, "one is not two"


def test_skips():
    pytest.skip("no time")


@pytest.fixture
def broken():
    raise RuntimeError("no fixture")


def test_has_no_fixture(broken):
    pass
"""


def run_gpu_tests(folder, *arguments):
    """Run the file above with the plugin; its results."""
    (folder / "test_there.py").write_text(GPU_TEST_FILE)
    target = folder / "results.json"
    plugin = ["-p", "tests.gpu_results", "--gpu-results", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, *arguments, str(folder / "test_there.py")],
        cwd=ROOT, env=environment, capture_output=True, check=False,
    )  # fmt: skip
    return json.loads(target.read_text())


def outcomes(data):
    return {
        test.split("::")[1]: (outcome, reason)
        for outcome in ("passed", "failed", "skipped")
        for test, reason in data[outcome]
    }


def test_the_plugin_records_outcomes_and_what_ran(tmp_path):
    data = run_gpu_tests(tmp_path)
    found = outcomes(data)
    assert found["test_runs"] == ("passed", "")
    assert found["test_fails"][0] == "failed" and "one is not two" in found["test_fails"][1]
    assert found["test_skips"][0] == "skipped" and "no time" in found["test_skips"][1]
    assert found["test_has_no_fixture"][0] == "failed" and "no fixture" in found["test_has_no_fixture"][1]
    assert len(found) == 4
    assert data["paths"] == {"sm90": 1, "portable": 0, "torch": 1}
    assert results.digest_of_problems(data["problems"]) == data["digest"]
    assert {entry["test"].split("::")[1] for entry in data["problems"]} == {"test_runs"}


def test_the_plugin_keeps_other_outcomes_of_the_same_kernels(tmp_path):
    run_gpu_tests(tmp_path, "-k", "runs")
    data = run_gpu_tests(tmp_path, "-k", "skips", "--gpu-results-append")
    assert set(outcomes(data)) == {"test_runs", "test_skips"} and data["paths"]["sm90"] == 1
    assert set(outcomes(run_gpu_tests(tmp_path, "-k", "skips"))) == {"test_skips"}
    data = run_gpu_tests(tmp_path, "-k", "runs")
    (tmp_path / "results.json").write_text(json.dumps({**data, "digest": "of older kernels"}))
    data = run_gpu_tests(tmp_path, "-k", "skips", "--gpu-results-append")
    assert set(outcomes(data)) == {"test_skips"}


# --- the committed files


def report_stale(data):
    if "stale" in data:
        pytest.skip(f"the results are older than the kernels: {data['stale']}")


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_committed_benchmarks_are_of_these_kernels(path):
    data = results.load(path)
    report_stale(data)
    assert results.digest(data["rows"]) == data["digest"]
    assert all(results.is_current(row) for row in data["rows"])


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_the_planner_picks_what_was_measured(path):
    data = results.load(path)
    report_stale(data)
    for row in data["rows"]:
        if row["impl"] != results.OWN or row.get("tuned"):
            continue
        asked = (row["path"], row["form"]) if row.get("forced") else ()
        chosen = planner.plan(results.problem_of(row), row["arch"], *asked)
        assert chosen.path == row["path"], row["id"]
        assert (chosen.schedule.to_json() if chosen.schedule else None) == row["schedule"], row["id"]


@pytest.mark.skipif(not GPU_TESTS.exists(), reason="no results of GPU tests are committed")
def test_committed_gpu_tests_are_of_these_kernels():
    data = json.loads(GPU_TESTS.read_text())
    report_stale(data)
    assert results.digest_of_problems(data["problems"]) == data["digest"]
    assert data["failed"] == []
    counted = {path: sum(entry["path"] == path for entry in data["problems"]) for path in ("sm90", "portable", "torch")}
    assert data["paths"] == counted
