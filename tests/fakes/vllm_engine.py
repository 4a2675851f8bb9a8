"""Loads the fake vLLM, and drives its indexer layers the way the V2 model runner does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from edited_tree import importable

HERE = Path(__file__).resolve().parent
WIDTH = 400
CHUNK = 9
"""Tokens of a prompt that one step works on."""


@contextmanager
def fake_vllm(root: Path | None = None) -> Iterator[None]:
    """Make ``vllm`` importable; afterwards no trace of it is left."""
    with importable(("vllm",), root or HERE / "vllm_0_33"):
        yield


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 4, "top_p": 0.2, "seed": 3},
    {"temperature": 1e-7, "seed": 4},  # vLLM raises it to 0.01
    {"temperature": 0.7, "seed": -(1 << 63)},
    {"top_k": 5, "seed": 17},
    {"top_k": 1},
    {"temperature": 1.6, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.5, "temperature": 0.9, "seed": (1 << 63) - 1},
    {"min_p": 0.1, "temperature": 1.3},
    {"min_p": 0.02, "top_p": 0.95, "top_k": 30, "seed": 5},
    {"top_k": 1 << 20, "top_p": 1.0, "min_p": 0.0, "seed": 6},
]
"""Parameters of requests of all kinds."""


def sampler_with(
    requests: Sequence[dict[str, Any]] = SAMPLING,
    cls: str = "vllm.v1.worker.gpu.sample.sampler:Sampler",
    **given: Any,
) -> Any:
    """Make a sampler of the V2 runner, with these requests at its first places."""
    module, _, name = cls.partition(":")
    sampler = getattr(importlib.import_module(module), name)(max_num_reqs=len(SAMPLING), **given)
    params = importlib.import_module("vllm.sampling_params").SamplingParams
    for place, request in enumerate(requests):
        sampler.add_request(place, params(**request))
    sampler.apply_staged_writes()
    return sampler


def draft_batch(
    places: Sequence[int], starts: Sequence[int], drafts: Sequence[Sequence[int]], device: str = "cpu"
) -> Any:
    """Make a step of requests, each of which is given its last token, at a position, and then drafts."""
    counts = [1 + len(each) for each in drafts]
    inputs = [token for each in drafts for token in (0, *each)]
    local = torch.tensor([at for count in counts for at in range(count)], dtype=torch.int32)
    ends = np.cumsum([0, *counts], dtype=np.int32)
    mapping = torch.tensor(places, device=device)
    repeats = torch.tensor(counts)
    return importlib.import_module("vllm.v1.worker.gpu.input_batch").InputBatch(
        idx_mapping=mapping,
        idx_mapping_np=np.array(places),
        expanded_idx_mapping=mapping.cpu().repeat_interleave(repeats).to(device),
        expanded_local_pos=local.to(device),
        input_ids=torch.tensor(inputs, dtype=torch.int32, device=device),
        positions=(torch.tensor(starts).repeat_interleave(repeats) + local).to(device),
        logits_indices=torch.arange(len(inputs), device=device),
        seq_lens_cpu_upper_bound=torch.tensor(starts) + repeats,
        cu_num_logits=torch.tensor(ends, device=device),
        cu_num_logits_np=ends,
        seq_lens=(torch.tensor(starts) + repeats).to(device),
    )


def sampler_batch(places: Sequence[int], start: int = 0, device: str = "cpu") -> Any:
    """Make a step of requests without drafts, each two positions behind the one before."""
    return draft_batch(places, range(start + 1, start + 1 + 2 * len(places), 2), [[]] * len(places), device)


def logits_of(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 300) -> torch.Tensor:
    """Make logits with masked tokens; the rows are longer than the vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, width + 20, generator=draw)
    logits[:, ::7] = -torch.inf
    return logits.to(dtype)[:, :width]


def native(sampler: Any) -> Any:
    """Return a call of vLLM's own sampler or rejection sampler, where ours is on."""
    cls, name = type(sampler), "sample" if hasattr(sampler, "sample") else "_verify"

    def call(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cls, name, getattr(cls, name).__wrapped__)
            return sampler(*arguments)

    return call


