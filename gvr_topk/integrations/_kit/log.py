"""Log lines that are written once per process."""

from __future__ import annotations

import logging
from collections.abc import Callable

Say = Callable[[str, str], None]
"""Takes a level (``info`` or ``warning``) and a line for the log."""


class LogOnce:
    """A `Say` that writes each line once, behind the name and the version of the engine.

    Version and logger are asked for when a line is written.
    """

    def __init__(self, engine: str, version: Callable[[], str], logger: Callable[[], logging.Logger]) -> None:
        self._engine = engine
        self._version = version
        self._logger = logger
        self._logged: set[str] = set()

    def __call__(self, level: str, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            getattr(self._logger(), level)(f"gvr_topk in {self._engine} {self._version()}: {line}")


def one_line(error: BaseException) -> str:
    """Write an error for the log."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
