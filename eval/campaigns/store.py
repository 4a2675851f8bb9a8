"""Finished runs, a JSON file each, so that an interrupted evaluation goes on where it stopped.

A run counts as done when its file is there, which is written in one step. The file's name is the run's key:
a hash of its full command, of its place in the plan, of the content of every file it depends on and of the
build it runs on, so an edited configuration or a new build is never mixed with figures measured before.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.common.machine import write_json
from eval.common.status import InputError

PLACE = ("variant", "repetition")
"""Labels that tell the runs of one task or case apart."""


@dataclass(frozen=True)
class RunRecord:
    """What the file of a finished run, and one run of a result file, says."""

    key: str  # a hash of the next four
    labels: dict[str, Any]  # what was varied: the task or case, and those of `PLACE`
    commands: list[list[str]]
    inputs: dict[str, str]
    build: dict[str, str]
    started: str
    seconds: float
    figures: dict[str, float | None]
    hook_lines: list[str]  # these two from `eval.campaigns.evidence.Evidence`
    version: str | None

    @property
    def case(self) -> dict[str, Any]:
        """The task or case that the run belongs to."""
        return {name: value for name, value in self.labels.items() if name not in PLACE}


def text_hash(text: str) -> str:
    """SHA-256 of a text that is, or will be, the content of a file."""
    return hashlib.sha256(text.encode()).hexdigest()


class RunStore:
    """Files of finished runs in a folder, which is made when the store is entered.

    One process at a time may be within it, which a file lock keeps. A child that inherits the descriptor
    `lock` holds it, too, such as an engine that outlives a process that was killed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = -1

    def __enter__(self) -> "RunStore":
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            raise InputError(
                f"{self.folder} is in use by another campaign, or by an engine that one left running"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lock)

    def done(self, key: str) -> RunRecord | None:
        """The record of a finished run, or None when it has to be done."""
        file = self._file(key)
        return _read(file) if file.exists() else None

    def finished(self) -> list[RunRecord]:
        """The records of all finished runs, also of commands other than the present one."""
        return [_read(file) for file in sorted(self.folder.glob("*.json"))]

    def family(self, cases: Sequence[Mapping[str, Any]]) -> int:
        """Tasks or cases of the campaign: these, and those that were run before."""
        known = [*cases, *(record.case for record in self.finished())]
        return len({json.dumps(dict(case), sort_keys=True) for case in known})

    def add(self, record: RunRecord) -> None:
        """Keep the record of a finished run."""
        write_json(self._file(record.key), asdict(record))

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _read(file: Path) -> RunRecord:
    return RunRecord(**json.loads(file.read_text(encoding="utf-8")))
