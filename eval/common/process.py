"""Run a command with its output in a log file, and say precisely what went wrong when it fails."""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

TAIL_LINES = 40
"""Lines of a log shown with a failure: a Python traceback of a worker, and what led to it."""

TAIL_BYTES = 64 * 1024
"""Most of a log that is read for its tail; logs of a serving run reach gigabytes."""

TERMINATE_GRACE_S = 15.0
"""Time between SIGTERM and SIGKILL: MPI workers release GPU memory in it."""


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
    env: Mapping[str, str] | None = None,
) -> float:
    """Run `command` to its end, with stdout and stderr in `log`.

    Parameters
    ----------
    command : sequence of str
    log : Path
        Overwritten; its folder is created.
    timeout_s : float, optional
        Seconds after which the command and all its children are ended.
    env : mapping, optional
        Added to the environment.

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
    process = _start(command, log, env)
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _end_group(process)
        raise CommandError(command, f"no end after {timeout_s:g} s, ended by us", log) from None
    finally:
        # Also on KeyboardInterrupt, and for workers that outlive their parent and hold GPU memory.
        _end_group(process)
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
    process = _start(command, log, None)
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
        _end_group(process)


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


def _start(command: Sequence[str], log: Path, env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        stream.write(f"$ {shlex.join(command)}\n".encode())
        stream.flush()
        try:
            return subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # one process group, so that MPI workers end with their parent
            )
        except FileNotFoundError:
            reason = f"{command[0]} not found; is TensorRT-LLM installed and on PATH?"
            raise CommandError(command, reason) from None
        except OSError as error:
            raise CommandError(command, f"cannot start: {error.strerror}") from None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything it started."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        try:
            process.wait(TERMINATE_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # nobody is left in the group
