"""The folder for Hugging Face's `kernels`: what is in it, and that it loads, by `kernels` where installed."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from test_packaging import run as run_elsewhere

if sys.version_info < (3, 11):
    pytest.skip("the packaging script reads TOML, which Python has from 3.11 on", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gvr_topk"
CPU = "torch-stable-abi29-cpu-x86_64-linux"
CUDA = "torch-stable-abi29-cu130-x86_64-linux"
REQUIREMENTS = ("torch", "kernels")
HAS_CUDA = (PACKAGE / "lib" / "libgvr_topk_cuda.so").is_file()

LOAD = """
import importlib.util, json, sys
from pathlib import Path
folder = Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules[name] = kernel
spec.loader.exec_module(kernel)
"""
"""What `kernels` does with a variant, as its sources say."""

CHECK = """
import torch
scores = torch.tensor([[0.5, 3.0, float("nan"), 3.0, 3.0], [1.0, 2.0, 0.0, 9.0, 9.0]])
lengths = torch.tensor([5, 3], dtype=torch.int32)
state = kernel.TopkState(2, 2)
assert kernel.indexer_topk_decode(scores, lengths, 2, state=state).tolist() == [[1, 2], [0, 1]]
assert kernel.layers.IndexerTopk()(scores[None], lengths[None], 2).tolist() == [[[1, 2], [0, 1]]]
assert kernel.indexer_topk_prefill(scores, lengths - 4, lengths, 2).tolist() == [[0, 1], [0, 1]]
windows = kernel.layers.IndexerTopkPrefill()(scores, lengths - 4, lengths, 4)
assert windows.tolist() == [[0, 1, 2, 3], [0, 1, 2, -1]]
assert all(hasattr(torch.ops.gvr_topk, f"indexer_topk_{phase}") for phase in ("decode", "prefill"))
"""


SPEC = importlib.util.spec_from_file_location("make_hf_kernel", ROOT / "packaging" / "make_hf_kernel.py")
assert SPEC is not None and SPEC.loader is not None
SCRIPT = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SCRIPT)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, with the variant for CUDA where the library is compiled."""
    out = tmp_path_factory.mktemp("kernel")
    words = ["--out", str(out), "--package", str(PACKAGE), *(["--cuda", "13.0"] if HAS_CUDA else [])]
    SCRIPT.main(words)
    return out


def folder_of(package: str) -> Path | None:
    """Where an environment holds a package, among others; None where it is not installed."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def run(program: str, *arguments: Path, **variables: str) -> str:
    """Run a program with this environment's torch, and `kernels` where it is, but without the checkout."""
    path = os.pathsep.join(str(folder) for folder in map(folder_of, REQUIREMENTS) if folder)
    # Without -S, .pth files would lead back to the checkout.
    return run_elsewhere(sys.executable, "-S", "-c", program, *arguments, PYTHONPATH=path, **variables)


def test_variants(kernel: Path) -> None:
    assert {folder.name for folder in (kernel / "build").iterdir()} == {CPU, *([CUDA] if HAS_CUDA else [])}


def test_metadata(kernel: Path) -> None:
    metadata = json.loads((kernel / "build" / CPU / "metadata.json").read_text())
    assert (metadata["id"], metadata["name"], metadata["license"]) == ("gvr_topk", "gvr-topk", "Apache-2.0")
    assert metadata["backend"] == {"type": "cpu"}


@pytest.mark.skipif(not HAS_CUDA, reason="built without a CUDA compiler")
def test_architectures_are_those_compiled_for(kernel: Path) -> None:
    metadata = json.loads((kernel / "build" / CUDA / "metadata.json").read_text())
    assert metadata["backend"]["type"] == "cuda"
    built = runpy.run_path(str(PACKAGE / "_build.py"))["ARCHS"].split(";")
    assert [arch.replace(".", "") + "-real" for arch in metadata["backend"]["archs"]] == built


def test_loads_as_kernels_loads_it(kernel: Path) -> None:
    out = run(LOAD + CHECK + "print(kernel.library_status().loaded)", kernel / "build" / CPU)
    assert out == "False\n"


@pytest.mark.skipif(not HAS_CUDA, reason="built without a CUDA compiler")
def test_cuda_variant_loads_its_library(kernel: Path, cuda_library: Path) -> None:
    folder = kernel / "build" / CUDA
    out = run(LOAD + CHECK + "print(kernel.library_status().path)", folder)
    assert out == f"{folder / 'lib' / cuda_library.name}\n"


