"""After an error the engine serves all calls of that kind; in vLLM's merge of ranks an error ends it."""

from __future__ import annotations

from collections.abc import Callable

from gvr_topk.integrations._kit.log import Say, one_line


class Switch:
    """Says whether the calls of one kind are ours.

    The log calls these calls `kind`, which is empty for the main kind of an engine, and the engine's function
    for them `own`, by default its top-k of that kind. `failed` is the reason for the counters once our op has
    failed, and empty before; `announced` says whether the log knows that the calls are ours.
    """

    def __init__(self, engine: str, say: Say, kind: str = "", own: str = "") -> None:
        self.failed = ""
        self._engine = engine
        self._say = say
        self._kind = kind
        self._own = own or f"{kind} top-k".strip()
        self.announced = False

    def fail(self, error: Exception, what: str = "fell back") -> str:
        """Leave all further calls to the engine; return the reason for the counters.

        The log calls that `what`.
        """
        self.failed = f"error: {type(error).__name__}"
        where = f"{self._kind}: " if self._kind else ""
        self._say(
            "warning",
            f"{what}: {where}{one_line(error)}. {self._engine}'s own {self._own} serves from now on",
        )
        return self.failed

    def announce(self, text: Callable[[], str]) -> None:
        """Log once, at the first call that was computed, that these calls are ours."""
        if not self.announced:
            self.announced = True
            self._say("info", f"on: {text()}")
