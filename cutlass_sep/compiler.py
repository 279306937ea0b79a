"""Source text to cubin: NVRTC through cuda.core, behind a single flight in the process and the disk cache.

Order of a build: in-process table, a build of the same key in flight in another thread, disk cache, the key's lock,
disk cache again, NVRTC. Builds of different keys run side by side: cuda.core releases the GIL, and NVRTC serialises
only its C++ front end (optimiser and ptxas overlap).
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from . import cache, headers, toolchain
from .errors import CompileError
from .log import logger
from .toolchain import check_arch, check_arch_name, include_paths, supported_archs

if TYPE_CHECKING:
    from cuda.core import ProgramOptions

__all__ = [
    "Cubin",
    "Resources",
    "build",
    "discard",
    "header_digest",
    "include_paths",
    "key_document",
    "option_strings",
    "options",
    "supported_archs",
]

#: Part of every key: raise it when the meaning of an entry changes.
SCHEMA = 1
#: Cubins kept in this process, least recently used dropped first (each is 20 to 600 KB).
MEMORY_ENTRIES = 256


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread; bytes of static shared memory a block and of local memory a thread."""

    registers: int
    shared_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Cubin:
    """A compiled module.

    code: the ELF image. key: sha256 of `key_document`, hex. resources: by kernel name, from ptxas.
    cache_hit: no compiler ran for this call. build_seconds: what NVRTC took when it did run. log: its log then.
    """

    code: bytes
    key: str
    resources: dict[str, Resources]
    cache_hit: bool
    build_seconds: float
    log: str


_lock = threading.Lock()
_memory: OrderedDict[str, Cubin] = OrderedDict()
_in_flight: dict[str, Future[Cubin | None]] = {}


def build(source: str, arch: str, *, name: str) -> Cubin:
    """Compile CUDA C++ for `arch` ("sm_90a"), or take the cubin from this process or the disk.

    `name` is a short tag (ASCII letters, digits, "_", ".", "-") for the log and the entry's file name; equal sources
    should come with equal names, or the disk keeps one entry a name. Raises CompileError, UnsupportedArch,
    EnvironmentProblem, and ValueError for a malformed arch or name.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,120}", name):
        raise ValueError(f"name must be 1 to 120 ASCII letters, digits, '_', '.' or '-', got {name!r}")
    check_arch_name(arch)
    document = key_document(source, arch)
    key = digest(document)
    while True:
        with _lock:
            if key in _memory:
                _memory.move_to_end(key)
                return replace(_memory[key], cache_hit=True)
            future = _in_flight.get(key)
            if mine := future is None:
                future = _in_flight[key] = Future()
        if mine:
            return _fly(future, source, arch, name, key, document)
        if (cubin := future.result()) is not None:
            return replace(cubin, cache_hit=True)


def _fly(future: Future[Cubin | None], source: str, arch: str, name: str, key: str, document: dict[str, Any]) -> Cubin:
    """Build and tell the threads that wait for the same key."""
    try:
        cubin = _load_or_compile(source, arch, name, key, document)
    except BaseException as error:
        with _lock:
            _in_flight.pop(key, None)
        if isinstance(error, Exception):
            future.set_exception(error)
        else:
            future.set_result(None)  # this thread was interrupted: one of the waiters builds
        raise
    with _lock:
        _memory[key] = cubin
        if len(_memory) > MEMORY_ENTRIES:
            _memory.popitem(last=False)
        _in_flight.pop(key, None)
    future.set_result(cubin)
    return cubin


def _load_or_compile(source: str, arch: str, name: str, key: str, document: dict[str, Any]) -> Cubin:
    store = cache.store()
    tag = f"{name}-{arch}"
    if (cubin := _load(store, key, tag)) is not None:
        return cubin
    check_arch(arch)
    if key_document(source, arch) != document:  # the NVRTC that is loaded now is not the one expected
        return build(source, arch, name=name)
    with store.lock(key, tag):
        if (cubin := _load(store, key, tag)) is not None:
            return cubin
        logger.info("building %s for %s with NVRTC %s", name, arch, toolchain.nvrtc())
        cubin = _compile(source, arch, name, key, store)
        logger.debug("built %s for %s in %.2f s", name, arch, cubin.build_seconds)
        meta = {
            "arch": arch,
            "resources": {kernel: asdict(used) for kernel, used in cubin.resources.items()},
            "build_seconds": cubin.build_seconds,
            "log": cubin.log,
            "key_document": document,
        }
        store.save(key, tag, cubin.code, meta)
    return cubin


def _load(store: cache.Store, key: str, tag: str) -> Cubin | None:
    entry = store.load(key, tag)
    if entry is None:
        return None
    code, meta = entry
    resources = {kernel: Resources(**used) for kernel, used in meta["resources"].items()}
    return Cubin(code, key, resources, cache_hit=True, build_seconds=meta["build_seconds"], log=meta["log"])


def _compile(source: str, arch: str, name: str, key: str, store: cache.Store) -> Cubin:
    """Run NVRTC. Raises CompileError, with the source left in the store's folder."""
    with _lock:  # the first import of cuda.core is not safe from two threads at once (seen in 1.2.2)
        from cuda.core import Program

    chosen = replace(options(arch), name=name)
    log = io.StringIO()
    start = time.perf_counter()
    try:
        code = Program(source, "c++", options=chosen).compile("cubin", logs=log).code
    except Exception as error:
        if type(error).__name__ != "NVRTCError":
            raise
        strings = tuple(option.decode() for option in chosen.as_bytes("nvrtc"))
        text = str(error).replace("\0", "").strip()
        path = store.save_failed_source(key, f"{name}-{arch}", source)
        raise CompileError(name, arch, str(toolchain.nvrtc()), strings, text, path) from None
    seconds = time.perf_counter() - start
    text = log.getvalue().replace("\0", "").strip()
    return Cubin(bytes(code), key, parse_resources(text), cache_hit=False, build_seconds=seconds, log=text)


