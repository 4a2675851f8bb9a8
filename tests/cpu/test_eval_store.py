"""The run store keeps what was finished, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eval.campaigns.store import RunStore, StoreBusy, StoreError, file_hash, run_key


def test_a_store_that_is_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"wanted a readable run store, got: Is a directory"):
        RunStore(tmp_path)


def _record(key: str, status: str = "done", **more: object) -> dict[str, object]:
    return {"key": key, "status": status, "labels": {"task": "t"}, "figures": {"score": 1.0}, **more}


def test_finished_runs_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    with RunStore(path) as store:
        store.append(_record("a", figures={"score": 1.5}))
        assert store.done("a") is not None
    again = RunStore(path)
    found = again.done("a")
    assert found is not None and found["figures"] == {"score": 1.5}
    assert again.done("b") is None


def test_reading_writes_nothing(tmp_path: Path) -> None:
    RunStore(tmp_path / "none" / "runs.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_failed_run_is_not_done_and_a_later_success_counts(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with RunStore(path) as store:
        store.append(_record("a", "failed"))
        assert store.done("a") is None
    assert RunStore(path).done("a") is None
    with RunStore(path) as store:
        store.append(_record("a"))
    assert RunStore(path).done("a") is not None


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_half_written_line_is_ignored_and_the_next_one_survives(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "runs.jsonl"
    with RunStore(path) as store:
        store.append(_record("a"))
        store.append(_record("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    with RunStore(path) as store:
        assert store.done("a") is not None
        if cut > 1:  # with only the newline lost the record is whole
            assert store.done("b") is None
            assert store.skipped_lines == (2,)
        store.append(_record("c"))
    again = RunStore(path)
    assert again.done("a") is not None
    assert again.done("c") is not None


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1, 2]",
        '{"key": "b"}',
        "null",
        "[" * 5000,
        '{"key": "b", "status": "done"}',
        '{"key": "b", "status": "done", "labels": {}}',
        '{"key": "b", "status": "done", "labels": {}, "figures": {}}',
        '{"key": "b", "status": "done", "labels": {}, "figures": {"score": "95"}}',
        '{"key": "b", "status": "done", "labels": {}, "figures": {"score": true}}',
        '{"key": "b", "status": "done", "labels": {}, "figures": {"score": NaN}}',
        '{"key": "b", "status": "done", "labels": [], "figures": {"score": 1}}',
        '{"key": ["b"], "status": "done", "labels": {}, "figures": {"score": 1}}',
    ],
)
def test_damaged_line_in_the_middle_is_skipped_and_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "runs.jsonl"
    first, last = (json.dumps(_record(key)) for key in "ac")
    path.write_text(f"{first}\n{line}\n{last}\n")
    store = RunStore(path)
    assert store.done("a") is not None and store.done("c") is not None
    assert store.skipped_lines == (2,)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with RunStore(path), pytest.raises(StoreBusy, match="in use"), RunStore(path):
        pytest.fail("the block must not run")
    with RunStore(path):
        pass


def test_what_another_process_wrote_before_the_lock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    waiting = RunStore(path)
    with RunStore(path) as other:
        other.append(_record("a"))
    assert waiting.done("a") is None
    with waiting:
        assert waiting.done("a") is not None
        assert [record["key"] for record in waiting.finished()] == ["a"]


def test_a_copy_of_the_descriptor_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with RunStore(path) as store:
        copy = os.dup(store.lock)
    with pytest.raises(StoreBusy), RunStore(path):
        pytest.fail("the block must not run")
    os.close(copy)
    with RunStore(path):
        pass


def test_figures_that_json_cannot_hold_are_not_written(tmp_path: Path) -> None:
    with RunStore(tmp_path / "runs.jsonl") as store:
        with pytest.raises(ValueError):  # noqa: PT011 - the message is the JSON library's
            store.append(_record("a", figures={"score": float("nan")}))
        assert store.done("a") is None
    assert (tmp_path / "runs.jsonl").read_bytes() == b""


def test_append_needs_the_block(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not open"):
        RunStore(tmp_path / "runs.jsonl").append(_record("a"))


def test_key_follows_command_inputs_and_labels() -> None:
    def key(word: str = "b", content: str = "1", repetition: int = 1, version: str = "1.2.1") -> str:
        return run_key(
            [["a", word]], {"x.yaml": content}, {"repetition": repetition}, {"tensorrt_llm": version}
        )

    assert key() == key()
    assert len({key(), key(word="c"), key(content="2"), key(repetition=2), key(version="1.2.2")}) == 5
    assert run_key([["a", "b"]], {}, {}, {}) != run_key([["a"], ["b"]], {}, {}, {})


def test_file_hash_follows_content_and_names_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n")
    first = file_hash(path)
    path.write_text("a: 2\n")
    assert file_hash(path) != first
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        file_hash(tmp_path / "none.yaml")
