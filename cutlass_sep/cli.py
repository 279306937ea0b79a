"""The command line.

Exit status: 0 right, 1 a value or speed check failed, 2 wrong usage, 3 the environment lacks something.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .arch import ARCHS
from .console import Output
from .errors import CompileError, EnvironmentProblem, Unsupported
from .problem import ACTIVATIONS, KERNEL_DTYPES, LAYOUTS, PRECISIONS
from .schedule import MAX_EXTENT, MAX_STRIDE

OK, FAILED, USAGE, ENVIRONMENT = 0, 1, 2, 3


class UsageError(Exception):
    """Wrong arguments; the message says which and what is allowed."""


class _Parser(argparse.ArgumentParser):
    """Reports through `main`, so that --json answers with an object here too; takes no shortened options, for `main`
    looks for --json itself.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)

    def error(self, message: str) -> Any:
        raise UsageError(f"{self.prog}: {message}\n{self.format_usage().rstrip()}")


class _Version(argparse.Action):
    """Prints the version and exits with 0. Raises EnvironmentProblem where the package is not installed, as in a bare
    checkout.

    Not argparse's own: that takes the text when the parser is made, and every other command works without it.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            print(f"{parser.prog} {metadata.version('cutlass-sep')}")
        except metadata.PackageNotFoundError:
            raise EnvironmentProblem("--version: cutlass_sep is not installed here; pip install it") from None
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:
        # Whoever read stdout (`head`, for one) has seen enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # what a shell reports of a program without a handler


def _run(argv: list[str]) -> int:
    output = Output(as_json="--json" in argv)
    try:
        args = parser().parse_args(argv)
        status, data = args.command(args, output)
    except UsageError as error:
        status, data = USAGE, _failure(output, error)
    except Unsupported as error:
        status, data = USAGE, _failure(output, error)
    except EnvironmentProblem as error:
        status, data = ENVIRONMENT, _failure(output, error)
    except CompileError as error:
        status, data = FAILED, _failure(output, error)
    output.result(data)
    print(end="", flush=True)  # here, where a closed pipe is still dealt with
    return status


def _failure(output: Output, error: Exception) -> dict[str, Any]:
    output.warn(str(error))
    return {"error": type(error).__name__, "message": str(error)}


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(
        prog="cutlass-sep", description="Fused depthwise-separable convolutions, kernels written for each shape."
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    problem = _problem_arguments()
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object on stdout, all else on stderr")

    def add(to, name: str, text: str, command: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub = to.add_parser(name, help=text, description=text, parents=[common, *parents])
        sub.set_defaults(command=_lazy(command))
        return sub

    text = "Emit, compile, and on a GPU run one problem and compare it with float64 and cuDNN."
    add(commands, "demo", text, "demo", problem)
    emit = add(commands, "emit", "Write the CUDA C++ of a problem's kernel.", "emit", problem)
    emit.add_argument("--output", type=Path, metavar="FILE", help="write the source there instead of to stdout")
    text = "write a stand-alone project, with its check.py; the folder is new or empty, or an earlier project's"
    emit.add_argument("--project", type=Path, metavar="DIR", help=text)
    compile_ = add(commands, "compile", "Compile a problem's kernel and show what it takes.", "compile", problem)
    compile_.add_argument("--output", type=Path, metavar="FILE", help="write the cubin there")
    text = "Compare a problem's results with float64 on fresh data (needs a GPU)."
    verify = add(commands, "verify", text, "verify", problem)
    verify.add_argument("--seed", type=_seed, help="seed of the data (default: a new one, which is printed)")
    _bench_arguments(
        add(commands, "bench", "Time problems beside PyTorch's convolutions (needs a GPU).", "bench", problem)
    )

    cache = commands.add_parser("cache", help="The disk cache.").add_subparsers(required=True, metavar="ACTION")
    add(cache, "info", "Where the disk cache lies and how full it is.", "cache_info")
    add(cache, "list", "The kernels in the disk cache.", "cache_list")
    add(cache, "clear", "Remove all kernels from the disk cache.", "cache_clear")
    warm = add(cache, "warm", "Compile what a problem, or every layer of a file, will need.", "cache_warm", problem)
    warm.add_argument(
        "--layers", type=Path, metavar="FILE",
        help="JSON lines of layers, as benchmarks/layers.jsonl; of the problem's arguments only --dtype, --layout, "
        "--fp32-precision, --arch, --path and --form go with it",
    )  # fmt: skip

    add(commands, "doctor", "What this machine has and lacks.", "doctor")
    digest = add(commands, "digest", "Compare results files with the kernels as they are now.", "digest")
    digest.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="default: the results files of this checkout"
    )
    return top


def _lazy(name: str) -> Callable[[argparse.Namespace, Output], tuple[int, dict[str, Any]]]:
    """A command by name. Imported when it runs: the parser and --help need neither torch's CUDA nor the compiler."""

    def run(args: argparse.Namespace, output: Output) -> tuple[int, dict[str, Any]]:
        from . import commands

        return getattr(commands, name)(args, output)

    return run


