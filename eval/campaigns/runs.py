"""The runs of a campaign: a plan, the loop that does what is not yet done, and what comes of it."""

import json
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import typer

from eval.campaigns.evidence import TOP_K, Subject, read_evidence
from eval.campaigns.process import CommandError, output_lines, quote_tail, run_command, running_server
from eval.campaigns.reports import Figures, ReportError
from eval.campaigns.store import RunRecord, RunStore, text_hash
from eval.campaigns.verdicts import ERROR_RATE, Decision, decide
from eval.common.machine import write_json
from eval.common.status import UNDECIDED, InputError
from gvr_topk.integrations._kit.environment import DISABLE, disabled


@dataclass(frozen=True)
class Server:
    """A server that is started for one run and ended after it."""

    command: tuple[str, ...]
    ready_url: str
    log: Path


@dataclass(frozen=True)
class PlannedRun:
    """One repetition of one variant; `labels`, `inputs` and `build` are those of `RunRecord`."""

    labels: Mapping[str, Any]
    command: tuple[str, ...]
    log: Path  # output of the command
    inputs: Mapping[str, str]
    measure: Callable[[str], Figures]  # of what the command printed; reads report files itself
    build: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)  # written before the command, which reads them
    report: Path | None = None  # the command writes it; removed before, so that no older one is read
    server: Server | None = None
    subject: Subject = TOP_K  # what the variants have on or off

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.labels.items())

    @property
    def commands(self) -> list[list[str]]:
        """Every command of the run, the server's first."""
        return [*([list(self.server.command)] if self.server else []), list(self.command)]

    @property
    def identity(self) -> dict[str, Any]:
        """What the record says before the run, and what its key is made of."""
        return {
            "labels": dict(self.labels),
            "commands": self.commands,
            "inputs": dict(self.inputs),
            "build": dict(self.build),
        }

    @property
    def key(self) -> str:
        return text_hash(json.dumps(self.identity, sort_keys=True))

    def do(self, lock: int, limits: "Limits") -> dict[str, Any]:
        """Run the commands; what goes into the record."""
        if self.report is not None:
            self.report.parent.mkdir(parents=True, exist_ok=True)
            self.report.unlink(missing_ok=True)
        for file, content in self.files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
        with ExitStack() as stack:
            if self.server is not None:
                command, url, log = astuple(self.server)
                server = running_server(
                    command, log, url, start_timeout_s=limits.start_timeout_s, hold=(lock,)
                )
                stack.enter_context(server)
            seconds = run_command(self.command, self.log, timeout_s=limits.timeout_s, hold=(lock,))
        figures = self.measure("".join(output_lines(self.log, self.command)))
        # The client of a server is no evidence, though it may load the same plugins.
        engine = self if self.server is None else self.server
        evidence = read_evidence(output_lines(engine.log, engine.command), self.subject)
        if problem := evidence.problem(self.labels["variant"]):
            raise ReportError(problem)
        said = {"hook_lines": list(evidence.lines), "version": evidence.version}
        return {"seconds": round(seconds, 3), "figures": figures, **said}

    def explain(self, error: CommandError | ReportError) -> str:
        """The message of a failure, with the logs that tell its cause."""
        if isinstance(error, ReportError):
            # The command ended well and yet left no figures: its log is all there is to go by.
            error = CommandError(self.command, f"exit status 0, but {error}", self.log)
        if self.server is None or error.command != self.command:
            return str(error)
        return f"{error}\n" + quote_tail(self.server.log, "last lines of the server's log")


