"""Whether the calls of one kind are ours: what the hooks of decode and of prefill have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gvr_topk.integrations.vllm import environment
from gvr_topk.integrations.vllm.environment import Mode
from gvr_topk.integrations.vllm.upstream import AUTO


class Switch:
    """Leaves calls to vLLM where another backend was chosen, and for good once our op has failed.

    Parameters
    ----------
    mode : Mode
        ``ON`` or ``FORCE``.
    say : callable
        Takes a level (``info`` or ``warning``) and a line for the log.
    kind : str
        What the log calls these calls; empty for decode.

    Attributes
    ----------
    failed : str
        Reason for the counters once our op has failed; empty before.
    """

    def __init__(self, mode: Mode, say: Callable[[str, str], None], kind: str = "") -> None:
        self.failed = ""
        self._mode = mode
        self._say = say
        self._kind = kind
        self._announced = False

    def reason_against(self, backend: Any) -> str:
        """Return why vLLM has to do a call for which this backend was chosen; empty if it does not."""
        if self.failed:
            return self.failed
        if backend == AUTO or self._mode is Mode.FORCE:
            return ""
        subject = f"{self._kind}, for " if self._kind else ""
        self._say(
            "info",
            f"not in use: {subject}sparse_indexer_topk_backend is {backend!r} and not {AUTO!r}; "
            f"{environment.ENABLE}=force runs gvr_topk instead",
        )
        return "backend chosen"

    def fail(self, error: Exception) -> str:
        """Leave all further calls to vLLM; return the reason for the counters."""
        self.failed = f"error: {type(error).__name__}"
        where, which = (f"{self._kind}: ", f"{self._kind} ") if self._kind else ("", "")
        self._say(
            "warning", f"fell back: {where}{one_line(error)}. vLLM's own {which}top-k serves from now on"
        )
        return self.failed

    def announce(self, text: Callable[[], str]) -> None:
        """Log once, at the first call that was computed, that these calls are ours."""
        if not self._announced:
            self._announced = True
            self._say("info", f"on: {text()}")


def one_line(error: Exception) -> str:
    """Write an error for the log."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
