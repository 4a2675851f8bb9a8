"""Drafts: the law of what is accepted, exactly; one stream of tokens with drafts and without; wrong calls."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gvr_topk.ops import launch
from gvr_topk.sampling import arithmetic, sample, verify
from tests import sampling_oracle as oracle
from tests.draft_cases import accepted, random_call, written

WIDTH = 16
Law = dict[tuple[int, ...], Fraction]


def setting(**changed: Any) -> dict[str, Any]:
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "order": "vllm", "noise": "cdf"}
    return off | {"seed": 0, "position": 0} | changed


LAWS = {
    "no filter": setting(temperature=0.8),
    "top-k, top-p": setting(top_k=7, top_p=float(np.float32(0.9))),
    "min-p last": setting(min_p=float(np.float32(0.05)), order="hf"),
    "greedy": setting(temperature=0.0),
}


def probabilities(row: Tensor, s: dict[str, Any]) -> dict[int, Fraction]:
    found: dict[int, Fraction] = oracle.sample(row.tolist(), [True] * WIDTH, s)["probabilities"]
    return found


def law_of_rejection(rows: Tensor, drafts: tuple[int, ...], s: dict[str, Any]) -> Law:
    """Rejection sampling against drafts that are certain: a draft d stays with probability p(d).

    Otherwise the token is drawn from what p has beside d; behind the last draft, from p itself.
    """
    law: Law = {}
    reached, prefix = Fraction(1), ()
    for place, draft in enumerate((*drafts, None)):
        p = probabilities(rows[place], s)
        stays = p.get(draft, Fraction(0)) if draft is not None else Fraction(0)
        for token, share in p.items():
            if token != draft:
                law[(*prefix, token)] = reached * (1 - stays) * (share / (1 - stays))
        reached *= stays
        prefix = (*prefix, draft)
    return {tokens: share for tokens, share in law.items() if share > 0}


def pieces(row: Tensor, s: dict[str, Any]) -> list[tuple[int, Fraction]]:
    """One of the 2**64 uniform numbers for each token that a row can draw, and the share that draws it.

    A number u draws the first token at which the sum of masses exceeds u Z / 2**64, rounded down.
    """
    found = oracle.sample(row.tolist(), [True] * WIDTH, s)
    total, so_far, low = found["total"], 0, 0
    cuts = []
    for token in found["kept"]:
        so_far += int(found["probabilities"][token] * total)
        high = -((-so_far << 64) // total)
        if high > low:
            cuts.append((low, Fraction(high - low, 1 << 64)))
        low = high
    assert low == 1 << 64
    return cuts


@pytest.mark.parametrize("drafts", [(3, 9), (3, -1), (0,), (2, 2, 15)], ids=str)
@pytest.mark.parametrize("name", LAWS)
def test_the_law_is_that_of_rejection_sampling(
    name: str, drafts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All combinations of draws of all rows, each with the share of the uniform numbers that lead to it."""
    s = LAWS[name]
    count = len(drafts) + 1
    rows = 1.5 * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(len(name) + count))
    rows[:, 3] += 2  # a draft that is often right
    if count > 3:
        s = s | {"top_k": 5}
    numbers = [pieces(row, s) for row in rows]
    combinations = list(itertools.product(*numbers))
    seeds = torch.tensor([[u - (u >> 63 << 64) for u, _ in each] for each in combinations]).flatten()
    monkeypatch.setattr(arithmetic, "uniform64", lambda seeds, positions: seeds.astype(np.uint64))
    got = verify(
        rows.repeat(len(combinations), 1),
        torch.tensor([7, *drafts]).repeat(len(combinations)),
        len(drafts),
        seeds=seeds,
        positions=0,
        **{key: s[key] for key in ("temperature", "top_k", "top_p", "min_p", "order")},
    )
    law: Counter[tuple[int, ...]] = Counter()
    for tokens, length, each in zip(got.tokens.tolist(), got.lengths.tolist(), combinations, strict=True):
        assert tokens[length:] == [-1] * (count - length)
        law[tuple(tokens[:length])] += np.prod([share for _, share in each])
    expected = law_of_rejection(rows, drafts, s)
    assert sum(law.values()) == sum(expected.values()) == 1
    # Half the sum of the differences is the total variation.
    distance = sum(abs(law[key] - expected.get(key, 0)) for key in {*law, *expected}) / 2
    # Uniform numbers of 64 bits cannot have the probabilities themselves: each is off by less than 2**-64.
    assert distance < Fraction(WIDTH * count, 1 << 64)