def same_as_native(sampler: Any, *arguments: Any) -> tuple[Any, Any]:
    """Call a sampler and vLLM's own, which have the same tokens, and return the results of both."""
    got, wanted = sampler(*arguments), native(sampler)(*arguments)
    assert torch.equal(got.num_sampled, wanted.num_sampled)
    assert torch.equal(got.sampled_token_ids, wanted.sampled_token_ids)
    return got, wanted


@dataclass
class Request:
    """One request at its place, with as many keys as it has now."""

    name: str
    length: int
    place: int = -1
    prompted: bool = False  # whether a step has worked on its prompt
    rows: int | None = None  # of its next step, where not as many as the drafts say


@dataclass
class Step:
    """What a step saw and chose for its decode rows, by layer, and for the rows of its prompts."""

    lengths: torch.Tensor
    logits: dict[str, torch.Tensor] = field(default_factory=dict)
    chosen: dict[str, torch.Tensor] = field(default_factory=dict)
    prompts: Step | None = None


class Runner:
    """The parts of a model runner that an indexer sees.

    `seqs` requests can run at once, each with `drafts` draft tokens, and no sequence is longer than `width`.
    Without `v2` they have no places. With `flattening` each decode row is a request of its own to the
    kernels, with `via_op` layers go through the registered op, as those of other models than DeepSeek-V3.2
    do, and with `specials` some scores are NaN or infinite. The scores of a chunk have `logits_bytes`. The
    builder says that `dcp` ranks share the keys, and with `pcp` others in prompts; `part` is the number of
    this rank, of how many that do share them, and how many go to each in turn. `tp` ranks share the rows of
    prompts, and `model` is what the configuration of the model has.
    """

    def __init__(
        self,
        *,
        layers: int = 2,
        seqs: int = 4,
        drafts: int = 0,
        topk: int = 16,
        v2: bool = True,
        flattening: bool = False,
        via_op: bool = False,
        backend: str = "auto",
        specials: bool = True,
        width: int = WIDTH,
        device: str = "cpu",
        logits_bytes: int = 1 << 29,
        dcp: int = 1,
        part: tuple[int, int, int] = (0, 1, 1),
        pcp: bool = False,
        tp: int = 1,
        microbatches: bool = False,
        **model: Any,
    ) -> None:
        attention = importlib.import_module("vllm.models.deepseek_v32.attention")
        builders = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
        self.common = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        self.context = importlib.import_module("vllm.forward_context")
        self.drafts, self.topk, self.v2, self.via_op = drafts, topk, v2, via_op
        self.specials = specials
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=seqs),
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=8),
            kernel_config=SimpleNamespace(sparse_indexer_topk_backend=backend),
            use_v2_model_runner=v2,
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(**{"index_n_heads": 64} | model), max_model_len=width
            ),
            parallel_config=SimpleNamespace(use_ubatching=microbatches),
            fake_flattening=flattening,
            fake_logits_bytes=logits_bytes,
            fake_dcp=dcp,
            fake_part=part,
            fake_pcp=pcp,
            fake_tp=tp,
        )
        self.names = [f"model.layers.{i}.self_attn.indexer.k_cache" for i in range(layers)]
        self.device = torch.device(device)
        self.builder = builders.DeepseekV32IndexerMetadataBuilder(
            None, self.names, config, self.device, block_table_width=8
        )
        rows = max(seqs * (1 + drafts), 8) + 4 + CHUNK * seqs
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)  # one address, for captured graphs
        # All layers share it, and it is wider than what is chosen.
        self.buffer = torch.zeros((rows, topk + 3), dtype=torch.int32, device=device)
        self.caches = [
            SimpleNamespace(prefix=name, kv_cache=torch.empty(rows, width, device=device))
            for name in self.names
        ]
        self.layers = [
            attention.DeepseekV32Attention(cache, topk, width, self.buffer, backend) for cache in self.caches
        ]
        for each in self.layers:
            op = each.indexer_op
            op.dcp_rank, op.dcp_world_size, op.cp_interleave = part
        self.everything: dict[str, torch.Tensor] = {}  # what each layer has left in the buffer
        self.free = list(range(seqs))  # the last one is given first
        self.generator = torch.Generator().manual_seed(0)

    def add(self, name: str, length: int) -> Request:
        return Request(name, length, self.free.pop())

    def finish(self, request: Request) -> None:
        self.free.append(request.place)

    def prepare(self, decode: Sequence[Request], prefill: Sequence[Request] = (), pads: int = 0) -> Any:
        """Build metadata: decode rows first, then prompts, or requests that only fill a graph up.

        A request whose first step is a decode row had its prompt cached but for a token.
        """
        queries = [request.rows or 1 + self.drafts for request in decode] + [CHUNK] * len(prefill)
        requests = [*decode, *prefill]
        if pads:
            assert not prefill
            requests += [Request("pad", 0)] * pads
            queries += [0 if self.builder.use_flattening else 1 + self.drafts] * pads
        starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
        prompts = [not request.prompted for request in decode] + [True] * len(prefill)
        for request in [*decode, *prefill]:
            request.prompted = True
        lengths = [request.length for request in requests]
        self.lengths[: len(requests)] = torch.tensor(lengths, dtype=torch.int32)
        common = self.common(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=self.lengths[: len(requests)],
            num_reqs=len(requests),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(queries, default=0),
            max_seq_len=max(lengths, default=0),
            block_table_tensor=torch.empty(0),
            slot_mapping=torch.empty(0),
            is_prefilling=torch.tensor(prompts, dtype=torch.bool),
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
            req_idx=np.array([r.place for r in [*decode, *prefill]], dtype=np.intp) if self.v2 else None,
        )
        return self.builder.build(common_prefix_len=0, common_attn_metadata=common)

    def fill(self) -> None:
        """Give every layer new scores."""
        for cache in self.caches:
            cache.kv_cache.copy_(self._scores(cache.kv_cache.shape))

    def forward(self, metadata: Any) -> dict[str, torch.Tensor]:
        """Run every layer; what each has chosen for the decode rows."""
        rows = 0 if metadata.decode is None else metadata.decode.seq_lens.numel()
        tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
        hidden = torch.empty((tokens, 1), device=self.device)
        chosen = {}
        with self.context.set_forward_context(dict.fromkeys(self.names, metadata)):
            for layer, name in zip(self.layers, self.names, strict=True):
                (layer.indexer_op if self.via_op else layer)(hidden)
                chosen[name] = self.buffer[:rows, : self.topk].clone()
                self.everything[name] = self.buffer[:, : self.topk].clone()
        return chosen

    def step(self, decode: Sequence[Request], prefill: Sequence[Request] = (), pads: int = 0) -> Step:
        """Run one step outside of any graph."""
        metadata = self.prepare(decode, prefill, pads)
        self.fill()
        return self.seen(metadata, self.forward(metadata))

    def seen(self, metadata: Any, chosen: dict[str, torch.Tensor]) -> Step:
        """A step on the CPU, as tests compare it."""
        ends = torch.empty(0) if metadata.decode is None else metadata.decode.seq_lens.reshape(-1)
        ends = ends.cpu().clone()
        logits = {cache.prefix: cache.kv_cache[: len(ends)].cpu().clone() for cache in self.caches}
        step = Step(ends, logits, {name: rows.cpu() for name, rows in chosen.items()})
        if metadata.prefill is not None:
            chunks = metadata.prefill.chunks
            rows = slice(chunks[0].token_start, chunks[-1].token_end)
            step.prompts = Step(
                torch.cat([chunk.cu_seqlen_ke - chunk.cu_seqlen_ks for chunk in chunks]).cpu(),
                {cache.prefix: cache.kv_cache[rows].cpu().clone() for cache in self.caches},
                {name: chosen[rows].cpu() for name, chosen in self.everything.items()},
            )
        return step

    def dummy(self, requests: int) -> Any:
        """Build metadata for requests that are none, as before a graph is captured."""
        return self.step(self.dummies(requests))

    def dummies(self, count: int, length: int = 0) -> list[Request]:
        """Requests of a batch that a graph is captured with: vLLM numbers their places from 0."""
        return [Request("dummy", length, place, prompted=True) for place in range(count)]

    def _scores(self, shape: torch.Size) -> torch.Tensor:
        scores = (torch.randn(shape, generator=self.generator) * 3).round()  # few values: the k-th has ties
        if not self.specials:
            return scores
        special = torch.rand(shape, generator=self.generator)
        scores[special < 0.01] = float("nan")
        scores[special > 0.99] = float("-inf")
        return scores
