"""The command line: clean stdout, one line per error, and exit codes a script can rely on."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import gvr_topk
from gvr_topk import cli, policy
from gvr_topk.evaluation import command as replay_command
from gvr_topk.evaluation import replay as replay_module
from gvr_topk.integrations import sglang, tensorrt_llm, vllm
from gvr_topk.library import LibraryError, LibraryStatus
from gvr_topk.sampling import sample

SMALL = ["replay", "--generator", "20", "--length", "17000", "--steps", "3", "--k", "512"]

ON = "sparse_attention_config: {algorithm: dsa, index_topk: 512, enable_heuristic_topk: true}\n"


@dataclass(frozen=True)
class Result:
    """What a run of the command ended with."""

    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: str) -> Result:
    """Run the command in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            code = cli.main(arguments)
        except SystemExit as error:  # how argparse ends on --help and on wrong usage
            code = error.code
    assert isinstance(code, int)
    return Result(code, stdout.getvalue(), stderr.getvalue())


def assert_one_line_error(result: Result, text: str) -> None:
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    assert result.stderr.startswith("gvr-topk: ") and text in result.stderr


def test_replay_of_the_shipped_trace_ends_with_the_verdict() -> None:
    result = run("replay", "--shipped", "--steps", "2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "replay: exact on 2 of 2 steps"
    assert "smollm2_dsaidx_L10_32k" in result.stdout and "not of DeepSeek" in " ".join(result.stdout.split())
    assert result.stderr == ""
    default = run("replay", "--steps", "1", "--json")
    assert json.loads(default.stdout)["source"] == "smollm2_dsaidx_L10_32k"


def test_replay_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    generator = np.random.default_rng(0)
    arrays = {"K": (700, 8), "Q": (5, 2, 8), "W": (5, 2)}
    np.savez(path, **{name: generator.standard_normal(shape).astype("f2") for name, shape in arrays.items()})
    result = run("replay", "--trace", str(path), "--k", "64")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "replay: exact on 5 of 5 steps"


def test_json_is_all_of_stdout() -> None:
    result = run(*SMALL, "--json", "--offset", "1")
    data = json.loads(result.stdout)
    assert (data["steps"], data["exact_steps"], data["options"]["hint_offset"]) == (3, 3, 1)
    assert result.stderr == "replay: exact on 3 of 3 steps\n"


def test_out_folder_gets_json_and_plots(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = run(*SMALL, "--out", str(folder))
    names = ["synthetic-L20.json", "synthetic-L20_hit_ratio.png"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert [line for line in result.stdout.splitlines() if line.startswith("wrote ")] == [
        f"wrote {folder / name}" for name in names
    ]
    assert result.stdout.endswith("replay: exact on 3 of 3 steps\n")


def test_configuration_is_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(ON.replace("true", "false") + "future_key: 1\ngvr_topk: {hint_offset: 2}\n")
    generated = ("replay", "--generator", "0", "--length", "17000", "--steps", "2")
    data = json.loads(run(*generated, "--config", str(path), "--json").stdout)
    assert data["k"] == 512 and data["options"]["hint_offset"] == 2
    assert [record["gate"] for record in data["records"]] == ["disabled"] * 2


def test_inexact_result_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replay_module.indexer_topk_decode

    def wrong(*args, **kwargs):  # type: ignore[no-untyped-def]
        real(*args, **kwargs)
        kwargs["out"][0, 0] += 1

    monkeypatch.setattr(replay_module, "indexer_topk_decode", wrong)
    result = run(*SMALL)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "replay: exact on 0 of 3 steps"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["replay", "--trace", "nowhere.npz"],
            "nowhere.npz: wanted an .npz file with the arrays K, Q, W, got FileNotFoundError",
        ),
        (["replay", "--config", "nowhere.yaml"], "nowhere.yaml: wanted a YAML file, got no such file"),
        (["config", "check", "nowhere.yaml"], "nowhere.yaml: wanted a YAML file, got no such file"),
        (["replay", "--steps", "0"], "steps: wanted 1 to 256 for smollm2_dsaidx_L10_32k, got 0"),
        (["replay", "--steps", "257"], "steps: wanted 1 to 256"),
        (["replay", "--k", "0"], "k: wanted 1 to 2,097,152, got 0"),
        (["replay", "--k", "2097153"], "k: wanted 1 to 2,097,152, got 2097153"),
        (["replay", "--device", "abacus"], "device: wanted cpu or cuda, got 'abacus'"),
        (["replay", "--generator", "7"], "--generator: wanted one of [0, 1, 20"),
        (["replay", "--generator", "20", "--length", "0"], "--length: wanted 1 to 2097152, got 0"),
        (["replay", "--generator", "20", "--length", "99999999999"], "--length: wanted 1 to 2097152, got 9"),
        (["replay", "--generator", "20", "--steps", "100000000000"], "--steps: wanted 1 to 2026463, got 1"),
        (["replay", "--generator", "20", "--seed", "-5"], "--seed: wanted at least 0, got -5"),
        (["replay", "--length", "9"], "--length: wanted --generator beside it, got 9"),
        (["replay", "--shipped", "--seed", "0"], "--seed: wanted --generator beside it, got 0"),
        (["replay", "--steps", "1", "--out", __file__], "--out: wanted a folder to write to, got "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], text: str) -> None:
    assert_one_line_error(run(*arguments), text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "wanted a CUDA device that torch can use"
    assert_one_line_error(run("replay", "--device", "cuda"), wanted)
    assert json.loads(run(*SMALL, "--json").stdout)["device"] == "cpu"
    monkeypatch.setattr(replay_command, "no_kernels_reason", lambda: "")  # as where kernels can run
    assert_one_line_error(run(*SMALL), wanted)


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "--stepps", "1"],
        ["replay", "--step", "1"],
        ["replay", "--steps", "many"],
        ["replay", "--shipped", "--generator", "0"],
        ["paint"],
        [],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [[], ["replay"], ["doctor"], ["config", "check"]])
