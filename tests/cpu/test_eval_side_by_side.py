"""``python -m eval side-by-side``: which version runs and how it is called, the figures, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer

import gvr_topk
from eval import side_by_side
from eval.__main__ import main
from eval.common import package_version
from eval.common.machine import without_folders
from eval.common.package_version import GUESS_AND_PRIOR, GUESS_STATE, STATE, new_hint, state_api
from eval.common.side_by_side_report import TREE, Run, figures, largest_ratio, problems, table, verdict
from eval.common.side_by_side_worker import (
    CHECKED_STEPS,
    NO_HINT,
    WAYS,
    WITH_ROW_SLOT,
    WITHOUT_ROW_SLOT,
    Expected,
    Job,
    exact_choice,
    gaussian_cell,
    trace_cell,
)
from eval.common.trace_scores import trace_scores
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.evaluation.trace import SHIPPED_TRACE, load_trace

ROOT = Path(__file__).resolve().parents[2]
K = 2048
SHAPE = "2500x2"

OP = """
import atexit, json, pathlib, torch

SEEN = set()
LOG = pathlib.Path(__file__).with_name("seen.json")
atexit.register(lambda: LOG.write_text(json.dumps(sorted(SEEN))))

def choose(logits, seq_lens, k, out, **given):
    SEEN.add(" ".join(f"{name}{list(it.shape)}" for name, it in given.items() if it is not None))
    for name in ("row_slot", "prior"):
        assert given.get(name) is None or given[name].dtype == torch.int32
    visible = logits[:, : int(seq_lens[0])]
    out.copy_(visible.topk(k, dim=1).indices.sort(dim=1).values)
    return out
"""
"""The part that the fake versions share; their rows have one length and no ties."""

FAKES = {
    STATE: """
class TopkState:
    def __init__(self, slots, k, device=None, *, keep_indices=True):
        assert not keep_indices
        self.words = torch.zeros(slots, 4, device=device)

def indexer_topk_decode(logits, seq_lens, k, *, out, state=None, row_slot=None):
    words = None if state is None else state.words
    return choose(logits, seq_lens, k, out, words=words, row_slot=row_slot)
""",
    GUESS_STATE: """
def new_guess_state(slots, device=None):
    return torch.zeros(slots, 4, device=device)

def indexer_topk_decode(logits, seq_lens, k, *, out, prior=None, row_slot=None, guess_state=None):
    return choose(logits, seq_lens, k, out, prior=prior, guess_state=guess_state, row_slot=row_slot)
""",
    GUESS_AND_PRIOR: """
def indexer_topk_decode(logits, seq_lens, k, *, out, prior=None, row_slot=None, guess_state=None):
    assert guess_state is None or guess_state.dtype == torch.float32
    return choose(logits, seq_lens, k, out, prior=prior, guess_state=guess_state, row_slot=row_slot)