def _problem_arguments() -> argparse.ArgumentParser:
    parent = _Parser(add_help=False)
    text = (
        "default: the lead shape, [16,64,512,512] -> 128 channels, 3x3, padding 1; of the block [32,256,4096], 512, 9"
    )
    group = parent.add_argument_group("problem", text)
    group.add_argument(
        "--op", choices=("dwsep2d", "sepblock1d"), default="dwsep2d",
        help="depthwise then pointwise, 2-D; or the 1-D block: expand, depthwise, project, residual",
    )  # fmt: skip
    group.add_argument("--shape", type=_extents(3, 4), metavar="N,C,H,W|N,C,L", help="shape of x")
    group.add_argument("--out-channels", type=_extent, metavar="O", help="dwsep2d only; default: 128")
    group.add_argument("--expanded", type=_extent, metavar="E", help="sepblock1d only; default: twice C")
    group.add_argument("--kernel", type=_extents(1, 2), metavar="K[,K]")
    group.add_argument("--stride", type=_extents(1, 2, most=MAX_STRIDE), metavar="S[,S]", help="dwsep2d only")
    group.add_argument("--padding", type=_padding, metavar="P[,P]|same|valid", help="dwsep2d only")
    group.add_argument("--dilation", type=_extents(1, 2), metavar="D[,D]")
    group.add_argument(
        "--bias", action=argparse.BooleanOptionalAction, default=None,
        help="a bias on every convolution; default: the block has them, dwsep2d has none",
    )  # fmt: skip
    group.add_argument("--dtype", choices=tuple(KERNEL_DTYPES), default=None, help="default: float32")
    group.add_argument("--layout", choices=LAYOUTS, default=None, help="memory format of x; default: contiguous")
    activations = tuple(name or "none" for name in ACTIVATIONS)
    text = "after the depthwise convolution; dwsep2d only"
    group.add_argument("--mid-activation", choices=activations, default=None, help=text)
    text = "after the pointwise convolution, default none; of the block after the depthwise one, default gelu"
    group.add_argument("--activation", choices=activations, default=None, help=text)
    group.add_argument("--fp32-precision", choices=PRECISIONS, default=None, help="default: ieee")
    text = "target; default: $CUTLASS_SEP_ARCH, else the GPU's, else sm_90a"
    group.add_argument("--arch", choices=tuple(ARCHS), help=text)
    text = "default: what the planner picks, or the best kernel where it would call PyTorch"
    group.add_argument("--path", choices=("sm90", "portable"), help=text)
    group.add_argument(
        "--form", choices=("fused", "two_kernel"), help="sepblock1d only; default: what the planner picks"
    )
    return parent


