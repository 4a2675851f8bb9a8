"""Commands are run, timed out and reported as the evaluation scripts promise."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

import pytest
from eval_fakes import address, serving, write_program

from eval.campaigns.process import (
    CommandError,
    http_status,
    run_command,
    running_server,
)


def _python(code: str) -> list[str]:
    return [sys.executable, "-IS", "-c", code]


def test_output_of_both_streams_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "run.log"
    command = _python("import sys; print('out'); print('err', file=sys.stderr)")
    run_command(command, log)
    lines = log.read_text().splitlines()
    assert lines[0] == f"$ {shlex.join(command)}"
    assert sorted(lines[1:]) == ["err", "out"]


def test_failure_names_command_status_and_tail(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    command = _python(
        "print('first'); [print('line', i) for i in range(60)]; print('the cause'); raise SystemExit(3)"
    )
    with pytest.raises(CommandError) as caught:
        run_command(command, log)
    text = str(caught.value)
    assert "exit status 3" in text
    assert shlex.join(command) in text
    assert str(log) in text
    assert text.rstrip().endswith("| the cause")
    assert "| first" not in text  # only the tail


def test_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no-such-tool not found; is the engine installed and on PATH"):
        run_command(["no-such-tool", "--model", "m"], tmp_path / "run.log")


def test_timeout_ends_the_command_and_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time; from pathlib import Path\n"
        f"p = subprocess.Popen(['sleep', '60']); Path({str(child)!r}).write_text(str(p.pid))\n"
        "print('working', flush=True); time.sleep(60)"
    )
    started = time.monotonic()
    with pytest.raises(CommandError, match=r"no end after 0.8 s, ended by us[\s\S]*working"):
        run_command(_python(code), tmp_path / "run.log", timeout_s=0.8)
    assert time.monotonic() - started < 30
    assert _gone(int(child.read_text()))


def test_worker_that_outlives_its_parent_is_ended(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import subprocess; from pathlib import Path\n"
        f"p = subprocess.Popen(['sleep', '60']); Path({str(child)!r}).write_text(str(p.pid))"
    )
    run_command(_python(code), tmp_path / "run.log")
    assert _gone(int(child.read_text()))


def test_server_is_ready_in_the_block_and_gone_after(tmp_path: Path) -> None:
    port = _free_port()
    command = [sys.executable, str(Path(__file__).with_name("eval_fakes.py")), "--port", str(port)]
    url = f"http://127.0.0.1:{port}/health"
    with running_server(command, tmp_path / "log", url, start_timeout_s=20, poll_s=0.02):
        assert http_status(url) == 200
    assert http_status(url) is None


def test_server_that_exits_before_it_is_ready(tmp_path: Path) -> None:
    program = write_program(tmp_path, "serve", "print('no such model'); raise SystemExit(4)")
    url = f"http://127.0.0.1:{_free_port()}/health"
    with (
        pytest.raises(CommandError, match=r"exit status 4 before it was ready[\s\S]*no such model"),
        running_server([str(program)], tmp_path / "log", url, start_timeout_s=20, poll_s=0.02),
    ):
        pytest.fail("the block must not run")


def test_server_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    program = write_program(tmp_path, "serve", "import time; print('loading', flush=True); time.sleep(60)")
    url = f"http://127.0.0.1:{_free_port()}/health"
    with (
        pytest.raises(CommandError, match=r"not ready after 0.5 s[\s\S]*loading"),
        running_server([str(program)], tmp_path / "log", url, start_timeout_s=0.5, poll_s=0.02),
    ):
        pytest.fail("the block must not run")


def test_a_foreign_server_on_the_port_is_not_measured(tmp_path: Path) -> None:
    with (
        serving() as server,
        pytest.raises(CommandError, match="something already answers"),
        running_server(["unused"], tmp_path / "log", f"{address(server)}/health", start_timeout_s=1),
    ):
        pytest.fail("the block must not run")


def _free_port() -> int:
    with serving() as server:
        return int(server.server_address[1])


def _gone(pid: int) -> bool:
    """Whether the process ends within a few seconds (a zombie counts as ended)."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False
