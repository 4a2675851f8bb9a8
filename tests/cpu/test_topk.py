"""`topk` and its kin on a CPU, against a sort in NumPy and against torch; and ``torch.topk`` served by it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gvr_topk import kth_value, topk, topk_mask, topk_threshold, torch_backend, torch_topk
from gvr_topk.arguments import TopkItemsArguments
from gvr_topk.library import LibraryError, LibraryStatus
from tests.topk_oracle import BOTH, KINDS, SHAPES, best, check, check_all_elements, rows_of, same

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@BOTH
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_k_of_small_rows(kind: str, dtype: torch.dtype, largest: bool) -> None:
    for width in (1, 2, 7, 33):
        rows = rows_of(kind, width, seed=width).to(dtype)
        for k in range(1, width + 1):
            check(rows, k, largest=largest)
            if not largest:
                assert same(kth_value(rows, k, largest=False).values, torch.kthvalue(rows, k).values)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    ends = torch.tensor([limits.min, limits.max, limits.min, 0, limits.max, 1])
    rows = torch.cat((ends, torch.randint(0, 9, (20,), generator=draw(3)))).to(dtype)
    for largest in (True, False):
        for k in range(1, 27):
            got = topk(rows, k, largest=largest)
            assert torch.equal(got.indices, best(rows, k, largest=largest))
            assert torch.equal(got.values, rows[got.indices])


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_strides_and_dimension(name: str, largest: bool) -> None:
    given = SHAPES[name]("cpu")
    size = given.element_size()
    for dim in range(-given.dim(), given.dim()):
        assert topk(given, 0, dim, largest).indices.numel() == 0 and not topk_mask(given, 0, dim).any()
        for k in {1, (given.shape[dim] + 1) // 2, given.shape[dim]}:
            check(given, k, dim, largest=largest)
            got, unsorted = topk(given, k, dim, largest), topk(given, k, dim, largest, sorted=False)
            assert all(tensor.is_contiguous() for tensor in (*got, *unsorted))
            value, index = kth_value(given, k, dim, largest=largest)
            assert torch.equal(value, kth_value(given, k, dim, True, largest=largest).values.squeeze(dim))
            assert value.is_contiguous() and value.untyped_storage().nbytes() == size * value.numel()
            kth, quota = topk_threshold(given, k, dim, largest=largest)
            assert torch.equal(kth, value) and quota.shape == value.shape == index.shape


@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_all_elements_at_once(name: str, largest: bool) -> None:
    given = SHAPES[name]("cpu")
    for k in (1, given.numel() // 3, given.numel()):
        check_all_elements(given, k, largest=largest)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3)])
def test_no_elements(shape: tuple[int, ...]) -> None:
    given = torch.empty(shape)
    for dim in range(len(shape)):
        for k in {0, min(shape[dim], 2)}:
            got, wanted = topk(given, k, dim), torch.topk(given, k, dim)
            assert got.values.shape == wanted.values.shape and got.indices.shape == wanted.indices.shape
            assert not topk_mask(given, k, dim).any()


@BOTH
def test_without_dimensions(largest: bool) -> None:
    given = torch.tensor(2.5)
    got = topk(given, 1, largest=largest)
    assert got.values == 2.5 and got.indices == 0 and got.values.shape == got.indices.shape == ()
    for find in (kth_value, topk_threshold):
        for keepdim in (True, False):
            value, number = find(given, 1, keepdim=keepdim, largest=largest)
            assert value == 2.5 and value.shape == number.shape == ()
    assert topk_mask(given, 1).shape == () and topk_mask(given, 1, None)


@BOTH
def test_rows_longer_than_the_op_takes_are_selected_in_pieces(
    monkeypatch: pytest.MonkeyPatch, largest: bool
) -> None:
    """Pieces of 8 elements: every length of the last piece, and numbers of candidates that take rounds."""
    monkeypatch.setattr(torch_topk, "MAX_WIDTH", 8)
    selected: list[tuple[int, ...]] = []
    launch = torch_topk.launch

    def noted(arguments: TopkItemsArguments) -> None:
        selected.append(tuple(arguments.logits.shape))
        launch(arguments)

    monkeypatch.setattr(torch_topk, "launch", noted)
    for kind in KINDS:
        for width in range(9, 42):
            rows = rows_of(kind, width, seed=width)
            for k in range(1, width + 1):
                assert torch.equal(topk(rows, k, largest=largest).indices, best(rows, k, largest=largest))
    assert max(selected) == (15, 8) and max(width for _, width in selected) == 8  # three rows of five pieces


def test_which_calls_the_op_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_topk, "MAX_WIDTH", 8)
    monkeypatch.setattr(torch_topk, "MAX_ROWS", 3)
    for rows, width, k, serves in (
        *((3, 8, 8, True), (4, 8, 1, False)),
        *((1, 9, 4, True), (1, 9, 5, False), (1, 90, 4, True), (3, 90, 4, True), (4, 90, 4, False)),
    ):
        assert torch_topk.op_serves(torch.zeros(rows, width), k) is serves
    assert not torch_topk.op_serves(torch.zeros(1, 8, dtype=torch.float64), 1)


def test_a_row_longer_than_the_op_takes() -> None:
    row = torch.randn((1 << 21) + 5, generator=draw(8)).round(decimals=3)
    row[-2:] = 9.0
    assert torch.equal(topk(row, 1000).indices, best(row, 1000))


def test_nested_gradients() -> None:
    def inner(values: Tensor, z: Tensor) -> Tensor:
        return (values * z).sum()

    def outer(given: Tensor, find: Callable[..., Any]) -> Tensor:
        return torch.func.grad(lambda z: inner(find(given * 2, 1).values, z))(torch.tensor(1.0))

    given = torch.tensor([1.0, 3.0, 2.0])
    assert torch.equal(torch.func.grad(outer)(given, topk), torch.func.grad(outer)(given, torch.topk))


@BOTH
def test_gradients(largest: bool) -> None:
    """Of each dtype's own path: float64 is sorted, float32 selected."""
    exact = torch.randn(3, 8, dtype=torch.float64, generator=draw(9)).requires_grad_()
    for find in (
        lambda given: topk(given, 3, 0, largest).values,
        lambda given: topk(given, 3, 1, largest, sorted=False).values,
        lambda given: kth_value(given, 4, largest=largest).values,
        lambda given: topk_threshold(given, 4, None, largest=largest).value,
    ):
        assert torch.autograd.gradcheck(find, exact)
        assert torch.autograd.gradgradcheck(find, exact)
    ours, theirs = (torch.randn(3, 4, 50, generator=draw(10)).requires_grad_() for _ in range(2))
    weights = torch.randn(3, 7, 50, generator=draw(11))[:, :3]
    (topk(ours, 3, 1, largest).values * weights).sum().backward()
    (torch.topk(theirs, 3, 1, largest).values * weights).sum().backward()
    assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
    assert not topk(ours, 3).indices.requires_grad and not topk_mask(ours, 3).requires_grad


