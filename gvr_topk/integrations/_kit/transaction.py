"""Changes that are undone together, in reverse order."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

_ABSENT = object()


class Transaction(ExitStack):
    """Records how to undo each change as it is made.

    `rollback` undoes everything, newest first; one failing undo does not keep the others from running.
    """

    rollback = ExitStack.close

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; the undo removes it if the owner only inherited it before."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)

    def wrap(self, module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace what a dotted name means in a module by `wrap` of it."""
        owner_name, _, attribute = name.rpartition(".")
        owner = attrgetter(owner_name)(module) if owner_name else module
        self.set_attribute(owner, attribute, wrap(getattr(owner, attribute)))

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set an entry of a mapping."""
        before = mapping.get(key, _ABSENT)
        mapping[key] = value
        if before is _ABSENT:
            self.callback(mapping.__delitem__, key)
        else:
            self.callback(mapping.__setitem__, key, before)
