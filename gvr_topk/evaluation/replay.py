"""Run decode steps through the whole path a serving engine takes, and measure what the hint is worth.

configuration -> gate -> `RequestSlots` -> op -> check against `oracle.sorted_topk`, step by step. The op also
runs on each path with a state of the path's own, for the statistics of the hint. On request the paper's four
phases (`paper_reference.topk_row`) run too, with each hint offset and first guess, for the statistics that
the paper reports.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gvr_topk.config import GvrTopkConfig, ServeConfig
from gvr_topk.constants import MAX_WIDTH, STATE_UNKNOWN, GuessSource, HintReason, StatsColumn
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.evaluation.paper_reference import CAPACITY, GuessKind, RowStats, topk_row
from gvr_topk.evaluation.trace import ScoreSource
from gvr_topk.ops import indexer_topk_decode
from gvr_topk.policy import GateDecision, asks_for_hint, can_use_heuristic, parse_path
from gvr_topk.request_slots import RequestSlots
from gvr_topk.state import TopkState

FORMAT = "gvr_topk.replay/5"
"""Name of the JSON layout."""

PATHS = ("auto", "no_hint", "radix_rounds")
"""Paths that run at every step, whatever the configuration asks for."""

_POISON = -7
_REQUEST = "replay"
_CONFIGURED_OUT = (HintReason.TOO_SHORT, HintReason.TOO_LONG)


@dataclass(frozen=True)
class StepStats:
    """One row of the op's statistics: `gvr_topk.constants.StatsColumn`, in its order.

    The CPU implementation fills `reason` and `hits` alone.
    """

    reason: HintReason
    passes: int
    candidates: int
    snap: int
    hits: int
    guess: GuessSource
    guess_hit: int
    done: int

    @classmethod
    def of(cls, row: Tensor) -> StepStats:
        """Return the statistics in a tensor of one row."""
        columns = dict(zip((column.name.lower() for column in StatsColumn), row.tolist(), strict=True))
        columns["reason"], columns["guess"] = HintReason(columns["reason"]), GuessSource(columns["guess"])
        return cls(**columns)


@dataclass(frozen=True)
class Variant:
    """One way in which the paper's kernel takes its first threshold from the hint."""

    hint_offset: int
    guess: GuessKind

    configured: bool = False
    """Whether the replayed configuration makes the op take its first threshold this way."""

    @property
    def label(self) -> str:
        return f"offset {self.hint_offset}, {self.guess}"


@dataclass(frozen=True)
class StepRecord:
    """One decode step."""

    step: int  # its index
    length: int  # keys it sees
    allowed: bool  # whether the state of the last step is used
    gate: str  # the gate's reason: lower-case name of a `gvr_topk.constants.HintReason`
    exact: bool  # the op returned what `oracle.sorted_topk` returns, as configured and on every path
    paper_exact: bool  # the paper's four phases returned the same in every variant
    op_stats: StepStats  # the op's statistics as configured
    paths: tuple[StepStats, ...]  # the op's statistics, in the order of `PATHS`
    variants: tuple[RowStats, ...]  # of the paper's four phases, in the order of `ReplayResult.variants`


