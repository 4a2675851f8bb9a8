"""The compiled checks refuse the calls that those in Python refuse, in the same words.

The checks of the CUDA library need no CUDA: a C++ compiler builds them here as ops for CPU tensors.
"""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gvr_topk.arguments import schema
from tests.wrong_calls import CASES, OPS, VALID, Case, name_of, valid_call

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = ROOT / "packaging/generate_op_arguments.py"
Check = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Check]:
    """Run the compiled checks of an op on the arguments of a call."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("checks")
    library = folder / "libchecks.so"
    subprocess.run([sys.executable, GENERATOR, folder / "op_arguments.h"], check=True)
    torch_root = Path(torch.__file__).parent
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += ["-Wall", "-Wextra", "-Werror"]
    command += ["-DTORCH_TARGET_VERSION=0x0209000000000000ULL"]
    command += [f"-I{ROOT}/cpp/include", f"-I{ROOT}/cpp/torch", f"-I{folder}"]
    command += ["-isystem", f"{torch_root}/include", f"{ROOT}/tests/cpp/compiled_checks.cpp"]
    command += ["-o", str(library), f"-L{torch_root}/lib", "-ltorch_cpu", "-ltorch"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    definitions = torch.library.Library("gvr_topk_checks", "DEF")
    for name, op in OPS.items():
        definitions.define(name_of(name) + schema(type(op.arguments("cpu", {}))))
    torch.ops.load_library(str(library))
    yield lambda op, call: getattr(torch.ops.gvr_topk_checks, name_of(op))(*call)
    definitions._destroy()


def said(run: Callable[[], object]) -> str | None:
    """The first line of the error of a call; None if there is none."""
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return str(error).split("\n", 1)[0]
    return None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_compiled_checks_refuse_in_the_same_words(case: Case, compiled: Check) -> None:
    assert said(lambda: compiled(case.op, case.call("cpu"))) == f"gvr_topk.: {case.said}"


@pytest.mark.parametrize("what", VALID)
def test_the_compiled_checks_accept_the_same_calls(what: str, compiled: Check) -> None:
    assert said(lambda: compiled("decode", valid_call(what, "cpu"))) is None


@pytest.mark.parametrize("op", [op for op in OPS if op != "decode"])
def test_the_calls_are_valid_before_they_are_changed(op: str, compiled: Check) -> None:
    compiled(op, OPS[op].arguments("cpu", {}))


def checks_of(file: Path) -> list[str]:
    """A pattern of the message of each ``check`` in a C++ header."""
    text = re.sub(r"//[^\n]*", "", file.read_text())
    patterns = []
    for found in re.finditer(r"\bcheck\(", text):
        end, depth = found.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        # What a message quotes of the call stands between its literals.
        literals = re.findall(r'"([^"]*)"', text[found.end() : end])
        if any("wanted" in literal for literal in literals):
            patterns.append(".*".join(map(re.escape, literals)))
    return patterns


@pytest.mark.parametrize(
    "body",
    [
        "if a.k == 1:\n    return\nelse:\n    a.k",
        "for name in a: DECODE.tensor(name)",
        "DECODE.tensor('k', a.k, shape=(1,))",
        "raise DECODE.fail('k', wanted=1, got=2)",
        "raise DECODE.fail('k', 1, a.k) from None",
        "return 1",
        "k = {}",
        "k = a.k.sum()",
        "k = a[0]",
    ],
)
def test_what_has_no_translation_is_refused(body: str) -> None:
    statements = runpy.run_path(str(GENERATOR))["statements"]
    with pytest.raises(ValueError, match=r"^line 1: wanted an? (statement|expression) of checks, got"):
        list(statements(ast.parse(body).body, set()))


@pytest.mark.parametrize("header", ["op_arguments.h", "arguments.h", "check.h", "memory.h"])
def test_every_compiled_check_has_a_wrong_call(header: str, tmp_path: Path) -> None:
    messages = [case.message for case in CASES]
    written = tmp_path / "op_arguments.h"
    subprocess.run([sys.executable, GENERATOR, written], check=True)
    patterns = checks_of(written if header == written.name else ROOT / "cpp" / "torch" / header)
    assert patterns
    missing = [pattern for pattern in patterns if not any(re.search(pattern, text) for text in messages)]
    # Other devices take a GPU, as the op `sample` does, and path paper_gvr a GPU of another kind.
    on_gpu = ("compute", r"wanted\ a\ tensor\ on", "kept_logprobs")
    assert missing == [pattern for pattern in patterns if any(text in pattern for text in on_gpu)]


@pytest.mark.parametrize(
    "source, tests",
    [
        ("sampling.cpp", "test_sampling.py"),
        ("sampling_limits.cpp", "test_sampling_limits.py"),
        ("sharded.cpp", "test_sharded_peers.py"),
        ("call.h", "test_arguments.py test_errors.py"),
    ],
)
def test_every_check_that_needs_a_gpu_has_a_wrong_call_there(source: str, tests: str) -> None:
    text = "".join((ROOT / "tests" / "gpu" / name).read_text() for name in tests.split())
    expected = [found.replace("\\", "") for found in re.findall(r'(?:match=r?|refused = )"(.*)"', text)]
    patterns = checks_of(ROOT / "cpp" / "torch" / source)
    assert patterns
    # Two cannot be provoked: a GPU without code, and one on which not even clusters of two run.
    elsewhere = ("holds\\ code\\ for", "can\\ run\\ clusters\\ of")
    missing = [pattern for pattern in patterns if not any(re.search(pattern, text) for text in expected)]
    assert missing == [pattern for pattern in patterns if any(text in pattern for text in elsewhere)]
