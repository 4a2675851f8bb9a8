"""Prints as JSON what is installed for the Python that runs it; imports none of the packages.

`eval.campaigns.identity` runs this file with the interpreter of the engine's programs: ``ENGINE_PACKAGE``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def record_hash(name: str) -> str:
    """Hash of the list of a distribution's files, which names each with its own hash."""
    try:
        text = importlib.metadata.distribution(name).read_text("RECORD")
    except importlib.metadata.PackageNotFoundError:
        return "absent"
    return "unknown" if text is None else hashlib.sha256(text.encode()).hexdigest()


def content_hash(name: str) -> str:
    """Hash of all files of a package, libraries included; an editable install has no list of them."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return "absent"
    digest = hashlib.sha256()
    folder = Path(next(iter(spec.submodule_search_locations)))
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose modules are none of the interpreter's
    engine = sys.argv[1]
    print(
        json.dumps(
            {
                engine: version(engine),
                f"{engine} files": record_hash(engine),
                "gvr_topk": version("gvr_topk"),
                "gvr_topk files": content_hash("gvr_topk"),
            }
        )
    )
