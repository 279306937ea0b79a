"""Where the command line writes: results on stdout, or with --json one object there and all else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


def counted(count: int, noun: str) -> str:
    """The count and the noun, which takes an s: 1 kernel, 2 kernels."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Output:
    """Text, tables and progress bars of one command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._text = sys.stderr if as_json else sys.stdout
        self._progress = Console(stderr=True)

    def say(self, text: str = "") -> None:
        """A line of text for a reader."""
        print(text, file=self._text, flush=True)

    def warn(self, text: str) -> None:
        """A line for a reader that is no result."""
        print(text, file=sys.stderr, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table; all columns but the first are set to the right."""
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*(str(value) for value in row))
        console = Console(file=self._text, markup=False, highlight=False)
        if not console.is_terminal:
            console.width = 160  # a pipe has no width; rows must stay one line each
        console.print(table)

    @contextlib.contextmanager
    def working(self, what: str, total: int | None = None) -> Iterator[Any]:
        """A progress bar on stderr; yields a function that advances it by one and may name the step."""
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()]
        if total is not None:
            columns.append(MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self._progress) as progress:
            task = progress.add_task(what, total=total)

            def advance(step: str | None = None) -> None:
                progress.update(task, advance=1, description=f"{what}: {step}" if step else what)

            yield advance
            progress.update(task, completed=total or 1, total=total or 1)

    def result(self, data: dict[str, Any]) -> None:
        """The command's one JSON object; nothing without --json."""
        if self.as_json:
            json.dump(data, sys.stdout, indent=1, allow_nan=False)
            sys.stdout.write("\n")
