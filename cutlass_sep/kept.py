"""Plans and sources that follow from the package's own files, kept in the disk cache for later processes.

Planning and rendering take some 0.1 s for each kernel, most of a first call whose cubin is in the cache. What they give
is decided by their arguments and by code, so a key is made of both: of the arguments, and of the contents of the files
in the package (and, for sources, of the templates). Another state of any file has other keys and never sees an entry.

A process keeps running the code that it has loaded when the files change under it, by `git pull` in a checkout, say;
what it makes then belongs to none of the two states. So a process neither reads nor keeps anything once a file changed
(ctime: no tool sets it back) after the package was loaded.

A kept source does not decide the cubin: that has a key over the source's text and all else (compiler.key_document).
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
#: When the package was loaded, as files' times count. This is its first module; a second covers how coarse those are.
_LOADED_NS = time.time_ns() - 1_000_000_000


def load(suffix: str, name: str, arguments: dict[str, Any], *folders: Path) -> bytes | None:
    """What was kept of `arguments` (plain data) by a process with the same files in `folders`, or None."""
    from . import cache

    key = _key(arguments, folders)
    found = None if key is None else cache.store().load(key, name, suffix)
    return None if found is None else found[0]


def keep(suffix: str, name: str, arguments: dict[str, Any], payload: bytes, *folders: Path) -> None:
    """Keep `payload`, which the code and data in `folders` made of `arguments`, as far as the disk cache can."""
    from . import cache

    key = _key(arguments, folders)
    if key is not None and all(map(_unchanged, folders)):
        cache.store().save(key, name, payload, {}, suffix)


def _key(arguments: dict[str, Any], folders: tuple[Path, ...]) -> str | None:
    from . import compiler

    digests = [_digest(folder) for folder in folders]
    return None if None in digests else compiler.digest({"arguments": arguments, "files": digests})


@functools.cache
def _digest(folder: Path) -> str | None:
    """sha256 over names and contents of the files that lie in `folder`; None if they are not what was loaded."""
    try:
        # No choice by suffix: modules without their source count too, and a file too many costs a miss at most.
        contents = [(file.name, hashlib.sha256(Path(file.path).read_bytes()).hexdigest()) for file in _files(folder)]
    except OSError:
        return None
    return hashlib.sha256(repr(contents).encode()).hexdigest() if _unchanged(folder) else None


def _unchanged(folder: Path) -> bool:
    """Whether no file in `folder` changed since the package was loaded."""
    try:
        return all(file.stat().st_ctime_ns < _LOADED_NS for file in _files(folder))
    except OSError:
        return False


def _files(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if entry.is_file()), key=lambda entry: entry.name)
