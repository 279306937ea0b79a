"""Source to cubin: what is in the key, what comes back, what is said when it cannot work."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from tiny_kernel import ARCH, SOURCE, build, forget

from cutlass_sep import cache, compiler, headers, toolchain
from cutlass_sep.errors import CompileError, EnvironmentProblem, UnsupportedArch

REPOSITORY = Path(__file__).parents[1]
#: What the kernels include, roughly: arch-level CuTe and CUTLASS.
CUTLASS_SOURCE = """
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>
extern "C" __global__ void convert(float* x, cutlass::half_t* y) {
  y[threadIdx.x] = cutlass::NumericConverter<cutlass::half_t, float>::convert(x[threadIdx.x]);
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    path = tmp_path / "cache"
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(path))
    forget()
    yield path
    forget()


def python(code: str, **environment: str | None) -> str:
    """stdout of a Python process; environment values of None are unset."""
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


# --- what comes back -----------------------------------------------------------------------------------------------


def test_resources_and_code() -> None:
    source = """
    extern "C" __global__ void plain(float* x) { x[threadIdx.x] += 1.0f; }
    extern "C" __global__ void shared(float* x) {
      __shared__ float s[100];
      s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = s[99 - threadIdx.x];
    }
    extern "C" __global__ void local(float* x, int i) {
      float a[64];
      for (int j = 0; j < 64; ++j) a[(j * i) % 64] = x[j];
      for (int j = 0; j < 64; ++j) x[j] = a[(j * j + i) % 64];
    }
    """
    cubin = build(source, "sm_90a")
    assert set(cubin.resources) == {"plain", "shared", "local"}
    assert {name: used.shared_bytes for name, used in cubin.resources.items()} == {
        "plain": 0,
        "shared": 400,
        "local": 0,
    }
    assert {name: used.spill_bytes for name, used in cubin.resources.items()} == {"plain": 0, "shared": 0, "local": 256}
    assert all(4 <= used.registers <= 255 for used in cubin.resources.values())
    assert cubin.code[:4] == b"\x7fELF"
    assert int.from_bytes(cubin.code[18:20], "little") == 190  # EM_CUDA
    assert "Compiling entry function 'plain' for 'sm_90a'" in cubin.log
    assert not cubin.cache_hit and cubin.build_seconds > 0

    for hit in (compiler.build(source, "sm_90a", name="scale"), build(source, "sm_90a")):  # memory, then disk
        assert hit == replace(cubin, cache_hit=True)


def test_spills_are_counted() -> None:
    # 40 values that are all needed twice, in 24 registers.
    loads = "".join(f"float v{i} = x[{i} * n];" for i in range(40))
    products = "".join(f"y[{i} * n] = v{i} * s;" for i in range(40))
    total = " + ".join(f"v{i}" for i in range(40))
    source = f"""extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* x, float* y, int n) {{
        {loads} __syncthreads(); float s = {total}; __syncthreads(); {products} }}"""
    used = build(source).resources["crowded"]
    assert used.registers <= 32
    assert used.spill_bytes > 0


def test_logs_of_other_versions() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
    16 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Function properties for helper
    40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 368 bytes cmem[0]
"""
    assert compiler.parse_resources(log) == {
        "a": compiler.Resources(168, 1024, 40),
        "b": compiler.Resources(12, 0, 0),
    }


def test_option_strings_are_the_options() -> None:
    given = [option.decode() for option in compiler.options("sm_90a").as_bytes("nvrtc")]
    assert [option for option in given if not option.startswith("--include-path=")] == list(
        compiler.option_strings("sm_90a")
    )
    assert [option.partition("=")[2] for option in given if option.startswith("--include-path=")] == list(
        compiler.include_paths()
    )
    assert not any("fast" in option or "ftz" in option for option in given)


@pytest.mark.parametrize(("minor", "expected"), [(8, None), (9, True)])
def test_early_nvrtc_is_not_told_of_its_cache(
    minor: int, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none before 12.9, and refuses the option."""
    monkeypatch.setattr(toolchain, "nvrtc", lambda: toolchain.Nvrtc(12, minor, "build"))
    monkeypatch.setattr(compiler, "include_paths", lambda: ())
    assert compiler.options("sm_90a").no_cache is expected