def discard(cubin: Cubin) -> None:
    """Forget a cubin that the driver refused to load, in this process and on disk: the next build compiles it anew."""
    entry = cubin.key[:32]
    logger.warning("the driver does not load the cubin of cache entry %s in %s; it is built again", entry, cache.root())
    with _lock:
        _memory.pop(cubin.key, None)
    cache.store().discard(cubin.key)


def options(arch: str) -> ProgramOptions:
    """The options NVRTC gets: those of `option_strings` and the include paths. Raises EnvironmentProblem."""
    from cuda.core import ProgramOptions

    version = toolchain.nvrtc()
    return ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=["NDEBUG"],
        include_path=list(include_paths()),
        # CUTLASS's constexpr host functions are called from device code without an annotation.
        device_as_default_execution_space=True,
        # Else the current working directory is searched for headers.
        no_source_include=True,
        # NVRTC's own cache, which it has since 12.9, would answer a second build without the log, and make build times
        # untrue.
        no_cache=True if (version.major, version.minor) >= (12, 9) else None,
        # Registers, shared memory and spills of each kernel come back in the log.
        ptxas_options=["-v"],
    )


def option_strings(arch: str) -> tuple[str, ...]:
    """The same options as text, without the include paths (headers count by their contents): for keys and digests.

    Written out so that a key needs no import of cuda.core; a test holds them equal to `options`. NVRTC before 12.9
    does not get `--no-cache`.
    """
    return (
        f"-arch={arch}",
        "--ptxas-options=-v",
        "--define-macro=NDEBUG",
        "--no-source-include",
        "--std=c++17",
        "--device-as-default-execution-space",
        "--no-cache",
    )


def key_document(source: str, arch: str) -> dict[str, Any]:
    """Everything that decides the cubin, as plain data; the key is the sha256 of its canonical JSON."""
    version = toolchain.nvrtc()
    return {
        "schema": SCHEMA,
        "package": package_version(),
        "source_sha256": hashlib.sha256(source.encode()).hexdigest(),
        "headers": header_digest(source),
        "options": list(option_strings(arch)),
        "arch": arch,
        "nvrtc": [version.major, version.minor, version.build],
        # NVRTC appends this variable's options in some settings.
        "nvrtc_append_flags": os.environ.get("NVRTC_APPEND_FLAGS", ""),
    }


def header_digest(source: str) -> str:
    """sha256 over the contents of every header the source may reach, checked anew on each call; "" without headers."""
    includes = headers.directives(source)
    if not includes:
        return ""
    roots = include_paths()
    store = cache.store()
    # What identifies a walk: where it starts and where it looks. Its result is verified by stat before it is used.
    walk_key = digest({"schema": headers.SCHEMA, "includes": [os.fsdecode(i) for i in includes], "roots": roots})
    known = _walks.get(walk_key)
    if known is None and (entry := store.load(walk_key, "headers", ".headers")) is not None:
        known = headers.Headers.from_json(entry[0])
    if known is None or not known.current():
        known = headers.walk(includes, roots)
        store.save(walk_key, "headers", known.to_json(), {}, ".headers")
    _walks[walk_key] = known
    return known.digest


_walks: dict[str, headers.Headers] = {}


def digest(document: dict[str, Any]) -> str:
    """sha256 of a document's canonical JSON: a key of the disk cache."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@functools.cache
def package_version() -> str:
    """This package's version, "" where it is not installed."""
    try:
        return toolchain.version_of("cutlass_sep")
    except metadata.PackageNotFoundError:  # a checkout that is not installed: its sources are in the key anyway
        return ""


def parse_resources(log: str) -> dict[str, Resources]:
    """Resources of each kernel from the text that `ptxas -v` prints."""
    found = {}
    for kernel, text in _kernel_sections(log):
        used = re.search(r"Used (\d+) registers", text)
        if used is None:
            continue
        shared = re.search(r"(\d+) bytes smem", text)
        # The stack frame holds the spilled registers; functions that were not inlined have frames of their own.
        frames = (max(map(int, m)) for m in re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", text))
        found[kernel] = Resources(int(used[1]), int(shared[1]) if shared else 0, max(frames, default=0))
    return found


def _kernel_sections(log: str) -> Iterator[tuple[str, str]]:
    marks = list(re.finditer(r"Compiling entry function '([^']+)' for", log))
    for mark, after in zip(marks, [*marks[1:], None], strict=False):
        yield mark[1], log[mark.end() : after.start() if after else len(log)]


def _after_fork() -> None:
    """Threads that were building do not exist in a forked child: nobody would end their flights or release the lock."""
    global _lock
    _lock = threading.Lock()
    _in_flight.clear()


os.register_at_fork(after_in_child=_after_fork)
