"""The run store keeps what was finished, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.common.store import RunStore, StoreError, file_hash, run_key


def _record(key: str, status: str = "done", **more: object) -> dict[str, object]:
    return {"key": key, "status": status, **more}


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


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"key": "b"}', "null"])
def test_damaged_line_in_the_middle_is_skipped_and_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(f'{{"key": "a", "status": "done"}}\n{line}\n{{"key": "c", "status": "done"}}\n')
    store = RunStore(path)
    assert store.done("a") is not None and store.done("c") is not None
    assert store.skipped_lines == (2,)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with RunStore(path), pytest.raises(StoreError, match="in use"), RunStore(path):
        pytest.fail("the block must not run")
    with RunStore(path):
        pass


def test_append_needs_the_block(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not open"):
        RunStore(tmp_path / "runs.jsonl").append(_record("a"))


def test_key_follows_command_inputs_and_labels() -> None:
    def key(word: str = "b", content: str = "1", repetition: int = 1) -> str:
        return run_key([["a", word]], {"x.yaml": content}, {"repetition": repetition})

    assert key() == key()
    assert len({key(), key(word="c"), key(content="2"), key(repetition=2)}) == 4
    assert run_key([["a", "b"]], {}, {}) != run_key([["a"], ["b"]], {}, {})


def test_file_hash_follows_content_and_names_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n")
    first = file_hash(path)
    path.write_text("a: 2\n")
    assert file_hash(path) != first
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        file_hash(tmp_path / "none.yaml")
