"""One page and its plots of a results file, for a reader who has never seen the project."""

from __future__ import annotations

import base64
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2

from ..errors import EnvironmentProblem
from ..problem import Problem
from . import accuracy, results
from .peers import PEERS, alike, with_lent
from .runner import SLOWER_ALLOWED

#: Shapes that are no layers of a network and are told apart from those.
_SWEEP = "sweep1d."
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Layer:
    """One problem at one precision, timed in one way: the row of cutlass_sep and of each peer in its faster layout.

    forced: rows of cutlass_sep whose path or form was asked for, beside the planner's pick. limit: what is allowed of
    `row`'s relative error, or None where eager was not measured in the same layout.
    """

    row: dict[str, Any]
    peers: dict[str, dict[str, Any]]
    forced: list[dict[str, Any]]
    limit: float | None

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]]) -> Layer | None:
        """The layer of rows that may be compared; None if cutlass_sep is not among them."""
        own = [row for row in rows if row["impl"] == results.OWN]
        if not own:
            return None
        picked = [row for row in own if not row.get("forced")]
        row = _fastest(picked or own)
        peers = {name: _fastest(found) for name in PEERS if (found := [r for r in rows if r["impl"] == name])}
        return cls(row, peers, [r for r in own if r.get("forced")] if picked else [], _limit(row, rows))

    @cached_property
    def problem(self) -> Problem:
        return results.problem_of(self.row)

    @property
    def kind(self) -> str:
        """Path and form, as the plots and the page name them."""
        schedule = self.row["schedule"] or {}
        last = schedule.get("project") or schedule
        kernels = 1 + bool(last.get("plane_rows") or last.get("thread_rows")) + (self.row["form"] == "two_kernel")
        return self.row["path"] + {1: "", 2: ", two kernels", 3: ", three kernels"}[kernels]

    @property
    def own_kernel(self) -> bool:
        """Whether kernels of cutlass_sep ran, not PyTorch's convolutions."""
        return self.row["path"] != "torch"

    @property
    def best(self) -> dict[str, Any] | None:
        """The fastest peer's row."""
        return _fastest(self.peers.values()) if self.peers else None

    @property
    def speedup(self) -> float | None:
        """Time of the best peer over that of cutlass_sep."""
        return self.best["median_ms"] / self.row["median_ms"] if self.best else None

    @property
    def slower(self) -> bool:
        """Whether the best peer is faster by more than a measurement may be off."""
        return self.best is not None and self.row["median_ms"] > SLOWER_ALLOWED * self.best["median_ms"]

    @property
    def of_floor(self) -> float:
        """Time of the floor over that of cutlass_sep."""
        return self.row["floor_ms"] / self.row["median_ms"]

    @property
    def in_words(self) -> str:
        """What the layer computes."""
        p = self.problem
        if p.op == "sepblock1d":
            parts = [f"batch {p.n}, length {p.l}, {p.c} → {p.e} → {p.o} channels, kernel {p.kernel}"]
            parts += [f"dilation {p.dilation}"] if p.dilation != 1 else []
            activations = [p.activation]
        else:
            parts = [f"batch {p.n}, {p.h}×{p.w} pixels, {p.c} → {p.o} channels, kernel {_by(p.kernel)}"]
            parts += [f"stride {_by(p.stride)}"] if p.stride != (1, 1) else []
            parts += [f"dilation {_by(p.dilation)}"] if p.dilation != (1, 1) else []
            activations = [p.mid_activation, p.activation]
        return ", ".join([*parts, *dict.fromkeys(filter(None, activations))])

    @property
    def notes(self) -> str:
        """What else is to be said of the row."""
        row, said = self.row, []
        if row.get("tuned"):
            said.append("tuned")
        if row.get("forced"):
            said.append("path or form asked for")
        if row.get("note"):
            said.append(row["note"])
        said += (f"{name} measured as {r['lent_by']}" for name, r in self.peers.items() if "lent_by" in r)
        others = (f"{' '.join(filter(None, (r['path'], r['form'])))} {r['median_ms']:.4g} ms" for r in self.forced)
        return "; ".join([*said, *(f"asked for: {other}" for other in others)])


