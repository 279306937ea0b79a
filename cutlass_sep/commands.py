"""What each command of the command line does; returns (exit status, the --json object)."""

from __future__ import annotations

import argparse
import bisect
import re
import secrets
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import arch as archs
from . import cache, toolchain, tuned
from . import doctor as examination
from . import kernel as kernels
from .bench import accuracy, ceilings, environment, inputs, report, results, runner, session
from .bench.inputs import BlockTensors, Case, Tensors
from .block_schedule import FORMS
from .cli import ENVIRONMENT, FAILED, OK, UsageError, parser
from .console import Output, counted
from .errors import EnvironmentProblem, Unsupported
from .op import Operation
from .planner import Plan, planned, supports
from .problem import LAYOUTS, Problem, SeparableBlock1dProblem, SeparableConv2dProblem

Answer = tuple[int, dict[str, Any]]

#: Name of the operator in a stand-alone project.
PROJECTS = {"dwsep2d": "separable_conv2d", "sepblock1d": "separable_conv_block1d"}
#: What an operator's flags are where they are not given: its lead shape. `expanded` is twice C.
DEFAULTS = {
    "dwsep2d": {
        "shape": (16, 64, 512, 512), "out_channels": 128, "kernel": (3,), "stride": (1,), "padding": (1,),
        "dilation": (1,), "bias": False, "mid_activation": "none", "activation": "none",
    },
    "sepblock1d": {"shape": (32, 256, 4096), "kernel": (9,), "dilation": (1,), "bias": True, "activation": "gelu"},
}  # fmt: skip
COMMON_DEFAULTS = {"dtype": "float32", "layout": "contiguous", "fp32_precision": "ieee"}
_SUITES = ("lead", "lead2d", "lead1d", "sweep1d")
#: The flags that say what one problem is: a suite or a file of layers says it itself.
_OF_ONE_PROBLEM = (
    "op", "shape", "out_channels", "expanded", "kernel", "stride", "padding", "dilation", "bias", "mid_activation",
    "activation",
)  # fmt: skip
#: The flags that an error of the API follows from, by words that it then has.
FLAGS_OF_ERRORS = {
    "shape": r"\bx\b|extent|sizes|weights|work items|output channels|32 bits|\b[CWQL] = ",
    "out_channels": r"extent|sizes|weights|output channels|\bO = ",
    "expanded": r"extent|sizes|weights(?! and the hidden)|32 bits|\bE = ",
    "kernel": r"kernel's|padding of|sizes|taps|halo|window|of a tile",
    "stride": r"stride|work items",
    "padding": r"padd|work items",
    "dilation": r"dilation|padding of|halo|window|of a tile",
    "dtype": r"dtype|-bit |multiple",
    "layout": r"multiple",
    "path": r"^path \w+:",
    "form": r"form\b|hidden channels|halo",
    "arch": r"target|for sm_",
}


def demo(args: argparse.Namespace, output: Output) -> Answer:
    """The whole way for one problem, as far as this machine can go."""
    built = _op(args)
    output.say(f"problem   {describe(built.problem)}")
    output.say(f"planned   {_choice(built)} for {built.arch}: {built.reason}")
    begin = time.perf_counter()
    source = built.source
    emit_seconds = time.perf_counter() - begin
    output.say(f"emitted   {len(source.splitlines())} lines of CUDA C++ in {1e3 * emit_seconds:.0f} ms")
    data = _about(built) | {
        "emit_seconds": emit_seconds,
        "compile": _compile(built, output),
        "verify": None,
        "rows": None,
    }
    device = _device()
    if device is None:
        output.say("no GPU    the kernel was emitted and compiled; running and comparing need a GPU")
        return OK, data
    if not archs.runs_on(built.arch, torch.cuda.get_device_capability(device)):
        output.say(f"not run   {torch.cuda.get_device_name(device)} does not load cubins for {built.arch}")
        return OK, data
    verdict = _verify(built, device, secrets.randbits(31), output)
    with output.working("timing beside cuDNN"):
        limits = ceilings.measure(device)
        beside = runner.Plan(
            peers=("eager",), path=args.path, forms=(args.form,), layouts=(built.problem.layout,)
        )  # fmt: skip
        measured = runner.measure(Case("demo", built.problem), beside, limits, environment.describe(device), device)
    session.show(measured.rows, output)
    for sentence in measured.problems:
        output.warn(sentence)
    right = verdict.ok and not measured.problems
    return OK if right else FAILED, data | {"verify": verdict.to_json(), "rows": measured.rows}