# ------------------------------------------------------------- one stream of tokens

REQUESTS, LENGTH, STEPS = 6, 40, 3
PARAMETERS = {
    "temperature": torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 0.9]),
    "top_k": torch.tensor([0, 0, 5, 1, 9, 0], dtype=torch.int32),
    "top_p": torch.tensor([1.0, 0.9, 1.0, 1.0, 0.8, 1.0]),
    "min_p": torch.tensor([0.0, 0.0, 0.02, 0.0, 0.0, 0.1]),
    "seeds": torch.tensor([0, 1, -5, 77, 1 << 40, 6]),
}
MODEL = 2 * torch.randn(WIDTH * WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))


def model(tokens: list[int]) -> Tensor:
    """Logits of the next token, from the last two."""
    return MODEL[tokens[-2] * WIDTH + tokens[-1]]


def plain(request: int, noise: str) -> list[int]:
    tokens = [request, request + 1]
    one = {name: values[request].item() for name, values in PARAMETERS.items()}
    while len(tokens) < LENGTH:
        drawn = sample(model(tokens)[None], positions=len(tokens), noise=noise, **one)
        tokens.append(int(drawn))
    return tokens


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("noise", ["cdf", "murmur"])
def test_drafts_change_no_token(noise: str, dtype: torch.dtype) -> None:
    """Greedy, seeded and filtered requests, each with drafts of its own number, right, wrong and none."""
    rng = np.random.default_rng(5)
    expected = [plain(request, noise) for request in range(REQUESTS)]
    tokens, accepted = [[request, request + 1] for request in range(REQUESTS)], Counter[int]()
    while any(len(each) < LENGTH for each in tokens):
        active = [request for request in rng.permutation(REQUESTS) if len(tokens[request]) < LENGTH]
        fed, slots, positions, logits, starts = [], [], [], [], [0]
        for request in active:
            done = len(tokens[request])
            right = expected[request][done : done + int(rng.integers(STEPS + 1))]
            drafts = [int(rng.choice([token, token, token, 0, -1])) for token in right]
            for at in range(len(drafts) + 1):
                seen = tokens[request] + [max(draft, 0) for draft in drafts[:at]]
                logits.append(model(seen))
                fed.append(drafts[at - 1] if at else tokens[request][-1])
                slots.append(int(request))
                positions.append(len(seen))
            starts.append(len(fed))
        places = {"positions": torch.tensor(positions)}
        places |= {"starts": torch.tensor(starts).int(), "slots": torch.tensor(slots).int()}
        drafts = torch.tensor(fed, dtype=dtype)
        got = verify(torch.stack(logits), drafts, STEPS, noise=noise, **places, **PARAMETERS)
        assert got.tokens.dtype == torch.int64 and got.lengths.dtype == torch.int32
        for request, new, length in zip(active, got.tokens.tolist(), got.lengths.tolist(), strict=True):
            assert 1 <= length <= STEPS + 1 and new[length:] == [-1] * (STEPS + 1 - length)
            tokens[request] += new[:length]
            accepted[length - 1] += 1
    assert [each[:LENGTH] for each in tokens] == expected
    assert sorted(accepted) == list(range(STEPS + 1))


# -------------------------------------------------------------------- what is accepted

CHOSEN = torch.tensor([2, 1, 3, 0, 0, 5])


