"""Each planned run is done once, kept whole, and its failure is its own; every ending has its exit status."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from eval_fakes import HOOK_LINE

from eval.campaigns.reports import ReportError
from eval.campaigns.runs import Limits, Outcome, PlannedRun, Server, clean_exits, describe_plan, execute
from eval.campaigns.store import RunRecord, RunStore, StoreBusy, StoreError, run_key
from eval.common.options import InputError
from gvr_topk.config import ConfigError, Problem

Said = pytest.CaptureFixture[str]


def _run(
    folder: Path, repetition: int = 1, variant: str = "on", printed: str = HOOK_LINE, **more: Any
) -> PlannedRun:
    return PlannedRun(
        labels={"task": "t", "variant": variant, "repetition": repetition, "order": "abba"},
        command=more.pop("command", ("/bin/echo", printed)),
        log=folder / f"{variant}_{repetition}.log",
        inputs={"x.yaml": "1"},
        measure=more.pop("measure", lambda text: {"score": float(len(text))}),
        **more,
    )


def _execute(folder: Path, *runs: PlannedRun, keep_going: bool = True) -> Outcome:
    with RunStore(folder / "runs.jsonl") as store:
        return execute(runs, store, Limits(20, 5, keep_going))


def test_a_run_is_recorded_and_not_done_again(tmp_path: Path, capsys: Said) -> None:
    run = _run(tmp_path, build={"gvr_topk": "0.1.0"})
    (record,) = _execute(tmp_path, run).records
    assert record.figures == {"score": len(HOOK_LINE) + 1}
    assert (record.key, record.status, record.build) == (run.key, "done", {"gvr_topk": "0.1.0"})
    assert record.hook_lines == [HOOK_LINE] and record.seconds >= 0
    name = "[1/1] task t, variant on, repetition 1"
    assert capsys.readouterr().out == f"{name}: running, log {run.log}\n"
    assert _execute(tmp_path, run).records == [record]
    assert capsys.readouterr().out == f"{name}: done before\n"
    assert _run(tmp_path, build={"gvr_topk": "0.2.0"}).key != run.key


def test_one_failure_does_not_end_the_others(tmp_path: Path, capsys: Said) -> None:
    def broken(text: str) -> dict[str, Any]:
        raise ReportError("no score")

    def faulty(text: str) -> dict[str, Any]:
        raise TypeError("null")

    false = ("/bin/false",)
    outcome = _execute(
        tmp_path, _run(tmp_path, 1, command=false), _run(tmp_path, 2, measure=broken), _run(tmp_path, 4)
    )
    assert [record.labels["repetition"] for record in outcome.records] == [4]
    assert "exit status 1" in outcome.failures[0] and "exit status 0, but no score" in outcome.failures[1]
    assert not outcome.faulty and "no score" in capsys.readouterr().out
    outcome = _execute(tmp_path, _run(tmp_path, 3, measure=faulty))
    assert outcome.faulty and "the evaluation script itself failed: TypeError: null" in outcome.failures[0]
    outcome = _execute(tmp_path, _run(tmp_path, 3, measure=lambda _: {"score": math.nan}))
    assert outcome.faulty and outcome.records == []
    stopped = _execute(tmp_path, _run(tmp_path, 5, command=false), _run(tmp_path, 6), keep_going=False)
    assert stopped.records == [] and "stopped; the same command goes on" in capsys.readouterr().out


@pytest.mark.parametrize(("variant", "printed"), [("on", "plain"), ("off", HOOK_LINE)])
def test_a_run_without_evidence_fails(tmp_path: Path, variant: str, printed: str) -> None:
    outcome = _execute(tmp_path, _run(tmp_path, variant=variant, printed=printed))
    assert outcome.records == [] and "heuristic top-k was on" in outcome.failures[0]


def test_another_log_is_evidence_and_the_command_line_is_not(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(HOOK_LINE + "\n")
    outcome = _execute(tmp_path, _run(tmp_path, printed="plain", other_log=tmp_path / "server.log"))
    assert outcome.failures == [] and outcome.records[0].hook_lines == [HOOK_LINE]
    assert len(_execute(tmp_path, _run(tmp_path, 2, command=("/bin/true", f"x\n{HOOK_LINE}"))).failures) == 1


def test_files_are_written_and_an_older_report_is_removed(tmp_path: Path) -> None:
    report, prompt = tmp_path / "deep" / "report.json", tmp_path / "in" / "prompt"
    report.parent.mkdir()
    report.write_text("old")
    run = _run(
        tmp_path,
        report=report,
        files={prompt: "é"},
        measure=lambda _: {"old": float(report.exists()), "length": float(len(prompt.read_text()))},
    )
    assert _execute(tmp_path, run).records[0].figures == {"old": 0.0, "length": 1.0}


def test_plan_as_a_shell_script(tmp_path: Path) -> None:
    server = Server(("serve", "a b"), "http://127.0.0.1:1/health", tmp_path / "s.log")
    run = _run(tmp_path, server=server)
    assert run.commands == [["serve", "a b"], list(run.command)] and _run(tmp_path).commands == [
        list(run.command)
    ]
    lines = describe_plan([run], RunStore(tmp_path / "runs.jsonl")).splitlines()
    assert lines[:2] == [
        "# task t, variant on, repetition 1",
        "serve 'a b' &  # until http://127.0.0.1:1/health answers 200",
    ]
    last = "runs are to be done, each with a start of the engine:"
    assert lines[-1] == f"# 1 of 1 {last} unknown until one is done"
    done = _run(tmp_path)
    _execute(tmp_path, done)
    runs = tmp_path / "runs.jsonl"
    runs.write_text(re.sub(r'"seconds":[\d.]+', '"seconds":7200', runs.read_text()))
    told = describe_plan([done, run], RunStore(runs))
    assert "(done: will not run again)" in told
    assert told.splitlines()[-1] == f"# 1 of 2 {last} about 2.0 hours"


def _record(key: str, status: str = "done", **more: Any) -> RunRecord:
    return RunRecord(key=key, status=status, **{"labels": {"task": "t"}, "figures": {"score": 1.0}, **more})


@pytest.mark.parametrize(
    ("off", "on", "count"),
    [([1, 2, 3], [1, 2, 3], 3), ([3, 1, 2], [1, 2], 2), ([1, 3, 4], [1, 2, 3, 4], 1), ([2], [1, 2], 0)],
)
def test_repetitions_behind_a_gap_wait(off: list[int], on: list[int], count: int) -> None:
    records = [
        _record(
            f"{task}{side}{index}",
            labels={"task": task, "variant": side, "repetition": index, "order": "abba"},
            figures={"score": float(index)},
        )
        for task, sides in (("t", (off, on)), ("u", ([1], [1])))
        for side, indices in zip(("off", "on"), sides, strict=True)
        for index in indices
    ]
    wanted = tuple(float(index + 1) for index in range(count))
    outcome = Outcome(len(records), records)
    assert outcome.pairs({"task": "t"}, "score") == (wanted, wanted)
    (compared,) = outcome.compare([{"task": "t"}], "score", "abba", 2, lambda score: -score, margins=[1.0])
    assert (compared.on, compared.acceptance_on, compared.decision.repetitions) == (wanted, (), count)


# ---------------------------------------------------------------- the store


def test_finished_runs_are_found_again_and_failed_ones_are_not_done(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    RunStore(path)
    assert list(tmp_path.iterdir()) == []  # reading writes nothing
    with RunStore(path) as store:
        store.append(_record("a", figures={"score": 1.5, "acceptance": None}))
        store.append(_record("b", "failed"))
        assert store.done("a") is not None and store.done("b") is None
    again = RunStore(path)
    assert again.finished() == [_record("a", figures={"score": 1.5, "acceptance": None})]
    assert again.done("b") is None
    with RunStore(path) as store:
        store.append(_record("b"))
    assert RunStore(path).done("b") is not None


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_half_written_line_is_ignored_and_the_next_one_survives(
    tmp_path: Path, cut: int, capsys: Said
) -> None:
    path = tmp_path / "runs.jsonl"
    with RunStore(path) as store:
        store.append(_record("a"))
        store.append(_record("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    with RunStore(path) as store:
        assert store.done("a") is not None
        if cut > 1:  # with only the newline lost the record is whole
            assert store.done("b") is None and store.skipped_lines == [2]
            execute([], store, Limits(1, 1, True))
            assert "unreadable line 2 is left out" in capsys.readouterr().out
        store.append(_record("c"))
    again = RunStore(path)
    assert again.done("a") is not None and again.done("c") is not None


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
    first, last = (json.dumps(_record(key).model_dump()) for key in "ac")
    path.write_text(f"{first}\n{line}\n{last}\n")
    store = RunStore(path)
    assert store.done("a") is not None and store.done("c") is not None
    assert store.skipped_lines == [2]


def test_one_process_at_a_time_and_a_copy_of_the_descriptor_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with RunStore(path) as store:
        copy = os.dup(store.lock)
        with pytest.raises(StoreBusy, match="in use"), RunStore(path):
            pytest.fail("the block must not run")
    with pytest.raises(StoreBusy), RunStore(path):
        pytest.fail("the block must not run")
    os.close(copy)
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


def test_a_store_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"wanted a readable run store, got: Is a directory"):
        RunStore(tmp_path)
    with pytest.raises(StoreError, match="not open"):
        RunStore(tmp_path / "runs.jsonl").append(_record("a"))
    with pytest.raises(ValueError, match="finite number"):
        _record("a", figures={"score": math.nan})


def test_key_follows_command_inputs_labels_and_build() -> None:
    def key(word: str = "b", content: str = "1", repetition: int = 1, version: str = "1.2.1") -> str:
        return run_key(
            [["a", word]], {"x.yaml": content}, {"repetition": repetition}, {"tensorrt_llm": version}
        )

    assert key() == key()
    assert len({key(), key(word="c"), key(content="2"), key(repetition=2), key(version="1.2.2")}) == 5
    assert run_key([["a", "b"]], {}, {}, {}) != run_key([["a"], ["b"]], {}, {}, {})


def test_cases_run_before_belong_to_the_family(tmp_path: Path) -> None:
    labels = {"task": "t", "variant": "on", "repetition": 1, "order": "abba"}
    with RunStore(tmp_path / "runs.jsonl") as store:
        store.append(_record("a", labels=labels))
        store.append(_record("b", labels={**labels, "repetition": 2}))
        assert [store.family(cases) for cases in ([], [{"task": "t"}], [{"task": "u"}])] == [1, 1, 2]


# ---------------------------------------------------------------- endings


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def _signalled(number: int) -> Callable[[], None]:
    def act() -> None:
        try:
            os.kill(os.getpid(), number)
        except Exception:  # as around a single run
            pytest.fail("the signal must pass")

    return act


@pytest.mark.parametrize(
    ("act", "status", "said"),
    [
        (_raise(InputError("prompt: wrong")), 2, "error: prompt: wrong"),
        (_raise(ConfigError([Problem("f", "k", "a", "b")])), 2, "error: f: k: wanted a, got b"),
        (_raise(StoreBusy("in use")), 2, "error: in use"),
        (_raise(StoreError("a folder")), 4, "error: a folder"),
        (_raise(PermissionError(13, "Permission denied", "/x")), 4, "Permission denied: '/x'"),
        (_raise(KeyError("figures")), 4, "KeyError: 'figures'"),
        (_raise(RecursionError("deep")), 4, "the evaluation script itself failed"),
        (_raise(KeyboardInterrupt()), 130, "interrupted; the same command goes on from here"),
        (_signalled(signal.SIGTERM), 143, "ended by SIGTERM"),
        (_signalled(signal.SIGHUP), 129, "ended by SIGHUP"),
        (_raise(typer.Exit(1)), 1, ""),
        (_raise(typer.Exit(0)), 0, ""),
    ],
)
def test_status(act: Callable[[], None], status: int, said: str, capsys: Said) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    with pytest.raises(typer.Exit) as caught, clean_exits():
        act()
    assert caught.value.exit_code == status
    assert said in capsys.readouterr().err
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before


def test_a_second_signal_does_not_interrupt_the_clean_up() -> None:
    cleaned = []

    def act() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            cleaned.append(True)

    with pytest.raises(typer.Exit) as caught, clean_exits():
        act()
    assert caught.value.exit_code == 143 and cleaned


def test_nohup_is_obeyed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with clean_exits():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
