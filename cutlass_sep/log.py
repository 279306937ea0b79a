"""The package's logger. CUTLASS_SEP_LOG (debug, info, warning, error) prints it on stderr from that level on."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("cutlass_sep")

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure() -> None:
    """Apply CUTLASS_SEP_LOG to the logger. Unset: records go to the application's handlers, as any library's do."""
    wanted = os.environ.get("CUTLASS_SEP_LOG", "").strip().lower()
    if not wanted:
        return
    if wanted not in _LEVELS:
        logger.warning("CUTLASS_SEP_LOG=%r is not one of %s; ignored", wanted, ", ".join(_LEVELS))
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[wanted])
    logger.propagate = False  # else an application with its own root handler prints each line twice


configure()