""",
}
CARRIED = {
    STATE: "words[2, 4]",
    GUESS_STATE: "guess_state[2, 4]",
    GUESS_AND_PRIOR: "prior[2, 2048] guess_state[2]",
}
"""What the op of each fake gets to carry a state."""


def fake_version(folder: Path, body: str) -> Path:
    """Write a package with a module beside ``__init__``, as all versions have."""
    package = folder / "gvr_topk"
    package.mkdir(parents=True)
    (package / "ops.py").write_text(OP + body)
    (package / "__init__.py").write_text("from gvr_topk.ops import *\n")
    return folder


def run_worker(folder: Path) -> Run:
    job = Job(str(folder), "cpu", [SHAPE], [])
    return side_by_side.run_version(side_by_side.Version("fake", folder, "abc"), job, 1)


def command(*options: str) -> int:
    return main(["side-by-side", "--device", "cpu", *options])


def result(us: float | None, cell: str = "a", way: str = NO_HINT, **changes: Any) -> dict[str, Any]:
    return {"cell": cell, "way": way, "us": us, "steps": 40, "rows": 200, "wrong": 0, "note": ""} | changes


@pytest.mark.parametrize("api", FAKES)
def test_each_version_is_called_as_it_wants(api: str, tmp_path: Path) -> None:
    folder = fake_version(tmp_path / "version", FAKES[api])
    run = run_worker(folder)
    assert (run.problem, run.api) == ("", api)
    assert [(each["cell"], each["way"]) for each in run.results] == [(f"gauss {SHAPE}", way) for way in WAYS]
    for each in run.results:
        assert (each["wrong"], each["note"], each["steps"], each["rows"]) == (0, "", 40, 5 * 40 * 2)
        assert each["us"] > 0
    seen = json.loads((folder / "gvr_topk" / "seen.json").read_text())
    assert set(seen) == {"", CARRIED[api], f"{CARRIED[api]} row_slot[2]"}


def test_the_worker_imports_no_version_by_itself() -> None:
    code = "import eval.common.side_by_side_worker, sys; sys.exit('gvr_topk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_version_is_imported_from_its_folder_alone(tmp_path: Path) -> None:
    """A module that a version lacks is not taken from the checkout, whose modules can be imported too."""
    folder = fake_version(tmp_path, FAKES[STATE])
    code = (
        "import os, sys; from pathlib import Path; from eval.common.package_version import import_version\n"
        "package = import_version(Path(sys.argv[1]))\n"
        "print(package.__file__, sys.modules['gvr_topk.ops'].__file__)\n"
        "print('GVR_TOPK_LIBRARY_DIR' in os.environ)\n"
        "import gvr_topk.policy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        env={"GVR_TOPK_LIBRARY_DIR": "elsewhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    package = folder / "gvr_topk"
    assert done.stdout.split() == [str(package / "__init__.py"), str(package / "ops.py"), "False"]
    assert done.returncode == 1 and f"wanted the module gvr_topk.policy in {folder}" in done.stderr


def test_a_process_runs_one_version(tmp_path: Path) -> None:
    with pytest.raises(package_version.VersionError, match="already"):
        package_version.import_version(tmp_path)


@pytest.mark.parametrize(
    ("loaded", "place", "fits"), [(True, "here", True), (True, "there", False), (False, "here", False)]
)
def test_kernels_are_those_of_the_folder(loaded: bool, place: str, fits: bool, tmp_path: Path) -> None:
    status = SimpleNamespace(
        loaded=loaded, path=str(tmp_path / place / package_version.CUDA_LIBRARY), reason="why"
    )
    package: Any = SimpleNamespace(library_status=lambda: status)
    if fits:
        package_version.check_library(package, tmp_path / "here")
    else:
        with pytest.raises(package_version.VersionError, match=r"wanted the library .*: why"):
            package_version.check_library(package, tmp_path / "here")


def test_the_working_tree_has_a_state() -> None:
    assert state_api(gvr_topk) == STATE
    hint = new_hint(gvr_topk, 3, 5, "cpu")
    assert hint.options["state"].indices is None
    assert [tuple(tensor.shape) for tensor in hint.tensors] == [(3, 4)]


def test_a_state_of_two_tensors_begins_empty() -> None:
    hint = new_hint(SimpleNamespace(), 3, 5, "cpu")  # type: ignore[arg-type]
    guesses, prior = hint.tensors
    assert hint.options == {"guess_state": guesses, "prior": prior}
    assert torch.equal(guesses, torch.full((3,), -1.0)) and guesses.dtype == torch.float32
    assert torch.equal(prior, torch.full((3, 5), -1, dtype=torch.int32)) and prior.dtype == torch.int32


@pytest.mark.parametrize("k", [1, 5, 40, 64])
def test_the_sort_knows_ties_zeros_lengths_and_infinities(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    rows = torch.randint(-2, 3, (30, 40), generator=generator).float()
    rows[rows == 2] = -0.0
    rows[20:][rows[20:] == -1] = float("-inf")
    rows[25:][rows[25:] == 1] = float("nan")
    lengths = (torch.arange(30, dtype=torch.int32) * 3).clamp(max=40)
    for row, length in enumerate(lengths.tolist()):
        rows[row, length:] = float("nan")
    assert torch.equal(exact_choice(rows, lengths, k), sorted_topk(rows, lengths, k))


@pytest.mark.parametrize("steps", [40, 64, 100, 512])
def test_at_least_64_steps_are_compared(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.common.side_by_side_worker.steps_for", lambda *_: steps)
    monkeypatch.setattr("eval.common.side_by_side_worker.K", 4)
    chain = gaussian_cell("9x2", "cpu")
    assert (len(chain.timed), chain.k, chain.batch) == (steps, 4, 2)
    expected = Expected(chain)
    checked = expected.steps.tolist()
    assert len(checked) >= min(steps, CHECKED_STEPS) and set(checked) <= set(chain.timed)
    assert expected.rows == 2 * len(checked)
    results = torch.stack([exact_choice(rows, chain.lengths, 4) for rows in chain.logits])
    assert int(expected.differences(results)) == 0
    results[checked[-1], 1, 2] += 1
    results[checked[0], 0] = -1
    assert int(expected.differences(results)) == 2


def test_trace_cell_is_the_trace() -> None:
    trace = load_trace(SHIPPED_TRACE)
    chain = trace_cell(SHIPPED_TRACE, "cpu")
    assert len(chain.timed) >= trace.steps and chain.k == K
    first = chain.timed[0]
    assert int(chain.lengths_of(first)) == trace.length(0)
    got = chain.logits[first, 0, : trace.length(0)].numpy()
    np.testing.assert_allclose(got, trace.scores(0), rtol=1e-4, atol=1e-5)


def test_trace_scores_by_hand() -> None:
    keys = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=np.float16)
    queries = np.array([[[1.0, 1.0]], [[-1.0, 1.0]]], dtype=np.float16)
    weights = np.array([[2.0], [1.0]], dtype=np.float16)
    rows = trace_scores(keys, queries, weights, "cpu")
    wanted = [[[2 / 2**0.5, 4 / 2**0.5]], [[0.0, 2 / 2**0.5, 0.0]]]
    for row, values in zip(rows, wanted, strict=True):
        torch.testing.assert_close(row, torch.tensor(values))


NAMES = (TREE, "before", "older")


def test_medians_and_ratios() -> None:
    times = {TREE: (5.0, 9.0, 6.0), "before": (4.0, 8.0, 3.0), "older": (1.0, 3.0, 2.0)}
    runs = [
        Run(name, number + 1, STATE, [result(times[name][number]), result(2.0, way=WITHOUT_ROW_SLOT)])
        for number in range(3)
        for name in NAMES
    ]
    first, second = figures(NAMES, runs)
    assert (first["cell"], first["way"], first["ratio"]) == ("a", NO_HINT, 1.5)
    assert first["us"] == {TREE: 6.0, "before": 4.0, "older": 2.0}
    assert first["rounds_us"] == {name: list(of) for name, of in times.items()}
    assert second["ratio"] == 1.0
    assert largest_ratio([second, first]) == {"cell": "a", "way": NO_HINT, "ratio": 1.5}
    shown = table(NAMES, [first, second])
    assert "largest ratio of working tree to before: 1.500 (a, no hint)" in shown
    assert [part.strip() for part in shown.splitlines()[2].split("|")[1:-1]] == [
        *("a", "no hint", "6.00", "4.00", "2.00", "1.500")
    ]
    assert (problems(runs), verdict(runs)) == ([], 0)


def test_what_is_wrong_or_missing_counts_for_nothing() -> None:
    runs = [
        Run(TREE, 1, STATE, [result(5.0), result(1.0, "b", wrong=3)]),
        Run("before", 1, STATE, [result(4.0), result(4.0, "b")]),
        Run("older", 1, problem="command failed: exit status 1\n  command: python"),
        Run(TREE, 2, STATE, [result(7.0), result(8.0, "b")]),
        Run("before", 2, STATE, [result(None, note="ValueError: no"), result(None, "b", note="same")]),
    ]
    first, second = figures(NAMES, runs)
    assert first["us"] == {TREE: 6.0, "before": 4.0, "older": None} and first["ratio"] == 1.5
    assert second["us"] == {TREE: 8.0, "before": 4.0, "older": None} and second["ratio"] == 2.0
    assert problems(runs) == [
        "working tree, round 1, b, no hint: 3 of 200 compared rows are wrong",
        "older, round 1: command failed: exit status 1\n  command: python",
        "before, round 2, a, no hint: ValueError: no",
        "before, round 2, b, no hint: same",
    ]
    assert verdict(runs) == 1 and verdict(runs[1:]) == 3 and verdict(runs[1:2]) == 0
    assert [run.summary for run in runs[:3]] == [
        "1 of 2 figures with exact results",
        "2 of 2 figures with exact results",
        "command failed: exit status 1",
    ]


def test_without_a_time_there_is_no_ratio() -> None:
    rows = figures(NAMES, [Run(TREE, 1, STATE, [result(5.0)])])
    assert rows[0]["ratio"] is None and largest_ratio(rows) is None
    shown = table(NAMES, rows)
    assert "to before: none" in shown and shown.splitlines()[2].split("|")[-2].strip() == "-"


def test_two_versions_beside_the_working_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, older = (fake_version(tmp_path / api, FAKES[api]) for api in (GUESS_STATE, GUESS_AND_PRIOR))
    (before / "COMMIT").write_text("1234567\n")
    out = tmp_path / "out" / "result.json"
    options = ["--package", str(before), "--package", str(older), "--commit-of", f"{older}=89abcde"]
    status = command(*options, "--cells", SHAPE, "--rounds", "1", "--out", str(out), "--commit", "fedcba9")
    said = capsys.readouterr()
    assert (status, said.err) == (0, "")
    data = json.loads(out.read_text())
    before, older = (without_folders(str(folder)) for folder in (before, older))  # results name no folders
    assert data["format"] == side_by_side.FORMAT and data["machine"]["commit"] == "fedcba9"
    assert data["command"].startswith("python -m eval side-by-side --device cpu --package ")
    assert [
        (version["name"], version["folder"], version["commit"], version["api"])
        for version in data["versions"]
    ] == [
        (TREE, ".", "fedcba9", STATE),
        (before, before, "1234567", GUESS_STATE),
        (older, older, "89abcde", GUESS_AND_PRIOR),
    ]
    assert [(row["cell"], row["way"]) for row in data["cells"]] == [(f"gauss {SHAPE}", way) for way in WAYS]
    for row in data["cells"]:
        assert row["ratio"] == pytest.approx(row["us"][TREE] / row["us"][before], abs=1e-3)
        assert all(len(times) == 1 for times in row["rounds_us"].values())
    assert data["largest_ratio"]["ratio"] == max(row["ratio"] for row in data["cells"])
    assert data["problems"] == [] and WITH_ROW_SLOT in said.out and "largest ratio" in said.out


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (
            FAKES[STATE].replace("return choose(", "choose(") + "    out[:, 0] += 1\n    return out\n",
            1,
            "400 of 400 compared rows are wrong",
        ),
        (
            FAKES[STATE].replace("words = None", "raise ValueError('no kernel')  #"),
            3,
            "ValueError: no kernel",
        ),
        ("raise SystemExit(7)\n", 3, "exit status 7"),
    ],
)
def test_a_version_that_is_wrong_or_fails(
    body: str,
    status: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = fake_version(tmp_path / "version", body), tmp_path / "result.json"
    real = side_by_side.run_version

    def run_version(version: side_by_side.Version, job: Job, number: int) -> Run:
        return Run(TREE, number, STATE) if version.name == TREE else real(version, job, number)

    monkeypatch.setattr(side_by_side, "run_version", run_version)
    options = ("--package", str(folder), "--cells", SHAPE, "--rounds", "1", "--out", str(out))
    assert command(*options) == status
    assert text in capsys.readouterr().err
    data = json.loads(out.read_text())
    assert any(text in problem for problem in data["problems"]) and data["largest_ratio"] is None


def test_versions_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [fake_version(tmp_path / name, FAKES[STATE]) for name in "ab"]
    turns: list[tuple[str, int]] = []

    def run_version(version: side_by_side.Version, job: Job, number: int) -> Run:
        assert (job.folder, job.shapes) == (str(version.folder), side_by_side.SHAPES.split(","))
        assert job.traces == [str(SHIPPED_TRACE)]
        turns.append((version.name, number))
        return Run(version.name, number, STATE, [result(1.0)])

    monkeypatch.setattr(side_by_side, "run_version", run_version)
    (tmp_path / "traces").mkdir()
    given = [option for folder in folders for option in ("--package", str(folder))]
    out = ("--out", str(tmp_path / "result.json"))
    assert command(*given, "--traces", str(tmp_path / "traces"), *out) == 0
    names = (TREE, *map(str, folders))
    assert turns == [(name, number) for number in (1, 2, 3) for name in names]


def test_a_version_on_a_gpu_needs_its_library(tmp_path: Path) -> None:
    folder = fake_version(tmp_path, FAKES[STATE])
    version = side_by_side.Version("before", folder, "unknown")
    assert version.missing("cpu") == "" and version.as_json(STATE)["library_sha256"] is None
    assert version.missing("cuda") == f"{folder}: wanted gvr_topk/lib/libgvr_topk_cuda.so, got none"
    library = folder / package_version.CUDA_LIBRARY
    library.parent.mkdir()
    library.write_bytes(b"kernels")
    assert version.missing("cuda") == "" and len(version.as_json(STATE)["library_sha256"]) == 64


@pytest.mark.parametrize("text", ["1234567", "elsewhere=1234567", "=1234567", "here="])
def test_a_commit_belongs_to_a_package(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="wanted DIR=HASH"):
        side_by_side.commit_names([text], [Path("here")])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "wanted a folder with another version"),
        (("--package", "nowhere"), "wanted gvr_topk/__init__.py"),
        (("--package", ".", "--package", "./"), "more than once"),
        (("--package", ".", "--cells", "8192"), "wanted N x batch"),
        (("--package", ".", "--cells", "9x1,9x1"), "more than once"),
        (("--package", ".", "--cells", ""), "got neither"),
        (("--package", ".", "--rounds", "0"), "wanted at least 1"),
        (("--package", ".", "--device", "tpu"), "wanted cuda or cpu"),
        (("--package", ".", "--traces", "nowhere"), "does not exist"),
    ],
)
def test_wrong_use(options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*options) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert text in said