def _fastest(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return min(rows, key=lambda row: row["median_ms"])


def _by(extents: Sequence[int]) -> str:
    return "×".join(map(str, extents))


def _limit(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """In 16 bit from eager alone: a row does not have the error of the exact result rounded, which may allow more."""
    for other in rows:
        if (other["impl"], other["layout"]) == ("eager", row["layout"]):
            base = accuracy.Errors(other["rel_error"], other["max_abs_error"])
            return accuracy.limits(results.problem_of(row), base, accuracy.Errors(0.0, 0.0))[0]
    return None


@dataclass(frozen=True)
class Group:
    """Layers of one precision, timed in one way, or all layers; `name` is fit for a file's name."""

    name: str
    title: str
    layers: list[Layer]

    @property
    def is_sweep(self) -> bool:
        return self.name.startswith(_SWEEP)

    @property
    def compared(self) -> list[Layer]:
        """The layers with a peer, largest speed-up first."""
        return sorted((layer for layer in self.layers if layer.peers), key=lambda layer: -layer.speedup)

    @property
    def mean(self) -> float | None:
        """Geometric mean of the speed-ups over the best peer; None without any."""
        return _mean(self.compared)

    @property
    def mean_own_kernel(self) -> float | None:
        """The same where kernels of cutlass_sep ran."""
        return _mean([layer for layer in self.compared if layer.own_kernel])

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.title,
            "layers": len(self.layers),
            "compared": len(self.compared),
            "mean_speedup": self.mean,
            "own_kernel": sum(layer.own_kernel for layer in self.layers),
            "mean_speedup_own_kernel": self.mean_own_kernel,
            "torch": sum(not layer.own_kernel for layer in self.layers),
            "slower": sum(layer.slower for layer in self.layers),
            "median_of_floor": statistics.median(layer.of_floor for layer in self.layers),
            "peers": {name: sum(name in layer.peers for layer in self.layers) for name in PEERS},
        }


def _mean(layers: Sequence[Layer]) -> float | None:
    return statistics.geometric_mean(layer.speedup for layer in layers) if layers else None


def collect(rows: Iterable[dict[str, Any]]) -> tuple[list[Group], int]:
    """(groups in the order of the page, number of problems that only peers have rows of)."""
    problems: dict[str, list[dict[str, Any]]] = {}
    for row in with_lent(rows):
        problems.setdefault(alike(row), []).append(row)
    grouped: dict[tuple, list[Layer]] = {}
    without = 0
    for together in problems.values():
        layer = Layer.of(together)
        if layer is None:
            without += 1
        else:
            grouped.setdefault(_group_key(layer.row), []).append(layer)
    return [_group(key, grouped[key]) for key in sorted(grouped)], without


def _group_key(row: dict[str, Any]) -> tuple[bool, bool, int, str]:
    """Sorts as the page does: layers before the sweep, then by timing and precision."""
    is_graph = row["timing"] == "cuda_graph"
    return row["id"].startswith(_SWEEP), is_graph, _DTYPES.index(row["dtype"]), row["fp32_precision"] or ""


def _group(key: tuple[bool, bool, int, str], layers: list[Layer]) -> Group:
    is_sweep, is_graph, dtype, precision = key
    what, timing = ("sweep1d" if is_sweep else None), ("cuda_graph" if is_graph else "events")
    name = ".".join(filter(None, (what, _DTYPES[dtype], precision, timing)))
    batches = {layer.row["shape"]["N"] for layer in layers}
    title = " ".join(filter(None, (_DTYPES[dtype], precision)))
    title += ", CUDA graph" if is_graph else ""
    title += f", batch {batches.pop()}" if len(batches) == 1 else ""
    return Group(name, f"sweep of the 1-D block, {title}" if is_sweep else title, layers)


def drawing() -> ModuleType:
    """The module that draws. Raises EnvironmentProblem without matplotlib."""
    try:
        from . import plots
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            f"--report draws with matplotlib, which cannot be imported ({error}): pip install matplotlib, or "
            "cutlass-sep with its extra 'bench'"
        ) from error
    return plots


def write(directory: Path, data: dict[str, Any]) -> dict[str, Any]:
    """index.html and PNGs of results, into a folder that is there: {"directory", "files", "summary"}.

    Raises ValueError if no row is of cutlass_sep, EnvironmentProblem without matplotlib, OSError.
    """
    plots = drawing()
    groups, without = collect(data["rows"])
    if not groups:
        raise ValueError("there is no row of cutlass_sep to report")
    layers = [group for group in groups if not group.is_sweep] or groups
    pictures = {"roofline": plots.rooflines(layers, data["ceilings"])}
    if compared := [group for group in layers if group.compared]:
        pictures["speedup"] = plots.speedups(compared)
    pictures |= {f"speedup.{group.name}": plots.speedup(group) for group in groups if group.compared}
    pictures |= {group.name: plots.sweep(group) for group in groups if group.is_sweep}
    for name, picture in pictures.items():
        (directory / f"{name}.png").write_bytes(picture)
    summary = _summary(groups)
    encoded = {name: base64.b64encode(picture).decode() for name, picture in pictures.items()}
    page = _page(data, groups, summary, without, encoded)
    (directory / "index.html").write_text(page, encoding="utf-8")
    files = ["index.html", *(f"{name}.png" for name in pictures)]
    return {"directory": str(directory), "files": files, "summary": summary}


def _summary(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Of each group, and, if there are several of layers, of all of those together."""
    of_networks = [group for group in groups if not group.is_sweep]
    together = Group("all", "all of them", [layer for group in of_networks for layer in group.layers])
    rows = [group.to_json() for group in groups]
    if len(of_networks) > 1:
        rows.insert(len(of_networks), together.to_json())
    return rows


def _page(
    data: dict[str, Any],
    groups: Sequence[Group],
    summary: list[dict[str, Any]],
    without: int,
    pictures: dict[str, str],
) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    made.globals.update(number=_number, times=_times, percent=_percent)
    return made.get_template("report.html.j2").render(
        environment=data["environment"],
        ceilings=data["ceilings"],
        stale=data.get("stale"),
        groups=groups,
        summary=summary,
        without=without,
        pictures=pictures,
        peers=PEERS,
        peers_measured=_other_environments(data),
        slower_allowed=SLOWER_ALLOWED,
    )


def _other_environments(data: dict[str, Any]) -> list[str]:
    """Where peers were measured in another session: what of the environment differs."""
    here, found = data["environment"], {}
    for row in data["rows"]:
        differing = {
            name: value for name, value in row.get("measured", {}).items() if name in here and value != here[name]
        }
        if differing:
            found[", ".join(f"{name} {value}" for name, value in differing.items())] = None
    return sorted(found)


def _number(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    return "–" if value is None else f"{value:#.3g}" if value < 99.95 else f"{value:.0f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
