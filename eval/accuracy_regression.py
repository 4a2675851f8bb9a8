"""Does the heuristic top-k change a model's accuracy? Runs trtllm-eval off and on, and decides.

    python eval/accuracy_regression.py --model MODEL --runs 4 --out out/accuracy --dry-run

Decision, per task, on the scores in points of per cent:

* delta = mean(on) - mean(off), with the two-sided 90 % Welch interval [low, high] over the runs. Its
  lower end is the bound of a one-sided test at 5 %.
* The margin is the run-to-run spread that the paper saw in the same task (largest minus smallest score
  of repeated runs of one configuration, appendix G), at least 0.1 point. `--margin TASK=POINTS` sets
  another one.
* ``within``: low > -margin. A loss as large as the spread is excluded (non-inferiority).
* ``regression``: high < -margin. The loss is larger than the spread.
* ``inconclusive``: anything else; more runs narrow the interval.

With one run on one side its spread is taken from the other side (``pooled``). With one run on both sides
the spread is taken from the paper, its range turned into a standard deviation (``assumed``): that
decision is only as good as the paper's spread is for the machine at hand, and GSM8K and GPQA will
mostly be inconclusive, since one run each cannot tell a loss of the spread's size from chance. That
every task is within needs no correction for the number of tasks, since each of them has to pass.

What the comparison can show: the short-answer tasks hardly reach the decode-stage top-k at all (a row
shorter than index_topk has no choice to make); LongBench does.

Exit status: 0 every task within, 1 a regression, 2 wrong use, 3 inconclusive or runs failed,
130 interrupted. An interrupted evaluation goes on where it stopped when the same command is given again.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from eval.common.exits import clean_exits
from eval.common.options import refuse_repeats
from eval.common.pairs import check_pair
from eval.common.plan import Order, PlannedRun, describe_plan, execute, remarks, variant_order
from eval.common.reports import EVAL_TASKS, read_eval_json, read_eval_log
from eval.common.stats import Basis, difference_interval, sd_from_range
from eval.common.store import RunStore, file_hash
from eval.common.tables import markdown_table

CONFIDENCE = 0.90
"""Two-sided level, so that each end is a one-sided bound at 5 %."""

MARGIN_FLOOR = 0.1
"""Least margin, points. Below it the order of sums in another GPU's kernels decides: the paper's MMLU
runs spread by 0.03 points, 4 of 14,042 answers."""

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "eval"

Verdict = Literal["within", "regression", "inconclusive"]


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
    """Outcome for one task; all figures in points."""

    task: str
    verdict: Verdict
    off: tuple[float, ...]
    on: tuple[float, ...]
    delta: float
    low: float
    high: float
    margin: float
    basis: Basis

    @property
    def detectable(self) -> bool:
        """Whether the interval excludes no difference at all (either way)."""
        return not self.low <= 0 <= self.high


def decide(
    task: str, off: Sequence[float], on: Sequence[float], *, margin: float, assumed_sd: float
) -> Decision:
    """Apply the rule at the top of this file.

    Parameters
    ----------
    task : str
    off, on : sequence of float
        Scores of the runs without and with the heuristic top-k, points; at least one each.
    margin : float
        Largest loss that is accepted, points; positive.
    assumed_sd : float
        Standard deviation of one run, used only where both sides have a single run.

    Returns
    -------
    Decision
    """
    if not margin > 0:
        raise ValueError(f"margin: wanted a positive number of points, got {margin}")
    interval, basis = difference_interval(off, on, confidence=CONFIDENCE, assumed_sd=assumed_sd)
    assert basis is not None  # assumed_sd is given
    verdict: Verdict = "inconclusive"
    if interval.low > -margin:
        verdict = "within"
    elif interval.high < -margin:
        verdict = "regression"
    return Decision(
        task, verdict, tuple(off), tuple(on), interval.value, interval.low, interval.high, margin, basis
    )


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
                    labels={"task": task, "variant": variant, "repetition": repetition},
                    command=tuple(command),
                    log=place.with_suffix(".log"),
                    inputs={str(config): hashes[str(config)]},
                    measure=measure,
                    reports=reports,
                )
            )
    return planned


def report(decisions: Sequence[Decision]) -> str:
    """The table of results beside the paper's."""
    rows = []
    for item in decisions:
        paper = PAPER[item.task]
        rows.append(
            [
                item.task,
                f"{statistics.fmean(item.off):.2f}",
                f"{statistics.fmean(item.on):.2f}",
                f"{len(item.off)} / {len(item.on)}",
                f"{item.delta:+.2f} [{item.low:+.2f}, {item.high:+.2f}]",
                item.basis,
                f"{item.margin:.2f}",
                item.verdict,
                f"{paper.off:.2f} -> {paper.on:.2f} ({paper.on - paper.off:+.2f})",
            ]
        )
    headers = [
        "task",
        "off",
        "on",
        "runs",
        "delta [90 %]",
        "spread",
        "margin",
        "verdict",
        "paper, B200 NVFP4",
    ]
    lines = [markdown_table(headers, rows)]
    for item in decisions:
        if item.verdict == "within" and item.detectable:
            word = "better" if item.delta > 0 else "worse"
            lines.append(
                f"{item.task}: within the margin, yet the interval excludes zero (on is {word}); more runs "
                "would show whether that is chance."
            )
        if item.basis == "assumed":
            lines.append(
                f"{item.task}: one run each; the spread is the paper's, not measured here. "
                "Use --runs 2 or more."
            )
    return "\n".join(lines)


