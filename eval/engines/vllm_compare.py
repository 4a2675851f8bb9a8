"""What ``python -m eval vllm-trial`` puts around vLLM's top-k calls: a comparison, and times.

The decode top-k is ``SparseIndexerTopk.forward``, the prefill top-k the op
``torch.ops._C.top_k_per_row_prefill``, and ranks that share the keys of requests merge what they selected in
``_merge_dcp_topk_global``; all are wrapped whatever they run by then.
"""

import importlib
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gvr_topk.contract import exact_topk, order_key, row_lengths
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.integrations._kit.transaction import Transaction

SAMPLE_EVERY = 61
"""Every so many eager calls, a row is also compared with the sort in NumPy. A prime, so that all layers get
their turn."""

SLAB = 1 << 24
"""Scores that are sorted at once; a prefill call may have a thousand million."""

LAST = (1 << 31) - 1
"""Number above all positions of a row."""

KINDS = ("", "prefill_", "merged_")
COUNTS = ("rows", "rows_longer_than_k", "rows_that_differ")


class Wrapped:
    """Callable in place of an op; all but the call is the original's."""

    def __init__(self, original: Any, call: Callable[..., None]) -> None:
        self._original = original
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, *args: Any) -> None:
        self._call(*args)


def observe(
    patches: Transaction, comparison: "Comparison | None", times: "PrefillTimes | None" = None
) -> None:
    """Put a comparison around both calls of this process, and times around the prefill call."""
    stage = importlib.import_module("vllm.model_executor.layers.indexer_topk").SparseIndexerTopk
    # With this module our plugin replaces the op, and what is put around it here sees ours.
    indexer = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    if comparison is not None:
        patches.set_attribute(stage, "forward", comparison.wrap(stage.forward))
        patches.wrap(indexer, "_merge_dcp_topk_global", comparison.wrap_merge)
    if times is not None:
        patches.wrap(indexer, "fp8_fp4_mqa_logits", times.wrap_scores)
    for observer in (comparison, times):
        if observer is not None:
            wrapped = observer.wrap_prefill(torch.ops._C.top_k_per_row_prefill)
            patches.set_attribute(torch.ops._C, "top_k_per_row_prefill", wrapped)


