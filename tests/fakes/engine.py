"""Loads a fake TensorRT-LLM, and drives its indexer the way the executor does."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from edited_tree import edited, importable

HERE = Path(__file__).resolve().parent
SHAPES = ("trtllm_1_2", "trtllm_1_3_monolith", "trtllm_1_3_package", "trtllm_1_3_rc25", "trtllm_1_3_rc27")
BY_PHASE = SHAPES[2:]
"""Those whose indexer may be called for one phase of a batch."""

_DSA = "tensorrt_llm/_torch/attention_backend/sparse/dsa"
_TOP_K = "tensorrt_llm/_torch/modules/top_k.py"
_OF_TOP_K = "import tensorrt_llm._torch.modules.top_k\nfrom fake_base import TopKIndexerBase as IndexerBase"
DERIVED = {
    "trtllm_1_3_monolith": (
        "trtllm_1_2",
        (
            ("tensorrt_llm/version.py", "1.2.1", "1.3.0rc2"),
            ("tensorrt_llm/__init__.py", "(*OPS)", "(*fake_base.OPS)"),
            (f"{_DSA}.py", "bool = True,", "bool = True, q_scale: torch.Tensor | None = None,"),
            (f"{_DSA}.py", "torch.ops.trtllm.indexer_topk_decode", "self.decode_by_either_op"),
        ),
    ),
    "trtllm_1_3_rc25": (
        "trtllm_1_3_package",
        (
            ("tensorrt_llm/version.py", "rc22", "rc25"),
            (f"{_DSA}/indexer.py", "        use_custom_topk: bool = True,\n", ""),
            (f"{_DSA}/metadata.py", "PackageMetadata", "DraftMetadata"),
        ),
    ),
    "trtllm_1_3_rc27": (
        "trtllm_1_3_rc25",
        (
            ("tensorrt_llm/version.py", "rc25", "rc27"),
            (f"{_DSA}/indexer.py", "from fake_base import IndexerBase", _OF_TOP_K),
        ),
    ),
    "trtllm_1_4": (
        "trtllm_1_3_rc27",
        (
            ("tensorrt_llm/version.py", "1.3.0rc27", "1.4.0rc1"),
            (_TOP_K, "ratio=1):", "ratio=1, gvr_self_sampling=True, use_gvr_locality_domain=False):"),
            (_TOP_K, "kwargs=None,", "kwargs=None, radix_aux_indices=None, radix_aux_logits=None,"),
            (_TOP_K, "gvr_ext_kwargs\n", "gvr_ext_kwargs, radix_aux_indices, radix_aux_logits\n"),
            (_TOP_K, "] | None,", "] | None, radix_aux_indices, radix_aux_logits,"),
        ),
    ),
}
"""Versions that are like another one but for a few texts, and for what lies in a folder of their own."""

_made = tempfile.TemporaryDirectory(prefix="gvr_topk_fakes_")


@functools.cache
def tree_of(shape: str) -> Path:
    """Folder of a fake; one of `DERIVED` is made when it is first asked for."""
    own = HERE / shape
    if shape not in DERIVED:
        return own
    like, edits = DERIVED[shape]
    tree = edited(tree_of(like), Path(_made.name) / shape, edits)
    if own.exists():  # of a version in which DSA has moved, beside other changes
        sources = tree / "tensorrt_llm" / "_torch"
        (sources / "attention").mkdir()
        (sources / "attention_backend").rename(sources / "attention" / "backends")
        shutil.copytree(own, tree, dirs_exist_ok=True)
    return tree


LLM_ARGS = "tensorrt_llm.llmapi.llm_args"
DSA_MODULES = (
    "tensorrt_llm._torch.attention_backend.sparse.dsa",
    "tensorrt_llm._torch.attention.backends.sparse.dsa",
)
GRAPH_DUMMY = (1 << 64) - 1
MAX_LEN = 4300
DEEPSEEK_V4_RATIOS = [1, 1, 4, 128, 4, 128, 4]
"""Keys per score or per cache entry of DeepSeek-V4's layers. Only those of 4 have an indexer."""


