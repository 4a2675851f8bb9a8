"""A JSON-lines file of finished runs, so that an interrupted evaluation goes on where it stopped.

One line is one run. A run counts as done only when its whole line is there with ``"status": "done"``:
a run that was interrupted has no line, or half a line, and is done again. The key of a run is a hash of
its full command, of its place in the plan and of the content of every file it depends on, so an edited
configuration is never mixed with figures measured before.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, final


class StoreError(RuntimeError):
    """The run store cannot be used."""


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


def run_key(commands: Sequence[Sequence[str]], inputs: Mapping[str, str], labels: Mapping[str, Any]) -> str:
    """Key of a run.

    Parameters
    ----------
    commands : sequence of commands
        Every command of the run, in order.
    inputs : mapping of str to str
        Name of each file the run depends on, and the hash of its content.
    labels : mapping
        Tells repetitions of the same command apart.
    """
    parts = {"commands": [list(part) for part in commands], "inputs": dict(inputs), "labels": dict(labels)}
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
            raise StoreError(f"{self.path} is in use by another run of this script") from None
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

    def done(self, key: str) -> dict[str, Any] | None:
        """The record of a finished run, or None when it has to be done."""
        return self._done.get(key)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record (with at least ``key`` and ``status``) and force it to the disk."""
        if self._handle is None:
            raise StoreError(f"{self.path} is not open; use `with RunStore(path) as store`")
        data = (json.dumps(record) + "\n").encode()
        if not self._ends_with_newline():
            data = b"\n" + data  # closes a half-written line
        os.write(self._handle, data)
        os.fsync(self._handle)
        self._remember(dict(record))

    def _ends_with_newline(self) -> bool:
        assert self._handle is not None
        size = os.fstat(self._handle).st_size
        return size == 0 or os.pread(self._handle, 1, size - 1) == b"\n"

    def _load(self) -> None:
        self._done = {}
        skipped = []
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            lines = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or "key" not in record or "status" not in record:
                    raise ValueError("not a run record")
            except ValueError:
                skipped.append(number)
                continue
            self._remember(record)
        self.skipped_lines = tuple(skipped)

    def _remember(self, record: dict[str, Any]) -> None:
        if record["status"] == "done":
            self._done[record["key"]] = record