def greedy(drafts: list[int], num_drafts: int, **given: Any) -> tuple[list[list[int]], list[int]]:
    given = {"temperature": 0.0, "seeds": 0, "positions": 0} | given
    got = verify(torch.eye(6)[CHOSEN], torch.tensor(drafts), num_drafts, **given)
    return got.tokens.tolist(), got.lengths.tolist()


STARTS = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
SLOTS = torch.tensor([0, -1, 0, -1, 0, 0], dtype=torch.int32)
BEYOND = torch.tensor([-9, -1, 5, 90, 91, 91], dtype=torch.int32)
RAGGED, NONE = [9, 2, 1, 3, 0, 0], [-1, -1, -1]
ACCEPTED: list[tuple[str, list[int], int, dict[str, Any], list[list[int]], list[int]]] = [
    ("all", [9, 2, 1, 9, 0, 0], 2, {}, [[2, 1, 3], [0, 0, 5]], [3, 3]),
    ("none", [9, 1, 1, 9, 5, 0], 2, {}, [[2, -1, -1], [0, -1, -1]], [1, 1]),
    ("right behind wrong", [2, 0, 1, 0, 0, 1], 2, {}, [[2, -1, -1], [0, 0, -1]], [1, 2]),
    ("placeholders", [-1, 2, -1, -1, -1, -1], 2, {}, [[2, 1, -1], [0, -1, -1]], [2, 1]),
    ("no drafts", [9] * 6, 0, {}, [[2], [1], [3], [0], [0], [5]], [1] * 6),
    ("more than tokens", [9, 6, 1, 9, 2**40, 0], 2, {}, [[2, -1, -1], [0, -1, -1]], [1, 1]),
    ("ragged", RAGGED, 2, {"starts": STARTS}, [[2, 1, -1], NONE, [3, 0, 0], [5, -1, -1]], [2, 0, 3, 1]),
    ("fewer columns than rows", RAGGED, 1, {"starts": STARTS[2:]}, [[3, 0], [5, -1]], [2, 1]),
    (
        "beyond the rows",
        RAGGED,
        1,
        {"starts": BEYOND},
        [*[[-1, -1]] * 2, [5, -1], *[[-1, -1]] * 2],
        [0, 0, 1, 0, 0],
    ),
    ("skipped", [9, 2, -1, -1, -1, 0], 2, {"slots": SLOTS}, [[2, -1, -1], NONE], [1, 0]),
    ("no request", [9] * 6, 2, {"starts": STARTS[:1]}, [], []),
]


@pytest.mark.parametrize(
    ("drafts", "num_drafts", "given", "tokens", "lengths"),
    [each[1:] for each in ACCEPTED],
    ids=[each[0] for each in ACCEPTED],
)
def test_what_is_accepted(
    drafts: list[int], num_drafts: int, given: dict[str, Any], tokens: list[list[int]], lengths: list[int]
) -> None:
    assert greedy(drafts, num_drafts, **given) == (tokens, lengths)


def test_what_is_accepted_is_what_a_loop_over_tokens_accepts() -> None:
    """Starts outside of all rows, decreasing ones and none; tokens of skipped rows; ids of both dtypes."""
    seen, kinds = set[int](), set[tuple[Any, ...]]()
    for seed in range(600):
        call = random_call(np.random.default_rng(seed))
        launch(call)
        assert written(call) == accepted(call), seed
        seen.update(call.lengths.tolist())
        kinds.add((*(ids.dtype for ids in (call.drawn, call.draft_tokens, call.tokens)), call.starts is None))
    assert {0, 1, 2, 33, 70}.issubset(seen) and len(kinds) == 16


def test_no_rows() -> None:
    for starts, requests in ((None, 0), (torch.zeros(3, dtype=torch.int32), 2)):
        got = verify(torch.zeros(0, 4), torch.zeros(0).long(), 1, starts=starts, seeds=0, positions=0)
        assert (got.tokens.tolist(), got.lengths.tolist()) == ([[-1, -1]] * requests, [0] * requests)


