"""Plans and sources of earlier processes: found again where nothing changed, made anew where anything did."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import LEAD, LEAD_BLOCK, problem_of
from tiny_kernel import forget

import cutlass_sep
from cutlass_sep import cache, compiler, kept, kernel, op, planner, schedule, source
from cutlass_sep.planner import Plan

REPOSITORY = Path(__file__).parents[1]
ARCH = "sm_90a"
LATE = replace(LEAD, n=32, c=1536, o=2048, h=16, w=16)
#: One problem a form of kernels, and one for which PyTorch is planned.
PROBLEMS = {
    "2-D": problem_of(LEAD),
    "fused": problem_of(LEAD_BLOCK, "bf16"),
    "two_kernel": problem_of(LEAD_BLOCK),
    "torch": problem_of(LATE, "bf16", "contiguous"),
}
_DIGEST = kept._digest


@pytest.fixture(autouse=True)
def folder(nothing_is_kept: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which plans and sources are kept however little time they take."""
    _DIGEST.cache_clear()
    monkeypatch.setattr(kept, "_digest", _DIGEST)
    monkeypatch.setattr(planner, "KEEP_SECONDS", 0.0)
    path = tmp_path / "cache"
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(path))
    forget()
    yield path
    forget()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two files, as old as those that this process has loaded."""
    path = tmp_path / "package"
    path.mkdir()
    (path / "planner.py").write_text("1")
    (path / "schedule.py").write_text("2")
    monkeypatch.setattr(kept, "_LOADED_NS", 1 << 63)
    return path


def entries(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_new_process_neither_plans_nor_renders() -> None:
    code = """
        import hashlib, json, sys
        import torch
        from cutlass_sep import dispatch, kernel, planner, schedule
        from test_kept import PROBLEMS
        planner.KEEP_SECONDS = 0.0
        found = []
        for problem in PROBLEMS.values():
            plan = dispatch.choose(problem, torch.device("meta"))
            chosen = plan.schedule or plan.kernel
            text = kernel.make(problem, chosen, "sm_90a").source
            found.append([plan.path, plan.reason, chosen.to_json(), hashlib.sha256(text.encode()).hexdigest()])
        work = [planner.plan.cache_info().misses, schedule.ranked.cache_info().misses, "jinja2" in sys.modules]
        print(json.dumps([found, work]))
    """
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    runs = [subprocess.run(command, env=environment, capture_output=True, check=True).stdout for _ in range(2)]
    (found, (plans, rankings, jinja)), (again, work) = map(json.loads, runs)
    assert [path for path, *_ in found] == ["sm90", "sm90", "sm90", "torch"]
    assert (plans, rankings > 0, jinja) == (4, True, True)
    assert again == found
    assert work == [0, 0, False]


# --- keys ----------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_found_by_equal_arguments_and_files_alone(package: Path) -> None:
    arguments = {"a": 1, "b": [2, None]}
    kept.keep(".plan", "name", arguments, b"payload", package)
    assert kept.load(".plan", "name", arguments, package) == b"payload"
    assert kept.load(".source", "name", arguments, package) is None
    assert kept.load(".plan", "name", {**arguments, "a": 2}, package) is None
    assert kept.load(".plan", "name", arguments, package, kept.PACKAGE) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda package: (package / "planner.py").write_text("3"),
        lambda package: (package / "planner.py").write_text("12") and (package / "schedule.py").write_text(""),
        lambda package: (package / "planner.py").rename(package / "a.py"),
        lambda package: (package / "schedule.py").unlink(),
        lambda package: (package / "more.py").write_text(""),
    ],
    ids=["contents", "where files end", "name", "gone", "new"],
)
def test_another_state_of_the_files_sees_nothing(change, package: Path) -> None:
    kept.keep(".plan", "name", {}, b"payload", package)
    before = {path.name: path.read_text() for path in package.iterdir()}
    change(package)
    _DIGEST.cache_clear()
    assert kept.load(".plan", "name", {}, package) is None
    for path in package.iterdir():
        path.unlink()
    for name, text in before.items():
        (package / name).write_text(text)
    _DIGEST.cache_clear()
    assert kept.load(".plan", "name", {}, package) == b"payload", "the first state again"


def test_the_files_of_the_package_and_the_templates_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which folders' contents a plan and a source belong to."""
    seen: dict[str, tuple] = {}
    monkeypatch.setattr(kept, "load", lambda suffix, name, arguments, *folders: seen.update({suffix: folders}))
    problem = PROBLEMS["2-D"]
    source.render(problem, planner.planned(problem, ARCH).schedule, ARCH)
    assert seen == {".plan": (kept.PACKAGE,), ".source": (kept.PACKAGE, source.templates())}
    assert Path(cutlass_sep.__file__).parent == kept.PACKAGE


