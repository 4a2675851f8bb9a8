"""Does the heuristic top-k change a model's accuracy? Runs trtllm-eval off and on, and decides.

    python -m eval accuracy --model MODEL --runs 8 --out out/accuracy --dry-run

Per task, in points of per cent, with a margin for the largest loss that is accepted:

* ``within``: a loss as large as the margin is excluded (non-inferiority).
* ``regression``: the loss is larger than the margin.
* ``inconclusive``: neither is shown; more runs may show it.

The margin is the run-to-run spread that the paper saw in the same task (largest minus smallest score of
repeated runs of one configuration, appendix G), at least 0.1 point. `--margin TASK=POINTS` sets another
one; choose it before the first run.

**What the verdicts are worth.** In a whole campaign the chance of any false "within" is at most 5 %, and so
is that of any false "regression": over all tasks together, with a steady drift of the machine or without,
and also for somebody who looks after every run and adds runs until the answer pleases. A verdict may change
at 6, 8, 12, 16 and 32 runs of each variant; between them it stays. How: `eval/campaigns/sequential.py`;
that it holds, and how often a real loss is found: docs/verdicts.md. The command says before the first run
what so many runs can show.

What the comparison can show: the short-answer tasks hardly reach the decode-stage top-k at all (a row
shorter than index_topk has no choice to make); LongBench does.

A run counts only if its log shows that the heuristic top-k was on (or off, on the other side). Where all rows
of a task are short, TensorRT-LLM may skip the top-k, and the run is no evidence: use ``--task longbench_v1``
alone.

An interrupted evaluation goes on where it stopped when the same command is given again, on the same builds
and GPU.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.campaigns.configs import combined_configs
from eval.campaigns.exits import clean_exits, refuse_disabled
from eval.campaigns.identity import build_identity
from eval.campaigns.order import Order, variant_order
from eval.campaigns.pairing import complete_pairs
from eval.campaigns.pairs import check_pair
from eval.campaigns.plan import PlannedRun, describe_plan, execute, remarks
from eval.campaigns.power import detectable_difference, pass_rate, repetitions_needed
from eval.campaigns.reports import EVAL_TASKS, read_eval_json, read_eval_log
from eval.campaigns.sequential import (
    LEAST_REPETITIONS,
    LOOKS,
    WARM_UP_RATE,
    WARM_UP_REMARK,
    bounds,
    drift_free_difference,
    looks_at,
    next_look,
    warm_up_p,
)
from eval.campaigns.stats import sd_from_range
from eval.campaigns.store import RunStore, file_hash
from eval.campaigns.verdicts import (
    ERROR_RATE,
    Noninferiority,
    judge_noninferiority,
    noninferiority_verdicts,
)
from eval.common.options import refuse_repeats, require_program
from eval.common.status import REGRESSION, TOOL_FAULT, UNDECIDED
from eval.common.tables import markdown_table

RESOLUTION = 0.01
"""Step of the scores in the logs, points."""

MARGIN_FLOOR = 0.1
"""Least margin, points. Below it the order of sums in another GPU's kernels decides: the paper's MMLU
runs spread by 0.03 points, 4 of 14,042 answers."""

PROGRAM = "trtllm-eval"
CONFIGS = combined_configs()


@dataclass(frozen=True)
class Published:
    """The paper's result for one task: NVFP4 checkpoint, B200 (section 6.6, appendix G).

    Attributes
    ----------
    samples : int
    off, on : float
        Mean scores without and with the heuristic top-k, points.
    runs : tuple of int
        Runs behind them.
    spread : tuple of float
        Smallest and largest score of the configuration that was run `spread_runs` times.
    """

    samples: int
    off: float
    on: float
    runs: tuple[int, int]
    spread: tuple[float, float]
    spread_runs: int

    @property
    def margin(self) -> float:
        return max(self.spread[1] - self.spread[0], MARGIN_FLOOR)

    @property
    def sd(self) -> float:
        return sd_from_range(*self.spread, self.spread_runs)


PAPER = {
    "mmlu": Published(14042, 87.51, 87.50, (1, 4), (87.49, 87.52), 4),
    "gsm8k": Published(1319, 95.11, 95.23, (1, 4), (95.03, 95.49), 4),
    "gpqa_diamond": Published(198, 77.27, 77.15, (1, 4), (75.25, 78.79), 4),
    "longbench_v1": Published(5000, 44.61, 44.28, (8, 8), (44.25, 45.01), 8),
}

TASK_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "mmlu": (),
    "gsm8k": (),
    # "Thinking mode" in the paper; arguments of TensorRT-LLM's guide to DeepSeek-V3.2.
    "gpqa_diamond": (
        "--apply_chat_template",
        "--chat_template_kwargs",
        '{"thinking": true}',
        "--max_output_length",
        "120000",
    ),
    "longbench_v1": (),
}


@dataclass(frozen=True)
class Decision:
    """Outcome for one task; all figures in points.

    Attributes
    ----------
    task, verdict : str
    off, on : tuple of float
        Scores of the complete repetitions.
    delta : float
        ``on - off``, a linear drift removed; the plain difference of too few repetitions for that.
    low, high : float or None
        Ends of the interval of delta, each with the error rate of this task's share; None before the
        first look.
    margin : float
    p_within, p_regression : float
        Adjusted for the looks and the tasks; the verdict compares them with the error rate.
    sd : float or None
        Standard deviation of one run as measured here; None where there are too few repetitions to say.
    warms_up : bool
        Whether a warm-up shows in the order of the runs; it is noise to the verdict.
    """

    task: str
    verdict: Noninferiority
    off: tuple[float, ...]
    on: tuple[float, ...]
    delta: float
    low: float | None
    high: float | None
    margin: float
    p_within: float
    p_regression: float
    sd: float | None
    warms_up: bool

    @property
    def detectable(self) -> bool:
        """Whether the interval excludes no difference at all (either way)."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def decide(
    scores: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    margins: Mapping[str, float],
    order: Order,
    family: int | None = None,
) -> list[Decision]:
    """Apply the rule at the top of this file to all tasks together.

    Parameters
    ----------
    scores : mapping of str to (sequence, sequence) of float
        Per task the scores off and on, points, in the order of the repetitions; at least one of each.
    margins : mapping of str to float
        Per task the largest loss that is accepted, points; positive.
    order : str
        In which order the variants took turns.
    family : int, optional
        Tasks of the campaign, where some have no scores yet; by default those of `scores`.

    Returns
    -------
    list of Decision
    """
    names = list(scores)
    size = len(names) if family is None else family
    looks = [looks_at(*scores[name], order, RESOLUTION) for name in names]
    judgement = judge_noninferiority(looks, [margins[name] for name in names], size)
    decisions = []
    for index, (name, verdict) in enumerate(zip(names, noninferiority_verdicts(judgement), strict=True)):
        off, on = scores[name]
        delta, sd = statistics.fmean(on) - statistics.fmean(off), None
        if len(off) >= LEAST_REPETITIONS:
            whole = drift_free_difference(off, on, order, RESOLUTION)
            delta, sd = float(whole.difference), float(whole.error) / whole.unit_error
        low, high = bounds(looks[index], ERROR_RATE / size)
        decisions.append(
            Decision(
                task=name,
                verdict=verdict,
                off=tuple(off),
                on=tuple(on),
                delta=delta,
                low=float(low) if looks[index] else None,
                high=float(high) if looks[index] else None,
                margin=margins[name],
                p_within=float(judgement.p_good[index]),
                p_regression=float(judgement.p_bad[index]),
                sd=sd,
                warms_up=bool(warm_up_p(off, on, order, RESOLUTION) <= WARM_UP_RATE),
            )
        )
    return decisions


