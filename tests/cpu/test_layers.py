"""The layers that take the place of ``torch.topk`` over an indexer's scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gvr_topk.evaluation.oracle import sorted_row, sorted_topk
from gvr_topk.layers import IndexerTopk, IndexerTopkPrefill, indexer_topk

K = 8


def scores(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (0, 3, 40)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_number_of_dimensions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = scores(*shape)
    lengths = (torch.arange(given[..., 0].numel()) * 5).reshape(shape[:-1]).to(dtype)
    got = IndexerTopk()(given, lengths, K)
    assert got.shape == (*shape[:-1], K)
    assert torch.equal(got.reshape(-1, K), sorted_topk(given.reshape(-1, 40), lengths.reshape(-1), K))


def test_takes_the_place_of_topk() -> None:
    """As in transformers: keys are masked with -inf, and some queries see fewer than k of them."""
    visible = torch.tensor([3, K, 30, 40])[:, None] > torch.arange(40)
    given = scores(2, 4, 40).masked_fill(~visible, float("-inf"))
    got = indexer_topk(given, None, K)
    wanted = given.topk(K, dim=-1).values
    assert torch.equal(given.gather(-1, got.long()).sort(-1, descending=True).values, wanted)
    assert (got >= 0).all()


@pytest.mark.parametrize(
    "given",
    [
        scores(2, 3, 80)[..., :40],
        scores(2, 3, 80)[..., ::2],
        scores(2, 40, 3).transpose(1, 2),
        scores(3, 1).expand(3, 40),
        scores(1, 40).expand(3, 40),
        scores(40, 3).T,
        scores(0, 80)[:, ::2],
        scores(40).expand(2, 3, 40),
    ],
)
def test_scores_of_any_strides(given: torch.Tensor) -> None:
    expected = sorted_topk(given.reshape(-1, 40), torch.full((given[..., 0].numel(),), 40), K)
    assert torch.equal(indexer_topk(given, None, K), expected.reshape(*given.shape[:-1], K))
    if given.dim() == 2:
        starts = torch.zeros(len(given), dtype=torch.int64)
        assert torch.equal(IndexerTopkPrefill()(given, starts, starts + 40, K), expected)


@pytest.mark.parametrize("shape", [(2, 0), (2, 3, 0), (0,), (0, 0)])
def test_rows_without_scores_select_nothing(shape: tuple[int, ...]) -> None:
    assert torch.equal(indexer_topk(scores(*shape), None, 2), torch.full((*shape[:-1], 2), -1).int())


LENGTHS = [2**63 - 1, 2**32 + 1, 2**31, 41, 40, 3, 0, -1, -(2**31) - 1, -(2**63)]


def test_lengths_beyond_32_bits_count_as_the_nearest_that_a_row_has() -> None:
    given = scores(len(LENGTHS), 40)
    nearest = [min(max(length, 0), 40) for length in LENGTHS]
    expected = sorted_topk(given, torch.tensor(nearest), K)
    assert torch.equal(indexer_topk(given, torch.tensor(LENGTHS), K), expected)
    starts = torch.zeros(len(LENGTHS), dtype=torch.int64)
    layer = IndexerTopkPrefill()
    assert torch.equal(layer(given, starts, torch.tensor(LENGTHS), K), expected)
    empty = layer(given, starts + 2**40, starts + 40, K)
    assert (empty == -1).all() and torch.equal(layer(given, starts - 2**40, starts + 40, K)[4], expected[4])


def test_lengths_of_8_bits_beside_a_row_that_is_longer() -> None:
    given = scores(2, 300)
    lengths = torch.tensor([100, -1], dtype=torch.int8)
    assert torch.equal(indexer_topk(given, lengths, K), sorted_topk(given, lengths.clamp(min=0), K))


def test_scores_with_a_gradient() -> None:
    given = scores(2, 40).requires_grad_()
    got = indexer_topk(given, None, K)
    given.gather(-1, got.long()).sum().backward()
    assert given.grad is not None
    assert torch.equal(given.grad.nonzero()[:, 1].reshape(2, K), got.long())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_windows(dtype: torch.dtype) -> None:
    given = scores(3, 40).requires_grad_()
    starts, ends = torch.tensor([0, 7, 35], dtype=dtype), torch.tensor([40, 30, 38], dtype=dtype)
    got = IndexerTopkPrefill()(given, starts, ends, K)
    for row, (chosen, start, end) in enumerate(zip(got, starts.tolist(), ends.tolist(), strict=True)):
        wanted = sorted_row(given.detach()[row, start:end].numpy(), K).tolist()
        assert chosen.tolist() == wanted + [-1] * (K - len(wanted))


@pytest.mark.parametrize("layer", [IndexerTopk, IndexerTopkPrefill])
def test_pure(layer: type[torch.nn.Module]) -> None:
    """What `kernels` asks of a layer: no constructor, no state, nothing but `forward`."""
    assert "__init__" not in vars(layer)
    own = {name for name in vars(layer) if not name.startswith("__")}
    assert own == {"forward", "has_backward", "can_torch_compile"}


def test_one_graph() -> None:
    compiled = torch.compile(IndexerTopk(), fullgraph=True, backend="eager")
    given = scores(2, 3, 40)
    assert torch.equal(compiled(given, None, K), indexer_topk(given, None, K))
    windows = torch.compile(IndexerTopkPrefill(), fullgraph=True, backend="eager")
    starts, ends = torch.tensor([0, 3]), torch.tensor([20, 40])
    rows = scores(2, 40)
    assert torch.equal(windows(rows, starts, ends, K), IndexerTopkPrefill()(rows, starts, ends, K))


STARTS = torch.zeros(2, dtype=torch.int64)
GIVEN: dict[Any, dict[str, Any]] = {
    IndexerTopk: {"scores": scores(2, 40), "lengths": None},
    IndexerTopkPrefill: {"scores": scores(2, 40), "row_starts": STARTS, "row_ends": STARTS + 40},
}


@pytest.mark.parametrize(
    ("layer", "name", "value", "message"),
    [
        (IndexerTopk, "scores", [1.0], "a Tensor, got list"),
        (IndexerTopk, "scores", torch.tensor(1.0), r"one dimension or more, got \[\]"),
        (IndexerTopk, "scores", scores(3, 40).double(), "dtype float32, bfloat16 or float16, got float64"),
        (IndexerTopk, "scores", scores(3, 40).to_sparse(), "a dense tensor, got sparse_coo"),
        (IndexerTopk, "lengths", [1, 2], "a Tensor, got list"),
        (IndexerTopk, "lengths", torch.full((2,), 2.9), "an integer dtype, got float32"),
        (IndexerTopk, "lengths", torch.ones(3, dtype=torch.int32), r"shape \[2\], got \[3\]"),
        (IndexerTopkPrefill, "scores", None, "a Tensor, got NoneType"),
        (IndexerTopkPrefill, "scores", scores(40), r"shape \[rows, width\], got \[40\]"),
        (IndexerTopkPrefill, "row_starts", [0, 0], "a Tensor, got list"),
        (IndexerTopkPrefill, "row_ends", torch.ones(2), "an integer dtype, got float32"),
        (IndexerTopkPrefill, "row_ends", torch.ones(3, dtype=torch.int64), r"shape \[2\], got \[3\]"),
    ],
)
def test_wrong_arguments(layer: Any, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{layer.__name__}: {name}: wanted {message}$"):
        layer()(**GIVEN[layer] | {name: value}, k=K)
