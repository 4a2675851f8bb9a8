"""Each planned run is done once and kept whole, and its failure is its own."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from eval_fakes import HOOK_LINE, run_record

from eval.campaigns.reports import ReportError
from eval.campaigns.runs import Limits, Outcome, PlannedRun, Server, execute
from eval.campaigns.store import RunStore
from eval.common.status import InputError

Said = pytest.CaptureFixture[str]


def _run(
    folder: Path, repetition: int = 1, variant: str = "on", printed: str = HOOK_LINE, **more: Any
) -> PlannedRun:
    return PlannedRun(
        labels={"task": "t", "variant": variant, "repetition": repetition},
        command=more.pop("command", ("/bin/echo", printed)),
        log=folder / f"{variant}_{repetition}.log",
        inputs={"x.yaml": "1"},
        measure=more.pop("measure", lambda text: {"score": float(len(text))}),
        **more,
    )


def _execute(folder: Path, *runs: PlannedRun, keep_going: bool = True) -> Outcome:
    with RunStore(folder / "runs") as store:
        return execute(runs, store, Limits(20, 5, keep_going))


def test_a_run_is_recorded_and_not_done_again(tmp_path: Path, capsys: Said) -> None:
    run = _run(tmp_path, build={"gvr_topk": "0.1.0"})
    (record,) = _execute(tmp_path, run).records
    assert record.figures == {"score": len(HOOK_LINE) + 1}
    assert (record.key, record.build) == (run.key, {"gvr_topk": "0.1.0"})
    assert record.hook_lines == [HOOK_LINE] and record.seconds >= 0
    name = "[1/1] task t, variant on, repetition 1"
    assert capsys.readouterr().out == f"{name}: running, log {run.log}\n"
    assert _execute(tmp_path, run).records == [record]
    assert capsys.readouterr().out == f"{name}: done before\n"
    assert _run(tmp_path, build={"gvr_topk": "0.2.0"}).key != run.key


def test_one_failure_does_not_end_the_others(tmp_path: Path, capsys: Said) -> None:
    broken, faulty = (Mock(side_effect=error) for error in (ReportError("no score"), TypeError("null")))
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
    assert outcome.records == [] and "the top-k was on" in outcome.failures[0]


def test_the_command_line_is_no_evidence(tmp_path: Path) -> None:
    assert len(_execute(tmp_path, _run(tmp_path, 2, command=("/bin/true", f"x\n{HOOK_LINE}"))).failures) == 1


@pytest.mark.parametrize(
    ("off", "on", "count"),
    [([1, 2, 3], [1, 2, 3], 3), ([3, 1, 2], [1, 2], 2), ([1, 3, 4], [1, 2, 3, 4], 1), ([2], [1, 2], 0)],
)
def test_repetitions_behind_a_gap_wait(off: list[int], on: list[int], count: int) -> None:
    records = [
        run_record(
            f"{task}{side}{index}",
            {"task": task, "variant": side, "repetition": index},
            {"score": float(index)},
        )
        for task, sides in (("t", (off, on)), ("u", ([1], [1])))
        for side, indices in zip(("off", "on"), sides, strict=True)
        for index in indices
    ]
    wanted = tuple(float(index + 1) for index in range(count))
    outcome = Outcome(len(records), records)
    assert outcome.pairs({"task": "t"}, "score") == (wanted, wanted)
    (compared,) = outcome.compare([{"task": "t"}], "score", 2, lambda score: -score, margins=[1.0])
    assert (compared.on, compared.acceptance_on, compared.decision.repetitions) == (wanted, (), count)


LABELS = {"task": "t", "variant": "on", "repetition": 1}


def test_finished_runs_are_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "runs"
    assert RunStore(folder).finished() == []
    assert list(tmp_path.iterdir()) == []  # reading writes nothing
    record = run_record("a", LABELS, {"score": 1.5, "acceptance": None})
    with RunStore(folder) as store:
        store.add(record)
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.add(run_record("b", LABELS, {"score": math.nan}))
    (folder / "b.json.partial").write_text('{"key": "b"')  # what an interrupted run would leave
    again = RunStore(folder)
    assert again.finished() == [record] and again.done("a") == record and again.done("b") is None


def test_one_process_at_a_time_and_a_copy_of_the_descriptor_holds_the_lock(tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        copy = os.dup(store.lock)
        with pytest.raises(InputError, match="in use"), RunStore(tmp_path):
            pytest.fail("the block must not run")
    with pytest.raises(InputError), RunStore(tmp_path):
        pytest.fail("the block must not run")
    os.close(copy)
    with RunStore(tmp_path):
        pass


def test_key_follows_command_inputs_labels_and_build(tmp_path: Path) -> None:
    run = _run(tmp_path, command=("a", "b"), build={"tensorrt_llm": "1.2.1"})
    others = (
        replace(run, command=("a", "c")),
        replace(run, command=("b",), server=Server(("a",), "", tmp_path)),
        replace(run, inputs={"x.yaml": "2"}),
        replace(run, labels={**run.labels, "repetition": 2}),
        replace(run, build={"tensorrt_llm": "1.2.2"}),
    )
    assert replace(run, labels=dict(reversed(run.labels.items()))).key == run.key
    assert len({each.key for each in (run, *others)}) == 6
