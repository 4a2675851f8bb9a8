"""Only the integration's own line, as it really logs it, is evidence that the feature ran."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval_fakes import HOOK_LINE, VLLM_HOOK_LINE, VLLM_LOGO

from eval.campaigns.evidence import read_evidence
from eval.campaigns.process import output_lines, run_command

WAITING = "gvr_topk in TensorRT-LLM 1.2.1: waiting: no row is longer than index_topk = 2048 so far, and more"
REFUSED = "gvr_topk in TensorRT-LLM 1.3.0rc1: refused: found TensorRT-LLM 1.3.0rc1; Indexer.forward: gone"


@pytest.mark.parametrize(
    ("lines", "active", "refused"),
    [
        ([HOOK_LINE], True, False),
        (["[TRT-LLM] [I] " + HOOK_LINE], True, False),
        ([REFUSED], False, True),
        ([HOOK_LINE, REFUSED], True, True),
        ([HOOK_LINE, "gvr_topk in TensorRT-LLM 1.2.1: fell back: ValueError: logits: no"], True, True),
        ([HOOK_LINE, "gvr_topk in TensorRT-LLM 1.2.1: not in use: TensorRT-LLM runs its own"], True, True),
        (["gvr_topk in TensorRT-LLM 1.2.1: ignored: sparse_attention_config.x: refused"], False, True),
        (["gvr_topk in TensorRT-LLM of unknown version: on: 61 layers"], True, False),
        ([HOOK_LINE, "gvr_topk in TensorRT-LLM 1.2.1: no metrics file: OSError: refused: x"], True, False),
        ([WAITING], False, False),
        ([WAITING, HOOK_LINE], True, False),
        ([], False, False),
        (["loading /opt/gvr_topk/on: x"], False, False),
        (["gvr_topk: on"], False, False),
        (["xgvr_topk in TensorRT-LLM 1.2.1: on: 61 layers"], False, False),
        (["gvr_topk in TensorRT-LLM 1.2.1: patched, will say on: later"], False, False),
        (["gvr_topk: not active: ImportError: no such file"], False, False),
    ],
)
def test_lines_that_count(lines: list[str], active: bool, refused: bool) -> None:
    got = read_evidence(lines)
    assert (got.active, got.refused) == (active, refused)


@pytest.mark.parametrize(
    ("lines", "variant", "message"),
    [
        ([HOOK_LINE], "on", None),
        ([], "off", None),
        ([REFUSED], "off", None),
        ([WAITING], "off", None),
        ([WAITING, HOOK_LINE], "on", None),
        ([WAITING], "on", "Take prompts longer than index_topk (of the accuracy tasks, longbench_v1)"),
        ([WAITING, REFUSED], "on", "did not work, or not alone"),
        ([], "on", "says that the heuristic top-k was on, so the run shows nothing"),
        (
            [HOOK_LINE, REFUSED],
            "on",
            "did not work, or not alone: gvr_topk in TensorRT-LLM 1.3.0rc1: refused:",
        ),
        ([HOOK_LINE], "off", "is TRTLLM_GVR_TOPK or GVR_TOPK_VLLM set"),
    ],
)
def test_problem(lines: list[str], variant: str, message: str | None) -> None:
    problem = read_evidence(lines).problem(variant)
    assert problem is None if message is None else message in str(problem)


def test_version_and_first_lines_are_kept() -> None:
    others = [f"gvr_topk in TensorRT-LLM 1.2.1: note {index}" for index in range(9)]
    got = read_evidence(["TensorRT-LLM version: 1.2.1", *others, others[0], HOOK_LINE, REFUSED])
    assert got.version == "1.2.1"
    assert got.lines == (REFUSED, *others[:4])
    assert read_evidence([]).version is None


def test_version_of_vllm_is_known_on_either_side() -> None:
    assert read_evidence([VLLM_LOGO]).version == "0.33.0"
    assert read_evidence(["INFO vLLM server version 0.33.0, serving model m"]).version == "0.33.0"
    got = read_evidence([VLLM_HOOK_LINE])
    assert (got.version, got.active, got.problem("on")) == ("0.33.0", True, None)
    of_unknown_version = "gvr_topk in vLLM of unknown version: on: decode"
    assert (read_evidence([of_unknown_version]).version, read_evidence([of_unknown_version]).active) == (
        None,
        True,
    )


def test_the_header_of_a_log_is_no_output(tmp_path: Path) -> None:
    command = ["/bin/echo", f"a\n{HOOK_LINE}"]
    run_command(command, tmp_path / "log")
    assert "".join(output_lines(tmp_path / "log", command)) == f"a\n{HOOK_LINE}\n"
    quiet = ["/bin/true", f"a\n{HOOK_LINE}"]
    run_command(quiet, tmp_path / "log")
    assert list(output_lines(tmp_path / "log", quiet)) == []
    assert HOOK_LINE in "".join(output_lines(tmp_path / "log", None))
