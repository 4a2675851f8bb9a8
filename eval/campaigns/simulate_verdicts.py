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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from eval.campaigns.accuracy_regression import PAPER as TASKS
from eval.campaigns.order import Order, variant_order
from eval.campaigns.sequential import LOOKS, Floats, looks_at
from eval.campaigns.tpot_report import PAPER as CASES
from eval.campaigns.tpot_report import paper_sd
from eval.campaigns.verdicts import ERROR_RATE, Judgement, judge_difference, judge_noninferiority
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

Count = Callable[[Judgement], Floats]


@dataclass(frozen=True)
class Scenario:
    """One row of the table.

    Attributes
    ----------
    name, counted : str
        What is simulated, and what is counted in it.
    rule : str
        ``accuracy`` or ``tpot``.
    effect : tuple of float
        True ``on - off``: in margins for each task, in per cent for each case.
    repetitions : int
        Runs of each variant, the most that are made.
    stopping : bool
        Whether somebody looks after every run and stops at the first answer of the kind that is counted.
    bound : str
        ``at most`` or ``at least`` with `limit`, where the rate is promised; empty for a description.
    drift : float
        Standard deviations of a run (accuracy) or per cent (TPOT), per run.
    order : str
    tail : int
        Degrees of freedom of Student-distributed runs; 0 for normal ones.
    spread_on : float
        Spread of the runs with the feature, in that of those without.
    warm_up : float
        Standard deviations of a run by which the first run is off; fades by a factor e in three runs.
    """

    name: str
    counted: str
    rule: str
    effect: tuple[float, ...]
    repetitions: int
    stopping: bool = False
    bound: str = ""
    limit: float = math.nan
    drift: float = 0.0
    order: Order = "abba"
    tail: int = 0
    spread_on: float = 1.0
    warm_up: float = 0.0


NONE4, NONE6 = (0.0,) * 4, (0.0,) * 6
AT_MARGIN = (-1.0,) * 4
MOST = max(LOOKS)
NOISIER = (("twice", 2.0), ("3 times", 3.0), ("5 times", 5.0), ("a fifth", 0.2))
FALSE: dict[str, Any] = {"bound": "at most", "limit": ERROR_RATE}


def _noisier(name: str, counted: str, rule: str, effect: tuple[float, ...]) -> list[Scenario]:
    """A scenario whose runs with the feature spread more, or less, than those without."""
    return [
        Scenario(f"{name}, on {word} as noisy", counted, rule, effect, MOST, True, spread_on=spread, **FALSE)
        for word, spread in NOISIER
    ]


SCENARIOS = (
    *(Scenario("no effect", "all within", "accuracy", NONE4, count) for count in LOOKS if count < 8),
    *(
        Scenario("no effect", "all within", "accuracy", NONE4, count, bound="at least", limit=0.9)
        for count in LOOKS
        if count >= 8
    ),
    Scenario("no effect, drift of 1 spread a run", "all within", "accuracy", NONE4, 8, drift=1.0),
    Scenario("loss of the margin in all tasks", "any within", "accuracy", AT_MARGIN, 8, **FALSE),
    Scenario("loss of the margin in all tasks", "any within", "accuracy", AT_MARGIN, MOST, True, **FALSE),
    Scenario(
        "the same in one task", "any bad within", "accuracy", (0.0, -1.0, 0.0, 0.0), MOST, True, **FALSE
    ),
    Scenario(
        "the same, drift of 1 spread a run",
        "any within",
        "accuracy",
        AT_MARGIN,
        MOST,
        True,
        drift=1.0,
        **FALSE,
    ),
    Scenario(
        "the same, drift, off on off on",
        "any within",
        "accuracy",
        AT_MARGIN,
        MOST,
        True,
        drift=1.0,
        order="alternate",
        **FALSE,
    ),
    Scenario("the same, Student runs (5)", "any within", "accuracy", AT_MARGIN, MOST, True, tail=5),
    *_noisier("the same", "any within", "accuracy", AT_MARGIN),
    Scenario(
        "the same, warm-up of 20 spreads", "any within", "accuracy", AT_MARGIN, MOST, True, warm_up=20.0
    ),
    Scenario("loss of the margin in all tasks", "any regression", "accuracy", AT_MARGIN, MOST, True, **FALSE),
    Scenario("no effect", "any regression", "accuracy", NONE4, MOST, True, **FALSE),
    Scenario("loss of 2 margins in all tasks", "any regression", "accuracy", (-2.0,) * 4, 8),
    Scenario("loss of 2 margins in one task", "any regression", "accuracy", (0.0, 0.0, 0.0, -2.0), 8),
    Scenario("loss of 3 margins in one task", "any regression", "accuracy", (0.0, 0.0, 0.0, -3.0), 8),
    Scenario("no difference", "any difference", "tpot", NONE6, 8, **FALSE),
    Scenario("no difference", "any difference", "tpot", NONE6, MOST, True, **FALSE),
    Scenario(
        "no difference, drift of 1 % a run", "any difference", "tpot", NONE6, MOST, True, drift=1.0, **FALSE
    ),
    Scenario(
        "the same, off on off on",
        "any difference",
        "tpot",
        NONE6,
        MOST,
        True,
        drift=1.0,
        order="alternate",
        **FALSE,
    ),
    Scenario("no difference, Student runs (5)", "any difference", "tpot", NONE6, MOST, True, tail=5),
    *_noisier("no difference", "any difference", "tpot", NONE6),
    Scenario(
        "no difference, warm-up of 20 spreads", "any difference", "tpot", NONE6, MOST, True, warm_up=20.0
    ),
    Scenario("5 % faster, warm-up of 20 spreads", "shown per case", "tpot", (-5.0,) * 6, 8, warm_up=20.0),
    *(
        Scenario(f"{percent} % faster in all cases", "shown per case", "tpot", (-float(percent),) * 6, count)
        for percent in (1, 2, 5)
        for count in (6, 8, 16)
    ),
)


