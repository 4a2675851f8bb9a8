"""What ``python -m eval vllm-trial`` puts around vLLM's top-k calls: a comparison, times, a count of twins.

Each of the three wraps ``SparseIndexerTopk.forward``, the decode top-k, and the op
``torch.ops._C.top_k_per_row_prefill``, the prefill top-k, whatever these run by then.
"""

from __future__ import annotations

import importlib
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gvr_topk.contract import exact_topk, row_lengths
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.integrations.transaction import Transaction

SAMPLE_EVERY = 61
"""Every so many eager calls, a row is also compared with the sort in NumPy. A prime, so that all layers get
their turn."""

_INDEXER = re.compile(r"\blayers\.(\d+)\..*\bk_cache\b")
"""Name of an indexer's cache, by which ``sparse_attn_indexer`` is told its layer."""

MOST_LENGTHS = 32
"""Lengths of decode rows that a count is given for, each."""

SLAB = 1 << 24
"""Scores that are sorted or hashed at once; a prefill call may have a thousand million."""

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


class Observer:
    """Wraps both calls, and sees what each has chosen."""

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``SparseIndexerTopk.forward``."""

        def observed(
            stage: Any,
            logits: Tensor,
            seq_lens: Tensor,
            next_n: int,
            topk_indices: Tensor,
            topk_tokens: int,
            max_seq_len: int,
        ) -> None:
            forward(stage, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)
            rows = logits.shape[0]
            lengths = seq_lens.reshape(-1).to(torch.int64)
            if lengths.shape[0] != rows:
                lengths = row_lengths(lengths, rows, next_n)
            lengths = lengths.clamp(0, logits.shape[1])
            self.see_decode(logits, lengths, topk_indices[:rows, :topk_tokens])

        return observed

    def wrap_prefill(self, op: Any) -> Wrapped:
        """Wrap ``torch.ops._C.top_k_per_row_prefill``."""

        def observed(
            logits: Tensor,
            starts: Tensor,
            ends: Tensor,
            indices: Tensor,
            rows: int,
            stride0: int,
            stride1: int,
            k: int,
        ) -> None:
            op(logits, starts, ends, indices, rows, stride0, stride1, k)
            starts = starts[:rows].to(torch.int64).clamp(min=0)
            lengths = (ends[:rows].to(torch.int64).clamp(max=logits.shape[1]) - starts).clamp(min=0)
            self.see_prefill(logits[:rows], starts, lengths, indices[:rows, :k])

        return Wrapped(op, observed)

    def see_decode(self, logits: Tensor, lengths: Tensor, chosen: Tensor) -> None:
        """Look at a decode call: every row begins at column 0."""
        raise NotImplementedError

    def see_prefill(self, logits: Tensor, starts: Tensor, lengths: Tensor, chosen: Tensor) -> None:
        """Look at a prefill call: each row's scores are `lengths` columns from `starts` on."""
        raise NotImplementedError


def observe(patches: Transaction, decode: Sequence[Observer], prefill: Sequence[Any]) -> None:
    """Put observers around both calls of this process; those of `prefill` have a method ``wrap_prefill``."""
    stage = importlib.import_module("vllm.model_executor.layers.indexer_topk").SparseIndexerTopk
    # With this module our plugin replaces the op, and what is put around it here sees ours.
    indexer = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    for observer in decode:
        patches.set_attribute(stage, "forward", observer.wrap(stage.forward))
        if isinstance(observer, Twins):
            name = "_resolve_layer_name"
            patches.set_attribute(indexer, name, observer.wrap_resolve(getattr(indexer, name)))
    for observer in prefill:
        wrapped = observer.wrap_prefill(torch.ops._C.top_k_per_row_prefill)
        patches.set_attribute(torch.ops._C, "top_k_per_row_prefill", wrapped)


