"""Does the heuristic top-k change a model's accuracy? Runs trtllm-eval off and on, and decides.

    python -m eval accuracy --model MODEL --runs 8 --out out/accuracy --dry-run

Per task, in points of per cent, with a margin for the largest loss that is accepted:

* ``within``: a loss as large as the margin is excluded (non-inferiority).
* ``regression``: the loss is larger than the margin.
* ``inconclusive``: neither is shown; more runs may show it.

The margin is the run-to-run spread that the paper saw in the same task (largest minus smallest score of
repeated runs of one configuration, appendix G), at least 0.1 point. `--margin TASK=POINTS` sets another
one; choose it before the first run.

The chance of any false verdict of a kind is at most 5 %, over all tasks together and whenever one stops; a
verdict may change at 6, 8, 12, 16 and 32 runs of each variant (docs/verdicts.md, which also says what so many
runs can show).

What the comparison can show: the short-answer tasks hardly reach the decode-stage top-k at all (a row
shorter than index_topk has no choice to make); LongBench does. A run counts only if its log shows that the
heuristic top-k was on (or off, on the other side). Where all rows of a task are short, TensorRT-LLM may skip
the top-k, and the run is no evidence: use ``--task longbench_v1`` alone.

An interrupted evaluation goes on where it stopped when the same command is given again, on the same builds
and GPU.
"""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from eval.campaigns.configs import check_pair, combined_configs
from eval.campaigns.evidence import build_identity
from eval.campaigns.reports import EVAL_TASKS, read_eval_log
from eval.campaigns.runs import Comparison, Limits, PlannedRun, refuse_repeats, run_campaign
from eval.campaigns.store import RunStore, text_hash
from eval.campaigns.verdicts import next_look, variant_order
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

    Mean scores without and with the heuristic top-k, in points, and the smallest and largest score of the
    configuration that was run several times.
    """

    off: float
    on: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        return max(self.high - self.low, MARGIN_FLOOR)


PAPER = {
    "mmlu": Published(87.51, 87.50, 87.49, 87.52),
    "gsm8k": Published(95.11, 95.23, 95.03, 95.49),
    "gpqa_diamond": Published(77.27, 77.15, 75.25, 78.79),
    "longbench_v1": Published(44.61, 44.28, 44.25, 45.01),
}

TASK_ARGUMENTS = {
    # "Thinking mode" in the paper; arguments of TensorRT-LLM's guide to DeepSeek-V3.2.
    "gpqa_diamond": """--apply_chat_template --chat_template_kwargs '{"thinking": true}'"""
    " --max_output_length 120000"
}


def plan_runs(
    tasks: Mapping[str, Sequence[str]],
    runs: int,
    configs: Mapping[str, Path],
    out: Path,
    command: Sequence[str],
    build: Mapping[str, str],
) -> list[PlannedRun]:
    """Every run, task by task with its arguments, off and on in turn."""
    hashes = {str(path): text_hash(path.read_text()) for path in configs.values()}
    return [
        PlannedRun(
            labels={"task": task, "variant": variant, "repetition": repetition},
            command=(*command, str(configs[variant]), task, *arguments),
            log=out / task / f"{variant}_{repetition}.log",
            inputs={str(configs[variant]): hashes[str(configs[variant])]},
            measure=partial(read_eval_log, task),
            build=build,
        )
        for task, arguments in tasks.items()
        for repetition, variant in variant_order(runs)
    ]


def report(comparisons: Sequence[Comparison]) -> str:
    """The table of results beside the paper's."""
    rows, remarks = [], []
    for item in comparisons:
        task, got, paper = item.case["task"], item.decision, PAPER[item.case["task"]]
        if got.difference is None:
            remarks.append(f"{task}: no decision, no repetition has finished both off and on")
            continue
        ends = "" if got.low is None else f" [{got.low:+.2f}, {got.high:+.2f}]"
        rows.append(
            [
                task,
                *(f"{statistics.fmean(side):.2f}" for side in (item.off, item.on)),
                str(got.repetitions),
                f"{got.difference:+.2f}{ends}",
                *(f"{got.margin:.2f}", f"{got.p_good:.3f}", f"{got.p_bad:.3f}", got.verdict),
                f"{paper.off:.2f} -> {paper.on:.2f} ({paper.on - paper.off:+.2f})",
            ]
        )
        excludes_zero = got.low is not None and got.high is not None and not got.low <= 0 <= got.high
        if got.verdict == "within" and excludes_zero:
            word = "better" if got.difference > 0 else "worse"
            remarks.append(f"{task}: within the margin, yet the interval excludes zero (on is {word}).")
        if got.verdict == "inconclusive":
            told = (
                "still open after the last look; such a campaign cannot tell this difference from the margin."
            )
            if (look := next_look(got.repetitions)) is not None:
                told = f"open; the next look is at {look} runs of each variant."
            remarks.append(f"{task}: {told}")
    headers = ["task", "off", "on", "runs", "delta [90 %, all tasks and looks]", "margin"]
    headers += ["p within", "p regression", "verdict", "paper, B200 NVFP4"]
    return "\n".join([*([markdown_table(headers, rows)] if rows else []), *remarks])