def test_cutlass_sees_the_architecture() -> None:
    source = (
        CUTLASS_SOURCE
        + """
    #if !defined(CUTE_ARCH_MMA_SM90A_ENABLED) || !defined(CUTE_ARCH_TMA_SM90_ENABLED) || !defined(NDEBUG)
    #error a macro is missing
    #endif
    #if __CUDACC_VER_MAJOR__ != MAJOR || __CUDACC_VER_MINOR__ != MINOR
    #error the compiler version is wrong
    #endif
    """
    )
    version = toolchain.nvrtc()
    build(
        source.replace("MAJOR__ != MAJOR", f"MAJOR__ != {version.major}").replace("!= MINOR", f"!= {version.minor}"),
        "sm_90a",
    )


def test_importing_does_nothing(tmp_path: Path) -> None:
    out = python(
        """
        import os, sys, torch
        os.chdir(os.environ["PLACE"])
        before = set(sys.modules)  # torch itself imports some of cuda.bindings
        from cutlass_sep import cache, compiler, headers, toolchain
        print([name for name in set(sys.modules) - before if name.split(".")[0] in ("cuda", "platformdirs")])
        """,
        PLACE=str(tmp_path),
        HOME=str(tmp_path),
        CUTLASS_SEP_CACHE_DIR=None,
        XDG_CACHE_HOME=None,
    )
    assert out == "[]\n"
    assert os.listdir(tmp_path) == []


def test_no_toolkit_is_needed() -> None:
    out = python(
        f"""
        from cutlass_sep import compiler
        print(compiler.build({CUTLASS_SOURCE!r}, "sm_90a", name="convert").resources)
        """,
        CUDA_HOME="/usr/local/cuda-11.0-gone",
        CUDA_PATH="/usr/local/cuda-11.0-gone",
        PATH="/nowhere",
    )
    assert "'convert': Resources(registers=" in out


# --- the key -------------------------------------------------------------------------------------------------------


def copy_tree(place: Path, found: headers.Headers) -> tuple[str, ...]:
    """Copies of the include folders, laid out alike, that hold the files found and no other."""
    roots = compiler.include_paths()
    base = os.path.commonpath(roots)
    for path in found.files:
        target = place / os.path.relpath(path, base)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(path).read_bytes())
    return tuple(str(place / os.path.relpath(root, base)) for root in roots)


def walk(source: str) -> headers.Headers:
    return headers.walk(headers.directives(source), compiler.include_paths())


def test_an_equal_setup_hits_and_each_change_misses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "include"
    own.mkdir()
    (own / "value.h").write_text("#define VALUE 3.0f\n")
    paths = (*compiler.include_paths(), str(own))
    monkeypatch.setattr(compiler, "include_paths", lambda: paths)
    source = "#include <value.h>\n" + SOURCE.replace("3.0f", "VALUE")

    keys = {build(source).key}
    assert build(source).cache_hit

    def misses_once(source: str = source, arch: str = ARCH) -> None:
        cubin = build(source, arch)
        assert not cubin.cache_hit and cubin.key not in keys
        keys.add(cubin.key)
        assert build(source, arch).cache_hit

    misses_once(source + " ")
    misses_once(arch="sm_90")
    misses_once(arch="sm_90a")
    version = toolchain.nvrtc()
    for other in (
        replace(version, minor=99),
        replace(version, major=version.major + 1),
        replace(version, build="other"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(toolchain, "nvrtc", lambda other=other: other)
            misses_once()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "option_strings", lambda arch: ("--maxrregcount=32",))
        misses_once()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "package_version", lambda: "other")
        misses_once()
    with monkeypatch.context() as patch:
        patch.setenv("NVRTC_APPEND_FLAGS", "-DX")
        misses_once()
    # The header last: the same size and the same modification time, so that only its contents differ.
    old = (own / "value.h").stat()
    (own / "value.h").write_text("#define VALUE 4.0f\n")
    os.utime(own / "value.h", ns=(old.st_atime_ns, old.st_mtime_ns))
    misses_once()
    (own / "value.h").write_text("#define VALUE 3.0f\n")
    assert build(source).cache_hit, "the first contents again"


