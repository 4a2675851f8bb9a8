"""Hooks that fall back to SGLang's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.integrations._kit.log import Say
from gvr_topk.integrations._kit.switch import Switch
from gvr_topk.integrations._kit.verify import Selected, Verifier
from gvr_topk.integrations.sglang.points import ENGINE


class NotServedError(Exception):
    """A call that this package leaves to SGLang; the message says why."""


class Served(NamedTuple):
    """A call that our ops have computed: what the hooked function returns, and what a comparison needs."""

    result: Tensor | None
    selected: tuple[Selected, ...]


def around(
    name: str, serve: Callable[..., Served], say: Say, verifier: Verifier | None = None, own: str = ""
) -> Callable[..., Any]:
    """Make an AROUND hook: `serve` computes the call, and SGLang's function the calls that `serve` refuses.

    To refuse a call, `serve` raises `NotServedError`. An engine must not fail because of this package, so
    every other exception leads to SGLang's function, too. After an error all further calls are SGLang's, but
    not after one of memory, which may fit the next time. The log calls the hooked function `name`, and
    SGLang's own function `own`, as in `Switch`.
    """
    switch = Switch(ENGINE.name, say, name, own)

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not switch.failed:
            try:
                served = serve(*args, **kwargs)
                if verifier is not None:
                    verifier.check(name, lambda: original(*args, **kwargs), *served.selected)
            except NotServedError as reason:
                say("info", f"{name} left to SGLang: {reason}")
            except torch.OutOfMemoryError:  # SGLang rehearses calls to see whether they fit
                say("warning", f"{name} left to SGLang where memory ends")
            except Exception as error:
                switch.fail(error)
            else:
                switch.announce(lambda: name)
                return served.result
        return original(*args, **kwargs)

    return hook
