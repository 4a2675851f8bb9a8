"""Runs one command, and ends its whole process group when the pipe on standard input closes.

    python guard.py SECONDS COMMAND...

An engine that outlives an evaluation holds GPU memory and would be measured together with the next run. The
evaluation holds the other end of the pipe, which closes whatever ends it, SIGKILL too. The command's group is
ended with SIGTERM and ``SECONDS`` later with SIGKILL; its workers are ended when the command has ended by
itself, too. The exit status is the command's, 128 and the number of a signal that killed it. Only the
standard library is used: the script runs isolated, with ``python -I -S``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys


def main() -> None:
    # Other descriptors pass through: the lock of the run store is held for as long as the command runs.
    process = subprocess.Popen(
        sys.argv[2:], stdin=subprocess.DEVNULL, close_fds=False, start_new_session=True
    )
    select.select([sys.stdin, os.pidfd_open(process.pid)], [], [])
    if process.poll() is None:
        signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(float(sys.argv[1]))
    signal_group(process, signal.SIGKILL)  # workers that outlive their parent hold GPU memory
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in the group
        os.killpg(process.pid, number)


if __name__ == "__main__":
    main()
