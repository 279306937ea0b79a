"""Draw and tabulate the sweep of the 1-D block: time against the floor, in every form, beside PyTorch.

    python benchmarks/plot1d.py [benchmarks/results/h200.json] [--output docs/block1d.png]

Reads the rows `sweep1d.*` that `cutlass-sep bench --suite sweep1d` wrote, prints a markdown table and draws one panel
an axis of the sweep. A closed mark is what the planner picks.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
PICTURE = ROOT / "docs" / "block1d.png"
#: The lead shape, which every axis of the sweep goes through.
_C, _E, _L, _K = 256, 512, 4096, 9
_COLORS = {"fused": "C0", "two_kernel": "C1", "eager": "C3"}
_LABELS = {"fused": "fused", "two_kernel": "two kernels", "eager": "PyTorch eager, better layout"}


@dataclass(frozen=True)
class Point:
    """One shape: milliseconds by form and of eager, None where not measured; `picked`: what the planner chose."""

    c: int
    e: int
    l: int  # noqa: E741
    k: int
    floor: float
    times: dict[str, float | None]
    picked: str
    picked_ms: float


def points(rows: list[dict[str, Any]]) -> list[Point]:
    """The shapes of the sweep, in the order N, C, E, L, k of their extents."""
    shapes: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["id"].startswith("sweep1d.") and row["timing"] == "events":
            shapes.setdefault(row["id"], []).append(row)
    return sorted((_point(of_shape) for of_shape in shapes.values()), key=lambda p: (p.c, p.e, p.l, p.k))


def _point(rows: list[dict[str, Any]]) -> Point:
    shape = rows[0]["shape"]
    own = [row for row in rows if row["impl"] == "cutlass_sep"]
    (pick,) = (row for row in own if not row.get("forced"))
    times: dict[str, float | None] = dict.fromkeys(_LABELS)
    for row in own:
        if row["form"] is not None and (row.get("forced") or times[row["form"]] is None):
            times[row["form"]] = row["median_ms"]
    times["eager"] = min((row["median_ms"] for row in rows if row["impl"] == "eager"), default=None)
    picked = pick["form"] or pick["path"]
    return Point(
        shape["C"], shape["E"], shape["L"], shape["kernel"], pick["floor_ms"], times, picked, pick["median_ms"]
    )  # fmt: skip


def table(found: list[Point]) -> str:
    """Markdown: one line a shape, times in milliseconds."""
    names = ("C", "E", "L", "k", "floor", *_LABELS.values(), "planned", "of the floor", "over eager")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for p in found:
        eager = p.times["eager"]
        cells = (
            *map(str, (p.c, p.e, p.l, p.k)),
            f"{p.floor:.3f}",
            *("" if time is None else f"{time:.3f}" for time in p.times.values()),
            p.picked,
            f"{100 * p.floor / p.picked_ms:.0f} %",
            "" if eager is None else f"{eager / p.picked_ms:.2f}x",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def panels(found: list[Point]) -> list[tuple[str, str, list[tuple[float, Point]]]]:
    """(title, name of the horizontal axis, (position, point) on it) of each panel that has points."""
    at_lead = [p for p in found if (p.l, p.k) == (_L, _K)]
    drawn = [
        (f"k = {k}, C = {_C}, E = {_E}", "L", [(p.l, p) for p in found if (p.c, p.e, p.k) == (_C, _E, k)])
        for k in sorted({p.k for p in found})
    ]
    drawn.append((f"C = {_C}, L = {_L}, k = {_K}", "E/C", [(p.e / p.c, p) for p in at_lead if p.c == _C]))
    drawn.append((f"E = 2C, L = {_L}, k = {_K}", "C", [(p.c, p) for p in at_lead if p.e == 2 * p.c]))
    return [panel for panel in drawn if panel[2]]


def draw(found: list[Point], about: str, path: Path) -> None:
    """A picture of all panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = panels(found)
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(3.6 * len(drawn), 3.6), squeeze=False, layout="constrained")
    for axis, (title, name, of_panel) in zip(axes[0], drawn, strict=True):
        axis.plot([x for x, _ in of_panel], [p.floor for _, p in of_panel], color="0.5", linestyle="--", label="floor")
        for kind, label in _LABELS.items():
            line = [(x, time, p) for x, p in of_panel if (time := p.times[kind]) is not None]
            axis.plot([x for x, _, _ in line], [time for _, time, _ in line], color=_COLORS[kind], label=label)
            for x, time, p in line:
                picked = p.picked == kind or (p.picked == "torch" and kind == "eager")
                face = _COLORS[kind] if picked else "white"
                axis.plot(x, time, marker="o", color=_COLORS[kind], markerfacecolor=face)
        axis.set(title=title, xlabel=name, xscale="log", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].set_ylabel("milliseconds")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=1 + len(_LABELS))
    figure.suptitle(f"1-D block, N*L = 131072, {about}; closed marks: what the planner picks", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    from cutlass_sep.bench import results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="PNG")
    args = parser.parse_args()
    data = results.load(args.results)
    found = points(data["rows"])
    if not found:
        print(f"{args.results} has no rows of the sweep: cutlass-sep bench --suite sweep1d", file=sys.stderr)
        return 1
    dtypes = {row["dtype"] for row in data["rows"] if row["id"].startswith("sweep1d.")}
    draw(found, f"{', '.join(sorted(dtypes))}, {data['environment']['gpu']}", args.output)
    print(table(found), end="")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
