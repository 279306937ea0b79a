"""The report of a results file: what a layer's speed-up is, the page's numbers, and the flags that ask for it."""

import base64
import html.parser
import json
import math
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cutlass_sep import cli, commands
from cutlass_sep.bench import ceilings, inputs, plots, report, results, session
from cutlass_sep.block_schedule import BlockSchedule
from cutlass_sep.schedule import Schedule

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
LIMITS = {"copy_TBps": 4.0, "bf16_TFLOPS": 800.0, "fp16_TFLOPS": 750.0, "tf32_TFLOPS": 400.0, "fp32_TFLOPS": 50.0}
PNG = b"\x89PNG\r\n\x1a\n"


def named(name, dtype="bfloat16", base=None):
    """A case under this name: the lead shape of the 2-D operator, or another one."""
    case = inputs.variant(base or inputs.lead(), dtype, "contiguous", "ieee")
    return inputs.Case(name, case.problem)


def row(case, impl, ms, layout="contiguous", path=None, form=None, **changes):
    """One row of a results file; the rows of `impl` "cutlass_sep" name a path."""
    case = inputs.variant(case, case.problem.dtype, layout, case.problem.fp32_precision)
    made = {
        "id": case.id, **results.about(case.problem), "impl": impl, "timing": "events", "path": path, "form": form,
        "schedule": {} if path not in (None, "torch") else None, "arch": "sm_90a" if path else None, "median_ms": ms,
        "p10_ms": 0.9 * ms, "p90_ms": 1.1 * ms, "runs": 40, "floor_ms": 0.25, "floor_kind": "bytes",
        "rel_error": 2e-3, "max_abs_error": 1e-2,
    }  # fmt: skip
    return made | ({"measured": {}} if path is None else {"digest": "0"}) | changes


def own(case, ms, path="sm90", **changes):
    return row(case, "cutlass_sep", ms, path=path, **changes)


def make_results(*rows, **changes):
    where = {
        "gpu": "A <GPU>", "driver": "1.2", "torch": "2.9", "cudnn": 90100, "nvrtc": "13.0", "cutlass": "4.2.0.0",
        "date": "2026-01-02",
    }  # fmt: skip
    return {"schema": 1, "digest": "", "environment": where, "ceilings": LIMITS, "rows": list(rows), **changes}


A, B, C = named("a"), named("b"), named("c")
#: 4x and 1x over the best peer on kernels, 1/2 on path torch; c has nothing to be compared with.
ROWS = [
    own(A, 1.0, layout="contiguous"),
    own(A, 0.5, layout="channels_last", tuned=True, rel_error=2.1e-3),
    row(A, "eager", 6.0),
    row(A, "eager", 5.0, "channels_last", rel_error=2.5e-3),
    row(A, "compile", 2.0, measured={"torch": "2.9", "date": "2026-01-01", "gpu": "A <GPU>"}),
    row(A, "compile", 3.0, "channels_last"),
    own(B, 2.0, path="torch"),
    row(B, "eager", 1.0),
    own(C, 0.5, path="portable", note="without <the residual>"),
]
SWEPT = named("sweep1d.x", base=inputs.lead1d())


def only(found):
    (one,) = found
    return one


def layers(*rows):
    groups, _ = report.collect(rows)
    return {layer.row["id"]: layer for group in groups for layer in group.layers}


def test_the_faster_layout_of_each_counts():
    found = layers(*ROWS)
    a, b, c = found["a"], found["b"], found["c"]
    assert (a.row["median_ms"], a.row["layout"]) == (0.5, "channels_last")
    assert {name: peer["median_ms"] for name, peer in a.peers.items()} == {"eager": 5.0, "compile": 2.0}
    assert (a.best["impl"], a.speedup, a.of_floor, a.slower) == ("compile", 4.0, 0.5, False)
    assert (b.speedup, b.slower, b.own_kernel) == (0.5, True, False)
    assert (c.speedup, c.best, c.slower, c.own_kernel) == (None, None, False, True)


def test_rows_that_differ_in_problem_precision_or_timing_are_layers_of_their_own():
    small = inputs.Case("a", replace(A.problem, n=1))
    rows = [own(A, 1.0), own(small, 0.1), own(A, 2.0, timing="cuda_graph"), own(named("a", "float32"), 3.0)]
    groups, _ = report.collect([*rows, row(A, "eager", 4.0)])
    assert [(group.name, len(group.layers), len(group.compared)) for group in groups] == [
        ("bfloat16.events", 2, 1), ("float32.ieee.events", 1, 0), ("bfloat16.cuda_graph", 1, 0)
    ]  # fmt: skip
    assert groups[0].title == "bfloat16" and groups[2].title == "bfloat16, CUDA graph, batch 16"


