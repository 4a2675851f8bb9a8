"""The one table of what the integration assumes about TensorRT-LLM, from version to version.

An entry of `SHAPES` is one shape of the sources, and says where things are and what they are called. Which
shape is installed is decided by what the sources hold, not by a version number, because pre-releases and
builds from source carry numbers that say little (`gvr_topk.integrations.tensorrt_llm.inspection`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gvr_topk.config import SWITCH
from gvr_topk.integrations._kit.environment import ENABLE_SAMPLER_TRTLLM
from gvr_topk.integrations._kit.signatures import PatchPoint

NAME, ENGINE = "TensorRT-LLM", "tensorrt_llm"
LLM_ARGS = "tensorrt_llm.llmapi.llm_args"
TOP_K = "tensorrt_llm._torch.modules.top_k"
FUSED_SAMPLER = "tensorrt_llm._torch.pyexecutor.sampler.ops.fused"
"""Came with pull request 18515 in September 2026; older versions do not have it."""

SUPPORTED = "1.2 to 1.4.0rc1"
"""Versions whose sources the table was written from."""


@dataclass(frozen=True)
class UpstreamShape:
    """One shape of TensorRT-LLM's sources."""

    versions: str  # releases that have this shape, for messages
    dsa: str  # module or package of the DSA backend
    indexer: tuple[str, ...]  # parameters of ``Indexer.sparse_attn_indexer``
    has_top_k: bool = False
    """Whether every sparse backend selects through the class ``TopK``. Then that is hooked and not the op."""

    @property
    def points(self) -> tuple[PatchPoint, ...]:
        """All points that must be there, in the order in which they are reported."""
        selection = self.top_k_decode if self.has_top_k else self.op
        return (
            CONFIG,
            ARGS,
            PatchPoint(
                "Indexer.__init__",
                "method",
                self.dsa,
                ("layer_idx",),
                "not changed; layer_idx names the layer",
                submodule="indexer",
                more="anywhere",
            ),
            self.indexer_call,
            self.metadata_prepare,
            PatchPoint(
                "DSACacheManager.get_indexer_k_cache_buffers",
                "method",
                self.dsa,
                ("self", "layer_idx"),
                "not changed; what is kept by request lives as long as the manager",
                submodule="cache_manager",
            ),
            selection,
            METADATA_OBJECT,
            MANAGER_OBJECT,
        )

    @property
    def indexer_call(self) -> PatchPoint:
        return PatchPoint(
            "Indexer.sparse_attn_indexer",
            "method",
            self.dsa,
            self.indexer,
            "wrapped: says which layer and batch a top-k is for",
            submodule="indexer",
        )

    @property
    def metadata_prepare(self) -> PatchPoint:
        return PatchPoint(
            "DSAtrtllmAttentionMetadata.prepare",
            "method",
            self.dsa,
            ("self",),
            "wrapped: fills the slot of each row once per step",
            submodule="metadata",
        )

    @property
    def op(self) -> PatchPoint:
        return PatchPoint(
            "torch.ops.trtllm.indexer_topk_decode",
            "op",
            self.dsa,
            ("logits", "seq_lens", "indices", "next_n", "index_topk"),
            "replaced; the original stays as the last fallback",
        )

    @property
    def top_k_decode(self) -> PatchPoint:
        return PatchPoint(
            "TopK._forward_decode",
            "method",
            TOP_K,
            ("self", "scores", "sequence_lengths", "scan_lengths", "output_indices", "next_n"),
            "wrapped: runs our op; the original stays as the last fallback",
            more="any",
        )


CONFIG = PatchPoint(
    "DeepSeekSparseAttentionConfig",
    "class",
    LLM_ARGS,
    (),
    f"gains {SWITCH} where it is missing",
)
ARGS = PatchPoint(
    "TorchLlmArgs",
    "class",
    LLM_ARGS,
    (),
    "gains the optional section gvr_topk; what a validated YAML asks for is carried to the workers",
)
METADATA_OBJECT = PatchPoint(
    "DSAtrtllmAttentionMetadata()",
    "instance",
    "",
    (
        "kv_cache_manager",
        "request_ids",
        "seq_lens",
        "num_contexts",
        "num_generations",
        "num_ctx_tokens",
        "num_tokens",
        "sparse_mla_topk|num_sparse_topk",
        "max_num_sequences|max_num_requests",
        "kv_lens_cuda_runtime|kv_lens_cuda",
    ),
    "read once per step, on the host",
)
MANAGER_OBJECT = PatchPoint(
    "DSACacheManager()",
    "instance",
    "",
    ("layer_offsets", "num_local_layers"),
    "read when the state is allocated",
)

_FILTERS = ("logits", "temperatures", "top_ks", "top_ps", "min_ps")
_WRAPPED = f"with {ENABLE_SAMPLER_TRTLLM}=1 wrapped: runs our op; the original stays as the fallback"
SPECULATION = "tensorrt_llm._torch.speculative.interface"
"""Module that calls the fused sampler, and knows the seed of requests without one."""

SAMPLER_POINTS = tuple(
    PatchPoint(name, "function", FUSED_SAMPLER, parameters, _WRAPPED)
    for name, parameters in (
        ("fused_sample_from_logits", (*_FILTERS, "seed", "offset")),
        ("fused_sample_from_logits_with_probs", (*_FILTERS, "seed", "offset")),
        ("fused_compute_probs_from_logits", _FILTERS),
    )
)
"""The fused sampler. Without one of these functions only sampling stays TensorRT-LLM's own."""

_BACKEND = "tensorrt_llm._torch.attention_backend.sparse.dsa"
_MOVED = "tensorrt_llm._torch.attention.backends.sparse.dsa"
_CALL = ("self", "metadata", "hidden_states", "q_fp8", "k_fp8", "k_scale", "weights")

SHAPES: tuple[UpstreamShape, ...] = (
    UpstreamShape(
        "1.3 from about rc27, 1.4.0rc0 to rc1", _MOVED, (*_CALL, "q_scale", "is_generation"), has_top_k=True
    ),
    UpstreamShape("1.3 from about rc25", _BACKEND, (*_CALL, "q_scale", "is_generation")),
    UpstreamShape("1.3 to about rc24", _BACKEND, (*_CALL, "use_custom_topk", "q_scale", "is_generation")),
    UpstreamShape("early 1.3 pre-releases", _BACKEND, (*_CALL, "use_custom_topk", "q_scale")),
    UpstreamShape("1.2", _BACKEND, (*_CALL, "use_custom_topk")),
)
"""Newest first, because the parameters of an older shape may be the first parameters of a newer one."""

DSA_MODULES = tuple(dict.fromkeys(shape.dsa for shape in SHAPES))
