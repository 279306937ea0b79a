"""The disk cache: whole entries or none, one build a key, and no failure of the folder that stops a kernel."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tiny_kernel import ARCH, SOURCE, build, forget

from cutlass_sep import cache, compiler

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own, not yet on disk."""
    path = tmp_path / "parents" / "cache"
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(path))
    forget()
    yield path
    forget()


def entries(folder: Path, suffix: str = ".cubin") -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def start(code: str, environment: dict[str, str | None] | None = None, **popen: object) -> subprocess.Popen:
    """A Python process that runs `code` on SOURCE and ARCH; environment values of None are unset."""
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUTLASS_SEP_LOG": "info", **(environment or {})}
    variables = {name: value for name, value in variables.items() if value is not None}
    prelude = (
        f"import sys, os, json, time\nfrom cutlass_sep import cache, compiler\nSOURCE, ARCH = {SOURCE!r}, {ARCH!r}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        **popen,
    )


BUILD_AND_PRINT = """
    import hashlib
    print("ready", flush=True)
    sys.stdin.readline()
    cubin = compiler.build(SOURCE, ARCH, name="scale")
    print(json.dumps({"hit": cubin.cache_hit, "code": hashlib.sha256(cubin.code).hexdigest()}), flush=True)
"""


def release_together(processes: list[subprocess.Popen]) -> list[tuple[dict, str]]:
    """Let processes that run BUILD_AND_PRINT go at once; (what each printed, its stderr)."""
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = []
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        results.append((json.loads(out), err))
    return results


# --- entries -------------------------------------------------------------------------------------------------------


def test_round_trip(folder: Path) -> None:
    store = cache.Store(folder)
    key = "ab" * 32
    assert store.load(key, "name") is None
    store.save(key, "name", b"\x7fELF payload", {"registers": 7})
    assert store.load(key, "name") == (b"\x7fELF payload", {"registers": 7})
    path = folder / f"name-{key[:32]}.cubin"
    assert os.listdir(folder) == [path.name]
    assert path.read_bytes().startswith(b"\x7fELF payload"), "the file must open as the cubin itself"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0


