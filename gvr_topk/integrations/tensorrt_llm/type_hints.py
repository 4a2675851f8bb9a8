"""Find classes in type annotations. Standard library alone, so that every supported Python can run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin


def classes_in(annotation: Any, base: type[Any]) -> Iterator[type[Any]]:
    """Subclasses of `base` anywhere in an annotation."""
    # Python 3.10 takes list[int] for a type, but an abstract base such as BaseModel rejects it in issubclass.
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, base):
        yield annotation
    for inner in get_args(annotation):
        yield from classes_in(inner, base)