@contextmanager
def fake_package(
    shape: str, *, topk: int = 16, root: Path | None = None, late_ops: bool = False
) -> Iterator[None]:
    """Make ``tensorrt_llm`` importable; afterwards no trace of it is left.

    With `late_ops` its ops are registered by ``fake_base.load_ops`` and not by importing it.
    """
    packages = ("tensorrt_llm", "fake_base")
    with pytest.MonkeyPatch.context() as patch, importable(packages, root or tree_of(shape)):
        patch.setenv("FAKE_INDEX_TOPK", str(topk))
        patch.setenv("FAKE_LATE_OPS", "1" if late_ops else "")
        try:
            yield
        finally:
            if "fake_base" in sys.modules:
                sys.modules["fake_base"].forget_ops()


def load_dsa() -> ModuleType:
    importlib.import_module("tensorrt_llm._torch.pyexecutor.llm_request")
    importlib.import_module("tensorrt_llm.logger")
    return importlib.import_module(dsa_name())


def dsa_name() -> str:
    """Name of the DSA module of the fake that is importable now."""
    parents = {name: name.rsplit(".", 2)[0] for name in DSA_MODULES}
    return next(name for name in DSA_MODULES if importlib.util.find_spec(parents[name]) is not None)


def load_llm_args() -> ModuleType:
    return importlib.import_module(LLM_ARGS)


@functools.cache
def _random(seed: int, columns: int) -> torch.Tensor:
    return torch.randn(MAX_LEN, columns, generator=torch.Generator().manual_seed(seed))


@dataclass
class Request:
    """A request and the random tensors its tokens would produce, so that every run sees the same."""

    request_id: int
    prompt: int
    tokens: int
    seed: int
    done: int = 0  # tokens in the cache

    def tensors(self, layer: int, start: int, count: int, heads: int, dim: int) -> tuple[torch.Tensor, ...]:
        """Queries ``[count, heads, dim]``, keys ``[count, dim]`` and weights ``[count, heads]``."""
        every = _random(1000 * self.seed + layer, heads * dim + dim + heads)
        q, k, weights = every[start : start + count].split([heads * dim, dim, heads], dim=1)
        return q.reshape(count, heads, dim), k, weights


