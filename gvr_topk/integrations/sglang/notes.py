"""Log lines of the integration, each once, and hooks that fall back to SGLang's own function."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

LOGGER = logging.getLogger("gvr_topk.integrations.sglang")


class NotServedError(Exception):
    """A call that this package leaves to SGLang; the message says why."""


class Notes:
    """One log line for each reason, however often it comes up."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str, *, level: int = logging.INFO, key: str | None = None) -> None:
        """Log a line, unless one with the same `key` (default: the same `text`) was logged before."""
        key = text if key is None else key
        if key not in self._said:
            self._said.add(key)
            LOGGER.log(level, "gvr_topk in SGLang: %s", text)

    def failed(self, what: str, error: Exception) -> None:
        """Log an error once for each message; what follows ", got " may differ and makes no new message."""
        message = f"{what}: {type(error).__name__}: {error}"
        self.say(message, level=logging.WARNING, key=message.partition(", got ")[0])


def around(name: str, serve: Callable[..., Any], notes: Notes) -> Callable[..., Any]:
    """Make an AROUND hook: `serve` computes the call, and SGLang's function the calls that `serve` refuses.

    An engine must not fail because of this package, so every exception of `serve` leads to SGLang's function.

    Parameters
    ----------
    name : str
        What the log calls the hooked function.
    serve : callable
        Takes the arguments of the hooked function. Raises `NotServedError` to leave the call to SGLang.
    notes : Notes

    Returns
    -------
    callable
        ``hook(original, *args, **kwargs)``.
    """

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = serve(*args, **kwargs)
        except NotServedError as reason:
            notes.say(f"{name} left to SGLang: {reason}")
        except Exception as error:
            notes.failed(f"{name} left to SGLang", error)
        else:
            notes.say(f"on: {name}")
            return result
        return original(*args, **kwargs)

    return hook
