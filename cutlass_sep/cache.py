"""The disk cache of compiled kernels: a mapping from a full key to (payload bytes, metadata).

It only ever saves work. A bad entry is removed with one warning and counts as a miss; where the folder cannot be used,
one warning names CUTLASS_SEP_CACHE_DIR and nothing is written anywhere.

One file an entry, `<name>-<key[:32]>.cubin`, readable by cuobjdump and nvdisasm as it is:

    payload | header (JSON: key, name, meta) | sha256 of all before it | header length, 8 bytes | magic, 8 bytes

Files are written under a unique temporary name, flushed, and renamed over the final name, so that a reader sees a whole
entry or none. Builders of one key hold an advisory flock on `<entry>.lock`, which dies with its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import EnvironmentProblem
from .log import logger

#: The entries' total size above which the least recently used are removed, in bytes.
CAP_BYTES = 1 << 30
#: How long to wait for another process that builds the same kernel, before building it privately, in seconds.
LOCK_WAIT_SECONDS = 120.0
#: Temporary and lock files older than this are left over from a killed process, in seconds.
STALE_SECONDS = 600.0
#: What to do where the folder cannot be used.
REMEDY = "set CUTLASS_SEP_CACHE_DIR to a folder of your own"

_MAGIC = b"CSEPENT1"
_FOOTER_BYTES = 32 + 8 + len(_MAGIC)
_ENTRY_SUFFIXES = (".cubin", ".headers", ".failed.cu", ".tuned", ".plan", ".source")


class _BadEntry(Exception):
    """The file is not a whole entry of the key asked for."""


@dataclass(frozen=True)
class Entry:
    """What `list_entries` shows of one cached kernel; times are seconds since the epoch."""

    name: str
    key: str
    path: str
    bytes: int
    last_used: float
    meta: dict[str, Any]


def root() -> Path | None:
    """The cache folder: CUTLASS_SEP_CACHE_DIR, else the user's cache folder; None where there is neither."""
    if override := os.environ.get("CUTLASS_SEP_CACHE_DIR"):
        # Only shells turn "~" into the home folder, and not where it is quoted or set in a configuration file.
        try:
            return Path(override).expanduser().absolute()
        except (RuntimeError, FileNotFoundError):  # there is no home; a relative path, and the current folder is gone
            return None
    import platformdirs

    try:
        path = Path(platformdirs.user_cache_dir("cutlass_sep"))
    except RuntimeError:  # neither HOME nor a passwd entry
        return None
    # Other versions of platformdirs leave "~" as it is; it must not become a folder below the current one.
    return path if path.is_absolute() else None


def store() -> Store:
    """The store at the present `root()`."""
    return _store(root())


def require(what: str) -> None:
    """EnvironmentProblem, beginning with `what` fails, unless the store at the present `root()` keeps entries."""
    if (reason := store().why_not_kept()) is not None:
        raise EnvironmentProblem(f"{what}: the cache folder {store().folder or ''} cannot be used ({reason}); {REMEDY}")


@functools.lru_cache(maxsize=8)
def _store(folder: Path | None) -> Store:
    return Store(folder)


