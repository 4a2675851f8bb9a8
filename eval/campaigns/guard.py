"""Runs one command, and ends its whole process group when whoever asked for it is gone.

    python guard.py PID SECONDS COMMAND...

``PID`` is the process that starts this one. An engine that outlives an evaluation holds GPU memory and
would be measured together with the next run. The evaluation script may be killed by SIGKILL, which it
cannot handle, so this process stands between the two: the kernel sends it SIGTERM when its parent dies.
SIGTERM, SIGHUP and SIGINT end the command's group, first with SIGTERM, ``SECONDS`` later with SIGKILL.

The exit status is the command's; a command that a signal killed is imitated by the same signal. Only the
standard library is used: the script runs isolated, with ``python -I -S``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
ENDING = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
CANNOT_START = 126


def main() -> None:
    starter, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    # Blocked signals wait for sigwait below, so that none can come between a start and its record.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING | {signal.SIGCHLD})
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:
        sys.exit(128 + signal.SIGTERM)  # it died before the line above
    try:
        process = subprocess.Popen(
            command,
            close_fds=False,  # the lock of the run store is held for as long as the command runs
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", flush=True)
        sys.exit(CANNOT_START)
    asked_by = 0
    while process.poll() is None and not asked_by:
        number = signal.sigwait(ENDING | {signal.SIGCHLD})
        asked_by = 0 if number == signal.SIGCHLD else number
    if asked_by:
        signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while process.poll() is None and (left := deadline - time.monotonic()) > 0:
            signal.sigtimedwait({signal.SIGCHLD}, left)
    signal_group(process, signal.SIGKILL)  # workers that outlive their parent hold GPU memory
    status = process.wait()
    if asked_by:
        sys.exit(128 + asked_by)
    if status < 0:
        # Python ignores SIGPIPE and a few others, which would keep this process alive.
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -status)
    sys.exit(status)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # nobody is left in the group


if __name__ == "__main__":
    main()
