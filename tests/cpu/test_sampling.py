"""The sampler on a CPU: all outputs of all kinds of rows against the oracle, and wrong calls."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gvr_topk.sampling import Flag, apply_limits_, reference, renorm, sample, topk_logprobs
from gvr_topk.sampling.arguments import (
    ApplyLimitsArguments,
    LogprobMode,
    Noise,
    Order,
    RenormArguments,
    SampleArguments,
    TopkLogprobsArguments,
    VerifyArguments,
)
from tests import sampling_oracle as oracle

WIDTH = 40
INF, NAN = math.inf, math.nan
ORDERS = ("vllm", "hf", "joint", "temperature_last")
TEMPERATURES = (0.0, 9e-6, 1e-5, 0.3, 0.7, 1.0, 1.7, 50.0, INF, NAN, -1.0)
TOP_K = (0, -1, 1, 2, 3, 7, 39, 40, 100, 2**31 - 1)
TOP_P = (1.0, 2.0, NAN, 0.0, -0.5, 1e-45, 1e-30, 0.1, 0.5, 0.9, 0.999999, 1 - 2.0**-24)
MIN_P = (0.0, -1.0, NAN, 1e-45, 1e-20, 1e-13, 0.02, 0.5, 1.0, 2.0)


def gaussian(rng: np.random.Generator, spread: float = 3.0) -> np.ndarray[Any, Any]:
    return (rng.standard_normal(WIDTH) * spread).astype(np.float32)


def masked(rng: np.random.Generator, left: int) -> np.ndarray[Any, Any]:
    row = np.full(WIDTH, -np.inf, np.float32)
    row[rng.choice(WIDTH, left, replace=False)] = gaussian(rng)[:left]
    return row


def with_some(rng: np.random.Generator, *values: float) -> np.ndarray[Any, Any]:
    row = gaussian(rng)
    row[rng.choice(WIDTH, 9, replace=False)] = rng.choice(np.array(values, np.float32), 9)
    return row


ROWS: dict[str, Callable[[np.random.Generator], np.ndarray[Any, Any]]] = {
    "gaussian": gaussian,
    "heavy": lambda rng: rng.standard_cauchy(WIDTH).astype(np.float32) * 4,
    "flat": lambda rng: np.full(WIDTH, rng.standard_normal(), np.float32),
    "two values": lambda rng: rng.choice(np.array([1.5, -0.25], np.float32), WIDTH),
    "tied": lambda rng: np.round(gaussian(rng) * 2) / 2,
    "near ties": lambda rng: (1 + rng.integers(0, 3, WIDTH) * 2.0**-23).astype(np.float32),
    "wide": lambda rng: gaussian(rng, 1e30),
    "denormal": lambda rng: (rng.integers(-5, 6, WIDTH) * 1e-45).astype(np.float32),
    "one left": lambda rng: masked(rng, 1),
    "two left": lambda rng: masked(rng, 2),
    "six left": lambda rng: masked(rng, 6),
    "NaN": lambda rng: with_some(rng, NAN, -INF),
    "+inf": lambda rng: with_some(rng, INF, -INF),
    "+inf and NaN": lambda rng: with_some(rng, INF, NAN, 0.0, -0.0),
    "zeros": lambda rng: rng.choice(np.array([0.0, -0.0], np.float32), WIDTH),
    "-inf": lambda rng: np.full(WIDTH, -np.inf, np.float32),
    "all NaN": lambda rng: np.full(WIDTH, np.nan, np.float32),
    "-inf and NaN": lambda rng: rng.choice(np.array([NAN, NAN, -INF], np.float32), WIDTH),
}


def settings(rng: np.random.Generator, rows: int, values: np.ndarray[Any, Any]) -> dict[str, Tensor]:
    """Parameters of rows, each off for half of them."""

    def some(choices: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        drawn = rng.choice(len(choices), rows)
        drawn[rng.random(rows) < 0.3] = 0
        return torch.tensor([choices[i] for i in drawn], dtype=dtype)

    temperature = some((1.0, *TEMPERATURES), torch.float32)
    # Quotients that fp32 cannot hold are infinite, which fractions are not.
    wide = torch.from_numpy(np.abs(np.where(np.isfinite(values), values, 0)).max(axis=1) > 1e20)
    return {
        "temperature": torch.where(wide & (temperature < 0.1), 1.0, temperature),
        "top_k": some(TOP_K, torch.int32),
        "top_p": some(TOP_P, torch.float32),
        "min_p": some(MIN_P, torch.float32),
        "seeds": torch.from_numpy(rng.integers(-(1 << 63), 1 << 63, rows)),
        "positions": torch.from_numpy(rng.integers(0, 1 << 40, rows)),
    }


def outputs(rows: int, columns: int = WIDTH) -> dict[str, Tensor]:
    """Poisoned outputs of all kinds."""
    return {
        "out": torch.full((rows,), -99, dtype=torch.int64),
        "logprobs": torch.full((rows,), 99.0),
        "ranks": torch.full((rows,), -99, dtype=torch.int64),
        "kept": torch.full((rows, columns), -99, dtype=torch.int32),
        "counts": torch.full((rows,), -99, dtype=torch.int32),
        "kept_logprobs": torch.full((rows, columns), 99.0),
        "limits": torch.full((rows, 8), -99, dtype=torch.int32),
        "flags": torch.full((rows,), -99, dtype=torch.int32),
    }


def bits_of(value: float) -> int:
    """The bits of an fp32 number; zero has no sign."""
    return int(np.array(value + 0.0, np.float32).view(np.uint32))


def key_of(value: float) -> int:
    bits = bits_of(value)
    return bits ^ 0x80000000 if bits < 0x80000000 else bits ^ 0xFFFFFFFF


def assert_row(got: dict[str, Tensor], r: int, expected: dict[str, Any], mode: str) -> None:
    assert got["out"][r] == expected["token"]
    assert got["logprobs"][r].item() == expected[mode]
    assert got["ranks"][r] == expected["rank"]
    count = len(expected["kept"])
    assert got["counts"][r] == count
    columns = got["kept"].shape[1]
    padding = max(columns - count, 0)
    assert got["kept"][r].tolist() == expected["kept"][:columns] + [-1] * padding
    assert got["kept_logprobs"][r].tolist() == expected["kept_logprobs"][:columns] + [-INF] * padding
    assert got["flags"][r] == expected["flags"] | (Flag.KEPT_OVERFLOW if count > columns else 0)
    words = got["limits"][r].numpy().view(np.uint32).tolist()
    assert words[:2] == [key_of(expected["limits"][0]), expected["limits"][1]]
    assert words[2:4] == [bits_of(expected["top"]), bits_of(expected["temperature"])]
    assert words[4:] == [count, expected["flags"], expected["total"] & oracle.MASK, expected["total"] >> 32]


@pytest.mark.parametrize("noise", ["cdf", "murmur"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ROWS)
def test_all_outputs(kind: str, order: str, noise: str) -> None:
    rng = np.random.default_rng(list(f"{kind}{order}{noise}".encode()))
    rows = 12
    logits = torch.from_numpy(np.stack([ROWS[kind](rng) for _ in range(rows)]))
    dtype = (torch.float32, torch.bfloat16, torch.float16)[rng.integers(3)]
    if kind not in ("wide", "heavy", "denormal"):
        logits = logits.to(dtype)
    parameters = settings(rng, rows, logits.float().numpy())
    allow = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (3, 2)).astype(np.int32))
    allow_row = torch.from_numpy(rng.integers(-1, 4, rows).astype(np.int32))
    mode, columns = ("raw", "processed")[rng.integers(2)], int(rng.choice([3, WIDTH, WIDTH + 2]))
    got = outputs(rows, columns)
    tokens = {"allow": allow, "allow_row": allow_row}
    options = {"order": order, "noise": noise, "logprob_mode": mode}
    assert sample(logits, **parameters, **got, **options, **tokens) is got["out"]
    masks = [((allow[:, t // 32] >> (t % 32)) & 1).bool() for t in range(WIDTH)]
    probabilities, cut = renorm(logits, got["limits"], **tokens), logits.clone()
    assert apply_limits_(cut, got["limits"], **tokens) is cut
    for r in range(rows):
        mask = int(allow_row[r])
        allowed = [bool(masks[t][mask]) if 0 <= mask < 3 else True for t in range(WIDTH)]
        setting = {name.removesuffix("s"): tensor[r].item() for name, tensor in parameters.items()}
        setting |= {"order": order, "noise": noise}
        expected = oracle.sample(logits[r].float().tolist(), allowed, setting)
        assert_row(got, r, expected, mode)
        shares = [float(np.float32(float(expected["probabilities"].get(t, 0)))) for t in range(WIDTH)]
        assert probabilities[r].tolist() == shares
        for t in range(WIDTH):
            same = cut[r, t].item() == logits[r, t].item() or math.isnan(logits[r, t])
            assert same if t in expected["kept"] else cut[r, t] == -INF


def test_shares_are_those_of_fp32() -> None:
    """0.1 is above a tenth in fp32, so the first of ten equal tokens does not reach it; 0.5 is exact."""
    row = torch.zeros(1, 10)
    for top_p, count in ((0.1, 2), (0.5, 5), (0.3, 4), (0.7, 7)):
        counts = torch.empty(1, dtype=torch.int32)
        sample(row, top_p=top_p, seeds=0, positions=0, counts=counts)
        assert counts.item() == count == math.ceil(10 * float(np.float32(top_p)))


def test_orders_differ_as_said() -> None:
    row = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1]]).log()
    counts = torch.empty(1, dtype=torch.int32)

    def count(order: str, **parameters: float) -> int:
        sample(row, seeds=0, positions=0, order=order, counts=counts, **parameters)
        return int(counts)

    # Of the whole row .7 is two tokens; of the two that min-p leaves it is the first alone.
    both = {"top_p": 0.69, "min_p": 0.3}
    assert [count(order, **both) for order in ORDERS] == [1, 2, 2, 2]
    # Of the three tokens that top-k leaves, .8 takes two; of the whole row it takes three.
    assert [count(order, top_k=3, top_p=0.78) for order in ORDERS] == [2, 2, 3, 2]
    # At temperature 1/2 the first token has .25 of .32.
    assert [count(order, top_p=0.75, temperature=0.5) for order in ORDERS] == [1, 1, 1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kept_logits_alone_give_the_same_log_probabilities(dtype: torch.dtype) -> None:
    """A trainer that gathers the kept tokens of its logits gets the bits that serving recorded."""
    logits = rows_of_all_kinds().to(dtype)
    rows = len(logits)
    parameters = settings(np.random.default_rng(11), rows, logits.float().numpy())
    served, replayed = outputs(rows), outputs(rows)
    sample(logits, **parameters, **served)
    padding = served["kept"] < 0
    few = logits.gather(1, served["kept"].clamp(min=0).long()).masked_fill(padding, -INF)
    alone = {name: parameters[name] for name in ("temperature", "seeds", "positions")}
    sample(few, **alone, **replayed)
    assert (served["counts"] > 1).sum() > 12
    for name in ("counts", "kept_logprobs"):
        assert torch.equal(replayed[name], served[name])


def rows_of_all_kinds(copies: int = 3) -> Tensor:
    rng = np.random.default_rng(7)
    return torch.from_numpy(np.stack([make(rng) for make in ROWS.values() for _ in range(copies)]))


@pytest.mark.parametrize("noise", ["cdf", "murmur"])
def test_a_row_depends_on_nothing_around_it(noise: str) -> None:
    logits = rows_of_all_kinds()
    rows = len(logits)
    rng = np.random.default_rng(8)
    parameters = settings(rng, rows, logits.numpy())
    together = outputs(rows)
    sample(logits, noise=noise, **parameters, **together)
    order = torch.from_numpy(rng.permutation(rows))
    wide = torch.full((rows, WIDTH + 5), NAN)
    wide[:, 2 : WIDTH + 2] = logits[order]
    moved = outputs(rows)
    permuted = {name: tensor[order] for name, tensor in parameters.items()}
    sample(wide[:, 2 : WIDTH + 2], noise=noise, **permuted, **moved)
    for name, tensor in together.items():
        assert torch.equal(moved[name], tensor[order]), name
    for r in range(rows):
        alone = outputs(1)
        single = {name: tensor[r].item() for name, tensor in parameters.items()}
        sample(logits[r : r + 1], noise=noise, **single, **alone)
        assert all(torch.equal(alone[name][0], tensor[r]) for name, tensor in together.items())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots(dtype: torch.dtype) -> None:
    logits = rows_of_all_kinds()
    rows = len(logits)
    rng = np.random.default_rng(9)
    parameters = settings(rng, rows, logits.numpy())
    expected = outputs(rows)
    sample(logits, **parameters, **expected)
    slots = torch.from_numpy(rng.permutation(rows + 6)[:rows]).to(dtype)
    by_slot = {}
    for name, tensor in parameters.items():
        by_slot[name] = tensor if name == "positions" else torch.zeros(rows + 6, dtype=tensor.dtype)
        if name != "positions":
            by_slot[name][slots] = tensor
    got = outputs(rows)
    sample(logits, slots=slots, **by_slot, **got)
    assert all(torch.equal(got[name], expected[name]) for name in got)
    skipped = torch.arange(rows) % 3 == 0
    ends = torch.iinfo(dtype)
    # A slot of 64 bits whose lower 32 are another one.
    outside = torch.tensor([-1, rows + 6, ends.max, ends.min, min(2**32, ends.max), 2 - ends.max]).to(dtype)
    slots[skipped] = outside.repeat(rows)[: int(skipped.sum())]
    got = outputs(rows)
    sample(logits, slots=slots, **by_slot, **got)
    nothing = {"out": -1, "kept": -1, "kept_logprobs": -INF}
    for name, tensor in got.items():
        assert torch.equal(tensor[~skipped], expected[name][~skipped])
        assert (tensor[skipped] == nothing.get(name, 0)).all(), name
    uncut = apply_limits_(logits.clone(), got["limits"])[skipped]
    assert torch.equal(uncut.nan_to_num(1), logits[skipped].nan_to_num(1))
    assert (renorm(logits, got["limits"])[skipped] == 0).all()
    only_numbers = sample(logits, slots=slots, seeds=1, positions=2, top_k=3)
    assert torch.equal(only_numbers == -1, slots < 0)


def test_numbers_are_like_tensors() -> None:
    logits, rows = rows_of_all_kinds(), 3 * len(ROWS)
    one = {"temperature": 0.7, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "seeds": -5, "positions": 1 << 33}
    kinds = [torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64]
    tensors = {
        name: torch.full((rows,), one[name], dtype=kind) for name, kind in zip(one, kinds, strict=True)
    }
    got = sample(logits, **tensors)
    assert torch.equal(sample(logits, **one), got)
    short = torch.empty(rows, dtype=torch.int32)
    assert sample(logits, **one, out=short) is short and torch.equal(short.long(), got)
    assert len({*sample(logits[:1].expand(50, WIDTH), seeds=1, positions=torch.arange(50)).tolist()}) > 5
    assert sample(logits[:0], seeds=0, positions=0).shape == (0,)


def test_a_call_without_parameters() -> None:
    """The op is told numbers in place of names; all filters are off."""
    kinds = [list(kind) for kind in (Order, Noise, LogprobMode, Flag)]
    assert kinds == [[0, 1, 2, 3], [0, 1], [0, 1], [1, 2, 4]]
    logits, out = rows_of_all_kinds(), torch.empty(3 * len(ROWS), dtype=torch.int64)
    reference.sample(SampleArguments(logits, out))
    assert torch.equal(out, sample(logits, seeds=0, positions=0))


def test_the_narrowest_and_the_widest_row() -> None:
    assert sample(torch.zeros(2, 1), seeds=0, positions=0).tolist() == [0, 0]
    counts, limits = torch.empty(1, dtype=torch.int32), torch.empty(1, 8, dtype=torch.int32)
    sample(torch.zeros(1, 2**20), seeds=0, positions=0, counts=counts, limits=limits)
    assert counts.item() == 2**20 and limits[0, 6:].tolist() == [0, -(2**31)]  # a mass of 2**63


def test_ops_trace_and_have_correct_schemas() -> None:
    logits, limits = torch.randn(2, 8), torch.zeros(2, 8, dtype=torch.int32)
    sample(logits, top_k=3, seeds=0, positions=0, limits=limits)
    allow, out = torch.full((2, 1), 0b1111, dtype=torch.int32), torch.empty(2, 8)
    results = (torch.empty(2, 4, dtype=torch.int64), torch.empty(2, 4), torch.empty(2, dtype=torch.int64))
    accepted = torch.empty(1, 2, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("apply_limits_", ApplyLimitsArguments(logits.clone(), limits, allow)),
        ("renorm", RenormArguments(logits, limits, out)),
        ("topk_logprobs", TopkLogprobsArguments(logits, 3, torch.tensor([0, 7]), *results)),
        ("verify", VerifyArguments(torch.tensor([3, 4]), torch.tensor([0, 3]), None, *accepted)),
        ("sample", SampleArguments(logits, torch.empty(2, dtype=torch.int64), limits=limits.clone())),
    ]
    for name, arguments in calls:
        torch.library.opcheck(getattr(torch.ops.gvr_topk, name).default, tuple(arguments))


def test_a_draw_with_numbers_is_traced_whole() -> None:
    """Also with one that fp32 rounds."""
    rows = torch.randn(3, 50)
    draw = functools.partial(sample, top_k=3, temperature=0.7000000001, seeds=1, positions=0)
    assert torch.equal(torch.compile(draw, fullgraph=True, backend="aot_eager")(rows), draw(rows))


def test_a_mask_of_each_row() -> None:
    logits = torch.tensor([[1.0, 2.0, NAN], [1.0, 2.0, 3.0], [NAN, NAN, -INF]])
    allow = torch.tensor([[0b011], [0b000], [0b010]], dtype=torch.int32)
    flags = torch.empty(3, dtype=torch.int32)
    got = sample(logits, temperature=0.0, seeds=0, positions=0, allow=allow, flags=flags)
    assert got.tolist() == [1, 0, 0]
    assert flags.tolist() == [0, Flag.NO_CANDIDATE, Flag.NO_CANDIDATE | Flag.NAN]


GOLDEN = {
    "cdf": [523, 728, 740, 10, 746, 968],
    "murmur": [837, 934, 945, 931, 971, 950],
    "filtered": [991, 986, 997, 994, 990, 987],
}


def test_tokens_stay_what_they_are() -> None:
    """Another hash, order of draws or polynomial would change what users have stored."""
    logits = torch.linspace(-2, 2, 1000)[None].expand(6, 1000)
    where = {"seeds": 1234, "positions": torch.arange(6)}
    assert sample(logits, **where).tolist() == GOLDEN["cdf"]
    assert sample(logits, **where, noise="murmur").tolist() == GOLDEN["murmur"]
    assert sample(logits, **where, top_p=0.2, top_k=90, noise="murmur").tolist() == GOLDEN["filtered"]


@pytest.mark.parametrize("n", [0, 1, 5, WIDTH])
def test_topk_logprobs(n: int) -> None:
    logits = rows_of_all_kinds(2)
    rows = len(logits)
    logprobs, ranks = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    sampled = sample(logits, seeds=3, positions=torch.arange(rows), logprobs=logprobs, ranks=ranks)
    sampled[4], sampled[5] = -1, WIDTH
    got = topk_logprobs(logits, n, sampled)
    known = (sampled >= 0) & (sampled < WIDTH)
    assert torch.equal(got.ids[:, 0], torch.where(known, sampled, -1))
    assert torch.equal(got.logprobs[:, 0], torch.where(known, logprobs, 0))
    assert torch.equal(got.ranks, torch.where(known, ranks, 0))
    for r in range(rows):
        values = [-INF if math.isnan(x) else x for x in logits[r].tolist()]
        assert got.ids[r, 1:].tolist() == np.argsort([-x for x in values], kind="stable")[:n].tolist()
        if n < WIDTH:
            continue
        by_rank = got.logprobs[r, 1:]
        if max(values) == -INF:  # all of the mass is at the token
            token = sample(logits[r : r + 1], seeds=0, positions=0)
            assert by_rank[got.ids[r, 1:] == token] == 0 and (by_rank == -INF).sum() == WIDTH - 1
        elif max(values) < INF:
            exact = torch.tensor(values).log_softmax(0)[got.ids[r, 1:]]
            torch.testing.assert_close(by_rank, exact, rtol=1e-6, atol=2e-6)
        else:
            assert by_rank.double().exp().sum() == pytest.approx(1, abs=1e-5)
    assert torch.equal(topk_logprobs(logits, n, sampled.int()).ids, got.ids)


ROW, WORDS, IDS = torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
NAMES = "'vllm' or 'hf' or 'joint' or 'temperature_last'"
WRONG: list[tuple[str, Any, str]] = [
    ("logits", [1.0], "a Tensor, got list"),
    ("logits", WORDS, "dtype float32, bfloat16 or float16, got int32"),
    ("logits", ROW[0], "shape [rows, width], got [8]"),
    ("logits", torch.zeros(2, 0), "1 to 1048576 columns, got 0"),
    ("logits", torch.zeros(1, 2**20 + 1), "1 to 1048576 columns, got 1048577"),
    ("logits", torch.zeros(8, 2).t(), "inner stride 1, got 2"),
    ("temperature", "hot", "a number or a tensor, got 'hot'"),
    ("top_p", True, "a number or a tensor, got True"),
    ("top_k", 1.5, "an integer, got 1.5"),
    ("seeds", 1 << 63, f"{-(1 << 63)} to {(1 << 63) - 1}, got {1 << 63}"),
    ("positions", -(1 << 63) - 1, f"{-(1 << 63)} to {(1 << 63) - 1}, got {-(1 << 63) - 1}"),
    ("temperature", torch.zeros(2).double(), "dtype float32, got float64"),
    ("top_k", WORDS[0, :3], "shape [2], got [3]"),
    ("top_p", IDS, "dtype float32, got int32"),
    ("min_p", torch.zeros(4)[::2], "inner stride 1, got 2"),
    ("seeds", IDS, "dtype int64, got int32"),
    ("positions", IDS, "dtype int64, got int32"),
    ("slots", ROW[0, :2], "dtype int64 or int32, got float32"),
    ("order", "sglang", f"{NAMES}, got 'sglang'"),
    ("noise", 1, "'cdf' or 'murmur', got 1"),
    ("logprob_mode", "VLLM", "'raw' or 'processed', got 'VLLM'"),
    ("allow", WORDS[:, :2], "shape [2, 1], got [2, 2]"),
    ("allow", WORDS[:1, :1], "shape [2, 1], got [1, 1]"),
    ("allow_row", IDS, "allow beside it, got None"),
    ("out", torch.zeros(2), "dtype int64 or int32, got float32"),
    ("out", IDS[:1], "shape [2], got [1]"),
    ("out", [0, 0], "a Tensor, got list"),
    ("logprobs", torch.zeros(2, 1), "shape [2], got [2, 1]"),
    ("logprobs", ROW[0, :2], "memory of its own, got memory shared with logits"),
    ("ranks", IDS, "dtype int64, got int32"),
    ("kept", torch.zeros(2, 4), "dtype int32, got float32"),
    ("kept", WORDS[:1, :4].expand(2, 4), "rows that do not overlap, at least 4 elements apart, got 0"),
    ("kept_logprobs", torch.zeros(2, 4), "kept beside it, got None"),
    ("counts", torch.zeros(2), "dtype int32, got float32"),
    ("limits", WORDS[:, :7], "shape [2, 8], got [2, 7]"),
    ("limits", torch.zeros(2, 9).int()[:, :8], "contiguous rows, got strides (9, 1)"),
    ("flags", torch.zeros(2), "dtype int32, got float32"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_arguments(name: str, value: Any, message: str) -> None:
    call = {"logits": ROW, "seeds": 0, "positions": 0} | {name: value}
    with pytest.raises(ValueError, match=f"^gvr_topk.sample: {name}: wanted {re.escape(message)}$"):
        sample(call.pop("logits"), **call)


DRAW: Callable[..., Tensor] = functools.partial(sample, ROW, seeds=0, positions=0)
WRONG_CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: DRAW(slots=IDS, top_p=ROW[0], min_p=ROW[0, :4]), "sample: min_p: wanted shape [8], got [4]"),
    (
        lambda: DRAW(kept=WORDS, kept_logprobs=ROW[:, :3]),
        "sample: kept_logprobs: wanted shape [2, 8], got [2, 3]",
    ),
    (
        lambda: DRAW(allow=WORDS[:, :1], allow_row=ROW[0, :2]),
        "sample: allow_row: wanted dtype int32, got float32",
    ),
    (lambda: topk_logprobs(ROW, 9, IDS), "topk_logprobs: n: wanted 0 to 8, got 9"),
]
"""Beside those of tests/wrong_calls.py, which have all that the ops refuse."""


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS, ids=[message for _, message in WRONG_CALLS])
def test_wrong_calls(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^gvr_topk.{re.escape(message)}$"):
        call()


def test_probabilities_may_take_the_place_of_logits() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    limits = torch.empty(3, 8, dtype=torch.int32)
    sample(logits, top_p=0.8, seeds=0, positions=0, limits=limits)
    expected = renorm(logits, limits)
    assert expected.sum(dim=1).tolist() == pytest.approx([1.0] * 3)
    assert renorm(logits, limits, out=logits) is logits and torch.equal(logits, expected)