def _by_task(values: Sequence[str], option: str) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for task, separator, _ in pairs:
        if not separator or task not in EVAL_TASKS:
            raise typer.BadParameter(
                f"wanted TASK=..., TASK one of {', '.join(EVAL_TASKS)}, got {values}", param_hint=option
            )
    refuse_repeats([task for task, _, _ in pairs], option)
    return {task: text for task, _, text in pairs}


def _points(text: str) -> float:
    try:
        margin = float(text)
    except ValueError:
        margin = math.nan
    if not margin > 0:
        raise typer.BadParameter(f"wanted a positive number of points, got {text!r}", param_hint="--margin")
    return margin


def main(
    model: Annotated[str, typer.Option(help="Model name or checkpoint folder, as for trtllm-eval.")],
    task: Annotated[list[str] | None, typer.Option(help="Repeatable. Default: all four.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 8,
    config_off: Annotated[Path, typer.Option(help="YAML without the heuristic top-k.")] = CONFIGS
    / "eval_dep8_mtp1_off.yaml",
    config_on: Annotated[Path, typer.Option(help="The same YAML with it.")] = CONFIGS
    / "eval_dep8_mtp1_on.yaml",
    out: Annotated[Path, typer.Option(help="Folder for logs, the run store and results.")] = Path(
        "out/accuracy"
    ),
    margin: Annotated[list[str] | None, typer.Option(help="TASK=POINTS, repeatable.")] = None,
    task_args: Annotated[list[str] | None, typer.Option(help="TASK='arguments', in place of ours.")] = None,
    eval_args: Annotated[
        str, typer.Option(help="Arguments of trtllm-eval before the task.")
    ] = "--custom_tokenizer deepseek_v32",
    timeout: Annotated[float, typer.Option(help="Seconds for one run.")] = 6 * 3600.0,
    keep_going: Annotated[bool, typer.Option(help="Go on after a failed run.")] = True,
    launcher: Annotated[str, typer.Option(help="Words before it, as trtllm-llmapi-launch.")] = "",
    config_flag: Annotated[str, typer.Option(help="Or --extra_llm_api_options.")] = "--config",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and stop.")] = False,
) -> None:
    """Run trtllm-eval with the heuristic top-k off and on, and decide whether accuracy holds."""
    tasks = task or list(EVAL_TASKS)
    if unknown := [name for name in tasks if name not in EVAL_TASKS]:
        wanted = f"wanted {', '.join(EVAL_TASKS)}, got {', '.join(unknown)}"
        raise typer.BadParameter(wanted, param_hint="--task")
    refuse_repeats(tasks, "--task")
    given = {name: _points(text) for name, text in _by_task(margin or [], "--margin").items()}
    margins = {name: given.get(name, PAPER[name].margin) for name in tasks}
    arguments = TASK_ARGUMENTS | _by_task(task_args or [], "--task-args")
    store = RunStore(out / "runs")
    check_pair(config_off, config_on)
    program = [*shlex.split(launcher), PROGRAM]
    planned = plan_runs(
        {name: shlex.split(arguments.get(name, "")) for name in tasks},
        runs,
        {"off": config_off, "on": config_on},
        out,
        [*program, "--model", model, *shlex.split(eval_args), config_flag],
        build_identity(PROGRAM),
    )
    cases = [{"task": name} for name in tasks]
    family = store.family(cases)
    outcome = run_campaign(
        planned, store, Limits(timeout, timeout, keep_going), program=program, option=PROGRAM, dry_run=dry_run
    )
    compared = outcome.compare(cases, "score", family, margins=list(margins.values()), resolution=RESOLUTION)
    typer.echo(report(compared))
    outcome.report(out, family, compared)
    verdicts = {item.decision.verdict for item in compared}
    if "regression" in verdicts:
        raise typer.Exit(REGRESSION)
    within = verdicts == {"within"} and len(outcome.records) == len(planned)
    raise typer.Exit(TOOL_FAULT if outcome.faulty else 0 if within else UNDECIDED)