def emit(args: argparse.Namespace, output: Output) -> Answer:
    """The source to stdout, a file, or a stand-alone project."""
    built = _op(args)
    _check_writable(args.output)
    if args.project is not None:
        _make_folder("--project", args.project)
    data = _about(built) | {"output": None, "project": None}
    if args.project is not None:
        from . import emit as emission

        try:
            emission.pytorch(built, PROJECTS[built.problem.op], args.project)
        except OSError as error:
            raise UsageError(f"--project: {error}") from error
        data["project"] = str(args.project)
        output.say(f"wrote {args.project}; `python check.py` there builds it and compares it with float64")
    if args.output is not None:
        _write(args.output, built.source.encode())
        data["output"] = str(args.output)
        lines = counted(len(built.source.splitlines()), "line")
        output.say(f"wrote {args.output}: {lines} of CUDA C++, {_choice(built)} for {built.arch}")
    if args.output is None and args.project is None:
        if output.as_json:
            data["source"] = built.source
        else:
            print(built.source, end="")
    return OK, data


def compile(args: argparse.Namespace, output: Output) -> Answer:
    """Compile and show registers, shared memory and spills."""
    built = _op(args)
    _check_writable(args.output)
    output.say(f"{describe(built.problem)}: {_choice(built)} for {built.arch}: {built.reason}")
    data = _about(built) | {"compile": _compile(built, output), "output": None}
    if args.output is not None:
        _write(args.output, built.kernel.cubin.code)
        data["output"] = str(args.output)
        output.say(f"wrote {args.output}")
    return OK, data


def verify(args: argparse.Namespace, output: Output) -> Answer:
    """Fresh data, a poisoned output, float64, and PyTorch's own error on the same data."""
    built = _op(args)
    device = _require_device("verify", built.arch)
    seed = args.seed if args.seed is not None else secrets.randbits(31)
    verdict = _verify(built, device, seed, output)
    return OK if verdict.ok else FAILED, _about(built) | {"seed": seed, "verify": verdict.to_json()}


def bench(args: argparse.Namespace, output: Output) -> Answer:
    """Rows for the cases asked for; 1 if a value was wrong, a time impossible, or a row slower than its best peer."""
    if args.from_file is not None:
        return _report_of_file(args, output)
    if args.arch is not None:
        raise UsageError(f"--arch {args.arch} is no argument of bench, which measures on the architecture of its GPU")
    if args.tune and (args.path is not None or args.form is not None):
        raise UsageError("--tune finds the path and form; it contradicts --path and --form")
    found, left_out = _cases(args)
    if not (cases := found[args.rows]):
        raise UsageError(f"--rows leaves none of {counted(len(found), 'case')}")
    _check_results_file(args)
    if args.report is not None:
        _check_report_folder(args.report)
    device = _require_device("bench")
    if args.tune:
        cache.require("--tune cannot keep its picks")
    # The sweep compares forms, so both of them are measured beside the planner's pick, in one layout.
    sweep = args.suite == "sweep1d"
    layer_file = args.suite is not None and args.suite not in _SUITES
    layouts = (args.layout,) if args.layout is not None else ("contiguous",) if sweep else LAYOUTS
    # Compiling takes most of a layer's time: channels_last alone, the compiled peers' faster layout on the lead shapes.
    request = session.Request(
        cases=cases, peers=args.peers, timings=args.timing, path=args.path,
        forms=(None, *FORMS) if sweep and args.form is None else (args.form,),
        layouts=layouts, compiled_layouts=("channels_last",) if layer_file else LAYOUTS, tune=args.tune,
        samples=args.samples, peer_seconds=args.peer_seconds, startup=args.startup, output=args.output,
        append=args.append or args.resume, resume=args.resume,
    )  # fmt: skip
    finished = session.run(request, device, output)
    data = finished.to_json() | {"left_out": left_out}
    if args.report is not None:
        try:
            data["report"] = _report(args.report, finished.results, output)
        except ValueError as error:  # nothing came out of what was asked for, and the status says so
            output.warn(f"no report: {error}")
    return OK if finished.ok else FAILED, data


