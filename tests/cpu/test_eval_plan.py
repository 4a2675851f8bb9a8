"""The loop over planned runs: each is done once, its failure is its own, and its logs are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from eval_fakes import HOOK_LINE

from eval.campaigns.plan import Outcome, PlannedRun, Server, describe_plan, execute, remarks
from eval.campaigns.reports import ReportError
from eval.campaigns.store import RunStore


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


def _execute(folder: Path, *runs: PlannedRun, keep_going: bool = True) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    with RunStore(folder / "runs.jsonl") as store:
        outcome = execute(
            runs, store, timeout_s=20, start_timeout_s=5, keep_going=keep_going, say=said.append
        )
    return outcome, said


def test_a_run_is_recorded_and_not_done_again(tmp_path: Path) -> None:
    run = _run(tmp_path, build={"gvr_topk": "0.1.0"})
    outcome, said = _execute(tmp_path, run)
    (record,) = outcome.records
    assert record["figures"] == {"score": len(HOOK_LINE) + 1}
    assert (record["key"], record["status"], record["build"]) == (run.key, "done", {"gvr_topk": "0.1.0"})
    assert record["hook_lines"] == [HOOK_LINE] and record["seconds"] >= 0 and outcome.failures == []
    assert said == [f"[1/1] task t, variant on, repetition 1: running, log {run.log}"]
    again, said = _execute(tmp_path, run)
    assert again.records == [record] and said == ["[1/1] task t, variant on, repetition 1: done before"]
    assert _run(tmp_path, build={"gvr_topk": "0.2.0"}).key != run.key


def test_one_failure_does_not_end_the_others(tmp_path: Path) -> None:
    def broken(text: str) -> dict[str, Any]:
        raise ReportError("no score")

    def faulty(text: str) -> dict[str, Any]:
        raise TypeError("null")

    runs = [
        _run(tmp_path, 1, command=("/bin/false",)),
        _run(tmp_path, 2, measure=broken),
        _run(tmp_path, 3, measure=faulty),
        _run(tmp_path, 4),
    ]
    outcome, said = _execute(tmp_path, *runs[:2], runs[3])
    assert [record["labels"]["repetition"] for record in outcome.records] == [4]
    assert "exit status 1" in outcome.failures[0] and "exit status 0, but no score" in outcome.failures[1]
    assert not outcome.faulty and any("no score" in line for line in said)
    outcome, _ = _execute(tmp_path, runs[2])
    assert outcome.faulty and "the evaluation script itself failed: TypeError: null" in outcome.failures[0]
    stopped, said = _execute(
        tmp_path, _run(tmp_path, 5, command=("/bin/false",)), _run(tmp_path, 6), keep_going=False
    )
    assert stopped.records == [] and said[-1].startswith("stopped; the same command goes on")


@pytest.mark.parametrize(("variant", "printed"), [("on", "plain"), ("off", HOOK_LINE)])
def test_a_run_without_evidence_fails(tmp_path: Path, variant: str, printed: str) -> None:
    outcome, _ = _execute(tmp_path, _run(tmp_path, variant=variant, printed=printed))
    assert outcome.records == [] and "heuristic top-k was on" in outcome.failures[0]


def test_another_log_and_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(HOOK_LINE + "\n")
    outcome, _ = _execute(tmp_path, _run(tmp_path, printed="plain", other_log=tmp_path / "server.log"))
    assert outcome.failures == [] and remarks(outcome.records).endswith(HOOK_LINE)
    command = ("/bin/true", f"x\n{HOOK_LINE}")
    outcome, _ = _execute(tmp_path, _run(tmp_path, 2, command=command))
    assert len(outcome.failures) == 1 and remarks(outcome.records) == ""


def test_older_reports_are_removed(tmp_path: Path) -> None:
    report = tmp_path / "deep" / "report.json"
    report.parent.mkdir()
    report.write_text("old")
    _execute(
        tmp_path,
        _run(
            tmp_path,
            reports=(report, tmp_path / "none.json"),
            measure=lambda _: {"old": float(report.exists())},
        ),
    )
    (record,) = RunStore(tmp_path / "runs.jsonl").finished()
    assert record["figures"] == {"old": 0.0}


def test_plan_as_a_shell_script(tmp_path: Path) -> None:
    server = Server(("serve", "a b"), "http://127.0.0.1:1/health", tmp_path / "s.log")
    run = _run(tmp_path, server=server)
    assert run.commands == (server.command, run.command) and _run(tmp_path).commands == (run.command,)
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
    runs.write_text(re.sub(r'"seconds": [\d.]+', '"seconds": 7200', runs.read_text()))
    told = describe_plan([done, run], RunStore(runs))
    assert "(done: will not run again)" in told
    assert told.splitlines()[-1] == f"# 1 of 2 {last} about 2.0 hours"


def test_damaged_lines_of_the_store_are_said(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("half\n")
    _, said = _execute(tmp_path, _run(tmp_path))
    assert "unreadable line 1 " in said[0]
