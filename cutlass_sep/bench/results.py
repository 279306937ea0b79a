"""The results files: schema, merging, and the digest that ties numbers to the kernels they were measured with."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import tokenize
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import compiler, planner
from ..block_schedule import FORMS, BlockSchedule
from ..problem import Problem, SeparableBlock1dProblem, SeparableConv2dProblem, resolve_padding
from ..schedule import Schedule
from ..source import render_anew
from .inputs import padding_argument

SCHEMA = 1
OWN = "cutlass_sep"

_PROBLEMS = {"dwsep2d": SeparableConv2dProblem, "sepblock1d": SeparableBlock1dProblem}
#: By operator: the entries of `shape`, and what else a row says of the problem.
_SHAPES = {
    "dwsep2d": ("N", "C", "O", "H", "W", "kernel", "stride", "padding", "dilation"),
    "sepblock1d": ("N", "C", "E", "L", "kernel", "dilation"),
}
_OPTIONS = {
    "dwsep2d": ("dw_bias", "pw_bias", "mid_activation", "activation"),
    "sepblock1d": ("expand_bias", "dw_bias", "project_bias", "activation"),
}
_ALLOWED: dict[str, tuple] = {
    "op": tuple(_SHAPES),
    "dtype": ("float32", "float16", "bfloat16"),
    "layout": ("contiguous", "channels_last"),
    "fp32_precision": ("ieee", "tf32", None),
    "impl": (OWN, "eager", "compile", "compile-max-autotune"),
    "timing": ("events", "cuda_graph"),
    "path": ("sm90", "portable", "torch", None),
    "form": (*FORMS, None),
    "floor_kind": ("bytes", "tensor"),
}
_NUMBERS = ("median_ms", "p10_ms", "p90_ms", "runs", "floor_ms", "rel_error", "max_abs_error")
#: What a row measures, as opposed to what came out: two rows with equal keys replace each other.
_KEY = ("id", "op", "shape", "dtype", "layout", "fp32_precision", "impl", "timing", "path", "form", "schedule", "arch")
#: A row replaces another one that differs only in what the planner chose: all of these, or, where a path or a form was
#: asked for, the last two.
_CHOSEN = ("path", "form", "schedule", "arch")


def about(problem: Problem) -> dict[str, Any]:
    """What a row says of its problem. A block has the residual and as many output channels as input channels."""
    p = problem
    if p.op == "dwsep2d":
        padding = padding_argument(p)
        extents = (p.n, p.c, p.o, p.h, p.w, *map(list, (p.kernel, p.stride)))
        extents = (*extents, padding if isinstance(padding, str) else list(padding), list(p.dilation))
    else:
        extents = (p.n, p.c, p.e, p.l, p.kernel, p.dilation)
    return {
        "op": p.op,
        "shape": dict(zip(_SHAPES[p.op], extents, strict=True)),
        **{name: getattr(p, name) for name in (*_OPTIONS[p.op], "dtype", "layout", "fp32_precision")},
    }


def problem_of(row: dict[str, Any]) -> Problem:
    """The problem a row measured, with the alignment of tensors that torch allocates."""
    shape = row["shape"]
    options = {name: row[name] for name in (*_OPTIONS[row["op"]], "dtype", "layout", "fp32_precision")}
    if row["op"] == "sepblock1d":
        return SeparableBlock1dProblem(
            n=shape["N"], c=shape["C"], l=shape["L"], e=shape["E"], o=shape["C"], kernel=shape["kernel"],
            dilation=shape["dilation"], residual=True, alignment=1, **options,
        ).with_alignment()  # fmt: skip
    kernel, stride, dilation = (tuple(shape[name]) for name in ("kernel", "stride", "dilation"))
    return SeparableConv2dProblem(
        n=shape["N"], c=shape["C"], h=shape["H"], w=shape["W"], o=shape["O"], kernel=kernel, stride=stride,
        padding=resolve_padding(shape["padding"], kernel, stride, dilation), dilation=dilation, alignment=1, **options,
    ).with_alignment()  # fmt: skip


def row_key(row: dict[str, Any]) -> str:
    """Canonical text of what a row measures."""
    forced = {"forced": True} if row.get("forced") else {}
    return canonical({name: row.get(name) for name in (*_KEY, *_OPTIONS[row["op"]])} | forced)


def validate(results: dict[str, Any]) -> None:
    """Raise ValueError naming the first thing that is not as the results format says."""
    for name in ("schema", "digest", "environment", "ceilings", "rows"):
        if name not in results:
            raise ValueError(f"results have no {name!r}")
    if results["schema"] != SCHEMA:
        raise ValueError(f"results have schema {results['schema']!r}; this version reads {SCHEMA}")
    for name in ("gpu", "driver", "torch", "cudnn", "nvrtc", "cutlass", "date"):
        if name not in results["environment"]:
            raise ValueError(f"environment has no {name!r}")
    seen = set()
    for i, row in enumerate(results["rows"]):
        where = f"row {i} ({row.get('id')!r}, {row.get('impl')!r})"
        _validate_row(where, row)
        key = row_key(row)
        if key in seen:
            raise ValueError(f"{where} is there twice")
        seen.add(key)


def _validate_row(where: str, row: dict[str, Any]) -> None:
    missing = [name for name in (*_KEY, *_OPTIONS.get(row.get("op"), ()), *_NUMBERS, "floor_kind") if name not in row]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    for name, allowed in _ALLOWED.items():
        if row[name] not in allowed:
            raise ValueError(f"{where}: {name}={row[name]!r} must be one of {', '.join(map(repr, allowed))}")
    wanted = _SHAPES[row["op"]]
    if tuple(row["shape"]) != wanted:
        raise ValueError(f"{where}: shape must have {', '.join(wanted)}, has {', '.join(row['shape'])}")
    if (row["dtype"] == "float32") != (row["fp32_precision"] is not None):
        raise ValueError(f"{where}: fp32_precision={row['fp32_precision']!r} does not fit dtype {row['dtype']!r}")
    for name in _NUMBERS:
        if not isinstance(row[name], (int, float)) or isinstance(row[name], bool) or not row[name] >= 0:
            raise ValueError(f"{where}: {name}={row[name]!r} must be a number >= 0")
    low, middle, high = (row[name] for name in ("p10_ms", "median_ms", "p90_ms"))
    if not 0 < low <= middle <= high:
        raise ValueError(f"{where}: p10 {low}, median {middle} and p90 {high} ms are out of order")
    own = row["impl"] == OWN
    if own != (row["path"] is not None):
        raise ValueError(f"{where}: path={row['path']!r}; own rows name one, peers have none")
    if own and "digest" not in row:
        raise ValueError(f"{where}: an own row must have the digest of its kernel")
    if own and (row["path"] == "torch") != (row["schedule"] is None):
        raise ValueError(f"{where}: a row has a schedule unless its path is 'torch'")
    if (row["form"] is not None) != (row["op"] == "sepblock1d" and row["schedule"] is not None):
        raise ValueError(f"{where}: form={row['form']!r}; rows of the block's kernels name one, others have none")
    if not own and "measured" not in row:
        raise ValueError(f"{where}: a peer's row must say where and when it was measured")


def merge(results: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Put rows into results; a row for the same measurement replaces the old one whatever the planner chose then."""
    table = {_measurement(row): row for row in results["rows"]}
    table.update((_measurement(row), row) for row in rows)
    results["rows"] = sorted(table.values(), key=lambda row: (row["id"], row_key(row)))