def test_a_forced_row_counts_only_where_nothing_was_picked():
    forced = own(A, 0.1, path="portable", forced=True)
    a = layers(own(A, 1.0), forced)["a"]
    assert a.row["median_ms"] == 1.0 and a.forced == [forced]
    assert a.notes == "asked for: portable 0.1 ms"
    alone = layers(forced)["a"]
    assert alone.row is forced and alone.forced == []
    assert alone.notes == "path or form asked for"


def test_a_peer_measured_under_another_name_is_said():
    lent = row(B, "compile", 3.0)
    a = layers(own(A, 1.0), row(A, "eager", 6.0), own(B, 2.0), row(B, "eager", 6.1), lent)["a"]
    assert (a.best["median_ms"], a.speedup, a.notes) == (3.0, 3.0, "compile measured as b")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0012345, "0.00123"), (9.996, "10.0"), (99.94, "99.9"), (99.96, "100"), (1234.4, "1234")],
)
def test_numbers_have_three_digits_and_end_in_one(value, text):
    assert report._number(value) == text


def test_headline_numbers():
    swept = [own(SWEPT, 1.0, form="fused"), row(SWEPT, "eager", 9.0)]
    groups, without = report.collect([*ROWS, *swept, row(named("d"), "eager", 1.0)])
    layer_group, sweep = groups
    assert without == 1
    assert layer_group.mean == pytest.approx(math.sqrt(4 * 0.5))
    assert layer_group.mean_own_kernel == pytest.approx(4.0)
    assert layer_group.to_json() == {
        "group": "bfloat16, batch 16", "layers": 3, "compared": 2, "mean_speedup": layer_group.mean, "own_kernel": 2,
        "mean_speedup_own_kernel": layer_group.mean_own_kernel, "torch": 1, "slower": 1, "median_of_floor": 0.5,
        "peers": {"eager": 2, "compile": 1, "compile-max-autotune": 0},
    }  # fmt: skip
    assert (sweep.title, sweep.mean) == ("sweep of the 1-D block, bfloat16, batch 32", pytest.approx(9.0))
    assert [entry["group"] for entry in report._summary(groups)] == [layer_group.title, sweep.title]
    more, _ = report.collect([*ROWS, own(A, 1.0, timing="cuda_graph"), row(A, "eager", 8.0, timing="cuda_graph")])
    *_, together = report._summary(more)
    assert (together["group"], together["layers"], together["torch"]) == ("all of them", 4, 1)
    assert together["mean_speedup"] == pytest.approx((4 * 0.5 * 8) ** (1 / 3))


def test_the_limit_is_that_of_eager_in_the_same_layout():
    assert layers(*ROWS)["a"].limit == pytest.approx(1.1 * 2.5e-3)
    assert layers(*ROWS)["c"].limit is None
    lead = named("lead", "float32")
    other = inputs.Case("other", replace(named("other", "float32", inputs.lead1d()).problem, n=1))
    for case, error, limit in ((lead, 1e-8, 4e-8), (other, 1e-8, 5e-7), (other, 3e-7, 1.2e-6)):
        rows = own(case, 1.0, form="fused" if case is other else None), row(case, "eager", 2.0, rel_error=error)
        assert layers(*rows)[case.id].limit == pytest.approx(limit)


def test_layers_are_told_in_words():
    pair = replace(A.problem, stride=(2, 2), dilation=(1, 2), mid_activation="relu", activation="silu")
    block = replace(SWEPT.problem, dilation=3)
    found = layers(own(inputs.Case("pair", pair), 1.0), own(inputs.Case("block", block), 1.0, form="two_kernel"))
    assert found["pair"].in_words == (
        "batch 16, 512×512 pixels, 64 → 128 channels, kernel 3×3, stride 2×2, dilation 1×2, relu, silu"
    )
    assert found["block"].in_words == ("batch 32, length 4096, 256 → 512 → 256 channels, kernel 9, dilation 3, gelu")
    assert found["block"].kind == "sm90, two kernels"
    assert found["pair"].kind == "sm90"
    planes = own(A, 1.0) | {"schedule": Schedule("sm90", 64, 64, 1, 4, 2, plane_rows=8, plane_columns=64).to_json()}
    assert layers(planes)[A.id].kind == "sm90, two kernels"
    half = Schedule("sm90", 64, 64, 1, 4, 2)
    schedule = BlockSchedule("two_kernel", "sm90", half, replace(half, thread_rows=1, thread_columns=4))
    three = own(inputs.Case("block", block), 1.0, form="two_kernel") | {"schedule": schedule.to_json()}
    assert layers(three)["block"].kind == "sm90, three kernels"


