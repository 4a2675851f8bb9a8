"""A JSON-lines file of finished runs, so that an interrupted evaluation goes on where it stopped.

One line is one run. A run counts as done only when its whole line is there with ``"status": "done"``:
a run that was interrupted has no line, or half a line, and is done again. The key of a run is a hash of
its full command, of its place in the plan, of the content of every file it depends on and of the build it
runs on, so an edited configuration or a new build is never mixed with figures measured before.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, final


class StoreError(RuntimeError):
    """The run store cannot be used."""


class StoreBusy(StoreError):
    """Another run holds the store, or an engine that one left behind."""


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content.

    Raises
    ------
    FileNotFoundError
        With the path in the message.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None


def run_key(
    commands: Sequence[Sequence[str]],
    inputs: Mapping[str, str],
    labels: Mapping[str, Any],
    build: Mapping[str, str],
) -> str:
    """Key of a run.

    Parameters
    ----------
    commands : sequence of commands
        Every command of the run, in order.
    inputs : mapping of str to str
        Name of each file the run depends on, and the hash of its content.
    labels : mapping
        Tells repetitions of the same command apart.
    build : mapping of str to str
        Versions, package contents and GPU, from `eval.campaigns.identity.build_identity`.
    """
    parts = {
        "commands": [list(part) for part in commands],
        "inputs": dict(inputs),
        "labels": dict(labels),
        "build": dict(build),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@final
class RunStore:
    """Append-only store; one process at a time (held by a file lock).

    Parameters
    ----------
    path : Path
        The JSON-lines file. Created with its folder when the store is entered.

    Attributes
    ----------
    skipped_lines : tuple of int
        Line numbers that could not be read: the end of an interrupted write, or damage.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped_lines: tuple[int, ...] = ()
        self._done: dict[str, dict[str, Any]] = {}
        self._handle: int | None = None
        self._load()

    def __enter__(self) -> RunStore:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise StoreBusy(
                f"{self.path} is in use by another run of this script, or by an engine that one left running"
            ) from None
        self._handle = handle
        self._load()  # another process may have written between construction and the lock
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    @property
    def lock(self) -> int:
        """File descriptor that holds the lock; a child that inherits it holds the lock too."""
        if self._handle is None:
            raise StoreError(f"{self.path} is not open; use `with RunStore(path) as store`")
        return self._handle

    def done(self, key: str) -> dict[str, Any] | None:
        """The record of a finished run, or None when it has to be done."""
        return self._done.get(key)

    def finished(self) -> list[dict[str, Any]]:
        """The records of all finished runs, also of commands other than the present one."""
        return list(self._done.values())

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record (with at least ``key`` and ``status``) and force it to the disk."""
        data = (json.dumps(record, allow_nan=False) + "\n").encode()
        if not self._ends_with_newline():
            data = b"\n" + data  # closes a half-written line
        while data:  # one write may take a part of it, as on a disk that fills up
            data = data[os.write(self.lock, data) :]
        os.fsync(self.lock)
        self._remember(dict(record))

    def _ends_with_newline(self) -> bool:
        size = os.fstat(self.lock).st_size
        return size == 0 or os.pread(self.lock, 1, size - 1) == b"\n"

    def _load(self) -> None:
        self._done = {}
        skipped = []
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise StoreError(f"{self.path}: wanted a readable run store, got: {error.strerror}") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                _check_record(record)
            except (ValueError, RecursionError):
                skipped.append(number)
                continue
            self._remember(record)
        self.skipped_lines = tuple(skipped)

    def _remember(self, record: dict[str, Any]) -> None:
        if record["status"] == "done":
            self._done[record["key"]] = record


def _check_record(record: Any) -> None:
    """Refuse a line that the statistics could not use: damage, or the work of another program.

    Raises
    ------
    ValueError
        The record has no key or status, or is said to be done and lacks labels or finite figures.
    """
    if not isinstance(record, dict) or not all(
        isinstance(record.get(name), str) for name in ("key", "status")
    ):
        raise ValueError("wanted a record with key and status")
    if record["status"] != "done":
        return
    figures, labels = record.get("figures"), record.get("labels")
    if not isinstance(labels, dict) or not isinstance(figures, dict) or not figures:
        raise ValueError("wanted labels and figures in a finished run")
    for value in figures.values():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError("wanted figures that are numbers")
        if value is not None and not math.isfinite(value):
            raise ValueError("wanted figures that are finite")