@dataclass(frozen=True)
class Comparison:
    """Both sides of one task or case, and what was decided from them.

    The figures are those of the repetitions that have both sides, before the first that lacks one.
    """

    case: Mapping[str, Any]
    off: tuple[float, ...]
    on: tuple[float, ...]
    decision: Decision
    acceptance_off: tuple[float, ...] = ()  # shares of draft tokens that were accepted; none without drafts
    acceptance_on: tuple[float, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Seconds for one command and for a server to become ready, and whether to go on after a failure."""

    timeout_s: float
    start_timeout_s: float
    keep_going: bool


@dataclass
class Outcome:
    """Records of the finished runs, and one message per failed run."""

    planned: int
    records: list[RunRecord] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    faulty: bool = False  # a failure was one of these scripts and not of what they ran

    def pairs(self, case: Mapping[str, Any], figure: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Figures off and on of the repetitions before the first that lacks one.

        Later ones wait until the gap is filled: were they used, a run that fails would choose which
        repetitions a verdict rests on.
        """
        found = {
            (record.labels["variant"], record.labels["repetition"]): record.figures.get(figure)
            for record in self.records
            if record.case == case
        }
        off, on = [], []
        for repetition in range(1, len(found) + 1):
            values = found.get(("off", repetition)), found.get(("on", repetition))
            if values[0] is None or values[1] is None:
                break
            off.append(values[0])
            on.append(values[1])
        return tuple(off), tuple(on)

    def compare(
        self,
        cases: Sequence[Mapping[str, Any]],
        figure: str,
        family: int,
        transform: Callable[[float], float] = float,
        **options: Any,
    ) -> list[Comparison]:
        """Judge all tasks or cases together, by their transformed figures; options as for `decide`."""
        pairs = [self.pairs(case, figure) for case in cases]
        runs = [([transform(x) for x in off], [transform(x) for x in on]) for off, on in pairs]
        return [
            Comparison(case, *pair, decision, *self.pairs(case, "acceptance"))
            for case, pair, decision in zip(cases, pairs, decide(runs, family, **options), strict=True)
        ]

    def report(self, out: Path, family: int, comparisons: Sequence[Comparison]) -> None:
        """Say what failed and what the logs said, and write what was measured and decided."""
        on = [record for record in self.records if record.labels["variant"] == "on"]
        if lines := sorted({line for record in on for line in record.hook_lines}):
            typer.echo(
                "\n".join(["gvr_topk in the logs of the 'on' runs:", *(f"  {line}" for line in lines)])
            )
        if self.failures:
            typer.echo(f"{len(self.failures)} of {self.planned} runs failed")
        result = {
            "error_rate": ERROR_RATE,
            "family": family,
            "decisions": [asdict(item) for item in comparisons],
            "runs": [asdict(record) for record in self.records],
            "failures": self.failures,
        }
        write_json(out / "results.json", result)
        typer.echo(f"written: {out / 'results.json'}")


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
    took = [record.seconds for record in store.finished()]
    hours = f"about {left * statistics.mean(took) / 3600:.1f} hours" if took else "unknown until one is done"
    lines.append(f"# {left} of {len(runs)} runs are to be done, each with a start of the engine: {hours}")
    return "\n".join(lines)


def execute(runs: Sequence[PlannedRun], store: RunStore, limits: Limits) -> Outcome:
    """Do every run that `store` does not hold, in order, and say how each goes."""
    outcome = Outcome(len(runs))
    for index, run in enumerate(runs, start=1):
        place = f"[{index}/{len(runs)}] {run.name}"
        if earlier := store.done(run.key):
            typer.echo(f"{place}: done before")
            outcome.records.append(earlier)
            continue
        typer.echo(f"{place}: running, log {run.log}")
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            done = RunRecord(run.key, **run.identity, started=started, **run.do(store.lock, limits))
            store.add(done)
        except (CommandError, ReportError) as error:
            message = run.explain(error)
        except Exception as error:  # one run must not end a campaign of days
            message = f"the evaluation script itself failed: {type(error).__name__}: {error}"
            outcome.faulty = True
        else:
            outcome.records.append(done)
            continue
        typer.echo(f"{place}: {message}")
        outcome.failures.append(f"{run.name}: {message}")
        if not limits.keep_going:
            typer.echo("stopped; the same command goes on from here (--keep-going to run the rest)")
            break
    return outcome


def refuse_repeats(values: Sequence[Hashable], option: str) -> None:
    """Refuse an option that is given the same value twice: its runs would count as twice as many."""
    if repeated := list(dict.fromkeys(value for value in values if values.count(value) > 1)):
        names = ", ".join(str(value) for value in repeated)
        raise typer.BadParameter(f"wanted each value once, got {names} more than once", param_hint=option)


def run_campaign(
    runs: Sequence[PlannedRun],
    store: RunStore,
    limits: Limits,
    program: Sequence[str],
    option: str,
    dry_run: bool,
) -> Outcome:
    """Do the runs, or print their commands and end.

    `program` starts the engine, from the launcher on, and `option` is where the caller names it. With
    ``GVR_TOPK_DISABLE`` set no run could show anything, and none is done.
    """
    if dry_run:
        typer.echo(describe_plan(runs, store))
        raise typer.Exit(0)
    if disabled():
        typer.echo(f"{DISABLE} is set: the heuristic top-k cannot run, so nothing is measured", err=True)
        raise typer.Exit(UNDECIDED)
    if shutil.which(program[0]) is None:
        raise InputError(f"{option}: wanted a program on PATH, got {program[0]!r}, which is not found there")
    with store:
        return execute(runs, store, limits)
