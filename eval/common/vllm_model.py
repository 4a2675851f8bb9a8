"""A checkpoint with the shapes of DeepSeek-V3.2's attention and random weights, small enough for one GPU.

The indexer has the real sizes (64 heads of 128, k of 2,048); depth, experts and vocabulary are small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HIDDEN, VOCABULARY, HEADS = 2048, 32768, 64
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 1536, 512, 128, 64, 128
INDEX_HEADS, INDEX_DIM, TOPK = 64, 128, 2048
DENSE_WIDTH, EXPERT_WIDTH, EXPERTS = 4096, 512, 8


def model_config(layers: int, drafts: int = 0) -> dict[str, Any]:
    """The contents of ``config.json``.

    Parameters
    ----------
    layers : int
        The first has a dense MLP, the others have experts.
    drafts : int
        With any, the model has one layer more, which predicts further tokens (MTP).
    """
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": min(drafts, 1),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": TOPK,
        "intermediate_size": DENSE_WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "ep_size": 1,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write_model(folder: Path, layers: int, drafts: int = 0, weights: bool = True) -> None:
    """Write the checkpoint; what is there already is kept.

    Parameters
    ----------
    folder : Path
    layers, drafts : int
        As for `model_config`.
    weights : bool
        Without, the configuration alone, for an engine that fills the model itself.

    Raises
    ------
    ImportError
        ``safetensors``, which comes with vLLM, is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(layers, drafts), indent=1) + "\n")
    target = folder / "model.safetensors"
    if not weights or target.is_file():
        return
    from safetensors.torch import save_file

    partial = folder / "model.partial"
    save_file(dict(_weights(layers)), partial, metadata={"format": "pt"})
    partial.replace(target)


def matrices(layers: int) -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns of every matrix."""
    yield "model.embed_tokens", VOCABULARY, HIDDEN
    yield "lm_head", VOCABULARY, HIDDEN
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        yield f"{attention}.q_a_proj", Q_RANK, HIDDEN
        yield f"{attention}.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK
        yield f"{attention}.kv_a_proj_with_mqa", KV_RANK + ROPE, HIDDEN
        yield f"{attention}.kv_b_proj", HEADS * (NOPE + VALUE), KV_RANK
        yield f"{attention}.o_proj", HIDDEN, HEADS * VALUE
        yield f"{attention}.indexer.wq_b", INDEX_HEADS * INDEX_DIM, Q_RANK
        yield f"{attention}.indexer.wk", INDEX_DIM, HIDDEN
        yield f"{attention}.indexer.weights_proj", INDEX_HEADS, HIDDEN
        if layer == 0:
            yield from _mlp(f"{prefix}.mlp", DENSE_WIDTH)
            continue
        yield f"{prefix}.mlp.gate", EXPERTS, HIDDEN
        yield from _mlp(f"{prefix}.mlp.shared_experts", EXPERT_WIDTH)
        for expert in range(EXPERTS):
            yield from _mlp(f"{prefix}.mlp.experts.{expert}", EXPERT_WIDTH)


def vectors(layers: int) -> Iterator[tuple[str, int, float]]:
    """Name, length and value of every vector; all norms are neutral."""
    yield "model.norm.weight", HIDDEN, 1.0
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", HIDDEN, 1.0
        yield f"{prefix}.post_attention_layernorm.weight", HIDDEN, 1.0
        yield f"{prefix}.self_attn.q_a_layernorm.weight", Q_RANK, 1.0
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", KV_RANK, 1.0
        yield f"{prefix}.self_attn.indexer.k_norm.weight", INDEX_DIM, 1.0
        yield f"{prefix}.self_attn.indexer.k_norm.bias", INDEX_DIM, 0.0
        if layer > 0:
            yield f"{prefix}.mlp.gate.e_score_correction_bias", EXPERTS, 0.0


def _mlp(prefix: str, width: int) -> Iterator[tuple[str, int, int]]:
    yield f"{prefix}.gate_proj", width, HIDDEN
    yield f"{prefix}.up_proj", width, HIDDEN
    yield f"{prefix}.down_proj", HIDDEN, width


def _weights(layers: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, rows, columns in matrices(layers):
        # Outputs keep the scale of inputs, so that scores are neither all alike nor infinite.
        scale = 1.0 if name == "model.embed_tokens" else columns**-0.5
        values = torch.randn(rows, columns, generator=generator) * scale
        yield f"{name}.weight", values.to(torch.bfloat16)
    for name, length, value in vectors(layers):
        kind = torch.float32 if name.endswith("bias") else torch.bfloat16
        yield name, torch.full((length,), value, dtype=kind)
