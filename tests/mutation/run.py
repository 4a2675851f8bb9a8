"""Mutation testing: how many small faults, put into a module one at a time, its tests notice.

    python tests/mutation/run.py --stale
    python tests/mutation/run.py --only gvr_topk/state.py --sample 0

``mutants.py`` makes the faults, ``engine.py`` runs the tests, and ``targets.py`` says which tests those are
and which modules are the product. A mutant is killed when a test fails or runs out of time.

``report.json`` has a row for each module of the product. A row holds for the source that its digest is of;
comments and docstrings are no part of that. ``--stale`` runs the modules whose row is missing or of another
source and writes their rows; without it, and without ``--only``, all are run. The mutants of a module are a
sample in a fixed order, and `targets.SAMPLES` says how large; ``--sample`` takes another number, 0 all. Rows
of a sample of another size are written only to the file that ``--out`` names.

A mutant that changes no behaviour stands in `targets.EQUIVALENT` with the reason, or is left out by a comment
``pragma: no mutate`` on its line, with the reason behind it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from tests.mutation import targets  # noqa: E402
from tests.mutation.engine import prepare, run_mutants  # noqa: E402
from tests.mutation.mutants import SEED, Mutant, digest, draw, mutants  # noqa: E402

FORMAT = "gvr_topk.mutation/2"
REPORT = Path(__file__).with_name("report.json")
JOBS = 2


def source_of(module: str) -> str:
    return (ROOT / module).read_text(encoding="utf-8")


def mutants_of(module: str) -> list[Mutant]:
    """Mutants of a module without those that are known to change no behaviour."""
    known = targets.EQUIVALENT.get(module, {})
    return [mutant for mutant in mutants(source_of(module)) if (mutant.code, mutant.change) not in known]


def stale_modules(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Modules of the product whose row is missing or made from other source text, and what is wrong."""
    digests = {row["module"]: row["digest"] for row in rows}
    found = {}
    for module in targets.product_modules():
        if module not in digests:
            found[module] = "has no row"
        elif digests[module] != digest(source_of(module)):
            found[module] = "has changed since its row was made"
    return found


def make_row(module: str, sample: int, jobs: int) -> dict[str, Any]:
    """Run the sample of one module's mutants."""
    every = mutants_of(module)
    chosen = draw(every, sample)
    alive = []
    start = time.monotonic()
    if chosen:
        alive = [
            number
            for number, status in run_mutants(module, targets.tests_of(module), chosen, jobs)
            if status == 0
        ]
    survivors = [chosen[number] for number in sorted(alive, key=lambda number: chosen[number].line)]
    row = {
        "module": module,
        "digest": digest(source_of(module)),
        "mutants": len(every),
        "run": len(chosen),
        "killed": len(chosen) - len(alive),
        "survivors": [{"code": mutant.code, "change": mutant.change} for mutant in survivors],
    }
    print(f"{module}: {row['killed']} of {row['run']} killed in {time.monotonic() - start:.0f} s", flush=True)
    for mutant in survivors:
        print(f"  {module}:{mutant.line}: {mutant.change}: {mutant.code}", flush=True)
    return row


def write_report(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the rows of the product's modules, sorted, with their sums."""
    product = targets.product_modules()
    kept = sorted((row for row in rows if row["module"] in product), key=lambda row: str(row["module"]))
    run, killed = sum(row["run"] for row in kept), sum(row["killed"] for row in kept)
    report = {
        "format": FORMAT,
        "seed": SEED,
        "run": run,
        "killed": killed,
        "score": round(killed / run, 4) if run else 1.0,
        "modules": kept,
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Rows of a report; none of a file that is missing or in another format."""
    if not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    return list(report["modules"]) if report["format"] == FORMAT else []


def run_modules(modules: Iterable[str], sample: int | None, out: Path | None, jobs: int) -> None:
    """Run modules one after another; each row is written when it is made, beside those that are there."""
    prepare()
    rows = {row["module"]: row for row in rows_in(out)} if out is not None else {}
    run = killed = 0
    for module in modules:
        row = make_row(module, targets.sample_of(module) if sample is None else sample, jobs)
        run, killed = run + row["run"], killed + row["killed"]
        rows[module] = row
        if out is not None:
            write_report(out, rows.values())
    print(f"{killed} of {run} killed" + (f": {100 * killed / run:.1f} %" if run else ""))


def main() -> None:
    product = targets.product_modules()
    parser = argparse.ArgumentParser(description="Count the mutants that the tests notice.")
    parser.add_argument("--only", action="append", choices=product, metavar="MODULE", help="repeatable")
    parser.add_argument("--stale", action="store_true", help="run the modules whose row is missing or old")
    parser.add_argument("--sample", type=int, help="mutants of each module instead of its own; 0 for all")
    parser.add_argument("--out", type=Path, help="the report to write; default: the committed one")
    parser.add_argument("--jobs", type=int, default=JOBS, help="mutants that run at once")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the forks, too
    out = options.out
    if out is None and options.sample is None:
        out = REPORT
    modules = options.only or product
    if options.stale:
        stale = stale_modules(rows_in(out or REPORT))
        modules = [module for module in modules if module in stale]
        for module in modules:
            print(f"{module} {stale[module]}")
    run_modules(modules, options.sample, out, options.jobs)


if __name__ == "__main__":
    main()