def describe_power(margins: Mapping[str, float], runs: int, order: Order, family: int) -> str:
    """What so many runs can show at the paper's spread, said before the first of them.

    Every line is a comment, so that the output of ``--dry-run`` stays a shell script.
    """
    rows = []
    for name, margin in margins.items():
        sd = PAPER[name].sd
        shown = detectable_difference(sd, runs, order, ERROR_RATE / family)
        rows.append(
            [
                name,
                f"{sd:.3f}",
                f"{margin:.2f}",
                "-" if shown is None else f"{shown - margin:+.2f} or more",
                "-" if shown is None else f"{-margin - shown:+.2f} or less",
            ]
        )
    sds = tuple(PAPER[name].sd for name in margins)
    rates = [
        f"{100 * pass_rate(sds, tuple(margins.values()), count, order, family):.0f} % at {count}"
        for count in LOOKS
    ]
    headers = ["task", "spread of a run (paper)", "margin", "shown within", "shown regression"]
    lines = [
        "Power at the paper's spread. Share of campaigns without any effect in which every task is within,",
        f"by runs of each variant: {', '.join(rates)}.",
        f"With {runs} runs, these true deltas (points) are shown in 90 % of campaigns:",
        *markdown_table(headers, rows).splitlines(),
        f"Chance of any false verdict of a kind: at most {100 * ERROR_RATE:.0f} %, even if runs are added.",
    ]
    return "\n".join(f"# {line}" for line in lines)