class Comparison(Observer):
    """Compares each result with a sort of the same scores, on the device and without a sync.

    Of a prefill call at most `prefill_rows` are compared, at equal distances; 0 for all.
    """

    def __init__(self, device: torch.device | str, prefill_rows: int = 0) -> None:
        # Made before the engine starts: what is made inside a capture is made anew at each replay.
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.prefill_counts = torch.zeros_like(self.counts)
        self.sampled = {"rows": 0, "rows_that_differ": 0}
        self._prefill_rows = prefill_rows
        self._seen = 0
        self._calls = 0

    def reset(self) -> None:
        """Forget what was counted."""
        self.counts.zero_()
        self.prefill_counts.zero_()
        self._seen = 0
        self.sampled = dict.fromkeys(self.sampled, 0)

    def as_dict(self) -> dict[str, int]:
        """What was counted; reads it from the device."""
        _synchronize()
        counted = dict(zip(COUNTS, self.counts.tolist(), strict=True))
        prefill = zip(COUNTS, self.prefill_counts.tolist(), strict=True)
        return (
            counted
            | {f"prefill_{name}": count for name, count in prefill}
            | {"prefill_rows_seen": self._seen}
            | {f"numpy_{name}": count for name, count in self.sampled.items()}
        )

    def see_decode(self, logits: Tensor, lengths: Tensor, chosen: Tensor) -> None:
        """Compare every row."""
        self._compare(self.counts, logits, lengths, chosen)
        if self._sample_is_due(logits):
            self._sample(logits[:1], lengths[:1], chosen[:1])

    def see_prefill(self, logits: Tensor, starts: Tensor, lengths: Tensor, chosen: Tensor) -> None:
        """Compare rows at equal distances, other ones in each call, and the last one in all."""
        rows = logits.shape[0]
        if rows == 0:
            return
        self._seen += rows
        every = 1 if self._prefill_rows == 0 else -(-rows // self._prefill_rows)
        first = self._calls % every
        picked = torch.arange(first, rows, every, device=logits.device)
        last = torch.full((1,), rows - 1, device=logits.device)
        if (rows - 1 - first) % every:
            picked = torch.cat([picked, last])
        for part in slabs(picked, logits.shape[1]):
            windows = window(logits, starts, part)
            self._compare(self.prefill_counts, windows, lengths[part], chosen[part])
        if self._sample_is_due(logits):
            self._sample(window(logits, starts, last), lengths[-1:], chosen[-1:])

    def _compare(self, counts: Tensor, logits: Tensor, lengths: Tensor, chosen: Tensor) -> None:
        k = chosen.shape[1]
        real = lengths > 0
        differ = (exact_topk(logits, lengths, k) != chosen).any(1)
        counts += torch.stack([real.sum(), (lengths > k).sum(), (differ & real).sum()])

    def _sample_is_due(self, logits: Tensor) -> bool:
        self._calls += 1
        capturing = logits.is_cuda and torch.cuda.is_current_stream_capturing()
        return self._calls % SAMPLE_EVERY == 0 and not capturing

    def _sample(self, row: Tensor, length: Tensor, chosen: Tensor) -> None:
        """Compare a row with the sort in NumPy."""
        wanted = sorted_topk(row.cpu(), length.cpu(), chosen.shape[1])
        self.sampled["rows"] += 1
        self.sampled["rows_that_differ"] += int(not torch.equal(wanted, chosen.cpu()))


class PrefillTimes:
    """Times every prefill call with events, which cost it nothing but their own launch."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, Any, Any]] = []

    def wrap_prefill(self, op: Any) -> Wrapped:
        """Wrap ``torch.ops._C.top_k_per_row_prefill``."""

        def timed(logits: Tensor, *args: Any) -> None:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            op(logits, *args)
            stop.record()
            self._calls.append((*logits.shape, start, stop))

        return Wrapped(op, timed)

    def take(self) -> dict[str, Any]:
        """Calls since the last time, by rows and width; a width is that of the scores, not of a window."""
        if self._calls:
            torch.cuda.synchronize()
        times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for rows, width, start, stop in self._calls:
            times[rows, width].append(1e3 * start.elapsed_time(stop))
        self._calls.clear()
        return {
            "calls": sum(map(len, times.values())),
            "rows": sum(rows * len(spent) for (rows, _), spent in times.items()),
            "us": round(sum(map(sum, times.values())), 1),
            "shapes": [
                {
                    "rows": rows,
                    "width": width,
                    "calls": len(spent),
                    "us_median": round(statistics.median(spent), 2),
                    "us_longest": round(max(spent), 2),
                }
                for (rows, width), spent in sorted(times.items())
            ],
        }


class Twins(Observer):
    """Hashes scores and selections of each row on the device, to find equal rows with other selections.

    Rows whose scores are bitwise the same must have the same selection, in whatever batch, chunk, step or
    layer they were. The values of a selection are hashed, too: selections of equal values differ by ties
    alone. Only rows longer than k are noted, for the others have no choice. All 64 bits of a hash would have
    to agree by chance for rows to be taken for twins that are none.

    Parameters
    ----------
    device : str or torch.device
    capacity : int
        One more than the rows for which there is room.
    """

    COLUMNS = ("scores", "order", "set", "prefill", "layer", "length", "values")

    def __init__(self, device: torch.device | str, capacity: int = 1 << 21) -> None:
        self._layer = -1
        # Made before the engine starts: what is made inside a capture is made anew at each replay.
        self._rows = torch.zeros((capacity, len(self.COLUMNS)), dtype=torch.int64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Forget what was noted."""
        self._count.zero_()

    def take(self) -> Tensor:
        """What was noted, ``[rows, 7]`` on the CPU.

        Hashes of scores, order and set, whether of a prompt, the number of the layer, the row's length, and a
        hash of the selected values.

        Raises
        ------
        RuntimeError
            There were more rows than there is room for.
        """
        _synchronize()
        count, capacity = int(self._count), self._rows.shape[0]
        if count >= capacity:
            raise RuntimeError(f"twins: wanted fewer than {capacity} rows, got {count}")
        return self._rows[:count].to("cpu", copy=True)

    def wrap_resolve(self, resolve: Callable[..., str]) -> Callable[..., str]:
        """Wrap ``_resolve_layer_name`` as ``sparse_attn_indexer`` calls it first: it names the layer."""

        def resolved(*args: Any) -> str:
            name = resolve(*args)
            # It is asked for the layer of the attention, too, which may be none.
            if found := _INDEXER.search(name or ""):
                self._layer = int(found.group(1))
            return name

        return resolved

    def see_decode(self, logits: Tensor, lengths: Tensor, chosen: Tensor) -> None:
        """Note every row."""
        self._note(logits, lengths, chosen, 0)

    def see_prefill(self, logits: Tensor, starts: Tensor, lengths: Tensor, chosen: Tensor) -> None:
        """Note every row."""
        for part in slabs(torch.arange(logits.shape[0], device=logits.device), logits.shape[1]):
            self._note(window(logits, starts, part), lengths[part], chosen[part], 1)

    def _note(self, logits: Tensor, lengths: Tensor, chosen: Tensor, prefill: int) -> None:
        position = torch.arange(logits.shape[1], device=logits.device)
        bits = logits.float().view(torch.int32).to(torch.int64)
        visible = position < lengths[:, None]
        scores = torch.where(visible, mixed(bits, position), 0).sum(1) ^ lengths
        order = mixed(chosen.to(torch.int64), torch.arange(chosen.shape[1], device=chosen.device)).sum(1)
        anywhere = torch.zeros_like(chosen[0], dtype=torch.int64)
        members = mixed(chosen.to(torch.int64), anywhere).sum(1)
        # Adding zero makes both zeros the same, for they tie.
        picked = logits.float().gather(1, chosen.to(torch.int64).clamp(min=0)) + 0.0
        values = mixed(picked.view(torch.int32).to(torch.int64), anywhere).sum(1)
        # A captured graph keeps the layer that it was captured in.
        place_of = [torch.full_like(order, prefill), torch.full_like(order, self._layer), lengths]
        noted = torch.stack([scores, order, members, *place_of, values], dim=1)
        longer = (lengths > chosen.shape[1]).to(torch.int64)
        # Shorter rows go to the last place, which is never read, for their number is not known here.
        capacity = self._rows.shape[0]
        place = torch.where(longer > 0, (self._count + longer.cumsum(0) - 1) % capacity, capacity - 1)
        self._rows.index_copy_(0, place, noted)
        self._count += longer.sum()


def _synchronize() -> None:
    """Wait for all streams, for an engine computes on one of its own."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def mixed(values: Tensor, position: Tensor) -> Tensor:
    """Hash integers together with their positions; sums of such hashes are hashes of rows.

    The constants are those of SplitMix64, and products wrap around.
    """
    hashed = values + (position + 1) * -7046029254386353131
    hashed = (hashed ^ _shifted(hashed, 30)) * -4658895280553007687
    hashed = (hashed ^ _shifted(hashed, 27)) * -7723592293110705685
    return hashed ^ _shifted(hashed, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right without the sign, which ``>>`` would repeat."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def slabs(rows: Tensor, width: int) -> Iterator[Tensor]:
    """Row numbers in parts, each of at most `SLAB` scores or of one row."""
    yield from rows.split(max(SLAB // max(width, 1), 1)) if rows.shape[0] else ()


def window(logits: Tensor, starts: Tensor, rows: Tensor) -> Tensor:
    """Scores of some rows, each from its start on; past the last column they are repeated."""
    columns = starts[rows, None] + torch.arange(logits.shape[1], device=logits.device)
    return logits[rows].gather(1, columns.clamp_(max=max(logits.shape[1] - 1, 0)))


def count_twins(noted: dict[str, Tensor]) -> dict[str, Any]:
    """Compare selections of rows whose scores are bitwise the same.

    Parameters
    ----------
    noted : dict of str to Tensor
        What `Twins.take` gave, by the run it comes from.

    Returns
    -------
    dict
        For ``all`` rows, and for those of ``prefill`` and of ``decode``: ``rows``; ``different_rows``,
        counted by their scores; ``rows_with_a_twin`` and ``rows_with_a_twin_in_another_run``; and under
        ``set``, ``order`` and ``values`` of how many scores the chosen sets, their orders or the values of
        their members differ, and how many rows have such scores. Sets that differ where values do not differ
        by ties. Under ``layers`` the first three by layer and kind; for decode rows of not too many
        lengths also ``different_rows_by_length``, shortest first.
    """
    every = torch.cat([*noted.values(), torch.zeros((0, len(Twins.COLUMNS)), dtype=torch.int64)])
    runs = torch.repeat_interleave(torch.tensor([len(rows) for rows in noted.values()], dtype=torch.int64))
    prefill, layer_of = every[:, 3] > 0, every[:, 4]
    kinds = {"prefill": prefill, "decode": ~prefill}
    layers = []
    for layer in layer_of.unique().tolist():
        of_kinds = {name: every[kind & (layer_of == layer)] for name, kind in kinds.items()}
        counted = {name: _count_scores(rows) for name, rows in of_kinds.items()}
        lengths = of_kinds["decode"][:, 5]
        if len(lengths.unique()) <= MOST_LENGTHS:
            counted["decode"]["different_rows_by_length"] = [
                len(of_kinds["decode"][lengths == length, 0].unique()) for length in lengths.unique()
            ]
        layers.append({"layer": layer} | counted)
    everything = {"all": torch.ones_like(prefill)} | kinds
    return {name: _count(every[kind], runs[kind]) for name, kind in everything.items()} | {"layers": layers}


def _count_scores(rows: Tensor) -> dict[str, Any]:
    """How many rows there are, how many by their scores, and how many have a twin."""
    members = rows[:, 0].unique(return_counts=True)[1]
    twins = int(members[members > 1].sum())
    return {"rows": len(rows), "different_rows": len(members), "rows_with_a_twin": twins}


def _count(rows: Tensor, runs: Tensor) -> dict[str, Any]:
    _, group, members = rows[:, 0].unique(return_inverse=True, return_counts=True)

    def spread(values: Tensor) -> Tensor:
        """For each group, whether its rows have different values."""
        least, most = (
            torch.zeros(len(members), dtype=torch.int64).scatter_reduce(
                0, group, values, extreme, include_self=False
            )
            for extreme in ("amin", "amax")
        )
        return least != most

    counted = _count_scores(rows) | {"rows_with_a_twin_in_another_run": int(members[spread(runs)].sum())}
    for column, name in ((1, "order"), (2, "set"), (6, "values")):
        broken = spread(rows[:, column])
        counted[name] = {"scores_that_differ": int(broken.sum()), "rows": int(members[broken].sum())}
    return counted
