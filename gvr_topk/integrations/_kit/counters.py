"""Counters of what the hook did, readable from Python and as Prometheus text.

Counts are made on the host, where a decision is taken. A replayed CUDA graph runs no Python, so calls
are counted when they run eagerly or are captured, while steps, rows and requests are counted at every
step. Hit ratio and guess misses come from tensors the op writes; they are read only when asked for.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from gvr_topk.integrations._kit.log import Say, one_line

OURS = "gvr_topk"
ORIGINAL = "original"

CALLS = ("calls", "Top-k calls, eager or captured.", ["path", "reason"])
"""Name, text and labels of the metric that every integration has."""

WRITE_INTERVAL = 30.0
"""Seconds between two writes of the metrics file."""


@dataclass(frozen=True)
class Measured:
    """Numbers read from the device, for the rows of the last step; known only with the option ``stats``."""

    hit_ratio: float | None = None
    """Number of hinted values that reached the k-th value, divided by k; the mean over layers and rows with a
    hint. Without ties at the k-th value this is the share of the hint that was in the result. None when there
    was no hint yet, or while a graph is being captured."""
    hinted: int = 0  # pairs of layer and row the mean is over
    guess_rows: int = 0  # rows whose first threshold came from a guess
    guess_misses: int = 0  # rows among them whose guess had to be widened


@dataclass(frozen=True)
class Snapshot:
    """Counters of this process at one moment."""

    calls: dict[tuple[str, str], int]  # by path, ``gvr_topk`` or ``original``, and reason
    steps: dict[str, int]  # of decode: ``eager``, ``graph``, and ``skipped`` where no indexer is needed
    rows: dict[str, int]
    """Score rows by kind: ``hinted``, ``dummy``, and where the configured lengths refuse a hint, the gate's
    reason ``too_short`` or ``too_long``."""
    requests: dict[str, int]
    """Requests ``admitted`` to, ``evicted`` from and ``refused`` a hint slot; ``seeded`` by prefill."""
    measured: Measured = field(default_factory=Measured)

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as plain JSON types."""
        plain = asdict(self)
        plain["calls"] = [
            {"path": path, "reason": reason, "count": count}
            for (path, reason), count in sorted(self.calls.items())
        ]
        return plain


class Counters:
    """Host-side counts; `measure` adds what only the device knows."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.steps: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.measure: Callable[[], Measured] = Measured
        self._next_write = 0.0

    def count(self, path: str, reason: str) -> None:
        """Count one call, eager or captured."""
        self.calls[path, reason] += 1

    def snapshot(self) -> Snapshot:
        """Return all counters. Reads a few kilobytes from the device, so not meant for every step."""
        return Snapshot(
            dict(self.calls), dict(self.steps), dict(self.rows), dict(self.requests), self.measure()
        )

    def prometheus_text(self) -> str:
        """Return all counters in Prometheus text format; an `ImportError` without ``prometheus-client``."""
        from prometheus_client import CollectorRegistry, generate_latest

        # A registry of its own: the server's registry, and what it exposes, stay untouched.
        registry = CollectorRegistry()
        registry.register(_Collector(self.snapshot()))
        return generate_latest(registry).decode()

    def write_if_due(self, variable: str, say: Say) -> None:
        """Write this process's metrics file, if the last one is old enough; most steps do no more than ask.

        The variable of the environment names the folder for the file, which a collector reads; it is created.
        """
        now = time.monotonic()
        if now < self._next_write:
            return
        self._next_write = now + WRITE_INTERVAL
        folder = os.environ.get(variable)
        if not folder:
            return
        try:
            target = metrics_file(Path(folder))
            partial = target.with_suffix(".partial")
            partial.write_text(self.prometheus_text(), encoding="utf-8")
            partial.replace(target)
        except (OSError, ImportError) as error:  # an engine must not fail because of a file
            say("warning", f"no metrics file: {one_line(error)}")


_files: dict[tuple[int, Path], Path] = {}
"""Metrics file by process id and folder: a forked process starts a file of its own."""


def metrics_file(folder: Path) -> Path:
    """Return this process's metrics file in a folder, which is created; the file goes when the process ends.

    Host, process id and the time in milliseconds of the first call make the name, because processes of
    several hosts or containers may share a folder and have the same id.
    """
    key = os.getpid(), folder
    folder.mkdir(parents=True, exist_ok=True)
    if key not in _files:
        started = time.time_ns() // 1_000_000
        file = _files[key] = folder / f"gvr_topk_{platform.node()}_{key[0]}_{started}.prom"
        # Unlike atexit, this also runs at the end of a process that multiprocessing has forked.
        Finalize(None, file.unlink, kwargs={"missing_ok": True}, exitpriority=0)
    return _files[key]


@dataclass(eq=False)  # a registry looks it up
class _Collector:
    seen: Snapshot

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def counter(name: str, text: str, labels: list[str], values: dict[Any, int]) -> Any:
            family = CounterMetricFamily(f"gvr_topk_{name}", text, labels=labels)
            for key, count in sorted(values.items()):
                family.add_metric(key if isinstance(key, tuple) else (key,), count)
            return family

        yield counter(*CALLS, self.seen.calls)
        yield counter("steps", "Decode steps.", ["kind"], self.seen.steps)
        yield counter("rows", "Score rows.", ["kind"], self.seen.rows)
        yield counter("requests", "Requests and their hint slots.", ["event"], self.seen.requests)
        measured = self.seen.measured
        for name, text, value in (
            ("hit_ratio", "Share of hinted positions in the result, last step.", measured.hit_ratio),
            ("guess_rows", "Rows that started from a guess, last step.", measured.guess_rows),
            ("guess_misses", "Guesses that had to be widened, last step.", measured.guess_misses),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"gvr_topk_{name}", text, value=value)
