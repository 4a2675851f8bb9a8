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


def refused(path: Path, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)


def test_what_is_no_file_of_arrays(path, tmp_path, arrays):
    wanted = "wanted an .npz file with the arrays K, Q, W, got "
    refused(path, f"{wanted}FileNotFoundError")
    refused(tmp_path, f"{wanted}IsADirectoryError")
    np.savez(path, **{**arrays, "W": np.array([object()])})
    refused(path, "allow_pickle=False")
    np.savez(path, K=arrays["K"], Q=arrays["Q"])
    refused(path, f"{wanted}KeyError: 'W")
    for content in (b"", b"PK", b"hello, world", b"\x93NUMPY", path.read_bytes()[:-30]):
        path.write_bytes(content)
        refused(path, wanted)
    np.save(tmp_path / "one.npy", arrays["K"])
    refused(tmp_path / "one.npy", wanted)


@pytest.mark.parametrize(
    "name, unfit, said",
    [
        ("K", np.zeros(40, np.float16), "array K: wanted elements [keys, head_dim], got shape (40,)"),
        ("Q", np.zeros((5, 48), np.float16), "wanted elements [steps, heads, head_dim], got shape (5, 48)"),
        ("K", np.zeros((40, 16), np.float64), "array K: wanted float16 or float32, got float64"),
        ("K", np.zeros((0, 16), np.float16), "wanted elements [keys, head_dim], got shape (0, 16)"),
        ("Q", np.zeros((5, 3, 8), np.float16), "'head_dim': 16, 'steps': 5, 'heads': 3}"),
        ("W", np.zeros((5, 4), np.float16), "of the arrays before, got shape (5, 4)"),
        ("W", np.zeros((6, 3), np.float16), "of the arrays before, got shape (6, 3)"),
        ("K", np.zeros((4, 16), np.float16), "array K: wanted a key for each of the 5 steps, got fewer"),
        ("W", np.full((5, 3), np.inf, np.float16), "array W: wanted finite values, got 15 values"),
        ("K", np.full((40, 16), np.nan, np.float32), "array K: wanted finite values, got 640 values"),
    ],
)
def test_unfit_array(path, arrays, name, unfit, said):
    np.savez(path, **{**arrays, name: unfit})
    refused(path, said)
