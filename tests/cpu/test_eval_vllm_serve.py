"""The trial of `vllm serve` writes a prompt, prints its commands, and keeps what eval tpot measured."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from eval_fakes import VLLM_HOOK_LINE, serving, write_program

import eval.vllm_serve_trial as trial
from eval.common.vllm_model import VOCABULARY


def _options(work: Path, *more: str) -> list[str]:
    return ["--work", str(work), "--out", str(work / "out.json"), "--length", "300", *more]


def test_graphs_are_captured_for_what_can_run() -> None:
    assert trial.graph_sizes(1) == [1]
    assert trial.graph_sizes(8) == [1, 2, 4, 8]
    assert trial.graph_sizes(12) == [1, 2, 4, 8, 12]


def test_prompt_is_token_ids_of_the_model(tmp_path: Path) -> None:
    trial.write_prompt(tmp_path / "a.jsonl", 300)
    trial.write_prompt(tmp_path / "b.jsonl", 300)
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    tokens = json.loads(line)["input_ids"]
    assert len(tokens) == 300 and min(tokens) >= 0 and max(tokens) < VOCABULARY


def test_dry_run_prints_every_command_and_writes_no_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "python3 -m vllm.entrypoints.cli.main"
    assert trial.main(_options(tmp_path, "--dry-run", "--repetitions", "1", "--program", program)) == 0
    said = capfd.readouterr().out
    servers = [
        shlex.split(line.partition(" &  #")[0]) for line in said.splitlines() if line.startswith("env ")
    ]
    assert [words[:6] for words in servers] == [
        ["env", f"GVR_TOPK_DISABLE={disable}", "python3", "-m", "vllm.entrypoints.cli.main", "serve"]
        for disable in (1, 0)
    ]
    for words in servers:
        assert "--skip-tokenizer-init" in words
        for name in ("--attention-config", "--kernel-config", "--compilation-config"):
            assert isinstance(json.loads(words[words.index(name) + 1]), dict)
    assert not (tmp_path / "plain").exists() and not (tmp_path / "out.json").exists()


def test_without_gpu_or_vllm_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "missing", lambda: ["wanted a CUDA GPU, got none"])
    assert trial.main(_options(tmp_path)) == 2
    assert not (tmp_path / "prompt.jsonl").exists()


def _run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, *more: str
) -> tuple[int, dict[str, Any] | None]:
    with serving() as free:
        port = str(free.server_address[1])
    program = write_program(tmp_path / "bin", "vllm", body)
    monkeypatch.setattr(trial, "missing", list)
    monkeypatch.setattr(trial, "write_model", lambda *arguments: None)
    work = tmp_path / "work"
    options = _options(work, "--program", str(program), "--port", port, "--repetitions", "1", *more)
    status = trial.main([*options, "--concurrency", "2", "--requests", "3", "--output-tokens", "4"])
    out = work / "out.json"
    return status, json.loads(out.read_text()) if out.is_file() else None


def test_result_has_both_sides_and_no_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fakes = Path(__file__).with_name("eval_fakes.py")
    body = f"import runpy\nrunpy.run_path({str(fakes)!r}, run_name='__main__')\n"
    status, result = _run(tmp_path, monkeypatch, body)
    assert status == 0 and result is not None, capfd.readouterr()
    assert result["format"] == "gvr_topk.vllm_serve/1" and result["setup"]["concurrency"] == 2
    assert [run["labels"]["variant"] for run in result["runs"]] == ["off", "on"]
    assert result["runs"][1]["hook_lines"] == [VLLM_HOOK_LINE]
    assert {run["figures"]["output_tokens"] for run in result["runs"]} == {4.0}
    assert result["rows"][0]["verdict"] == "open" and result["failures"] == []
    assert str(tmp_path / "work") not in json.dumps(result)
    assert "commit" in result["machine"]


def test_log_of_a_server_that_does_not_start_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "print('EngineCore: ImportError: no libfoo')\nprint('x\\n' * 60)\nraise SystemExit(1)\n"
    status, result = _run(tmp_path, monkeypatch, body)
    assert status == 3 and result is not None and len(result["failures"]) == 2
    assert "errors in off_1.server.log:\n  EngineCore: ImportError: no libfoo" in capfd.readouterr().out


def test_serial_number_of_the_gpu_is_left_out(tmp_path: Path) -> None:
    options = trial.parse_args(_options(tmp_path))
    results = {"runs": [{"build": {"GPU": "NVIDIA H200, GPU-1a2b-3c, 570.1", "python": sys.executable}}]}
    made = trial.report(results, argparse.Namespace(**vars(options)))
    assert made["runs"][0]["build"]["GPU"] == "NVIDIA H200, 570.1"
