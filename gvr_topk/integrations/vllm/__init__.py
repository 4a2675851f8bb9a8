"""Replace the decode and prefill top-k of vLLM's sparse-attention models, without changing vLLM's files.

vLLM calls `register` through the entry point ``gvr_topk`` of the group ``vllm.general_plugins``, in every
process and before models are loaded. It watches for some modules of vLLM and patches each once it has been
imported. Of any model it replaces the V2 model runner's sampler, what accepts drafts, and log-probabilities,
unless ``GVR_TOPK_SAMPLER=0``. With ``GVR_TOPK_VLLM_DCP=1`` it replaces how ranks that share the keys of
requests merge what they have selected.
`gvr_topk.integrations.vllm.upstream` lists what is patched, and what is assumed about it.
"""

from __future__ import annotations

from gvr_topk.integrations.vllm.plugin import counters, describe, prometheus_text, register, unregister

__all__ = ["counters", "describe", "prometheus_text", "register", "unregister"]