def simulate(scenario: Scenario, campaigns: int, seed: int = SEED) -> float:
    """Share of campaigns in which what is counted happens."""
    off, on = _runs(scenario, campaigns, np.random.default_rng(seed))
    happened = np.zeros((campaigns, len(scenario.effect)), dtype=bool)
    # Verdicts change at looks only, so that looking after every run is looking at those.
    for count in [count for count in LOOKS if count <= scenario.repetitions]:
        if scenario.stopping or count == _last(scenario):
            happened |= _counted(scenario, _judge(scenario, off[..., :count], on[..., :count]))
    if scenario.counted == "all within":
        return float(happened.all(axis=-1).mean())
    if scenario.counted == "shown per case":
        return float(happened.mean())
    return float(happened.any(axis=-1).mean())


def _last(scenario: Scenario) -> int:
    return max(count for count in LOOKS if count <= scenario.repetitions)


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
    step = scenario.drift * (sds if accuracy else unit)
    warm_up = scenario.warm_up * sds
    for position, (repetition, variant) in enumerate(variant_order(scenario.repetitions, scenario.order)):
        (off if variant == "off" else on)[..., repetition - 1] += (
            position * step + math.exp(-position / 3) * warm_up
        )
    return off, on


def _judge(scenario: Scenario, off: Floats, on: Floats) -> Judgement:
    looks = [looks_at(off[:, index], on[:, index], scenario.order) for index in range(off.shape[1])]
    if scenario.rule == "accuracy":
        return judge_noninferiority(looks, MARGINS)
    return judge_difference(looks)


def _counted(scenario: Scenario, judgement: Judgement) -> Any:
    if scenario.counted in ("all within", "any within", "shown per case"):
        return judgement.good
    if scenario.counted == "any bad within":
        return judgement.good & (np.array(scenario.effect) <= -1.0)
    if scenario.counted == "any regression":
        return judgement.bad
    return judgement.good | judgement.bad


def run_all(campaigns: int) -> list[dict[str, Any]]:
    """Every scenario with its rate, as plain data."""
    return [
        {
            **{key: value for key, value in asdict(scenario).items() if value == value},
            "rate": simulate(scenario, campaigns),
        }
        for scenario in SCENARIOS
    ]


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for row in results["rows"]:
        looks = f"after every run, to {row['repetitions']}" if row["stopping"] else f"at {row['repetitions']}"
        promised = f"{row['bound']} {100 * row['limit']:.0f} %" if row["bound"] else "-"
        rate = f"{100 * row['rate']:.1f} %"
        rows.append([row["rule"], row["name"], looks, row["counted"], rate, promised])
    headers = ["rule", "truth", "looks", "counted", "campaigns", "promised"]
    head = f"{results['campaigns']:,} campaigns a row, seed {results['seed']}."
    return f"{head}\n\n{markdown_table(headers, rows)}"


def fill_in(text: str, results: Mapping[str, Any]) -> str:
    """A document with the table between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


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
            "commit": machine["commit"],
            "date": machine["date"],
            "campaigns": campaigns,
            "seed": SEED,
            "error_rate": ERROR_RATE,
            "looks": LOOKS,
            "rows": run_all(campaigns),
        }
        write_json(out, results)
    results = read_results(out, FORMAT)
    DOCS.write_text(fill_in(DOCS.read_text(encoding="utf-8"), results), encoding="utf-8")
    typer.echo(table(results))
