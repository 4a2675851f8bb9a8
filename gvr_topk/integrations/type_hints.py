"""Looking into type annotations; standard library alone, so that every supported Python can be asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin


def classes_in(annotation: Any, base: type[Any]) -> Iterator[type[Any]]:
    """Subclasses of `base` anywhere in an annotation."""
    # Python 3.10 takes list[int] for a type, and an abstract base such as BaseModel refuses it as no class.
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, base):
        yield annotation
    for inner in get_args(annotation):
        yield from classes_in(inner, base)