def plan_runs(
    *,
    tasks: Sequence[str],
    runs: int,
    order: Order,
    configs: Mapping[str, Path],
    out: Path,
    base_command: Sequence[str],
    task_arguments: Mapping[str, Sequence[str]],
    config_flag: str,
    json_reports: bool,
    build: Mapping[str, str],
) -> list[PlannedRun]:
    """List every run: task by task, off and on in turn."""
    hashes = {str(path): file_hash(path) for path in configs.values()}
    planned = []
    for task in tasks:
        for repetition, variant in variant_order(runs, order):
            place = out / task / f"{variant}_{repetition}"
            config = configs[variant]
            command = [*base_command, config_flag, str(config), task, *task_arguments[task]]
            measure = partial(_score_from_log, task)
            reports: tuple[Path, ...] = ()
            harness = EVAL_TASKS[task].harness_task
            if json_reports and harness is not None:
                command += ["--output_path", str(place)]
                reports = (place / f"samples_{harness}.json",)
                measure = partial(_score_from_json, task, reports[0])
            planned.append(
                PlannedRun(
                    labels={"task": task, "variant": variant, "repetition": repetition, "order": order},
                    command=tuple(command),
                    log=place.with_suffix(".log"),
                    inputs={str(config): hashes[str(config)]},
                    measure=measure,
                    build=build,
                    reports=reports,
                )
            )
    return planned


def report(decisions: Sequence[Decision], order: Order, family: int) -> str:
    """The table of results beside the paper's."""
    rows = []
    for item in decisions:
        paper = PAPER[item.task]
        ends = "" if item.low is None else f" [{item.low:+.2f}, {item.high:+.2f}]"
        rows.append(
            [
                item.task,
                f"{statistics.fmean(item.off):.2f}",
                f"{statistics.fmean(item.on):.2f}",
                str(len(item.off)),
                f"{item.delta:+.2f}{ends}",
                f"{item.margin:.2f}",
                f"{item.p_within:.3f}",
                f"{item.p_regression:.3f}",
                item.verdict,
                f"{paper.off:.2f} -> {paper.on:.2f} ({paper.on - paper.off:+.2f})",
            ]
        )
    headers = [
        "task",
        "off",
        "on",
        "runs",
        "delta [90 %, all tasks and looks]",
        "margin",
        "p within",
        "p regression",
        "verdict",
        "paper, B200 NVFP4",
    ]
    lines = [markdown_table(headers, rows)]
    for item in decisions:
        if item.verdict == "within" and item.detectable:
            word = "better" if item.delta > 0 else "worse"
            lines.append(f"{item.task}: within the margin, yet the interval excludes zero (on is {word}).")
        if item.verdict == "inconclusive":
            lines.append(f"{item.task}: {_advice(item, order, family)}")
        if item.warms_up:
            lines.append(f"{item.task}: {WARM_UP_REMARK}")
    return "\n".join(lines)


def _advice(item: Decision, order: Order, family: int) -> str:
    look = next_look(len(item.off))
    if look is None:
        return "still open after the last look; such a campaign cannot tell this difference from the margin."
    text = f"open; the next look is at {look} runs of each variant"
    needed = None if item.sd is None else repetitions_needed(item.sd, item.margin, order, ERROR_RATE / family)
    if needed is not None and needed > look:
        text += f"; at the spread measured so far, no effect takes {needed} to be shown"
    return text + "."


def exit_status(verdicts: Sequence[Noninferiority], complete: bool) -> int:
    """0 every task within, 1 a regression, 3 inconclusive or something is missing."""
    if "regression" in verdicts:
        return REGRESSION
    return 0 if complete and set(verdicts) == {"within"} else UNDECIDED


def _score_from_log(task: str, log: str) -> dict[str, Any]:
    return {"score": read_eval_log(task, log)}


def _score_from_json(task: str, path: Path, log: str) -> dict[str, Any]:
    return {"score": read_eval_json(task, path)}


def _parse_pairs(values: Sequence[str], name: str) -> dict[str, str]:
    pairs = {}
    for value in values:
        task, separator, text = value.partition("=")
        if not separator or task not in EVAL_TASKS:
            raise typer.BadParameter(
                f"wanted TASK=..., TASK one of {', '.join(EVAL_TASKS)}, got {value!r}", param_hint=name
            )
        pairs[task] = text
    refuse_repeats([value.partition("=")[0] for value in values], name)
    return pairs


def _parse_margins(values: Sequence[str]) -> dict[str, float]:
    margins = {}
    for task, text in _parse_pairs(values, "--margin").items():
        try:
            margins[task] = float(text)
        except ValueError:
            margins[task] = math.nan
        if not margins[task] > 0:
            raise typer.BadParameter(
                f"wanted a positive number of points, got {text!r}", param_hint="--margin"
            )
    return margins


