"""Changes that are undone together, in reverse order."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from operator import attrgetter
from typing import Any

_ABSENT = object()


class Transaction:
    """Records how to undo each change as it is made."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def add_first(self, undo: Callable[[], None]) -> None:
        """Record an undo that runs after all others, including those recorded later."""
        self._undo.insert(0, undo)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; the undo removes it if the owner only inherited it before."""
        before = vars(owner).get(name, _ABSENT)
        self._change(before, value, partial(setattr, owner, name), partial(delattr, owner, name))

    def wrap(self, module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace what a dotted name means in a module by `wrap` of it."""
        owner_name, _, attribute = name.rpartition(".")
        owner = attrgetter(owner_name)(module) if owner_name else module
        self.set_attribute(owner, attribute, wrap(getattr(owner, attribute)))

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set an entry of a mapping."""
        before = mapping.get(key, _ABSENT)
        self._change(before, value, partial(mapping.__setitem__, key), partial(mapping.__delitem__, key))

    def _change(
        self, before: Any, value: Any, put: Callable[[Any], None], remove: Callable[[], None]
    ) -> None:
        put(value)
        self._undo.append(remove if before is _ABSENT else partial(put, before))

    def rollback(self) -> None:
        """Undo everything, newest first; one failing undo does not keep the others from running."""
        errors = []
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