def test_a_changed_cutlass_header_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = copy_tree(tmp_path, walk(CUTLASS_SOURCE))
    before = compiler.key_document(CUTLASS_SOURCE, ARCH)
    monkeypatch.setattr(compiler, "include_paths", lambda: copies)
    assert compiler.key_document(CUTLASS_SOURCE, ARCH) == before, "where the headers lie is not in the key"
    for changed in (
        Path(copies[0], "cutlass/half.h"),
        Path(copies[1], "cuda_fp16.hpp"),
        Path(copies[2], "cuda/std/tuple"),
    ):
        text = changed.read_text()
        changed.write_text(text + "\n// changed\n")
        assert compiler.key_document(CUTLASS_SOURCE, ARCH)["headers"] != before["headers"], changed
        changed.write_text(text)
        assert compiler.key_document(CUTLASS_SOURCE, ARCH) == before


def test_the_headers_found_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "#include <cute/tensor.hpp>\n" + CUTLASS_SOURCE
    found = walk(source)
    assert found.unresolved == ()
    expected = build(source, "sm_90a").code
    copies = copy_tree(tmp_path / "with space" / "üñ 目录", found)
    monkeypatch.setattr(compiler, "include_paths", lambda: copies)
    assert build(source, "sm_90a").cache_hit
    cache.store().clear()
    again = build(source, "sm_90a")
    assert not again.cache_hit
    assert again.code == expected


def test_the_digest_does_not_depend_on_the_order_of_the_walk() -> None:
    code = f"from cutlass_sep import compiler; print(compiler.header_digest({CUTLASS_SOURCE!r}))"
    digests = {python(code, PYTHONHASHSEED=seed, CUTLASS_SEP_CACHE_DIR="/proc/none") for seed in ("1", "2", "3")}
    assert len({text.splitlines()[0] for text in digests}) == 1


