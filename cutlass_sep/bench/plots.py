"""The pictures of a report, as PNGs. The one module that imports matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from . import ceilings, inputs
from .report import Group, Layer

#: By `Layer.kind`: colour (of Okabe and Ito, told apart by the colour-blind too) and mark.
_KINDS = {
    "sm90": ("#0072B2", "o"),
    "sm90, two kernels": ("#56B4E9", "s"),
    "sm90, three kernels": ("#009E73", "v"),
    "portable": ("#E69F00", "^"),
    "portable, two kernels": ("#CC79A7", "D"),
    "torch": ("#000000", "x"),
}
#: Lines of the sweep, by form or peer: label, colour, mark.
_SWEPT = {
    "fused": ("fused", "#0072B2", "o"),
    "two_kernel": ("two kernels", "#56B4E9", "s"),
    "eager": ("PyTorch eager, better layout", "#000000", "x"),
}
_PEER, _LIMIT = "#999999", "#D55E00"
_WIDTH = 9.0
_DPI = 130
#: Bars of a group up to which the overview has room for their names.
_NAMED = 16


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})  # the same bytes for the same numbers
    return buffer.getvalue()


def _key(figure: Figure, layers: Iterable[Layer], *more: Line2D) -> None:
    """A legend of the kinds that occur, above the panels."""
    kinds = {layer.kind for layer in layers}
    marks = [
        Line2D([], [], color=color, marker=mark, linestyle="", label=f"path {kind}")
        for kind, (color, mark) in _KINDS.items()
        if kind in kinds
    ]
    figure.legend(handles=[*marks, *more], loc="outside upper center", ncols=3, frameon=False, fontsize="medium")


# --- speed-up


def speedup(group: Group) -> bytes:
    """Every layer of a group by name."""
    figure = Figure(figsize=(_WIDTH, 1.4 + 0.17 * len(group.compared)), layout="constrained")
    axis = figure.subplots()
    _bars(axis, group, named=True)
    _speedup_axis(axis, group.compared)
    _key(figure, group.compared)
    return _png(figure)


def speedups(groups: Sequence[Group]) -> bytes:
    """Groups, all with peers, beside each other and on one scale; the largest first, so that alike ones share a row."""
    groups = sorted(groups, key=lambda group: -len(group.compared))
    columns = min(len(groups), 2)
    rows = [groups[i : i + columns] for i in range(0, len(groups), columns)]
    heights = [max(map(_height, row)) for row in rows]
    figure = Figure(figsize=(_WIDTH, 0.9 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(rows), columns, height_ratios=heights, squeeze=False)
    everything = [layer for group in groups for layer in group.compared]
    for axis, group in zip(panels.flat, groups, strict=False):
        _bars(axis, group, named=len(group.compared) <= _NAMED)
        _speedup_axis(axis, everything)
    for axis in panels.flat[len(groups) :]:
        axis.set_axis_off()
    _key(figure, everything)
    return _png(figure)


def _height(group: Group) -> float:
    """Inches of a panel of the overview."""
    bars = len(group.compared)
    return 0.9 + (0.2 if bars <= _NAMED else 0.038) * bars


def _bars(axis: Axes, group: Group, named: bool) -> None:
    """One bar a layer, largest speed-up on top, from 1 to the speed-up."""
    layers = group.compared
    for i, layer in enumerate(layers):
        color, mark = _KINDS[layer.kind]
        axis.barh(i, layer.speedup - 1, left=1, height=0.7, color=color, alpha=0.55)
        axis.plot(layer.speedup, i, marker=mark, markersize=4 if named else 2.5, color=color)
        if named:
            left = layer.speedup < 1
            axis.annotate(
                f"{layer.speedup:.2f}", (layer.speedup, i), xytext=(-5 if left else 5, 0), textcoords="offset points",
                ha="right" if left else "left", va="center", fontsize="x-small",
            )  # fmt: skip
    axis.axvline(1, color="black", linewidth=1)
    axis.axvline(group.mean, color=_LIMIT, linewidth=1, linestyle="--")
    axis.set_title(f"{group.title}: mean {group.mean:.2f}×", fontsize="medium")
    axis.set_ylim(len(layers) - 0.4, -0.6)
    if named:
        axis.set_yticks(range(len(layers)), [_label(layer, group) for layer in layers], fontsize="small")
    else:
        axis.set_yticks([])
        axis.set_ylabel(f"{len(layers)} layers")


def _label(layer: Layer, group: Group) -> str:
    """The layer's name, with its batch where the name alone says too little."""
    name = layer.row["id"]
    again = sum(other.row["id"] == name for other in group.layers) > 1
    return f"{name}, batch {layer.row['shape']['N']}" if again else name