def cache_info(args: argparse.Namespace, output: Output) -> Answer:
    """Where the cache lies and how full it is."""
    about = cache.store().info()
    for name, value in about.items():
        if value is not None:
            output.say(f"{name:10} {value}")
    return OK, {"gpu": _gpu()} | about


def cache_list(args: argparse.Namespace, output: Output) -> Answer:
    """The kernels in the cache, last used first."""
    entries = cache.store().list_entries()
    rows = [
        (entry.name, entry.key[:16], entry.bytes, time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used)))
        for entry in entries
    ]
    output.table(counted(len(entries), "kernel"), ("name", "key", "bytes", "last used"), rows)
    listed = [
        {"name": entry.name, "key": entry.key, "path": entry.path, "bytes": entry.bytes, "last_used": entry.last_used}
        for entry in entries
    ]
    return OK, {"gpu": _gpu(), "entries": listed}


def cache_clear(args: argparse.Namespace, output: Output) -> Answer:
    """Empty the cache."""
    removed = cache.store().clear()
    output.say(f"removed {counted(removed['entries'], 'kernel')}, {counted(removed['bytes'], 'byte')}")
    return OK, {"gpu": _gpu(), "removed": removed}


def cache_warm(args: argparse.Namespace, output: Output) -> Answer:
    """Compile the kernels of one problem or of a file of layers."""
    if args.layers is None:
        target, problems = (one := _op(args)).arch, [one.problem]
        plans = [_tuned(one.problem, target, args) or planned(one.problem, target, args.path, args.form)]
    else:
        target, cases = _arch(args), _layer_cases(args.layers, args)
        problems, plans = [case.problem for case in cases], [_layer_plan(case, target, args) for case in cases]
    cache.require(keeping := "cache warm cannot keep kernels")
    built, skipped = [], []
    with output.working(f"compiling for {target}", total=len(plans)) as advance:
        for problem, chosen in zip(problems, plans, strict=True):
            if chosen.schedule is None:
                skipped.append({"problem": problem.to_json(), "reason": chosen.reason})
            else:
                kernel = kernels.make(problem, chosen.schedule, target)
                built.append({"name": kernel.name, "key": kernel.cubin.key, "cache_hit": kernel.cubin.cache_hit})
            advance()
    cache.require(keeping)  # a full disk shows only now
    hits = sum(entry["cache_hit"] for entry in built)
    output.say(
        f"{counted(len(built), 'kernel')} for {target}: {len(built) - hits} built, {hits} there before; "
        f"{counted(len(skipped), 'problem')} on path torch"
    )
    return OK, {"gpu": _gpu(), "arch": target, "kernels": built, "skipped": skipped}


def doctor(args: argparse.Namespace, output: Output) -> Answer:
    """One line a check."""
    checks = examination.examine()
    marks = {True: "ok", None: "--", False: "MISSING"}
    for check in checks:
        output.say(f"{marks[check.ok]:8}{check.name:16}{check.detail}")
        if check.ok is not True and check.remedy:
            output.say(f"{'':24}remedy: {check.remedy}")
    right = examination.healthy(checks)
    return OK if right else ENVIRONMENT, {"gpu": _gpu(), "ok": right, "checks": [check.to_json() for check in checks]}


