"""How the evaluation scripts end when something other than a result ends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from eval.common.prompts import InputError
from eval.common.store import StoreError
from gvr_topk.config import ConfigError

WRONG_USE = 2
INTERRUPTED = 130


@contextmanager
def clean_exits() -> Iterator[None]:
    """Turn bad input into one line and exit status 2, and an interrupt into status 130."""
    try:
        yield
    except (InputError, ConfigError, StoreError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(WRONG_USE) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(INTERRUPTED) from None