def _measurement(row: dict[str, Any]) -> str:
    chosen = _CHOSEN[2:] if row.get("forced") else _CHOSEN
    kept = [name for name in (*_KEY, *_OPTIONS[row["op"]]) if name not in chosen]
    return canonical({"forced": row.get("forced", False), **{name: row.get(name) for name in kept}})


def pick_key(row: dict[str, Any]) -> str:
    """Canonical text of what an own row measures, whatever was chosen or asked for."""
    return canonical({name: row[name] for name in (*_KEY, *_OPTIONS[row["op"]]) if name not in _CHOSEN})


def problem_key(row: dict[str, Any]) -> str:
    """Canonical text of the problem, whatever its id and layout, and of how it was timed."""
    names = (*_OPTIONS[row["op"]], "op", "shape", "dtype", "fp32_precision", "timing")
    return canonical({name: row[name] for name in names})


def load(path: Path) -> dict[str, Any]:
    """A results file, validated. Raises ValueError naming the file."""
    try:
        results = json.loads(path.read_text())
        validate(results)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return results


def save(path: Path, results: dict[str, Any]) -> None:
    """Validate, set the digest and write atomically."""
    results["digest"] = digest(results["rows"])
    validate(results)
    write_json(path, results)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write an object atomically, one line for each entry and for each element of its lists; creates folders."""
    entries = []
    for name, value in data.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(element, allow_nan=False) for element in value) + "\n ]"
        entries.append(f" {json.dumps(name)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text("{\n" + ",\n".join(entries) + "\n}\n")
    os.replace(temporary, path)


def digest(rows: Iterable[dict[str, Any]]) -> str:
    """sha256 over what the own rows were measured with.

    Covers, sorted: each row's key, the source that its recorded schedule renders to now, the compile options without
    paths; the CUTLASS version; the launch module without comments and docstrings. Not the NVRTC version.
    """
    own = [row for row in rows if row["impl"] == OWN]
    return _digest((row_key(row), *_row_kernel(row)) for row in own)


def _row_kernel(row: dict[str, Any]) -> tuple[str, list[str]]:
    problem = problem_of(row)
    return _kernel_text(problem, _schedule(problem, row["schedule"]), row["arch"])


def ran(problem: Problem, path: str, schedule: Schedule | BlockSchedule | None, arch: str) -> dict[str, Any]:
    """One of the `problems` of tests/gpu/results.json: what a test ran."""
    as_json = schedule.to_json() if schedule is not None else None
    entry = {"problem": problem.to_json(), "path": path, "schedule": as_json, "arch": arch}
    return entry if problem.op == "dwsep2d" else {"op": problem.op} | entry


def what_ran(entry: dict[str, Any]) -> tuple[Problem, Schedule | BlockSchedule | None]:
    """The problem and the schedule of what `ran` wrote."""
    problem = _PROBLEMS[entry.get("op", "dwsep2d")].from_json(entry["problem"])
    return problem, _schedule(problem, entry["schedule"])


def _schedule(problem: Problem, data: dict[str, Any] | None) -> Schedule | BlockSchedule | None:
    return None if data is None else planner.schedule_type(problem).from_json(data)


def is_current(row: dict[str, Any]) -> bool:
    """Whether a row's kernel is still the one that was measured; peers' rows have none and always are."""
    return row["impl"] != OWN or row["digest"] == digest([row])


def digest_of_problems(ran: Iterable[dict[str, Any]]) -> str:
    """The same over the `problems` of tests/gpu/results.json: {"problem", "path", "schedule", "arch"} each."""
    return _digest((canonical(entry), *_kernel_text(*what_ran(entry), entry["arch"])) for entry in ran)


def check_digest(path: Path) -> tuple[str, str, str | None]:
    """(recorded digest, digest of the same rows or problems with the code as it is now, why the file is stale or None).

    Raises ValueError for a file that is neither a benchmark's nor a test run's results.
    """
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or not ("rows" in data or "problems" in data):
        raise ValueError("it has neither rows nor problems")
    now = digest(data["rows"]) if "rows" in data else digest_of_problems(data["problems"])
    return data["digest"], now, data.get("stale")


def _kernel_text(problem: Problem, schedule: Schedule | BlockSchedule | None, arch: str) -> tuple[str, list[str]]:
    """(source, options) of a recorded schedule; empty for path "torch"."""
    if schedule is None:
        return "", []
    # Anew, and not kept: most of these kernels are never built here.
    return render_anew(problem, schedule, arch), list(compiler.option_strings(arch))


def _digest(entries: Iterable[tuple[str, str, list[str]]]) -> str:
    launch = strip_prose((Path(__file__).parent.parent / "kernel.py").read_text())
    document = {"rows": sorted(entries), "cutlass": metadata.version("nvidia-cutlass"), "launch": launch}
    return hashlib.sha256(canonical(document).encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON in which equal values have equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def strip_prose(text: str) -> str:
    """Python source without comments, docstrings and blanks at the ends; the same under every Python version."""
    lines = text.splitlines()
    drop: list[tuple[int, int, int, int]] = []  # (first line, column, last line, column), lines from 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            drop.append((token.start[0] - 1, token.start[1], token.end[0] - 1, token.end[1]))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                # ast counts columns in UTF-8 bytes; a docstring stands alone on its lines, so only whole lines go.
                drop.append((first.lineno - 1, 0, first.end_lineno - 1, len(lines[first.end_lineno - 1])))
    for first_line, first_column, last_line, last_column in sorted(drop, reverse=True):
        head, tail = lines[first_line][:first_column], lines[last_line][last_column:]
        lines[first_line : last_line + 1] = [head + tail, *[""] * (last_line - first_line)]
    return "\n".join(stripped for line in lines if (stripped := line.rstrip()))