def _speedup_axis(axis: Axes, layers: Sequence[Layer]) -> None:
    """Powers of two that hold all speed-ups of `layers`."""
    found = [layer.speedup for layer in layers]
    low = min(-0.25, math.log2(min(found)) - 0.3)
    high = max(1.0, math.log2(max(found)) + 0.3)
    axis.set_xscale("log", base=2)
    axis.set_xlim(2**low, 2**high)
    axis.set_xticks([2.0**power for power in range(math.ceil(low), math.floor(high) + 1)])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(True, axis="x", alpha=0.3)
    axis.set_xlabel("speed-up over the best peer (dashed: geometric mean)", fontsize="small")


# --- roofline


def rooflines(groups: Sequence[Group], limits: dict[str, float]) -> bytes:
    """Rate over arithmetic intensity of every layer, under the roofs that were measured, on one scale."""
    columns = min(len(groups), 2)
    rows = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(_WIDTH, 0.9 + 3.3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    everything = [layer for group in groups for layer in group.layers]
    roofs = [_roofs(group, limits) for group in groups]
    corners = [tensor / copy for of_group in roofs for _, tensor, copy in of_group]
    found = [*map(_intensity, everything), *corners]
    reach = min(found) / 3, max(found) * 3
    for axis, group, of_group in zip(panels.flat, groups, roofs, strict=False):
        for layer in group.layers:
            _lift(axis, layer)
        for text, tensor, copy in of_group:
            xs = reach[0], tensor / copy, reach[1]
            axis.plot(xs, [min(x * copy, tensor) for x in xs], color=_LIMIT, linewidth=1.2, zorder=1)
            axis.annotate(
                text, (reach[1], tensor), xytext=(-3, 2), textcoords="offset points", ha="right", fontsize="x-small"
            )  # fmt: skip
        _name_extremes(axis, group)
        axis.set_title(group.title, fontsize="medium")
        axis.set_xlabel("FLOP of the matrix products per byte", fontsize="small")
        axis.set_ylabel("TFLOP/s", fontsize="small")
        axis.tick_params(labelbottom=True, labelleft=True)
        axis.grid(True, alpha=0.3)
    _plain_log(panels[0, 0])
    panels[0, 0].set_xlim(reach)
    for axis in panels.flat[len(groups) :]:
        axis.set_axis_off()
    peer = Line2D([], [], color=_PEER, marker="_", linestyle="", label="best peer of the same layer")
    roof = Line2D([], [], color=_LIMIT, label="floor")
    _key(figure, everything, peer, roof)
    return _png(figure)


def _intensity(layer: Layer) -> float:
    """FLOP of the matrix products per byte that must move."""
    return ceilings.matrix_flops(layer.problem) / layer.problem.bytes


def _rate(layer: Layer, row: dict[str, Any]) -> float:
    """TFLOP/s of the matrix products."""
    return ceilings.matrix_flops(layer.problem) / row["median_ms"] / 1e9


def _lift(axis: Axes, layer: Layer) -> None:
    """A mark for a layer, and a line to it from its best peer."""
    x, y = _intensity(layer), _rate(layer, layer.row)
    if layer.best:
        peer = _rate(layer, layer.best)
        axis.plot([x, x], [peer, y], color=_PEER, linewidth=0.8, zorder=1)
        axis.plot(x, peer, color=_PEER, marker="_", markersize=5, zorder=1)
    color, mark = _KINDS[layer.kind]
    axis.plot(x, y, color=color, marker=mark, markersize=4, linestyle="", zorder=2)


def _name_extremes(axis: Axes, group: Group) -> None:
    """Names of the layers nearest to the floor and farthest from it, in the corners that are empty."""
    best, worst = (pick(group.layers, key=lambda layer: layer.of_floor) for pick in (max, min))
    named = [(best, "nearest", (0.03, 0.96)), (worst, "farthest", (0.97, 0.04))]
    for layer, how, corner in named if best is not worst else named[:1]:
        is_left = corner[0] < 0.5
        axis.annotate(
            f"{how}: {layer.row['id']}, {100 * layer.of_floor:.0f} %", (_intensity(layer), _rate(layer, layer.row)),
            xytext=corner, textcoords="axes fraction", ha="left" if is_left else "right",
            va="top" if is_left else "bottom", fontsize="x-small", zorder=3,
            arrowprops={"arrowstyle": "-", "linewidth": 0.6, "shrinkB": 3},
        )  # fmt: skip


def _plain_log(axis: Axes) -> None:
    """Logarithmic axes with plain numbers at the powers of ten."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.margins(y=0.15)
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        one.set_minor_formatter(NullFormatter())


def _roofs(group: Group, limits: dict[str, float]) -> list[tuple[str, float, float]]:
    """(text, TFLOP/s, TB/s) of each floor of the group's layers whose rates were measured.

    fp32-grade has one for each operator.
    """
    rates = sorted({ceilings.tensor_rate(layer.problem) for layer in group.layers})
    return [
        (f"{unit}, {passes} passes" if passes > 1 else unit, limits[f"{unit}_TFLOPS"] / passes, limits["copy_TBps"])
        for unit, passes in rates
        if {"copy_TBps", f"{unit}_TFLOPS"} <= limits.keys()
    ]


# --- sweep


def sweep(group: Group) -> bytes:
    """Time over one extent a panel, every form beside eager and the floor; closed marks are the planner's picks."""
    drawn = _sweep_panels(group.layers)
    rows, columns = math.ceil(len(drawn) / 3), min(len(drawn), 3)
    figure = Figure(figsize=(3 * columns, 0.8 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    for axis, (title, extent, points) in zip(axes, drawn, strict=False):
        floors = [layer.row["floor_ms"] for _, layer in points]
        axis.plot([x for x, _ in points], floors, color=_LIMIT, linestyle="--", label="floor")
        for name, (label, color, mark) in _SWEPT.items():
            line = [(x, *timed) for x, layer in points if (timed := _swept(layer, name))]
            axis.plot([x for x, _, _ in line], [ms for _, ms, _ in line], color=color, label=label)
            for x, ms, picked in line:
                axis.plot(x, ms, marker=mark, color=color, markerfacecolor=color if picked else "white")
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel(extent, fontsize="small")
        axis.set_ylabel("milliseconds", fontsize="small")
        axis.tick_params(labelleft=True)
        axis.grid(True, which="both", alpha=0.3)
        _plain_log(axis)
        axis.set_xscale("log", base=2)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    pixels = {layer.problem.n * layer.problem.l for layer in group.layers}
    also = f", N·L = {pixels.pop()}" if len(pixels) == 1 else ""
    figure.suptitle(f"{group.title}{also}; closed marks: what the planner picks", fontsize="medium")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return _png(figure)


def _swept(layer: Layer, name: str) -> tuple[float, bool] | None:
    """(milliseconds, whether the planner picks it) of a point on one line; None where it was not measured."""
    if name == "eager":
        return (layer.peers[name]["median_ms"], not layer.own_kernel) if name in layer.peers else None
    for row in (layer.row, *layer.forced):
        if row["form"] == name:
            return row["median_ms"], row is layer.row
    return None


def _sweep_panels(layers: Sequence[Layer]) -> list[tuple[str, str, list[tuple[float, Layer]]]]:
    """(title, name of the horizontal axis, [(position on it, layer)]) of each panel.

    Every axis of the sweep goes through the lead shape.
    """
    lead = inputs.lead1d().problem
    by_shape = [(layer.problem, layer) for layer in layers]
    at_lead = [(p, layer) for p, layer in by_shape if (p.l, p.kernel) == (lead.l, lead.kernel)]
    panels = [
        (f"k = {k}, C = {lead.c}, E = {lead.e}", "L",
         [(p.l, layer) for p, layer in by_shape if (p.c, p.e, p.kernel) == (lead.c, lead.e, k)])
        for k in sorted({p.kernel for p, _ in by_shape})
    ]  # fmt: skip
    of_ratio = [(p.e / p.c, layer) for p, layer in at_lead if p.c == lead.c]
    of_width = [(p.c, layer) for p, layer in at_lead if p.e == 2 * p.c]
    panels.append((f"C = {lead.c}, L = {lead.l}, k = {lead.kernel}", "E/C", of_ratio))
    panels.append((f"E = 2C, L = {lead.l}, k = {lead.kernel}", "C", of_width))
    drawn = [panel for panel in panels if len(panel[2]) > 1] or [max(panels, key=lambda panel: len(panel[2]))]
    return [(title, extent, sorted(points, key=lambda point: point[0])) for title, extent, points in drawn]
