"""Commands are run, timed out and reported as the evaluation scripts promise."""

import contextlib
import shlex
import sys
import time
from pathlib import Path

import pytest
from eval_fakes import address, free_port, gone, serving, write_program

from eval.campaigns.process import CommandError, http_status, run_command, running_server


def _python(code: str) -> list[str]:
    return [sys.executable, "-IS", "-c", code]


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


@pytest.mark.parametrize("timeout_s", [None, 0.8])
def test_children_end_with_the_command(tmp_path: Path, timeout_s: float | None) -> None:
    """Where they outlive it, and where it is ended after its time."""
    child, late = tmp_path / "child", timeout_s is not None
    code = (
        "import subprocess, time; from pathlib import Path\n"
        f"p = subprocess.Popen(['sleep', '60']); Path({str(child)!r}).write_text(str(p.pid))\n"
        f"print('working', flush=True); time.sleep({60 * late})"
    )
    ended = pytest.raises(CommandError, match=r"no end after 0.8 s, ended by us[\s\S]*working")
    started = time.monotonic()
    with ended if late else contextlib.nullcontext():
        run_command(_python(code), tmp_path / "run.log", timeout_s=timeout_s)
    assert time.monotonic() - started < 30
    assert gone(int(child.read_text()))


@pytest.mark.parametrize(
    ("body", "seconds", "said"),
    [
        ("raise SystemExit(4)", 20, "exit status 4 before it was ready"),
        ("import time; time.sleep(60)", 0.5, "not ready after 0.5 s"),
    ],
)
def test_server_that_does_not_get_ready(tmp_path: Path, body: str, seconds: float, said: str) -> None:
    program = write_program(tmp_path, "serve", f"print('loading', flush=True); {body}")
    url = f"http://127.0.0.1:{free_port()}/health"
    with (
        pytest.raises(CommandError, match=rf"{said}[\s\S]*loading"),
        running_server([str(program)], tmp_path / "log", url, start_timeout_s=seconds, poll_s=0.02),
    ):
        pytest.fail("the block must not run")


def test_a_foreign_server_on_the_port_is_not_measured(tmp_path: Path) -> None:
    with (
        serving() as server,
        pytest.raises(CommandError, match="something already answers"),
        running_server(["unused"], tmp_path / "log", f"{address(server)}/health", start_timeout_s=1),
    ):
        pytest.fail("the block must not run")


def test_server_is_ready_in_the_block_and_gone_after(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("eval_fakes.py")), "--port", str(port)]
    url = f"http://127.0.0.1:{port}/health"
    with running_server(command, tmp_path / "log", url, start_timeout_s=20, poll_s=0.02):
        assert http_status(url) == 200
    assert http_status(url) is None
