"""Puts together a folder that Hugging Face's `kernels` library loads, from an installed or built package.

    python packaging/make_hf_kernel.py --out out/hf
    python packaging/make_hf_kernel.py --out out/hf --cuda 13.0

The first writes the variant for CPUs, the second also the one for CUDA, named after the CUDA release that the
library was compiled with. `packaging/hf/build.toml` has name and version. Nothing is compiled, and the
package is not imported: the files that the ops need are copied, and no others. Needs Python 3.11.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import importlib.util
import json
import platform
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).resolve().parent / "hf"
PACKAGE = "gvr_topk"
ENTRY = HERE / "torch-ext" / PACKAGE / "__init__.py"
POLICY, CUDA = "libgvr_topk_policy.so", "libgvr_topk_cuda.so"
ARCHS = "90a-real;100f-real;120f-real"
"""GPU architectures of a package that does not say which it was built for."""


def imported_names(source: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports; each names a module or something in a module."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise SystemExit(f"{source}: wanted absolute imports, got a relative one")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def needed_modules(package: Path) -> list[Path]:
    """Return the files of the package that the kernel's entry imports, directly or through one another.

    Raises
    ------
    SystemExit
        One of these files imports something other than the standard library, torch and the package itself.
    """
    found: set[Path] = set()
    pending = [ENTRY]
    while pending:
        source = pending.pop()
        for name in imported_names(source):
            top, *rest = name.split(".")
            if top != PACKAGE:
                if top != "torch" and top not in sys.stdlib_module_names:
                    raise SystemExit(f"{source}: imports {top}, which a kernel must not")
                continue
            module = package / f"{rest[0]}.py" if rest else None
            if module is not None and module.is_file() and module not in found:
                found.add(module)
                pending.append(module)
    return sorted(found)


def variant_name(config: dict[str, Any], backend: str) -> str:
    """Return the name of a variant's folder: release of torch's stable interface, backend and platform."""
    abi = config["torch"]["stable-abi"].replace(".", "")
    return f"torch-stable-abi{abi}-{backend}-{platform.machine()}-{platform.system().lower()}"


def architectures(package: Path) -> list[str]:
    """Return the GPU architectures that the package was built for, as `kernels` writes them: ``9.0a``."""
    built = package / "_build.py"
    archs = runpy.run_path(str(built))["ARCHS"] if built.is_file() else ARCHS
    return [re.sub(r"(\d)([a-z]?)-real", r".\1\2", arch) for arch in archs.split(";")]


def digest(folder: Path) -> dict[str, Any]:
    """Return the SHA-256 of every file, in the form that `kernels` checks."""
    files = {
        str(file.relative_to(folder)): base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    return {"algorithm": "sha256", "files": files}


def write_variant(folder: Path, package: Path, config: dict[str, Any], libraries: tuple[str, ...]) -> None:
    """Write one variant; a folder that is already there is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    shutil.copyfile(ENTRY, folder / "__init__.py")
    for module in needed_modules(package):
        shutil.copyfile(module, folder / module.name)
    for library in libraries:
        shutil.copyfile(package / "lib" / library, folder / "lib" / library)
    general = config["general"]
    backend = {"type": "cuda", "archs": architectures(package)} if CUDA in libraries else {"type": "cpu"}
    metadata = {
        # The name of the module in Python and of its ops in torch.ops. The compiled library registers its ops
        # under this name, and the package's files import one another by this name.
        "id": PACKAGE,
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": backend,
        "digest": digest(folder),
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def assemble(out: Path, package: Path, cuda: str | None) -> list[Path]:
    """Write all variants under ``out/build``.

    Parameters
    ----------
    out : Path
        The kernel's folder; made where it is missing.
    package : Path
        Folder of the package, with the compiled libraries in ``lib``.
    cuda : str, optional
        CUDA release that the library was compiled with, such as ``"13.0"``; None leaves CUDA out.

    Returns
    -------
    list of Path
        The variants' folders.

    Raises
    ------
    SystemExit
        A compiled library is missing.
    """
    config = tomllib.loads((HERE / "build.toml").read_text())
    wanted: dict[str, tuple[str, ...]] = {"cpu": (POLICY,)}
    if cuda is not None:
        major, minor = cuda.split(".")
        wanted[f"cu{major}{minor}"] = (POLICY, CUDA)
    for library in {library for libraries in wanted.values() for library in libraries}:
        if not (package / "lib" / library).is_file():
            hint = "it was built without kernels, see GVR_TOPK_ARCHS" if library == CUDA else "build it first"
            raise SystemExit(f"--package: wanted {library} in {package / 'lib'}, got none: {hint}")
    written = []
    for backend, libraries in wanted.items():
        folder = out / "build" / variant_name(config, backend)
        write_variant(folder, package, config, libraries)
        written.append(folder)
    shutil.copyfile(HERE / "build.toml", out / "build.toml")
    return written


def installed_package() -> Path:
    """Folder of the package in this environment, without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed here; name its folder with --package")
    return Path(spec.origin).parent


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Put together a folder for the `kernels` library.")
    parser.add_argument("--out", type=Path, required=True, help="the kernel's folder")
    parser.add_argument("--package", type=Path, help="folder of the package; default: the installed one")
    parser.add_argument("--cuda", metavar="X.Y", help="CUDA release the library was compiled with")
    options = parser.parse_args(arguments)
    for folder in assemble(options.out, options.package or installed_package(), options.cuda):
        print(folder)


if __name__ == "__main__":
    main()
