"""Check that one wheel installs, loads and computes on several torch releases.

    python -m eval wheel --json out/wheel.json

Builds the wheel (or takes ``--wheel``), and for each torch release makes an empty virtual environment,
installs that torch with all it needs, installs the wheel, and runs a small program there: both compiled
libraries load, the op has its CUDA implementation, one call on the CPU gives the contract's result, and
starting Python imports neither torch nor the package. Each environment is deleted before the next one is
made, because a CUDA build of torch takes several gigabytes. The result file also says how large the wheel is,
and how long it took to build.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.common.machine import describe_machine, write_json
from eval.common.options import require_writable
from eval.common.paths import ROOT

TORCH_RELEASES = ("2.9.1", "2.11.0", "2.13.0")
"""The first minor release whose stable interface the library is built on, one between, and the newest."""

STARTUP = "import sys; assert not {'torch', 'numpy', 'gvr_topk'} & set(sys.modules), sorted(sys.modules)"
PROGRAM = """
import json, torch, gvr_topk, gvr_topk.policy
status = gvr_topk.library_status()
cuda = torch._C._dispatch_has_kernel_for_dispatch_key("gvr_topk::indexer_topk_decode", "CUDA")
scores = torch.tensor([[0.5, 3.0, float("nan"), 3.0, 3.0], [1.0, 2.0, 0.0, 9.0, 9.0]])
lengths = torch.tensor([5, 3], dtype=torch.int32)
state = gvr_topk.TopkState(2, 2)
chosen = gvr_topk.indexer_topk_decode(scores, lengths, 2, state=state).tolist()
assert chosen == state.indices.tolist() == [[1, 2], [0, 1]], chosen
assert gvr_topk.policy.can_use_heuristic(length=1 << 17, k=2048).allowed
print(json.dumps({
    "version": torch.__version__,
    "library": status.reason,
    "loaded": status.loaded,
    "cuda_registered": cuda,
}))
"""


@dataclass(frozen=True)
class Outcome:
    """What one torch release made of the wheel."""

    torch: str
    version: str | None
    ok: bool
    detail: str


def build_wheel(folder: Path, archs: str = "") -> Path:
    """Build the checkout's wheel into a folder, for `archs` as `packaging/gvr_topk_archs.py` takes them."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    environ = {**os.environ, "GVR_TOPK_ARCHS": archs} if archs else None
    subprocess.run([*pip, "--wheel-dir", str(folder), str(ROOT)], check=True, env=environ)
    (wheel,) = folder.glob("*.whl")
    return wheel


def describe_wheel(wheel: Path) -> dict[str, Any]:
    """Name of a wheel, its size, and the size of what it installs."""
    with zipfile.ZipFile(wheel) as files:
        installed = sum(file.file_size for file in files.infolist())
    return {"wheel": wheel.name, "bytes": wheel.stat().st_size, "installed_bytes": installed}


def check_release(release: str, wheel: Path, folder: Path) -> Outcome:
    """Install torch and the wheel into a new environment in `folder` and run the program there."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    steps = {
        "install torch": [*pip, f"torch=={release}"],
        "install the wheel": [*pip, str(wheel)],
        "start Python": [python, "-c", STARTUP],
        "run": [python, "-c", PROGRAM],
    }
    for name, command in steps.items():
        # Not from the checkout: its package would be found instead of the installed one.
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            return Outcome(release, None, False, f"{name}: exit status {done.returncode}: {last}")
    seen = json.loads(done.stdout)
    ok = bool(seen["loaded"] and seen["cuda_registered"])
    return Outcome(release, seen["version"], ok, seen["library"])


def main(
    wheel: Annotated[Path | None, typer.Option(help="Wheel to check; default: build it.")] = None,
    torch: Annotated[
        list[str] | None,
        typer.Option(help=f"torch release, repeatable; default: {', '.join(TORCH_RELEASES)}."),
    ] = None,
    json_out: Annotated[Path, typer.Option("--json", help="Result file.")] = Path("out/wheel.json"),
) -> None:
    """Check one wheel on several torch releases, each in an environment of its own."""
    if wheel is not None and not wheel.is_file():
        typer.echo(f"--wheel: wanted a file, got {wheel}", err=True)
        raise typer.Exit(2)
    require_writable(json_out, "--json")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="check_wheel_") as place:
        began, is_given = time.monotonic(), wheel is not None
        wheel = build_wheel(Path(place)) if wheel is None else wheel.resolve()
        described = describe_wheel(wheel)
        if not is_given:
            described["build_seconds"] = round(time.monotonic() - began, 1)
        typer.echo(f"{wheel.name}, {described['bytes'] / 2**20:.1f} MiB")
        for release in torch or TORCH_RELEASES:
            with tempfile.TemporaryDirectory(prefix="environment_", dir=place) as folder:
                outcomes.append(check_release(release, wheel, Path(folder)))
            outcome = outcomes[-1]
            typer.echo(
                f"torch {outcome.version or release}: {'ok' if outcome.ok else 'FAILED'}: {outcome.detail}"
            )
    result = {"machine": describe_machine(device="cpu"), **described, "torch": [asdict(o) for o in outcomes]}
    write_json(json_out, result)
    if not all(outcome.ok for outcome in outcomes):
        raise typer.Exit(1)
