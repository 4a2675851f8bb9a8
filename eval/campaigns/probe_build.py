"""Prints as JSON what is installed for the Python that runs it; imports none of the packages.

`eval.campaigns.evidence` runs this file with the interpreter of the engine's programs: ``ENGINE_PACKAGE``.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path


def probe() -> None:
    sys.path.pop(0)  # this file's folder, whose modules are none of the interpreter's
    found = {}
    for name in (sys.argv[1], "gvr_topk"):
        try:
            distribution = importlib.metadata.distribution(name)
            # The list of a distribution's files names each with its own hash.
            record = distribution.read_text("RECORD")
            found[name] = distribution.version
            found[f"{name} files"] = (record and hashlib.sha256(record.encode()).hexdigest()) or "unknown"
        except importlib.metadata.PackageNotFoundError:
            found[name] = found[f"{name} files"] = "absent"
    spec = importlib.util.find_spec("gvr_topk")
    if spec is not None and spec.submodule_search_locations:
        # All files, libraries included: the list of an editable install names none of them.
        folder, digest = Path(next(iter(spec.submodule_search_locations))), hashlib.sha256()
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
        found["gvr_topk files"] = digest.hexdigest()
    print(json.dumps(found))


if __name__ == "__main__":
    probe()
