"""What stress runs launch: configurations, chains of rows, and contents to rewrite tensors with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eval.common.dtypes import DTYPES
from eval.fuzz.draw import Draw
from eval.fuzz.outputs import INT32
from gvr_topk.constants import (
    STATE_FLOATS,
    STATE_INFINITE,
    STATE_MASKED,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
)
from gvr_topk.policy import plan
from gvr_topk.sampling.arguments import LIMIT_WORDS

ROW_ALIGNMENT = 16
"""Aligned rows of a buffer are a multiple of so many elements apart, as an engine's are."""


@dataclass(frozen=True)
class Configuration:
    """One way to call one of the ops.

    Prefill has no state, and so no indices; its tables need `row_slot`. The sampler has neither; its slots
    have parameters of each kind in turn, and `k` columns are for the tokens that it keeps. With noise it is
    asked for tokens alone, so that rows without filters are those that the noise decides. ``topk`` takes
    whole rows, and gives sorted values with their indices.
    """

    name: str  # what the command line calls it
    width: int
    requests: int = 1
    next_n: int = 1  # rows of a request; of prefill, rows of its chunk
    k: int = 2048
    dtype: str = "fp32"  # a key of DTYPES
    path: str = "auto"
    indices: bool = True  # the state keeps the positions that were chosen last
    row_slot: bool = False  # slots, of prefill the rows' requests, by table, in another order than the rows'
    counts: bool = False
    stats: bool = False
    page_size: int = 0  # 0: no page table
    cache_slots: bool = False  # cache slots beside the positions instead of in their place
    pdl: bool = False  # each launch may start while the one before runs
    aligned: bool = True  # rows begin at multiples of 16 bytes
    chains: int = 8  # sequences of steps, each with a stream, where a launch follows the step before it
    op: str = "decode"  # or "prefill", "sample" or "topk"
    offsets: bool = False  # prefill adds an offset to the positions of each request
    longest: int = 0  # key count of most launches, in buffers that are wider; 0: the width
    short_rows: bool = False  # of prefill: every third row or so has at most k columns
    slices: int = 0  # of prefill: slices that the columns come in, with a carry; 0: all at once
    noise: bool = False  # of the sampler: it draws by noise, in place of the inverse of the distribution

    @property
    def is_prefill(self) -> bool:
        return self.op == "prefill"

    @property
    def is_sample(self) -> bool:
        return self.op == "sample"

    @property
    def runs_on_cpu(self) -> bool:
        """Whether what is expected comes from the op itself, on a CPU."""
        return self.op in ("sample", "topk")

    @property
    def written(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of 32-bit words that a launch writes, by the name of the argument."""
        if self.op == "topk":
            return {"values": (1, self.rows * self.k), "indices": (1, 2 * self.rows * self.k)}
        if self.noise:
            return {"out": (1, self.rows)}
        shapes = {"kept" if self.is_sample else "out": (self.rows, self.k)}
        shapes |= {"slots": (self.rows, self.k)} if self.cache_slots else {}
        shapes |= {"counts": (1, self.rows)} if self.counts else {}
        if self.is_sample:
            shapes |= {
                "out": (1, self.rows),
                "logprobs": (1, self.rows),
                "limits": (1, LIMIT_WORDS * self.rows),
            }
        return shapes

    @property
    def rows(self) -> int:
        return self.requests * self.next_n

    @property
    def slots(self) -> int:
        """Slots of one chain: with a table, more than the requests need, and in no order of theirs."""
        return self.requests + 2 if self.row_slot else self.requests

    @property
    def pitch(self) -> int:
        """Elements from row to row."""
        if not self.aligned:
            return self.width | 1
        return -(-self.width // ROW_ALIGNMENT) * ROW_ALIGNMENT


_PREFILL: dict[str, Any] = {"indices": False, "counts": True, "op": "prefill"}
_SAMPLE: dict[str, Any] = {"indices": False, "counts": True, "op": "sample"}
_NOISE: dict[str, Any] = {"indices": False, "op": "sample", "noise": True}
_TOPK: dict[str, Any] = {"indices": False, "op": "topk"}

CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration("fp32-8192x8", 8192, 8, row_slot=True),
    Configuration("fp32-32768x1", 32768),
    Configuration("fp32-70690x1", 70690, row_slot=True),
    Configuration("fp32-131072x1", 131072),
    Configuration("fp32-131072x4", 131072, 4, row_slot=True),
    Configuration("fp32-131072x64", 131072, 64),
    Configuration("fp32-262144x1", 262144, row_slot=True),
    Configuration("fp32-1048576x1", 1048576),
    Configuration("bf16-131072x1", 131072, dtype="bf16", row_slot=True),
    Configuration("bf16-600000x2", 600_000, 2, dtype="bf16", aligned=False),
    Configuration("fp16-70690x4", 70690, 4, dtype="fp16", aligned=False),
    Configuration("drafts-65536x4", 65536, 4, next_n=2, row_slot=True),
    Configuration("k512-131072x2", 131072, 2, k=512, row_slot=True, stats=True),
    Configuration("k4096-131072x1", 131072, k=4096),
    Configuration("k4096-524288x1", 524288, k=4096, row_slot=True),
    Configuration("k20000-524288x1", 524288, k=20_000, row_slot=True),
    Configuration("pages-pdl-131072x2", 131072, 2, row_slot=True, page_size=64, pdl=True),
    Configuration("slots-8192x4", 8192, 4, counts=True, page_size=64, cache_slots=True),
    Configuration(
        "slots-131072x2", 131072, 2, next_n=2, row_slot=True, counts=True, page_size=64, cache_slots=True
    ),
    Configuration("slots-600000x1", 600_000, counts=True, page_size=16, cache_slots=True),
    Configuration("radix_rounds-131072x2", 131072, 2, path="radix_rounds", row_slot=True, counts=True),
    Configuration("paper_gvr-70690x2", 70690, 2, next_n=2, path="paper_gvr", row_slot=True, stats=True),
    Configuration(
        "paper_gvr-slots-70690x2", 70690, 2, path="paper_gvr", counts=True, page_size=64, cache_slots=True
    ),
    Configuration("words-8192x40", 8192, 40, indices=False, row_slot=True),
    Configuration("words-131072x1", 131072, indices=False),
    Configuration("words-1048576x1", 1048576, indices=False, row_slot=True),
    Configuration("wide-8192-131072x8", 131072, 8, row_slot=True, counts=True, longest=8192),
    Configuration("wide-16384-1048576x2", 1048576, 2, row_slot=True, longest=16_384),
    Configuration("prefill-8192x300", 8192, 1, 300, **_PREFILL),
    Configuration("prefill-32768x300", 32768, 1, 300, **_PREFILL),
    Configuration("prefill-short-4096x1200", 4096, 1, 1200, 512, short_rows=True, **_PREFILL),
    Configuration(
        "prefill-short-20000x600", 20_000, 2, 300, dtype="bf16", aligned=False, short_rows=True, **_PREFILL
    ),
    Configuration("prefill-40000x300", 40_000, 1, 300, **_PREFILL),
    Configuration("slices-20000x600", 20_000, 1, 600, slices=3, **_PREFILL),
    Configuration(
        "slices-20000x160", 20_000, 5, 32, 512, "bf16", slices=7, pdl=True, aligned=False, **_PREFILL
    ),
    Configuration(
        *("prefill-slots-20000x160", 20_000, 5, 32, 512, "bf16"),
        **_PREFILL,
        row_slot=True,
        stats=True,
        page_size=64,
        cache_slots=True,
        pdl=True,
        aligned=False,
        offsets=True,
    ),
    Configuration("sample-128256x4", 128_256, 4, k=300, row_slot=True, **_SAMPLE),
    Configuration("sample-50257x8", 50_257, 8, k=64, dtype="bf16", aligned=False, pdl=True, **_SAMPLE),
    Configuration("sample-32768x48", 32_768, 48, k=64, row_slot=True, **_SAMPLE),
    Configuration("noise-50257x8", 50_257, 8, dtype="bf16", aligned=False, pdl=True, **_NOISE),
    Configuration("noise-32768x48", 32_768, 48, row_slot=True, **_NOISE),
    Configuration("topk-131072x8", 131_072, 8, **_TOPK),
    Configuration("topk-50257x40", 50_257, 40, k=50, aligned=False, **_TOPK),
    Configuration("topk-40000x3", 40_000, 3, k=20_000, **_TOPK),
)
"""Every kernel, dtype and optional argument; decode has what the last step left, as integrations do."""

_REWRITTEN_PREFILL = Configuration("prefill", 20_000, 3, next_n=80, indices=False, chains=1, op="prefill")
_REWRITTEN_SAMPLE = Configuration("sample", 128_256, 3, k=300, chains=1, **_SAMPLE)

_REWRITTEN = (
    Configuration("small_row", 8192, 3, chains=1),
    Configuration("resident", 70690, 3, chains=1),
    Configuration("streaming", 600_000, 2, chains=1),
    Configuration("streaming, large k", 600_000, 2, k=9000, chains=1),
    Configuration("fallback", 600_000, 2, k=17_000, chains=1),
    Configuration("fallback, narrowed", 600_000, 2, k=17_000, path="no_hint", chains=1),
    Configuration("paper_gvr", 70690, 3, path="paper_gvr", chains=1),
)

REWRITTEN_TENSORS = ("indices", "state", "seq_lens", "carry", "row_slot", "logits", "parameters")
"""Tensors that another stream may rewrite during a launch. In a chaos build modes take turns over these; a
carry is rewritten under no delay, because under random ones no launch of its slices ends in time."""
GUESSES = ("indices", "state")
"""The rewritten tensors that only say where to look first; no result may depend on them."""

STALE_STATES, SCALED_LOGITS = "state:stale", "logits:scaled"

REWRITINGS = (*REWRITTEN_TENSORS, STALE_STATES, SCALED_LOGITS)
"""What is rewritten: a tensor, by contents of every kind, or of the kind that a suffix names."""


def rewritten_tensor(rewriting: str) -> str:
    """The tensor that one of `REWRITINGS` rewrites."""
    return rewriting.partition(":")[0]


def can_rewrite(configuration: Configuration, rewriting: str) -> bool:
    """Whether a configuration has the tensor, and a kernel that the contents are meant for.

    Scaled scores are for rows that are read while they are searched, and so may be read twice.
    """
    c = configuration
    if c.op == "topk":
        return rewriting in ("logits", SCALED_LOGITS)
    if c.is_sample or rewriting == "parameters":
        return c.is_sample and (
            rewriting in ("logits", SCALED_LOGITS, "parameters") or (rewriting == "row_slot" and c.row_slot)
        )
    if c.is_prefill and rewriting in (STALE_STATES, "state"):
        return False
    if rewriting == SCALED_LOGITS and not c.is_prefill:
        kernel = plan(rows=c.rows, width=c.width, k=c.k, dtype=DTYPES[c.dtype], path=c.path)
        return kernel.family in ("streaming", "fallback")
    return {"row_slot": c.row_slot, "indices": c.indices, "carry": c.slices > 0}.get(rewriting, True)


def rewritten_configurations() -> list[Configuration]:
    """Every kernel with one row and two to a request, with and without statistics, half with a slot table.

    Behind them prefill, without any table, with all of them, and in slices, and the sampler, with and without
    slots, and with as many rows as are streamed, by noise, too; and `topk`.
    """
    tables: dict[str, Any] = {"row_slot": True, "page_size": 64, "cache_slots": True, "offsets": True}
    prefill = [_REWRITTEN_PREFILL, replace(_REWRITTEN_PREFILL, name="prefill-slots", **tables)]
    prefill += [replace(_REWRITTEN_PREFILL, name="slices", slices=3)]
    return [
        replace(
            base,
            name=f"{base.name}-next{next_n}" + ("-stats" if stats else ""),
            next_n=next_n,
            stats=stats,
            row_slot=(next_n == 2) != stats,
        )
        for base in _REWRITTEN
        for next_n in (1, 2)
        for stats in (False, True)
    ] + [
        *prefill,
        _REWRITTEN_SAMPLE,
        replace(_REWRITTEN_SAMPLE, name="sample-slots", row_slot=True),
        replace(_REWRITTEN_SAMPLE, name="sample-streamed", width=32_768, requests=48),
        Configuration("noise-streamed", 32_768, 48, chains=1, **_NOISE),
        Configuration("topk", 131_072, 3, chains=1, **_TOPK),
    ]


CHAINS = ("steady", "loose", "relu", "scaled", "moved", "masked", "rounded", "special")
"""Kinds of chain, taken in turn. The first two are what a predictor is made for; with the others it misses in
some steps or in all, so that every way a launch can go is gone."""

_KEPT_VARIANCE = {"loose": 0.5, "scaled": 0.99}


def chain_steps(kind: str, shape: tuple[int, ...], draw: Draw) -> Iterator[Tensor]:
    """Scores ``(rows, width)`` of consecutive decode steps, fp32: an autoregression, changed by kind."""
    keep = _KEPT_VARIANCE.get(kind, 0.9)
    base, masked = draw.normal(*shape), draw.uniform(*shape) < 0.5
    step = 0
    while True:
        if kind == "relu":  # one in fifteen is positive, the others are equal
            yield (base - 1.5).relu()
        elif kind == "scaled":
            yield base * 4.0 ** (step % 3 - 1)
        elif kind == "moved":
            yield base + 3.0 * (step % 2)
        elif kind == "masked":
            yield torch.where(masked, -torch.inf, base)
        elif kind == "rounded":
            yield (8 * base).round() / 8
        elif kind == "special":
            chance = draw.uniform(*shape)
            scores = torch.where(chance < 1e-3, torch.nan, base)
            yield torch.where(chance > 1 - 1e-3, torch.inf, torch.where(chance > 0.9, -0.0, scores))
        else:
            yield base
        base = keep**0.5 * base + (1 - keep) ** 0.5 * draw.normal(*shape)
        step += 1


def visible_lengths(configuration: Configuration, launch: int) -> int:
    """Key count of a launch's requests: the longest, but now and then less, or too few to choose from."""
    longest = configuration.longest or configuration.width
    if launch % 8 == 5:
        return max(configuration.next_n, 3 * longest // 4 - launch)
    if launch % 32 == 10 and configuration.longest:
        return 2 * longest + launch
    if launch % 32 == 18:
        return max(configuration.next_n, configuration.k // 2)
    return longest


def seq_len_values(configuration: Configuration) -> list[int]:
    """Key counts that no engine would write, and those at which something changes."""
    k, width = configuration.k, configuration.width
    return [
        *(INT32.min, INT32.min + 1, -1, 0, 1, configuration.next_n),
        *(k - 1, k, k + 1, k + configuration.next_n),
        *(8192, 8193, 16_384, 16_385),  # up to there one CTA of a cluster selects alone
        *(width // 2, width - 1, width, width + 1, 2 * width, INT32.max - 1, INT32.max),
    ]


SAMPLE_SETTINGS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.0, 0, 1.0, 0.0),
    (1.5, 2048, 0.99, 0.0),
)
"""Temperature, top-k, top-p and min-p of slots, which take turns: every way a row can go."""


def sample_parameters(settings: Sequence[tuple[float, int, float, float]]) -> Tensor:
    """Words of parameters, ``[4, len(settings)]``, int32; top-k is an integer, and the others are fp32."""
    words = torch.tensor(settings, dtype=torch.float32).T.contiguous().view(torch.int32)
    words[1] = torch.tensor([setting[1] for setting in settings], dtype=torch.int32)
    return words


FIRST_NUMBERS = (
    *(STATE_UNKNOWN, 0.0, -0.0, 0.03, 0.5, 0.9, 1.0, 1.5),
    *(47.9, 48.0, 62.5, 64.0, 64.03, 65.7, 66.2, 70.0, 80.0, 80.1),
    *(STATE_VALUE_ONLY, STATE_INFINITE, STATE_MASKED, 95.9, 127.9, 129.0),
    *(-1e-45, -1e-20, -0.25, -0.5, -1.25, -3.5, -100.0, -1e30, -3e38),
    *(1e-45, 3e38, float("inf"), float("-inf"), float("nan")),
)
"""What a step can leave in a slot's first number, for every kernel, and what none does."""


def packed_spreads(zscore: float, value: float, by_value: bool) -> float:
    """The fourth number of a slot: two spreads in 16 bits each, of which the last says what to go by."""
    halves = torch.tensor([value, zscore], dtype=torch.float32).to(torch.bfloat16).view(torch.int16)
    halves[0] = (int(halves[0]) & ~1) | int(by_value)  # the lower half comes first
    return float(halves.view(torch.float32))


def stale_states(slots: int, draw: Draw) -> Tensor:
    """Whole slots as other rows, or rows of other scale, may have left them, ``[contents, slots, 4]``."""
    zscores, values = (-3.0, 0.0, 1.6, 2.2, 5.0), (-1e30, -1e3, 0.0, 1.6, 1.6e3, 1e30)
    states = [
        (STATE_UNKNOWN, 0.0, 0.0, 0.0),
        (-1.0, -1.0, -1.0, -1.0),
        (STATE_INFINITE, 0.0, 0.0, 0.0),
        (STATE_MASKED, 0.0, 0.0, 0.0),
        (0.9, 0.0, 0.0, 0.0),
    ]
    for by_value in (False, True):
        for spreads in ((0.016, 0.05), (1.0, 10.0), (1e-6, 1e-6)):  # usual, wide and narrow
            packed = packed_spreads(*spreads, by_value)
            states += [(STATE_ZSCORE_ORIGIN + z, z, limit, packed) for z in zscores for limit in (0.02, 4.0)]
            states += [(STATE_VALUE_ONLY, value, 0.1, packed) for value in values]
    return draw.chosen(torch.tensor(states), 64, slots)


def rewrite_pool(tensor: str, configuration: Configuration, shape: Sequence[int], draw: Draw) -> Tensor:
    """Contents of a tensor, ``[contents, *shape]``, of which a rewriting kernel takes each word by chance."""

    def chosen(values: Sequence[float], dtype: torch.dtype, contents: int = 64) -> Tensor:
        return draw.chosen(torch.tensor(values, dtype=dtype), contents, *shape)

    def rows_of(steps: list[Tensor]) -> Tensor:
        return torch.stack([step.to(DTYPES[configuration.dtype]).view(tuple(shape)) for step in steps])

    if tensor == "parameters":
        words = sample_parameters([*SAMPLE_SETTINGS, (-1.0, -1, -1.0, 2.0), (1e30, 2**31 - 1, 1e-30, 1.0)])
        return torch.cat([chosen(words.flatten().tolist(), torch.int32), draw.any_int32(16, *shape)])
    if tensor == "seq_lens":
        return chosen(seq_len_values(configuration), torch.int32)
    if tensor == "carry":  # halves that are numbers of pairs, wrong ones too, and any halves
        counts = [0, 1, configuration.k - 1, configuration.k, configuration.k + 1, INT32.min, -1, INT32.max]
        return torch.cat([chosen(counts, torch.int32, 2), draw.any_int32(2, *shape)])
    if tensor == "row_slot":
        slots = configuration.slots  # every one, those beside the first and the last, and the ends of int32
        values = [*range(-1, slots + 1), slots + 7, 1 << 20, INT32.min, INT32.max]
        return chosen(values, torch.int32)
    if tensor in (STALE_STATES, "state"):
        stale = stale_states(int(torch.Size(shape).numel()) // STATE_FLOATS, draw).view(-1, *shape)
        if tensor == STALE_STATES:
            return stale
        bits = draw.any_int32(16, *shape).view(torch.float32)
        return torch.cat([chosen(FIRST_NUMBERS, torch.float32), stale, bits])
    if tensor == "indices":
        ends = [INT32.min, -1, 0, 1, configuration.width - 1, configuration.width, INT32.max]
        positions = draw.integers(0, configuration.width, 4, *shape).to(torch.int32)
        nothing = torch.full((1, *shape), -1, dtype=torch.int32, device=draw.device)
        return torch.cat([positions, draw.any_int32(1, *shape), chosen(ends, torch.int32, 2), nothing])
    rows = (int(torch.Size(shape[:-1]).numel()), shape[-1])
    if tensor == SCALED_LOGITS:
        scores = draw.normal(*rows)
        few = draw.uniform(*rows) < 1e-3
        infinite = torch.full_like(scores, torch.inf)
        return rows_of([scores, 1000.0 * scores, infinite, torch.where(few, scores, -infinite)])
    if tensor == "logits":
        steps = [next(chain_steps(kind, rows, draw)) for kind in ("steady", "relu", "masked", "special")]
        steps += [100.0 * steps[0] - 1000.0]
        steps += [torch.full_like(steps[0], value) for value in (torch.nan, torch.inf, -torch.inf, 0.5)]
        return rows_of(steps)
    raise ValueError(f"tensor: wanted one of {', '.join(REWRITINGS)}, got {tensor!r}")
