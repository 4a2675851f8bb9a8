"""Exactness: every path, dtype, k, generator and adversarial row gives the contract's result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import full_lengths, place, run, state, wrong_rows

from gvr_topk.contract import STATS_COLUMNS
from gvr_topk.evaluation.synthetic import LAYERS, LayerGenerator, adversarial_hints, adversarial_rows
from gvr_topk.gate import plan

PATHS = ("cluster", "radix", "gvr")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def adversarial_batch(n: int, k: int, dtype: torch.dtype) -> tuple[list[str], torch.Tensor]:
    rows = adversarial_rows(n, k, seed=n + k)
    return list(rows), torch.from_numpy(np.stack(list(rows.values()))).to(dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [512, 1024, 2048])
@pytest.mark.parametrize("n", [2049, 4096, 16411, 70690, 180_000])
def test_adversarial_rows(path: str, dtype: torch.dtype, k: int, n: int) -> None:
    names, rows = adversarial_batch(n, k, dtype)
    logits = place(rows, pad=5)
    got = run(logits, full_lengths(logits), k, path=path)
    assert [names[r] for r in wrong_rows(got, logits, full_lengths(logits), k)] == []


@pytest.mark.parametrize("path", ["cluster", "gvr"])
@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.03, 0.5, 0.99, 1.0, float("nan")])
@pytest.mark.parametrize("offset", [0, 1, -3])
def test_adversarial_hints(path: str, alpha: float, offset: int) -> None:
    n, k = 40_000, 2048
    names, rows = adversarial_batch(n, k, torch.float32)
    logits = place(rows)
    lengths = full_lengths(logits)
    for name, hint in adversarial_hints(n, k, seed=1).items():
        prior = torch.from_numpy(hint[:k]).to("cuda").expand(len(names), k).contiguous()
        guess = state(len(names), alpha)
        got = run(logits, lengths, k, path=path, prior=prior, guess_state=guess, prior_offset=offset)
        assert [names[r] for r in wrong_rows(got, logits, lengths, k)] == [], name
        assert torch.equal(prior, got), f"{name}: the next hint is not the result"


WINDOWS = (
    *(-0.0, -1e-45, -1e-38, -1e-20, -1e-6, -0.25, -0.5, -1.0000001, -1.25, -2.0, -3.5, -7.0, -100.0),
    *(-1e9, -1e30, -8.5e37, -8.6e37, -3e38, -float("inf")),
)
"""What a step may have left for a short row: windows about all kinds of values, of all radii, and none."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "copies"), [(2500, 1), (8192, 1), (16_384, 1), (30_000, 8)])
def test_adversarial_rows_and_windows(dtype: torch.dtype, n: int, copies: int) -> None:
    k = 2048
    names, rows = adversarial_batch(n, k, dtype)
    logits = place(rows.repeat(copies, 1))
    lengths = full_lengths(logits)
    assert plan(rows=len(logits), width=n, k=k).family == "single"
    prior = torch.full((len(logits), k), -1, dtype=torch.int32, device="cuda")
    for left in WINDOWS:
        guess = state(len(logits), left)
        for _ in range(3):  # and what it leaves itself
            got = run(logits, lengths, k, prior=prior, guess_state=guess)
            assert [names[r % len(names)] for r in wrong_rows(got, logits, lengths, k)] == [], left


@pytest.mark.parametrize("path", ["cluster", "radix"])
@pytest.mark.parametrize("ctas", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cluster_sizes(path: str, ctas: int, dtype: torch.dtype) -> None:
    for n in (3000, 33_333, 200_001):
        names, rows = adversarial_batch(n, 2048, dtype)
        logits = place(rows)
        got = run(logits, full_lengths(logits), 2048, path=path, ctas_per_row=ctas)
        assert [names[r] for r in wrong_rows(got, logits, full_lengths(logits), 2048)] == [], n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [8, 16, 32, 64])