def test_a_walk(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path, text in {
        second / "a.h": '# include "sub/b.h"\n#ifdef NEVER\n#include<c.h>\n#endif\n',
        second / "sub/b.h": '#include "near.h"\n  #  include MAKE(d) // comment\n#include ELSEWHERE\n',
        second / "sub/near.h": "#define MAKE(x) <made/x.h>\n",
        second / "c.h": "#include <a.h>\n#include <vector>\n",
        second / "made/d.h": "",
        second / "unused.h": "",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    roots = (str(first), str(second))
    found = headers.walk(headers.directives("#include <a.h>\n"), roots)
    names = ["a.h", "c.h", "made/d.h", "sub/b.h", "sub/near.h"]
    assert list(found.files) == [str(second / name) for name in names]
    assert found.unresolved == ("ELSEWHERE",)
    assert found.current()
    assert headers.Headers.from_json(found.to_json()) == found

    # A file that would now be found first, or at all, ends the result's life, be it in a folder that was not there.
    for place, name in ((first, "c.h"), (first, "vector"), (second, "vector"), (first / "made", "d.h")):
        known = headers.walk(headers.directives("#include <a.h>\n"), roots)
        assert known.digest == found.digest and known.current()
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("")
        assert not known.current()
        assert headers.walk(headers.directives("#include <a.h>\n"), roots).digest != found.digest
        (place / name).unlink()
    found = headers.walk(headers.directives("#include <a.h>\n"), roots)
    (second / "made/d.h").unlink()
    assert not found.current()


@pytest.mark.parametrize("change", ["read", "looked for"])
def test_what_changes_right_behind_a_walk_ends_its_result(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (second / "a.h").write_text("old")

    def read(path: str, mode: str) -> io.BytesIO:
        data = Path(path).read_bytes()
        Path(path).write_text("another text")
        return io.BytesIO(data)

    def looked_for(path: str, isfile: Callable[[str], bool] = os.path.isfile) -> bool:
        there = isfile(path)
        (first / "a.h").write_text("found first from now on")
        return there

    with monkeypatch.context() as patch:
        if change == "read":
            patch.setattr(headers, "open", read, raising=False)
        else:
            patch.setattr(headers.os.path, "isfile", looked_for)
        known = headers.walk([b"<a.h>"], (str(first), str(second)))
    assert known.files == (str(second / "a.h"),)
    assert not known.current()


def test_no_header_comes_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "poison.h").write_text("")
    monkeypatch.chdir(tmp_path)
    for include in ("<poison.h>", '"poison.h"'):
        with pytest.raises(CompileError, match=r"cannot open source file"):
            build(f"#include {include}\n" + SOURCE)


def test_a_warm_look_up_is_fast() -> None:
    assert not build(CUTLASS_SOURCE, "sm_90a").cache_hit
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert build(CUTLASS_SOURCE, "sm_90a").cache_hit
        seconds.append(time.perf_counter() - start)
    print(f"warm look-up: {min(seconds) * 1e3:.1f} ms")
    assert min(seconds) < 0.05


# --- threads -------------------------------------------------------------------------------------------------------


def in_threads(jobs: list[Callable[[], object]]) -> list[object]:
    """Results, or exceptions, of jobs that start together in a thread each."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> object:
        barrier.wait()
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def test_sixteen_threads_build_one_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = compiler._compile, []

    def count(*args: object) -> compiler.Cubin:
        calls.append(args)
        time.sleep(0.1)
        return real(*args)

    monkeypatch.setattr(compiler, "_compile", count)
    results = in_threads([lambda: compiler.build(SOURCE, ARCH, name="scale")] * 16)
    assert len(calls) == 1
    assert [result.cache_hit for result in results].count(False) == 1
    assert len({result.code for result in results}) == 1


def test_sixteen_keys_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    real, together = compiler._compile, threading.Barrier(16)

    def meet(*args: object) -> compiler.Cubin:
        together.wait(timeout=30)  # passes only if all sixteen are in here at once
        return real(*args)

    monkeypatch.setattr(compiler, "_compile", meet)
    jobs = [lambda i=i: compiler.build(SOURCE + f"// {i}\n", ARCH, name="scale") for i in range(16)]
    results = in_threads(jobs)
    assert all(isinstance(result, compiler.Cubin) and not result.cache_hit for result in results), results
    assert len({result.key for result in results}) == 16


def test_the_gil_is_free_while_compiling() -> None:
    build()  # imports and the first use of NVRTC
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    body = "".join(f"x = x * {i}.5f + a[{i}];" for i in range(1500))
    cubin = build(f'extern "C" __global__ void big(float* a) {{ float x = a[0]; {body} a[0] = x; }}')
    done.set()
    ticker.join()
    longest = max(after - before for before, after in zip(ticks, ticks[1:], strict=False))
    assert longest < cubin.build_seconds / 2, (longest, cubin.build_seconds)


def test_a_failed_build_reaches_all_waiters_and_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Semaphore(0)

    class Watched(Future):
        def result(self, timeout: float | None = None) -> object:
            waiting.release()
            return super().result(timeout)

    def fail(*args: object) -> None:
        for _ in range(7):
            assert waiting.acquire(timeout=30)
        raise CompileError("scale", ARCH, "0.0", (), "broken", None)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "Future", Watched)
        patch.setattr(compiler, "_compile", fail)
        results = in_threads([lambda: compiler.build(SOURCE, ARCH, name="scale")] * 8)
    assert [type(result) for result in results] == [CompileError] * 8
    assert not compiler.build(SOURCE, ARCH, name="scale").cache_hit


def test_an_interrupted_build_passes_to_a_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun, calls = compiler._compile, threading.Event(), []

    def interrupt_first(*args: object) -> compiler.Cubin:
        calls.append(args)
        if len(calls) == 1:
            begun.set()
            time.sleep(0.2)
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(compiler, "_compile", interrupt_first)
    interrupted = []

    def first() -> None:
        try:
            compiler.build(SOURCE, ARCH, name="scale")
        except KeyboardInterrupt:
            interrupted.append(True)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(30)
    assert compiler.build(SOURCE, ARCH, name="scale").code[:4] == b"\x7fELF"
    thread.join()
    assert interrupted and len(calls) == 2


def test_a_forked_child_does_not_wait_for_threads_it_lacks() -> None:
    out = python(
        f"""
        import os, threading, time
        from cutlass_sep import cache, compiler
        real, begun = compiler._compile, threading.Event()
        def slow(*args):
            begun.set()
            time.sleep(2)
            return real(*args)
        compiler._compile = slow
        cache.LOCK_WAIT_SECONDS = 0.1
        thread = threading.Thread(target=compiler.build, args=({SOURCE!r}, {ARCH!r}), kwargs=dict(name="scale"))
        thread.start()
        begun.wait()
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            compiler._compile = lambda source, arch, name, key, store: compiler.Cubin(b"x", key, {{}}, False, 0.0, "")
            compiler.build({SOURCE!r}, {ARCH!r}, name="scale")
            os._exit(7)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), time.monotonic() - start < 1.5)
        thread.join()
        """
    )
    assert "7 True" in out.splitlines()


# --- errors --------------------------------------------------------------------------------------------------------


def test_a_source_that_does_not_compile(folder: Path) -> None:
    source = SOURCE + "not C++;\n"
    with pytest.raises(CompileError) as caught:
        build(source)
    error = caught.value
    assert str(error).splitlines()[0] == f"NVRTC {toolchain.nvrtc()} could not compile scale for {ARCH}."
    assert (error.name, error.arch, error.nvrtc) == ("scale", ARCH, str(toolchain.nvrtc()))
    assert 'identifier "C" is undefined' in error.log or "scale(2): error" in error.log
    assert error.log in str(error)
    assert f"-arch={ARCH}" in error.options and f"--include-path={compiler.include_paths()[0]}" in error.options
    assert error.source_path.parent == folder and error.source_path.read_text() == source
    assert str(error.source_path) in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.log == error.log and copy.source_path == error.source_path
    assert list(folder.glob("*.cubin")) == [] and list(folder.glob("*.lock")) == []
    assert cache.store().clear() and os.listdir(folder) == []


def test_architectures() -> None:
    known = compiler.supported_archs()
    assert {"sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a"} <= set(known)
    assert "sm_80a" not in known
    for arch in ("sm_35", "sm_99", "sm_80a"):
        with pytest.raises(UnsupportedArch) as caught:
            build(arch=arch)
        message = str(caught.value)
        assert message.startswith(f"NVRTC {toolchain.nvrtc()} cannot compile for {arch}") and "install" in message
    for malformed in ("90a", "compute_90", "sm_90A", "sm_90a -DX", "", None, 90):
        with pytest.raises(ValueError, match="arch must look like"):
            build(arch=malformed)


@pytest.mark.parametrize("name", ["", "with space", "a/b", "ü", "x" * 121])
def test_names_fit_for_files(name: str) -> None:
    with pytest.raises(ValueError, match="name must be"):
        compiler.build(SOURCE, ARCH, name=name)


def site(place: Path, distributions: dict[str, tuple[str, list[str]]]) -> Path:
    """A folder of installed distributions: name -> (version, files)."""
    for name, (version, files) in distributions.items():
        info = place / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file in files:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_text("")
    return place


CUTLASS = ("4.2.0.0", ["cutlass_library/source/include/cutlass/version.h"])
CU13 = {
    "nvidia-cutlass": CUTLASS,
    "nvidia-cuda-runtime": ("13.0.96", ["nvidia/cu13/include/cuda_fp16.h"]),
    "nvidia-cuda-cccl": ("13.1.78", ["nvidia/cu13/include/cccl/cuda/std/type_traits"]),
}
CU12 = {
    "nvidia-cutlass": CUTLASS,
    "nvidia-cuda-runtime-cu12": ("12.9.79", ["nvidia/cuda_runtime/include/cuda_fp16.h"]),
    "nvidia-cuda-cccl-cu12": ("12.9.27", ["nvidia/cuda_cccl/include/cuda/std/type_traits"]),
}


@pytest.fixture
def paths_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Include paths, relative to site-packages, that a machine with these distributions and this NVRTC has."""

    def find(distributions: dict[str, tuple[str, list[str]]], version: tuple[int, int]) -> list[str]:
        place = site(tmp_path / "site", distributions)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(place)])
            paths = toolchain.include_paths_of.__wrapped__(toolchain.Nvrtc(*version, "build"))
            return [os.path.relpath(path, place) for path in paths]

    return find


