"""``python -m eval``: every program of the folder is a verb, says what it needs, and ends in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

from eval.__main__ import main
from eval.common.machine import without_folders, write_json
from eval.common.status import InputError
from eval.report.provenance import MACHINE_CODE, RECORD_FORMAT
from eval.report.readme import GPU
from eval.verbs import VERBS

ROOT = Path(__file__).resolve().parents[2]
EVAL = ROOT / "eval"
BENCH = f"eval/results/{GPU}/bench.json"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")


def test_every_program_is_a_verb() -> None:
    """But for the compiler of a peer, and for what verbs start in processes of their own."""
    programs = {
        f"{path.parent.name}.{path.stem}"
        for path in EVAL.glob("*/*.py")
        if re.search(r"^def main\(", path.read_text(), re.M)
    }
    others = {"bench.cudnn_topk", "campaigns.guard", "engines.vllm_engine"}
    assert {verb.module for verb in VERBS.values()} == programs - others


def test_list_of_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert main(["--help"]) == 0 and capsys.readouterr().out == listed
    assert max(map(len, listed.splitlines())) <= 100 and "2     wrong use" in listed
    text = " ".join(listed.split())
    for name, verb in VERBS.items():
        assert f"  {name} " in listed and f"{verb.summary} (GPU: {verb.gpu})" in text


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("verb: wanted one of bench, ") and "'measure'" in said.err


@pytest.mark.parametrize("name", VERBS)
def test_help_has_options_and_changes_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (ROOT / "README.md").read_bytes(), (ROOT / "docs" / "performance.md").read_bytes()
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"Usage: python -m eval {name} [OPTIONS]" in said and "--help" in said
    assert ((ROOT / "README.md").read_bytes(), (ROOT / "docs" / "performance.md").read_bytes()) == before


def test_a_status_that_a_verb_returns_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for status in (None, 0, 1, 3):

        def ends(status: int | None = status) -> int | None:
            return status

        monkeypatch.setattr("eval.report.readme.main", lambda: ends())
        assert main(["readme"]) == (status or 0)


@NO_GPU
@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.gpu.startswith("one")])
def test_a_missing_gpu_is_no_result(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    said = capsys.readouterr()
    assert "MISMATCH" not in said.out + said.err
    assert "wanted a CUDA GPU, got none" in " ".join(said.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["compare", "nowhere.json"], "wanted a result file, got"),
        (["compare", "pyproject.toml"], "wanted a result file, got"),
        (["compare", "eval/results/verdict_simulation.json"], "wanted format 'gvr_topk.bench_kernels"),
        (["decode", "--device", "cpu", "--trace", "nowhere.npz"], "nowhere.npz: wanted an .npz trace file"),
        (["readme", "--chekc"], "No such option: --chekc"),
    ],
)
def test_bad_input_ends_in_one_message_and_exit_code_2(arguments: list[str], text: str) -> None:
    command = [sys.executable, "-m", "eval", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr and text in " ".join(re.sub("[│╭╮╰╯─]", "", done.stderr).split())


def test_modules_have_no_second_entry() -> None:
    """Other files that run by themselves are started by a verb in a process of their own."""
    files = [*EVAL.glob("*.py"), *EVAL.glob("*/*.py")]
    entries = {file.name for file in files if re.search(r"^if __name__ == ", file.read_text(), re.M)}
    started = {"guard.py", "probe_build.py", "vllm_engine.py"}
    compilers = {"cudnn_topk.py"}  # makes a library for `--baseline-dir`, in an environment of its own
    assert entries == {"__main__.py", *started, *compilers}


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "eval", "bench", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bench: wanted the package typer, got none: pip install -e '.[eval]'\n"


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
        (_raise(InputError("prompt: wrong")), 2, "error: prompt: wrong\n"),
        (_raise(PermissionError(13, "Permission denied", "/x")), 4, "Permission denied: '/x'\n"),
        (_raise(KeyError("figures")), 4, "KeyError: 'figures'\n"),
        (_raise(KeyboardInterrupt()), 130, "interrupted\n"),
        (_signalled(signal.SIGTERM), 143, ""),
        (_signalled(signal.SIGHUP), 129, ""),
        (_raise(typer.Exit(1)), 1, ""),
        (_raise(typer.Exit(0)), 0, ""),
    ],
)
def test_every_ending_has_its_status(
    act: Callable[[], None],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr("eval.report.readme.main", lambda: act())
    assert main(["readme"]) == status
    assert capsys.readouterr().err.endswith(said)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before


def test_a_second_signal_does_not_interrupt_the_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    def act() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            cleaned.append(True)

    monkeypatch.setattr("eval.report.readme.main", lambda: act())
    assert main(["readme"]) == 143 and cleaned


def test_nohup_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr("eval.report.readme.main", lambda: os.kill(os.getpid(), signal.SIGHUP))
    try:
        assert main(["readme"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_has_gone_makes_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "eval"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_results_name_their_commit() -> None:
    """Figures belong to a commit, so that a reader can tell which kernels they are of."""
    files = sorted((EVAL / "results").rglob("*.json"))
    assert len(files) > 8
    for file in files:
        commits = re.findall(r'"commit": "([0-9a-f]{7,40})"', file.read_text())
        assert commits or file == MACHINE_CODE, file  # of which no build may be recorded
        assert isinstance(json.loads(file.read_text()), dict)


def test_gpu_results_lie_in_the_folder_of_their_gpu() -> None:
    for file in (EVAL / "results").rglob("*.json"):
        devices = set(re.findall(r'"device": "NVIDIA ([A-Z0-9]+)', file.read_text()))
        assert devices <= {file.parent.name.upper()}, file


def test_results_hold_no_path_of_one_machine() -> None:
    for file in (path for path in (EVAL / "results").rglob("*") if path.is_file() and path.suffix != ".png"):
        text = file.read_text()
        assert without_folders(text) == text, file


def test_results_are_written_without_folders_of_the_machine(tmp_path: Path) -> None:
    given = {"command": f"eval x --out /tmp/o/x.json {ROOT}/eval", "of": ["/root/vc", "a/tmp/b", 3, None]}
    write_json(tmp_path / "result.json", given | {"machine": {"python": "/home/me/.venv/bin/python3"}})
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "command": "eval x --out WORK/x.json ./eval",
        "of": ["WORK/vc", "a/tmp/b", 3, None],
        "machine": {"python": "WORK/python3"},
    }
    write_json(tmp_path / "job.json", given)  # what another process is to read keeps its folders
    assert json.loads((tmp_path / "job.json").read_text()) == given


def test_recorded_machine_code_is_that_of_measured_commits_or_the_newest() -> None:
    recorded = json.loads(MACHINE_CODE.read_text())
    assert recorded["format"] == RECORD_FORMAT
    older = recorded["builds"][:-1]
    measured = " ".join(file.read_text() for file in (EVAL / "results").glob("*/*.json"))
    assert [build["commit"] for build in older if f'"{build["commit"]}"' not in measured] == []
