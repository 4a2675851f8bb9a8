"""A list of runs, each with its commands, and the loop that does those not yet done."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eval.common.process import CommandError, quote_tail, run_command, running_server
from eval.common.reports import ReportError
from eval.common.store import RunStore, run_key

Variant = Literal["off", "on"]
Order = Literal["abba", "alternate"]

_HOOK_LINE = re.compile(r"\bgvr_topk\b(?![/\\])")
_HOOK_LINES = 5
_VERSION = re.compile(r"TensorRT-LLM version: (\S+)")


@dataclass(frozen=True)
class Server:
    """A server that is started for one run and ended after it."""

    command: tuple[str, ...]
    ready_url: str
    log: Path


@dataclass(frozen=True)
class PlannedRun:
    """One repetition of one variant.

    Attributes
    ----------
    labels : mapping
        What was varied, for example task, variant and repetition; kept with the result.
    command : tuple of str
    log : Path
        Output of the command.
    inputs : mapping of str to str
        Files the result depends on, and the hash of their content.
    measure : callable
        Turns the text of the log into figures; reads report files itself. Raises `ReportError`.
    reports : tuple of Path
        Files the command writes; removed before it starts, so that no older one is read.
    server : Server, optional
    """

    labels: Mapping[str, Any]
    command: tuple[str, ...]
    log: Path
    inputs: Mapping[str, str]
    measure: Callable[[str], dict[str, Any]]
    reports: tuple[Path, ...] = ()
    server: Server | None = None

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.labels.items())

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """Every command of the run, the server's first."""
        return (self.command,) if self.server is None else (self.server.command, self.command)

    @property
    def key(self) -> str:
        return run_key(self.commands, self.inputs, self.labels)


@dataclass
class Outcome:
    """Records of the finished runs, and one message per failed run."""

    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def variant_order(repetitions: int, order: Order) -> list[tuple[int, Variant]]:
    """Sequence of (repetition from 1, variant).

    ``alternate`` is off on, off on, ... as in the paper. ``abba`` turns every second pair round, so that
    a slow drift of the machine (clocks, temperature) falls on both variants alike.
    """
    sequence: list[tuple[int, Variant]] = []
    for repetition in range(1, repetitions + 1):
        pair: list[Variant] = ["off", "on"]
        if order == "abba" and repetition % 2 == 0:
            pair.reverse()
        sequence += [(repetition, variant) for variant in pair]
    return sequence


def describe_plan(runs: Sequence[PlannedRun], store: RunStore) -> str:
    """The commands of every run as a shell script, with a comment on those already done."""
    lines = []
    for run in runs:
        state = " (done: will not run again)" if store.done(run.key) else ""
        lines.append(f"# {run.name}{state}")
        if run.server is not None:
            lines.append(f"{shlex.join(run.server.command)} &  # until {run.server.ready_url} answers 200")
        lines.append(shlex.join(run.command))
    return "\n".join(lines)


def execute(
    runs: Sequence[PlannedRun],
    store: RunStore,
    *,
    timeout_s: float,
    start_timeout_s: float,
    keep_going: bool,
    say: Callable[[str], None],
) -> Outcome:
    """Do every run that `store` does not hold, in order.

    Parameters
    ----------
    timeout_s, start_timeout_s : float
        Seconds for one command, and for a server to become ready.
    keep_going : bool
        Go on with the next run after a failure; otherwise stop there.
    say : callable
        Receives progress and the full message of every failure.
    """
    outcome = Outcome()
    if store.skipped_lines:
        numbers = ", ".join(str(number) for number in store.skipped_lines)
        say(
            f"{store.path}: unreadable line {numbers} (an interrupted run?) is left out; "
            "that run is done again"
        )
    for index, run in enumerate(runs, start=1):
        place = f"[{index}/{len(runs)}] {run.name}"
        earlier = store.done(run.key)
        if earlier is not None:
            say(f"{place}: done before")
            outcome.records.append(earlier)
            continue
        say(f"{place}: running, log {run.log}")
        record: dict[str, Any] = {
            "key": run.key,
            "labels": dict(run.labels),
            "commands": [list(command) for command in run.commands],
            "inputs": dict(run.inputs),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        try:
            seconds = _run(run, timeout_s, start_timeout_s)
            figures = run.measure(run.log.read_text(encoding="utf-8", errors="replace"))
        except (CommandError, ReportError) as error:
            message = _failure(run, error)
            say(f"{place}: {message}")
            outcome.failures.append(f"{run.name}: {message}")
            store.append({**record, "status": "failed", "reason": message})
            if not keep_going:
                say("stopped; the same command goes on from here (--keep-going to run the rest)")
                break
            continue
        record |= {
            "status": "done",
            "seconds": round(seconds, 3),
            "figures": figures,
            **_read_logs(run),
        }
        store.append(record)
        outcome.records.append(record)
    return outcome


def remarks(records: Sequence[Mapping[str, Any]]) -> str:
    """What the logs say about the heuristic top-k and about the versions that were mixed, if any."""
    on = [record for record in records if record["labels"]["variant"] == "on"]
    hook = sorted({line for record in on for line in record["hook_lines"]})
    if hook:
        lines = ["gvr_topk in the logs of the 'on' runs:", *(f"  {line}" for line in hook)]
    else:
        lines = [
            "No line of gvr_topk in the logs of the 'on' runs: they do not show that its top-k was active."
        ]
    versions = sorted({str(record["version"]) for record in records})
    if len(versions) > 1:
        lines.append(f"The runs are of several TensorRT-LLM versions: {', '.join(versions)}.")
    return "\n".join(lines)


def _run(run: PlannedRun, timeout_s: float, start_timeout_s: float) -> float:
    for report in run.reports:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
    with ExitStack() as stack:
        if run.server is not None:
            stack.enter_context(
                running_server(
                    run.server.command, run.server.log, run.server.ready_url, start_timeout_s=start_timeout_s
                )
            )
        return run_command(run.command, run.log, timeout_s=timeout_s)


def _failure(run: PlannedRun, error: CommandError | ReportError) -> str:
    if isinstance(error, ReportError):
        # The command ended well and yet left no figures: its log is all there is to go by.
        error = CommandError(run.command, f"exit status 0, but {error}", run.log)
    message = str(error)
    if run.server is not None and error.command == run.command:
        # A client's failure is often explained by the server's log only.
        message += "\n" + quote_tail(run.server.log, "last lines of the server's log")
    return message


def _read_logs(run: PlannedRun) -> dict[str, Any]:
    """Lines of the integration, and the version of TensorRT-LLM, from the logs of a run."""
    hook: list[str] = []
    version = None
    for log in (run.log, *([run.server.log] if run.server else [])):
        with log.open(encoding="utf-8", errors="replace") as stream:
            next(stream, None)  # the command itself, which may name our folder
            for line in stream:
                text = line.strip()
                if match := _VERSION.search(text):
                    version = match.group(1)
                if len(hook) < _HOOK_LINES and _HOOK_LINE.search(text) and text not in hook:
                    hook.append(text)
    return {"hook_lines": hook, "version": version}
