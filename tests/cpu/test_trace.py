"""Reading traces: the rows follow the formula, and an unfit file is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gvr_topk.evaluation import trace
from gvr_topk.evaluation.trace import TraceError, load_trace, shipped_trace


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "K": rng.standard_normal((40, 16)).astype(np.float16),
        "Q": rng.standard_normal((5, 3, 16)).astype(np.float16),
        "W": rng.standard_normal((5, 3)).astype(np.float16),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.npz"


def test_scores_follow_the_indexer_formula(path, arrays):
    np.savez(path, **arrays)
    trace = load_trace(path)
    keys, queries, weights = (arrays[name].astype(np.float64) for name in "KQW")
    for step in range(5):
        n = 40 - 5 + step + 1
        wanted = [
            sum(weights[step, h] * max(queries[step, h] @ keys[s], 0) for h in range(3)) / 4 for s in range(n)
        ]
        scores = trace.scores(step)
        assert scores.dtype == np.float32
        assert trace.length(step) == n
        np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-5)


def test_shipped_trace_is_the_layer_10_capture():
    trace = shipped_trace()
    assert (trace.K.shape, trace.Q.shape, trace.W.shape) == ((32768, 64), (256, 32, 64), (256, 32))
    assert (trace.length(0), trace.length(255)) == (32513, 32768)
    scores = trace.scores(255)
    assert scores.shape == (32768,)
    np.testing.assert_array_equal(scores, trace.scores(255))
    assert np.isfinite(scores).all()


def test_the_trace_of_the_current_folder_serves_an_installed_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = trace.SHIPPED_TRACE
    monkeypatch.setattr(trace, "SHIPPED_TRACE", tmp_path / "site-packages" / "none.npz")
    monkeypatch.chdir(held.parents[2])
    assert shipped_trace().name == held.stem
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="run this in the folder of a checkout, or give --trace FILE or "):
        shipped_trace()


def refused(path: Path) -> TraceError:
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    error = caught.value
    assert error.path == path
    assert str(error).startswith(f"{path}: ")
    assert f"wanted {error.wanted}, got {error.got}" in str(error)
    return error


def test_what_is_no_file_of_arrays(path, tmp_path, arrays):
    missing = refused(path)
    assert (missing.array, missing.got) == (None, "no such file")
    assert refused(tmp_path).got == "a directory"
    np.savez(path, **{**arrays, "W": np.array([object()])})  # pickled objects are not loaded
    assert refused(path).array == "W"


@pytest.mark.parametrize("content", [b"", b"PK", b"hello, world", b"\x93NUMPY"])
def test_not_an_archive(path, content):
    path.write_bytes(content)
    error = refused(path)
    assert (error.array, error.got) == (None, "a file of another kind")


@pytest.mark.parametrize("name", ["K", "Q", "W"])
def test_missing_array(path, arrays, name):
    held = ", ".join(sorted(set(arrays) - {name}))
    np.savez(path, **{key: value for key, value in arrays.items() if key != name})
    error = refused(path)
    assert (error.array, error.got) == (name, f"an archive of {held}")


@pytest.mark.parametrize(
    "name, unfit, wanted, got",
    [
        ("K", np.zeros(40, np.float16), "2 dimensions [keys, head_dim]", "shape (40,)"),
        ("Q", np.zeros((5, 48), np.float16), "3 dimensions [steps, heads, head_dim]", "shape (5, 48)"),
        ("W", np.zeros((5, 3, 1), np.float16), "2 dimensions [steps, heads]", "shape (5, 3, 1)"),
        ("K", np.zeros((40, 16), np.float64), "dtype float16 or float32", "float64"),
        ("W", np.zeros((5, 3), np.int32), "dtype float16 or float32", "int32"),
        ("K", np.zeros((0, 16), np.float16), "at least one element", "shape (0, 16)"),
        ("Q", np.zeros((5, 3, 8), np.float16), "head_dim 16 as in K (40, 16)", "shape (5, 3, 8)"),
        ("W", np.zeros((5, 4), np.float16), "shape (5, 3) as in Q", "shape (5, 4)"),
        ("W", np.zeros((6, 3), np.float16), "shape (5, 3) as in Q", "shape (6, 3)"),
        ("K", np.zeros((4, 16), np.float16), "at least as many keys as steps (5)", "shape (4, 16)"),
    ],
)
def test_unfit_array(path, arrays, name, unfit, wanted, got):
    np.savez(path, **{**arrays, name: unfit})
    error = refused(path)
    assert (error.array, error.wanted, error.got) == (name, wanted, got)


@pytest.mark.parametrize("name", ["K", "Q", "W"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values(path, arrays, name, bad):
    for places in ([7], [0, 7]):
        arrays[name].flat[places] = bad
        np.savez(path, **arrays)
        error = refused(path)
        assert (error.array, error.wanted) == (name, "finite values")
        assert error.got.startswith(f"{len(places)} values")
