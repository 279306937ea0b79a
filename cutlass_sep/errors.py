"""Exceptions of the package beyond those PyTorch itself would raise."""

from __future__ import annotations

from pathlib import Path


class Unsupported(RuntimeError):
    """The path, form or schedule asked for cannot run this problem; the message says why."""


class EnvironmentProblem(RuntimeError):
    """The machine lacks something (a wheel, headers, an NVRTC that knows the architecture); the message says what."""


class UnsupportedArch(EnvironmentProblem):
    """The NVRTC at hand cannot compile for the architecture asked for."""


class CompileError(RuntimeError):
    """NVRTC rejected a source.

    Attributes:
        name: tag of the kernel. arch: target, e.g. "sm_90a". nvrtc: version, e.g. "13.0".
        options: every option NVRTC got, include paths too.
        log: the whole NVRTC log.
        source_path: the source as written into the cache folder, or None where that folder cannot be written.
    """

    def __init__(
        self, name: str, arch: str, nvrtc: str, options: tuple[str, ...], log: str, source_path: Path | None
    ) -> None:
        self.name, self.arch, self.nvrtc = name, arch, nvrtc
        self.options, self.log, self.source_path = options, log, source_path
        where = f"source: {source_path}" if source_path else "source: not written, the cache folder is not writable"
        super().__init__(
            f"NVRTC {nvrtc} could not compile {name} for {arch}.\n{where}\noptions: {' '.join(options)}\n{log}"
        )

    def __reduce__(self) -> tuple:
        return type(self), (self.name, self.arch, self.nvrtc, self.options, self.log, self.source_path)
