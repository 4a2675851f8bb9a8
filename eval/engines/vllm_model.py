"""Checkpoints with the shapes of sparse-attention models and random weights, small enough for one GPU.

The attention, the indexer and its k have the real sizes; depth, experts and vocabulary are small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

V32, GLM5, GLM52, V4 = "v32", "glm5", "glm52", "v4"
SHAPES = {V32: "DeepSeek-V3.2", GLM5: "GLM-5", GLM52: "GLM-5.2", V4: "DeepSeek-V4"}
"""Names of the models whose shapes there are."""

HIDDEN, VOCABULARY, HEADS = 2048, 32768, 64
KV_RANK, ROPE, INDEX_DIM, TOPK = 512, 64, 128, 2048
DENSE_WIDTH, EXPERT_WIDTH, EXPERTS = 4096, 512, 8
POSITIONS = 163840
"""Longest context of every model; the trial's are shorter."""

V4_HIDDEN, V4_HEAD, V4_Q_RANK, V4_OUTPUT_GROUPS, V4_OUTPUT_RANK = 4096, 512, 1024, 8, 1024
V4_INDEX_HEADS, V4_TOPK, V4_STREAMS = 64, 512, 4
"""Those of DeepSeek-V4-Flash; the streams are those of its hyper-connections."""

SLIDING, SPARSE, COMPRESSED = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
V4_LAYERS = (SLIDING, SPARSE, COMPRESSED, SPARSE)
"""Attention of four layers in turn. Sparse ones alone have an indexer."""

V4_RATIOS = {SPARSE: 4, COMPRESSED: 128}
"""Tokens that one key stands for; a row of the indexer's scores is as many times shorter than its context."""


@dataclass(frozen=True)
class LatentAttention:
    """Sizes in which DeepSeek-V3.2 and the GLMs differ, which are one model to vLLM.

    Attributes
    ----------
    q_rank : int
        Of the queries' latent.
    nope, value : int
        Of a head: the part of a key without a position, and a value.
    index_heads : int
        Heads of the indexer.
    selects_every, selects_first : int
        The first layers select, and behind them every so many; a layer between them attends to what the one
        before it chose, and has no indexer.
    """

    q_rank: int
    nope: int
    value: int
    index_heads: int
    selects_every: int = 1
    selects_first: int = 1

    def selects(self, layer: int) -> bool:
        """Whether a layer has an indexer."""
        return max(layer - self.selects_first + 1, 0) % self.selects_every == 0


LATENT = {
    V32: LatentAttention(1536, 128, 128, 64),
    GLM5: LatentAttention(2048, 192, 256, 32),
    GLM52: LatentAttention(2048, 192, 256, 32, selects_every=4, selects_first=3),
}
"""Sizes of each of them."""


class Parameter(NamedTuple):
    """One tensor of a checkpoint.

    Attributes
    ----------
    name : str
    shape : tuple of int
    scale : float
        Deviation of its values, which are normal; with 0 all of them are `value`.
    value : float
    dtype : torch.dtype
    """

    name: str
    shape: tuple[int, ...]
    scale: float = 0.0
    value: float = 1.0
    dtype: torch.dtype = torch.bfloat16


def model_config(layers: int, drafts: int = 0, shapes: str = V32) -> dict[str, Any]:
    """The contents of ``config.json``.

    Parameters
    ----------
    layers : int
        The first has a dense MLP, the others have experts; with the shapes of DeepSeek-V4 all have experts.
    drafts : int
        With any, the model has one layer more, which predicts further tokens (MTP).
    shapes : {"v32", "glm5", "glm52", "v4"}
    """
    common = {
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": min(drafts, 1),
        "num_attention_heads": HEADS,
        "qk_rope_head_dim": ROPE,
        "index_head_dim": INDEX_DIM,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "max_position_embeddings": POSITIONS,
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return common | (_v4_config(layers) if shapes == V4 else _latent_config(shapes))


def _latent_config(shapes: str) -> dict[str, Any]:
    sizes = LATENT[shapes]
    config = {
        "hidden_size": HIDDEN,
        "num_key_value_heads": HEADS,
        "q_lora_rank": sizes.q_rank,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": sizes.nope,
        "v_head_dim": sizes.value,
        "index_n_heads": sizes.index_heads,
        "index_topk": TOPK,
        "intermediate_size": DENSE_WIDTH,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "ep_size": 1,
    }
    if shapes == V32:
        return config | {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-6,
        }
    config |= {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6 if shapes == GLM5 else 8e6},
        "indexer_rope_interleave": True,
        "rms_norm_eps": 1e-5,
    }
    if sizes.selects_every > 1:
        config |= {
            "index_topk_freq": sizes.selects_every,
            "index_skip_topk_offset": sizes.selects_first,
            "index_share_for_mtp_iteration": True,
        }
    return config


