"""Read from the built CUDA library what each kernel costs on each GPU architecture.

    python -m eval inspect --out out/build.json --record eval/results/machine_code.json

Reads the library itself, not the compiler's messages, so it says what is shipped. Needs no GPU and no
CUDA toolkit: ``cuobjdump`` comes with the ``test`` extra. Registers are per thread; stack and local
memory, in bytes per thread, hold what did not fit into registers (spills) and arrays indexed at run time;
shared memory is the static part per CTA (the dynamic part is an argument of each launch and not in the
binary); code is the size of the kernel's instructions in bytes. What an architecture never launches is
compiled to a trap there, of few bytes.

``--convergence`` checks that a warp barrier stands before every collective which lanes may reach apart
(`eval.report.sass`), of kernels whose names contain a text: ``topk`` for all, a second or two each. It needs
a library with source lines (``-DGVR_TOPK_LINE_INFO=ON``).

``--record`` notes under the commit, for each architecture, a digest of every kernel's name, instructions and
constants. Where sources change and the digest does not, the GPU runs what was measured. The digest says
nothing of host code, which plans and makes the launches.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import re
import shutil
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from eval.common.machine import describe_machine, write_json
from eval.common.options import Commit, require_writable
from eval.common.paths import ROOT
from eval.common.tables import markdown_table
from eval.report.provenance import APART, MEASURED_ARCH, RECORD_FORMAT
from eval.report.sass import Finding, parse, unexplained, unguarded

LIBRARY = ROOT / "gvr_topk" / "lib" / "libgvr_topk_cuda.so"
ARCHITECTURES = ("sm_90a", "sm_100f", "sm_120f")
"""What a library may be built for: Hopper, Blackwell of data centres, Blackwell of consumers."""

TEXT = ".text."
CODE_SECTIONS = (TEXT, ".nv.constant")
"""What a kernel is: its instructions, and its constants in banks of their own."""

CUB = "_ZN3cub"
"""How the names of kernels begin that come out of CUB."""

FATBIN_MAGIC = (0xBA55ED50).to_bytes(4, "little")
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


def _tool(program: str) -> str:
    """Path of one of NVIDIA's programs: the one installed beside this Python, or one on PATH."""
    for name in (f"nvidia-cuda-{program}", f"nvidia-cuda-{program}-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(name) or []:
                if file.name == program:
                    return str(Path(str(file.locate())).resolve())
    found = shutil.which(program)
    if found is None:
        raise InspectError(f"{program}: wanted it installed (pip install nvidia-cuda-{program}), got none")
    return found


def _run(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        raise InspectError(f"{Path(command[0]).name}: exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def _fat_binaries(library: Path) -> Iterator[list[Path]]:
    """The device code of each CUDA file of a library, in a file in a folder of its own.

    Of the whole library ``cuobjdump`` extracts binaries under the names of their sources where it has source
    lines. Those of several ``launch.cu`` would replace one another.
    """
    with library.open("rb") as file, tempfile.TemporaryDirectory() as folder:
        section = ELFFile(file).get_section_by_name(".nv_fatbin")
        data, at = b"" if section is None else section.data(), 0
        found: list[Path] = []
        while (at := data.find(FATBIN_MAGIC, at)) >= 0:
            header_bytes, code_bytes = struct.unpack_from("<HQ", data, at + 6)
            end = at + header_bytes + code_bytes
            found.append(Path(folder) / str(len(found)) / "code.fatbin")
            found[-1].parent.mkdir()
            found[-1].write_bytes(data[at:end])
            at = end
        yield found


def _extract(fat: Path) -> list[Path]:
    """Files of the binaries in a fat binary, one for each architecture, in its order."""
    listing = _run(_tool("cuobjdump"), "--extract-elf", "all", fat.name, folder=fat.parent)
    return [fat.parent / name for name in _EXTRACTED.findall(listing)]


def _code(binary: Path) -> dict[str, bytes]:
    """Sections of instructions and of constants by name."""
    with binary.open("rb") as file:
        sections = [s for s in ELFFile(file).iter_sections() if s.name.startswith(CODE_SECTIONS)]
        return {section.name: section.data() for section in sections}


def _binaries(library: Path) -> list[tuple[str, str, dict[str, bytes]]]:
    """Return the architecture, the resource report and the sections by name of each embedded binary."""
    found: list[tuple[str, str, dict[str, bytes]]] = []
    with _fat_binaries(library) as fat_binaries:
        for fat in fat_binaries:
            report = _run(_tool("cuobjdump"), "--dump-resource-usage", str(fat))
            starts = list(_FATBIN.finditer(report))
            code = [_code(binary) for binary in _extract(fat)]
            if not starts or len(starts) != len(code):
                raise InspectError(
                    f"cuobjdump: wanted one report per binary, got {len(starts)} for {len(code)}"
                )
            ends = [start.start() for start in starts[1:]] + [len(report)]
            used = [report[start.end() : end] for start, end in zip(starts, ends, strict=True)]
            found += [(start["arch"], use, one) for start, use, one in zip(starts, used, code, strict=True)]
    if not found:
        raise InspectError(f"library: wanted device code in it, got none in {library}")
    return found


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
    """Resource use of this project's kernels, sorted by kernel, then in the order of `ARCHITECTURES`."""
    if not library.is_file():
        raise InspectError(f"library: wanted a built CUDA library, got none at {library}")
    found = [
        (arch, function, len(code[TEXT + function["name"]]))
        for arch, used, code in _binaries(library)
        for function in _FUNCTION.finditer(used)
        if not function["name"].startswith(CUB)
    ]
    shown = _demangle({function["name"] for _, function, _ in found})
    uses = []
    for arch, function, size in found:
        registers, stack, local, shared = map(int, function.group("registers", "stack", "local", "shared"))
        uses.append(KernelUse(shown[function["name"]], arch, registers, stack, local, shared, size))
    order = {arch: place for place, arch in enumerate(ARCHITECTURES)}
    return sorted(uses, key=lambda use: (use.kernel, order.get(use.arch, len(order))))


def machine_code(library: Path = LIBRARY) -> dict[str, str]:
    """SHA-256 of the names, instructions and constants of all kernels in any order, by architecture.

    Kernels that lie `APART` count by themselves, by architecture and folder.
    """
    kernels: defaultdict[str, list[str]] = defaultdict(list)
    for arch, _, code in _binaries(library):
        # A binary has the kernels of one folder, and constants that are all of theirs.
        names = " ".join(code)
        apart = [f" {folder}" for folder, (begin, _) in APART.items() if re.search(rf"\d({begin})", names)]
        kernels["".join((arch, *apart))] += [
            f"{name} {hashlib.sha256(one).hexdigest()}" for name, one in code.items()
        ]
    return {
        arch: hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
        for arch, digests in sorted(kernels.items())
    }


def unguarded_collectives(library: Path = LIBRARY, kernels: str = "") -> list[Finding]:
    """Warp collectives that lanes may reach apart (`eval.report.sass`), in the code that is measured.

    Of kernels with `kernels` in their names, or of each family and last argument the smallest: they have most
    of the findings, and some for each explanation. Findings have source lines where the library has them
    (CMake option ``GVR_TOPK_LINE_INFO``).
    """
    with _fat_binaries(library) as fat_binaries, ThreadPoolExecutor(2) as pool:
        extracted = [binary for fat in fat_binaries for binary in _extract(fat)]
        chosen = _chosen_kernels([it for it in extracted if f".{MEASURED_ARCH}." in it.name], kernels)
        if not chosen:
            raise InspectError(
                f"kernels: wanted some of {MEASURED_ARCH} with {kernels!r} in their names, got none"
            )

        def read(binary: Path) -> list[Finding]:
            text = _run(_tool("nvdisasm"), "-gi", "-c", "-fun", ",".join(chosen[binary]), str(binary))
            return [one for function in parse(text.splitlines()) for one in unguarded(function)]

        return [one for found in pool.map(read, chosen) for one in found]


def _chosen_kernels(binaries: list[Path], kernels: str) -> dict[Path, list[str]]:
    """Symbols of the kernels that `unguarded_collectives` reads, by binary."""
    symbols = []
    for binary in binaries:
        with binary.open("rb") as file:
            table = ELFFile(file).get_section_by_name(".symtab")
            assert isinstance(table, SymbolTableSection)
            symbols += [
                (symbol["st_size"], symbol.name, binary, str(index))
                for index, symbol in enumerate(table.iter_symbols())
                if symbol["st_info"]["type"] == "STT_FUNC" and not symbol.name.startswith(("$", CUB))
            ]
    shown = _demangle({name for _, name, _, _ in symbols})
    smallest = {}
    for _, name, binary, index in sorted(symbols, key=lambda symbol: symbol[0], reverse=True):
        family, _, arguments = shown[name].partition("<")
        last = arguments.partition(", ")[2].rpartition(", ")[2]
        if kernels in shown[name]:
            smallest[name if kernels else family + last] = binary, index
    chosen = defaultdict(list)
    for binary, index in smallest.values():
        chosen[binary].append(index)
    return chosen


def compiler() -> str | None:
    """Version of the `nvcc` on PATH; None where there is none."""
    tool = shutil.which("nvcc")
    found = re.search(r"\bV([\d.]+)$", _run(tool, "--version"), re.MULTILINE) if tool else None
    return found[1] if found else None


MOST_STACK = {"sampling": 256, "prefill_slice": 48, "topk_logprobs": 16, "sampling_limits": 8}
"""Bytes of stack per thread that the kernels of a folder may have: rare ways through a row are functions of
their own, which get what they need by value. `prefill_slice` spills a few registers once for each row, around
its merge. Others have none."""


def faults(uses: list[KernelUse]) -> list[str]:
    """What is wrong with a build: spills, and kernels without code for an architecture that others have."""
    built = [arch for arch in ARCHITECTURES if arch in {use.arch for use in uses}]
    found = [
        f"{use.kernel} on {use.arch}: wanted no stack and no local memory, "
        f"got {use.stack_bytes} and {use.local_bytes} bytes per thread"
        for use in uses
        if use.stack_bytes > MOST_STACK.get(use.kernel.removeprefix("gvr_topk::").partition("::")[0], 0)
        or use.local_bytes
    ]
    for kernel in sorted({use.kernel for use in uses}):
        missing = [arch for arch in built if arch not in {u.arch for u in uses if u.kernel == kernel}]
        found += [f"{kernel}: wanted code for {arch}, got none" for arch in missing]
    return found


def _check_convergence(library: Path, kernels: str) -> None:
    found = unguarded_collectives(library, kernels)
    wrong = unexplained(found)
    typer.echo(f"{len(found)} collectives without a guard behind a branch, {len(wrong)} unexplained")
    for one in wrong:
        typer.echo(str(one), err=True)
    if wrong:
        raise typer.Exit(1)


def main(
    library: Annotated[Path, typer.Option(help="Library to read.")] = LIBRARY,
    out: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
    record: Annotated[Path | None, typer.Option(help="File of digests to add this build's to.")] = None,
    commit: Commit = "",
    convergence: Annotated[
        str, typer.Option(help="Check the collectives of kernels with this in their names, and nothing else.")
    ] = "",
) -> None:
    """Print what each kernel of the built library costs on each GPU architecture."""
    require_writable(out)
    require_writable(record, "--record")
    try:
        if convergence:
            _check_convergence(library, convergence)
            return
        uses = inspect(library)
    except InspectError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    header = ["kernel", "arch", "registers", "stack", "local", "shared", "code"]
    rows = [[str(value) for value in asdict(use).values()] for use in uses]
    typer.echo(markdown_table(header, rows))
    machine = describe_machine(commit, device="cpu")  # before a result file changes the working tree
    if out is not None:
        write_json(out, {"machine": machine, "kernels": [asdict(use) for use in uses]})
    if record is not None:
        recorded = json.loads(record.read_text()) if record.is_file() else {}
        build = {"commit": machine["commit"], "nvcc": compiler()}
        # Digests of another format are of other things, so they can be compared with none of these.
        known = recorded["builds"] if recorded.get("format") == RECORD_FORMAT else []
        builds = [each for each in known if each["commit"] != build["commit"]]
        builds.append(build | {"machine_code": machine_code(library)})
        write_json(record, {"format": RECORD_FORMAT, "builds": builds})
    wrong = faults(uses)
    for line in wrong:
        typer.echo(line, err=True)
    if wrong:
        raise typer.Exit(1)