def digest(args: argparse.Namespace, output: Output) -> Answer:
    """Recompute the digest of each results file; 1 if one differs and the file does not say that it is stale."""
    checkout = Path(__file__).parent.parent
    files = args.files or [
        *sorted(checkout.glob("benchmarks/results/*.json")),
        *checkout.glob("tests/gpu/results.json"),
    ]
    report = []
    for path in files:
        try:
            recorded, now, stale = results.check_digest(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is no results file: {type(error).__name__}: {error}") from error
        report.append({"file": str(path), "recorded": recorded, "now": now, "stale": stale})
        state = "current" if recorded == now else f"stale: {stale}" if stale else "DIFFERS: measured with other kernels"
        output.say(f"{now}  {path}  {state}")
    if not files:
        output.say("no results files here")
    right = all(entry["recorded"] == entry["now"] or entry["stale"] for entry in report)
    versions = {"cutlass": metadata.version("nvidia-cutlass"), "nvrtc": str(toolchain.nvrtc())}
    return OK if right else FAILED, {"gpu": _gpu(), "files": report} | versions


def describe(problem: Problem) -> str:
    """One line for a reader."""
    p = problem
    precision = f" {p.fp32_precision}" if p.fp32_precision else ""
    kind = f"{p.dtype}{precision}, {p.layout}"
    if isinstance(p, SeparableBlock1dProblem):
        parts = [
            f"[{p.n},{p.c},{p.l}] -> {p.e} -> {p.o} channels, k {p.kernel}, {kind}",
            f"dilation {p.dilation}" if p.dilation != 1 else "",
            "biases" if p.expand_bias and p.dw_bias and p.project_bias else "",
            f"{p.activation} between" if p.activation else "",
            "residual" if p.residual else "",
        ]
    else:
        parts = [
            f"[{p.n},{p.c},{p.h},{p.w}] -> {p.o} channels, {p.kernel[0]}x{p.kernel[1]}, {kind}",
            f"stride {p.stride[0]},{p.stride[1]}" if p.stride != (1, 1) else "",
            f"padding {','.join(map(str, p.padding))}" if any(p.padding) else "",
            f"dilation {p.dilation[0]},{p.dilation[1]}" if p.dilation != (1, 1) else "",
            "biases" if p.dw_bias and p.pw_bias else "",
            f"{p.mid_activation} between" if p.mid_activation else "",
            f"{p.activation} after" if p.activation else "",
        ]
    return ", ".join(filter(None, parts))


def _write(path: Path, data: bytes) -> None:
    """Write what --output asks for. Raises UsageError."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"--output: {error}") from error


def _check_writable(path: Path | None) -> None:
    """UsageError, before anything takes long, if --output could not be written; leaves what is there as it is."""
    try:
        if path is None or path.is_fifo():  # whose reader would take it for the end
            return
        new = not path.exists()
        with open(path, "ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"--output: {error}") from error


def _make_folder(flag: str, directory: Path) -> None:
    """UsageError, before anything takes long, if files could not be written to a folder, which is made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"{flag}: {error}") from error


def _check_results_file(args: argparse.Namespace) -> None:
    """UsageError, before anything is measured, if the results could not be written or added to --output."""
    if (args.append or args.resume) and args.output is None:
        raise UsageError(f"--{'append' if args.append else 'resume'} needs --output: the file to add to")
    if args.output is None:
        return
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        _check_writable(args.output)
        if not args.output.exists():
            return
        if not args.output.is_file():  # it is replaced as a whole
            raise UsageError(f"--output: {args.output} is no regular file")
        if args.append or args.resume:
            if args.output.stat().st_size == 0:  # made by mktemp, for one
                args.output.unlink()
            else:
                results.load(args.output)
    except (OSError, ValueError) as error:
        raise UsageError(f"--output: {error}") from error


def _check_report_folder(directory: Path) -> None:
    """UsageError or EnvironmentProblem, before anything is measured, if the report could not be drawn or written."""
    report.drawing()
    _make_folder("--report", directory)


