"""Checkpoints with the shapes of sparse-attention models and random weights, small enough for one GPU.

The attention, the indexer and its k have the real sizes; depth, experts and vocabulary are small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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


def _tensors(prefix: str, sizes: Mapping[str, tuple[int, ...]]) -> Iterator[Parameter]:
    """Tensors below a prefix by their sizes: rows and columns of a matrix, or the length of a neutral norm.

    Outputs of a matrix keep the scale of its inputs, so that scores are neither all alike nor infinite.
    """
    for name, size in sizes.items():
        scale = size[1] ** -0.5 if len(size) == 2 else 0.0
        yield Parameter(f"{prefix}{name}.weight", size, scale)


def _constant(name: str, length: int, value: float = 0.0) -> Parameter:
    return Parameter(name, (length,), value=value, dtype=torch.float32)


def _latent_parameters(layers: int, shapes: str) -> Iterator[Parameter]:
    sizes = LATENT[shapes]
    yield Parameter("model.embed_tokens.weight", (VOCABULARY, HIDDEN), 1.0)
    yield from _tensors("", {"lm_head": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)})
    attention = {
        "q_a_layernorm": (sizes.q_rank,),
        "kv_a_layernorm": (KV_RANK,),
        "q_a_proj": (sizes.q_rank, HIDDEN),
        "q_b_proj": (HEADS * (sizes.nope + ROPE), sizes.q_rank),
        "kv_a_proj_with_mqa": (KV_RANK + ROPE, HIDDEN),
        "kv_b_proj": (HEADS * (sizes.nope + sizes.value), KV_RANK),
        "o_proj": (HIDDEN, HEADS * sizes.value),
    }
    indexer = {
        "wq_b": (sizes.index_heads * INDEX_DIM, sizes.q_rank),
        "wk": (INDEX_DIM, HIDDEN),
        "weights_proj": (sizes.index_heads, HIDDEN),
        "k_norm": (INDEX_DIM,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield from _tensors(prefix, {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)})
        yield from _tensors(f"{prefix}self_attn.", attention)
        if sizes.selects(layer):
            yield from _tensors(f"{prefix}self_attn.indexer.", indexer)
            yield _constant(f"{prefix}self_attn.indexer.k_norm.bias", INDEX_DIM)
        if layer == 0:
            yield from _mlp(f"{prefix}mlp.", DENSE_WIDTH)
            continue
        yield from _tensors(prefix, {"mlp.gate": (EXPERTS, HIDDEN)})
        yield _constant(f"{prefix}mlp.gate.e_score_correction_bias", EXPERTS)
        for expert in ("shared_experts", *(f"experts.{number}" for number in range(EXPERTS))):
            yield from _mlp(f"{prefix}mlp.{expert}.", EXPERT_WIDTH)


def _mlp(prefix: str, width: int) -> Iterator[Parameter]:
    sizes = {"gate_proj": (width, HIDDEN), "up_proj": (width, HIDDEN), "down_proj": (HIDDEN, width)}
    return _tensors(prefix, sizes)


def _v4_parameters(layers: int) -> Iterator[Parameter]:
    yield Parameter("embed.weight", (VOCABULARY, V4_HIDDEN), 1.0)
    yield from _tensors("", {"head": (VOCABULARY, V4_HIDDEN), "norm": (V4_HIDDEN,)})
    yield from _hyper_connection("hc_head", V4_STREAMS, 1)
    attention = {
        "wq_a": (V4_Q_RANK, V4_HIDDEN),
        "wkv": (V4_HEAD, V4_HIDDEN),
        "wq_b": (HEADS * V4_HEAD, V4_Q_RANK),
        "wo_a": (V4_OUTPUT_GROUPS * V4_OUTPUT_RANK, HEADS * V4_HEAD // V4_OUTPUT_GROUPS),
        "wo_b": (V4_HIDDEN, V4_OUTPUT_GROUPS * V4_OUTPUT_RANK),
        "q_norm": (V4_Q_RANK,),
        "kv_norm": (V4_HEAD,),
    }
    indexer = {"wq_b": (V4_INDEX_HEADS * INDEX_DIM, V4_Q_RANK), "weights_proj": (V4_INDEX_HEADS, V4_HIDDEN)}
    expert = {
        "w1": (EXPERT_WIDTH, V4_HIDDEN),
        "w3": (EXPERT_WIDTH, V4_HIDDEN),
        "w2": (V4_HIDDEN, EXPERT_WIDTH),
    }
    for layer, kind in enumerate(_v4_layers(layers)):
        prefix = f"layers.{layer}."
        yield from _tensors(prefix, {"attn_norm": (V4_HIDDEN,), "ffn_norm": (V4_HIDDEN,)})
        for part in ("attn", "ffn"):
            yield from _hyper_connection(f"{prefix}hc_{part}", (2 + V4_STREAMS) * V4_STREAMS, 3)
        yield from _tensors(f"{prefix}attn.", attention)
        yield _constant(f"{prefix}attn.attn_sink", HEADS)
        if kind in V4_RATIOS:
            yield from _compressor(f"{prefix}attn.compressor.", V4_HEAD, V4_RATIOS[kind])
        if kind == SPARSE:
            yield from _tensors(f"{prefix}attn.indexer.", indexer)
            yield from _compressor(f"{prefix}attn.indexer.compressor.", INDEX_DIM, V4_RATIOS[kind])
        yield from _tensors(prefix, {"ffn.gate": (EXPERTS, V4_HIDDEN)})
        yield _constant(f"{prefix}ffn.gate.bias", EXPERTS)
        for name in ("shared_experts", *(f"experts.{number}" for number in range(EXPERTS))):
            yield from _tensors(f"{prefix}ffn.{name}.", expert)


def _compressor(prefix: str, head: int, ratio: int) -> Iterator[Parameter]:
    """What makes one key of several tokens; where these are few, keys overlap and each has two halves."""
    width = head * (2 if ratio == V4_RATIOS[SPARSE] else 1)
    yield from _tensors(prefix, {"wkv": (width, V4_HIDDEN), "wgate": (width, V4_HIDDEN), "norm": (head,)})
    yield Parameter(f"{prefix}ape", (ratio, width), 1.0, dtype=torch.float32)


def _hyper_connection(prefix: str, rows: int, scales: int) -> Iterator[Parameter]:
    columns = V4_STREAMS * V4_HIDDEN
    yield Parameter(f"{prefix}_fn", (rows, columns), columns**-0.5, dtype=torch.float32)
    yield _constant(f"{prefix}_base", rows)
    yield _constant(f"{prefix}_scale", scales, 1.0)
