"""``python -m eval``: every program of the folder is a verb, says what it needs, and ends in one line."""

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
from eval.common.options import require_writable
from eval.common.status import InputError
from eval.report.provenance import MACHINE_CODE, RECORD_FORMAT
from eval.verbs import VERBS, module_of

ROOT = Path(__file__).resolve().parents[2]
EVAL = ROOT / "eval"
PROMPTS = ROOT / "tests" / "data" / "eval_samples" / "prompts.jsonl"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")


def unboxed(text: str) -> str:
    """A message without the box and the line breaks that a terminal's width gives it."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_every_program_is_a_verb() -> None:
    """But for the compilers of peers, and for what verbs start in processes of their own."""
    programs = {
        f"eval.{path.parent.name}.{path.stem}"
        for path in EVAL.glob("*/*.py")
        if re.search(r"^def main\(", path.read_text(), re.M)
    }
    others = {"eval.bench.cudnn_topk", "eval.bench.vllm_merge", "eval.engines.vllm_engine"}
    assert {module_of(name) for name in VERBS} == programs - others


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


@NO_GPU
@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.gpu.startswith("one")])
def test_a_missing_gpu_is_no_result(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    said = capsys.readouterr()
    assert "MISMATCH" not in said.out + said.err
    assert "wanted a CUDA GPU, got none" in unboxed(said.err)


CPU = ("--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["compare", "nofile"], "nofile: wanted a result file, got no such file"),
        (["compare", "pyproject.toml"], "wanted a result file, got no JSON"),
        (["compare", f"{ROOT}/eval/results/verdict_simulation.json"], "wanted format 'gvr_topk.bench"),
        (["readme", "--chekc"], "No such option: --chekc"),
        (["fuzz", "--device", "abacus"], "--device: wanted cuda or cpu, got 'abacus'"),
        (["fuzz", *CPU, "--seconds", "0"], "should be greater than or equal to 0.001"),
        (["fuzz", *CPU, "--seed", "-5"], "should be greater than or equal to 0"),
        (["fuzz", *CPU, "--seed", "100000000000000000000"], "should be less than or equal to"),
        (["host", *CPU, "--calls", "0"], "should be greater than or equal to 1"),
        (["bench", "--traces", "nowhere"], "'nowhere' does not exist"),
        (
            ["tpot", "--model", "m", "--prompts", f"a={PROMPTS}", "--entry", "0", "--mtp", "7"],
            "--mtp: wanted one of 0, 1, 3 (--configs names other configurations), got 7",
        ),
    ],
)
def test_what_would_measure_nothing_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err and text in unboxed(said.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["fuzz", *CPU, "--seconds", "1", "--out"],
        ["host", *CPU, "--out"],
        ["inspect", "--record"],
    ],
)
def test_results_that_cannot_be_written_are_refused_at_once(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([*arguments, str(tmp_path / "file" / "out.json")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    assert f"{arguments[-1]}: wanted a file that can be written, got" in unboxed(said.err)


def test_trying_a_result_file_leaves_it_as_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("before")
    require_writable(old)
    require_writable(new)
    assert old.read_text() == "before" and not new.exists() and new.parent.is_dir()
    with pytest.raises(typer.BadParameter, match=f"got {tmp_path}"):
        require_writable(tmp_path)


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
        (lambda: None, 0, ""),
        (lambda: 3, 3, ""),
        (_raise(typer.Exit(1)), 1, ""),
        (_raise(typer.Exit(0)), 0, ""),
    ],
)
def test_every_ending_has_its_status(
    act: Callable[[], int | None],
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


def test_a_reader_that_has_gone_makes_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "eval"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("file", sorted((EVAL / "results").rglob("*.json")), ids=lambda file: file.name)
def test_results_name_their_commit_and_lie_in_the_folder_of_their_gpu(file: Path) -> None:
    """Figures belong to a commit, so that a reader can tell which kernels they are of."""
    text = file.read_text()
    assert isinstance(json.loads(text), dict)
    # Of machine code no build may be recorded.
    assert re.search(r'"commit": "[0-9a-f]{7,40}"', text) or file == MACHINE_CODE
    assert set(re.findall(r'"device": "NVIDIA ([A-Z0-9]+)', text)) <= {file.parent.name.upper()}


def test_results_hold_no_path_of_one_machine() -> None:
    files = [path for path in (EVAL / "results").rglob("*") if path.is_file() and path.suffix != ".png"]
    assert len(files) > 8
    for file in files:
        assert without_folders(text := file.read_text()) == text, file


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
