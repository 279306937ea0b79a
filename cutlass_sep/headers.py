"""Which headers a translation unit uses, and a digest over their contents.

NVRTC lists no dependencies, so #include lines are followed by text, in every branch of every #if: a superset of what
the compiler reads. Includes made by a macro (CUTLASS: `#include CUDA_STD_HEADER(tuple)`) are expanded with every
definition of that macro in sight. A test compiles CUTLASS headers from a tree that holds the files found here alone.

A walk costs some 0.1 s, so its result is kept with a stamp over (size, mtime, ctime, inode) of every file read, taken
before reading it, and of every folder in which a path was looked for and absent: nothing comes into a folder without
changing its times. While the stamp holds the digest holds too, and checking it takes a millisecond of stat calls.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Part of the digest: raise it when the walk changes.
SCHEMA = 1

_INCLUDE = re.compile(rb"#[ \t]*include(?:_next)?[ \t]*([^\r\n]+)")
_NAME = re.compile(rb'(["<])([^">]+)[">]')
_CALL = re.compile(rb"(\w+)(?:[ \t]*\([ \t]*([^)]*?)[ \t]*\))?")
_MACRO = re.compile(
    rb'#[ \t]*define[ \t]+(\w+)(?:\((\w+)\))?[ \t]+((?:"[^">\r\n]+"|<[^">\r\n]+>))[ \t]*\r?$', re.MULTILINE
)


def directives(source: str) -> tuple[bytes, ...]:
    """The distinct operands of the source's #include lines, sorted: all that the walk needs to know of it."""
    return tuple(sorted({m[1].strip() for m in _INCLUDE.finditer(source.encode())}))


@dataclass(frozen=True)
class Headers:
    """The headers behind a set of #include lines.

    digest: sha256 over (root number, path below the root, sha256 of the contents) of every file, hex.
    files: absolute paths that were read. folders: those that a path which is not there was looked for in, the nearest
    ones that exist. stamp: over both, see the module's text.
    unresolved: macro includes whose macro is defined nowhere in sight.
    """

    digest: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    stamp: str
    unresolved: tuple[str, ...]

    def current(self) -> bool:
        """True while no file changed and none appeared where one was looked for."""
        try:
            return _stamp({path: _state(path) for path in (*self.files, *self.folders)}) == self.stamp
        except OSError:
            return False

    def to_json(self) -> bytes:
        return json.dumps([self.digest, self.files, self.folders, self.stamp, self.unresolved]).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Headers:
        digest, files, folders, stamp, unresolved = json.loads(data)
        return cls(digest, tuple(files), tuple(folders), stamp, tuple(unresolved))


def walk(includes: Iterable[bytes], roots: Sequence[str]) -> Headers:
    """Follow #include operands (as written, quotes or angle brackets included) through the roots, in search order."""
    found: set[str] = set()
    absent: set[str] = set()
    states: dict[str, str] = {}  # of files and folders, each before it was looked at
    content_digests: dict[str, str] = {}
    todo: list[str] = []
    macros: dict[bytes, set[tuple[bytes, bytes]]] = {}  # name -> {(parameter, replacement)}
    computed: set[tuple[bytes, bytes]] = set()  # (macro, argument)

    def resolve(bracket: bytes, name: bytes, includer: str | None) -> None:
        relative = os.fsdecode(name)
        here = [os.path.dirname(includer)] if bracket == b'"' and includer is not None else []
        for folder in (*here, *roots):
            path = os.path.normpath(os.path.join(folder, relative))
            if path in found:
                return
            if path in absent:
                continue
            holder = _holder(path)
            before = states.get(holder) or _state(holder)
            if os.path.isfile(path):
                found.add(path)
                todo.append(path)
                return
            absent.add(path)
            states[holder] = before

    def operand(text: bytes, includer: str | None) -> None:
        if name := _NAME.match(text):
            resolve(name[1], name[2], includer)
        elif call := _CALL.match(text):
            computed.add((call[1], call[2] or b""))

    for text in includes:
        operand(text, None)
    expanded: set[tuple[bytes, bytes]] = set()
    while todo:
        while todo:
            path = todo.pop()
            states[path] = _state(path)
            with open(path, "rb") as file:
                data = file.read()
            content_digests[path] = hashlib.sha256(data).hexdigest()
            for match in _INCLUDE.finditer(data):
                operand(match[1], path)
            for name, parameter, replacement in _MACRO.findall(data):
                macros.setdefault(name, set()).add((parameter, replacement))
        # A macro may be defined in a file read after its use: expand at the end of each round, with all that is known.
        for macro, argument in computed:
            for parameter, replacement in macros.get(macro, ()):
                text = replacement
                if parameter:
                    text = re.sub(rb"\b%b\b" % parameter, lambda _, a=argument: a, replacement)
                if text not in expanded:
                    expanded.add(text)
                    operand(text, None)

    files = tuple(sorted(found))
    content = sorted((*_place(path, roots), content_digests[path]) for path in files)
    digest = hashlib.sha256(json.dumps([SCHEMA, content]).encode()).hexdigest()
    unresolved = tuple(sorted(os.fsdecode(macro) for macro, _ in computed if macro not in macros))
    return Headers(digest, files, tuple(sorted(states.keys() - found)), _stamp(states), unresolved)


def _place(path: str, roots: Sequence[str]) -> tuple[int, str]:
    """(root number, path below the root): where a file lies, whatever the place that the roots are installed at."""
    # The innermost root, not the one it was found by: CCCL's lies inside CUDA's and its files are reached both ways.
    root = max((root for root in roots if path.startswith(f"{root}/")), key=len, default=roots[0])
    return roots.index(root), os.path.relpath(path, root)


def _holder(path: str) -> str:
    """The nearest folder above `path` that exists."""
    while not os.path.isdir(path := os.path.dirname(path)):
        pass
    return path


def _state(path: str) -> str:
    """What identifies the present state of a file or a folder. Raises OSError."""
    s = os.stat(path)
    return f"{s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}"


def _stamp(states: dict[str, str]) -> str:
    """A hash over states by path."""
    return hashlib.sha256(json.dumps(sorted(states.items())).encode()).hexdigest()
