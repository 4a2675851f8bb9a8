"""One form for the two places at which TensorRT-LLM selects in decode rows.

Up to about 1.3.0rc26 the indexer calls the op ``torch.ops.trtllm.indexer_topk_decode``; in later versions
every sparse backend calls the class ``TopK``, which also knows its implementation and the lengths after
compression.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gvr_topk.integrations._kit.op_in_place import OpInPlace
from gvr_topk.integrations._kit.signatures import argument

PLAIN = "cuda_radix"
"""Value of ``TopK.decode_implementation`` that our op replaces without being forced."""


class Selection(NamedTuple):
    """One top-k of decode rows."""

    logits: Tensor  # ``[rows, width]``
    seq_lens: Tensor  # ``[rows / next_n]``, int32: keys of each request, drafts included, before compression
    indices: Tensor  # ``[rows, >= k]``, int32: where the result is written
    next_n: int  # rows per request
    k: int
    compress_ratio: int = 1  # keys per score
    native: str = ""  # what TensorRT-LLM would run instead of its plain radix top-k; empty for the plain one


Select = Callable[[Selection, Callable[[], Any]], bool]
"""Takes a selection, and what lets TensorRT-LLM do it; returns False when TensorRT-LLM has to."""


class DecodeOp(OpInPlace):
    """Callable in place of ``torch.ops.trtllm.indexer_topk_decode``."""

    def __init__(self, original: Any, select: Select) -> None:
        super().__init__(original)
        self._select = select
        arguments = original.default._schema.arguments
        self._default_topk = next(a.default_value for a in arguments if a.name == "index_topk")

    def __call__(self, logits: Tensor, seq_lens: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> None:
        hinted = argument(args, kwargs, 2, "pre_idx", None) is not None
        selection = Selection(
            logits,
            seq_lens,
            indices,
            argument(args, kwargs, 0, "next_n", 1),
            argument(args, kwargs, 1, "index_topk", self._default_topk),
            argument(args, kwargs, 4, "compress_ratio", 1),
            native="its own heuristic (indexer_topk_decode with pre_idx)" if hinted else "",
        )

        def original() -> None:
            self._original(logits, seq_lens, indices, *args, **kwargs)

        if not self._select(selection, original):
            original()


def wrap_top_k(original: Callable[..., Any], select: Select) -> Callable[..., Any]:
    """Wrap ``TopK._forward_decode``."""

    @functools.wraps(original)
    def _forward_decode(
        top_k: Any,
        scores: Tensor,
        sequence_lengths: Tensor,
        scan_lengths: Tensor,
        output_indices: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        implementation = top_k.decode_implementation
        name = getattr(implementation, "value", implementation)
        selection = Selection(
            scores,
            sequence_lengths,
            output_indices,
            argument(args, kwargs, 0, "next_n", 1),
            top_k.top_k,
            top_k.compress_ratio,
            native="" if name == PLAIN else f"TopK with {name}",
        )

        def theirs() -> Any:
            # `next_n` and what follows it are passed on as given: some sources take them by name alone.
            return original(top_k, scores, sequence_lengths, scan_lengths, output_indices, *args, **kwargs)

        return output_indices if select(selection, theirs) else theirs()

    return _forward_decode
