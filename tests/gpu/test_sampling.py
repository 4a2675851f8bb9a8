"""The sampler on a GPU gives the tokens, sets and log-probabilities of the CPU, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gvr_topk.ops import launch
from gvr_topk.sampling import sample, verify
from tests.draft_cases import accepted, random_call, written

INF, NAN = torch.inf, torch.nan
COLUMNS = 300
OUTPUTS = ("logprobs", "ranks", "kept", "counts", "kept_logprobs", "limits", "flags")
WIDTHS = (7, 1000, 32_000, 50_257, 128_256)
ROWS = 12
NUMBERS, SHARES = torch.arange(ROWS), torch.tensor([0.9, 0.5, 0.99, 0.9]).repeat(ROWS // 4)


def flat_rows() -> Tensor:
    """Rows of which top-p keeps from a few logits to nearly all."""
    spreads = torch.linspace(0.01, 4, ROWS)[:, None]
    return spreads * torch.randn(ROWS, 128_256, generator=torch.Generator().manual_seed(3))


def outputs(rows: int, device: str, names: tuple[str, ...] = OUTPUTS) -> dict[str, Tensor]:
    """Poisoned tensors for every output."""
    kinds = {
        "logprobs": ((rows,), torch.float32),
        "ranks": ((rows,), torch.int64),
        "kept": ((rows, COLUMNS), torch.int32),
        "counts": ((rows,), torch.int32),
        "kept_logprobs": ((rows, COLUMNS), torch.float32),
        "limits": ((rows, 8), torch.int32),
        "flags": ((rows,), torch.int32),
    }
    return {name: torch.full(kinds[name][0], 77, dtype=kinds[name][1], device=device) for name in names}


def differences(
    logits: Tensor, names: tuple[str, ...] = OUTPUTS, aligned: bool = False, **arguments: Any
) -> dict[str, list[int]]:
    """Rows of every output, and of the tokens, that differ between GPU and CPU by a bit.

    `aligned`: rows of any width start at 16 bytes.
    """
    moved = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    there, here = outputs(len(logits), "cuda", names), outputs(len(logits), "cpu", names)
    columns = -(-logits.shape[1] // 8) * 8 + 8 if aligned else logits.shape[1] + 8
    wide = torch.full((len(logits), columns), NAN, dtype=logits.dtype, device="cuda")
    wide[:, : logits.shape[1]] = logits.cuda()
    there["out"] = sample(wide[:, : logits.shape[1]], **moved, **there)
    here["out"] = sample(logits, **arguments, **here)
    found = {}
    for name, wanted in here.items():
        same = there[name].cpu().view(torch.uint8) == wanted.view(torch.uint8)
        rows = torch.nonzero(~same.view(len(logits), -1).all(1)).flatten().tolist()
        if rows:
            found[name] = rows
    return found


def hard_rows(width: int, draw: torch.Generator) -> Tensor:
    """Rows of every kind: usual, equal, two values, masked, NaN, infinite, and near zero."""
    logits = 3 * torch.randn(ROWS, width, generator=draw)
    logits[1] = 1.5
    logits[2] = torch.where(torch.rand(width, generator=draw) < 0.3, 2.0, 1.0)
    logits[3] = -INF
    logits[3, torch.randperm(width, generator=draw)[: min(width, 49)]] = 1.0
    logits[4] = -INF
    logits[4, width // 2] = -3.0
    logits[5, torch.rand(width, generator=draw) < 0.01] = NAN
    logits[6, :: max(1, width // 4)] = INF
    logits[7], logits[8] = -INF, NAN
    logits[8, width - 1] = -INF
    logits[9] = torch.randint(-6, 6, (width,), generator=draw)
    logits[10] *= 1e-39
    logits[11, : min(width, 6)] += 20
    return logits


def drawn(rows: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Parameters of every kind of row, by chance."""

    def some(of: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(of)[torch.randint(len(of), (rows,), generator=draw)].to(dtype)

    return {
        "temperature": some([0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 5.0], torch.float32),
        "top_k": some([0, 0, 0, 1, 2, 20, 50, 86, 100, 128, 200, 255, 1000, 2048, 5000, -1], torch.int32),
        "top_p": some([1.0, 1.0, 0.9, 0.9, 0.5, 0.99, 0.1, 0.0, 1e-30], torch.float32),
        "min_p": some([0.0, 0.0, 0.05, 0.3, 1e-4, 1.0], torch.float32),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=draw),
        "positions": torch.randint(2**31, (rows,), generator=draw),
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_all_kinds_of_rows_in_one_call(width: int, dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(100 * width + seed)
    options = {
        "order": ("vllm", "hf", "joint", "temperature_last")[seed],
        "noise": ("cdf", "murmur")[seed % 2],
        "logprob_mode": ("raw", "processed")[seed // 2],
    }
    logits = hard_rows(width, draw).to(dtype)
    assert differences(logits, **drawn(ROWS, draw), **options) == {}


@pytest.mark.sanitizer
@pytest.mark.parametrize(("groups", "width"), [(4, 8_200), (13, 8_200), (4, 128_256), (13, 65_536)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "setting",
    [
        {"top_k": 50},
        {"top_k": 128, "top_p": 0.9, "noise": "murmur"},
        {"temperature": 0.0},
        {"top_k": 1},
        {"min_p": 0.05, "top_p": 0.9},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "order": "hf"},
        {"top_k": 40, "temperature": 0.7, "order": "temperature_last"},
        {"top_k": 100},
        {"top_k": 200, "order": "hf"},
        {"top_k": 300, "noise": "murmur"},
        {"top_k": 1000, "top_p": 0.9},
        {"top_k": 1000, "top_p": 0.9999},
        {"top_k": 128_256, "min_p": 0.3},
        {"top_k": 60, "min_p": 0.1, "order": "joint"},
        {},
    ],
    ids=str,
)
def test_many_rows(setting: dict[str, Any], dtype: torch.dtype, groups: int, width: int) -> None:
    """Many rows are streamed by a kernel of their own, and those that it cannot finish follow."""
    draw = torch.Generator().manual_seed(groups)
    logits = torch.cat([hard_rows(width, draw) for _ in range(groups)]).to(dtype)
    logits[::ROWS, : min(width, 19_200) : 64] += 20  # A warp lists most of the candidates.
    numbers = torch.arange(len(logits))
    parameters = (
        {"seeds": numbers, "positions": 7 * numbers, **setting} if setting else drawn(len(logits), draw)
    )
    # Where ranks are asked for, logits that equal the k-th one count too, and the second kernel counts them.
    names = OUTPUTS if groups == 4 else tuple(name for name in OUTPUTS if name != "ranks")
    assert differences(logits, names, **parameters, logprob_mode="processed") == {}


@pytest.mark.sanitizer
@pytest.mark.parametrize("names", [(), ("flags",), ("counts",)], ids=str)
@pytest.mark.parametrize(("groups", "width"), [(4, 8_200), (4, 65_541), (13, 8_203)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_without_filters(dtype: torch.dtype, groups: int, width: int, names: tuple[str, ...]) -> None:
    """The best token with noise is found on the way, in rows of one kind and among others."""
    draw = torch.Generator().manual_seed(width)
    logits = torch.cat([hard_rows(width, draw) for _ in range(groups)])
    logits[ROWS::ROWS] *= torch.tensor([1e3, 1e37, -1e37]).repeat(groups)[: groups - 1, None]
    logits[ROWS, -1], logits[ROWS + 9, -1], logits[ROWS + 11, -1] = NAN, INF, 40
    logits[2 * ROWS, : width // 2] = -INF
    numbers, logits = torch.arange(len(logits)), logits.to(dtype)
    arguments = {"seeds": numbers, "positions": 5 * numbers, "noise": "murmur", "aligned": True}
    for temperature in (0.8, 1e-5, 1e-3, 3e38, INF):
        assert differences(logits, names, **arguments, temperature=temperature) == {}
    slots = torch.where(numbers % 5 == 0, -1, numbers.flip(0)).int()
    mixed = {"temperature": drawn(len(logits), draw)["temperature"], "slots": slots, "order": "joint"}
    mixed["top_k"], mixed["top_p"] = torch.where(numbers % 3 == 0, 20, 0).int(), (numbers % 4 + 97) / 100
    assert differences(logits, names, **arguments, **mixed) == {}


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [48, 156])
def test_ties_of_a_long_list_are_cut_at_the_last_one_kept(rows: int, dtype: torch.dtype) -> None:
    """Hundreds of logits equal the k-th one; one CTA reads a row of many, and two one of few."""
    draw = torch.Generator().manual_seed(rows)
    logits = (10 * torch.randn(rows, 65_536, generator=draw)).round().div(4).to(dtype)
    numbers = torch.arange(rows)
    top_k = torch.tensor([1000, 1024, 900])[numbers % 3].to(torch.int32)
    names = tuple(name for name in OUTPUTS if name != "ranks")
    arguments = {"seeds": numbers, "positions": numbers, "logprob_mode": "processed"}
    assert differences(logits, names, top_k=top_k, **arguments) == {}
    assert differences(logits, names, top_k=1024, top_p=0.99, **arguments) == {}


@pytest.mark.sanitizer
@pytest.mark.parametrize("names", [OUTPUTS, ()], ids=["all", "token"])
@pytest.mark.parametrize("noise", ["cdf", "murmur"])
@pytest.mark.parametrize("mean", [-12.0, 0.0, 24.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_flat_top_p(dtype: torch.dtype, mean: float, noise: str, names: tuple[str, ...]) -> None:
    """Far from zero, many 16-bit logits are equal."""
    logits = flat_rows() + mean
    arguments = {"top_p": SHARES, "seeds": NUMBERS, "positions": NUMBERS, "noise": noise}
    assert differences(logits.to(dtype), names, **arguments) == {}
    for temperature in (1e-5, 3e38, INF):
        assert differences(logits.to(dtype), names, **arguments, temperature=temperature) == {}


@pytest.mark.sanitizer
@pytest.mark.parametrize("names", [OUTPUTS, ()], ids=["all", "token"])
@pytest.mark.parametrize("place", [0.02, 0.98])
def test_a_border_that_is_not_where_it_is_expected(place: float, names: tuple[str, ...]) -> None:
    """It is guessed as if masses lay in the middle of 256 bins, and here they lie at one end of each."""
    logits, draw = flat_rows(), torch.Generator().manual_seed(4)
    # All but eight octaves are as wide as the share allows masses to be.
    bin_width = (math.log2(logits.size(1)) - torch.log2(1 - SHARES) + 8)[:, None] / 256 * math.log(2)
    bins = ((logits.amax(1, keepdim=True) - logits) / bin_width).floor()
    spread = 0.01 * torch.rand(logits.shape, generator=draw) * (NUMBERS % 2)[:, None]  # or many are equal
    logits = -(bins + place + spread) * bin_width
    logits[:, 77] = 0
    arguments = {"top_p": SHARES, "seeds": NUMBERS, "positions": NUMBERS}
    assert differences(logits, names, **arguments) == {}


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("best", [0.0, INF])
def test_top_p_among_equal_logits(best: float, dtype: torch.dtype) -> None:
    """Up to 1,024 come to every CTA. Of those at +inf all have the same mass."""
    counts = torch.tensor([100, 1022, 1023, 1024, 1025, 5000])
    places = torch.rand(len(counts), 128_256, generator=torch.Generator().manual_seed(5)).argsort(1)
    logits = torch.where(places < counts[:, None], -4.0 if best == 0 else INF, -9.0)
    logits[:, 77] = best
    shares = torch.full((len(counts),), 0.5)
    if best == 0:
        shares = ((1 + counts / 2 * math.exp(-4)) / logits.double().exp().sum(1)).float()
    numbers = torch.arange(len(counts))
    assert differences(logits.to(dtype), top_p=shares, seeds=numbers, positions=numbers) == {}


@pytest.mark.sanitizer
@pytest.mark.parametrize("rows", [1, 2, 33, 300])
def test_the_number_of_rows_does_not_matter(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    logits = 4 * torch.randn(1, 32_000, generator=draw)
    parameters = {name: value.expand(rows).contiguous() for name, value in drawn(1, draw).items()}
    parameters |= {"temperature": torch.ones(rows), "top_k": torch.full((rows,), 50, dtype=torch.int32)}
    out = sample(logits.expand(rows, -1).cuda(), **{name: value.cuda() for name, value in parameters.items()})
    assert set(out.tolist()) == set(
        sample(logits, **{name: value[:1] for name, value in parameters.items()}).tolist()
    )


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pinned", [False, True])
def test_slots_and_masks(pinned: bool, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    logits, parameters = 3 * torch.randn(ROWS, 50_257, generator=draw), drawn(9, draw)
    parameters["positions"] = torch.arange(ROWS)
    outside = [-1, 9] if dtype == torch.int32 else [2 - 2**63, 2**32]  # whose lower halves are slots
    slots = torch.tensor([8, outside[0], 0, 3, outside[1], 1, 1, 2, 4, 5, 6, 7], dtype=dtype)
    allow = torch.randint(-(2**31), 2**31, (3, -(-50_257 // 32)), generator=draw).to(torch.int32)
    allow[2] = 0
    masks = {"allow": allow, "allow_row": torch.tensor([0, 1, 2, -1] * 3, dtype=torch.int32)}
    if not pinned:
        assert differences(logits, slots=slots, **parameters, **masks) == {}
        return
    on_gpu = {name: value.cuda() for name, value in masks.items()}
    given = {name: value.pin_memory() for name, value in parameters.items() if name != "positions"}
    positions = parameters.pop("positions")
    got = sample(logits.cuda(), slots=slots.cuda(), positions=positions.cuda(), **given, **on_gpu)
    wanted = sample(logits, slots=slots, positions=positions, **parameters, **masks)
    assert torch.equal(got.cpu(), wanted)


def test_a_replayed_graph_draws_afresh() -> None:
    logits = torch.randn(8, 32_000)
    there, out = logits.cuda(), torch.empty(8, dtype=torch.int32, device="cuda")
    positions, graph = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
    sample(there, temperature=2.0, seeds=3, positions=positions, out=out)
    with torch.cuda.graph(graph):
        sample(there, temperature=2.0, seeds=3, positions=positions, out=out, pdl=True)
    for step in range(5):
        positions.fill_(step)
        graph.replay()
        wanted = sample(logits, temperature=2.0, seeds=3, positions=torch.full((8,), step))
        assert out.tolist() == wanted.tolist()


@pytest.mark.sanitizer
@pytest.mark.parametrize("ragged", [False, True])
def test_a_replayed_graph_verifies_drafts(ragged: bool) -> None:
    """Of each kind of row, with drafts that are right, wrong and none; starts change between replays."""
    draw, drafts, width = torch.Generator().manual_seed(9), 3, 32_000
    logits, parameters = hard_rows(width, draw), drawn(ROWS, draw)
    right = sample(logits, **parameters)
    fed = torch.cat([right[-1:], right[:-1]])
    inputs = {"logits": logits, "draft_tokens": fed, **parameters}
    if ragged:
        inputs["starts"] = torch.tensor([0, 4, 4, 7, 12], dtype=torch.int32)
    there = {name: tensor.cuda() for name, tensor in inputs.items()}
    verify(num_drafts=drafts, **there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = verify(num_drafts=drafts, **there)
    lengths = set()
    for wrong in ([], [2, 6, 7], [1, 5, 9, 11]):
        inputs["draft_tokens"] = fed.clone()
        inputs["draft_tokens"][wrong] = torch.tensor([-1, 1 << 40, 0, 3])[: len(wrong)]
        if ragged:
            inputs["starts"] = torch.tensor([0, 4 - len(wrong) // 3, 4, 7, 12], dtype=torch.int32)
            there["starts"].copy_(inputs["starts"])
        there["draft_tokens"].copy_(inputs["draft_tokens"])
        graph.replay()
        wanted = verify(num_drafts=drafts, **inputs)
        assert torch.equal(got.tokens.cpu(), wanted.tokens)
        assert torch.equal(got.lengths.cpu(), wanted.lengths)
        lengths.update(wanted.lengths.tolist())
    assert len(lengths) > 2


@pytest.mark.sanitizer
def test_what_is_accepted_is_what_a_loop_over_tokens_accepts() -> None:
    for seed in range(200):
        call = random_call(np.random.default_rng(seed), "cuda")
        launch(call)
        assert written(call) == accepted(call), seed


def test_kept_without_columns_overflows() -> None:
    logits, found = torch.randn(2, 5000), {}
    for device in ("cpu", "cuda"):
        kept, flags = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((2, 0), (2,)))
        sample(logits.to(device), seeds=0, positions=0, kept=kept, flags=flags)
        found[device] = flags.tolist()
    assert found["cuda"] == found["cpu"] == [4, 4]


def test_wrong_arguments_are_refused_before_the_launch() -> None:
    logits = torch.zeros(2, 64, device="cuda")
    with pytest.raises(
        ValueError, match=r": wanted a tensor on cuda:0 or in pinned memory, got one on another device$"
    ):
        sample(logits, seeds=0, positions=0, temperature=torch.ones(2))
    with pytest.raises(ValueError, match=r"sample: temperature: wanted dtype float32, got float64"):
        sample(logits, seeds=0, positions=0, temperature=torch.ones(2, dtype=torch.float64).pin_memory())
    with pytest.raises(ValueError, match=r"sample: temperature: wanted shape \[2\], got \[3\]"):
        sample(logits, seeds=0, positions=0, temperature=torch.ones(3).pin_memory())
    with pytest.raises(ValueError, match=r"sample: temperature: wanted inner stride 1, got 2"):
        sample(logits, seeds=0, positions=0, temperature=torch.ones(4).pin_memory()[::2])
    with pytest.raises(ValueError, match=r"gvr_topk\.sample: positions: wanted a tensor on cuda:0, got cpu"):
        sample(logits, seeds=0, positions=torch.zeros(2, dtype=torch.int64).pin_memory())
    with pytest.raises(ValueError, match=r"out: wanted shape \[2\], got \[3\]"):
        sample(logits, seeds=0, positions=0, out=torch.empty(3, dtype=torch.int32, device="cuda"))
    with pytest.raises(ValueError, match=r"logits: wanted rows of at most 1695744 bytes, got 2097152"):
        sample(torch.zeros(1, 1 << 19, device="cuda"), seeds=0, positions=0)
    shared = torch.zeros(2, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="flags: wanted memory of its own, got memory shared with counts"):
        sample(logits, seeds=0, positions=0, counts=shared, flags=shared)
