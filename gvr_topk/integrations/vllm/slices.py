"""Scores of long prompts in slices of their keys, in place of vLLM's few rows at once.

vLLM scores as many rows at once as its budget holds with all of their keys
(``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``). Of rows of a million keys these are 128, which leave most of a Hopper
GPU idle, because its scorer never divides the keys of a row. Here a chunk has as many rows as fill the GPU,
and its scores come in slices of the keys, each of the size of the budget.

vLLM's loop over chunks stays: what splits the prompts of a step is wrapped to make such chunks, and the
scorer to return, where the scores of a chunk exceed the budget, `DeferredScores`. These are computed where
vLLM has its prefill top-k, whose hook keeps the best so far in a `gvr_topk.PrefillCarry`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gvr_topk.integrations._kit.device import arch_of, multiprocessors
from gvr_topk.integrations._kit.log import Say, one_line
from gvr_topk.integrations._kit.signatures import argument
from gvr_topk.integrations.vllm.backend import uses_microbatches

HEADS = 128
"""Heads that a CTA of the scorer takes at once, those of one row or of several."""

ROWS_PER_MULTIPROCESSOR = 4
"""Least rows of a full chunk for each multiprocessor: a CTA's with 32 heads, and two CTAs' with 64."""

DIVIDED_KEYS_ARCH = 120
"""Compute capability times ten from which DeepGEMM's scorer divides the keys of few rows among its CTAs."""

ALIGNMENT = 256
"""Keys that the scorer's CTA takes at once; slices begin at multiples of it."""

Chunk = tuple[slice, slice]
"""Requests of a chunk, and its rows among those of these requests."""


