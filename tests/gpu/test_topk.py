"""`topk` and its kin on a GPU: the sets and orders of a sort in NumPy; and ``torch.topk`` served by it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contents import CONTENTS, draw
from launches import never_waiting
from torch import Tensor

from gvr_topk import kth_value, topk, topk_mask, topk_threshold, torch_backend
from gvr_topk.arguments import TopkItemsArguments
from gvr_topk.contract import DTYPES
from gvr_topk.ops import launch
from tests.topk_oracle import BOTH, KINDS, SHAPES, best, check, check_all_elements, rows_of


@BOTH
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_k_of_small_rows(kind: str, dtype: torch.dtype, largest: bool) -> None:
    for width in (1, 2, 7, 33, 70):
        rows = rows_of(kind, width, seed=width).cuda().to(dtype)
        for k in range(1, width + 1):
            check(rows, k, largest=largest)


def items_of(rows: int, width: int, k: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Draw scores of some kind, and names of columns."""
    rng = draw(seed)
    kinds = list(CONTENTS.values())
    scores = kinds[seed % len(kinds)](rows, width + 3, k).to(dtype)[:, 3:]
    names = torch.randint(-(2**62), 2**62, (rows, width), device="cuda", generator=rng)
    return scores, names


def compare_items(scores: Tensor, k: int, sorted: int, largest: int, names: Tensor | None) -> None:
    """Compare the kernels with the CPU implementation, bit by bit but for NaN."""
    results = []
    for device in ("cuda", "cpu"):
        scores, names = (each if each is None else each.to(device) for each in (scores, names))
        values = torch.empty(len(scores), k, dtype=scores.dtype, device=device)
        indices = torch.empty(len(scores), k, dtype=torch.int64, device=device)
        launch(TopkItemsArguments(scores, indices, values, sorted, largest, names))
        alone = torch.empty_like(indices)
        launch(TopkItemsArguments(scores, alone, None, sorted, largest, names))
        assert torch.equal(alone, indices)
        results.append((values.cpu(), indices.cpu()))
    (values, indices), (wanted, places) = results
    bits = {2: torch.int16, 4: torch.int32}[scores.element_size()]
    equal = (values.view(bits) == wanted.view(bits)) | (values.isnan() & wanted.isnan())
    assert torch.equal(indices, places) and bool(equal.all())


def run_items(rows: int, width: int, ks: tuple[int, ...]) -> None:
    for seed, (k, dtype, sorted, largest) in enumerate(itertools.product(ks, DTYPES, (0, 1), (0, 1))):
        scores, names = items_of(rows, width, k, dtype, seed)
        compare_items(scores, k, sorted, largest, names if seed % 5 % 2 else None)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 300])
def test_items_of_any_number(rows: int) -> None:
    run_items(rows, 20_000, (1, 31, 32, 33, 128, 129, 512, 513, 1024, 1025, 2048, 2049, 4096, 4097, 8192))
    run_items(rows, 20_000, (8193, 20_000))


def test_items_of_more_rows_than_are_sorted_at_once() -> None:
    run_items(1030, 8200, (8193,))


def test_more_items_than_are_sorted_at_once() -> None:
    given = torch.randn(33, 1 << 21, device="cuda", generator=draw(3)).round(decimals=3) + 0.0
    found, wanted = topk(given, 1 << 21), given.sort(1, descending=True, stable=True)
    assert torch.equal(found.values, wanted.values) and torch.equal(found.indices, wanted.indices)


@pytest.mark.sanitizer
def test_items_of_short_rows() -> None:
    run_items(3, 4200, (1, 32, 40, 200, 700, 1100, 2100, 4100))
    run_items(2, 8300, (8200,))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "ks"), [(5000, (1, 50, 129, 1025, 4097, 4999, 5000)), (40_000, (2048, 9000))]
)
def test_the_sort_of_any_number_of_items(
    width: int, ks: tuple[int, ...], kind: str, dtype: torch.dtype, largest: bool
) -> None:
    """Different kernels sort rows of different lengths, and for float64 some of PyTorch's compare bits."""
    rows = rows_of(kind, width).cuda().to(dtype)
    for k in ks:
        check(rows, k, largest=largest)
        check(rows[:1], k, largest=largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTENTS)
