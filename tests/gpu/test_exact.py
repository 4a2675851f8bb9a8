"""Exactness: every path, dtype, k, generator and adversarial row gives the contract's result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import ANY_K, PATHS, clone, exact, full_lengths, new_state, place, run, run_forced, words

from eval.stress.stress_cases import packed_spreads
from gvr_topk.constants import STATE_INFINITE, STATE_MASKED, STATE_VALUE_ONLY, STATE_ZSCORE_ORIGIN
from gvr_topk.contract import DTYPES
from gvr_topk.evaluation.synthetic import LAYERS, LayerGenerator
from gvr_topk.policy import plan
from gvr_topk.state import TopkState
from tests.adversarial import adversarial_hints, adversarial_rows


def adversarial_batch(n: int, k: int, dtype: torch.dtype) -> tuple[list[str], torch.Tensor]:
    rows = adversarial_rows(n, k, seed=n + k)
    return list(rows), torch.from_numpy(np.stack(list(rows.values()))).to(dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [512, 1024, 2048])
@pytest.mark.parametrize("n", [2049, 4096, 16411, 24_576, 24_577, 49_152, 49_153, 70690, 180_000])
def test_adversarial_rows(path: str, dtype: torch.dtype, k: int, n: int) -> None:
    names, rows = adversarial_batch(n, k, dtype)
    logits = place(rows, pad=5)
    exact(logits, full_lengths(logits), k, path=path, names=names)


@pytest.mark.parametrize("path", ["auto", "paper_gvr"])
@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.03, 0.5, 0.99, 1.0, float("nan")])
@pytest.mark.parametrize("offset", [0, 1, -3])
def test_adversarial_hints(path: str, alpha: float, offset: int) -> None:
    n, k = 40_000, 2048
    names, rows = adversarial_batch(n, k, torch.float32)
    logits = place(rows)
    lengths = full_lengths(logits)
    for name, hint in adversarial_hints(n, k, seed=1).items():
        indices = torch.from_numpy(hint[:k]).to("cuda").expand(len(names), k).contiguous()
        state = TopkState.of(words(len(names), alpha), indices, k)
        got = exact(logits, lengths, k, path=path, state=state, hint_offset=offset, names=names, said=name)
        assert torch.equal(indices, got), f"{name}: what is kept is not the result"


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
    assert plan(rows=len(logits), width=n, k=k).family == "small_row"
    for left in WINDOWS:
        state = TopkState.of(words(len(logits), left), None, k)
        for _ in range(3):  # and what it leaves itself
            exact(logits, lengths, k, state=state, names=names, said=left)


STARTS = {
    "small row": (1000, 1000),
    "small row, full": (8192, 8192),
    "small row of 32 elements a thread, full": (16_384, 16_384),
    "resident": (40_001, 40_001),
    "resident, full": (262_144, 262_144),
    "resident, the first CTA alone": (131_072, 8192),
    "resident, laid out again": (131_072, 20_003),
    "streaming": (262_144, 262_144),
    "streaming, the first CTA alone": (1 << 20, 16_384),
    "streaming, hardly any of the row in the last CTAs": (1 << 20, 16_387),
}
"""Widths of buffers, and lengths of rows in them. Full ones leave just the room for what lies ahead."""


@pytest.mark.parametrize("ahead", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", STARTS)
def test_rows_that_start_anywhere(shape: str, dtype: torch.dtype, ahead: float) -> None:
    """Kernels read what lies ahead of a row, from the line's beginning on, and do not select it."""
    (width, length), k = STARTS[shape], 2048
    if shape.endswith("full"):
        width = length = length - (128 // dtype.itemsize - 1)
        made, wider = (plan(rows=1, width=width + more, k=k, dtype=dtype, aligned=False) for more in (0, 1))
        assert made.family in ("small_row", "resident") and made != wider
    names, contents = adversarial_batch(length, k, dtype)
    rows = torch.full((len(names), width), ahead, dtype=dtype)
    rows[:, :length] = contents
    logits, state = place(rows, pad=3 - width % 2, around=ahead), new_state(len(names), k)
    lengths = torch.full((len(names),), length, dtype=torch.int32, device="cuda")
    assert len({row.data_ptr() % 16 for row in logits}) == 16 // dtype.itemsize
    for ctas in (0, 2, 16):
        exact(logits, lengths, k, ctas=ctas, path="no_hint", names=names, said=ctas)
        for step in range(3):
            exact(logits, lengths, k, ctas=ctas, state=state, names=names, said=(ctas, step))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ctas", [0, 1, 2, 16])
@pytest.mark.parametrize("stride", [1, 1001])
def test_rows_without_columns(stride: int, ctas: int, dtype: torch.dtype) -> None:
    """Such rows may have no memory at all, wherever a stride says that they lie."""
    logits = torch.empty(3, 0, dtype=dtype, device="cuda").as_strided((3, 0), (stride, 1))
    lengths, state = torch.tensor([0, 9, 2**31 - 1], dtype=torch.int32, device="cuda"), new_state(3, 8)
    for given in ({}, {"state": state}):
        assert set(run_forced(logits, lengths, 8, ctas, **given).flatten().tolist()) == {-1}


@pytest.mark.parametrize("path", ANY_K)
@pytest.mark.parametrize("ctas", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cluster_sizes(path: str, ctas: int, dtype: torch.dtype) -> None:
    for n in (3000, 33_333, 200_001, 24_576 * ctas, 24_576 * ctas + 1):  # Radix rounds just hold one of them.
        names, rows = adversarial_batch(n, 2048, dtype)
        logits = place(rows)
        exact(logits, full_lengths(logits), 2048, ctas=ctas, path=path, names=names, said=n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [8, 16, 32, 64])
def test_rows_that_one_cta_holds(values: int, dtype: torch.dtype) -> None:
    for n, shift in ((512 * values, 0), (512 * values - 7, 1), (257 * values, 0)):
        made = plan(rows=1, width=n, k=n // 3, dtype=dtype, ctas_per_row=1)
        assert (made.family, made.values_per_thread) == ("small_row", values)
        for k in (1, n // 3, n - 1):
            names, rows = adversarial_batch(n, k, dtype)
            logits = place(rows, pad=8 - n % 8, shift=shift)
            full = full_lengths(logits)
            ragged = torch.linspace(1, n, len(names), device="cuda").round().to(torch.int32)
            for lengths in (full, ragged):
                exact(logits, lengths, k, ctas=1, names=names, said=(n, k))


@pytest.mark.parametrize(
    ("ctas", "family", "values"),
    [
        (1, "streaming", 16),
        (2, "streaming", 16),
        (4, "streaming", 16),
        (8, "resident", 32),
        (16, "resident", 16),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_with_every_kind_of_state(
    ctas: int, family: str, values: int, dtype: torch.dtype
) -> None:
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
    best = exact(logits, lengths, k, ctas=ctas, names=names)
    kth = logits.gather(1, best.long()).float().amin(dim=1)
    usual, wide = (packed_spreads(*both, False) for both in ((0.05, 0.05), (1.0, 10.0)))
    by_value = packed_spreads(0.05, 0.05, True)
    kinds = {
        "value": words(len(names), STATE_VALUE_ONLY, value=kth, limit=0.1, spreads=by_value),
        "value, too high": words(len(names), STATE_VALUE_ONLY, value=kth + 1, limit=0.1, spreads=by_value),
        "z-score": words(len(names), STATE_ZSCORE_ORIGIN + 1.9, value=kth, limit=0.1, spreads=usual),
        "z-score, too low": words(len(names), STATE_ZSCORE_ORIGIN + 1, value=kth, limit=9.0, spreads=wide),
        "infinite": words(len(names), STATE_INFINITE),
        "masked": words(len(names), STATE_MASKED),
        "share": words(len(names), 0.7),
        "window": words(len(names), -0.5),
    }
    for kind, its in kinds.items():
        state = TopkState.of(its, None, k)
        for _ in range(2):  # and what it leaves itself
            exact(logits, lengths, k, ctas=ctas, state=state, names=names, said=kind)


@pytest.mark.parametrize("ctas", [1, 2, 8, 16])
def test_drafts_write_the_state_that_others_read(ctas: int) -> None:
    # The last of a request's rows writes the state while the clusters of the others may be reading it, so
    # that CTAs of one cluster guess differently: half of the values are zero, and zero is in some brackets.
    n, k, next_n, requests = 70_688, 2048, 4, 8
    generator = torch.Generator(device="cuda").manual_seed(ctas)
    logits = torch.randn(requests * next_n, n, device="cuda", generator=generator)
    logits[:, : n - k - 100] = logits[:, : n - k - 100].clamp(max=0.0)
    lengths = torch.full((requests,), n, dtype=torch.int32, device="cuda")
    spreads = packed_spreads(0.05, 0.05, False)
    for step in range(30):
        drawn = torch.randn(2, requests, device="cuda", generator=generator)
        # Zero stands about 0.7 deviations above the mean.
        first = STATE_ZSCORE_ORIGIN + 0.7 + 0.05 * drawn[0] if step % 2 else STATE_VALUE_ONLY
        left = words(requests, first, value=0.05 * drawn[1], limit=0.1, spreads=spreads)
        state = TopkState.of(left, None, k)
        exact(logits, lengths, k, ctas=ctas, next_n=next_n, state=state, said=step)


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
            exact(logits, full_lengths(logits), k, ctas=ctas, said=k)


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
    exact(logits, full_lengths(logits), k, path=path)


@pytest.mark.parametrize("path", ANY_K)
@pytest.mark.parametrize("k", [1, 7, 100, 3000, 50_000])
def test_any_k(path: str, k: int) -> None:
    for n in (k, k + 1, 2 * k + 3, 100_003):
        names, rows = adversarial_batch(n, k, torch.float32)
        logits = place(rows)
        exact(logits, full_lengths(logits), k, path=path, names=names, said=n)


@pytest.mark.parametrize("path", ANY_K)
@pytest.mark.parametrize("dtype", DTYPES)
def test_longest_rows(path: str, dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(5)
    for n in (600_001, 1 << 21):
        logits = torch.randn(3, n, device="cuda", generator=generator).to(dtype)
        logits[1] = logits[1].relu()
        logits[2, ::3] = 9.5
        exact(logits, full_lengths(logits), 2048, path=path)


@pytest.mark.parametrize(("k", "family"), [(2048, "streaming"), (2049, "fallback")])
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
    exact(logits, lengths, k, ctas=1)
    # States that place the k-th value far too low: all the more is kept, and one store too small.
    spreads = packed_spreads(0.3, 0.3, False)
    for zscore in (1.5, 2.0, 2.5):
        state = TopkState.of(words(5, STATE_ZSCORE_ORIGIN + zscore, limit=1.0, spreads=spreads), None, k)
        exact(logits, lengths, k, ctas=1, state=state, said=zscore)


@pytest.mark.parametrize("ctas", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pad", [0, 5])
def test_large_k_in_clusters_of_every_size(ctas: int, dtype: torch.dtype, pad: int) -> None:
    """Around the k up to which rows stream and from which a second sample narrows the interval, up to all."""
    n = 300_001
    ks = [min(2048 * ctas, 16_384) + more for more in (0, 1)]
    families = [plan(rows=1, width=n, k=k, dtype=dtype, ctas_per_row=ctas).family for k in ks]
    assert families == ["streaming", "fallback"]
    names, rows = adversarial_batch(n, 9000, dtype)
    logits = place(rows, pad=pad)
    lengths = full_lengths(logits)
    lengths[::3] -= 40_000
    lengths[1::3] = torch.linspace(2500, 20_000, len(lengths[1::3])).to(lengths)
    for k in {8192, 8193, *ks, 20_000, n // 2, n - 1}:
        exact(logits, lengths, k, ctas=ctas, names=names, said=k)


@pytest.mark.parametrize("layer", sorted(LAYERS))
@pytest.mark.parametrize("offset", [0, 1])
def test_generator_steps(layer: int, offset: int) -> None:
    k, steps = 2048, 6
    source = LayerGenerator(layer, 70_690, steps, seed=3)
    logits = torch.zeros(3, 70_690 + steps, device="cuda")
    state = new_state(3, k, keep_indices=True)
    for step in range(steps):
        scores = torch.from_numpy(np.ascontiguousarray(source.scores(step)))
        logits[:, : len(scores)] = scores.to("cuda")
        lengths = torch.full((3,), len(scores), dtype=torch.int32, device="cuda")
        for path in PATHS:
            exact(logits, lengths, k, path=path, state=clone(state), hint_offset=offset, said=(path, step))
        run(logits, lengths, k, state=state, hint_offset=offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "copies"), [(1 << 20, 1), (131_072, 64), (40_000, 1)])
@pytest.mark.parametrize(("k", "finite"), [(2048, 1001), (8, 4), (2048, 2047), (512, 3)])
def test_few_finite_scores_and_a_state_of_another_row(
    dtype: torch.dtype, n: int, copies: int, k: int, finite: int
) -> None:
    # The first scores alone are finite, so that the row's sample counts; states place the k-th value where
    # there is nothing.
    logits = torch.full((copies, n), -torch.inf, dtype=dtype, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(finite)
    logits[:, :finite] = torch.randn(copies, finite, device="cuda", generator=generator).to(dtype)
    lengths = full_lengths(logits)
    spreads = packed_spreads(0.05, 0.05, False)
    for first, value in ((0.5, 0.0), (STATE_ZSCORE_ORIGIN + 2, 0.0), (STATE_VALUE_ONLY, 1e3)):
        state = TopkState.of(words(copies, first, value=value, limit=0.1, spreads=spreads), None, k)
        for _ in range(3):  # and what it leaves itself
            exact(logits, lengths, k, state=state, said=first)
