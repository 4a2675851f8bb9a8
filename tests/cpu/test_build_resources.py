"""What is inside the built CUDA library: code for every architecture, and no spills."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from test_size import TODAY
from typer.testing import CliRunner

from eval.common.paths import KERNELS
from eval.report import inspect
from eval.report.inspect import ARCHITECTURES, InspectError, KernelUse, faults
from eval.report.provenance import MACHINE_CODE, MEASURED_ARCH, RECORD_FORMAT, machine_code_of

ARCHS = Path(__file__).resolve().parents[2] / "packaging" / "gvr_topk_archs.py"
USE = KernelUse("k", "", registers=64, stack_bytes=0, local_bytes=0, shared_bytes=0, code_bytes=1)
GOOD = [replace(USE, arch=arch) for arch in ARCHITECTURES]
LACKING = [*GOOD[1:], *(replace(use, kernel="other") for use in GOOD)]


@pytest.fixture(scope="module")
def uses(cuda_library: Path) -> list[KernelUse]:
    return inspect.inspect(cuda_library)


def test_no_kernel_spills_and_each_has_code_for_every_architecture(uses: list[KernelUse]) -> None:
    """For each of those that this library was built for, whichever they are."""
    assert faults(uses) == []
    assert {use.arch for use in uses} <= set(ARCHITECTURES)


def test_kernels_of_every_file_are_read(uses: list[KernelUse]) -> None:
    """In a build with source lines, too, where binaries have the names of their files: all ``launch.cu``."""
    folders = {file.parent.name for file in KERNELS.glob("*/launch.cu")}
    assert {use.kernel.split("::")[1] for use in uses} == folders and len(folders) > 5


def test_kernels_of_an_architecture_are_no_more_than_the_page_says(uses: list[KernelUse]) -> None:
    limit = TODAY["kernels of an architecture"]
    assert 0.97 * limit < max(Counter(use.arch for use in uses).values()) <= limit


def test_figures_are_plausible(uses: list[KernelUse]) -> None:
    # Up to 512 threads per CTA: more than 128 registers per thread and the launch fails; slices have 256.
    kernels = [use for use in uses if not is_trap(use)]
    most = {use: 255 if "prefill_slice" in use.kernel else 128 for use in kernels}
    assert [use for use in kernels if not 16 <= use.registers <= most[use] or use.code_bytes <= 1000] == []


def is_trap(use: KernelUse) -> bool:
    return use.code_bytes <= 512 and use.registers <= 8


def test_only_what_consumer_blackwell_cannot_launch_is_a_trap(uses: list[KernelUse]) -> None:
    assert {use.arch for use in uses if is_trap(use)} <= {"sm_120f"}
    if "sm_120f" not in {use.arch for use in uses}:
        pytest.skip(f"wanted code for sm_120f, got {', '.join({use.arch for use in uses})} alone")
    traps = {use.kernel.partition("<")[0].rpartition("::")[2] for use in uses if is_trap(use)}
    assert traps == {"streaming_topk", "paper_gvr_topk", "resident_topk", "prefill_short_topk"}
    launched = [use.kernel for use in uses if use.arch == "sm_120f" and not is_trap(use)]
    assert not [kernel for kernel in launched if "streaming" in kernel or "paper_gvr" in kernel]
    # Of the resident kernel with fewer values those that take no sizes for granted: kGeneric, kCommon,
    # kNoState and kAnyRow; and prefill in blocks of 128 and 256 threads.
    assert len([kernel for kernel in launched if "resident" in kernel]) == 12
    assert len([kernel for kernel in launched if "prefill_short" in kernel]) == 6


def test_machine_code_is_that_which_was_recorded(cuda_library: Path) -> None:
    recorded = json.loads(MACHINE_CODE.read_text())
    digests = inspect.machine_code(cuda_library)
    if MEASURED_ARCH not in digests:
        pytest.skip(f"wanted code for {MEASURED_ARCH}, got {', '.join(digests)} alone")
    of_today = machine_code_of(None)
    if of_today is None:
        pytest.skip("no build of these sources is recorded, or this clone has no history")
    if inspect.compiler() not in {build["nvcc"] for build in recorded["builds"]}:
        pytest.skip("another compiler makes other machine code")
    assert f"{digests[MEASURED_ARCH]} None" == of_today
    of_sharded = machine_code_of(None, "sharded")
    assert f"{digests[MEASURED_ARCH]} {digests[f'{MEASURED_ARCH} sharded']}" == of_sharded


def test_architectures_are_those_of_the_build() -> None:
    archs = runpy.run_path(str(ARCHS))["ALL"]
    assert tuple(f"sm_{arch.removesuffix('-real')}" for arch in archs) == ARCHITECTURES


def test_faults() -> None:
    assert faults(GOOD) == faults(GOOD[1:]) == []
    assert faults(LACKING) == ["k: wanted code for sm_90a, got none"]
    spilled = [replace(GOOD[0], stack_bytes=8), *GOOD[1:]]
    assert faults(spilled) == [
        "k on sm_90a: wanted no stack and no local memory, got 8 and 0 bytes per thread"
    ]
    assert len(faults([replace(GOOD[0], local_bytes=4), *GOOD[1:]])) == 1


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(inspect.main)
    return app


def test_command_prints_and_writes_the_same(
    cuda_library: Path, uses: list[KernelUse], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "build.json"
    done = CliRunner().invoke(command(), ["--library", str(cuda_library), "--out", str(out)])
    assert done.exit_code == 0, done.output
    written = [KernelUse(**kernel) for kernel in json.loads(out.read_text())["kernels"]]
    assert written == uses
    assert len(done.stdout.splitlines()) == 2 + len(uses)


def test_command_records_the_machine_code(cuda_library: Path, tmp_path: Path) -> None:
    record = tmp_path / "machine_code.json"
    others = [{"commit": name, "nvcc": "1", "machine_code": {}} for name in ("abc", "def")]
    options = ["--library", str(cuda_library), "--record", str(record), "--commit", "def"]
    for known, kept in (({"format": RECORD_FORMAT}, others[:1]), ({}, [])):  # an older format's are dropped
        record.write_text(json.dumps(known | {"builds": others}))
        assert CliRunner().invoke(command(), options).exit_code == 0
        *before, added = json.loads(record.read_text())["builds"]
        assert before == kept and added["commit"] == "def"
        assert added["machine_code"] == inspect.machine_code(cuda_library)


def test_digest_depends_on_names_and_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(sections: dict[str, bytes]) -> str:
        binaries = [("sm_90a", "", sections), ("sm_90a", "", apart)]
        monkeypatch.setattr(inspect, "_binaries", lambda library: binaries)
        found = inspect.machine_code(Path("library"))
        assert (list(found) == ["sm_90a", "sm_90a sharded"]) == bool(apart)
        return found["sm_90a"]

    kernels = {".text.a": b"1", ".text.b": b"2", ".nv.constant2.a": b"3"}
    apart: dict[str, bytes] = {}
    alone = digest(kernels)
    assert digest(dict(reversed(kernels.items()))) == alone
    apart = {".text.7sharded6choose": b"5", ".nv.constant4": b"6"}
    assert digest(kernels) == alone
    exchanged = {**kernels, ".text.a": b"2", ".text.b": b"1"}
    assert len({digest(kernels), digest(exchanged), digest(kernels | {".nv.constant2.a": b"4"})}) == 3


def test_command_fails_on_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "inspect", lambda library: LACKING)
    done = CliRunner().invoke(command(), [])
    assert done.exit_code == 1
    assert "wanted code for sm_90a" in done.stderr


def test_no_library(tmp_path: Path) -> None:
    with pytest.raises(InspectError, match="library: wanted a built CUDA library, got none at"):
        inspect.inspect(tmp_path / "none.so")
    assert CliRunner().invoke(command(), ["--library", str(tmp_path / "none.so")]).exit_code == 2
