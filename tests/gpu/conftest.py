"""Options and fixtures of the GPU tests; see the package's docstring for how to run them."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import cutlass_sep
from cutlass_sep import arch as archs
from cutlass_sep import compiler, dispatch, kernel, planner
from cutlass_sep.bench import inputs, results
from cutlass_sep.problem import KERNEL_DTYPES, Problem
from cutlass_sep.schedule import PATHS, Support

from . import block_combinations, combinations, rehearsal
from .builds import Builds
from .calls import reduced

_HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("GPU tests of cutlass_sep")
    group.addoption(
        "--rehearse", nargs="?", const="sm_90a", metavar="ARCH", help="build the kernels, run without a GPU"
    )
    group.addoption("--build-ahead", action="store_true", help="compile on every core what the tests to come will need")
    group.addoption(
        "--kernel-list", type=Path, help="--rehearse lists its kernels there and compiles none; --build-ahead reads it"
    )
    group.addoption("--expect-no-builds", action="store_true", help="fail if a kernel was not in the disk cache")
    group.addoption("--data-seed", type=int, help="seed of the random data; default: a new one in each run")


def _option(config: pytest.Config, name: str):
    return config.getoption(name, default=None)  # unknown to pytest if this file was not named on its command line


@dataclass
class Machine:
    """What the tests run on. `arch`: what kernels are built for. `builds`: compilers beside the tests, if there are."""

    device: torch.device
    arch: str
    rehearsing: bool
    builds: Builds | None

    def build(self, problem: Problem, path: str | None = None, form: str | None = None) -> None:
        """Let the compilers build the kernel of a problem, without running it."""
        plan = planner.plan(problem, self.arch, path, form)
        if plan.schedule is not None:
            self.builds.submit(kernel.make(problem, plan.schedule, self.arch))

    def supports(self, problem: Problem, path: str | None = None, form: str | None = None) -> Support:
        """Whether `path` (None: one of them) runs this problem in this form; the reason is the last path's."""
        found = [planner.supports(problem, name, self.arch, form) for name in ((path,) if path else PATHS)]
        return next(filter(None, found), found[-1])

    def require(self, problem: Problem, path: str | None = None, form: str | None = None) -> None:
        """Skip what cannot be run."""
        if not (support := self.supports(problem, path, form)):
            pytest.skip(f"path {path or 'any'}, form {form or 'any'}: {support.reason}")

    def needs_gpu(self, *problems: Problem, path: str | None = None, form: str | None = None, why: str = "") -> None:
        """In the rehearsal: compile what the test would run, and skip it."""
        if self.rehearsing:
            for problem in problems:
                self.build(problem, path, form)
            pytest.skip(why or "rehearsal: its kernels are built, the rest needs a GPU")


@dataclass
class _State:
    machine: Machine
    seed: int
    patch: pytest.MonkeyPatch
    compiled: list[str]
    item: pytest.Item | None = None


_key = pytest.StashKey[_State]()


def pytest_configure(config: pytest.Config) -> None:
    arch = _option(config, "rehearse")
    if arch is None and not torch.cuda.is_available():
        return
    if arch is not None and config.getoption("--gpu-results", default=None):
        raise pytest.UsageError("a rehearsal has no results: --rehearse and --gpu-results exclude each other")
    if config.option.durations is None:
        config.option.durations = 15
    given = _option(config, "data_seed")
    if arch is not None:
        machine = Machine(
            torch.device("cpu"), archs.check(arch), True, Builds(listing=_option(config, "kernel_list") is not None)
        )
    else:
        ahead = Builds() if _option(config, "build_ahead") else None
        machine = Machine(torch.device("cuda", 0), archs.of_device(0), False, ahead)
    state = _State(machine, secrets.randbits(31) if given is None else given, pytest.MonkeyPatch(), [])
    config.stash[_key] = state
    if machine.rehearsing:
        torch.set_num_threads(1)  # the compilers take the rest
        rehearsal.install(state.patch, machine.arch, machine.builds)
    _watch(state)


def _watch(state: _State) -> None:
    """Note every kernel that a test launches, and every one that was compiled for it."""
    launch, compile_ = kernel.Kernel.launch, compiler._compile

    def watched_launch(self, *tensors) -> None:
        launch(self, *tensors)
        _note(state, self.problem, self.schedule.path, self.schedule, self.arch)

    def watched_compile(source, arch, name, *rest):
        state.compiled.append(name)
        return compile_(source, arch, name, *rest)

    state.patch.setattr(kernel.Kernel, "launch", watched_launch)
    state.patch.setattr(compiler, "_compile", watched_compile)


def _note(state: _State, problem, path: str, schedule, arch: str) -> None:
    if state.item is None:
        return
    noted = state.item.stash.setdefault(_noted, set())
    if (problem, schedule) not in noted:
        noted.add((problem, schedule))
        state.item.user_properties.append(("ran", results.ran(problem, path, schedule, arch)))


_noted = pytest.StashKey[set]()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (state := config.stash.get(_key, None)) is not None:
        state.patch.undo()


