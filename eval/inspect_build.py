"""Read from the built CUDA library what each kernel costs on each GPU architecture.

    python -m eval inspect --json out/build.json --record eval/results/machine_code.json

Reads the library itself, not the compiler's messages, so it says what is shipped. Needs no GPU and no
CUDA toolkit: ``cuobjdump`` comes with the ``test`` extra. Registers are per thread; stack and local
memory, in bytes per thread, hold what did not fit into registers (spills) and arrays indexed at run time;
shared memory is the static part per CTA (the dynamic part is an argument of each launch and not in the
binary); code is the size of the kernel's instructions in bytes. What an architecture never launches is
compiled to a trap there, of few bytes.

``--record`` notes under the commit a digest of all instructions for each architecture. Where sources change
and the digest does not, what was measured on the GPU still holds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from elftools.elf.elffile import ELFFile

from eval.common.machine import describe_machine, write_json
from eval.common.options import require_writable
from eval.common.tables import markdown_table

LIBRARY = Path(__file__).resolve().parent.parent / "gvr_topk" / "lib" / "libgvr_topk_cuda.so"
ARCHITECTURES = ("sm_90a", "sm_100f", "sm_120f")
"""What the library is built for: Hopper, data-centre Blackwell, consumer Blackwell."""

_FATBIN = re.compile(r"^Fatbin elf code:\n=+\narch = (?P<arch>\S+)$", re.MULTILINE)
_FUNCTION = re.compile(
    r"^ Function (?P<name>\S+):\n\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) "
    r"SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)",
    re.MULTILINE,
)
_EXTRACTED = re.compile(r"^Extracting ELF file\s+\d+: (?P<name>.+)$", re.MULTILINE)
_ENUM_CAST = re.compile(r"\([\w:]+\)(?=\d)")


class InspectError(RuntimeError):
    """The library or the tool that reads it is missing or not understood."""


@dataclass(frozen=True)
class KernelUse:
    """One kernel on one architecture; the units are the module's."""

    kernel: str
    arch: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    code_bytes: int


def cuobjdump() -> str:
    """Path of NVIDIA's ``cuobjdump``: the one installed beside this Python, or one on PATH."""
    for name in ("nvidia-cuda-cuobjdump", "nvidia-cuda-cuobjdump-cu12"):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "cuobjdump":
                return str(Path(str(file.locate())).resolve())
    found = shutil.which("cuobjdump")
    if found is None:
        raise InspectError("cuobjdump: wanted it installed (pip install nvidia-cuda-cuobjdump), got none")
    return found