class DeferredScores:
    """Scores of a chunk, in place of a tensor of them, that are computed as they are read.

    `score`, vLLM's scorer, takes `q`, `kv`, `weights`, `starts`, `ends` and the number of columns: queries, a
    row each, with their scales; keys of all requests one after the other, with theirs; weights, ``[rows,
    heads]``; and the first key of each row, which has column 0, and one past its last. There are `keys`
    columns, and there may be `budget` scores at once.
    """

    dtype = torch.float32

    def __init__(
        self,
        score: Callable[..., Tensor],
        q: tuple[Tensor, Tensor | None],
        kv: tuple[Tensor, Tensor],
        weights: Tensor,
        starts: Tensor,
        ends: Tensor,
        keys: int,
        budget: int,
    ) -> None:
        self._score = score
        self._q, self._kv, self._weights = q, kv, weights
        self._starts, self._ends = starts, ends
        self._budget = budget
        self.shape = (len(weights), keys)
        self.device = weights.device

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        strides = (self.shape[1], 1)
        return strides if dim is None else strides[dim]

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Return all scores of some rows, in fp32."""
        values, scales = self._q
        q = (values[rows], None if scales is None else scales[rows])
        bounds = (self._starts[rows], self._ends[rows], self.shape[1])
        return self._score(q, self._kv, self._weights[rows], *bounds).to(self.dtype)

    def parts(self) -> Iterator[slice]:
        """Rows in parts, as many at once as the budget holds."""
        rows, keys = self.shape
        step = max(self._budget // keys, 1)
        yield from (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))

    def slices(self) -> Iterator[tuple[int, Tensor]]:
        """Return first column and scores of each slice, which has to be dropped before the next one."""
        rows, keys = self.shape
        width = max(self._budget // rows // ALIGNMENT, 1) * ALIGNMENT
        begins = self._starts
        for column in range(0, keys, width):
            ends = torch.minimum(self._starts + (column + width), self._ends)
            columns = min(width, keys - column)
            yield column, self._score(self._q, self._kv, self._weights, begins, ends, columns)
            begins = ends


class SlicesHook:
    """Makes chunks that fill the GPU, and defers scores that exceed the budget, in one vLLM process.

    `layer` returns the name of the layer that runs; None where it is not known.
    """

    def __init__(self, layer: Callable[[], str | None], say: Say) -> None:
        self._layer = layer
        self._say = say
        self._local = threading.local()
        self._served: set[str | None] = set()
        # How many scores there may be at once; None until a chunk was divided anew. The scores of vLLM's own
        # chunks never exceed it, unless a chunk is one row.
        self._budget: int | None = None
        self._failed = False

    def build(self, builder: Any, make: Callable[[], Any]) -> Any:
        """Make a batch's metadata, with chunks that fill the GPU if their scores can be deferred."""
        self._local.builder = builder
        try:
            return make()
        finally:
            self._local.builder = None

    def wrap_split(self, original: Callable[..., list[Chunk]]) -> Any:
        """Wrap ``DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks``."""

        @functools.wraps(original)
        def split(*args: Any, **kwargs: Any) -> list[Chunk]:
            chunks = original(*args, **kwargs)
            builder = getattr(self._local, "builder", None)
            if builder is None or self._failed:
                return chunks
            try:
                if self._reason_against(builder):
                    return chunks
                heads = builder.vllm_config.model_config.hf_text_config.index_n_heads
                rows = max(HEADS // heads, ROWS_PER_MULTIPROCESSOR) * multiprocessors(builder.device)
                full = full_chunks(chunks, rows)
                if full != chunks:
                    size = argument(args, kwargs, 3, "max_logits_bytes", 0)
                    self._budget = size // torch.float32.itemsize
                return full
            except Exception as error:  # vLLM's own chunks can stay
                self._failed = True
                self._say("warning", f"prompts are not scored in slices: {one_line(error)}")
                return chunks

        return staticmethod(split)

    def wrap_scores(self, original: Callable[..., Tensor]) -> Callable[..., Any]:
        """Wrap ``fp8_fp4_mqa_logits`` where ``sparse_attn_indexer`` calls it."""

        @functools.wraps(original)
        def fp8_fp4_mqa_logits(
            q: tuple[Tensor, Tensor | None],
            kv: tuple[Tensor, Tensor],
            weights: Tensor,
            cu_seqlen_ks: Tensor,
            cu_seqlen_ke: Tensor,
            max_seqlen_k: int,
        ) -> Any:
            call = (q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k)
            self._local.scored = self._layer()
            rows, budget = len(weights), self._budget
            if budget is None or rows == 1 or rows * max_seqlen_k <= budget:
                return original(*call)
            return DeferredScores(original, *call, budget)

        return fp8_fp4_mqa_logits

    def note_selection(self) -> None:
        """Note that what the scorer returned last in this thread has reached the prefill top-k."""
        self._served.add(getattr(self._local, "scored", None))

    def _reason_against(self, builder: Any) -> str:
        """Return why the chunks of a builder are to stay as they are; empty if they are not.

        Layers may score or select elsewhere. So all layers of the builder have to have been seen to call the
        scorer that is wrapped, and to pass its scores to the top-k that is replaced.
        """
        model = builder.vllm_config.model_config.hf_text_config
        unseen = [layer for layer in builder.layer_names if layer not in self._served]
        reason = ""
        if builder.dcp_world_size > 1 or builder.use_pcp:
            reason = "ranks share the keys"
        elif getattr(model, "candidate_block_size", 0):
            reason = "candidate blocks are chosen first"
        elif arch_of(builder.device) >= DIVIDED_KEYS_ARCH:
            reason = "the scorer divides the keys itself here"
        elif uses_microbatches(builder):
            reason = "microbatches leave the scorer fewer multiprocessors"
        elif unseen:
            reason = f"{unseen[0]} has not scored a prompt"
        if reason and self._served:
            self._say("info", f"not in use: prefill slices: {reason}")
        return reason


def full_chunks(chunks: Sequence[Chunk], rows: int) -> list[Chunk]:
    """Divide the rows of the same requests into chunks that fill the GPU, where they do so less often.

    Examples
    --------
    >>> full_chunks([(slice(0, 1), slice(begin, begin + 2)) for begin in (0, 2, 4, 6)], 5)
    [(slice(0, 1, None), slice(0, 5, None)), (slice(0, 1, None), slice(5, 8, None))]
    """
    divided: list[Chunk] = []
    for (first, last), group in itertools.groupby(chunks, lambda chunk: (chunk[0].start, chunk[0].stop)):
        parts = list(group)
        sizes = [part.stop - part.start for _, part in parts]
        total = sum(sizes)
        if sum(-(-size // rows) for size in sizes) > -(-total // rows):
            step = max(max(sizes) // rows, 1) * rows
            begins = range(0, total, step)
            parts = [(slice(first, last), slice(begin, min(begin + step, total))) for begin in begins]
        divided += parts
    return divided