def _bench_arguments(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "--suite", metavar="lead|lead2d|lead1d|sweep1d|FILE",
        help="'lead' (both lead shapes in every dtype), one of them, 'sweep1d' (the block in every form over lengths, "
        "channels and kernels) or a file of layers; of the problem's arguments only --dtype, --layout, "
        "--fp32-precision, --path and --form go with it; default: the one problem of the arguments",
    )  # fmt: skip
    bench.add_argument(
        "--rows", type=_row_range, default=slice(None), metavar="A:B", help="only these cases of the suite"
    )
    peers = ("eager", "compile", "compile-max-autotune")
    text = f"of {', '.join(peers)}; default: eager, on the lead shapes all three"
    bench.add_argument("--peers", type=_names(*peers), metavar="P[,P]", help=text)
    timings = ("events", "cuda_graph")
    text = f"of {', '.join(timings)}; default: events"
    bench.add_argument("--timing", type=_names(*timings), default=timings[:1], metavar="T[,T]", help=text)
    bench.add_argument("--samples", type=_extent, default=40, help="timed samples of each implementation")
    text = "time limit of a compile-max-autotune peer, which has a process of its own; default: 200"
    bench.add_argument("--peer-seconds", type=_extent, default=200, metavar="S", help=text)
    bench.add_argument("--batch", type=_extent, metavar="N", help="batch of every layer of the file; default: its own")
    text = "time the schedules with the best estimates, and PyTorch's convolutions, first; calls then take the fastest"
    bench.add_argument("--tune", action="store_true", help=text)
    bench.add_argument("--startup", action="store_true", help="also time cold and warm starts, and host time per call")
    bench.add_argument("--output", type=Path, metavar="FILE", help="write the results there")
    bench.add_argument("--append", action="store_true", help="keep what the file has of other measurements")
    text = "as --append, and leave out the cases whose rows the file has, measured with the kernels as they are now"
    bench.add_argument("--resume", action="store_true", help=text)
    bench.add_argument(
        "--report", type=Path, metavar="DIR",
        help="write a page, index.html, and PNG plots of all results there (with --append, of the whole file)",
    )  # fmt: skip
    bench.add_argument(
        "--from", type=Path, metavar="FILE", dest="from_file",
        help="with --report: take the rows of this results file and measure nothing, which needs no GPU",
    )  # fmt: skip


def _extent(text: str) -> int:
    values = _integers(text)
    if len(values) != 1 or not 1 <= values[0] <= MAX_EXTENT:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 1 to {MAX_EXTENT}")
    return values[0]


def _seed(text: str) -> int:
    values = _integers(text)
    if len(values) != 1 or not 0 <= values[0] < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 0 to {2**63 - 1}")
    return values[0]


def _integers(text: str) -> tuple[int, ...]:
    """The integers of a comma-separated list; none if one is not an integer."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return ()


def _extents(*counts: int, least: int = 1, most: int = MAX_EXTENT) -> Callable[[str], tuple[int, ...]]:
    """A parser of comma-separated integers from `least` to `most`, as many as one of `counts`."""

    def parse(text: str) -> tuple[int, ...]:
        values = _integers(text)
        if len(values) not in counts or not all(least <= value <= most for value in values):
            wanted = " or ".join(map(str, counts))
            raise argparse.ArgumentTypeError(
                f"{text!r} must be {wanted} integers from {least} to {most}, separated by commas"
            )
        return values

    return parse


def _padding(text: str) -> tuple[int, ...] | str:
    if text in ("same", "valid"):
        return text
    try:
        return _extents(1, 2, least=0)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or same, or valid") from None


def _row_range(text: str) -> slice:
    try:
        first, last = (int(part) if part else None for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be A:B, first and last row as Python slices count") from None
    return slice(first, last)


def _names(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names out of `allowed`; one given twice counts once."""

    def parse(text: str) -> tuple[str, ...]:
        names = dict.fromkeys(text.split(","))
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))} is not one of {', '.join(allowed)}")
        return tuple(names)

    return parse