@dataclass
class Engine:
    """One rank: a cache, the indexer of each layer, and the batch metadata of eager and graph steps."""

    dsa: ModuleType
    topk: int = 16
    layers: int = 2
    max_requests: int = 4
    max_len: int = 160
    heads: int = 2
    dim: int = 8
    first_layer: int = 0
    heuristic: bool = False
    cute_dsl: bool = False
    compress_ratio: int = 1
    pp_size: int = 1
    mtp: bool = False
    """Whether the last layer is MTP's. Its draft loop runs after the other layers."""
    attention_dp: bool = False
    """With it, MTP's layer has its keys in the cache of the other layers, and else in one of its own."""
    shared_layers: tuple[int, ...] = ()
    """Layers without an indexer, which reuse what the layer before has selected."""
    takes_back: bool = True
    """Whether the number of accepted rows is unset after the draft loop."""
    manager: Any = field(init=False)
    draft_manager: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        config = SimpleNamespace(
            index_topk=self.topk,
            skip_indexer_for_short_seqs=True,
            enable_heuristic_topk=self.heuristic,
            use_cute_dsl_topk=self.cute_dsl,
            compress_ratios=DEEPSEEK_V4_RATIOS if self.compress_ratio == 4 else [self.compress_ratio],
        )
        compressed = {} if self.compress_ratio == 1 else {"compress_ratio": self.compress_ratio}
        separate = int(self.mtp and not self.attention_dp)
        self.manager = self._cache(self.first_layer, self.layers - separate)
        if separate:
            self.draft_manager = self._cache(self.first_layer + self.layers - 1, 1)
        self.metadata = self.dsa.DSAtrtllmAttentionMetadata(
            max_num_requests=self.max_requests,
            max_num_tokens=self.max_requests * self.max_len,
            kv_cache_manager=self.manager,
            draft_kv_cache_manager=self.draft_manager,
            sparse_attention_config=config,
        )
        self.indexers = [
            None
            if i in self.shared_layers
            else self.dsa.Indexer(
                None, None, None, False, config, None, layer_idx=self.first_layer + i, **compressed
            )
            for i in range(self.layers)
        ]

    def _cache(self, first_layer: int, layers: int) -> Any:
        manager = self.dsa.DSACacheManager(
            num_layers=layers,
            head_dim=self.dim,
            max_seq_len=self.max_len,
            max_batch_size=4 * self.max_requests,
            first_layer=first_layer,
            pp_size=self.pp_size,
        )
        # What was never written is garbage, the same in every run.
        manager.pool.normal_(generator=torch.Generator().manual_seed(first_layer))
        return manager

    def step(
        self,
        contexts: list[tuple[Request, int]],
        generations: list[Request],
        *,
        next_n: int = 1,
        padding: int = 0,
        metadata: Any = None,
        phases: bool = False,
        accepted: list[int] | None = None,
        tell: Any = None,
    ) -> list[torch.Tensor]:
        """Run one forward step of all layers; what each selects of all tokens but dummies, sorted.

        `contexts` has requests with the size of this chunk of their prompt, and each of `generations` has
        `next_n` new tokens. As many dummies as `padding` follow, as in CUDA graphs. With `phases` the indexer
        is called once for context and once for generation, as later versions do. MTP's draft loop is told
        of the `accepted` rows of each generation request, the first one included, where the version has a
        place for them, or `tell` in their place.
        """
        metadata = metadata or self.metadata
        work = [(r, n) for r, n in contexts] + [(r, next_n) for r in generations]
        dummies = [Request(GRAPH_DUMMY, 0, 0, seed=999) for _ in range(padding)]
        everyone = work + [(d, next_n) for d in dummies]
        metadata.set_batch(
            [r.request_id for r, _ in everyone],
            [n for _, n in everyone],
            len(contexts),
            [r.done for r, _ in everyone],
        )
        metadata.prepare()
        results: list[torch.Tensor] = []
        for i, indexer in enumerate(self.indexers):
            drafting = self.mtp and i == self.layers - 1
            tells = drafting and accepted is not None and hasattr(metadata, "mtp_num_accepted")
            if tells:
                counts = [1] * len(contexts) + accepted + [1] * padding
                metadata.set_in_mtp_draft_loop(True)
                metadata.set_mtp_num_accepted(
                    torch.tensor(counts, dtype=torch.int32) if tell is None else tell
                )
            base = sys.modules["fake_base"]
            saved = base.prepare_attn_metadata_for_draft_replay(
                metadata, self.draft_manager if drafting else None
            )
            if indexer is None:
                results.append(results[-1])
            else:
                results.append(self.layer(i, indexer, metadata, everyone, padding * next_n, phases))
            base.restore_attn_metadata_after_draft_replay(metadata, saved)
            if tells:
                metadata.set_in_mtp_draft_loop(False)
                if self.takes_back:
                    metadata.set_mtp_num_accepted(None)
        return results

    def layer(
        self, i: int, indexer: Any, metadata: Any, everyone: list, pad_rows: int, phases: bool
    ) -> torch.Tensor:
        parts = [r.tensors(i, r.done, n, self.heads, self.dim) for r, n in everyone]
        q, k, weights = (torch.cat(p) for p in zip(*parts, strict=True))
        if phases:
            indexer._update_k_cache(k, None, metadata)
            split = metadata.num_ctx_tokens
            chosen = [
                indexer.sparse_attn_indexer(
                    metadata, q[part], q[part], k[part], k[part], weights[part], is_generation=generation
                )
                for part, generation in ((slice(0, split), False), (slice(split, None), True))
                if q[part].shape[0]
            ]
            result = torch.cat(chosen)
        else:
            result = indexer(q, k, weights, metadata)
        return result[: result.shape[0] - pad_rows].sort(dim=1).values