@BOTH
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph(dynamic: bool, largest: bool) -> None:
    def all_of(given: Tensor, k: int) -> tuple[Tensor, ...]:
        return (
            *topk(given, k, 1, largest),
            *topk(given, k, sorted=False, index_dtype=torch.int32),
            *kth_value(given, k, None, largest=largest),
            *topk_threshold(given, k, largest=largest),
            topk_mask(given, k, 0, largest=largest),
        )

    compiled = torch.compile(all_of, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape, k in (((5, 9, 30), 4), ((6, 8, 31), 5)):
        given = torch.randn(shape, generator=draw(k)).requires_grad_()
        results = compiled(given, k)
        for got, wanted in zip(results, all_of(given, k), strict=True):
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype
        results[0].sum().backward()
        assert given.grad is not None
        assert torch.equal(given.grad != 0, topk_mask(given, k, 1, largest=largest))


def test_fake_and_meta_tensors_have_the_form_of_real_ones() -> None:
    real = torch.randn(3, 40, 5)
    wanted = [*topk(real, 4, 1), *kth_value(real, 4), *topk_threshold(real, 4, None), topk_mask(real, 4)]
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        got = [*topk(fake, 4, 1), *kth_value(fake, 4), *topk_threshold(fake, 4, None), topk_mask(fake, 4)]
    meta = real.to("meta")
    got += [*topk(meta, 4, 1), *kth_value(meta, 4), *topk_threshold(meta, 4, None), topk_mask(meta, 4)]
    for each, like in zip(got, 2 * wanted, strict=True):
        assert (each.shape, each.dtype, each.stride()) == (like.shape, like.dtype, like.stride())


def test_index_dtype_and_outputs() -> None:
    given = torch.randn(3, 40, generator=draw(12))
    wanted = torch.topk(given, 5)
    assert topk(given, 5, index_dtype=torch.int32).indices.dtype == torch.int32
    for integer in (torch.int32, torch.int64):
        values, indices = torch.full((5, 3), -7.0).T, torch.full((3, 5), -7, dtype=integer)
        got = topk(given, 5, out=(values, indices), index_dtype=integer)
        assert got.values is values and got.indices is indices
        assert torch.equal(values, wanted.values) and torch.equal(indices, wanted.indices.to(integer))
    empty = topk(given, 5, out=(torch.empty(0), torch.empty(0, dtype=torch.int64)))
    assert torch.equal(empty.values, wanted.values) and torch.equal(empty.indices, wanted.indices)
    same_memory = given.clone()
    topk(same_memory, 40, out=(same_memory, torch.empty(3, 40, dtype=torch.int64)))
    assert torch.equal(same_memory, torch.topk(given, 40).values)
    mask = torch.ones(3, 40, dtype=torch.bool)
    assert topk_mask(given, 7, out=mask) is mask and torch.equal(mask, topk_mask(given, 7))
    assert topk_mask(given, 7, None, out=mask) is mask and int(mask.sum()) == 7


ROWS = torch.zeros(3, 40)
MANY = ROWS[:1, :1].expand(1, (1 << 31) + 1)
INTEGERS = "uint8 or int8 or int16 or int32 or int64"
REAL = f"input: wanted dtype float64 or float32 or bfloat16 or float16 or {INTEGERS}"
DTYPE = "topk: index_dtype: wanted torch.int64"
COLUMNS = torch.zeros(40, 3, dtype=torch.bool).T
VALUES, INDICES = torch.zeros(3, 5), torch.zeros(3, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topk([1.0], 1), "topk: input: wanted a Tensor, got list"),
        (lambda: topk(ROWS.to_sparse(), 1), "topk: input: wanted a dense tensor, got sparse_coo"),
        (lambda: topk(ROWS > 0, 1), f"topk: {REAL}, got bool"),
        (lambda: kth_value(ROWS.to(torch.complex64), 1), f"kth_value: {REAL}, got complex64"),
        (
            lambda: topk_threshold(ROWS.to(torch.float8_e4m3fn), 1),
            f"topk_threshold: {REAL}, got float8_e4m3fn",
        ),
        (lambda: topk_mask(ROWS.to(torch.uint16), 1), f"topk_mask: {REAL}, got uint16"),
        (lambda: topk(ROWS, 41), "topk: k: wanted 0 to 40, got 41"),
        (lambda: topk(ROWS, 4, 0), "topk: k: wanted 0 to 3, got 4"),
        (lambda: topk(ROWS, -1), "topk: k: wanted 0 to 40, got -1"),
        (lambda: topk(ROWS, 1.5), "topk: k: wanted an integer, got 1.5"),
        (lambda: topk(ROWS[0, 0], 0), "topk: k: wanted 1 to 1, got 0"),
        (lambda: topk(ROWS, 1, 1.0), "topk: dim: wanted an integer, got 1.0"),
        (lambda: topk(ROWS, 1, None), "topk: dim: wanted an integer, got None"),
        (lambda: topk(ROWS, 1, largest=1), "topk: largest: wanted true or false, got 1"),
        (lambda: topk(ROWS, 1, sorted="no"), "topk: sorted: wanted true or false, got 'no'"),
        (lambda: topk(ROWS, 1, index_dtype=torch.int16), f"{DTYPE} or torch.int32, got torch.int16"),
        (
            lambda: topk(MANY, 1, index_dtype=torch.int32),
            f"{DTYPE} for more than 2**31 elements, got torch.int32",
        ),
        (lambda: topk(ROWS, 5, out=VALUES), "topk: out: wanted a tuple of values and indices, got Tensor"),
        (lambda: topk(ROWS, 5, out=(VALUES,)), "topk: out: wanted a tuple of values and indices, got tuple"),
        (lambda: topk(ROWS, 5, out=(VALUES, None)), "topk: out[1]: wanted a Tensor, got NoneType"),
        (lambda: topk(ROWS, 5, out=(INDICES, INDICES)), "topk: out[0]: wanted dtype float32, got int64"),
        (lambda: topk(ROWS, 5, out=(VALUES, INDICES.int())), "topk: out[1]: wanted dtype int64, got int32"),
        (lambda: topk(ROWS, 4, out=(VALUES, INDICES)), "topk: out[0]: wanted shape [3, 4], got [3, 5]"),
        (
            lambda: topk(ROWS.clone().requires_grad_(), 5, out=(VALUES, INDICES)),
            "topk: out: wanted an input without a gradient, or torch.no_grad, got an input with one",
        ),
        (lambda: kth_value(ROWS, 0), "kth_value: k: wanted 1 to 40, got 0"),
        (lambda: kth_value(ROWS, 121, None), "kth_value: k: wanted 1 to 120, got 121"),
        (lambda: kth_value(ROWS, 1, None, True), "kth_value: keepdim: wanted a dim beside it, got None"),
        (lambda: topk_threshold(ROWS, 1, keepdim=1), "topk_threshold: keepdim: wanted true or false, got 1"),
        (lambda: topk_threshold(ROWS, 0), "topk_threshold: k: wanted 1 to 40, got 0"),
        (lambda: topk_mask(ROWS, 1, largest=None), "topk_mask: largest: wanted true or false, got None"),
        (lambda: topk_mask(ROWS, 1, out=ROWS), "topk_mask: out: wanted dtype bool, got float32"),
        (lambda: topk_mask(ROWS, 1, out=ROWS[0] > 0), "topk_mask: out: wanted shape [3, 40], got [40]"),
        (
            lambda: topk_mask(ROWS, 1, out=COLUMNS),
            "topk_mask: out: wanted contiguous rows, got strides (1, 3)",
        ),
    ],
)
def test_wrong_calls(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^gvr_topk.{re.escape(message)}$"):
        call()


@pytest.mark.parametrize("call", [topk, kth_value, topk_threshold, topk_mask])
def test_a_dimension_that_is_not_there(call: Callable[..., Any]) -> None:
    for dim in (2, -3):
        with pytest.raises(IndexError, match="Dimension out of range"):
            call(ROWS, 1, dim)


# ---------------------------------------------------------------- torch.topk


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The backend, for CPU tensors; shapes of the inputs that it has served."""
    served: list[tuple[int, ...]] = []

    def noted(given: Tensor, *arguments: Any) -> Any:
        served.append(tuple(given.shape))
        return topk(given, *arguments)

    monkeypatch.setattr(torch_backend, "_KEY", "CPU")
    monkeypatch.setattr(torch_backend, "_has_code", lambda device: True)
    monkeypatch.setattr(torch_backend, "library_status", lambda: LibraryStatus(True, None, ""))
    monkeypatch.setattr(torch_backend, "topk", noted)
    yield served
    torch_backend.disable()


TIED = torch.tensor([1.0, 1.0, 1.0, 0.0] * 20)


def test_torch_topk_is_served_between_enable_and_disable(backend: list[tuple[int, ...]]) -> None:
    before = torch.topk(TIED, 3).indices
    assert before.tolist() != [0, 1, 2]  # torch's choice among ties, without which this test shows nothing
    torch_backend.enable()
    torch_backend.enable()
    for dtype in DTYPES:
        result = torch.topk(TIED.to(dtype), 3)
        assert type(result) is torch.return_types.topk
        assert result.indices.tolist() == [0, 1, 2]
    assert torch.topk(TIED.view(4, 20), 2, dim=0, sorted=False).indices[:, 0].tolist() == [0, 1]
    given = torch.randn(2, 30, generator=draw(14))
    assert torch.equal(torch.topk(given, 1).indices[:, 0], given.argmax(1))
    assert torch.equal(torch.topk(given, 30).values, given.sort(1, descending=True).values)
    assert torch.equal(torch.topk(given, 30, sorted=False).values, given)
    assert backend == [*3 * [(80,)], (4, 20), *3 * [(2, 30)]]
    torch_backend.disable()
    torch_backend.disable()
    assert torch.equal(torch.topk(TIED, 3).indices, before) and len(backend) == 7
    torch_backend.enable()
    assert torch.topk(TIED, 3).indices.tolist() == [0, 1, 2]


def test_torch_topk_keeps_the_calls_that_are_not_served(backend: list[tuple[int, ...]]) -> None:
    out = (torch.empty(0), torch.empty(0, dtype=torch.int64))
    calls: list[Callable[[], Any]] = [
        lambda: torch.topk(TIED.double(), 3),
        lambda: torch.topk(TIED.long(), 3),
        lambda: torch.topk(TIED, 3, largest=False),
        lambda: torch.topk(TIED, 0),
        lambda: torch.topk(TIED[0], 1),
        lambda: torch.topk(torch.empty(2, 0), 0),
        lambda: torch.topk(torch.zeros((1 << 21) + 1), (1 << 20) + 1),
        lambda: torch.topk(TIED, 3, out=out),
    ]
    before = [tuple(tensor.clone() for tensor in call()) for call in calls]
    torch_backend.enable()
    for call, wanted in zip(calls, before, strict=True):
        assert all(torch.equal(*each) for each in zip(call(), wanted, strict=True))
    for wrong in (lambda: torch.topk(TIED, 81), lambda: torch.topk(TIED, -1)):
        with pytest.raises(RuntimeError, match="selected index k out of range"):
            wrong()
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch.topk(TIED, 1, 1)
    assert backend == []


def test_rows_of_any_number_and_length_are_exported() -> None:
    class Chosen(torch.nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return topk(rows, 2).indices

    sizes = ({0: torch.export.Dim("batch", max=1 << 20), 1: torch.export.Dim("width", min=2, max=1 << 20)},)
    exported = torch.export.export(Chosen(), (torch.randn(3, 7),), dynamic_shapes=sizes).module()
    for rows in (torch.randn(5, 7), torch.randn(2, 90)):
        assert torch.equal(exported(rows), topk(rows, 2).indices)


def test_what_was_exported_without_a_gradient_gives_one() -> None:
    class Values(torch.nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return topk(rows, 2).values

    exported = torch.export.export(Values(), (torch.randn(3, 7),)).module()
    rows = torch.randn(3, 7, requires_grad=True)
    exported(rows).sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad != 0, topk_mask(rows, 2))


def test_torch_topk_when_served_has_gradients_and_compiles(backend: list[tuple[int, ...]]) -> None:
    torch_backend.enable()
    given = torch.randn(3, 50, generator=draw(13)).requires_grad_()
    torch.topk(given, 4).values.sum().backward()
    assert given.grad is not None and torch.equal(given.grad != 0, topk_mask(given, 4))
    compiled = torch.compile(lambda rows: torch.topk(rows, 3).indices, fullgraph=True, backend="aot_eager")
    assert compiled(TIED).tolist() == [0, 1, 2]
    assert backend == [(3, 50), (80,)]


def test_enable_says_what_is_missing(backend: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.delattr(torch.library, "get_kernel")
        with pytest.raises(RuntimeError, match=r"wanted torch.library.get_kernel, got \d"):
            torch_backend.enable()
    monkeypatch.setattr(torch_backend, "library_status", lambda: LibraryStatus(False, None, "no compiler"))
    with pytest.raises(LibraryError, match=r"torch_backend\.enable: CUDA library: no compiler"):
        torch_backend.enable()
    torch.topk(TIED, 3)
    assert backend == []


def test_a_gpu_without_code_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, served in ((None, False), (80, False), (90, True)):
        torch_backend._has_code.cache_clear()
        monkeypatch.setattr(torch_backend, "gpu_arch", lambda device, arch=arch: arch)
        monkeypatch.setattr(torch_backend, "has_code", lambda arch: arch == 90)
        assert torch_backend._serves(TIED, 3, -1, True) is served
    torch_backend._has_code.cache_clear()