class Comparison:
    """Compares each result with a sort of the same scores, on the device and without a sync.

    Of a prefill call at most `prefill_rows` are compared, at equal distances; 0 for all.
    """

    def __init__(self, device: torch.device | str, prefill_rows: int = 0) -> None:
        # Made before the engine starts: what is made inside a capture is made anew at each replay.
        self.counts = {kind: torch.zeros(len(COUNTS), dtype=torch.int64, device=device) for kind in KINDS}
        self.sampled = {"rows": 0, "rows_that_differ": 0}
        self._prefill_rows = prefill_rows
        self._seen = 0
        self._calls = 0

    def reset(self) -> None:
        """Forget what was counted."""
        for counts in self.counts.values():
            counts.zero_()
        self._seen = 0
        self.sampled = dict.fromkeys(self.sampled, 0)

    def as_dict(self) -> dict[str, int]:
        """What was counted; reads it from the device."""
        if torch.cuda.is_available():  # for an engine computes on a stream of its own
            torch.cuda.synchronize()
        counted = {
            f"{kind}{name}": count
            for kind, counts in self.counts.items()
            for name, count in zip(COUNTS, counts.tolist(), strict=True)
        }
        sampled = {f"numpy_{name}": count for name, count in self.sampled.items()}
        return counted | {"prefill_rows_seen": self._seen} | sampled

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``SparseIndexerTopk.forward``."""

        def observed(stage: Any, *args: Any) -> None:
            forward(stage, *args)
            logits, seq_lens, next_n, topk_indices, topk_tokens, _ = args
            rows = logits.shape[0]
            lengths = seq_lens.reshape(-1).to(torch.int64)
            if lengths.shape[0] != rows:
                lengths = row_lengths(lengths, rows, next_n)
            lengths, chosen = lengths.clamp(0, logits.shape[1]), topk_indices[:rows, :topk_tokens]
            self._compare(self.counts[""], logits, lengths, chosen)
            if self._sample_is_due(logits):
                self._sample(logits[:1], lengths[:1], chosen[:1])

        return observed

    def wrap_prefill(self, op: Any) -> Wrapped:
        """Wrap ``torch.ops._C.top_k_per_row_prefill``."""

        def observed(*args: Any) -> None:
            op(*args)
            logits, starts, ends, indices, rows, _, _, k = args
            starts = starts[:rows].to(torch.int64).clamp(min=0)
            lengths = (ends[:rows].to(torch.int64).clamp(max=logits.shape[1]) - starts).clamp(min=0)
            self._see_prefill(logits, starts, lengths, indices[:rows, :k])

        return Wrapped(op, observed)

    def wrap_merge(self, merge: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``_merge_dcp_topk_global``, of whose result each rank's own positions count."""

        def observed(
            logits: Tensor, chosen: Tensor, k: int, rank: int, world: int, turn: int, row_starts: Any = None
        ) -> None:
            local = chosen.to(torch.int64)
            merge(logits, chosen, k, rank, world, turn, row_starts)
            if world > 1:
                self._see_merge(logits, local, chosen, (rank, world, turn))

        return observed

    def _see_merge(self, logits: Tensor, local: Tensor, chosen: Tensor, ranks: tuple[int, int, int]) -> None:
        """Compare every row with a sort of what all ranks have selected, which is compared by itself."""
        rank, world, turn = ranks
        scores = logits.gather(1, local.clamp(min=0)) if logits.shape[1] else local.float()
        places = (local // turn * world + rank) * turn + local % turn
        words = torch.where(local >= 0, order_key(scores) << 31 | (LAST - places), -1)
        group = importlib.import_module("vllm.distributed").get_dcp_group()
        found = group.all_gather(words, dim=1)
        best = found.topk(chosen.shape[1], dim=1).values
        wanted, got = (
            torch.where((places >= 0) & (places // turn % world == rank), places, -1).sort(1).values
            for places in (torch.where(best >= 0, LAST - (best & LAST), -1), chosen)
        )
        visible = (found >= 0).sum(1)
        counts = [(visible > 0).sum(), (visible > chosen.shape[1]).sum(), (wanted != got).any(1).sum()]
        self.counts["merged_"] += torch.stack(counts)

    def _see_prefill(self, logits: Tensor, starts: Tensor, lengths: Tensor, chosen: Tensor) -> None:
        """Compare rows at equal distances, other ones in each call, and the last one in all.

        The scores may be deferred ones, which are computed for the compared rows alone.
        """
        rows = lengths.shape[0]
        if rows == 0:
            return
        self._seen += rows
        every = 1 if self._prefill_rows == 0 else -(-rows // self._prefill_rows)
        first = self._calls % every
        picked = torch.arange(first, rows, every, device=logits.device)
        last = torch.full((1,), rows - 1, device=logits.device)
        if (rows - 1 - first) % every:
            picked = torch.cat([picked, last])
        for part in picked.split(max(SLAB // max(logits.shape[1], 1), 1)):
            windows = window(logits, starts, part)
            self._compare(self.counts["prefill_"], windows, lengths[part], chosen[part])
        if self._sample_is_due(logits):
            self._sample(window(logits, starts, last), lengths[-1:], chosen[-1:])

    def _compare(self, counts: Tensor, logits: Tensor, lengths: Tensor, chosen: Tensor) -> None:
        k = chosen.shape[1]
        real = lengths > 0
        differ = (exact_topk(logits, lengths, k) != chosen).any(1)
        counts += torch.stack([real.sum(), (lengths > k).sum(), (differ & real).sum()])

    def _sample_is_due(self, logits: Tensor) -> bool:
        self._calls += 1
        capturing = logits.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self._calls % SAMPLE_EVERY == 0 and not capturing

    def _sample(self, row: Tensor, length: Tensor, chosen: Tensor) -> None:
        """Compare a row with the sort in NumPy."""
        wanted = sorted_topk(row.cpu(), length.cpu(), chosen.shape[1])
        self.sampled["rows"] += 1
        self.sampled["rows_that_differ"] += int(not torch.equal(wanted, chosen.cpu()))


class PrefillTimes:
    """Times every prefill call with events, which cost it nothing but their own launch."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, Any, Any, Any]] = []
        self._scoring: Any = None

    def wrap_scores(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``fp8_fp4_mqa_logits``, with which each chunk begins."""

        def timed(*args: Any) -> Any:
            self._scoring = torch.cuda.Event(enable_timing=True)
            self._scoring.record()
            return original(*args)

        return timed

    def wrap_prefill(self, op: Any) -> Wrapped:
        """Wrap ``torch.ops._C.top_k_per_row_prefill``."""

        def timed(logits: Tensor, *args: Any) -> None:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            op(logits, *args)
            stop.record()
            self._calls.append((*logits.shape, self._scoring or start, start, stop))

        return Wrapped(op, timed)

    def take(self) -> dict[str, Any]:
        """Calls since the last time, by rows and width; a width is that of the scores, not of a window.

        ``chunks`` has the time of both the scores and the top-k; deferred scores are computed in the call.
        There each call counts as the median of its shape: the first one may wait for a kernel or for memory.
        """
        if self._calls:
            torch.cuda.synchronize()
        spent: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for rows, width, scoring, start, stop in self._calls:
            spent[rows, width].append((1e3 * start.elapsed_time(stop), 1e3 * scoring.elapsed_time(stop)))
        self._calls.clear()
        shapes, chunks = [], dict[int, dict[str, float]]()
        for (rows, width), times in sorted(spent.items()):
            top_k, whole = zip(*times, strict=True)
            shapes.append(
                {
                    "rows": rows,
                    "width": width,
                    "calls": len(times),
                    "us": round(sum(top_k), 1),
                    "us_median": round(statistics.median(top_k), 2),
                    "us_longest": round(max(top_k), 2),
                }
            )
            chunk = chunks.setdefault(width, {"width": width, "rows": 0, "us": 0.0})
            chunk["rows"] += rows * len(times)
            chunk["us"] = round(chunk["us"] + len(times) * statistics.median(whole), 1)
        return {
            "calls": sum(shape["calls"] for shape in shapes),
            "rows": sum(shape["rows"] * shape["calls"] for shape in shapes),
            "us": round(sum(shape["us"] for shape in shapes), 1),
            "shapes": shapes,
            "chunks": [chunks[width] for width in sorted(chunks)],
        }


def window(logits: Tensor, starts: Tensor, rows: Tensor) -> Tensor:
    """Scores of some rows, each from its start on; past the last column they are repeated."""
    columns = starts[rows, None] + torch.arange(logits.shape[1], device=logits.device)
    return logits[rows].gather(1, columns.clamp_(max=max(logits.shape[1] - 1, 0)))