# --- the page


class Page(html.parser.HTMLParser):
    """Rows of cells of every table, text outside of markup, images and other references."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.text, self.images, self.references, self.tags = [], "", [], [], set()
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "img":
            self.images.append(attributes["src"])
            assert attributes["alt"]
        self.references += [value for name, value in attributes.items() if name in ("href", "src")]
        self._cell = tag in ("td", "th")

    def handle_endtag(self, tag):
        self._cell = False

    def handle_data(self, data):
        self.text += data
        if self._cell:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, what write returned, the page) of ROWS and a sweep."""
    folder = tmp_path_factory.mktemp("report")
    forced = own(SWEPT, 2.0, form="two_kernel", forced=True)
    rows = [*ROWS, own(SWEPT, 1.0, form="fused"), forced, row(SWEPT, "eager", 9.0), row(named("d"), "eager", 1.0)]
    said = report.write(folder, make_results(*rows, stale="kernels <changed>"))
    return folder, said, Page((folder / "index.html").read_text(encoding="utf-8"))


def test_files(written):
    folder, said, _ = written
    assert sorted(said["files"]) == sorted(path.name for path in folder.iterdir()) == [
        "index.html", "roofline.png", "speedup.bfloat16.events.png", "speedup.png",
        "speedup.sweep1d.bfloat16.events.png", "sweep1d.bfloat16.events.png",
    ]  # fmt: skip
    for name in said["files"][1:]:
        assert (folder / name).read_bytes().startswith(PNG)
    assert said["directory"] == str(folder)


def test_the_page_holds_all_it_shows(written):
    folder, said, page = written
    prefix = "data:image/png;base64,"
    shown = {base64.b64decode(image.removeprefix(prefix)) for image in page.images if image.startswith(prefix)}
    assert shown == {(folder / name).read_bytes() for name in said["files"][1:]}
    assert all(reference.startswith((prefix, "#")) for reference in page.references)
    assert not page.tags & {"script", "link", "iframe"}


def test_the_page_says_where_and_with_what(written):
    _, _, page = written
    text = re.sub(r"\s+", " ", page.text)
    assert (
        "Measured on 2026-01-02 on an A <GPU>: driver 1.2, torch 2.9, cudnn 90100, nvrtc 13.0, cutlass 4.2.0.0." in text
    )
    assert "a copy 4.00 TB/s, read and written, bf16 matrix products 800 TFLOP/s" in text
    assert "Some rows of peers are from another session: date 2026-01-01." in text
    assert "These results are older than the kernels: kernels <changed>" in text
    assert "1 problem of the results file has rows of peers alone and is not shown." in text


def test_the_tables_have_the_numbers(written):
    _, _, page = written
    summary, of_layers, of_sweep = page.tables
    assert summary[1:] == [
        ["bfloat16, batch 16", "3", "1.41×", "2", "4.00×", "1", "1", "50 %", "2", "1", "0"],
        ["sweep of the 1-D block, bfloat16, batch 32", "1", "9.00×", "1", "9.00×", "0", "0", "25 %", "1", "0", "0"],
    ]
    words = "batch 16, 512×512 pixels, 64 → 128 channels, kernel 3×3"
    assert of_layers[1:] == [
        ["a", words, "sm90", "channels_last", "0.500", "0.450 – 0.550", "4.00×", "10.00×", "4.00×", "–",
         "50 % (bytes)", "2.1e-03", "2.8e-03", "tuned"],
        ["b", words, "torch", "contiguous", "2.00", "1.80 – 2.20", "0.50×", "0.50×", "–", "–", "12 % (bytes)",
         "2.0e-03", "2.2e-03", ""],
        ["c", words, "portable", "contiguous", "0.500", "0.450 – 0.550", "–", "–", "–", "–", "50 % (bytes)",
         "2.0e-03", "–", "without <the residual>"],
    ]  # fmt: skip
    assert of_sweep[1][0] == "sweep1d.x" and of_sweep[1][-1] == "asked for: sm90 two_kernel 2 ms"
    for table in page.tables:
        assert len({len(cells) for cells in table}) == 1, "every row has a cell for each column"