class Store:
    """One cache folder. Methods never raise for a folder or an entry that is unusable; a miss is the worst."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._usable: bool | None = None  # None: not looked at yet
        self._why_not_kept: str | None = None  # set by the first failure to write
        self._warning = threading.Lock()

    def path(self, key: str, name: str, suffix: str = ".cubin") -> Path | None:
        """Where the entry of this key lies; None without a folder. `name` is ASCII and fit for a file name."""
        return self.folder / f"{name}-{key[:32]}{suffix}" if self.folder else None

    def load(self, key: str, name: str, suffix: str = ".cubin") -> tuple[bytes, dict[str, Any]] | None:
        """The entry's (payload, metadata), or None. Marks it as used; removes it if it is bad."""
        path = self.path(key, name, suffix)
        if not self._check_folder() or path is None:
            return None
        try:
            payload, header = _decode(path.read_bytes())
            if header["key"] != key:
                raise _BadEntry("it belongs to another key")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (_BadEntry, IsADirectoryError) as error:
            logger.warning("cache entry %s is bad (%s); it is removed and built again", path, error)
            _remove(path)
            return None
        except OSError as error:
            logger.warning("cache entry %s cannot be read (%s); it is built again", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return payload, header["meta"]

    def save(self, key: str, name: str, payload: bytes, meta: dict[str, Any], suffix: str = ".cubin") -> bool:
        """Publish an entry atomically, then hold the folder below CAP_BYTES; whether the entry is there."""
        path = self.path(key, name, suffix)
        if path is None or not self._write(path, _encode(payload, {"key": key, "name": name, "meta": meta})):
            return False
        self._evict(keep=path)
        return True

    def contains(self, suffix: str) -> bool:
        """Whether there is any file with this ending."""
        return bool(self._files((suffix,)))

    def save_failed_source(self, key: str, name: str, source: str) -> Path | None:
        """Keep a source that did not compile; its path, or None where that cannot be done."""
        path = self.path(key, name, ".failed.cu")
        return path if path is not None and self._write(path, source.encode()) else None

    def discard(self, key: str) -> None:
        """Remove the entry of this key, if any."""
        if self.folder and self._check_folder():
            for path in self.folder.glob(f"*-{key[:32]}.cubin"):
                _remove(path)

    @contextlib.contextmanager
    def lock(self, key: str, name: str) -> Iterator[None]:
        """Hold the key's lock while building. Where locks do not work, or for too long, goes on without it."""
        path = self.path(key, name, ".lock")
        descriptor = _acquire(path) if path is not None and self._prepare_folder() else None
        try:
            yield
        finally:
            if path is not None and descriptor is not None:
                _release(path, descriptor)

    def list_entries(self) -> list[Entry]:
        """All readable entries, most recently used first. Contents are not verified."""
        entries = []
        for path, stat in self._files((".cubin",)):
            with contextlib.suppress(_BadEntry, OSError, KeyError, TypeError):
                header = _read_header(path, stat.st_size)
                entries.append(
                    Entry(header["name"], header["key"], str(path), stat.st_size, stat.st_mtime, header["meta"])
                )
        return sorted(entries, key=lambda entry: -entry.last_used)

    def info(self) -> dict[str, Any]:
        """{"path", "entries" (kernels), "bytes" (all files kept), "cap_bytes", "usable" (kernels are kept), "reason"
        (why they are not, else None)}.
        """
        reason = self.why_not_kept()
        files = self._files(_ENTRY_SUFFIXES)
        return {
            "path": str(self.folder) if self.folder else None,
            "entries": sum(path.suffix == ".cubin" for path, _ in files),
            "bytes": sum(stat.st_size for _, stat in files),
            "cap_bytes": CAP_BYTES,
            "usable": reason is None,
            "reason": reason,
        }

    def why_not_kept(self) -> str | None:
        """Why a kernel that is built now would not be kept, or None. Tries it, for permissions alone do not tell."""
        if self._check_folder() and self._why_not_kept is None:
            return _why_not_writable(self.folder)
        return self._why_not_kept

    def clear(self) -> dict[str, int]:
        """Remove every entry, and what killed processes left. {"entries", "bytes"} removed."""
        self._sweep()
        entries = size = 0
        for path, stat in self._files(_ENTRY_SUFFIXES):
            if _remove(path):
                entries += path.suffix == ".cubin"
                size += stat.st_size
        return {"entries": entries, "bytes": size}

    def _check_folder(self) -> bool:
        """Whether entries may be read: a folder of our own (or root's), or one that is not there yet."""
        if self._usable is None:
            try:
                reason = _why_unusable(self.folder)
            except FileNotFoundError:
                return True  # look again once it is there
            self._usable = reason is None
            if reason is not None:
                self._give_up(reason)
        return self._usable

    def _prepare_folder(self) -> bool:
        """Create the folder if need be; whether it may be written."""
        if self.folder is None or not self._check_folder() or self._why_not_kept is not None:
            return False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)
        return self._why_not_kept is None

    def _give_up(self, reason: object) -> None:
        """Stop writing, with one warning."""
        with self._warning:
            first = self._why_not_kept is None
            if first:
                self._why_not_kept = str(reason)
        if first:
            logger.warning(
                "kernels are cached in memory only: the cache folder %s cannot be used (%s); to keep them, %s",
                self.folder or "",
                reason,
                REMEDY,
            )

    def _write(self, path: Path, data: bytes) -> bool:
        """Write a file atomically; False, after one warning, where that fails."""
        if not self._prepare_folder():
            return False
        temporary = None
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if path.is_dir() and not path.is_symlink():
                _remove(path)
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            self._give_up(error)
            return False
        return True

    def _sweep(self) -> None:
        """Remove temporary and lock files that killed processes left; a lock only while holding it."""
        now = time.time()
        for path, stat in self._files((".tmp", ".lock")):
            if now - stat.st_mtime < STALE_SECONDS:
                continue
            if path.suffix == ".tmp":
                _remove(path)
                continue
            with contextlib.suppress(OSError):
                descriptor = _try_lock(path)
                if descriptor is not None:
                    _release(path, descriptor)

    def _evict(self, keep: Path) -> None:
        """Hold the folder below CAP_BYTES: remove the least recently used files, `keep` never."""
        self._sweep()
        files = sorted(self._files(_ENTRY_SUFFIXES), key=lambda item: item[1].st_mtime)
        excess = sum(stat.st_size for _, stat in files) - CAP_BYTES
        for path, stat in files:
            if excess <= 0:
                break
            if path != keep and _remove(path):
                excess -= stat.st_size

    def _files(self, suffixes: tuple[str, ...]) -> list[tuple[Path, os.stat_result]]:
        """Files of the folder with one of these name endings, with their stat."""
        files = []
        if self.folder and self._check_folder():
            with contextlib.suppress(OSError), os.scandir(self.folder) as scan:
                for item in scan:
                    with contextlib.suppress(OSError):
                        if item.name.endswith(suffixes) and item.is_file(follow_symlinks=False):
                            files.append((Path(item.path), item.stat(follow_symlinks=False)))
        return files