def _v4_config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": V4_HIDDEN,
        "num_key_value_heads": 1,
        "head_dim": V4_HEAD,
        "q_lora_rank": V4_Q_RANK,
        "o_groups": V4_OUTPUT_GROUPS,
        "o_lora_rank": V4_OUTPUT_RANK,
        "sliding_window": 128,
        "layer_types": _v4_layers(layers),
        "compress_rates": V4_RATIOS,
        "index_n_heads": V4_INDEX_HEADS,
        "index_topk": V4_TOPK,
        "mlp_layer_types": ["moe"] * layers,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": V4_STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rms_norm_eps": 1e-6,
    }


def _v4_layers(layers: int) -> list[str]:
    return [V4_LAYERS[layer % len(V4_LAYERS)] for layer in range(layers)]


def write_model(folder: Path, layers: int, drafts: int = 0, weights: bool = True, shapes: str = V32) -> None:
    """Write the checkpoint; what is there already is kept.

    Parameters
    ----------
    folder : Path
    layers, drafts : int
        As for `model_config`.
    weights : bool
        Without, the configuration alone, for an engine that fills the model itself.
    shapes : str
        As for `model_config`.

    Raises
    ------
    ImportError
        ``safetensors``, which comes with vLLM, is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(layers, drafts, shapes), indent=1) + "\n")
    target = folder / "model.safetensors"
    if not weights or target.is_file():
        return
    from safetensors.torch import save_file

    partial = folder / "model.partial"
    save_file(dict(random_weights(layers, shapes)), partial, metadata={"format": "pt"})
    partial.replace(target)


def random_weights(layers: int, shapes: str = V32) -> Iterator[tuple[str, Tensor]]:
    """Name and values of every tensor of a checkpoint, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    for name, shape, scale, value, dtype in parameters(layers, shapes):
        if scale > 0:
            yield name, (torch.randn(shape, generator=generator) * scale).to(dtype)
        else:
            yield name, torch.full(shape, value, dtype=dtype)


def parameters(layers: int, shapes: str = V32) -> Iterator[Parameter]:
    """Every tensor of a checkpoint, by the names that the published ones have.

    Parameters
    ----------
    layers : int
    shapes : str
        As for `model_config`.
    """
    yield from _v4_parameters(layers) if shapes == V4 else _latent_parameters(layers, shapes)