def test_include_paths_of_cuda_13(paths_of: Callable[..., list[str]]) -> None:
    expected = ["cutlass_library/source/include", "nvidia/cu13/include", "nvidia/cu13/include/cccl"]
    assert paths_of(CU13 | {"nvidia-cuda-cccl-cu12": CU12["nvidia-cuda-cccl-cu12"]}, (13, 4)) == expected


def test_cccl_installed_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = site(tmp_path / "apart", {"nvidia-cuda-cccl": CU13["nvidia-cuda-cccl"]})
    place = site(tmp_path / "site", {name: CU13[name] for name in ("nvidia-cutlass", "nvidia-cuda-runtime")})
    monkeypatch.setattr(sys, "path", [str(place), str(apart)])
    paths = toolchain.include_paths_of.__wrapped__(toolchain.Nvrtc(13, 0, "build"))
    assert paths[2:] == (str(apart / "nvidia/cu13/include/cccl"), str(apart / "nvidia/cu13/include"))


def test_include_paths_of_cuda_12(paths_of: Callable[..., list[str]]) -> None:
    expected = ["cutlass_library/source/include", "nvidia/cuda_runtime/include", "nvidia/cuda_cccl/include"]
    assert paths_of(CU12 | CU13, (12, 9)) == expected


@pytest.mark.parametrize("version", ["13.2.0", "13.10.1", "14.0.1", "12.9.27"])
def test_a_cccl_that_cutlass_cannot_use(version: str, paths_of: Callable[..., list[str]]) -> None:
    wrong = CU13 | {"nvidia-cuda-cccl": (version, CU13["nvidia-cuda-cccl"][1])}
    with pytest.raises(EnvironmentProblem) as caught:
        paths_of(wrong, (13, 0))
    assert f"nvidia-cuda-cccl {version} " in str(caught.value)
    assert "pip install 'nvidia-cuda-cccl>=13.0,<13.2'" in str(caught.value)