def test_help_documents_the_exit_codes(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "2 wrong usage or bad input" in " ".join(result.stdout.split())


def test_doctor_names_every_path_and_a_reason() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    paths = ["path auto", "path paper_gvr", "path no_hint", "path radix_rounds"]
    assert list(data["paths"]) == ["gate and plan", "CUDA library", "on a CPU", *paths]
    reasons = "disabled, no_state, no_slot, short_row, too_short, too_long, first_step"
    answers = f"answers for each row with used, or with why the state is not used ({reasons})"
    assert data["paths"]["gate and plan"] == f"available: {answers}"
    text = run("doctor")
    assert text.exit_code == 0 and "path radix_rounds" in text.stdout and "TensorRT-LLM" in text.stdout
    assert data["paths"]["on a CPU"].startswith("available")
    assert data["environment"]["torch"].startswith(torch.__version__)
    assert data["integration"]
    if not torch.cuda.is_available():
        assert data["environment"]["GPU"].startswith("none: ")
        assert data["paths"]["path auto"].startswith("not available on a GPU: ")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the command find a loaded library, and a GPU of this architecture."""

    def find(arch: int) -> None:
        for module in (cli, policy):
            monkeypatch.setattr(module, "library_status", lambda: LibraryStatus(True, "lib.so", "loaded"))
            monkeypatch.setattr(module, "gpu_arch", lambda *_: arch)

    return find


@pytest.mark.parametrize(("arch", "without"), [(80, "all"), (110, "all"), (90, ""), (120, "paper_gvr")])
def test_doctor_asks_the_plan_and_the_gate_about_the_gpu(
    gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, arch: int, without: str
) -> None:
    gpu(arch)
    monkeypatch.setattr(policy, "architectures", lambda **_: "90a 100f 120f")
    paths = json.loads(run("doctor", "--json").stdout)["paths"]
    refused = {name for name, text in paths.items() if text.startswith("not available on a GPU: ")}
    if without == "all":
        assert refused == {f"path {name}" for name in ("auto", "paper_gvr", "no_hint", "radix_rounds")}
        wanted = "wanted a GPU that the library holds code for (90a 100f 120f)"
        got = f"got compute capability {arch / 10}"
        assert paths["path auto"] == f"not available on a GPU: {wanted}, {got}"
        return
    assert refused == ({f"path {without}"} if without else set())
    assert paths["path auto"].endswith(" kernel, its state used")
    assert paths["path no_hint"].endswith(" kernel, its state disabled")
    fallback = "a row of 65,536 takes the fallback kernel, its state disabled"
    assert paths["path radix_rounds"] == f"available: {fallback}"
    if not without:
        assert "takes the paper_gvr kernel, its state used" in paths["path paper_gvr"]


ACTIVE = [("Engine", "1.0 in /engine"), ("would happen", "on: it is asked for")]


def test_no_engine_is_on_where_no_kernel_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "library_status", lambda: LibraryStatus(False, None, "built without it"))
    for engine in (tensorrt_llm, vllm, sglang):
        monkeypatch.setattr(engine, "describe", lambda *_: ACTIVE)
    data = json.loads(run("doctor", "--json").stdout)
    reason = "the CUDA library is not usable: built without it"
    for section in ("integration", "vLLM", "SGLang"):
        assert data[section] == {"Engine": "1.0 in /engine", "would happen": f"nothing: {reason}"}
    assert data["ready"] == dict.fromkeys(("cuda", "tensorrt_llm", "vllm", "sglang"), False)
    assert data["verdict"] == f"CPU only: no kernels ({reason})"
    assert run("doctor").stdout.splitlines()[-1] == f"verdict: CPU only: no kernels ({reason})"
    required = run("doctor", "--require", "sglang")
    assert required.exit_code == 1
    assert required.stdout.splitlines()[-1] == f"verdict: not ready: sglang: nothing: {reason}"


@pytest.mark.parametrize(
    ("describes", "problem"),
    [
        (ACTIVE, ""),
        ([("Engine", "not installed"), ("would happen", "nothing: there is none")], "not installed"),
        ([("Engine", "not installed")], "not installed"),
        ([("Engine", "1.0"), ("would happen", "off: the variable says so")], "off: the variable says so"),
        ([("Engine", "1.0"), ("would happen", "refused: unlike")], "refused: unlike"),
        ([("Engine", "1.0"), ("would happen", "on: asked, after install()")], "on: asked, after install()"),
    ],
)
def test_what_is_required_is_ready(gpu: Any, monkeypatch: Any, describes: Any, problem: str) -> None:
    gpu(90)
    monkeypatch.setattr(policy, "architectures", lambda **_: "90a")
    monkeypatch.setattr(vllm, "describe", lambda: describes)
    result = run("doctor", "--require", "cuda, vllm")
    assert result.exit_code == (1 if problem else 0)
    ready = "ready: kernels run on this GPU, and in vLLM"
    verdict = f"not ready: vllm: {problem}" if problem else ready
    assert result.stdout.splitlines()[-1] == f"verdict: {verdict}"
    assert run("doctor", "--require", "cuda").exit_code == 0
    assert run("doctor", "--require", "cuda,gpu").exit_code == 2


def test_doctor_checks_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "no_kernels_reason", lambda: "there is no GPU")
    what = "2 rows of up to 65,536 scores on cpu"
    result = run("doctor", "--check", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["check"] == {"exact call": f"exact: {what} agree with torch.sort"}

    def last(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        """Select as the op does, but of two equal scores the later one."""
        chosen = gvr_topk.indexer_topk_decode(scores, lengths, k)
        return chosen + (chosen == chosen[:, -1:])

    monkeypatch.setattr(cli, "indexer_topk_decode", last)
    result = run("doctor", "--check")
    assert result.exit_code == 1
    said = f"not exact: {what} differ from torch.sort"
    assert result.stdout.splitlines()[-1] == f"verdict: not ready: {said}"
    monkeypatch.setattr(cli, "indexer_topk_decode", Mock(side_effect=LibraryError("no kernel\nimage")))
    result = run("doctor", "--check")
    assert result.exit_code == 1 and result.stdout.endswith(f"failed: {what}: no kernel image\n")


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (KeyboardInterrupt(), Result(130, "", "gvr-topk: interrupted\n")),
        # Too little memory is no inexact result.
        (MemoryError("Unable to allocate 1 EiB"), Result(2, "", "gvr-topk: Unable to allocate 1 EiB\n")),
    ],
)
def test_what_ends_a_command_is_one_line(
    error: BaseException, ended: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_command, "run", Mock(side_effect=error))
    assert run("replay") == ended


def test_doctor_without_the_compiled_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "can_use_heuristic", Mock(side_effect=LibraryError("no policy")))
    assert json.loads(run("doctor", "--json").stdout)["paths"]["gate and plan"] == "not available: no policy"


def test_doctor_survives_an_integration_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gvr_topk.integrations.tensorrt_llm", None)
    result = run("doctor", "--json")
    assert result.exit_code == 0
    assert "integration not loaded" in json.loads(result.stdout)["integration"]["TensorRT-LLM"]


def test_doctor_has_a_section_for_every_engine_and_for_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GVR_TOPK_DISABLE", "TRTLLM_GVR_TOPK", "TRTLLM_GVR_TOPK_OPTIONS", "GVR_TOPK_VLLM")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    data = json.loads(run("doctor", "--json").stdout)
    assert data["variables"] == {"variables": "none of this package is set"}
    assert data["vLLM"]["vLLM"] and data["SGLang"]["SGLang"]
    for name, value in zip(names, ("1", "2", "{", "banana"), strict=True):
        monkeypatch.setenv(name, value)
    variables = json.loads(run("doctor", "--json").stdout)["variables"]
    assert list(variables) == list(names)
    assert variables["GVR_TOPK_DISABLE"] == "1: no engine is touched"
    assert variables["TRTLLM_GVR_TOPK"] == "refused: TRTLLM_GVR_TOPK: wanted 0, 1 or force, got '2'"
    assert variables["GVR_TOPK_VLLM"] == "refused: GVR_TOPK_VLLM: wanted 0, 1 or force, got 'banana'"
    refusal = "refused: TRTLLM_GVR_TOPK_OPTIONS: wanted the keys of section gvr_topk as JSON, got '{' ("
    assert variables["TRTLLM_GVR_TOPK_OPTIONS"].startswith(f"{refusal}Invalid JSON: ")
    monkeypatch.setenv("GVR_TOPK_DISABLE", "0")
    variables = json.loads(run("doctor", "--json").stdout)["variables"]
    assert variables["GVR_TOPK_DISABLE"] == "0: counts as unset"


def test_doctor_without_a_reader_says_nothing() -> None:
    """As ``gvr-topk doctor | head -1``, after which the pipe is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "gvr_topk", "doctor"]
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_config_check_ok(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    drafts = "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}"
    path.write_text(f"{ON}future_key: 1\n{drafts}\n")
    result = run("config", "check", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    switch, sizes, options, verdict = result.stdout.splitlines()
    assert (switch, sizes) == ("heuristic top-k: on", "k: 512, rows per request: 4")
    limits, rest = "min_length null, max_length null", "keep_positions null, nvtx false, max_ctas 0"
    assert options == f"gvr_topk: hint_offset 0, {limits}, path auto, stats false, {rest}"
    assert verdict == f"{path}: ok"
    assert json.loads(run("config", "check", str(path), "--json").stdout)["k"] == 512


def test_config_check_fails_with_1_and_lists_all_problems(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("gvr_topk:\n  hint_ofset: 1\n  stats: 3\n")
    result = run("config", "check", str(path))
    assert result.exit_code == 1 and result.stdout == ""
    unknown, typed = result.stderr.splitlines()
    assert unknown.startswith(f"gvr-topk: {path}:2: gvr_topk.hint_ofset: wanted a key of gvr_topk")
    assert unknown.endswith("(did you mean hint_offset?)")
    assert typed == f"gvr-topk: {path}:3: gvr_topk.stats: wanted a valid boolean, got 3"


def test_config_check_json_whatever_the_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    for text in ("max_seq_len: 2024-02-30", "x: " + "[" * 2000, "\0", "gvr_topk: {stats: 3}\n"):
        path.write_text(text)
        result = run("config", "check", str(path), "--json")
        data = json.loads(result.stdout)
        assert result.exit_code == 1 and data["ok"] is False and len(data["problems"]) == 1
    assert data["problems"][0]["key"] == "gvr_topk.stats" and data["problems"][0]["line"] == 1
    for missing in (tmp_path / "none.yaml", tmp_path):
        result = run("config", "check", str(missing), "--json")
        assert result.exit_code == 2 and json.loads(result.stdout)["ok"] is False


@pytest.mark.parametrize(("held", "text"), [(True, "with CUDA kernels"), (False, "CPU implementation only")])
def test_version_tells_the_two_builds_apart(held: bool, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "has_cuda_library", lambda: held)
    monkeypatch.setitem(sys.modules, "gvr_topk._build", None)
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"gvr-topk {gvr_topk.__version__} ({text})\n")
    assert text in json.loads(run("doctor", "--json").stdout)["environment"]["gvr_topk"]


def test_version_names_the_commit_and_the_architectures_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    built = ModuleType("gvr_topk._build")
    vars(built).update(COMMIT="0123456789ab", ARCHS="90a-real;100f-real")
    monkeypatch.setitem(sys.modules, "gvr_topk._build", built)
    version = f"gvr-topk {gvr_topk.__version__} (commit 0123456789ab, "
    for held, text in ((True, "with CUDA kernels for 90a 100f"), (False, "CPU implementation only")):
        monkeypatch.setattr(cli, "has_cuda_library", lambda held=held: held)
        assert run("--version").stdout == f"{version}{text})\n"


def test_replay_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_command, "NEEDED", ("matplotlib", "gvr_topk_absent"))
    assert_one_line_error(run("replay"), "got no gvr_topk_absent: pip install 'gvr-topk[replay]'")


def test_sample_says_what_a_setting_keeps(tmp_path: Path) -> None:
    file = tmp_path / "logits.npz"
    rows = np.log(np.array([[8, 4, 2, 1, 1], [1, 1, 1, 1, 1], [16, 0.5, 0.5, 0.5, 0.5]], np.float32))
    np.savez(file, logits=rows, one=rows[0], wide=rows.astype(np.float64))
    facts = json.loads(run("sample", "--logits", str(file), "--top-p", "0.7", "--json").stdout)
    assert (facts["rows"], facts["vocabulary"], facts["kept"]) == (3, 5, [2, 4, 1])
    assert facts["mass"] == pytest.approx([12 / 16, 0.8, 16 / 18], abs=1e-6)
    shares = [[2 / 3, 1 / 3], [1 / 4] * 4, [1]]
    for token, probability, share in zip(facts["tokens"], facts["probabilities"], shares, strict=True):
        assert probability == pytest.approx(share[token], abs=1e-6)
    text = run("sample", "--logits", str(file), "--top-k", "3", "--min-p", "0.3").stdout.splitlines()
    assert text[0] == "3 rows of 5 logits"
    assert text[1:3] == ["kept tokens: mean 2.0, median 2, most 3", "kept mass:   mean 0.7463, least 0.6000"]
    assert [line.split()[0] for line in text[3:]] == ["1", "2", "3"]
    assert text[-1] == f"{'3 to 4':>18} {1:6} rows {'#' * 40}"
    unfiltered = run("sample", "--logits", str(file)).stdout.splitlines()
    assert unfiltered[3:] == [f"{'5 to 8':>18} {3:6} rows {'#' * 40}"]
    moved = json.loads(run("sample", "--logits", str(file), "--position", "5", "--json").stdout)
    expected = sample(torch.from_numpy(rows), seeds=0, positions=torch.arange(5, 8))
    assert moved["tokens"] == expected.tolist()
    greedy = ("sample", "--logits", str(file), "--temperature", "0", "--array", "one", "--json")
    assert json.loads(run(*greedy).stdout)["mass"] == [pytest.approx(0.5, abs=1e-6)]
    assert_one_line_error(run("sample", "--logits", str(file), "--array", "wide"), "got float64")
    assert_one_line_error(run("sample", "--logits", str(file), "--array", "no"), "with an array 'no'")
    assert_one_line_error(run("sample", "--logits", __file__), "wanted a .npz file with an array 'logits'")
    assert_one_line_error(run("sample", "--logits", str(tmp_path / "absent.npz")), "absent.npz")


def test_light_commands_import_nothing_of_the_extra(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(ON)
    code = """
import sys
for name in ("typer", "rich", "matplotlib", "scipy"):
    sys.modules[name] = None  # importing it raises
from gvr_topk.cli import main
assert main(["doctor"]) == 0
assert main(["config", "check", sys.argv[1]]) == 0
assert main(["replay", "--steps", "1"]) == 2
try:
    main(["replay", "--help"])
except SystemExit as end:
    assert end.code == 0
"""
    command = [sys.executable, "-c", code, str(tmp_path / "serve.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'gvr-topk[replay]'" in done.stderr and "Traceback" not in done.stderr
