"""What stands in the place of an op. Nothing is imported for it: top-k has to do without the sampler."""

from __future__ import annotations

from typing import Any


class OpInPlace:
    """Stands in the place of an op, whose attributes it has; a subclass can be called."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
