"""The functions of SGLang that are hooked, and the signatures that they must have."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass

from gvr_topk.integrations._kit.engine import Engine
from gvr_topk.integrations._kit.environment import ENABLE_SGLANG, Mode

# Off unless asked for, until it has run inside SGLang.
ENGINE = Engine("SGLang", "sglang", ENABLE_SGLANG, Mode.OFF, ("0.5",), "sglang.srt.plugins")


@dataclass(frozen=True)
class HookPoint:
    """A function that is hooked if SGLang has it with the parameters known here."""

    name: str  # what the log and the table of hooks call it
    targets: tuple[str, ...]  # dotted paths, those of newer versions first; each version has one or none
    parameters: tuple[str, ...]  # the function's parameters, in order
    more: tuple[str, ...] = ()  # that some versions have after `parameters`
    open_ended: bool = False
    """Whether any parameters may follow, because the hook only looks at the known ones and passes all on."""

    def find(self) -> str:
        """Return the path of the function in the installed SGLang.

        A `LookupError` if it is nowhere, or its parameters are not the known ones; the message says which.
        """
        missing = []
        for target in self.targets:
            try:
                function = pkgutil.resolve_name(target)
            except (ImportError, AttributeError) as error:
                missing.append(str(error))
                continue
            self._check(target, tuple(inspect.signature(function).parameters))
            return target
        raise LookupError("; ".join(missing))

    def _check(self, target: str, found: tuple[str, ...]) -> None:
        known = self.parameters
        rest = found[len(known) :]
        if found[: len(known)] == known and (self.open_ended or rest == self.more[: len(rest)]):
            return
        raise LookupError(f"{target}: wanted ({', '.join(known)}), got ({', '.join(found)})")


POSITIONS = HookPoint(
    "fast_topk_v2",
    ("sgl_kernel.fast_topk_v2",),
    ("score", "lengths", "topk", "row_starts"),
)
PAGED = HookPoint(
    "fast_topk_transform_fused",
    ("sgl_kernel.fast_topk_transform_fused",),
    ("score", "lengths", "page_table_size_1", "cu_seqlens_q", "topk", "row_starts"),
)
RAGGED = HookPoint(
    "fast_topk_transform_ragged_fused",
    ("sgl_kernel.fast_topk_transform_ragged_fused",),
    ("score", "lengths", "topk_indices_offset", "topk", "row_starts"),
)
PAGED_V2 = HookPoint(
    "topk_transform_512_v2",
    (
        "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged_v2",
        "sglang.kernels.ops.attention.dsv4.topk.topk_transform_512_v2",
        "sglang.jit_kernel.dsv4.topk.topk_transform_512_v2",
    ),
    ("scores", "seq_lens", "page_tables", "out_page_indices", "page_size", "metadata"),
    more=("out_raw_indices",),
)
RAGGED_V2 = HookPoint(
    "topk_transform_ragged_v2",
    ("sglang.kernels.ops.attention.dsv4.topk.topk_transform_ragged_v2",),
    ("scores", "seq_lens", "out_offsets", "out_indices", "row_starts"),
)
INDEXER = HookPoint(
    "Indexer._get_topk_paged",
    (
        "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer._get_topk_paged",
        "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._get_topk_paged",
    ),
    ("self", "forward_batch"),
    open_ended=True,
)

SAMPLER_MODULE = "sglang.srt.layers.sampler"
CREATE_SAMPLER = HookPoint("create_sampler", (f"{SAMPLER_MODULE}.create_sampler",), ("backend",))
SAMPLER = (
    CREATE_SAMPLER,
    HookPoint(
        "register_sampler_backend", (f"{SAMPLER_MODULE}.register_sampler_backend",), ("backend", "factory")
    ),
    HookPoint(
        "Sampler.forward",
        (f"{SAMPLER_MODULE}.Sampler.forward",),
        (
            *("self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums"),
            *("token_ids_logprobs", "positions", "logprob_logits"),
        ),
    ),
    HookPoint(
        "Sampler._sample_from_probs",
        (f"{SAMPLER_MODULE}.Sampler._sample_from_probs",),
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
    ),
    HookPoint(
        "Sampler._sync_token_ids_across_tp",
        (f"{SAMPLER_MODULE}.Sampler._sync_token_ids_across_tp",),
        ("self", "batch_next_token_ids", "sampling_info"),
    ),
    HookPoint("get_exec", (f"{SAMPLER_MODULE}.get_exec",), ()),
    HookPoint("override", ("sglang.srt.runtime_context._ConfigBag.override",), ("self", "kwargs")),
)
"""What a sampler of ours needs; all of it or nothing."""

EAGLE = "sglang.srt.speculative.eagle_utils"
TREES = HookPoint("eagle_sample", (f"{EAGLE}.eagle_sample",), ("verify_input", "batch"), open_ended=True)
TREES_SOFTMAX = HookPoint("sampling_softmax", (f"{EAGLE}.sampling_softmax",), ("logits", "temperatures"))
TARGET_PROBS = HookPoint(
    "build_speculative_verify_target_probs",
    ("sglang.srt.speculative.dflash_utils.build_speculative_verify_target_probs",),
    (
        *("next_token_logits", "sampling_info", "draft_token_num", "bs", "max_top_k"),
        *("uniform_top_k_value", "use_sparse_topk"),
    ),
)