def scores(records: Sequence[Mapping[str, Any]], task: str, variant: str) -> list[float]:
    """Scores of the finished runs of one task and variant, in the order of the repetitions."""
    chosen = [
        record
        for record in records
        if record["labels"]["task"] == task and record["labels"]["variant"] == variant
    ]
    chosen.sort(key=lambda record: record["labels"]["repetition"])
    return [record["figures"]["score"] for record in chosen]


def exit_status(decisions: Sequence[Decision], complete: bool) -> int:
    """0 every task within, 1 a regression, 3 inconclusive or something is missing."""
    verdicts = {item.verdict for item in decisions}
    if "regression" in verdicts:
        return 1
    return 0 if complete and verdicts == {"within"} else 3


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
    runs: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 4,
    config_off: Annotated[Path, typer.Option(help="YAML without the heuristic top-k.")] = CONFIGS
    / "dep8_mtp1_off.yaml",
    config_on: Annotated[Path, typer.Option(help="The same YAML with it.")] = CONFIGS / "dep8_mtp1_on.yaml",
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
    store = RunStore(out / "runs.jsonl")
    with clean_exits():
        check_pair(config_off, config_on)
        planned = plan_runs(
            tasks=tasks,
            runs=runs,
            order=order,
            configs={"off": config_off, "on": config_on},
            out=out,
            base_command=[*shlex.split(launcher), "trtllm-eval", "--model", model, *shlex.split(eval_args)],
            task_arguments=arguments,
            config_flag=config_flag,
            json_reports=json_reports,
        )
        if dry_run:
            typer.echo(describe_plan(planned, store))
            return
        with store:
            outcome = execute(
                planned,
                store,
                timeout_s=timeout,
                start_timeout_s=timeout,
                keep_going=keep_going,
                say=typer.echo,
            )
    decisions = []
    for name in tasks:
        off, on = (scores(outcome.records, name, variant) for variant in ("off", "on"))
        if off and on:
            decisions.append(decide(name, off, on, margin=margins[name], assumed_sd=PAPER[name].sd))
        else:
            typer.echo(f"{name}: no decision, {len(off)} runs off and {len(on)} on finished")
    if decisions:
        typer.echo(report(decisions))
        typer.echo(remarks(outcome.records))
    if outcome.failures:
        typer.echo(f"{len(outcome.failures)} of {len(planned)} runs failed")
    result = {
        "decisions": [asdict(item) for item in decisions],
        "runs": outcome.records,
        "failures": outcome.failures,
    }
    (out / "results.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    typer.echo(f"written: {out / 'results.json'}")
    complete = len(outcome.records) == len(planned)
    raise typer.Exit(exit_status(decisions, complete))


if __name__ == "__main__":
    typer.run(main)
