"""Run a command with its output in a log file, and say precisely what went wrong when it fails."""

from __future__ import annotations

import http.client
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

TAIL_LINES = 40
"""Lines of a log shown with a failure: a Python traceback of a worker, and what led to it."""

TAIL_BYTES = 64 * 1024
"""Most of a log that is read for its tail; logs of a serving run reach gigabytes."""

TERMINATE_GRACE_S = 15.0
"""Time between SIGTERM and SIGKILL: MPI workers release GPU memory in it."""

GUARD = Path(__file__).with_name("guard.py")


class CommandError(RuntimeError):
    """A command could not be started, failed, or ran out of time.

    The message holds the command as it can be pasted into a shell, the reason and the tail of the log.

    Attributes
    ----------
    command : tuple of str
    reason : str
        For example ``exit status 3`` or ``no end after 60 s``.
    log : Path or None
    """

    def __init__(self, command: Sequence[str], reason: str, log: Path | None = None) -> None:
        self.command = tuple(command)
        self.reason = reason
        self.log = log
        lines = [f"command failed: {reason}", f"  command: {shlex.join(command)}"]
        if log is not None:
            lines.append(quote_tail(log, "last lines of its log"))
        super().__init__("\n".join(lines))


def log_header(command: Sequence[str]) -> bytes:
    """What stands in a log before the output of its command."""
    return f"$ {shlex.join(command)}\n".encode()


def output_lines(log: Path, command: Sequence[str] | None) -> Iterator[str]:
    """Lines that a command printed, from its log.

    The header is skipped by its length and not by its line: an argument may hold a newline, and a word in an
    argument must never be taken for something that the command said.

    Parameters
    ----------
    log : Path
    command : sequence of str or None
        What `run_command` or `running_server` was given; None for a log that another program began.
    """
    with log.open("rb") as stream:
        if command is not None:
            stream.seek(len(log_header(command)))
        for line in stream:
            yield line.decode("utf-8", errors="replace")


def read_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """Return the last `lines` lines of a file; empty when there is no such file."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def quote_tail(path: Path, title: str) -> str:
    """The tail of a log as an indented block of a message."""
    return "\n".join([f"  {title} {path}:", *(f"  | {line}" for line in read_tail(path).splitlines())])


def run_command(
    command: Sequence[str],
    log: Path,
    *,
    timeout_s: float | None = None,
    hold: Sequence[int] = (),
) -> float:
    """Run `command` to its end, with stdout and stderr in `log`.

    The command and all its children end with this process, whatever ends it (see `eval.campaigns.guard`).

    Parameters
    ----------
    command : sequence of str
    log : Path
        Overwritten; its folder is created.
    timeout_s : float, optional
        Seconds after which the command and all its children are ended.
    hold : sequence of int
        File descriptors that stay open for as long as the command runs, such as a lock's.

    Returns
    -------
    float
        Seconds the command ran.

    Raises
    ------
    CommandError
        Not found, not executable, exit status other than 0, or out of time.
    """
    started = time.monotonic()
    process = _start(command, log, hold)
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        raise CommandError(command, f"no end after {timeout_s:g} s, ended by us", log) from None
    finally:
        _end(process)  # also on KeyboardInterrupt and when a signal ends this process
    if status != 0:
        raise CommandError(command, describe_status(status), log)
    return time.monotonic() - started


@contextmanager
def running_server(
    command: Sequence[str],
    log: Path,
    ready_url: str,
    *,
    start_timeout_s: float,
    poll_s: float = 1.0,
    hold: Sequence[int] = (),
) -> Iterator[None]:
    """Start a server, wait until `ready_url` answers 200, and end it with the block.

    Raises
    ------
    CommandError
        Something already answers at `ready_url`, or the server exits or stays silent for
        `start_timeout_s` seconds.
    """
    if http_status(ready_url) is not None:
        raise CommandError(command, f"something already answers at {ready_url}; choose another port")
    process = _start(command, log, hold)
    try:
        deadline = time.monotonic() + start_timeout_s
        while http_status(ready_url) != http.client.OK:
            status = process.poll()
            if status is not None:
                raise CommandError(command, f"{describe_status(status)} before it was ready", log)
            if time.monotonic() > deadline:
                raise CommandError(command, f"{ready_url} not ready after {start_timeout_s:g} s", log)
            time.sleep(poll_s)
        yield
    finally:
        _end(process)


def http_status(url: str, timeout_s: float = 5.0) -> int | None:
    """Status of a GET on an ``http://`` address; None when nothing answers.

    Unlike ``urllib`` this never goes through a proxy of the environment.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def describe_status(status: int) -> str:
    """Name an exit status the way a shell user reads it."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _start(command: Sequence[str], log: Path, hold: Sequence[int]) -> subprocess.Popen[bytes]:
    if shutil.which(command[0]) is None:
        reason = f"{command[0]} not found; is the engine installed and on PATH?"
        if Path(command[0]).is_file():
            reason = "cannot start: Permission denied"
        raise CommandError(command, reason)
    log.parent.mkdir(parents=True, exist_ok=True)
    guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(TERMINATE_GRACE_S)]
    with log.open("wb") as stream:
        stream.write(log_header(command))
        stream.flush()
        return subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(hold),
            start_new_session=True,  # Ctrl-C at the terminal is ours to handle, not the guard's
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the guard end everything it started, and wait until it has."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait()