def _why_unusable(folder: Path | None) -> object:
    """Why a folder cannot be read as a cache, or None. Raises FileNotFoundError if it is not there."""
    if folder is None:
        return "this user has no cache folder"
    try:
        owner = os.stat(folder).st_uid
    except FileNotFoundError:
        raise
    except OSError as error:
        return error
    if not folder.is_dir():
        return "it is not a folder"
    if os.geteuid() not in (0, owner) and owner != 0:
        return f"it belongs to another user, uid {owner}"
    return None if os.access(folder, os.R_OK | os.X_OK) else "it may not be read"


def _why_not_writable(folder: Path) -> str | None:
    """Why nothing can be made in the folder, or in the nearest existing one above it; None if it can."""
    while not folder.exists():
        folder = folder.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=folder))
    except OSError as error:
        return f"nothing can be made in {folder}: {error.strerror}"
    return None


def _encode(payload: bytes, header: dict[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True).encode()
    checksum = hashlib.sha256(payload + text).digest()
    return b"".join((payload, text, checksum, len(text).to_bytes(8, "little"), _MAGIC))


def _decode(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """(payload, header) of an entry's bytes. Raises _BadEntry."""
    length = _header_length(data[-_FOOTER_BYTES:], len(data))
    split = len(data) - _FOOTER_BYTES
    if hashlib.sha256(data[:split]).digest() != data[split : split + 32]:
        raise _BadEntry("its checksum is wrong")
    return data[: split - length], json.loads(data[split - length : split])


def _read_header(path: Path, size: int) -> dict[str, Any]:
    """The header of an entry, without reading its payload. Raises _BadEntry or OSError."""
    with open(path, "rb") as file:
        file.seek(max(0, size - _FOOTER_BYTES))
        length = _header_length(file.read(), size)
        file.seek(size - _FOOTER_BYTES - length)
        try:
            return json.loads(file.read(length))
        except ValueError as error:
            raise _BadEntry("its header is not JSON") from error


def _header_length(footer: bytes, size: int) -> int:
    if len(footer) != _FOOTER_BYTES or not footer.endswith(_MAGIC):
        raise _BadEntry("it is empty, cut short or no cache entry")
    length = int.from_bytes(footer[32:40], "little")
    if length > size - _FOOTER_BYTES:
        raise _BadEntry("its header length is wrong")
    return length


def _remove(path: Path) -> bool:
    """Remove a file, or a folder that took its place; whether it is gone by our doing."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return False
    return True


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock on `path`, or None if somebody else does. OSError where locks do not work."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # the last holder removed the file meanwhile: a lock on a removed file excludes nobody


def _acquire(path: Path) -> int | None:
    """Wait for the lock on `path`; None where locks do not work there or the wait was too long."""
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    pause, told = 0.005, False
    while True:
        try:
            descriptor = _try_lock(path)
        except OSError as error:  # ENOLCK, ENOSYS, EOPNOTSUPP: a file system without locks; or a read-only folder
            logger.debug("no lock at %s: %s", path, error)
            return None
        if descriptor is not None:
            return descriptor
        if time.monotonic() > deadline:
            logger.warning("waited %g s for %s, held by another process; building privately", LOCK_WAIT_SECONDS, path)
            return None
        if not told and pause > 0.05:
            logger.info("another process builds this kernel; waiting for its lock %s", path)
            told = True
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _release(path: Path, descriptor: int) -> None:
    # Removed while still held, so nobody else can hold it; a waiter that has this file open sees that it is gone.
    with contextlib.suppress(OSError):
        os.unlink(path)
    # Unlock in so many words: a child forked meanwhile shares the descriptor, and closing ours would not free the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