def test_no_peers_and_no_ceilings_leave_out_what_needs_them(tmp_path):
    made = make_results(own(A, 1.0), ceilings={})
    made["environment"]["driver"] = None  # where nothing says it
    said = report.write(tmp_path, made)
    assert said["files"] == ["index.html", "roofline.png"]
    page = Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert "Speed-up of every layer" not in page.text and "can do at most" not in page.text
    assert "driver unknown, torch 2.9," in " ".join(page.text.split())
    assert said["summary"][0]["mean_speedup"] is None
    with pytest.raises(ValueError, match="no row of cutlass_sep"):
        report.write(tmp_path, make_results(row(A, "eager", 1.0)))


def test_every_kind_of_row_has_a_colour():
    kinds = {(path, form) for path in ("sm90", "portable") for form in (None, "fused", "two_kernel")}
    found = {layers(own(SWEPT, 1.0, path=path, form=form))["sweep1d.x"].kind for path, form in kinds}
    found |= {layers(own(A, 1.0, path="torch"))["a"].kind}
    assert found | {"sm90, three kernels"} == set(plots._KINDS)


def test_marks_stand_as_far_under_the_roof_as_the_layer_is_from_its_floor():
    """The roofs and the points are made of what the floor is made of."""
    for base in (inputs.lead(), inputs.lead1d()):
        for dtype in ("bfloat16", "float16", "float32"):
            case = named("x", dtype, base)
            floor_ms, _ = ceilings.floor(case.problem, LIMITS)
            form = "fused" if base.problem.op == "sepblock1d" else None
            layer = layers(own(case, 4 * floor_ms, form=form, floor_ms=floor_ms))["x"]
            _, tensor, copy = only(plots._roofs(report.Group("", "", [layer]), LIMITS))
            roof = min(plots._intensity(layer) * copy, tensor)
            assert plots._rate(layer, layer.row) / roof == pytest.approx(layer.of_floor) == pytest.approx(0.25)


def test_the_sweep_has_a_panel_for_every_extent():
    rows = []
    for case in inputs.sweep1d():
        case = named(case.id, base=case)
        if case.problem.e == 1536:
            rows += [own(case, 1.0, path="torch"), own(case, 1.25, form="two_kernel", forced=True)]
        elif case.problem.kernel == 31:
            rows += [own(case, 0.5, form="two_kernel")]
        else:
            rows += [own(case, 0.1, form="fused"), own(case, 0.5, form="two_kernel", forced=True)]
        rows += [row(case, "eager", 1.0), row(case, "eager", 2.0, "channels_last")]
    group = only(report.collect(rows)[0])
    panels = {(title, extent): points for title, extent, points in plots._sweep_panels(group.layers)}
    lengths = [2**power for power in range(6, 18)]
    assert {key: [x for x, _ in points] for key, points in panels.items()} == {
        **{(f"k = {k}, C = 256, E = 512", "L"): lengths for k in (3, 9, 31)},
        ("C = 256, L = 4096, k = 9", "E/C"): [1, 2, 4, 6],
        ("E = 2C, L = 4096, k = 9", "C"): [64, 128, 256, 512],
    }
    timed = {
        key: [plots._swept(points[-1][1], line) for line in ("fused", "two_kernel", "eager")]
        for key, points in panels.items()
    }
    assert timed["k = 9, C = 256, E = 512", "L"] == [(0.1, True), (0.5, False), (1.0, False)]
    assert timed["k = 31, C = 256, E = 512", "L"] == [None, (0.5, True), (1.0, False)]
    assert timed["C = 256, L = 4096, k = 9", "E/C"] == [None, (1.25, False), (1.0, True)]
    assert plots.sweep(group).startswith(PNG)


# --- the flags


