"""Write the numbers of a results file into the README, between its two marks.

    python benchmarks/table.py [benchmarks/results/h200.json]

A test compares the README with what this writes, so that no number in it is older than the results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
_START, _END = "<!-- numbers: written by benchmarks/table.py -->\n", "<!-- end of numbers -->\n"
_COLUMNS = (
    "precision, layout",
    "cutlass_sep ms",
    "of the floor",
    "best peer ms",
    "speed-up",
    "error",
    "PyTorch's error",
)


_BLOCK = "\nThe 1-D block, [32,256,4096] expanded to 512 channels, k 9, GELU, every bias, residual:\n\n"


def table(data: dict[str, Any]) -> str:
    """The lead shapes' rows, best peers beside them, then starts and calls."""
    from cutlass_sep.bench import inputs

    block = _rows(data, inputs.LEAD1D_ID)
    return _rows(data, inputs.LEAD_ID) + (_BLOCK + block if block.count("\n") > 2 else "") + _starts_and_calls(data)


def _rows(data: dict[str, Any], name: str) -> str:
    """The table of one lead shape."""
    from cutlass_sep.bench import peers, runner

    rows = [row for row in peers.with_lent(data["rows"]) if row["id"] == name and row["timing"] == "events"]
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    for found in runner.compare(rows):
        row, peer = found.row, found.peer
        eager = [
            other["rel_error"]
            for other in rows
            if (other["impl"], other["dtype"], other["fp32_precision"], other["layout"])
            == ("eager", row["dtype"], row["fp32_precision"], row["layout"])
        ]
        precision = f"{row['dtype']} {row['fp32_precision']}" if row["fp32_precision"] else row["dtype"]
        what = [precision, row["layout"], row["form"]]
        if row.get("forced"):
            what.append(f"path {row['path']} asked for")
        cells = (
            ", ".join(filter(None, what)),
            f"{row['median_ms']:.3f}",
            f"{100 * row['floor_ms'] / row['median_ms']:.0f} %",
            f"{peer['median_ms']:.3f} ({peer['impl']}, {peer['layout']})",
            f"{found.speedup:.2f}x",
            f"{row['rel_error']:.1e}",
            f"{eager[0]:.1e}" if eager else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _starts_and_calls(data: dict[str, Any]) -> str:
    text = ""
    if starts := data.get("startup"):
        cold, warm = (starts[name]["total_ms"] for name in ("cold", "warm"))
        text += f"\nFrom the first call to the first result: {cold:.0f} ms with an empty disk cache, "
        text += f"{warm:.0f} ms with a warm one."
    if calls := data.get("overhead_us"):
        text += (
            f"\nHost time of a call: {calls['functional']:.1f} us, beside {calls['F.conv2d']:.1f} us of one `F.conv2d` "
            f"and {calls['F.conv2d pair']:.1f} us of the pair."
        )
    return text + "\n" if text else ""


def section(readme: str) -> str:
    """What stands between the marks."""
    return readme.split(_START)[1].split(_END)[0]


def main() -> None:
    from cutlass_sep.bench import results

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    text = README.read_text()
    README.write_text(text.replace(_START + section(text), _START + table(results.load(path))))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