def test_beside_the_installed_package(kernel: Path) -> None:
    """The op can be registered once in a process, so the one that is imported first serves both."""
    program = "import sys; sys.path.insert(0, sys.argv[2]); import gvr_topk.ops as installed\n" + LOAD + CHECK
    program += "assert kernel.indexer_topk_decode is installed.indexer_topk_decode\n"
    program += "assert kernel.indexer_topk_prefill is installed.indexer_topk_prefill\n"
    program += "import gvr_topk.policy; print(gvr_topk.policy.__file__)\n"
    assert run(program, kernel / "build" / CPU, ROOT) == f"{PACKAGE / 'policy.py'}\n"


needs_kernels = pytest.mark.skipif(
    folder_of("kernels") is None, reason="the `kernels` package is not installed (extra [hf])"
)
WITH_KERNELS = "import sys; from pathlib import Path; import kernels; folder = Path(sys.argv[1])\n"


def run_with_kernels(program: str, folder: Path) -> str:
    return run(WITH_KERNELS + program, folder, HF_HUB_OFFLINE="1")


@needs_kernels
def test_kernels_loads_it(kernel: Path) -> None:
    program = f"kernel = kernels.get_local_kernel(folder, backend='cpu')\n{CHECK}print(kernel.__file__)\n"
    assert run_with_kernels(program, kernel) == f"{kernel / 'build' / CPU / '__init__.py'}\n"


@needs_kernels
def test_kernels_takes_digests_and_build_file(kernel: Path) -> None:
    program = """
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
for variant in (folder / "build").iterdir():
    digest = Metadata.read_from_file(variant / "metadata.json").digest
    digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
print([str(backend) for backend in Build.open(folder).general.backends])
"""
    assert "cpu" in run_with_kernels(program, kernel).lower()


@needs_kernels
@pytest.mark.parametrize(
    ("name", "given", "chosen"),
    [
        ("IndexerTopk", "torch.tensor([[[0.5, 3.0, 1.0, 3.0]]]), None, 2", "[[[1, 3]]]"),
        (
            "IndexerTopkPrefill",
            "torch.tensor([[9.0, 3.0, 1.0, 3.0]]), *torch.tensor([[1], [4]]), 2",
            "[[0, 2]]",
        ),
    ],
)
def test_kernels_takes_the_layer(kernel: Path, name: str, given: str, chosen: str) -> None:
    parameters = "scores, lengths, k" if name == "IndexerTopk" else "scores, row_starts, row_ends, k"
    program = f"""
import torch
@kernels.use_kernel_forward_from_hub("{name}")
class Topk(torch.nn.Module):
    def forward(self, {parameters}):
        raise AssertionError("not replaced")
layer = kernels.LocalLayerRepository(folder, layer_name="{name}")
with kernels.use_kernel_mapping({{"{name}": {{"cpu": layer}}}}):
    topk = kernels.kernelize(Topk(), mode=kernels.Mode.INFERENCE, device="cpu", use_fallback=False)
print(topk({given}).tolist())
"""
    assert run_with_kernels(program, kernel) == f"{chosen}\n"


class TestScript:
    def test_missing_library(self, tmp_path: Path) -> None:
        wanted = r"--package: wanted libgvr_topk_policy\.so in .*, got none: build it"
        with pytest.raises(SystemExit, match=wanted):
            SCRIPT.assemble(tmp_path / "out", tmp_path, None)

    def test_foreign_import(self, tmp_path: Path) -> None:
        """A kernel may import the standard library, torch and itself."""
        for module in ("layers", "library", "ops", "request_slots", "state"):
            (tmp_path / f"{module}.py").write_text("import numpy\n" if module == "state" else "")
        with pytest.raises(SystemExit, match=r"state\.py: imports numpy"):
            SCRIPT.needed_modules(tmp_path)

    def test_writes_anew(self, tmp_path: Path) -> None:
        stale = tmp_path / "build" / CPU / "stale.py"
        stale.parent.mkdir(parents=True)
        stale.write_text("")
        SCRIPT.assemble(tmp_path, PACKAGE, None)
        assert not stale.exists()