def test_long_rows(name: str, dtype: torch.dtype) -> None:
    rows = CONTENTS[name](4, 131_072, 2048).to(dtype)
    for k in (1, 50, 2048, 16_384):
        check(rows, k)
    check(rows, 100, largest=False)


@pytest.mark.parametrize(("rows", "width"), [(1, (1 << 21) + 5), (2, 3 * (1 << 21) + 7)])
def test_rows_longer_than_the_op_takes(rows: int, width: int) -> None:
    given = torch.randn(rows, width, device="cuda", generator=draw(1)).round(decimals=4)
    given[:, -3:] = 9.0
    for k in (1, 1000, 70_000):
        check(given, k)
    check(given, 1000, largest=False)


@pytest.mark.parametrize("k", [1, 4096, 200_000])
def test_the_largest_of_all_elements(k: int) -> None:
    """Of 2^26 elements with many ties at the k-th value."""
    given = torch.randn(1 << 13, 1 << 13, device="cuda", generator=draw(2)).round(decimals=3)
    mask = topk_mask(given, k, None)
    kth, quota = topk_threshold(given, k, None)
    assert int((given > kth).sum() + quota) == k
    ties = (given == kth).flatten()
    first = torch.nonzero(ties).flatten()[: int(quota)]
    wanted = (given > kth).flatten().index_fill(0, first, True)
    assert torch.equal(mask.flatten(), wanted)
    assert kth_value(given, k, None).indices == first[-1]


def test_a_row_of_more_than_two_to_the_31_elements() -> None:
    width = (1 << 31) + 70_003
    row = torch.zeros(width, dtype=torch.bfloat16, device="cuda")
    # Pieces of 2^21, on both sides of their borders, and on both sides of 2^31.
    planted = [0, 5, (1 << 21) - 1, 1 << 21, (1 << 31) - 1, 1 << 31, (1 << 31) + 69_000, width - 1]
    row[torch.tensor(planted, device="cuda")] = torch.arange(len(planted), device="cuda").bfloat16() + 1
    assert topk(row, len(planted)).indices.tolist() == planted[::-1]
    with_ties = topk(row, len(planted) + 3, sorted=False).indices.tolist()
    assert with_ties == sorted([*planted, 1, 2, 3])
    assert kth_value(row, len(planted)).indices == 0


@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_strides_and_dimension(name: str, largest: bool) -> None:
    given = SHAPES[name]("cuda")
    for dim in range(-given.dim(), given.dim()):
        for k in {1, (given.shape[dim] + 1) // 2, given.shape[dim]}:
            check(given, k, dim, largest=largest)
    check_all_elements(given, 7, largest=largest)


def all_of(given: Tensor, k: int) -> tuple[Tensor, ...]:
    return (
        *topk(given, k),
        *topk(given, k, 0, False),
        *topk(given, k, sorted=False, index_dtype=torch.int32),
        *kth_value(given, k, None),
        *topk_threshold(given, k, largest=False),
        topk_mask(given, k),
    )


@pytest.mark.parametrize("k", [7, 5000])
def test_a_replayed_graph_selects_afresh_and_nothing_waits_for_the_device(k: int) -> None:
    given, graph = torch.randn(6000, 5100, device="cuda", generator=draw(3)), torch.cuda.CUDAGraph()
    with never_waiting():
        all_of(given, k)
    with torch.cuda.graph(graph):
        captured = all_of(given, k)
    for step in range(3):
        given.copy_(torch.randn(6000, 5100, device="cuda", generator=draw(4 + step)).round(decimals=2))
        graph.replay()
        for got, wanted in zip(captured, all_of(given, k), strict=True):
            assert torch.equal(got, wanted)


def test_a_replayed_graph_sorts_many_items_afresh() -> None:
    given, graph = torch.randn(20, 9500, device="cuda", generator=draw(7)), torch.cuda.CUDAGraph()
    with never_waiting():
        topk(given, 9000)
    with torch.cuda.graph(graph):
        captured = topk(given, 9000)
    given.copy_(torch.randn(20, 9500, device="cuda", generator=draw(8)).round(decimals=2))
    graph.replay()
    for got, wanted in zip(captured, topk(given, 9000), strict=True):
        assert torch.equal(got, wanted)


@BOTH
@pytest.mark.parametrize("sorted", [False, True])
def test_a_call_is_three_launches(sorted: bool, largest: bool) -> None:
    given = torch.randn(64, 131_072, device="cuda", generator=draw(5))
    topk(given, 50, sorted=sorted, largest=largest)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        topk(given, 50, sorted=sorted, largest=largest)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        pytest.skip("the profiler records no kernels here")
    assert len(kernels) == 3, [event.name for event in kernels]


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph(dynamic: bool) -> None:
    compiled = torch.compile(all_of, fullgraph=True, dynamic=dynamic)
    for shape, k in (((90, 300), 4), ((80, 310), 5)):
        given = torch.randn(shape, device="cuda", generator=draw(k)).round(decimals=1).requires_grad_()
        results = compiled(given, k)
        for got, wanted in zip(results, all_of(given, k), strict=True):
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype
        results[0].sum().backward()
        assert given.grad is not None and torch.equal(given.grad != 0, topk_mask(given, k))


def test_equal_under_deterministic_algorithms() -> None:
    given = torch.randn(40, 5100, device="cuda", generator=draw(11)).round(decimals=1).requires_grad_()
    before = all_of(given, 30)
    torch.use_deterministic_algorithms(True)
    try:
        again = all_of(given, 30)
        again[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*each) for each in zip(before, again, strict=True))