def _matrix(name: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Parameter:
    # Outputs keep the scale of inputs, so that scores are neither all alike nor infinite.
    return Parameter(name, (rows, columns), columns**-0.5, dtype=dtype)


def _norm(name: str, length: int) -> Parameter:
    """All norms are neutral."""
    return Parameter(f"{name}.weight", (length,))


def _constant(name: str, length: int, value: float) -> Parameter:
    return Parameter(name, (length,), value=value, dtype=torch.float32)


def _latent_parameters(layers: int, shapes: str) -> Iterator[Parameter]:
    sizes = LATENT[shapes]
    yield Parameter("model.embed_tokens.weight", (VOCABULARY, HIDDEN), 1.0)
    yield _matrix("lm_head.weight", VOCABULARY, HIDDEN)
    yield _norm("model.norm", HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        yield _norm(f"{prefix}.input_layernorm", HIDDEN)
        yield _norm(f"{prefix}.post_attention_layernorm", HIDDEN)
        yield _norm(f"{attention}.q_a_layernorm", sizes.q_rank)
        yield _norm(f"{attention}.kv_a_layernorm", KV_RANK)
        yield _matrix(f"{attention}.q_a_proj.weight", sizes.q_rank, HIDDEN)
        yield _matrix(f"{attention}.q_b_proj.weight", HEADS * (sizes.nope + ROPE), sizes.q_rank)
        yield _matrix(f"{attention}.kv_a_proj_with_mqa.weight", KV_RANK + ROPE, HIDDEN)
        yield _matrix(f"{attention}.kv_b_proj.weight", HEADS * (sizes.nope + sizes.value), KV_RANK)
        yield _matrix(f"{attention}.o_proj.weight", HIDDEN, HEADS * sizes.value)
        if sizes.selects(layer):
            indexer = f"{attention}.indexer"
            yield _matrix(f"{indexer}.wq_b.weight", sizes.index_heads * INDEX_DIM, sizes.q_rank)
            yield _matrix(f"{indexer}.wk.weight", INDEX_DIM, HIDDEN)
            yield _matrix(f"{indexer}.weights_proj.weight", sizes.index_heads, HIDDEN)
            yield _norm(f"{indexer}.k_norm", INDEX_DIM)
            yield _constant(f"{indexer}.k_norm.bias", INDEX_DIM, 0.0)
        if layer == 0:
            yield from _latent_mlp(f"{prefix}.mlp", DENSE_WIDTH)
            continue
        yield _matrix(f"{prefix}.mlp.gate.weight", EXPERTS, HIDDEN)
        yield _constant(f"{prefix}.mlp.gate.e_score_correction_bias", EXPERTS, 0.0)
        yield from _latent_mlp(f"{prefix}.mlp.shared_experts", EXPERT_WIDTH)
        for expert in range(EXPERTS):
            yield from _latent_mlp(f"{prefix}.mlp.experts.{expert}", EXPERT_WIDTH)


def _latent_mlp(prefix: str, width: int) -> Iterator[Parameter]:
    yield _matrix(f"{prefix}.gate_proj.weight", width, HIDDEN)
    yield _matrix(f"{prefix}.up_proj.weight", width, HIDDEN)
    yield _matrix(f"{prefix}.down_proj.weight", HIDDEN, width)


def _v4_parameters(layers: int) -> Iterator[Parameter]:
    yield Parameter("embed.weight", (VOCABULARY, V4_HIDDEN), 1.0)
    yield _matrix("head.weight", VOCABULARY, V4_HIDDEN)
    yield _norm("norm", V4_HIDDEN)
    yield from _hyper_connection("hc_head", V4_STREAMS, 1)
    for layer, kind in enumerate(_v4_layers(layers)):
        prefix = f"layers.{layer}"
        yield _norm(f"{prefix}.attn_norm", V4_HIDDEN)
        yield _norm(f"{prefix}.ffn_norm", V4_HIDDEN)
        for part in ("attn", "ffn"):
            yield from _hyper_connection(f"{prefix}.hc_{part}", (2 + V4_STREAMS) * V4_STREAMS, 3)
        yield from _v4_attention(f"{prefix}.attn", kind)
        yield _matrix(f"{prefix}.ffn.gate.weight", EXPERTS, V4_HIDDEN)
        yield _constant(f"{prefix}.ffn.gate.bias", EXPERTS, 0.0)
        for expert in ("shared_experts", *(f"experts.{number}" for number in range(EXPERTS))):
            yield _matrix(f"{prefix}.ffn.{expert}.w1.weight", EXPERT_WIDTH, V4_HIDDEN)
            yield _matrix(f"{prefix}.ffn.{expert}.w3.weight", EXPERT_WIDTH, V4_HIDDEN)
            yield _matrix(f"{prefix}.ffn.{expert}.w2.weight", V4_HIDDEN, EXPERT_WIDTH)


def _v4_attention(prefix: str, kind: str) -> Iterator[Parameter]:
    yield _matrix(f"{prefix}.wq_a.weight", V4_Q_RANK, V4_HIDDEN)
    yield _matrix(f"{prefix}.wkv.weight", V4_HEAD, V4_HIDDEN)
    yield _matrix(f"{prefix}.wq_b.weight", HEADS * V4_HEAD, V4_Q_RANK)
    yield _matrix(
        f"{prefix}.wo_a.weight", V4_OUTPUT_GROUPS * V4_OUTPUT_RANK, HEADS * V4_HEAD // V4_OUTPUT_GROUPS
    )
    yield _matrix(f"{prefix}.wo_b.weight", V4_HIDDEN, V4_OUTPUT_GROUPS * V4_OUTPUT_RANK)
    yield _norm(f"{prefix}.q_norm", V4_Q_RANK)
    yield _norm(f"{prefix}.kv_norm", V4_HEAD)
    yield _constant(f"{prefix}.attn_sink", HEADS, 0.0)
    if kind in V4_RATIOS:
        yield from _compressor(f"{prefix}.compressor", V4_HEAD, V4_RATIOS[kind])
    if kind == SPARSE:
        yield _matrix(f"{prefix}.indexer.wq_b.weight", V4_INDEX_HEADS * INDEX_DIM, V4_Q_RANK)
        yield _matrix(f"{prefix}.indexer.weights_proj.weight", V4_INDEX_HEADS, V4_HIDDEN)
        yield from _compressor(f"{prefix}.indexer.compressor", INDEX_DIM, V4_RATIOS[kind])


def _compressor(prefix: str, head: int, ratio: int) -> Iterator[Parameter]:
    """What makes one key of several tokens; where these are few, keys overlap and each has two halves."""
    width = head * (2 if ratio == V4_RATIOS[SPARSE] else 1)
    yield _matrix(f"{prefix}.wkv.weight", width, V4_HIDDEN)
    yield _matrix(f"{prefix}.wgate.weight", width, V4_HIDDEN)
    yield _norm(f"{prefix}.norm", head)
    yield Parameter(f"{prefix}.ape", (ratio, width), 1.0, dtype=torch.float32)


def _hyper_connection(prefix: str, rows: int, scales: int) -> Iterator[Parameter]:
    yield _matrix(f"{prefix}_fn", rows, V4_STREAMS * V4_HIDDEN, torch.float32)
    yield _constant(f"{prefix}_base", rows, 0.0)
    yield _constant(f"{prefix}_scale", scales, 1.0)
