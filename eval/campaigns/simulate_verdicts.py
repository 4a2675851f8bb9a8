"""How often the two verdict rules are right: simulated campaigns, through the rules themselves.

    python -m eval verdicts --campaigns 20000 --out eval/results/verdict_simulation.json
    python -m eval verdicts --table

Every campaign has normal runs with the paper's spread from run to run, unless its name says otherwise, in
four accuracy tasks or six TPOT cases. ``looks`` in a row says when somebody looks: after so many runs, or
after every run from 1 to 32, stopping at the first answer. ``--table`` writes the results into
docs/verdicts.md, between its markers. The seed is fixed, and a test repeats every row in small.

Rows without a promise describe power, or what becomes of the rules where their assumptions do not hold:
runs with heavy tails, and a warm-up that is no linear drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from eval.campaigns.accuracy_regression import PAPER as TASKS
from eval.campaigns.tpot_report import PAPER as CASES
from eval.campaigns.tpot_report import paper_sd
from eval.campaigns.verdicts import (
    ERROR_RATE,
    LOOKS,
    Floats,
    Judgement,
    Order,
    judge_difference,
    judge_noninferiority,
    looks_at,
    variant_order,
)
from eval.common.machine import describe_machine, write_json
from eval.common.options import read_results, require_writable
from eval.common.paths import ROOT
from eval.common.tables import markdown_table

FORMAT = "gvr_topk.verdict_simulation/1"
RESULTS = ROOT / "eval" / "results" / "verdict_simulation.json"
DOCS = ROOT / "docs" / "verdicts.md"
BEGIN, END = "<!-- simulation:begin -->", "<!-- simulation:end -->"
SEED = 21

SDS = np.array([task.sd for task in TASKS.values()])
MARGINS = [task.margin for task in TASKS.values()]
TPOT_SDS = np.array([paper_sd(mtp) for mtp, _ in CASES])


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    rule: str  # accuracy or tpot
    name: str  # what is simulated
    counted: str  # what is counted in it
    effect: tuple[float, ...]  # true on - off: in margins for each task, in per cent for each case
    repetitions: int = max(LOOKS)  # runs of each variant, the most that are made
    stopping: bool = False  # whether somebody looks after every run and stops at the first such answer
    bound: str = ""  # at most or at least `limit`, where the rate is promised
    limit: float | None = None
    drift: float = 0.0  # standard deviations of a run (accuracy) or per cent (TPOT), per run
    order: Order = "abba"
    tail: int = 0  # degrees of freedom of Student-distributed runs; 0 for normal ones
    spread_on: float = 1.0  # of the runs with the feature, in that of those without
    warm_up: float = 0.0  # of the first run, in standard deviations; fades by a factor e in three runs


def _stressed(row: partial[Scenario], name: str, drifting: tuple[str, str]) -> list[Scenario]:
    """A false claim, looked for after every run, under everything that might make it frequent."""
    promised = partial(row, stopping=True, bound="at most", limit=ERROR_RATE)
    noisier = (("twice", 2.0), ("3 times", 3.0), ("5 times", 5.0), ("a fifth", 0.2))
    return [
        promised(drifting[0], drift=1.0),
        promised(drifting[1], drift=1.0, order="alternate"),
        row(f"{name}, Student runs (5)", stopping=True, tail=5),
        *(promised(f"{name}, on {word} as noisy", spread_on=spread) for word, spread in noisier),
        row(f"{name}, warm-up of 20 spreads", stopping=True, warm_up=20.0),
    ]


def _scenarios() -> list[Scenario]:
    accuracy, tpot = partial(Scenario, "accuracy"), partial(Scenario, "tpot")
    none, at_margin, same = (0.0,) * 4, (-1.0,) * 4, (0.0,) * 6
    false: dict[str, Any] = {"bound": "at most", "limit": ERROR_RATE}
    passing: dict[str, Any] = {"bound": "at least", "limit": 0.9}
    in_all, lost = "loss of the margin in all tasks", "any within"
    loses = partial(Scenario, "accuracy", counted=lost, effect=at_margin)
    differs = partial(Scenario, "tpot", counted="any difference", effect=same)
    drifting = ("no difference, drift of 1 % a run", "the same, off on off on")
    return [
        *(accuracy("no effect", "all within", none, n, **(passing if n >= 8 else {})) for n in LOOKS),
        accuracy("no effect, drift of 1 spread a run", "all within", none, 8, drift=1.0),
        accuracy(in_all, lost, at_margin, 8, **false),
        accuracy(in_all, lost, at_margin, stopping=True, **false),
        accuracy("the same in one task", "any bad within", (0.0, -1.0, 0.0, 0.0), stopping=True, **false),
        *_stressed(
            loses, "the same", ("the same, drift of 1 spread a run", "the same, drift, off on off on")
        ),
        accuracy(in_all, "any regression", at_margin, stopping=True, **false),
        accuracy("no effect", "any regression", none, stopping=True, **false),
        accuracy("loss of 2 margins in all tasks", "any regression", (-2.0,) * 4, 8),
        accuracy("loss of 2 margins in one task", "any regression", (0.0, 0.0, 0.0, -2.0), 8),
        accuracy("loss of 3 margins in one task", "any regression", (0.0, 0.0, 0.0, -3.0), 8),
        differs("no difference", repetitions=8, **false),
        differs("no difference", stopping=True, **false),
        *_stressed(differs, "no difference", drifting),
        tpot("5 % faster, warm-up of 20 spreads", "shown per case", (-5.0,) * 6, 8, warm_up=20.0),
        *(
            tpot(f"{percent} % faster in all cases", "shown per case", (-float(percent),) * 6, count)
            for percent in (1, 2, 5)
            for count in (6, 8, 16)
        ),
    ]


SCENARIOS = _scenarios()


def simulate(scenario: Scenario, campaigns: int, seed: int = SEED) -> float:
    """Share of campaigns in which what is counted happens."""
    off, on = _runs(scenario, campaigns, np.random.default_rng(seed))
    happened = np.zeros((campaigns, len(scenario.effect)), dtype=bool)
    counts = [count for count in LOOKS if count <= scenario.repetitions]
    # Verdicts change at looks only, so that looking after every run is looking at those.
    for count in counts if scenario.stopping else counts[-1:]:
        looks = [
            looks_at(off[:, index, :count], on[:, index, :count], scenario.order)
            for index in range(off.shape[1])
        ]
        accuracy = scenario.rule == "accuracy"
        judged = judge_noninferiority(looks, MARGINS) if accuracy else judge_difference(looks)
        happened |= _counted(scenario, judged)
    if scenario.counted == "shown per case":
        return float(happened.mean())
    return float((happened.all if scenario.counted == "all within" else happened.any)(axis=-1).mean())


def _runs(scenario: Scenario, campaigns: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Values of all runs, ``[campaigns, tasks, repetitions]``, in points or logarithms of milliseconds."""
    shape = (2, campaigns, len(scenario.effect), scenario.repetitions)
    noise = rng.standard_normal(shape)
    if scenario.tail:  # scaled to the same variance
        noise /= np.sqrt(rng.chisquare(scenario.tail, shape) / scenario.tail)
        noise *= math.sqrt((scenario.tail - 2) / scenario.tail)
    accuracy = scenario.rule == "accuracy"
    sds = SDS if accuracy else TPOT_SDS
    unit = np.array(MARGINS) if accuracy else np.full(len(scenario.effect), 0.01)
    off, on = noise * sds[:, None]
    on = scenario.spread_on * on + (np.array(scenario.effect) * unit)[:, None]
    step, warm_up = scenario.drift * (sds if accuracy else unit), scenario.warm_up * sds
    for position, (repetition, variant) in enumerate(variant_order(scenario.repetitions, scenario.order)):
        side = off if variant == "off" else on
        side[..., repetition - 1] += position * step + math.exp(-position / 3) * warm_up
    return off, on


