"""Stress runs: launches beside neighbours and under delays, and launches whose arguments are rewritten."""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eval.fuzz.draw import Draw
from eval.stress.stress_cases import GUESSES, Configuration, can_rewrite, rewrite_pool, rewritten_tensor
from eval.stress.stress_library import (
    CHAOS_MODES,
    chaos_files,
    chaos_modes,
    launches_within,
    neighbours_library,
    set_chaos,
)
from eval.stress.stress_neighbours import HANG_SECONDS, Neighbour, make_neighbour, make_rewriter, wait_for
from eval.stress.stress_workload import GUARD_WORDS, Workload

FORMAT = "gvr_topk.stress/1"

QUEUED_REPLAYS = 4
"""Graphs under way, so that the device never waits for the host."""

UNDISTURBED_REPLAYS = 2
"""Replays after a tensor was rewritten, the first from whatever the rewritten launches have left."""


@dataclass(frozen=True)
class Limits:
    """When to stop."""

    deadline: float = float("inf")  # `time.monotonic()` after which nothing more is launched
    hang_seconds: float = HANG_SECONDS  # how long the device may take for one graph

    @property
    def reached(self) -> bool:
        return time.monotonic() > self.deadline

    def within(self, seconds: float) -> "Limits":
        """The same, but for at most so many seconds from now."""
        return Limits(min(self.deadline, time.monotonic() + seconds), self.hang_seconds)


def replay_beside(workload: Workload, neighbour: Neighbour, replays: int, limits: Limits) -> int:
    """Replay a workload with a neighbour at work all the time; returns how often it was replayed."""
    under_way: deque[torch.cuda.Event] = deque()
    spare = [torch.cuda.Event() for _ in range(QUEUED_REPLAYS + 1)] if workload.stream is not None else []
    done = 0
    with neighbour:
        while done < replays and not limits.reached:
            neighbour.feed()
            workload.replay()
            done += 1
            if workload.stream is None:
                continue
            event = spare.pop()
            event.record(workload.stream)
            under_way.append(event)
            if len(under_way) > QUEUED_REPLAYS:
                wait_for(under_way[0], neighbour.feed, limits.hang_seconds)
                spare.append(under_way.popleft())
        for event in under_way:
            wait_for(event, neighbour.feed, limits.hang_seconds)
    return done


def header(mode: str, device: str, seed: int, machine: dict[str, Any]) -> dict[str, Any]:
    """What stands above the results of a run."""
    return {
        "format": FORMAT,
        "mode": mode,
        "device": device,
        "seed": seed,
        "guard_words_behind_each_block": GUARD_WORDS,
        "chaos_build": chaos_modes() > 0,
        "chaos_files": chaos_files(),
        "checked_by_kernel": device == "cuda" and neighbours_library() is not None,
        "stopped_by_time": False,
        "results": [],
        "machine": machine,
    }


@dataclass(frozen=True)
class Run:
    """What all parts of a run need."""

    data: dict[str, Any]  # from `header`; results are added
    limits: Limits
    report: Callable[[dict[str, Any]], None]  # gets each result as soon as it is there

    def stopped(self) -> bool:
        """Note that the time is over, if it is."""
        self.data["stopped_by_time"] |= self.limits.reached
        return self.limits.reached

    def add(self, configuration: Configuration, mode: int, result: dict[str, Any]) -> None:
        delays = {"chaos": mode, "delayed": CHAOS_MODES[mode]}
        self.data["results"].append({"configuration": asdict(configuration), **result, **delays})
        self.report(self.data["results"][-1])