@dataclass(frozen=True)
class ReplayResult:
    """Outcome of a replay."""

    source: str
    device: str
    k: int
    options: GvrTopkConfig
    heuristic_enabled: bool
    variants: tuple[Variant, ...]
    records: tuple[StepRecord, ...]
    seconds: float

    @property
    def exact_steps(self) -> int:
        """Steps on which the op and the paper's four phases met the contract."""
        return sum(record.exact and record.paper_exact for record in self.records)

    @property
    def is_exact(self) -> bool:
        return self.exact_steps == len(self.records)

    def selected(self, path: int) -> list[StepStats]:
        """The op's statistics on a path, of the steps after the first that had something to select."""
        rows = (record.paths[path] for record in self.records[1:])
        return [row for row in rows if row.reason is not HintReason.SHORT_ROW]

    def hinted(self, variant: int) -> list[RowStats]:
        """Statistics of the paper's four phases of the steps that had a hint and something to search."""
        rows = (record.variants[variant] for record in self.records)
        return [row for row in rows if row.hint_valid and row.done != "short"]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON."""
        return {
            "format": FORMAT,
            "source": self.source,
            "device": self.device,
            "k": self.k,
            "options": self.options.model_dump(),
            "heuristic_enabled": self.heuristic_enabled,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "steps": len(self.records),
            "exact_steps": self.exact_steps,
            "seconds": round(self.seconds, 3),
            "paths": {path: summarize_path(self.selected(index), self.k) for index, path in enumerate(PATHS)},
            "variants": [
                {
                    "label": variant.label,
                    **summarize(self.hinted(index)),
                    "hit_ratio": [record.variants[index].hit_ratio for record in self.records],
                }
                for index, variant in enumerate(self.variants)
            ],
            "records": [asdict(record) for record in self.records],
        }


def summarize_path(rows: list[StepStats], k: int) -> dict[str, Any]:
    """Figures of many steps of the op on one path.

    Returns
    -------
    dict
        ``rows``; ``hit_ratio`` of the last step's positions; ``used``, the share of rows whose gate allowed
        the hint; ``interval_held``, of the rows with a first interval the share in which it held the k-th
        score, so that one look at the row was enough; ``missed`` and ``radix_rounds``, numbers of rows that
        took a second look, and radix rounds; ``passes_mean`` over the row; ``candidates_mean`` and
        ``candidates_max``, elements listed in the interval. None without rows. The CPU implementation
        guesses and counts nothing, so only the first three say something there.
    """
    guessed = [row for row in rows if row.guess is not GuessSource.NONE]
    return {
        "rows": len(rows),
        "hit_ratio": _mean([row.hits / k for row in rows if row.hits >= 0]),
        "used": _mean([row.reason is HintReason.USED for row in rows]),
        "interval_held": _mean([bool(row.guess_hit) for row in guessed]),
        "missed": sum(not row.guess_hit for row in guessed),
        "radix_rounds": sum(row.done > 0 for row in rows),
        "passes_mean": _mean([row.passes for row in rows]),
        "candidates_mean": _mean([row.candidates for row in rows]),
        "candidates_max": max((row.candidates for row in rows), default=None),
    }


def summarize(rows: list[RowStats]) -> dict[str, Any]:
    """Figures of many rows of the paper's kernel, defined as in the paper (sections 4.2.2 and 4.2.4).

    Returns
    -------
    dict
        ``rows``; ``hit_ratio_mean``; ``passes_within`` (share done in 1, 2, 3 and 4 passes) and
        ``passes_max``; ``candidates_mean``, ``candidates_median``; ``snap_within_5``,
        ``snap_within_8`` and ``snap_max`` over rows whose candidates exceed k. None without rows.
    """
    passes = np.array([row.passes for row in rows])
    candidates = np.array([row.candidates for row in rows])
    snaps = np.array([row.snap_iterations for row in rows if row.candidates > row.k])
    return {
        "rows": len(rows),
        "hit_ratio_mean": _mean([row.hit_ratio for row in rows]),
        "passes_within": [_mean(passes <= limit) for limit in (1, 2, 3, 4)],
        "passes_max": int(passes.max()) if len(passes) else None,
        "candidates_mean": _mean(candidates),
        "candidates_median": float(np.median(candidates)) if len(candidates) else None,
        "snap_within_5": _mean(snaps <= 5),
        "snap_within_8": _mean(snaps <= 8),
        "snap_max": int(snaps.max()) if len(snaps) else None,
    }


def replay(
    source: ScoreSource,
    config: ServeConfig,
    *,
    k: int | None = None,
    hint_offset: int | None = None,
    steps: int | None = None,
    device: str = "cpu",
    paper: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay consecutive decode steps of one layer and one request, the first `steps` of them (default: all).

    `config` decides as in serving whether the hint is used, k, offset and forced path; `k` and `hint_offset`
    overrule it. `device` is ``cpu`` or ``cuda``. `paper` runs the paper's four phases as well, in every
    variant. `on_step` is called with the number of finished steps. An argument out of range is a
    `ValueError`.
    """
    k = config.index_topk if k is None else k
    count = source.steps if steps is None else steps
    _check(source, k, count, device)
    options = config.gvr_topk
    if hint_offset is not None:
        options = options.model_copy(update={"hint_offset": hint_offset})
    variants = _variants(options.hint_offset) if paper else ()
    started = time.perf_counter()
    with _one_thread():
        path = _ServingPath(source, config, options, k, count, device)
        records = _run(source, path, variants, k, count, on_step)
    return ReplayResult(
        source=source.name,
        device=path.device_name,
        k=k,
        options=options,
        heuristic_enabled=config.heuristic_enabled,
        variants=variants,
        records=tuple(records),
        seconds=time.perf_counter() - started,
    )


def _run(
    source: ScoreSource,
    path: _ServingPath,
    variants: tuple[Variant, ...],
    k: int,
    count: int,
    on_step: Callable[[int], None] | None,
) -> list[StepRecord]:
    records: list[StepRecord] = []
    alphas: list[float | None] = [None] * len(variants)
    for step in range(count):
        scores = source.scores(step)
        hint = path.hint()
        decision, got, op_stats = path.step(scores)
        expected = sorted_topk(torch.from_numpy(scores)[None], torch.tensor([len(scores)]), k)[0]
        by_path = path.step_each(decision)
        rows = [
            topk_row(
                scores,
                k,
                hint,
                hint_offset=variant.hint_offset,
                guess=variant.guess,
                alpha=alphas[index],
                capacity=max(CAPACITY, 3 * k),
            )
            for index, variant in enumerate(variants)
        ]
        alphas = [row.stats.alpha for row in rows]
        records.append(
            StepRecord(
                step=step,
                length=len(scores),
                allowed=decision.allowed,
                gate=decision.reason,
                exact=all(torch.equal(each, expected) for each in (got, *(out for out, _ in by_path))),
                paper_exact=all(np.array_equal(row.indices, expected.numpy()) for row in rows),
                op_stats=op_stats,
                paths=tuple(stats for _, stats in by_path),
                variants=tuple(row.stats for row in rows),
            )
        )
        if on_step is not None:
            on_step(step + 1)
    return records