def _report_of_file(args: argparse.Namespace, output: Output) -> Answer:
    """The report of `--from`, which goes with nothing that says what to measure."""
    if args.report is None:
        raise UsageError("--from needs --report: the folder to write to")
    if said := [flag for name, flag in _said(args, "bench").items() if name not in ("json", "report", "from_file")]:
        raise UsageError(f"--from takes rows measured before; {', '.join(said)} would say what to measure")
    _check_report_folder(args.report)
    try:
        data = results.load(args.from_file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--from: no results file: {type(error).__name__}: {error}") from error
    try:
        written = _report(args.report, data, output)
    except ValueError as error:
        raise UsageError(f"--from: {args.from_file}: {error}") from error
    return OK, {"gpu": _gpu(), "from": str(args.from_file), "report": written}


def _said(args: argparse.Namespace, *command: str) -> dict[str, str]:
    """The flags, by the names of their values, that are not what they are where `command` is given none."""
    unsaid = vars(parser().parse_args(command))
    return {
        name: f"--{name.replace('_', '-')}"
        for name, value in vars(args).items()
        if name != "command" and value != unsaid[name]
    }


def _refuse_one_problem(args: argparse.Namespace, by: str, *command: str) -> None:
    """UsageError for flags of one problem beside `by`, which says what the problems are."""
    if said := [flag for name, flag in _said(args, *command).items() if name in _OF_ONE_PROBLEM]:
        raise UsageError(f"{', '.join(said)} would say what one problem is; {by} has its own")


def _report(directory: Path, data: dict[str, Any], output: Output) -> dict[str, Any]:
    with output.working("drawing"):
        written = report.write(directory, data)
    output.say(f"wrote {directory / 'index.html'} and {len(written['files']) - 1} plots beside it")
    return written


def _op(args: argparse.Namespace) -> Operation:
    """The op that the arguments describe, made from meta tensors: no GPU needed. Raises UsageError, Unsupported."""
    flags, block = _flags(args), args.op == "sepblock1d"
    asked = {"path": args.path, "arch": (target := _arch(args))} | ({"form": args.form} if block else {})
    try:
        tensors, options = (_block_example if block else _pair_example)(flags)
        problem = (SeparableBlock1dProblem if block else SeparableConv2dProblem).from_tensors(*tensors, **options)
        built = inputs.operation(problem)(*tensors, **options, **asked)
        found = _tuned(problem, target, args)
        if found is not None and found.schedule is not None:
            built = inputs.operation(problem)(*tensors, **options, arch=target, schedule=found.schedule)
            built.reason = found.reason
        return built
    except Unsupported as error:
        raise Unsupported(_in_flags(error, flags) + _kernel_that_fits(problem, target, args)) from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(_in_flags(error, flags)) from error


def _tuned(problem: Problem, target: str, args: argparse.Namespace) -> Plan | None:
    """What `tune` found on the GPU here, if that is of architecture `target` and no path or form is asked for."""
    device = _device()
    if device is None or args.path is not None or args.form is not None:
        return None
    here = archs.runs_on(target, torch.cuda.get_device_capability(device)) and archs.of_device(device.index) == target
    return tuned.pick(problem, device) if here else None


def _kernel_that_fits(problem: Problem, target: str, args: argparse.Namespace) -> str:
    """Up to which --kernel the fused form that was asked for would run the problem; nothing if it runs with none."""
    if args.form != "fused":
        return ""

    def too_large(kernel: int) -> bool:
        return not supports(replace(problem, kernel=kernel), args.path or "sm90", target, "fused")

    fitting = bisect.bisect_left(range(1, problem.kernel), True, key=too_large)
    return f"; with the other values as they are, --kernel of up to {fitting} fits" if fitting else ""


def _flags(args: argparse.Namespace) -> argparse.Namespace:
    """The flags of the problem with their defaults. Raises UsageError for those that the operator does not have."""
    own = DEFAULTS[args.op]
    given = {name: value for name, value in vars(args).items() if value is not None}
    flags = argparse.Namespace(**vars(args) | COMMON_DEFAULTS | own | given)
    _check_precision(args.fp32_precision, flags.dtype)
    block = args.op == "sepblock1d"
    for name in ("out_channels", "stride", "padding", "mid_activation") if block else ("expanded", "form"):
        if name in given:
            raise UsageError(f"{_flag(name, given[name])} is no argument of --op {args.op}")
    if len(flags.shape) != len(own["shape"]):
        wanted = "N,C,L" if block else "N,C,H,W"
        raise UsageError(f"--shape must be {wanted} for --op {args.op}, got {_text(flags.shape)}")
    if block:
        flags.expanded = args.expanded or 2 * flags.shape[1]
        for name in ("kernel", "dilation"):
            if len(getattr(flags, name)) != 1:
                raise UsageError(f"--{name} must be one integer for --op {args.op}, got {_text(getattr(flags, name))}")
    return flags


def _check_precision(fp32_precision: str | None, dtype: str | None) -> None:
    """UsageError for a precision that says nothing about `dtype`, None being all of them; the default may stand."""
    if fp32_precision not in (None, COMMON_DEFAULTS["fp32_precision"]) and dtype not in (None, "float32"):
        raise UsageError(f"--fp32-precision {fp32_precision} is for --dtype float32, got --dtype {dtype}")


def _in_flags(error: Exception, flags: argparse.Namespace) -> str:
    """The message of an error of the API behind the flags that it follows from, as given or by default."""
    text = str(error)
    named = [
        _flag(name, value)
        for name, pattern in FLAGS_OF_ERRORS.items()
        if (value := getattr(flags, name)) is not None and re.search(pattern, text)
    ]
    return f"{' '.join(named)}: {text}"


def _flag(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {_text(value)}"


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _pair_example(flags: argparse.Namespace) -> tuple[Tensors, dict[str, Any]]:
    """Meta tensors and options of the 2-D operator."""
    (_, c, _, _), o, kernel = flags.shape, flags.out_channels, flags.kernel
    kernel = kernel * 2 if len(kernel) == 1 else kernel
    dtype = getattr(torch, flags.dtype)
    with torch.device("meta"):
        tensors = Tensors(
            x=inputs.empty(flags.shape, flags.layout, dtype, "meta"),
            dw_weight=torch.empty(c, 1, *kernel, dtype=dtype),
            pw_weight=torch.empty(o, c, 1, 1, dtype=dtype),
            dw_bias=torch.empty(c, dtype=dtype) if flags.bias else None,
            pw_bias=torch.empty(o, dtype=dtype) if flags.bias else None,
        )
    return tensors, {
        "stride": flags.stride,
        "padding": flags.padding,
        "dilation": flags.dilation,
        "mid_activation": _activation(flags.mid_activation),
        "activation": _activation(flags.activation),
        "fp32_precision": flags.fp32_precision,
    }


def _block_example(flags: argparse.Namespace) -> tuple[BlockTensors, dict[str, Any]]:
    """Meta tensors and options of the block."""
    (_, c, _), e = flags.shape, flags.expanded
    dtype = getattr(torch, flags.dtype)
    with torch.device("meta"):
        tensors = BlockTensors(
            x=inputs.empty(flags.shape, flags.layout, dtype, "meta"),
            expand_weight=torch.empty(e, c, 1, dtype=dtype),
            dw_weight=torch.empty(e, 1, *flags.kernel, dtype=dtype),
            project_weight=torch.empty(c, e, 1, dtype=dtype),
            expand_bias=torch.empty(e, dtype=dtype) if flags.bias else None,
            dw_bias=torch.empty(e, dtype=dtype) if flags.bias else None,
            project_bias=torch.empty(c, dtype=dtype) if flags.bias else None,
        )
    return tensors, {
        "dilation": flags.dilation,
        "activation": _activation(flags.activation),
        "fp32_precision": flags.fp32_precision,
    }


def _arch(args: argparse.Namespace) -> str:
    try:
        return args.arch or archs.default()
    except ValueError as error:
        raise UsageError(f"CUTLASS_SEP_ARCH: {error}") from error


def _activation(name: str) -> str | None:
    return None if name == "none" else name


def _about(built: Operation) -> dict[str, Any]:
    return {
        "gpu": _gpu(),
        "problem": built.problem.to_json(),
        "arch": built.arch,
        "path": built.path,
        "form": built.form,
        "reason": built.reason,
        "schedule": built.schedule.to_json(),
    }


def _choice(built: Operation) -> str:
    """Path, form and what makes the depthwise outputs, for a reader."""
    last = getattr(built.schedule, "project", None) or built.schedule
    fused = built.form == "fused" and built.problem.fp32_precision != "ieee"
    apart = getattr(last, "apart", False)
    on_tensor_cores = fused or bool(last.plane_rows if apart else getattr(last, "mma_q", 0))
    form = f", form {built.form}" if built.form else ""
    of_its_own = " in a kernel of its own" * apart
    return f"path {built.path}{form}, depthwise {'on tensor cores' if on_tensor_cores else 'by FMA'}{of_its_own}"


def _compile(built: Operation, output: Output) -> dict[str, Any]:
    """Build the cubin with progress shown, and a table of its resources."""
    kernel = built.kernel
    with output.working(f"compiling {kernel.name} for {kernel.arch}"):
        cubin = kernel.cubin
    built_in = f"built in {cubin.build_seconds:.2f} s by NVRTC {toolchain.nvrtc()}"
    how = "found in the cache" if cubin.cache_hit else built_in
    output.say(f"compiled  {how}: {len(cubin.code)} bytes, key {cubin.key[:16]}")
    table = [(name, used.registers, used.shared_bytes, used.spill_bytes) for name, used in cubin.resources.items()]
    output.table("resources", ("kernel", "registers", "static shared bytes", "spill bytes"), table)
    for stage in kernel.stages:
        threads, shared_bytes = stage.geometry.threads, stage.shared_bytes
        output.say(f"a block of kernel {stage.name} has {threads} threads, {shared_bytes} bytes of shared memory")
    return {
        "cache_hit": cubin.cache_hit,
        "build_seconds": cubin.build_seconds,
        "key": cubin.key,
        "cubin_bytes": len(cubin.code),
        "nvrtc": str(toolchain.nvrtc()),
        "threads": max(stage.geometry.threads for stage in kernel.stages),
        "shared_bytes": max(stage.shared_bytes for stage in kernel.stages),
        "resources": {name: vars(used) for name, used in cubin.resources.items()},
    }


def _verify(built: Operation, device: torch.device, seed: int, output: Output) -> accuracy.Verdict:
    problem = built.problem
    tensors = inputs.tensors(problem, device, seed)
    poisoned = inputs.empty(problem.y_shape, problem.layout, tensors.x.dtype, device).fill_(float("nan"))
    y = built.run(*tensors, out=poisoned)
    verdict = accuracy.judge_one(problem, tensors, y)
    peer = {"ieee": "strict fp32", "tf32": "TF32"}.get(problem.fp32_precision, f"eager {problem.dtype}")
    rows = [
        ("cutlass_sep", f"{verdict.ours.rel:.3g}", f"{verdict.ours.max_abs:.3g}"),
        (f"PyTorch, {peer}", f"{verdict.baseline.rel:.3g}", f"{verdict.baseline.max_abs:.3g}"),
        ("allowed", f"{verdict.rel_limit:.3g}", f"{verdict.max_abs_limit:.3g}" if verdict.max_abs_limit else "-"),
    ]
    title = f"{'right' if verdict.ok else 'WRONG'}: against float64, seed {seed}"
    output.table(title, ("", "||y - y64|| / ||y64||", "max |y - y64|"), rows)
    return verdict


def _cases(args: argparse.Namespace) -> tuple[list[Case], dict[str, str]]:
    """The cases of `bench`, and {id: reason} of those left out. Dtype and precision, if named, narrow a suite."""
    if args.suite is None:
        if args.batch is not None:
            raise UsageError("--batch is for a file of layers; the batch of one problem is the first extent of --shape")
        return [Case("custom", _op(args).problem)], {}
    _refuse_one_problem(args, f"--suite {args.suite}", "bench")
    _check_precision(args.fp32_precision, args.dtype)
    leads = {"lead": [inputs.lead(), inputs.lead1d()], "lead2d": [inputs.lead()], "lead1d": [inputs.lead1d()]}
    if args.batch is not None and args.suite in _SUITES:
        raise UsageError(f"--batch is for a file of layers, not for the suite {args.suite}")
    left_out: dict[str, str] = {}
    if args.suite in leads:
        bases, variants = leads[args.suite], session.LEAD_VARIANTS
    elif args.suite == "sweep1d":
        bases, variants = inputs.sweep1d(), session.SWEEP_VARIANTS
    else:
        others = f"; it must be one, or {', '.join(_SUITES[:-1])} or {_SUITES[-1]}"
        (bases, left_out), variants = _layer_file("--suite", Path(args.suite), others), session.LAYER_VARIANTS
    if args.form is not None:
        bases = [case for case in bases if case.problem.op == "sepblock1d"]
        if not bases:
            raise UsageError(f"--form {args.form} is of the block, and --suite {args.suite} has none")
    chosen = [
        (dtype, precision)
        for dtype, precision in variants
        if args.dtype in (None, dtype) and args.fp32_precision in (None, precision)
    ]
    if not chosen:
        chosen = [(args.dtype or "float32", args.fp32_precision)]
    if args.batch is not None:
        bases = [replace(case, problem=replace(case.problem, n=args.batch)) for case in bases]
    cases = [
        inputs.variant(case, dtype, case.problem.layout, precision) for case in bases for dtype, precision in chosen
    ]
    return cases, left_out


def _layer_cases(path: Path, args: argparse.Namespace) -> list[Case]:
    _refuse_one_problem(args, "--layers", "cache", "warm")
    dtype, layout = args.dtype or "float32", args.layout or "contiguous"
    _check_precision(args.fp32_precision, dtype)
    cases, _ = _layer_file("--layers", path)
    return [inputs.variant(case, dtype, layout, args.fp32_precision) for case in cases]


def _layer_plan(case: Case, target: str, args: argparse.Namespace) -> Plan:
    """What runs a layer of a file. Raises Unsupported naming the flags that ask for what cannot."""
    form = args.form if case.problem.op == "sepblock1d" else None
    try:
        return _tuned(case.problem, target, args) or planned(case.problem, target, args.path, form)
    except Unsupported as error:
        asked = " ".join(_flag(name, value) for name in ("path", "form") if (value := getattr(args, name)) is not None)
        raise Unsupported(f"{asked}: layer {case.id}: {error}") from error


def _layer_file(flag: str, path: Path, others: str = "") -> tuple[list[Case], dict[str, str]]:
    """The layers of a file that `flag` names. UsageError, with what else would be allowed, if it is no such file."""
    try:
        found, left_out = inputs.layers(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag}: {path} is no file of layers: {error}{others}") from error
    if not found:
        raise UsageError(f"{flag}: {path} has no layer that these operators run{others}")
    return found, left_out


def _device() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _gpu() -> str | None:
    device = _device()
    return None if device is None else torch.cuda.get_device_name(device)


def _require_device(command: str, target: str | None = None) -> torch.device:
    """The GPU, which loads cubins for `target` if one is given; EnvironmentProblem if there is none."""
    device = _device()
    if device is None:
        raise EnvironmentProblem(f"{command} runs kernels and needs an NVIDIA GPU; torch {torch.__version__} sees none")
    if target is not None and not archs.runs_on(target, torch.cuda.get_device_capability(device)):
        name = torch.cuda.get_device_name(device)
        raise EnvironmentProblem(f"{command} runs kernels; {name} loads none for {target} (--arch, CUTLASS_SEP_ARCH)")
    return device
