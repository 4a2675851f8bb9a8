"""Models with the shapes of sparse-attention models and random weights, small enough for one GPU.

The attention, the indexer and its k have the real sizes; depth, experts and vocabulary are small.
"""

import importlib
import itertools
import json
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gvr_topk.integrations._kit.transaction import Transaction

V32, GLM5, GLM52, V4 = "v32", "glm5", "glm52", "v4"
SHAPES = {V32: "DeepSeek-V3.2", GLM5: "GLM-5", GLM52: "GLM-5.2", V4: "DeepSeek-V4"}
"""Names of the models whose shapes there are."""

VOCABULARY, HEADS = 32768, 64
LOGIT_SPREAD = 3.0
"""Standard deviation of logits, near that of language models."""

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
    """Sizes in which DeepSeek-V3.2 and the GLMs differ, which are one model to vLLM."""

    q_rank: int  # of the queries' latent
    nope: int  # of a head: the part of a key without a position
    value: int  # of a head: a value
    index_heads: int
    # The first layers select, and behind them every so many; a layer between them attends to what the one
    # before it chose, and has no indexer.
    selects_every: int = 1
    selects_first: int = 1


LATENT = {
    V32: LatentAttention(1536, 128, 128, 64),
    GLM5: LatentAttention(2048, 192, 256, 32),
    GLM52: LatentAttention(2048, 192, 256, 32, selects_every=4, selects_first=3),
}
"""Sizes of each of them."""


def model_config(
    layers: int, drafts: int = 0, shapes: str = V32, vocabulary: int = VOCABULARY
) -> dict[str, Any]:
    """The contents of ``config.json``.

    The first layer has a dense MLP, the others have experts; with the shapes of DeepSeek-V4 all have experts.
    With any drafts, the model has one layer more, which predicts further tokens (MTP).
    """
    common = {
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": min(drafts, 1),
        "num_attention_heads": HEADS,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "moe_intermediate_size": 512,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "max_position_embeddings": 1 << 21,  # the trial's are shorter
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
        "hidden_size": 2048,
        "num_key_value_heads": HEADS,
        "q_lora_rank": sizes.q_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": sizes.nope,
        "v_head_dim": sizes.value,
        "index_n_heads": sizes.index_heads,
        "index_topk": 2048,
        "intermediate_size": 4096,
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
    """What the shapes of DeepSeek-V4 add: the sizes are those of DeepSeek-V4-Flash."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "layer_types": [V4_LAYERS[layer % len(V4_LAYERS)] for layer in range(layers)],
        "compress_rates": V4_RATIOS,
        "index_n_heads": 64,
        "index_topk": 512,
        "mlp_layer_types": ["moe"] * layers,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,  # streams of its hyper-connections
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rms_norm_eps": 1e-6,
    }


def write_model(
    folder: Path, layers: int, drafts: int = 0, shapes: str = V32, vocabulary: int = VOCABULARY
) -> None:
    """Write the configuration, from which an engine makes the model; `fill_weights` gives it its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(model_config(layers, drafts, shapes, vocabulary), indent=1) + "\n"
    )


def write_tokenizer(folder: Path, words: int) -> None:
    """Write a tokenizer whose tokens are the words of four letters, as many as there are, in their order."""
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    vocabulary = {"".join(word): token for token, word in enumerate(itertools.islice(letters, words))}
    first, second, *_ = vocabulary
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": first}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": first, "eos_token": second}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def fill_weights(seeds: Iterator[int]) -> Callable[[torch.nn.Module], None]:
    """What fills a module's own tensors, but not those of the modules in it.

    vLLM's dummy weights are so small that all scores and logits are nearly alike. Here outputs of a matrix
    keep the scale of its inputs, those of the head are `LOGIT_SPREAD` times as far apart, embeddings have the
    scale 1, and norms are neutral. Each tensor takes a seed. The workers of an engine fill in the same order,
    and so alike.
    """

    def fill(module: torch.nn.Module) -> None:
        kind = type(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            if parameter.dim() < 2:
                parameter.data.fill_(float(name.endswith(("weight", "scale"))))
                continue
            generator = torch.Generator(parameter.device).manual_seed(next(seeds))
            scale = 1.0 if "VocabParallelEmbedding" in kind else parameter.shape[-1] ** -0.5
            scale *= LOGIT_SPREAD if "LMHead" in kind else 1.0
            drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.data.copy_(drawn * scale)

    return fill


def patch_loading(patches: Transaction) -> None:
    """Have the engine of this process fill models by `fill_weights`."""
    loader = importlib.import_module("vllm.model_executor.model_loader.dummy_loader")
    fill = fill_weights(itertools.count())

    def load_weights(self: Any, model: torch.nn.Module, *ignored: Any, **named: Any) -> None:
        for module in model.modules():
            fill(module)

    patches.wrap(loader, "DummyModelLoader.load_weights", lambda original: load_weights)