def test_missing_headers_are_named_once(paths_of: Callable[..., list[str]], tmp_path: Path) -> None:
    gone = {"nvidia-cutlass": CUTLASS, "nvidia-cuda-runtime": ("13.0.96", [])}  # no CCCL, and a runtime without headers
    with pytest.raises(EnvironmentProblem) as caught:
        paths_of(gone, (13, 0))
    message = str(caught.value)
    assert "nvidia-cuda-runtime (nvidia/cu13/include)" in message
    assert "nvidia-cuda-cccl (nvidia/cu13/include/cccl)" in message
    assert "nvidia-cutlass (" not in message
    assert "cutlass_sep[cu13]" in message and str(tmp_path / "site") in message


def test_an_nvrtc_of_another_age(paths_of: Callable[..., list[str]]) -> None:
    with pytest.raises(EnvironmentProblem, match=r"NVRTC 11.8 was found; cutlass_sep knows CUDA 12 and 13"):
        paths_of(CU13, (11, 8))


def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    def lost(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(f"searched /here and /there for {name}")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lost)
    with pytest.raises(EnvironmentProblem, match=r"cutlass_sep\[cu13\](.|\n)*searched /here and /there for nvrtc"):
        toolchain.load.__wrapped__()


def test_no_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(EnvironmentProblem, match=r"cuda-bindings cannot be imported"):
        toolchain.load.__wrapped__()


def test_nvrtc_at_hand() -> None:
    version = toolchain.load()
    assert version.major in (12, 13)
    distribution = "nvidia-cuda-nvrtc" + ("-cu12" if version.major == 12 else "")
    assert metadata.version(distribution).startswith(f"{version}.")
    assert version.build != "unknown"