def main(
    model: Annotated[str, typer.Option(help="Model name or checkpoint folder, as for trtllm-eval.")],
    task: Annotated[list[str] | None, typer.Option(help="Repeatable. Default: all four.")] = None,
    runs: Annotated[
        int, typer.Option(min=1, help="Runs of each variant; verdicts change at 4, 6, 8, 12, 16, 32.")
    ] = 8,
    config_off: Annotated[Path, typer.Option(help="YAML without the heuristic top-k.")] = CONFIGS
    / "eval_dep8_mtp1_off.yaml",
    config_on: Annotated[Path, typer.Option(help="The same YAML with it.")] = CONFIGS
    / "eval_dep8_mtp1_on.yaml",
    out: Annotated[Path, typer.Option(help="Folder for logs, the run store and results.")] = Path(
        "out/accuracy"
    ),
    margin: Annotated[list[str] | None, typer.Option(help="TASK=POINTS, repeatable.")] = None,
    task_args: Annotated[
        list[str] | None, typer.Option(help="TASK='arguments' in place of our defaults, repeatable.")
    ] = None,
    eval_args: Annotated[
        str, typer.Option(help="Arguments of trtllm-eval before the task.")
    ] = "--custom_tokenizer deepseek_v32",
    order: Annotated[Order, typer.Option(help="abba turns every second pair round.")] = "abba",
    timeout: Annotated[float, typer.Option(help="Seconds for one run.")] = 6 * 3600.0,
    keep_going: Annotated[bool, typer.Option(help="Go on after a failed run.")] = True,
    launcher: Annotated[
        str, typer.Option(help="Words before trtllm-eval, for example trtllm-llmapi-launch.")
    ] = "",
    config_flag: Annotated[
        str, typer.Option(help="--extra_llm_api_options on releases without --config.")
    ] = "--config",
    json_reports: Annotated[
        bool, typer.Option(help="Ask lm-eval tasks for --output_path (newer releases) and read all digits.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and stop.")] = False,
) -> None:
    """Run trtllm-eval with the heuristic top-k off and on, and decide whether accuracy holds."""
    tasks = task or list(EVAL_TASKS)
    unknown = [name for name in tasks if name not in EVAL_TASKS]
    if unknown:
        raise typer.BadParameter(
            f"wanted {', '.join(EVAL_TASKS)}, got {', '.join(unknown)}", param_hint="--task"
        )
    refuse_repeats(tasks, "--task")
    margins = {name: PAPER[name].margin for name in tasks} | _parse_margins(margin or [])
    arguments: dict[str, Sequence[str]] = dict(TASK_ARGUMENTS)
    arguments |= {
        name: shlex.split(text) for name, text in _parse_pairs(task_args or [], "--task-args").items()
    }
    with clean_exits():
        store = RunStore(out / "runs.jsonl")
        check_pair(config_off, config_on)
        planned = plan_runs(
            tasks=tasks,
            runs=runs,
            order=order,
            configs={"off": config_off, "on": config_on},
            out=out,
            base_command=[*shlex.split(launcher), PROGRAM, "--model", model, *shlex.split(eval_args)],
            task_arguments=arguments,
            config_flag=config_flag,
            json_reports=json_reports,
            build=build_identity(PROGRAM),
        )
        # A task that was run before belongs to the campaign, whether or not it is asked for now.
        family = len({*tasks, *(record["labels"].get("task") for record in store.finished())})
        typer.echo(describe_power(margins, runs, order, family))
        if dry_run:
            typer.echo(describe_plan(planned, store))
            return
        refuse_disabled()
        require_program([*shlex.split(launcher), PROGRAM], "trtllm-eval")
        with store:
            outcome = execute(
                planned,
                store,
                timeout_s=timeout,
                start_timeout_s=timeout,
                keep_going=keep_going,
                say=typer.echo,
            )
        scores = {name: complete_pairs(outcome.records, {"task": name}, "score") for name in tasks}
        for name in [name for name, (off, _) in scores.items() if not off]:
            typer.echo(f"{name}: no decision, no repetition has finished both off and on")
            del scores[name]
        decisions = decide(scores, margins=margins, order=order, family=family) if scores else []
        if decisions:
            typer.echo(report(decisions, order, family))
            typer.echo(remarks(outcome.records))
        if outcome.failures:
            typer.echo(f"{len(outcome.failures)} of {len(planned)} runs failed")
        outcome.write(out / "results.json", family, decisions=[asdict(item) for item in decisions])
        typer.echo(f"written: {out / 'results.json'}")
        complete = len(outcome.records) == len(planned) and len(decisions) == len(tasks)
        status = exit_status([item.verdict for item in decisions], complete)
        raise typer.Exit(TOOL_FAULT if outcome.faulty and status != REGRESSION else status)