def test_rows_that_one_cta_holds(values: int, dtype: torch.dtype) -> None:
    for n, shift in ((512 * values, 0), (512 * values - 7, 1), (257 * values, 0)):
        made = plan(rows=1, width=n, k=n // 3, dtype=dtype, ctas_per_row=1)
        assert (made.family, made.values_per_thread) == ("single", values)
        for k in (1, n // 3, n - 1):
            names, rows = adversarial_batch(n, k, dtype)
            logits = place(rows, pad=8 - n % 8, shift=shift)
            full = full_lengths(logits)
            ragged = torch.linspace(1, n, len(names), device="cuda").round().to(torch.int32)
            for lengths in (full, ragged):
                got = run(logits, lengths, k, path="cluster", ctas_per_row=1)
                assert [names[r] for r in wrong_rows(got, logits, lengths, k)] == [], (n, k)


@pytest.mark.parametrize(
    ("ctas", "family", "values"),
    [(1, "stream", 16), (2, "stream", 16), (4, "stream", 16), (8, "resident", 32), (16, "resident", 16)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_with_every_hint(ctas: int, family: str, values: int, dtype: torch.dtype) -> None:
    n, k = 70_690, 2048
    made = plan(rows=1, width=n, k=k, dtype=dtype, ctas_per_row=ctas)
    assert (made.family, made.values_per_thread) == (family, values)
    names, rows = adversarial_batch(n, k, dtype)
    noise = torch.randn(2, n, generator=torch.Generator().manual_seed(ctas))
    noise[1, -3000:] += 9  # all of the choice in a few threads' parts
    logits = place(torch.cat([rows, noise.to(dtype)]), pad=6)  # 16-byte loads on every row
    assert logits.stride(0) % 8 == 0
    names += ["noise", "all at the end"]
    lengths = full_lengths(logits)
    best = run(logits, lengths, k, path="cluster", ctas_per_row=ctas)
    assert [names[r] for r in wrong_rows(best, logits, lengths, k)] == []
    spoilt = best.clone()
    spoilt[:, ::3] = torch.randint(0, n, spoilt[:, ::3].shape, dtype=torch.int32, device="cuda")
    for prior, alpha in ((best, 1.0), (best, 0.5), (spoilt, 0.7), (spoilt, 0.99), (spoilt, 0.15)):
        guess = state(len(names), alpha)
        got = run(
            logits,
            lengths,
            k,
            path="cluster",
            ctas_per_row=ctas,
            prior=prior.clone(),
            guess_state=guess,
        )
        assert [names[r] for r in wrong_rows(got, logits, lengths, k)] == [], alpha


@pytest.mark.parametrize("ctas", [1, 2, 8, 16])
def test_drafts_write_the_hint_that_others_read(ctas: int) -> None:
    # The last of a request's rows writes the hint while the clusters of the others may be reading it, so
    # that CTAs of one cluster guess differently: half of the values are zero, and zero is in some brackets.
    n, k, next_n, requests = 70_688, 2048, 4, 8
    generator = torch.Generator(device="cuda").manual_seed(ctas)
    logits = torch.randn(requests * next_n, n, device="cuda", generator=generator)
    logits[:, : n - k - 100] = logits[:, : n - k - 100].clamp(max=0.0)
    lengths = torch.full((requests,), n, dtype=torch.int32, device="cuda")
    for step in range(30):
        prior = torch.randint(0, n, (requests, k), dtype=torch.int32, device="cuda", generator=generator)
        guess = state(requests, torch.rand(requests, device="cuda", generator=generator))
        got = run(
            logits,
            lengths,
            k,
            path="cluster",
            ctas_per_row=ctas,
            next_n=next_n,
            prior=prior,
            guess_state=guess,
        )
        assert wrong_rows(got, logits, lengths, k, next_n) == [], step


@pytest.mark.parametrize("ctas", [1, 2, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [9, 33, 700, 40_000])
def test_few_values_about_zero(ctas: int, dtype: torch.dtype, n: int) -> None:
    # A bracket that begins at zero and turns out too high is moved to what lies below zero, and zero with it
    # must not be.
    generator = torch.Generator().manual_seed(n + ctas)
    rows = torch.randint(-3, 4, (84, n), generator=generator).to(dtype)
    rows[::3] = rows[::3].clamp(max=0)
    rows[1] = torch.tensor([-3.0, 3, 1, 0, -3, -1, -1, -3, -1]).repeat(n // 9 + 1)[:n]
    logits = place(rows, pad=3)
    for share in (0.3, 0.45, 0.5, 0.6, 0.8):
        k = max(1, int(share * n))
        for _ in range(5):
            got = run(logits, full_lengths(logits), k, path="cluster", ctas_per_row=ctas)
            assert wrong_rows(got, logits, full_lengths(logits), k) == [], k


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [3000, 20_000, 70_001])
def test_nans_of_every_sign_and_payload(path: str, dtype: torch.dtype, n: int) -> None:
    # All of them are one value, above infinity; which of them are chosen, their positions say.
    k = 2048
    integer, infinity = {
        torch.float32: (torch.int32, 0x7F800000),
        torch.bfloat16: (torch.int16, 0x7F80),
        torch.float16: (torch.int16, 0x7C00),
    }[dtype]
    payloads = torch.iinfo(integer).max - infinity
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(4, n, generator=generator).to(dtype)
    counts = [3, k // 2, k, min(n, 3 * k)]
    for row, count in enumerate(counts):
        where = torch.randperm(n, generator=generator)[:count]
        payload = torch.randint(1, payloads + 1, (count,), generator=generator)
        sign = torch.randint(0, 2, (count,), generator=generator) * (torch.iinfo(integer).max + 1)
        bits = infinity + payload - sign  # as a signed number, the top bit is that much less
        rows[row, where] = bits.to(integer).view(dtype)
    assert rows.isnan().sum(1).tolist() == counts
    logits = place(rows, pad=5)
    got = run(logits, full_lengths(logits), k, path=path)
    assert wrong_rows(got, logits, full_lengths(logits), k) == []


@pytest.mark.parametrize("path", ["cluster", "radix"])
@pytest.mark.parametrize("k", [1, 7, 100, 3000, 50_000])
def test_any_k(path: str, k: int) -> None:
    for n in (k, k + 1, 2 * k + 3, 100_003):
        names, rows = adversarial_batch(n, k, torch.float32)
        logits = place(rows)
        got = run(logits, full_lengths(logits), k, path=path)
        assert [names[r] for r in wrong_rows(got, logits, full_lengths(logits), k)] == [], n


@pytest.mark.parametrize("path", ["cluster", "radix"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_longest_rows(path: str, dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(5)
    for n in (600_001, 1 << 21):
        logits = torch.randn(3, n, device="cuda", generator=generator).to(dtype)
        logits[1] = logits[1].relu()
        logits[2, ::3] = 9.5
        got = run(logits, full_lengths(logits), 2048, path=path)
        assert wrong_rows(got, logits, full_lengths(logits), 2048) == []


@pytest.mark.parametrize(("k", "family"), [(2048, "stream"), (2049, "general")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_longest_rows_of_one_cta(k: int, family: str, dtype: torch.dtype) -> None:
    n = 1 << 20
    assert plan(rows=1, width=n, k=k, dtype=dtype, ctas_per_row=1).family == family
    generator = torch.Generator(device="cuda").manual_seed(6)
    logits = torch.randn(5, n, device="cuda", generator=generator).to(dtype)
    logits[1] = logits[1].relu()
    logits[2, ::3] = 9.5
    logits[3] = logits[3].abs().clamp(min=1.0)
    lengths = torch.tensor([n, n, n, n, 900_001], dtype=torch.int32, device="cuda")
    best = run(logits, lengths, k, path="cluster", ctas_per_row=1)
    assert wrong_rows(best, logits, lengths, k) == []
    # Of these hints half are far below the k-th value: all the more is kept, and one store too small.
    spoilt = best.clone()
    spoilt[:, ::2] = torch.randint(0, n, spoilt[:, ::2].shape, dtype=torch.int32, device="cuda")
    for alpha in (0.4, 0.5, 0.6):
        guess = state(5, alpha)
        got = run(logits, lengths, k, path="cluster", ctas_per_row=1, prior=spoilt.clone(), guess_state=guess)
        assert wrong_rows(got, logits, lengths, k) == [], alpha


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("pad", [0, 1, 6])
def test_alignment_and_stride(path: str, dtype: torch.dtype, shift: int, pad: int) -> None:
    rows = torch.randn(5, 30_001, generator=torch.Generator().manual_seed(shift)).to(dtype)
    logits = place(rows, pad=pad, shift=shift)
    got = run(logits, full_lengths(logits), 512, path=path)
    assert wrong_rows(got, logits, full_lengths(logits), 512) == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [12, 96])
def test_ragged_batches(path: str, next_n: int, rows: int) -> None:
    k, width = 2048, 50_000
    generator = torch.Generator(device="cuda").manual_seed(next_n)
    logits = torch.randn(rows, width, device="cuda", generator=generator)
    lengths = torch.randint(
        -3, width + 9, (rows // next_n,), device="cuda", dtype=torch.int32, generator=generator
    )
    lengths[:4] = torch.tensor([0, k, k + 1, k + next_n], dtype=torch.int32)[: len(lengths)]
    prior = torch.randint(-9, width, (rows, k), device="cuda", dtype=torch.int32, generator=generator)
    before = prior.clone()
    guess = state(rows, torch.rand(rows, device="cuda", generator=generator))
    slots = torch.randperm(rows, device="cuda", generator=generator)[: rows // next_n].to(torch.int32)
    slots[1] = -1
    row_slot = slots.repeat_interleave(next_n)
    got = run(logits, lengths, k, path=path, next_n=next_n, prior=prior, row_slot=row_slot, guess_state=guess)
    assert wrong_rows(got, logits, lengths, k, next_n) == []
    for request, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(prior[slot], got[request * next_n + next_n - 1])
    untouched = sorted(set(range(rows)) - set(slots.tolist()))
    assert torch.equal(prior[untouched], before[untouched]), "wrote a slot no row owns"


@pytest.mark.parametrize("layer", sorted(LAYERS))
@pytest.mark.parametrize("offset", [0, 1])
def test_generator_steps(layer: int, offset: int) -> None:
    k, steps = 2048, 6
    source = LayerGenerator(layer, 70_690, steps, seed=3)
    logits = torch.zeros(3, 70_690 + steps, device="cuda")
    prior = torch.full((3, k), -1, dtype=torch.int32, device="cuda")
    guess = state(3)
    for step in range(steps):
        scores = torch.from_numpy(np.ascontiguousarray(source.scores(step)))
        logits[:, : len(scores)] = scores.to("cuda")
        lengths = torch.full((3,), len(scores), dtype=torch.int32, device="cuda")
        for path in PATHS:
            got = run(
                logits,
                lengths,
                k,
                path=path,
                prior=prior.clone(),
                guess_state=guess.clone(),
                prior_offset=offset,
            )
            assert wrong_rows(got, logits, lengths, k) == [], (path, step)
        run(logits, lengths, k, prior=prior, guess_state=guess, prior_offset=offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "n, rows",
    [
        *((n, 2) for n in (2500, 4096, 8192, 12_000, 40_000, 200_000, 400_000)),
        *((30_000, 134), (40_000, 12), (131_072, 4), (150_000, 40), (200_000, 16)),
    ],
)
def test_kinds_of_launches(dtype: torch.dtype, n: int, rows: int) -> None:
    # Plain launches, and those that differ in what is asked for, are served by kernels of their own.
    k = 2048
    generator = torch.Generator(device="cuda").manual_seed(n + rows)
    base = torch.randn(rows, n, device="cuda", generator=generator)
    swapped = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device="cuda")
    kinds = {
        "plain": ({}, 0),
        "slots": ({"row_slot": swapped}, 0),
        "several": ({"next_n": 2}, 0),
        "both": ({"next_n": 2, "row_slot": swapped // 2}, 0),
        "statistics": ({"stats": torch.zeros(rows, len(STATS_COLUMNS), dtype=torch.int32, device="cuda")}, 0),
        "odd stride": ({}, 1),
        "bare": ({"prior": None, "guess_state": None}, 0),
        "state": ({"prior": None}, 0),
        "state of slots": ({"prior": None, "row_slot": swapped}, 0),
    }
    hints = {
        kind: (
            torch.full((rows, k), -1, dtype=torch.int32, device="cuda"),
            state(rows),
        )
        for kind in kinds
    }
    for _ in range(3):
        scores = (base + 0.3 * torch.randn(rows, n, device="cuda", generator=generator)).to(dtype)
        for kind, (asked, pad) in kinds.items():
            next_n = int(asked.get("next_n", 1))
            logits = place(scores, pad=pad)
            lengths = full_lengths(logits)[: rows // next_n]
            prior, guess = hints[kind]
            got = run(logits, lengths, k, **{"prior": prior, "guess_state": guess, **asked})
            assert wrong_rows(got, logits, lengths, k, next_n) == [], kind
            if "prior" in asked:
                continue
            owner = asked.get("row_slot", torch.arange(rows, device="cuda") // next_n).long()
            last = torch.arange(next_n - 1, rows, next_n, device="cuda")
            assert torch.equal(prior[owner[last]], got[last]), f"{kind}: the next hint is not the result"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "copies"), [(1 << 20, 1), (131_072, 64), (40_000, 1)])
@pytest.mark.parametrize(("k", "finite"), [(2048, 1001), (8, 4), (2048, 2047), (512, 3)])
def test_few_finite_scores_and_a_hint_outside_of_the_row(
    dtype: torch.dtype, n: int, copies: int, k: int, finite: int
) -> None:
    # The first scores alone are finite, so that the row's sample counts; hints that lie in no row leave a
    # bracket without a single hinted value.
    logits = torch.full((copies, n), -torch.inf, dtype=dtype, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(finite)
    logits[:, :finite] = torch.randn(copies, finite, device="cuda", generator=generator).to(dtype)
    lengths = full_lengths(logits)
    for hinted in (-1, n + 5, 7):
        prior = torch.full((copies, k), hinted, dtype=torch.int32, device="cuda")
        guess = state(copies, 0.5)
        for _ in range(3):  # and what it leaves itself
            got = run(logits, lengths, k, prior=prior, guess_state=guess)
            assert wrong_rows(got, logits, lengths, k) == [], hinted
            assert torch.equal(prior, got)
            prior.fill_(hinted)
