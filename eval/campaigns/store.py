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
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, model_validator

PLACE = ("variant", "repetition", "order")
"""Labels that tell the runs of one task or case apart."""


class StoreError(RuntimeError):
    """The run store cannot be used."""


class StoreBusy(StoreError):
    """Another run holds the store, or an engine that one left behind."""


class RunRecord(BaseModel):
    """What one line of the store, and one run of a result file, says."""

    model_config = ConfigDict(strict=True)

    key: str  # from `run_key`, of the next four
    status: Literal["done", "failed"]
    labels: dict[str, Any] = {}  # what was varied: the task or case, and those of `PLACE`
    commands: list[list[str]] = []
    inputs: dict[str, str] = {}
    build: dict[str, str] = {}
    started: str = ""
    seconds: FiniteFloat = 0.0
    figures: dict[str, FiniteFloat | None] = {}
    hook_lines: list[str] = []  # these two from `eval.campaigns.evidence.Evidence`
    version: str | None = None
    reason: str = ""  # of a failure

    @model_validator(mode="after")
    def _done_has_figures(self) -> RunRecord:
        if self.status == "done" and not (self.figures and "labels" in self.model_fields_set):
            raise ValueError("wanted labels and figures in a finished run")
        return self

    @property
    def case(self) -> dict[str, Any]:
        """The task or case that the run belongs to."""
        return {name: value for name, value in self.labels.items() if name not in PLACE}


def text_hash(text: str) -> str:
    """SHA-256 of a text that is, or will be, the content of a file."""
    return hashlib.sha256(text.encode()).hexdigest()


def run_key(
    commands: Sequence[Sequence[str]],
    inputs: Mapping[str, str],
    labels: Mapping[str, Any],
    build: Mapping[str, str],
) -> str:
    """Key of a run: of its commands, the hashes of its files, its labels and its build."""
    words = [list(part) for part in commands]
    parts = {"commands": words, "inputs": dict(inputs), "labels": dict(labels), "build": dict(build)}
    return text_hash(json.dumps(parts, sort_keys=True))


class RunStore:
    """Append-only store; one process at a time (held by a file lock).

    The file is created with its folder when the store is entered. `skipped_lines` are the numbers of lines
    that could not be read: the end of an interrupted write, or damage.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._load()

    def __enter__(self) -> RunStore:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.__exit__()
            raise StoreBusy(
                f"{self.path} is in use by another run of this script, or by an engine that one left running"
            ) from None
        self._load()  # another process may have written between construction and the lock
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lock)
        self._handle = None

    @property
    def lock(self) -> int:
        """File descriptor that holds the lock; a child that inherits it holds the lock too."""
        if self._handle is None:
            raise StoreError(f"{self.path} is not open; use `with RunStore(path) as store`")
        return self._handle

    def done(self, key: str) -> RunRecord | None:
        """The record of a finished run, or None when it has to be done."""
        return self._done.get(key)

    def finished(self) -> list[RunRecord]:
        """The records of all finished runs, also of commands other than the present one."""
        return list(self._done.values())

    def family(self, cases: Sequence[Mapping[str, Any]]) -> int:
        """Tasks or cases of the campaign: these, and those that were run before."""
        known = [*cases, *(record.case for record in self.finished())]
        return len({json.dumps(dict(case), sort_keys=True) for case in known})

    def append(self, record: RunRecord) -> None:
        """Write one record and force it to the disk."""
        data = (record.model_dump_json() + "\n").encode()
        size = os.fstat(self.lock).st_size
        if size and os.pread(self.lock, 1, size - 1) != b"\n":
            data = b"\n" + data  # closes a half-written line
        while data:  # one write may take a part of it, as on a disk that fills up
            data = data[os.write(self.lock, data) :]
        os.fsync(self.lock)
        self._remember(record)

    def _load(self) -> None:
        self._done: dict[str, RunRecord] = {}
        self.skipped_lines: list[int] = []
        try:
            lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        except OSError as error:
            raise StoreError(f"{self.path}: wanted a readable run store, got: {error.strerror}") from None
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    self._remember(RunRecord.model_validate_json(line))
            except ValueError:
                self.skipped_lines.append(number)

    def _remember(self, record: RunRecord) -> None:
        if record.status == "done":
            self._done[record.key] = record