def run_launches(
    run: Run,
    configurations: Sequence[Configuration],
    neighbours: Sequence[str],
    *,
    launches: int,
    chaos_launches: int,
    seconds_each: float,
) -> None:
    """Run every configuration beside every neighbour, and under every kind of delay.

    `launches` of each configuration are spread evenly over the neighbours; where `seconds_each` is more than
    0, it runs beside them for so long instead. `chaos_launches` are spread evenly over the modes of a chaos
    build, in which nothing runs beside.
    """
    device = run.data["device"]
    kept: dict[str, Neighbour] = {}
    wanted = float(2**62) if seconds_each > 0 else launches / len(neighbours)
    parts = [(name, 0, wanted) for name in neighbours if wanted > 0]
    modes = range(1, chaos_modes())
    parts += [("none", mode, chaos_launches / len(modes)) for mode in modes if chaos_launches > 0]
    for configuration in configurations:
        workload = Workload(configuration, device, seed=run.data["seed"])
        for name, mode, share in parts:
            if run.stopped():
                return
            # The second instance is of this configuration; all others may serve again.
            beside = kept.get(name) or make_neighbour(name, device, configuration)
            if beside.workload is None:
                kept[name] = beside
            _delay(mode)
            is_timed = seconds_each > 0 and mode == 0
            limits = run.limits.within(seconds_each / len(neighbours)) if is_timed else run.limits
            result = _run_part(workload, beside, int(-(-share // workload.launches)), limits)
            run.data["stopped_by_time"] |= run.limits.reached if is_timed else result["launches"] < share
            run.add(configuration, mode, result)
    _delay(0)


def _delay(mode: int) -> None:
    """Choose the mode of a chaos build; of another build there is none."""
    if chaos_modes() > 0:
        set_chaos(mode)


def _run_part(workload: Workload, beside: Neighbour, replays: int, limits: Limits) -> dict[str, Any]:
    workload.reset()
    if beside.workload is not None:
        beside.workload.reset()
    started = time.monotonic()
    done = replay_beside(workload, beside, replays, limits)
    counts = workload.counts()
    result = {
        "neighbour": beside.name,
        "seconds": round(time.monotonic() - started, 3),
        **asdict(counts),
        "clean": counts.clean and counts.launches == done * workload.launches,
        "neighbour_groups": beside.groups,
        "neighbour_idle": beside.idle,
    }
    if beside.workload is not None:
        second = beside.workload.counts()
        result["second"] = asdict(second)
        result["clean"] &= second.clean
    return result


def run_rewriting(
    run: Run, configurations: Sequence[Configuration], tensors: Sequence[str], *, seconds: float
) -> None:
    """Rewrite a tensor on another stream while launches run; then compare undisturbed launches.

    While it is rewritten the launches must end, and write nothing but what is theirs. Their results may be
    anything, unless only guesses are rewritten. In a chaos build the modes take turns. `seconds` are for each
    tensor (of `stress_cases.REWRITINGS`), spread evenly over the configurations that have it.
    """
    device, seed = run.data["device"], run.data["seed"]
    draw = Draw(device, seed)
    turns = itertools.cycle(range(max(1, chaos_modes())))
    having = Counter(name for c in configurations for name in tensors if can_rewrite(c, name))
    for configuration in configurations:
        launches = 4 if device == "cpu" else 16
        workload = Workload(configuration, device, launches=launches, seed=seed, rewritable=True)
        for name in tensors:
            if not can_rewrite(configuration, name):
                continue
            if run.stopped():
                return
            mode = next(turns)
            _delay(mode)
            workload.reset()
            workload.restore()
            target = workload.tensor(rewritten_tensor(name))
            rewriter = make_rewriter(target, rewrite_pool(name, configuration, target.shape, draw))
            result = _run_rewritten(workload, rewriter, run.limits, seconds / having[name])
            result["clean"] &= rewritten_tensor(name) not in GUESSES or result["disturbed_launches"] == 0
            run.add(configuration, mode, {"rewritten": name, **result})
    _delay(0)


def _run_rewritten(workload: Workload, rewriter: Neighbour, limits: Limits, seconds: float) -> dict[str, Any]:
    started = time.monotonic()
    done = replay_beside(workload, rewriter, 2**62, limits.within(seconds))
    disturbed = workload.counts()
    stamped, met = 0, 0
    if workload.log is not None and rewriter.log is not None:
        stamped, met = launches_within(workload.log.pairs(), rewriter.log.pairs())
    workload.restore()
    undisturbed = Limits(hang_seconds=limits.hang_seconds)
    replay_beside(workload, Neighbour("none"), UNDISTURBED_REPLAYS, undisturbed)
    after = workload.counts()
    exact_after = after.clean and after.launches == UNDISTURBED_REPLAYS * workload.launches
    return {
        "seconds": round(time.monotonic() - started, 3),
        "launches": done * workload.launches,
        # Launches whose time is known, and those that ran while a kernel was rewriting.
        "timed_launches": stamped,
        "launches_during_rewriting": met,
        # Launches whose result was another one. Some arguments may be rewritten without that.
        "disturbed_launches": disturbed.wrong_launches,
        "guard_words": disturbed.guard_words + after.guard_words,
        "exact_after": exact_after,
        "first_wrong_after": after.first_wrong,
        "rewriter_groups": rewriter.groups,
        "rewriter_idle": rewriter.idle,
        "clean": disturbed.guard_words == 0 and exact_after,
    }


def totals(data: dict[str, Any]) -> dict[str, Any]:
    """Sums over all results."""
    results = data["results"]

    def of(key: str, chosen: Callable[[dict[str, Any]], bool] = lambda result: True) -> int:
        return sum(int(result.get(key, 0)) for result in results if chosen(result))

    launches = of("launches")
    return {
        "configurations": len({result["configuration"]["name"] for result in results}),
        "launches": launches,
        # The rule of three: a share of wrong launches above this would have shown with 95 %.
        "error_bound_95": 3 / launches if launches else None,
        "launches_with_delays": of("launches", lambda result: result["chaos"] > 0),
        "wrong_launches": of("wrong_launches"),
        "wrong_hints": of("wrong_hints"),
        "guard_words": of("guard_words"),
        "clean": all(result["clean"] for result in results)
        and "failure" not in data
        and (bool(results) or bool(data["stopped_by_time"])),
    }