class _ServingPath:
    """One layer and one request, as an engine holds them: fixed buffers, state on the device."""

    def __init__(
        self,
        source: ScoreSource,
        config: ServeConfig,
        options: GvrTopkConfig,
        k: int,
        steps: int,
        device: str,
    ) -> None:
        self.device = torch.device(device)
        self.options, self.k = options, k
        self.enabled = config.heuristic_enabled
        # Wider than any row but the widest, as an engine's buffer is, and a multiple of 4, so that rows stay
        # aligned.
        width = min((max(source.length(step) for step in range(steps)) // 64 + 1) * 64, MAX_WIDTH)
        self.logits = torch.empty((1, width), dtype=torch.float32, device=self.device)
        self.seq_lens = torch.empty(1, dtype=torch.int32, device=self.device)
        self.out = torch.empty((1, k), dtype=torch.int32, device=self.device)
        self.stats = torch.empty((1, len(StatsColumn)), dtype=torch.int32, device=self.device)
        self.requests = RequestSlots(1, 1, k, device=self.device)
        self.slot = self.requests.admit(_REQUEST)
        self.states = {path: TopkState(1, k, device=self.device) for path in PATHS}
        on_gpu = self.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(self.device) if on_gpu else "cpu"

    def hint(self) -> npt.NDArray[np.int32]:
        """Return the positions that the coming step will read as its hint."""
        positions = self.requests.indices
        assert positions is not None  # a replay reports hit ratios, so it keeps them
        return positions[0, self.slot].cpu().numpy().copy()

    def step(self, scores: npt.NDArray[np.float32]) -> tuple[GateDecision, Tensor, StepStats]:
        """Run gate and op for one step, on poisoned buffers."""
        self._load(scores)
        decision = self.decide(len(scores))
        row_slot = self.requests.set_rows([None if self.is_refused(decision) else _REQUEST])
        out, stats = self._call(self.options.path, self.requests.layer(0), row_slot)
        return decision, out, stats

    def step_each(self, decision: GateDecision) -> list[tuple[Tensor, StepStats]]:
        """Run the step that was just run on each of `PATHS`; a row without a slot has no state here."""
        refused = self.is_refused(decision)
        return [self._call(path, None if refused else state) for path, state in self.states.items()]

    def _call(
        self, path: str, state: TopkState | None, row_slot: Tensor | None = None
    ) -> tuple[Tensor, StepStats]:
        self.out.fill_(_POISON)
        indexer_topk_decode(
            self.logits,
            self.seq_lens,
            self.k,
            out=self.out,
            state=state,
            row_slot=row_slot,
            path=path,
            max_ctas=self.options.max_ctas,
            hint_offset=self.options.hint_offset,
            stats=self.stats,
        )
        return self.out[0].cpu().clone(), StepStats.of(self.stats[0])

    def is_refused(self, decision: GateDecision) -> bool:
        """Whether the configuration refuses the row, which then has no slot, as in serving."""
        return not self.enabled or HintReason[decision.reason.upper()] in _CONFIGURED_OUT

    def decide(self, length: int) -> GateDecision:
        """The gate's answer for a row of this true length, within the configured lengths if any."""
        shortest, longest = self.options.length_limits
        return can_use_heuristic(
            length=length,
            k=self.k,
            enabled=self.enabled and asks_for_hint(parse_path(self.options.path)),
            slot=self.slot,
            slots=self.requests.num_slots,
            min_length=shortest,
            max_length=longest,
            known=float(self.requests.words[0, self.slot, 0]) != STATE_UNKNOWN,
        )

    def _load(self, scores: npt.NDArray[np.float32]) -> None:
        # NaN ranks above everything: one element read past the row would show in the result.
        self.logits.fill_(float("nan"))
        self.logits[0, : len(scores)].copy_(torch.from_numpy(scores))
        self.seq_lens.fill_(len(scores))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch on one thread: a row is too small to share.

    On a busy two-core machine the barriers between threads took five times as long as the work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _variants(configured_offset: int) -> tuple[Variant, ...]:
    """Return the paper's variants, its own guess first: both of its offsets, and the configured one."""
    offsets = [0, 1] + ([configured_offset] if configured_offset not in (0, 1) else [])
    guesses: tuple[GuessKind, ...] = ("mean", "quantile")
    # The path "paper_gvr" takes the quantile.
    return tuple(
        Variant(offset, guess, (offset, guess) == (configured_offset, "quantile"))
        for guess in guesses
        for offset in offsets
    )


def _check(source: ScoreSource, k: int, steps: int, device: str) -> None:
    if not 1 <= k <= MAX_WIDTH:
        raise ValueError(f"k: wanted 1 to {MAX_WIDTH:,}, got {k}")
    if not 1 <= steps <= source.steps:
        raise ValueError(f"steps: wanted 1 to {source.steps} for {source.name}, got {steps}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: wanted cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: wanted a CUDA device that torch can use, got none")


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None