def test_outputs_are_those_of_all_rows() -> None:
    """Also of the rows behind a draft that is not accepted."""
    given = {"seeds": 3, "positions": torch.arange(6), "top_k": 3}
    logits = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    names = ("out", "logprobs", "kept")
    wanted, got = (
        (torch.zeros(6, dtype=torch.int32), torch.zeros(6), torch.zeros(6, 3, dtype=torch.int32))
        for _ in range(2)
    )
    sample(logits, **given, **dict(zip(names, wanted, strict=True)))
    verified = verify(logits, torch.full((6,), -1), 2, **given, **dict(zip(names, got, strict=True)))
    assert all(map(torch.equal, got, wanted))
    assert verified.tokens.dtype == torch.int32
    assert verified.tokens.tolist() == [[int(got[0][0]), -1, -1], [int(got[0][3]), -1, -1]]


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without values are enough, so a CUDA graph can capture the call."""
    with FakeTensorMode():
        rows, drafts, starts = torch.empty(6, 8), torch.empty(6).long(), torch.empty(5).int()
        for given, requests in ((None, 2), (starts, 4)):
            got = verify(rows, drafts, 2, starts=given, seeds=drafts, positions=drafts)
            assert got.tokens.shape == (requests, 3) and got.lengths.shape == (requests,)


LOGITS, DRAFTS = torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64)
WRONG: list[tuple[str, Any, str]] = [
    ("logits", LOGITS[:5], "1 + num_drafts = 3 rows for each request, got 5"),
    ("draft_tokens", [0] * 6, "a Tensor, got list"),
    ("draft_tokens", LOGITS[:, 0].contiguous(), "dtype int64 or int32, got float32"),
    ("draft_tokens", DRAFTS.view(2, 3), "shape [6], got [2, 3]"),
    ("num_drafts", -1, "0 to 67108864, got -1"),
    ("num_drafts", 2.0, "an integer, got 2.0"),
    ("starts", DRAFTS, "dtype int32, got int64"),
    ("starts", DRAFTS.int().view(2, 3), "shape [6], got [2, 3]"),
    ("starts", DRAFTS[0].int(), "shape [1], got []"),
    ("starts", DRAFTS[:0].int(), "shape [1], got [0]"),
    ("starts", [0, 6], "a Tensor, got list"),
    ("out", DRAFTS, "memory of its own, got memory shared with draft_tokens"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_arguments(name: str, value: Any, message: str) -> None:
    call = {"logits": LOGITS, "draft_tokens": DRAFTS, "num_drafts": 2} | {name: value}
    if name == "logits" and len(value) == 5:
        call["draft_tokens"] = DRAFTS[:5]
    with pytest.raises(ValueError, match=f"^gvr_topk.verify: {name}: wanted {re.escape(message)}$"):
        verify(**call, seeds=0, positions=0)


def test_nothing_is_written_where_an_argument_is_wrong() -> None:
    starts = torch.tensor([0, 3, 6, 0, 0, 0], dtype=torch.int32)
    before = starts.clone()
    for wrong in ({"draft_tokens": DRAFTS[:2]}, {"draft_tokens": DRAFTS, "starts": starts[:3]}):
        with pytest.raises(ValueError, match="wanted"):
            verify(LOGITS, num_drafts=2, **wrong, counts=starts, seeds=0, positions=0)
        assert torch.equal(starts, before)


def test_logits_and_parameters_are_checked_as_those_of_sample() -> None:
    with pytest.raises(ValueError, match=r"^gvr_topk.sample: logits: wanted dtype float32, .* got int64$"):
        verify(DRAFTS, DRAFTS, 2, seeds=0, positions=0)
    with pytest.raises(ValueError, match=r"^gvr_topk.sample: top_p: wanted shape \[6\], got \[2\]$"):
        verify(LOGITS, DRAFTS, 2, seeds=0, positions=0, top_p=torch.ones(2))
