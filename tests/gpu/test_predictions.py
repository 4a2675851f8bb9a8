"""Intervals that kernels predict: what a state promises is what is searched, and chains of steps are hit."""

from __future__ import annotations

import pytest
import torch
from oracle import columns, exact, full_lengths, new_state, new_stats, plan_here, words
from torch import Tensor

from gvr_topk.constants import STATE_ZSCORE_ORIGIN, GuessSource, HintReason, StatsColumn
from gvr_topk.state import TopkState

K = 2048
STEPS = 10
JUMP = 7
"""The step at which a chain that jumps does."""

SHAPES = {
    "small_row": (8192, 0),
    "small_row, long": (16_384, 0),
    "resident": (70_704, 0),
    "resident, wide": (262_144, 0),
    "streaming": (600_000, 0),
    "streaming, 4 CTAs": (262_144, 4),
    "streaming, one CTA": (131_072, 1),
}
"""Width and forced cluster size."""


def chain(kind: str, width: int, dtype: torch.dtype, seed: int = 5) -> list[Tensor]:
    """Two rows a step of which 97 % of the variance stays: as they are, growing, or jumping once."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.randn(2, width, device="cuda", generator=generator)
    made = []
    for step in range(STEPS):
        grown = 1.25**step if kind == "growing" else 1.0
        moved = 3.0 if kind == "jumping" and step == JUMP else 0.0
        made.append((grown * scores + moved).to(dtype))
        fresh = torch.randn(2, width, device="cuda", generator=generator)
        scores = 0.97**0.5 * scores + 0.03**0.5 * fresh
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["still", "growing", "jumping"])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_a_chain_are_predicted(shape: str, kind: str, dtype: torch.dtype) -> None:
    width, ctas = SHAPES[shape]
    left, sources, hits = words(2), set(), 0
    family = ""
    for step, logits in enumerate(chain(kind, width, dtype)):
        family = plan_here(*logits.shape, K, dtype, ctas).family
        lengths, stats = full_lengths(logits), new_stats(2)
        exact(logits, lengths, K, ctas=ctas, state=TopkState.of(left, None, K), stats=stats, said=step)
        seen = columns(stats)
        assert set(seen[StatsColumn.HITS]) == {-1}
        for hit, passes, done in zip(
            seen[StatsColumn.GUESS_HIT], seen[StatsColumn.PASSES], seen[StatsColumn.DONE], strict=True
        ):
            assert not hit or (passes, done) == (1, 0)
        if step == 0:
            assert seen[StatsColumn.REASON] == [HintReason.FIRST_STEP] * 2
        else:
            hits += sum(seen[StatsColumn.GUESS_HIT])
            sources |= set(seen[StatsColumn.GUESS])
    # A short row leaves nothing where more than a few 16-bit scores equal the k-th.
    if family in ("resident", "streaming"):
        assert hits >= STEPS
        assert sources & {GuessSource.VALUE, GuessSource.ZSCORE}
        assert kind != "growing" or GuessSource.ZSCORE in sources


@pytest.mark.parametrize("shape", ["resident", "resident, wide", "streaming", "streaming, one CTA"])
def test_a_sample_of_mostly_equal_scores_is_hit(shape: str) -> None:
    """The greatest scores of the sample count, where those that follow are all equal."""
    width, ctas = SHAPES[shape]
    generator = torch.Generator(device="cuda").manual_seed(1)
    scores = torch.randn(20, width, device="cuda", generator=generator)
    logits = (scores - scores.kthvalue(width - min(4 * K, width // 2), dim=1, keepdim=True).values).relu()
    stats = new_stats(20)
    exact(logits, full_lengths(logits), K, ctas=ctas, path="no_hint", stats=stats)
    assert sum(columns(stats)[StatsColumn.GUESS_HIT]) >= 18


@pytest.mark.parametrize("shape", ["resident", "streaming, one CTA"])
def test_one_of_many_zeros_is_expected_to_stay(shape: str) -> None:
    """After a while nothing but zeros is looked for, and a k-th score above them is found all the same."""
    width, ctas = SHAPES[shape]
    generator = torch.Generator(device="cuda").manual_seed(3)
    state, stats = new_state(1, K), new_stats(1)
    for positive in [K // 2] * 100 + [2 * K]:
        seen = columns(stats)
        order = torch.rand(1, width, device="cuda", generator=generator).argsort(dim=1)
        logits = (1 - order / positive).clamp(min=0)
        exact(logits, full_lengths(logits), K, ctas=ctas, state=state, stats=stats)
    assert seen[StatsColumn.GUESS] == [GuessSource.VALUE]
    assert seen[StatsColumn.CANDIDATES] == [width - K // 2]


GIVEN = [(0.0, 0.03125), (0.0078125, 0.03125), (0.5, 0.0078125), (-0.5, 0.0078125), (0.0, 1.5)]
"""How far off the value of a state is, and how far its interval reaches."""


@pytest.mark.parametrize("shape", ["resident", "streaming, 4 CTAs"])
@pytest.mark.parametrize(("offset", "spread"), GIVEN)
def test_a_state_of_a_value_gives_the_candidates(shape: str, offset: float, spread: float) -> None:
    """Intervals that hit, miss on either side, and hold more than can be listed."""
    width, ctas = SHAPES[shape]
    logits = chain("still", width, torch.float32)[0]
    center = logits.topk(K).values[:, -1] + offset
    # The value's error is a bfloat16 in the lower half, whose last bit says that the value predicts. The
    # upper half is the z-score's error, 0.05.
    half = (torch.tensor([spread]).to(torch.bfloat16).view(torch.int16).int() & 0xFFFF) | 1
    error = half.to(torch.int16).view(torch.bfloat16).float().to("cuda")
    left = words(2, STATE_ZSCORE_ORIGIN + 2.0, value=center, limit=10.0)
    left.view(torch.int32)[:, 3] = half.to("cuda") | 0x3D4D0000
    low, high = center - error, center + error
    above = (logits > high[:, None]).sum(dim=1)
    inside = ((logits >= low[:, None]) & (logits <= high[:, None])).sum(dim=1)
    contains = ((above < K) & (above + inside >= K)).tolist()
    stats = new_stats(2)
    lengths = full_lengths(logits)
    exact(logits, lengths, K, ctas=ctas, state=TopkState.of(left, None, K), stats=stats)
    seen = columns(stats)
    assert seen[StatsColumn.GUESS] == [GuessSource.VALUE] * 2
    assert contains == [abs(offset) < spread] * 2
    hit = [int(abs(offset) < spread < 1)] * 2
    assert seen[StatsColumn.GUESS_HIT] == hit
    if hit == [1, 1]:
        assert seen[StatsColumn.CANDIDATES] == inside.tolist()
        assert seen[StatsColumn.PASSES] == [1, 1] and seen[StatsColumn.DONE] == [0, 0]