def test_outputs() -> None:
    given = torch.randn(3, 4000, device="cuda", generator=draw(12))
    values, indices = torch.empty(0, device="cuda"), torch.empty(3, 5, dtype=torch.int32, device="cuda")
    got = topk(given, 5, out=(values, indices), index_dtype=torch.int32)
    wanted = torch.topk(given, 5)
    assert got.values is values and got.indices is indices
    assert torch.equal(values, wanted.values) and torch.equal(indices, wanted.indices.int())
    with pytest.raises(ValueError, match=r"gvr_topk\.topk: out\[0\]: wanted a tensor on cuda:0, got cpu"):
        topk(given, 5, out=(torch.empty(3, 5), indices), index_dtype=torch.int32)


# ---------------------------------------------------------------- torch.topk


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the inputs that the backend has served; it is disabled in the end."""
    shapes: list[tuple[int, ...]] = []

    def noted(given: Tensor, *arguments: Any) -> Any:
        shapes.append(tuple(given.shape))
        return topk(given, *arguments)

    monkeypatch.setattr(torch_backend, "topk", noted)
    yield shapes
    torch_backend.disable()


def tied(rows: int = 64, width: int = 20_000) -> Tensor:
    return torch.randint(0, 9, (rows, width), device="cuda", generator=draw(13)).float()


def test_torch_topk_is_served_between_enable_and_disable(served: list[tuple[int, ...]]) -> None:
    given = tied()
    torch_backend.enable()
    for dtype in DTYPES:
        for k, dim in ((1, -1), (50, 1), (5000, -1), (20, 0)):
            result = torch.topk(given.to(dtype), k, dim)
            assert type(result) is torch.return_types.topk
            assert torch.equal(result.indices, best(given, k, dim).cuda())
    assert len(served) == 12
    torch_backend.disable()
    torch.topk(given, 50)
    assert len(served) == 12


def test_torch_topk_when_served_has_gradients_compiles_and_is_captured(served: list[tuple[int, ...]]) -> None:
    torch_backend.enable()
    given = tied().requires_grad_()
    torch.topk(given, 40).values.sum().backward()
    assert given.grad is not None and torch.equal(given.grad != 0, topk_mask(given, 40))
    rows = given.detach()
    wanted = best(rows, 50).cuda()
    assert torch.equal(torch.compile(lambda x: torch.topk(x, 50).indices, fullgraph=True)(rows), wanted)
    with torch.autocast("cuda"):
        assert torch.equal(torch.topk(rows, 50).indices, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.topk(rows, 50)
    rows.copy_(rows.flip(0))
    graph.replay()
    assert torch.equal(captured.indices, wanted.flip(0))
    assert len(served) == 4