def test_the_full_key_is_checked(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = cache.Store(folder)
    key = "ab" * 32
    other = key[:32] + "cd" * 16  # the same file name
    store.save(key, "name", b"payload", {})
    assert store.load(other, "name") is None
    assert len(warnings(caplog)) == 1 and f"name-{key[:32]}.cubin" in warnings(caplog)[0]
    assert entries(folder) == []


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def damage_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_metadata(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b'"registers": ') == 1
    path.write_bytes(data.replace(b'"registers": ', b'"registers":9'))


def damage_magic(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def damage_last_byte_missing(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_length(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] = 0xFF
    path.write_bytes(data)


def damage_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def damage_foreign(path: Path) -> None:
    shutil.copy(next(entry for entry in entries(path.parent) if entry != path), path)


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__.removeprefix("damage_"))
def test_a_bad_entry_heals(damage: object, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = build(SOURCE + "// another kernel\n")
    good = build()
    (path,) = (entry for entry in entries(folder) if good.key[:32] in entry.name)
    assert other.key != good.key and not good.cache_hit and build().cache_hit
    damage(path)
    healed = build()
    assert not healed.cache_hit
    assert (healed.code, healed.resources) == (good.code, good.resources)
    assert len(warnings(caplog)) == 1 and str(path) in warnings(caplog)[0]
    again = build()
    assert again.cache_hit and (again.code, again.resources) == (good.code, good.resources)
    assert len(warnings(caplog)) == 1


def test_a_reader_sees_a_whole_entry_or_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = cache.Store(folder)
    key = "0f" * 32
    stop = threading.Event()

    def write(byte: int) -> None:
        while not stop.is_set():
            store.save(key, "name", bytes([byte]) * (1000 * byte), {"byte": byte})

    store.save(key, "name", b"\x01" * 1000, {"byte": 1})
    writers = [threading.Thread(target=write, args=(byte,)) for byte in (1, 50, 200)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(300):
            payload, meta = store.load(key, "name")
            assert payload == bytes([meta["byte"]]) * (1000 * meta["byte"])
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert warnings(caplog) == []
    assert len(os.listdir(folder)) == 1


def test_a_cubin_the_driver_refuses_is_built_anew(folder: Path) -> None:
    cubin = build()
    compiler.discard(cubin)
    assert entries(folder) == []
    assert not compiler.build(SOURCE, ARCH, name="scale").cache_hit
    assert len(entries(folder)) == 1


def test_a_discarded_cubin_is_said_and_built_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cubin = build()
    compiler.discard(cubin)
    [warning] = warnings(caplog)
    assert cubin.key[:32] in warning and str(folder) in warning
    assert not build().cache_hit


# --- one build a key, across processes -----------------------------------------------------------------------------


def test_sixteen_processes_build_once(folder: Path) -> None:
    results = release_together([start(BUILD_AND_PRINT) for _ in range(16)])
    assert [result["hit"] for result, _ in results].count(False) == 1
    assert sum(err.count("building scale for sm_80") for _, err in results) == 1
    assert len({result["code"] for result, _ in results}) == 1
    assert len(os.listdir(folder)) == 1 and len(entries(folder)) == 1, "no lock and no temporary file may stay"


def test_processes_with_a_key_each_build_side_by_side(folder: Path) -> None:
    sources = [f"(SOURCE + '// {number}'," for number in range(4)]
    results = release_together([start(BUILD_AND_PRINT.replace("(SOURCE,", source)) for source in sources])
    assert [result["hit"] for result, _ in results] == [False] * 4
    assert all("WARNING" not in err and "waiting" not in err for _, err in results)
    assert len(os.listdir(folder)) == len(entries(folder)) == 4


def test_without_working_locks_all_processes_succeed(folder: Path) -> None:
    patch = """
        import fcntl
        def flock(descriptor, operation):
            raise OSError({number}, os.strerror({number}))
        fcntl.flock = flock
    """
    numbers = [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP] * 2 + [errno.ENOLCK, errno.ENOSYS]
    processes = [start(textwrap.dedent(patch.format(number=n)) + textwrap.dedent(BUILD_AND_PRINT)) for n in numbers]
    results = release_together(processes)
    assert len(results) == 8
    assert len({result["code"] for result, _ in results}) == 1
    assert all("WARNING" not in err and "cannot" not in err for _, err in results)
    assert len(entries(folder)) == 1
    assert build().cache_hit


def test_a_killed_builder_blocks_nobody(folder: Path) -> None:
    slow = """
        def compile(*args):
            print("building", flush=True)
            time.sleep(600)
        compiler._compile = compile
        compiler.build(SOURCE, ARCH, name="scale")
    """
    first = start(slow)
    assert first.stdout.readline() == "building\n"
    (lock,) = entries(folder, ".lock")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert lock.exists(), "the case is about a lock file that stays"
    begin = time.monotonic()
    assert not build().cache_hit
    assert time.monotonic() - begin < 30, "must not wait for the dead builder"
    assert not lock.exists()
    assert build().cache_hit


def test_a_stray_lock_file_is_harmless(folder: Path) -> None:
    cubin = build()
    entries(folder)[0].unlink()
    stray = cache.Store(folder).path(cubin.key, f"scale-{ARCH}", ".lock")
    stray.write_text("12345")
    stray.chmod(0o600)
    assert not build().cache_hit
    assert len(entries(folder)) == 1


def test_waiting_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cache, "LOCK_WAIT_SECONDS", 0.3)
    caplog.set_level(logging.INFO, "cutlass_sep")
    key = compiler.digest(compiler.key_document(SOURCE, ARCH))
    holder = cache.Store(folder)
    with holder.lock(key, f"scale-{ARCH}"):
        (lock,) = entries(folder, ".lock")
        assert not build().cache_hit
        assert lock.exists(), "a lock that another holds must stay"
    (warning,) = warnings(caplog)
    assert str(lock) in warning
    assert any("waiting" in record.getMessage() and str(lock) in record.getMessage() for record in caplog.records)


def test_a_waiter_takes_what_the_holder_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = build()
    data = entries(folder)[0].read_bytes()
    path = entries(folder)[0]
    path.unlink()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled twice"))
    holder = cache.Store(folder)
    results = []
    with holder.lock(cubin.key, f"scale-{ARCH}"):
        waiter = threading.Thread(target=lambda: results.append(build()))
        waiter.start()
        time.sleep(0.2)
        assert not results
        path.write_bytes(data)
    waiter.join()
    assert results[0].cache_hit and results[0].code == cubin.code


def test_a_lock_on_a_removed_file_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    path = folder / "x.lock"
    calls = []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            path.unlink()  # the last holder leaves between open and flock
        real(descriptor, operation)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    descriptor = cache._try_lock(path)
    assert len(calls) == 2 and os.path.samestat(os.fstat(descriptor), path.stat())
    assert cache._try_lock(path) is None
    cache._release(path, descriptor)
    assert not path.exists()


# --- folders that do not work --------------------------------------------------------------------------------------


def builds_in_memory_only(caplog: pytest.LogCaptureFixture) -> None:
    """A first and a second kernel build, a repeated one hits in memory, and one warning names the variable."""
    assert not build().cache_hit
    assert compiler.build(SOURCE, ARCH, name="scale").cache_hit
    assert not compiler.build(SOURCE + "//2", ARCH, name="scale").cache_hit
    (warning,) = warnings(caplog)
    assert "CUTLASS_SEP_CACHE_DIR" in warning


def test_the_path_is_a_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir()
    folder.write_text("mine")
    builds_in_memory_only(caplog)
    assert folder.read_text() == "mine"


def test_a_parent_is_a_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.write_text("mine")
    builds_in_memory_only(caplog)
    assert folder.parent.read_text() == "mine"


def test_home_cannot_be_written(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CUTLASS_SEP_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc")
    builds_in_memory_only(caplog)


def test_there_is_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for variable in ("CUTLASS_SEP_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    assert cache.root() is None
    builds_in_memory_only(caplog)
    assert os.listdir(tmp_path) == []


def test_why_nothing_would_be_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.Store(folder).why_not_kept() is None
    assert not folder.parent.exists(), "looking makes no folder that stays"
    # Root may write there by its permissions alone.
    reason = cache.Store(Path("/proc/parents/cache")).why_not_kept()
    assert reason == "nothing can be made in /proc: No such file or directory"
    folder.parent.mkdir()
    folder.write_text("mine")
    info = cache.Store(folder).info()
    assert (info["usable"], info["reason"]) == (False, "it is not a folder")
    folder.unlink()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = cache.Store(folder)
    monkeypatch.setattr(os, "fsync", full)
    store.save("ab" * 32, "name", b"payload", {})
    assert store.why_not_kept() == "[Errno 28] No space left on device"
    assert os.listdir(folder) == []


def test_home_is_put_for_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", "~/kernels")
    assert cache.root() == tmp_path / "kernels"


def test_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", "relative")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cache.root() is None
    builds_in_memory_only(caplog)


def test_home_is_not_needed(folder: Path) -> None:
    process = start(BUILD_AND_PRINT, {"HOME": None, "XDG_CACHE_HOME": None})
    ((result, err),) = release_together([process])
    assert not result["hit"] and "memory only" not in err
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_full_disk(
    step: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, {"write": "fsync", "rename": "replace"}[step], full)
    builds_in_memory_only(caplog)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("kind", ["read-only", "not readable", "not ours"])
def test_folders_we_may_not_use(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    # Root may do anything, so as root the process becomes another user, once everything it needs is imported.
    become = """
        compiler.build(SOURCE, ARCH, name="first")
        compiler._memory.clear()
        os.environ["CUTLASS_SEP_CACHE_DIR"] = os.environ["TESTED"]
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(54321, 54321, 54321)
            os.setresuid(54321, 54321, 54321)
    """
    root = os.geteuid() == 0
    if kind == "not ours" and not root:
        pytest.skip("needs root, to give a folder to another user")
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        folder = Path(place) / "cache"
        folder.mkdir()
        if root:
            os.chown(folder, 54320 if kind == "not ours" else 54321, 54321)
        folder.chmod({"read-only": 0o555, "not readable": 0o000, "not ours": 0o777}[kind])
        environment = {"CUTLASS_SEP_CACHE_DIR": str(tmp_path_factory.mktemp("first")), "TESTED": str(folder)}
        process = start(textwrap.dedent(become) + textwrap.dedent(BUILD_AND_PRINT), environment)
        ((result, err),) = release_together([process])
        assert not result["hit"]
        assert err.count("memory only") == 1 and "CUTLASS_SEP_CACHE_DIR" in err
        folder.chmod(0o755)
        assert os.listdir(folder) == []


def test_a_read_only_folder_still_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(tempfile, "mkstemp", read_only)
    assert build().cache_hit


def test_spaces_and_letters_in_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "with space" / "üñ 目录"
    environment = {"CUTLASS_SEP_CACHE_DIR": str(folder), "LANG": "C", "LC_ALL": "C"}
    hits = [release_together([start(BUILD_AND_PRINT, environment)])[0][0]["hit"] for _ in range(2)]
    assert hits == [False, True]
    assert all(name.isascii() for name in os.listdir(folder))


# --- size ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = cache.Store(folder)
    keys = [f"{i:02x}" * 32 for i in range(5)]
    for age, key in zip((400, 300, 200), keys[:3], strict=True):
        store.save(key, "name", b"x" * 1000, {})
        past = time.time() - age
        os.utime(store.path(key, "name"), (past, past))
    one = store.path(keys[0], "name").stat().st_size
    monkeypatch.setattr(cache, "CAP_BYTES", 3 * one)
    assert store.load(keys[0], "name") is not None  # a hit makes it the newest
    store.save(keys[3], "name", b"x" * 1000, {})
    assert [store.load(key, "name") is not None for key in keys] == [True, False, True, True, False]
    # One entry above the cap drives out all others and stays.
    store.save(keys[4], "name", b"x" * 5000, {})
    assert [store.load(key, "name") is not None for key in keys] == [False, False, False, False, True]


def test_leftovers_are_swept_and_live_files_are_not(folder: Path) -> None:
    store = cache.Store(folder)
    folder.mkdir(parents=True)
    past = time.time() - 2 * cache.STALE_SECONDS
    for name in ("old.tmp", "new.tmp", "old.lock", "new.lock", "theirs.txt"):
        (folder / name).write_text("")
        if not name.startswith("new"):
            os.utime(folder / name, (past, past))
    with store.lock("ab" * 32, "held"):
        held = store.path("ab" * 32, "held", ".lock")
        os.utime(held, (past, past))
        store.save("cd" * 32, "name", b"x", {})
        assert held.exists()
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".cubin") == [
        "new.lock",
        "new.tmp",
        "theirs.txt",
    ]


def test_info_list_and_clear(folder: Path) -> None:
    assert cache.store().info() == {
        "path": str(folder),
        "entries": 0,
        "bytes": 0,
        "cap_bytes": 1 << 30,
        "usable": True,
        "reason": None,
    }
    assert cache.store().list_entries() == []
    first, second = build(), build(SOURCE + "//2")
    build()  # used last
    info = cache.store().info()
    assert info["entries"] == 2
    assert info["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    listed = cache.store().list_entries()
    assert [entry.key for entry in listed] == [first.key, second.key]
    assert listed[0].name == "scale-sm_80"
    assert listed[0].meta["arch"] == "sm_80"
    assert listed[0].meta["resources"]["scale"]["registers"] == first.resources["scale"].registers
    assert listed[0].bytes == Path(listed[0].path).stat().st_size
    damage_half(Path(listed[1].path))
    assert [entry.key for entry in cache.store().list_entries()] == [first.key]
    assert cache.store().clear()["entries"] == 2
    assert os.listdir(folder) == []
    assert not build().cache_hit
