"""A list of runs, each with its commands, and the loop that does those not yet done."""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.campaigns.evidence import Evidence, read_evidence
from eval.campaigns.process import CommandError, output_lines, quote_tail, run_command, running_server
from eval.campaigns.reports import ReportError
from eval.campaigns.store import RunStore, run_key
from eval.campaigns.verdicts import ERROR_RATE


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
        What was varied, for example task, variant and repetition, and the order in which the variants
        took turns; kept with the result.
    command : tuple of str
    log : Path
        Output of the command.
    inputs : mapping of str to str
        Files the result depends on, and the hash of their content.
    measure : callable
        Turns what the command printed into figures; reads report files itself. Raises `ReportError`.
    build : mapping of str to str
        What the run runs on, from `eval.campaigns.identity`.
    reports : tuple of Path
        Files the command writes; removed before it starts, so that no older one is read.
    server : Server, optional
    other_log : Path, optional
        Log of a server that runs already, read for the evidence that the heuristic top-k was on.
    """

    labels: Mapping[str, Any]
    command: tuple[str, ...]
    log: Path
    inputs: Mapping[str, str]
    measure: Callable[[str], dict[str, Any]]
    build: Mapping[str, str] = field(default_factory=dict)
    reports: tuple[Path, ...] = ()
    server: Server | None = None
    other_log: Path | None = None

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.labels.items() if key != "order")

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """Every command of the run, the server's first."""
        return (self.command,) if self.server is None else (self.server.command, self.command)

    @property
    def key(self) -> str:
        return run_key(self.commands, self.inputs, self.labels, self.build)


@dataclass
class Outcome:
    """Records of the finished runs, and one message per failed run.

    `faulty` says that a failure was one of these scripts and not of what they ran.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    faulty: bool = False

    def write(self, file: Path, family: int, **decided: Any) -> None:
        """Write the records, and what was decided from them for so many tasks or cases together."""
        chances = {"error_rate": ERROR_RATE, "family": family}
        result = {**chances, **decided, "runs": self.records, "failures": self.failures}
        file.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def describe_plan(runs: Sequence[PlannedRun], store: RunStore) -> str:
    """The commands of every run as a shell script; comments say what is done, and how long the rest takes."""
    lines = []
    for run in runs:
        state = " (done: will not run again)" if store.done(run.key) else ""
        lines.append(f"# {run.name}{state}")
        if run.server is not None:
            lines.append(f"{shlex.join(run.server.command)} &  # until {run.server.ready_url} answers 200")
        lines.append(shlex.join(run.command))
    left = sum(store.done(run.key) is None for run in runs)
    took = [record["seconds"] for record in store.finished()]
    hours = f"about {left * statistics.mean(took) / 3600:.1f} hours" if took else "unknown until one is done"
    lines.append(f"# {left} of {len(runs)} runs are to be done, each with a start of the engine: {hours}")
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
            "build": dict(run.build),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        try:
            result = _do(run, store, timeout_s, start_timeout_s)
        except (CommandError, ReportError) as error:
            message = _failure(run, error)
        except Exception as error:  # one run must not end a campaign of days
            message = f"the evaluation script itself failed: {type(error).__name__}: {error}"
            outcome.faulty = True
        else:
            record |= {"status": "done", **result}
            store.append(record)
            outcome.records.append(record)
            continue
        say(f"{place}: {message}")
        outcome.failures.append(f"{run.name}: {message}")
        store.append({**record, "status": "failed", "reason": message})
        if not keep_going:
            say("stopped; the same command goes on from here (--keep-going to run the rest)")
            break
    return outcome


def remarks(records: Sequence[Mapping[str, Any]]) -> str:
    """What the logs of the runs said about the heuristic top-k."""
    on = [record for record in records if record["labels"]["variant"] == "on"]
    hook = sorted({line for record in on for line in record.get("hook_lines", ())})
    return (
        "\n".join(["gvr_topk in the logs of the 'on' runs:", *(f"  {line}" for line in hook)]) if hook else ""
    )


def _do(run: PlannedRun, store: RunStore, timeout_s: float, start_timeout_s: float) -> dict[str, Any]:
    """Do one run; what goes into its record."""
    seconds = _run(run, store.lock, timeout_s, start_timeout_s)
    figures = run.measure("".join(output_lines(run.log, run.command)))
    evidence = read_evidence(_printed(run))
    if problem := evidence.problem(run.labels["variant"]):
        raise ReportError(problem)
    return {"seconds": round(seconds, 3), "figures": figures, **_describe(evidence)}


def _run(run: PlannedRun, lock: int, timeout_s: float, start_timeout_s: float) -> float:
    for report in run.reports:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
    with ExitStack() as stack:
        if run.server is not None:
            server = running_server(
                run.server.command,
                run.server.log,
                run.server.ready_url,
                start_timeout_s=start_timeout_s,
                hold=(lock,),
            )
            stack.enter_context(server)
        return run_command(run.command, run.log, timeout_s=timeout_s, hold=(lock,))


def _failure(run: PlannedRun, error: CommandError | ReportError) -> str:
    if isinstance(error, ReportError):
        # The command ended well and yet left no figures: its log is all there is to go by.
        error = CommandError(run.command, f"exit status 0, but {error}", run.log)
    message = str(error)
    if run.server is not None and error.command == run.command:
        # A client's failure is often explained by the server's log only.
        message += "\n" + quote_tail(run.server.log, "last lines of the server's log")
    return message


def _printed(run: PlannedRun) -> Iterator[str]:
    """Everything that the processes of a run printed."""
    yield from output_lines(run.log, run.command)
    if run.server is not None:
        yield from output_lines(run.server.log, run.server.command)
    if run.other_log is not None:
        yield from output_lines(run.other_log, None)


def _describe(evidence: Evidence) -> dict[str, Any]:
    return {"hook_lines": list(evidence.lines), "version": evidence.version}