def test_files_that_changed_before_the_first_look_are_not_those_loaded(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.keep(".plan", "name", {}, b"payload", package)
    _DIGEST.cache_clear()
    monkeypatch.setattr(kept, "_LOADED_NS", (package / "planner.py").stat().st_ctime_ns)
    assert kept.load(".plan", "name", {}, package) is None


def test_what_is_made_after_files_changed_is_not_kept(
    folder: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come from a module, or a template, that was loaded since."""
    assert kept.load(".plan", "name", {}, package) is None
    monkeypatch.setattr(kept, "_LOADED_NS", (package / "planner.py").stat().st_ctime_ns)
    kept.keep(".plan", "name", {}, b"payload", package)
    assert entries(folder, ".plan") == []


def test_a_package_without_files_of_its_own_keeps_nothing(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "package.zip" / "cutlass_sep"
    kept.keep(".plan", "name", {}, b"payload", archive)
    assert kept.load(".plan", "name", {}, archive) is None
    assert not folder.exists()


# --- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_kept_plan_is_the_plan(problem, folder: Path) -> None:
    plan = planner.plan(problem, ARCH)
    assert planner.planned(problem, ARCH) == planner.planned(problem, ARCH) == plan
    assert len(entries(folder, ".plan")) == 1
    assert (plan.schedule is None) == (plan.kernel is not None)


def test_a_plan_is_kept_by_all_that_it_is_asked_for(folder: Path) -> None:
    block = PROBLEMS["fused"]
    asked = [
        (block, ARCH),
        (replace(block, n=1), ARCH),
        (block, "sm_80"),
        (block, ARCH, "portable"),
        (block, ARCH, None, "two_kernel"),
        (problem_of(LEAD, "bf16"), ARCH),
    ]
    made = [planner.planned(*arguments) for arguments in asked]
    assert len(entries(folder, ".plan")) == len(asked)
    assert [planner.planned(*arguments) for arguments in asked] == made
    assert made == [planner.plan(*arguments) for arguments in asked]


def test_what_takes_no_planning_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planner.planned(PROBLEMS["2-D"], ARCH, "torch").reason == "asked for"
    assert planner.planned(replace(PROBLEMS["2-D"], dtype="float64", fp32_precision=None), ARCH).path == "torch"
    # Nor what is planned at once, because the layer's schedules are known from another size.
    monkeypatch.setattr(planner, "KEEP_SECONDS", 60.0)
    assert planner.planned(PROBLEMS["2-D"], ARCH).path == "sm90"
    assert not folder.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record | {"schedule": record["schedule"] | {"since_then": 1}},
        lambda record: record | {"schedule": record["schedule"] | {"tile_oc": 7}},
        lambda record: record | {"kernel": {}},
        lambda record: record | {"kernel": record["schedule"] | {"tile_oc": 7}},
        lambda record: {name: value for name, value in record.items() if name != "kernel"},
        lambda record: [record],
        lambda record: None,
    ],
    ids=["another field", "illegal", "no fields", "illegal kernel", "kernel missing", "list", "null"],
)
def test_a_plan_that_cannot_be_read_is_made_and_kept_again(damage, folder: Path) -> None:
    problem = PROBLEMS["2-D"]
    plan = planner.planned(problem, ARCH)
    (path,) = entries(folder, ".plan")
    good = path.read_bytes()
    payload, header = cache._decode(good)
    cache.store().save(header["key"], problem.op, json.dumps(damage(json.loads(payload))).encode(), {}, ".plan")
    assert path.read_bytes() != good
    assert planner.planned(problem, ARCH) == plan
    assert path.read_bytes() == good


def test_an_op_takes_the_kept_kernel_where_pytorch_is_planned() -> None:
    problem = PROBLEMS["torch"]
    tensors = LATE.tensors("meta", torch.bfloat16, "contiguous")
    planner.planned(problem, ARCH)
    planner.plan.cache_clear()
    before = schedule.ranked.cache_info()
    made = op.DepthwiseSeparableConv2d(*tensors, **LATE.options, arch=ARCH)
    assert schedule.ranked.cache_info() == before, "schedules were ranked"
    assert made.problem == problem
    assert (made.path, made.schedule) == ("sm90", planner.candidates(problem, ARCH)[0])


# --- sources -------------------------------------------------------------------------------------------------------


def test_one_source_is_kept_for_all_sizes(folder: Path) -> None:
    for name, other in (("2-D", {"n": 3, "h": 40, "w": 64}), ("two_kernel", {"n": 3, "l": 72})):
        problem = PROBLEMS[name]
        chosen = planner.plan(problem, ARCH).schedule
        text = source.render(problem, chosen, ARCH)
        assert source.render(replace(problem, **other), chosen, ARCH) == text
        assert text == source.render_anew(problem, chosen, ARCH)
    assert len(entries(folder, ".source")) == 2


def test_alignment_belongs_to_the_layer() -> None:
    """Contiguous rows of 72 elements are aligned, of 73 they are not; both are the same layer at another alignment."""
    for problem in (PROBLEMS["2-D"], PROBLEMS["two_kernel"]):
        even, odd = (replace(problem, **{problem.sizes[-1]: extent}) for extent in (72, 73))
        assert even.layer == problem.layer
        # Also of a problem that claims more than its rows allow.
        assert (odd.alignment, odd.layer.alignment) == (16, 4)
        assert odd.with_alignment(16).layer == odd.layer


def test_a_source_is_kept_by_all_that_it_is_made_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS["2-D"]
    first, second = planner.candidates(problem, ARCH)[:2]
    asked = [
        (problem, first, ARCH),
        (problem, second, ARCH),
        (replace(problem, pw_bias=True), first, ARCH),
        (problem, planner.candidates(problem, "sm_80")[0], "sm_80"),
        (problem, planner.candidates(problem, "sm_80")[0], "sm_86"),
    ]
    texts = [source.render(*arguments) for arguments in asked]
    assert len(set(texts)) == len(entries(folder, ".source")) == len(asked)
    assert [source.render(*arguments) for arguments in asked] == texts
    for version in ("3.0", "3.1"):
        monkeypatch.setattr(source, "version_of", lambda name, version=version: version)
        assert source.render(*asked[0]) == texts[0]
    assert len(entries(folder, ".source")) == len(asked) + 2


def test_a_kept_source_does_not_decide_the_cubin(folder: Path) -> None:
    """Its text is in the cubin's key like any other: where it is another text, another cubin is built."""
    problem = PROBLEMS["2-D"]
    chosen = planner.plan(problem, ARCH).schedule
    text = source.render(problem, chosen, ARCH)
    (path,) = entries(folder, ".source")
    _, header = cache._decode(path.read_bytes())
    other = text + "// another\n"
    cache.store().save(header["key"], problem.op, other.encode(), {}, ".source")
    assert source.render(problem, chosen, ARCH) == other
    key, another = (compiler.digest(compiler.key_document(t, ARCH)) for t in (text, other))
    assert compiler.digest(compiler.key_document(kernel.make(problem, chosen, ARCH).source, ARCH)) == another != key


# --- the cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".plan", ".source"])
def test_a_damaged_entry_heals(suffix: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    problem = PROBLEMS["2-D"]

    def made() -> tuple[Plan, str]:
        plan = planner.planned(problem, ARCH)
        return plan, source.render(problem, plan.schedule, ARCH)

    first = made()
    (path,) = entries(folder, suffix)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    assert made() == first
    assert path.read_bytes() == good
    (message,) = messages(caplog)
    assert str(path) in message


def test_a_folder_that_cannot_be_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("mine")
    problem = PROBLEMS["2-D"]
    plan = planner.planned(problem, ARCH)
    assert plan == planner.plan(problem, ARCH)
    assert source.render(problem, plan.schedule, ARCH) == source.render_anew(problem, plan.schedule, ARCH)
    assert folder.read_text() == "mine"
    (message,) = messages(caplog)
    assert "CUTLASS_SEP_CACHE_DIR" in message


def test_sixteen_threads_keep_the_same(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    problem = PROBLEMS["2-D"]
    plan = planner.plan(problem, ARCH)

    def made(_: int) -> tuple[Plan, str]:
        return planner.planned(problem, ARCH), source.render(problem, plan.schedule, ARCH)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(made, range(16)))
    assert set(found) == {(plan, source.render_anew(problem, plan.schedule, ARCH))}
    assert len(os.listdir(folder)) == 2 and messages(caplog) == []


def test_the_cache_counts_clears_and_evicts_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS["2-D"]
    plan = planner.planned(problem, ARCH)
    source.render(problem, plan.schedule, ARCH)
    store = cache.store()
    files = [*entries(folder, ".plan"), *entries(folder, ".source")]
    info = store.info()
    assert (info["entries"], info["bytes"]) == (0, sum(file.stat().st_size for file in files))
    assert len(files) == 2 and store.list_entries() == []
    monkeypatch.setattr(cache, "CAP_BYTES", 1)
    store.save("ab" * 32, "name", b"", {}, ".plan")
    (left,) = os.listdir(folder)
    assert left.startswith("name-")
    store.clear()
    assert os.listdir(folder) == []