def _run(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        raise InspectError(f"{Path(command[0]).name}: exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _code(tool: str, library: Path) -> Iterator[dict[str, bytes]]:
    """Each kernel's instructions, one mapping per embedded binary, in the library's order."""
    with tempfile.TemporaryDirectory() as folder:
        listing = _run(tool, "--extract-elf", "all", str(library), folder=Path(folder))
        for name in _EXTRACTED.findall(listing):
            with (Path(folder) / name).open("rb") as file:
                sections = [s for s in ELFFile(file).iter_sections() if s.name.startswith(".text.")]
                yield {section.name.removeprefix(".text."): section.data() for section in sections}


def _binaries(tool: str, library: Path) -> list[tuple[str, str, dict[str, bytes]]]:
    """Of each embedded binary the architecture, what its kernels use, and their instructions."""
    report = _run(tool, "--dump-resource-usage", str(library))
    starts = list(_FATBIN.finditer(report))
    code = list(_code(tool, library))
    if not starts or len(starts) != len(code):
        raise InspectError(f"cuobjdump: wanted one report per binary, got {len(starts)} for {len(code)}")
    ends = [start.start() for start in starts[1:]] + [len(report)]
    used = [report[start.end() : end] for start, end in zip(starts, ends, strict=True)]
    return [(start["arch"], use, one) for start, use, one in zip(starts, used, code, strict=True)]


def _demangle(names: set[str]) -> dict[str, str]:
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return {name: name for name in names}
    ordered = sorted(names)
    shown = _run(tool, *ordered).splitlines()
    # Of `void f<float, (Kind)2>(int)`, `f<float, 2>`.
    return {
        name: _ENUM_CAST.sub("", full).removeprefix("void ").partition("(")[0]
        for name, full in zip(ordered, shown, strict=True)
    }


def inspect(library: Path = LIBRARY) -> list[KernelUse]:
    """Resource use of every kernel in a fat binary.

    Parameters
    ----------
    library : Path
        Shared library with embedded device code.

    Returns
    -------
    list of KernelUse
        Sorted by kernel, then in the order of `ARCHITECTURES`.

    Raises
    ------
    InspectError
        The library or ``cuobjdump`` is missing, or its output is not understood.
    """
    if not library.is_file():
        raise InspectError(f"library: wanted a built CUDA library, got none at {library}")
    found = [
        (arch, function, len(code[function["name"]]))
        for arch, used, code in _binaries(cuobjdump(), library.resolve())  # The tool runs in another folder.
        for function in _FUNCTION.finditer(used)
    ]
    shown = _demangle({function["name"] for _, function, _ in found})
    uses = [
        KernelUse(
            kernel=shown[function["name"]],
            arch=arch,
            registers=int(function["registers"]),
            stack_bytes=int(function["stack"]),
            local_bytes=int(function["local"]),
            shared_bytes=int(function["shared"]),
            code_bytes=size,
        )
        for arch, function, size in found
    ]
    order = {arch: place for place, arch in enumerate(ARCHITECTURES)}
    return sorted(uses, key=lambda use: (use.kernel, order.get(use.arch, len(order))))


def machine_code(library: Path = LIBRARY) -> dict[str, str]:
    """Digest of the instructions of all kernels, by architecture.

    Names do not count, nor does the order of the kernels.

    Parameters
    ----------
    library : Path
        Shared library with embedded device code.

    Returns
    -------
    dict
        SHA-256 by architecture.

    Raises
    ------
    InspectError
        As `inspect`.
    """
    kernels: defaultdict[str, list[str]] = defaultdict(list)
    for arch, _, code in _binaries(cuobjdump(), library.resolve()):
        kernels[arch] += [hashlib.sha256(one).hexdigest() for one in code.values()]
    return {
        arch: hashlib.sha256(" ".join(sorted(digests)).encode()).hexdigest()
        for arch, digests in sorted(kernels.items())
    }


def compiler() -> str | None:
    """Version of the `nvcc` on PATH; None where there is none."""
    tool = shutil.which("nvcc")
    found = re.search(r"\bV([\d.]+)$", _run(tool, "--version"), re.MULTILINE) if tool else None
    return found[1] if found else None


def faults(uses: list[KernelUse]) -> list[str]:
    """What is wrong with a build: spills, and kernels without code for an architecture."""
    found = [
        f"{use.kernel} on {use.arch}: wanted no stack and no local memory, "
        f"got {use.stack_bytes} and {use.local_bytes} bytes per thread"
        for use in uses
        if use.stack_bytes or use.local_bytes
    ]
    for kernel in sorted({use.kernel for use in uses}):
        missing = [arch for arch in ARCHITECTURES if arch not in {u.arch for u in uses if u.kernel == kernel}]
        found += [f"{kernel}: wanted code for {arch}, got none" for arch in missing]
    return found


def main(
    library: Annotated[Path, typer.Option(help="Library to read.")] = LIBRARY,
    json_out: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
    record: Annotated[Path | None, typer.Option(help="File of digests to add this build's to.")] = None,
    commit: Annotated[str, typer.Option(help="Commit of the sources, where it is not HEAD.")] = "",
) -> None:
    """Print what each kernel of the built library costs on each GPU architecture."""
    require_writable(json_out, "--json")
    require_writable(record, "--record")
    try:
        uses = inspect(library)
    except InspectError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    header = ["kernel", "arch", "registers", "stack", "local", "shared", "code"]
    rows = [[str(value) for value in asdict(use).values()] for use in uses]
    typer.echo(markdown_table(header, rows))
    machine = describe_machine(commit, device="cpu")  # before a result file changes the working tree
    if json_out is not None:
        write_json(json_out, {"machine": machine, "kernels": [asdict(use) for use in uses]})
    if record is not None:
        builds = json.loads(record.read_text())["builds"] if record.is_file() else []
        build = {"commit": machine["commit"], "nvcc": compiler()}
        builds = [known for known in builds if known["commit"] != build["commit"]]
        write_json(record, {"builds": [*builds, build | {"machine_code": machine_code(library)}]})
    wrong = faults(uses)
    for line in wrong:
        typer.echo(line, err=True)
    if wrong:
        raise typer.Exit(1)