def pytest_report_header(config: pytest.Config) -> str:
    state = config.stash.get(_key, None)
    if state is None:
        return "GPU tests: skipped, torch sees no CUDA device here (--rehearse builds their kernels)"
    kind = "rehearsal on the CPU" if state.machine.rehearsing else torch.cuda.get_device_name(0)
    return f"GPU tests: {kind}, kernels for {state.machine.arch}, --data-seed {state.seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _key not in config.stash:
        skip = pytest.mark.skip(reason="torch sees no CUDA device here")
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to compile: what a rehearsal listed, or for the tests whose kernels their parameters tell."""
    if not _option(session.config, "build_ahead") or _key not in session.config.stash:
        return
    machine = session.config.stash[_key].machine
    listed = _option(session.config, "kernel_list")
    if listed is not None and not machine.rehearsing:
        machine.builds.submit_saved(listed)
        return
    for item in session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "combination" in parameters:
            combination, variant, path = (parameters[name] for name in ("combination", "variant", "path"))
            schedule = combinations.schedule_of(combination.group, variant, path, machine.arch)
            if schedule is not None:
                machine.builds.submit(kernel.make(combination.problem(variant), schedule, machine.arch))
        elif "block" in parameters:
            block, *how = (parameters[name] for name in ("block", "variant", "form", "path"))
            schedule = block_combinations.schedule_of(block.group, *how, machine.arch)
            if schedule is not None:
                machine.builds.submit(kernel.make(block.problem(how[0]), schedule, machine.arch))
        elif "layer" in parameters:
            layer, form = parameters["layer"], parameters.get("form")
            if form is not None:
                layer = inputs.variant(layer, "bfloat16", "contiguous", None)
            path = "portable" if item.originalname == "test_portable" else None
            if form is None or machine.supports(reduced(layer), form=form):
                machine.build(reduced(layer), path, form)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    state = session.config.stash.get(_key, None)
    if state is None:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    write = reporter.write_line if reporter else print
    write("")
    failed = []
    listed = _option(session.config, "kernel_list")
    if state.machine.rehearsing and listed is not None:
        state.machine.builds.save(listed)
    elif state.machine.rehearsing:
        failed = state.machine.builds.finish(write)
    elif state.machine.builds is not None:
        state.machine.builds.abandon()
    if state.compiled:
        write(f"{len(state.compiled)} kernels were compiled in this run: {', '.join(state.compiled[:8])} ...")
        if _option(session.config, "expect_no_builds"):
            failed += ["--expect-no-builds: kernels were missing from the disk cache"]
    for line in failed:
        write(f"ERROR {line}", red=True)
    if failed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Machine:
    return pytestconfig.stash[_key].machine


@pytest.fixture
def device(machine: Machine) -> str:
    """Takes the place of tests/conftest.py's for tests that are borrowed from there."""
    return machine.device.type


@pytest.fixture
def generator(request: pytest.FixtureRequest, machine: Machine) -> torch.Generator:
    """Fresh random numbers: of this run and this test, whichever other tests run."""
    seed = request.config.stash[_key].seed
    own = zlib.crc32(f"{seed} {request.node.nodeid}".encode())
    return torch.Generator(machine.device).manual_seed(own)


@pytest.fixture
def gpu(machine: Machine) -> torch.device:
    """The CUDA device, for tests that nothing can stand in for; they run problems that others build."""
    machine.needs_gpu(why="rehearsal: needs a GPU")
    return machine.device


@pytest.fixture(autouse=True)
def _noting(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels launched from here on belong to this test; nothing that one test planned serves another."""
    state = request.config.stash[_key]
    state.item = request.node
    torch.manual_seed(zlib.crc32(f"{state.seed} {request.node.nodeid}".encode()))
    dispatch.clear()
    yield
    state.item = None


@pytest.fixture
def note_torch(request: pytest.FixtureRequest, machine: Machine):
    """Call it with a problem that ran on path "torch"."""
    return lambda problem: request.node.user_properties.append(
        ("ran", results.ran(problem, "torch", None, machine.arch))
    )


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot have its kernel fails instead of running on path "torch"."""
    monkeypatch.setenv("CUTLASS_SEP_FALLBACK", "0")


@pytest.fixture
def fused(machine: Machine, no_fallback, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Functions and modules run a kernel, also where the planner would rather call PyTorch; the best one, or, once this
    is called with a path (and a form of the block), the best of those."""
    choose = dispatch.choose
    forced: list[tuple[str | None, str | None]] = [(None, None)]

    def best_kernel(problem: Problem, device: torch.device) -> planner.Plan:
        chosen = choose(problem, device)
        if problem.n == 0 or problem.dtype not in KERNEL_DTYPES or device.type != machine.device.type:
            return chosen
        path, form = forced[0]
        schedule = planner.candidates(problem, machine.arch, path, form)[0]
        return planner.Plan(schedule.path, schedule, "the test wants a kernel")

    monkeypatch.setattr(dispatch, "choose", best_kernel)
    return lambda path, form=None: forced.__setitem__(0, (path, form))


@pytest.fixture
def tf32_flags() -> Iterator[None]:
    """Puts torch's TF32 flags back."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


assert cutlass_sep  # imported for its effect on torch.library: the ops exist in every test