def test_versions_are_those_of_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {distribution.metadata["Name"] for distribution in metadata.distributions()}:
        assert toolchain.version_of(name) == metadata.version(name), name
    egg = tmp_path / "old_one-1.5.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: old-one\nVersion: 1.5\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert toolchain.version_of("old-one") == "1.5"
    with pytest.raises(metadata.PackageNotFoundError):
        toolchain.version_of("no-such-one")


def test_a_kernel_out_of_the_cache_needs_no_nvrtc(folder: Path) -> None:
    code = f"""
        import re, sys
        from cutlass_sep import compiler, toolchain
        loaded = lambda: re.search(r"libnvrtc[.]so", open("/proc/self/maps").read()) is not None
        assert not loaded()
        cubin = compiler.build({SOURCE!r}, {ARCH!r}, name="scale")
        print(cubin.key, cubin.cache_hit, loaded(), "cuda.bindings.nvrtc" in sys.modules)
        toolchain.load()
        print(compiler.digest(compiler.key_document({SOURCE!r}, {ARCH!r})), loaded())
    """
    cold, warm = (python(code).split() for _ in range(2))
    key = cold[0]
    assert cold == [key, "False", "True", "True", key, "True"]
    # The NVRTC that was expected and the one loaded then have the same key.
    assert warm == [key, "True", "False", "False", key, "True"]


def test_an_nvrtc_other_than_expected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = compiler.digest(compiler.key_document(SOURCE, ARCH))
    for known in (toolchain.load, toolchain.supported_archs):  # as in a new process
        known.cache_clear()
    monkeypatch.setattr(toolchain, "_expected", lambda: toolchain.Nvrtc(13, 99, "another"))
    wrong = compiler.digest(compiler.key_document(SOURCE, ARCH))
    cubin = build()
    assert cubin.key == right != wrong and not cubin.cache_hit
    assert [entry.key for entry in cache.store().list_entries()] == [right]


@pytest.mark.parametrize(
    "distributions, expected",
    [
        ({}, None),
        ({"nvidia-cuda-nvrtc": ("13.4.31", ["nvidia/cu13/lib/libnvrtc.so.13"])}, (13, 4)),
        ({"nvidia-cuda-nvrtc-cu12": ("12.9.86", ["nvidia/cuda_nvrtc/lib/libnvrtc.so.12"])}, (12, 9)),
        ({"nvidia-cuda-nvrtc": ("13.4.31", [])}, None),
        (
            {
                "nvidia-cuda-nvrtc": ("13.4.31", ["nvidia/cu13/lib/libnvrtc.so.13"]),
                "nvidia-cuda-nvrtc-cu12": ("12.9.86", ["nvidia/cuda_nvrtc/lib/libnvrtc.so.12"]),
            },
            None,
        ),
    ],
)
def test_what_nvrtc_is_expected(distributions, expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_loaded(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr(toolchain.ctypes, "CDLL", not_loaded)
    monkeypatch.setattr(sys, "path", [str(site(tmp_path / "site", distributions))])
    found = toolchain._expected.__wrapped__()
    assert (found and (found.major, found.minor)) == expected
    monkeypatch.setattr(toolchain.ctypes, "CDLL", lambda name, mode: None)
    assert toolchain._expected.__wrapped__() is None, "a loaded library goes first"


# --- log -----------------------------------------------------------------------------------------------------------


def test_the_log_variable(folder: Path) -> None:
    code = f"""
        import logging
        logging.basicConfig()
        from cutlass_sep import compiler
        for _ in range(2):
            compiler.build({SOURCE!r}, {ARCH!r}, name="scale")
    """
    assert python(code, CUTLASS_SEP_LOG=None) == ""
    cache.store().clear()
    line = f"cutlass_sep: building scale for {ARCH} with NVRTC {toolchain.nvrtc()}\n"
    assert python(code, CUTLASS_SEP_LOG="INFO") == line
    assert python(code, CUTLASS_SEP_LOG="info") == ""  # from the disk: nothing is built
    assert "CUTLASS_SEP_LOG='loud'" in python(code, CUTLASS_SEP_LOG="loud")
