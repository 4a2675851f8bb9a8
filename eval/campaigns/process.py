"""Run a command with its output in a log file, and say precisely what went wrong when it fails."""

import http.client
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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


def output_lines(log: Path, command: Sequence[str]) -> Iterator[str]:
    """Lines that a command printed, from its log.

    The header is skipped by its length and not by its line: an argument may hold a newline, and a word in an
    argument must never be taken for something that the command said. `command` is what was run.
    """
    with log.open("rb") as stream:
        stream.seek(len(log_header(command)))
        for line in stream:
            yield line.decode("utf-8", errors="replace")


def quote_tail(path: Path, title: str) -> str:
    """The last lines of a log as an indented block of a message; the title alone where there is no log."""
    text = ""
    if path.exists():
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    return "\n".join([f"  {title} {path}:", *(f"  | {line}" for line in text.splitlines()[-TAIL_LINES:])])


def run_command(
    command: Sequence[str], log: Path, *, timeout_s: float | None = None, hold: Sequence[int] = ()
) -> float:
    """Run `command` to its end, with stdout and stderr in `log`.

    The command and all its children end with this process, unless that is killed, and after `timeout_s`. File
    descriptors to `hold`, such as a lock's, stay open for as long as any of them runs. Returns the seconds
    that it ran, or raises `CommandError`, also for an exit status other than 0.
    """
    started = time.monotonic()
    with _running(command, log, hold) as process:
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CommandError(command, f"no end after {timeout_s:g} s, ended by us", log) from None
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

    It is a `CommandError` if something answers there already, or the server exits or is silent for too long.
    """
    if http_status(ready_url) is not None:
        raise CommandError(command, f"something already answers at {ready_url}; choose another port")
    with _running(command, log, hold) as process:
        deadline = time.monotonic() + start_timeout_s
        while http_status(ready_url) != http.client.OK:
            if (status := process.poll()) is not None:
                raise CommandError(command, f"{describe_status(status)} before it was ready", log)
            if time.monotonic() > deadline:
                raise CommandError(command, f"{ready_url} not ready after {start_timeout_s:g} s", log)
            time.sleep(poll_s)
        yield


def http_status(url: str, timeout_s: float = 5.0) -> int | None:
    """Status of a GET on an ``http://`` address, never through a proxy; None when nothing answers."""
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
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return f"killed by {signal.Signals(number).name}"
    return f"exit status {status}"


@contextmanager
def _running(command: Sequence[str], log: Path, hold: Sequence[int]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a process group of its own, and end the group with the block.

    An engine that outlives an evaluation holds GPU memory and would be measured together with the next run.
    """
    if shutil.which(command[0]) is None:
        reason = f"{command[0]} not found; is the engine installed and on PATH?"
        if Path(command[0]).is_file():
            reason = "cannot start: Permission denied"
        raise CommandError(command, reason)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        stream.write(log_header(command))
        stream.flush()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(hold),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # nobody is left in the group
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TERMINATE_GRACE_S)
            os.killpg(process.pid, signal.SIGKILL)  # workers that outlive their parent
        process.wait()