def _counted(scenario: Scenario, judgement: Judgement) -> Any:
    if scenario.counted in ("all within", "any within", "shown per case"):
        return judgement.good
    if scenario.counted == "any bad within":
        return judgement.good & (np.array(scenario.effect) <= -1.0)
    return judgement.bad if scenario.counted == "any regression" else judgement.good | judgement.bad


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for row in results["rows"]:
        looks = f"after every run, to {row['repetitions']}" if row["stopping"] else f"at {row['repetitions']}"
        promised = f"{row['bound']} {100 * row['limit']:.0f} %" if row["bound"] else "-"
        rows.append([row["rule"], row["name"], looks, row["counted"], f"{100 * row['rate']:.1f} %", promised])
    headers = ["rule", "truth", "looks", "counted", "campaigns", "promised"]
    head = f"{results['campaigns']:,} campaigns a row, seed {results['seed']}."
    return f"{head}\n\n{markdown_table(headers, rows)}"


def fill_in(text: str, results: Mapping[str, Any]) -> str:
    """A document with the table between its markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}"


def main(
    campaigns: Annotated[int, typer.Option(min=1, help="Simulated campaigns for each row.")] = 20_000,
    out: Annotated[Path, typer.Option(help="Where to write the results.")] = RESULTS,
    only_table: Annotated[
        bool,
        typer.Option("--table", help="Simulate nothing; write the results that lie there into the docs."),
    ] = False,
) -> None:
    """Simulate campaigns, and write how often each rule is right."""
    if not only_table:
        require_writable(out)
        machine = describe_machine(device="cpu")
        results = {
            "format": FORMAT,
            **{name: machine[name] for name in ("commit", "date")},
            "campaigns": campaigns,
            "seed": SEED,
            "error_rate": ERROR_RATE,
            "looks": LOOKS,
            "rows": [{**asdict(row), "rate": simulate(row, campaigns)} for row in SCENARIOS],
        }
        write_json(out, results)
    results = read_results(out, FORMAT)
    DOCS.write_text(fill_in(DOCS.read_text(encoding="utf-8"), results), encoding="utf-8")
    typer.echo(table(results))
