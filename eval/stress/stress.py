"""Run the op beside other work, under delays, and on arguments that are rewritten; compare every launch.

    python -m eval stress --seconds-each 9 --out out/stress.json
    python -m eval stress --launches 0 --chaos-launches 100000 --out out/chaos.json
    python -m eval stress --rewrite --out out/rewrite.json

One graph holds up to 1,024 launches of a configuration: eight chains of decode steps that a predictor follows
or misses, each on a stream of its own, so that launches of the op run beside each other. A neighbour works on
another stream all the time that the graph is replayed. Each replay ends with a comparison, on the device, of
every result and every hint with an oracle computed before, and of the guard words behind every block; results
are poisoned before the next. ``--seconds-each`` gives every configuration the same time in place of the same
number of launches.

Neighbours other than operations of torch, and rewriting, need a library of their own (``make neighbours``).
``--chaos-launches`` needs a build of the op that delays threads (``make chaos``; the environment variable
``GVR_TOPK_LIBRARY_DIR`` names its folder), and gives each mode of it a share of the launches.
With a build that counts lanes at collectives (CMake option ``GVR_TOPK_CHECK_CONVERGED``) stress and fuzz add
the counts to ``convergence.json`` beside ``--out``, and fail where lanes came apart that nothing guards.

With ``--rewrite`` another stream keeps rewriting the state's indices, its words, the lengths, the slots
or the scores, for a minute each; then the words by what other rows would have left, and scores by scores
of quite another scale: six arguments in eight ways. Of prefill the ends of the windows and the rows'
requests stand for lengths and slots. Every launch must end, and no guard word may change. Later launches
must be exact, and so must those whose state is rewritten; other results may be anything. Clocks of the
device say how many launches ran wholly while a kernel was rewriting, because not every argument can
change a result.
"""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import gvr_topk
from eval.common.machine import describe_machine, write_json
from eval.common.options import Commit, Device, names_of, require_device, require_writable
from eval.common.status import REGRESSION, UNDECIDED
from eval.stress import converged
from eval.stress import stress_cases as cases
from eval.stress import stress_neighbours as beside
from eval.stress import stress_run as runs
from eval.stress.stress_library import HOW_TO_BUILD, StressError, chaos_modes, neighbours_library


def _line(result: dict[str, Any]) -> str:
    """One result for a person who watches."""
    name = result["configuration"]["name"]
    beside = result.get("neighbour") or f"{result['rewritten']} rewritten"
    delayed = f", {result['delayed']}" if result["chaos"] else ""
    verdict = "ok"
    if not result["clean"]:
        found = [
            f"{result[key]} {key.replace('_', ' ')}"
            for key in ("wrong_launches", "wrong_hints", "guard_words", "disturbed_launches")
            if result.get(key)
        ]
        verdict = "WRONG " + ", ".join(found or ["launches that follow"])
    return f"{name}: {beside}{delayed}: {result['launches']} launches in {result['seconds']:.1f} s: {verdict}"


def main(
    launches: Annotated[
        int, typer.Option(help="Launches of each configuration beside neighbours.")
    ] = 100_000,
    seconds_each: Annotated[
        float, typer.Option(help="Seconds of each configuration beside neighbours, in place of --launches.")
    ] = 0.0,
    chaos_launches: Annotated[int, typer.Option(help="Launches of each configuration under delays.")] = 0,
    configurations: Annotated[str, typer.Option(help="Names, comma-separated, or all.")] = "all",
    neighbours: Annotated[str, typer.Option(help="Names, comma-separated, or all.")] = "all",
    seconds: Annotated[float, typer.Option(help="Stop after so long; 0: never.")] = 0.0,
    rewrite: Annotated[bool, typer.Option("--rewrite", help="Rewrite arguments during launches.")] = False,
    rewrite_seconds: Annotated[float, typer.Option(help="Time to rewrite each tensor for.")] = 60.0,
    tensors: Annotated[str, typer.Option(help="Tensors to rewrite, comma-separated, or all.")] = "all",
    hang_seconds: Annotated[float, typer.Option(help="Time after which the device is given up.")] = 60.0,
    device: Device = "cuda",
    seed: Annotated[int, typer.Option(help="Seed of the rows.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Results as JSON.")] = None,
    commit: Commit = "",
) -> None:
    """Stress the op."""
    if (
        launches < 0
        or chaos_launches < 0
        or not (rewrite or seconds_each > 0 or launches + chaos_launches > 0)
    ):
        raise typer.BadParameter("--launches and --chaos-launches: wanted at least one launch")
    known = cases.rewritten_configurations() if rewrite else cases.CONFIGURATIONS
    by_name = {configuration.name: configuration for configuration in known}
    chosen = [by_name[name] for name in names_of("--configurations", configurations, tuple(by_name))]
    available = beside.NEIGHBOURS if device == "cuda" else ("none",)
    names = names_of("--neighbours", neighbours, available)
    rewritten = names_of("--tensors", tensors, cases.REWRITINGS)
    require_device(device)
    require_writable(out)
    if device == "cuda" and not gvr_topk.library_status().loaded:
        reason = gvr_topk.library_status().reason
        raise typer.BadParameter(f"--device: wanted a compiled CUDA library, got none: {reason}")
    compiled = rewrite or bool({"sms", "smem", "l1", "dram"} & set(names))
    if device == "cuda" and compiled and neighbours_library() is None:
        raise typer.BadParameter(f"the library of neighbours was not built: {HOW_TO_BUILD}")
    if chaos_launches > 0 and chaos_modes() == 0:
        raise typer.BadParameter("--chaos-launches: the library is no chaos build (GVR_TOPK_CHAOS)")

    started = time.monotonic()
    machine = describe_machine(commit, device)
    data = runs.header("rewrite" if rewrite else "launches", device, seed, machine)
    limits = runs.Limits(started + seconds if seconds > 0 else float("inf"), hang_seconds)

    def save() -> None:
        data["seconds"] = round(time.monotonic() - started, 3)
        data["totals"] = runs.totals(data)
        if out is not None:
            write_json(out, data)

    def report(result: dict[str, Any]) -> None:
        print(_line(result), flush=True)
        save()

    run = runs.Run(data, limits, report)
    hung = False
    try:
        if rewrite:
            runs.run_rewriting(run, chosen, rewritten, seconds=rewrite_seconds)
        else:
            runs.run_launches(
                run,
                chosen,
                names,
                launches=launches,
                chaos_launches=chaos_launches,
                seconds_each=seconds_each,
            )
    except (RuntimeError, ValueError, StressError) as error:
        # Behind an error of the device every later call fails as well, so that nothing more can be run.
        hung = isinstance(error, beside.Hang)
        at = len(data["results"])
        data["failure"] = {"behind_result": at, "hang": hung, "error": str(error).splitlines()[0]}
        print(f"FAILED behind result {at}: {type(error).__name__}: {error}", flush=True)
    save()
    total = data["totals"]
    print(
        f"{total['configurations']} configurations, {total['launches']} launches, "
        f"{total['launches_with_delays']} of them with delays: {total['wrong_launches']} wrong, "
        f"{total['wrong_hints']} wrong hints, {total['guard_words']} guard words overwritten "
        f"in {data['seconds']:.0f} s",
        flush=True,
    )
    if hung:
        os._exit(REGRESSION)  # an ordinary end would wait for the device
    if not converged.record(data, out) or not total["clean"]:
        raise typer.Exit(REGRESSION)
    if data["stopped_by_time"]:
        raise typer.Exit(UNDECIDED)
