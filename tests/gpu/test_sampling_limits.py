"""Masks, probabilities and log-probabilities on a GPU are those of the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gvr_topk.sampling import apply_limits_, renorm, sample, topk_logprobs
from tests.gpu.test_sampling import INF, NAN, ROWS, drawn, hard_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = (1, 7, pytest.param(1000, marks=pytest.mark.sanitizer), 32_000, 50_257, 128_256)


def strided(logits: Tensor, pad: int, shift: int) -> Tensor:
    """The same rows on the GPU, `pad` elements apart, of which the first begins `shift` elements on."""
    rows, width = logits.shape
    buffer = torch.full((rows * (width + pad) + shift,), NAN, dtype=logits.dtype, device="cuda")
    there = buffer[shift:].view(rows, width + pad)[:, :width]
    return there.copy_(logits)


def same(got: Tensor, wanted: Tensor) -> Tensor:
    """Whether each row is equal by bits; any NaN equals another."""
    got, nan = got.cpu(), wanted.isnan()
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[wanted.itemsize]
    equal = (got.view(integers) == wanted.view(integers)) | (nan & got.isnan())
    return equal.view(len(wanted), -1).all(1)


def behind(tensor: Tensor) -> Tensor:
    """What lies between the rows of a view of a buffer."""
    assert tensor._base is not None
    mask = torch.ones(tensor._base.numel(), dtype=torch.bool, device=tensor.device)
    mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[:] = False
    return tensor._base.view(-1)[mask]


def kept(logits: Tensor, draw: torch.Generator, masked: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Limits of rows with parameters by chance, of which one is skipped, and the masks that they had."""
    rows, width = logits.shape
    masks = {}
    if masked:
        words = torch.randint(-(2**31), 2**31, (3, -(-width // 32)), generator=draw)
        masks = {
            "allow": words.to(torch.int32),
            "allow_row": torch.tensor([0, 1, 2, -1, 3, 1], dtype=torch.int32).repeat(rows)[:rows],
        }
    limits = torch.empty(rows, 8, dtype=torch.int32)
    slots = torch.arange(rows, dtype=torch.int32)
    slots[rows // 2] = -1
    sample(logits, **drawn(rows, draw), **masks, slots=slots, limits=limits)
    return limits, masks


@pytest.mark.parametrize(("pad", "shift"), [(0, 0), (1, 0), (8, 0), (0, 3), (5, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_masks_and_probabilities(width: int, dtype: torch.dtype, pad: int, shift: int) -> None:
    draw = torch.Generator().manual_seed(width + 10 * pad + shift)
    logits = hard_rows(width, draw).to(dtype)
    limits, masks = kept(logits, draw, masked=pad == 5 or shift == 3)
    there = {name: value.cuda() for name, value in masks.items()}

    wanted = renorm(logits, limits, **masks)
    given = strided(logits, pad, shift)
    out = strided(torch.full((ROWS, width), 7.0), shift, pad)
    assert renorm(given, limits.cuda(), **there, out=out) is out
    assert same(out, wanted).all() and same(given, logits).all()
    assert behind(out).isnan().all()
    assert same(renorm(given, limits.cuda(), **there), wanted).all()
    if dtype == torch.float32:
        assert same(renorm(given, limits.cuda(), **there, out=given), wanted).all()

    given = strided(logits, pad, shift)
    assert apply_limits_(given, limits.cuda(), **there) is given
    assert same(given, apply_limits_(logits.clone(), limits, **masks)).all()
    assert behind(given).isnan().all()


def test_limits_written_on_the_gpu_serve_there() -> None:
    draw = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(40, 32_000, generator=draw)
    limits = torch.empty(40, 8, dtype=torch.int32, device="cuda")
    tokens = sample(logits.cuda(), top_p=0.9, seeds=0, positions=torch.arange(40).cuda(), limits=limits)
    shares = renorm(logits.cuda(), limits)
    assert shares.gather(1, tokens[:, None]).min() > 0
    assert shares.sum(1, dtype=torch.float64).cpu().tolist() == pytest.approx([1.0] * 40, abs=1e-6)
    assert torch.equal(apply_limits_(logits.cuda(), limits) > -INF, shares > 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 20, 128, 1024])
@pytest.mark.parametrize("width", WIDTHS)
def test_topk_logprobs(width: int, n: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(width + n)
    logits = hard_rows(width, draw).to(dtype)
    sampled = torch.randint(width, (ROWS,), generator=draw)
    sampled[0], sampled[1], sampled[4] = -1, width, width // 2
    n = min(n, width)
    for tokens in (sampled, sampled.to(torch.int32)):
        wanted = topk_logprobs(logits, n, tokens)
        for given in (logits.cuda(), strided(logits, 3, 1)):
            for got, expected in zip(topk_logprobs(given, n, tokens.cuda()), wanted, strict=True):
                assert same(got, expected).all()


@pytest.mark.parametrize("rows", [1, 2, 64, 300])
def test_log_probabilities_do_not_depend_on_the_batch(rows: int) -> None:
    """One row a call takes a cluster, many take a CTA each: the bits are the same."""
    row = 4 * torch.randn(1, 32_000, generator=torch.Generator().manual_seed(rows))
    token = torch.tensor([17])
    wanted = topk_logprobs(row, 20, token)
    got = topk_logprobs(row.expand(rows, -1).cuda(), 20, token.expand(rows).contiguous().cuda())
    for each, expected in zip(got, wanted, strict=True):
        assert same(each, expected.expand(rows, *expected.shape[1:])).all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("n", [20, 300, 1024])
def test_ranks_that_one_guess_does_not_find(n: int) -> None:
    """Equal values in the thousands, and the largest ones side by side: all CTAs search for rank n."""
    draw = torch.Generator().manual_seed(n)
    logits = torch.randn(4, 128_256, generator=draw)
    logits[0] = torch.randint(-2, 3, (128_256,), generator=draw)
    logits[1, 64_000:70_000] = 9.0
    logits[2, 5:n] += torch.linspace(10, 20, n - 5)
    logits[3] = -INF
    logits[3, 100_000 : 100_000 + n // 2] = torch.randn(n // 2, generator=draw)
    token = torch.tensor([9, 70_001, 6, 99_999])
    wanted = topk_logprobs(logits, n, token)
    for got, expected in zip(topk_logprobs(logits.cuda(), n, token.cuda()), wanted, strict=True):
        assert same(got, expected).all()


def test_a_replayed_graph_reads_its_arguments_again() -> None:
    logits, token = torch.randn(8, 32_000), torch.arange(8)
    there, given = logits.cuda(), token.cuda()
    limits = torch.empty(8, 8, dtype=torch.int32, device="cuda")
    masked, out = there.clone(), torch.empty(8, 32_000, device="cuda")

    def step() -> tuple[Tensor, ...]:
        sample(there, top_k=40, seeds=0, positions=0, limits=limits)
        renorm(there, limits, out=out)
        apply_limits_(masked.copy_(there), limits)
        return tuple(topk_logprobs(there, 5, given))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in range(3):
        logits = torch.randn(8, 32_000, generator=torch.Generator().manual_seed(seed))
        there.copy_(logits)
        given.fill_(seed)
        graph.replay()
        kept_here = torch.empty(8, 8, dtype=torch.int32)
        sample(logits, top_k=40, seeds=0, positions=0, limits=kept_here)
        assert same(out, renorm(logits, kept_here)).all()
        wanted = topk_logprobs(logits, 5, torch.full((8,), seed))
        assert all(same(*pair).all() for pair in zip(results, wanted, strict=True))
        assert same(masked, apply_limits_(logits, kept_here)).all()


def test_compiled_by_torch() -> None:
    logits, token = torch.randn(4, 1000, device="cuda"), torch.arange(4, device="cuda")
    limits = torch.empty(4, 8, dtype=torch.int32, device="cuda")
    sample(logits, top_p=0.5, seeds=0, positions=0, limits=limits)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return (renorm(x, limits), apply_limits_(x.clone(), limits), *topk_logprobs(x, 3, token))

    compiled = torch.compile(step, fullgraph=True)
    assert all(torch.equal(*pair) for pair in zip(compiled(logits), step(logits), strict=True))


def test_refused_on_a_gpu_alone() -> None:
    token = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(
        ValueError, match=r"gvr_topk\.topk_logprobs: n: wanted at most 1024 on a GPU, got 1025"
    ):
        topk_logprobs(torch.zeros(1, 2000, device="cuda"), 1025, token)
    with pytest.raises(
        ValueError, match=r"topk_logprobs: logits: wanted rows of at most \d+ bytes, got 4194304"
    ):
        topk_logprobs(torch.zeros(1, 1 << 20, device="cuda"), 1, token)
    limits = torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"renorm: limits: wanted a tensor on cuda:0, got cpu"):
        renorm(torch.zeros(1, 8, device="cuda"), limits)
