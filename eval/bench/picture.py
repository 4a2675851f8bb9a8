"""The file that a picture was drawn from, by its digest in the picture."""

from __future__ import annotations

import struct
from pathlib import Path

KEY = "Source SHA-256"
"""Keyword of the text in a PNG."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def digest_in(image: Path) -> str | None:
    """Digest of the file that a PNG was drawn from; None where it has none, or is no PNG."""
    data = image.read_bytes() if image.is_file() else b""
    at = len(_SIGNATURE)
    if not data.startswith(_SIGNATURE):
        return None
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"tEXt":
            keyword, _, text = data[at + 8 : at + 8 + length].partition(b"\0")
            if keyword == KEY.encode():
                return text.decode("latin-1")
        at += 12 + length
    return None