@pytest.fixture
def run_json(capsys):
    def call(*arguments):
        status = cli.main(["bench", *map(str, arguments), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def small(tmp_path):
    """A results file."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps(make_results(*ROWS)))
    return path


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(session, "run", lambda *arguments: pytest.fail("measured"))


def test_a_report_of_a_file_needs_no_gpu(no_gpu, run_json, small, tmp_path):
    folder = tmp_path / "deep" / "report"
    status, data = run_json("--from", small, "--report", folder)
    assert status == 0
    assert (data["gpu"], data["from"]) == (None, str(small))
    assert set(data["report"]["files"]) == {path.name for path in folder.iterdir()}
    (summary,) = data["report"]["summary"]
    assert (summary["layers"], summary["torch"]) == (3, 1)
    assert summary["mean_speedup"] == pytest.approx(math.sqrt(2))


@pytest.mark.skipif(not RESULTS.exists(), reason="no results of an H200 are committed")
def test_committed_results_can_be_reported(no_gpu, run_json, tmp_path):
    status, data = run_json("--from", RESULTS, "--report", tmp_path)
    rows = [r for r in results.load(RESULTS)["rows"] if r["impl"] == "cutlass_sep"]
    problems = {json.dumps([r[name] for name in ("id", "shape", "dtype", "fp32_precision", "timing")]) for r in rows}
    groups = [entry for entry in data["report"]["summary"] if entry["group"] != "all of them"]
    assert status == 0 and sum(entry["layers"] for entry in groups) == len(problems)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--suite", "lead"], ["--rows", "0:1"], ["--peers", "eager"], ["--timing", "cuda_graph"], ["--samples", "3"],
        ["--startup"], ["--output", "x.json"], ["--append"], ["--shape", "1,8,9,9"], ["--op", "sepblock1d"],
        ["--dtype", "float32"], ["--no-bias"], ["--path", "portable"], ["--fp32-precision", "tf32"],
    ],
)  # fmt: skip
def test_a_file_contradicts_whatever_says_what_to_measure(no_gpu, run_json, small, tmp_path, arguments):
    status, data = run_json("--from", small, "--report", tmp_path / "report", *arguments)
    assert status == 2
    assert arguments[0].replace("--no-", "--") in data["message"] and "--from" in data["message"]
    assert not (tmp_path / "report").exists()


def test_wrong_usage_is_named(no_gpu, run_json, small, tmp_path):
    status, data = run_json("--from", small)
    assert status == 2 and "--report" in data["message"]
    empty, other, strange = (tmp_path / f"{name}.json" for name in ("empty", "other", "strange"))
    empty.write_text(json.dumps(make_results(row(A, "eager", 1.0))))
    other.write_text("{}")
    strange.write_text(json.dumps(make_results(1)))
    for path, what in (
        (empty, "no row of cutlass_sep"), (other, "schema"), (strange, "no results file"),
        (tmp_path / "none.json", "none"),
    ):  # fmt: skip
        status, data = run_json("--from", path, "--report", tmp_path / "report")
        assert status == 2 and what in data["message"] and "--from" in data["message"]
    status, data = run_json("--from", small, "--report", small)
    assert status == 2 and data["message"].startswith("--report")


def test_without_matplotlib_nothing_is_measured(no_gpu, run_json, monkeypatch, small, tmp_path):
    import cutlass_sep.bench

    monkeypatch.delattr(cutlass_sep.bench, "plots")
    monkeypatch.delitem(sys.modules, "cutlass_sep.bench.plots")
    for name in ("matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(commands, "_require_device", lambda command: torch.device("cpu"))
    for arguments in ([], ["--from", small]):
        status, data = run_json("--report", tmp_path / "report", *arguments)
        assert status == 3 and data["error"] == "EnvironmentProblem"
        assert "pip install matplotlib" in data["message"]
    assert not (tmp_path / "report").exists()


def test_a_session_is_reported_with_all_rows_of_its_results(run_json, monkeypatch, tmp_path):
    """A file that was appended to has rows that this session did not measure."""
    monkeypatch.setattr(commands, "_require_device", lambda command: torch.device("cpu"))
    finished = session.Finished(make_results(*ROWS), measured=ROWS[:1])
    monkeypatch.setattr(session, "run", lambda *arguments: finished)
    status, data = run_json("--report", tmp_path / "report")
    assert status == 0 and data["results"]["rows"] == ROWS
    assert data["report"]["summary"][0]["layers"] == 3
    assert (tmp_path / "report" / "index.html").exists()
    nothing = types.SimpleNamespace(ok=False, results=make_results(), to_json=lambda: {"ok": False})
    monkeypatch.setattr(session, "run", lambda *arguments: nothing)
    status, data = run_json("--report", tmp_path / "none")
    assert status == 1 and "report" not in data
    assert list((tmp_path / "none").iterdir()) == []
