"""A function of an engine that one of our ops replaces call by call; the original stays as the fallback."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from gvr_topk.contract import DTYPES
from gvr_topk.integrations._kit.counters import ORIGINAL, OURS
from gvr_topk.integrations._kit.log import Say
from gvr_topk.integrations._kit.switch import Switch
from gvr_topk.integrations._kit.verify import Verifier
from gvr_topk.sampling import LIMIT_WORDS

Call = TypeVar("Call")


def readable(logits: Tensor) -> bool:
    """Whether our ops take these logits."""
    return logits.dim() == 2 and logits.stride(1) == 1 and logits.dtype in DTYPES


def empty_limits(logits: Tensor) -> Tensor:
    """Allocate what `sample` writes of the rows for `apply_limits_` and `renorm`."""
    return torch.empty((len(logits), LIMIT_WORDS), dtype=torch.int32, device=logits.device)


class Replacement(ABC, Generic[Call]):
    """Serves calls of one function in one process of an engine."""

    arguments: ClassVar[Callable[..., Any]]  # a tuple of them by name, in their order
    reason: ClassVar[str]  # counted for calls that our op computes; the reasons of all others begin with it
    kind: ClassVar[str]  # what the log calls these calls, as in `Switch`
    own: ClassVar[str] = ""  # and the engine's own function

    def __init__(self, engine: str, count: Callable[[str, str], None], say: Say) -> None:
        self.verifier = Verifier.if_asked_for(engine, say)
        self.say = say
        self._count = count
        self._switch = Switch(engine, say, self.kind, self.own)

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function."""

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # what is traced is called without Python
                return original(*args, **kwargs)
            results = self.results(lambda: original(*args, **kwargs), args, kwargs)
            return original(*args, **kwargs) if results is None else results

        return replaced

    def results(self, original: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute one call with our op; None when the engine has to do it, and the reason is counted."""
        reason = self._switch.failed
        if not reason:
            try:
                call = self.read(args, kwargs)
                reason = self.reason_against(call)
                if not reason:
                    results = self.run(call, original)
            except Exception as error:  # the original can still compute
                reason = self._switch.fail(error)
        if reason:
            self._count(ORIGINAL, f"{self.reason} {reason}")
            return None
        self._count(OURS, self.counted(call))
        if not self._switch.announced:  # pragma: no mutate: `announce` asks, too; here it saves a function
            self._switch.announce(lambda: self.announcement(call))
        return results

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Sort the arguments of a call."""
        call: Call = self.arguments(*args, **kwargs)
        return call

    @abstractmethod
    def reason_against(self, call: Call) -> str:
        """Return why the engine has to do a call; empty when our op can. It must not wait for the GPU."""

    @abstractmethod
    def run(self, call: Call, original: Callable[[], Any]) -> Any:
        """Compute a call, and compare it with the original if that is asked for."""

    def counted(self, call: Call) -> str:
        """Return the reason that is counted for a call that our op has computed."""
        return self.reason

    @abstractmethod
    def announcement(self, call: Call) -> str:
        """Say what is on, at the first call."""
