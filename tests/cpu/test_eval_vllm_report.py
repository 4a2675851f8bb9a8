"""The figures of docs/engine_evidence.md are those of the result files, and later files add theirs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from eval.report.picture import draw_slices
from eval.report.provenance import Results
from eval.report.vllm_report import in_engine, slices_figures, total_compared, vllm_figures

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"commit": "abc1234", "device": "NVIDIA H200"}


def _engine(part: str, **more: Any) -> dict[str, Any]:
    return {"part": part, "mode": "compare", "graphs": "full", "drafts": 0, "chunk": 8192, "cases": []} | more


def _trial(*engines: dict[str, Any], **more: Any) -> dict[str, Any]:
    setup = {"max_model_len": 4096}
    return {
        "versions": {"vllm": "0.33.0"},
        "machine": MACHINE,
        "setup": setup,
        "engines": list(engines),
    } | more


def _write(folder: Path, **files: Any) -> str:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return vllm_figures(folder)


def test_nothing_measured_is_nothing_said(tmp_path: Path) -> None:
    folder = tmp_path / "h1"
    files = Results(folder)
    assert _write(folder) == "" and total_compared(files) is None and in_engine(files) is None


def test_compared_engines(tmp_path: Path) -> None:
    compared = {
        "rows": 9000,
        "rows_that_differ": 1,
        "prefill_rows": 70,
        "prefill_rows_that_differ": 2,
        "prefill_rows_seen": 100,
        "numpy_rows": 6,
    }
    cases = [{"length": 8192, "batch": batch} for batch in (1, 8, 32)]
    first = _engine("cases", compared=compared, cases=cases, drafts=1, tensor_parallel=2, churn=None)
    churn = {"requests": 50, "slots": 16}
    second = _engine("preemption", compared=compared, churn=churn, preemptions=4, graphs="eager")
    folder = tmp_path / "h1"
    said = _write(folder, vllm_trial_a=_trial(first, second, _engine("cases", compared=None)))
    # Both ranks of the first engine compare the same rows; what differs on either is told.
    assert "| FULL graphs, MTP 1, 2 GPUs, 1, 8 and 32 x 8,192 | 4,500 | 35 of 50 | 3 |" in said
    assert "| eager, 50 requests in 16 slots, 4 preemptions | 9,000 | 70 of 100 | 3 |" in said
    assert "NVIDIA H200, commit abc1234" in said and "; 9 of the rows were sorted by NumPy" in said
    files = Results(folder)
    counts = {"decode": 13500, "prefill": 105, "seen": 150, "differ": 6}
    assert total_compared(files) == counts | {"source": "NVIDIA H200, commit abc1234"}
    assert files.quoted == {"vllm_trial_a.json": {"abc1234"}}
    # Ranks that share the rows of prompts compare other ones.
    shared = first | {"row_shards": True, "cases": [case | {"cached": 3000} for case in cases]}
    said = _write(folder, vllm_trial_a=_trial(shared))
    told = "2 GPUs, each with its share of the prompts' rows, 1, 8 and 32 x 8,192, 9,000 tokens cached"
    assert f"| FULL graphs, MTP 1, {told} | 4,500 | 70 of 100 | 3 |" in said


def test_rows_of_all_gpus_stand_in_one_table_and_those_of_one_are_summed(tmp_path: Path) -> None:
    counts = ("rows", "rows_that_differ", "prefill_rows", "prefill_rows_that_differ", "prefill_rows_seen")
    compared = dict.fromkeys((*counts, "numpy_rows"), 0)
    other = _trial(_engine("cases", compared=compared | {"rows": 5}), machine=MACHINE | {"device": "OTHER"})
    _write(tmp_path / "h2", vllm_trial_a=other)
    assert "| OTHER | FULL graphs | 5 | 0 of 0 | 0 |" in _write(tmp_path / "h1")
    said = _write(tmp_path / "h1", vllm_trial_b=_trial(_engine("cases", compared=compared | {"rows": 7})))
    assert said.index("| H200 | FULL graphs | 7 | 0 of 0 | 0 |") < said.index("| OTHER | FULL graphs | 5 |")
    assert "NVIDIA H200, commit abc1234; OTHER, commit abc1234 (`vllm_trial_*.json`)" in " ".join(
        said.split()
    )
    total = total_compared(Results(tmp_path / "h1"))
    assert total is not None and total["decode"] == 7 and "OTHER" not in total["source"]


def test_kernels_and_prefill_calls(tmp_path: Path) -> None:
    def case(name: str, us: float) -> dict[str, Any]:
        kernels = {name: {"us_median": us}, "void vllm::moe::topk<int>(x)": {"us_median": 1.0}}
        profile = {"kernels": kernels, "gpu_us_per_step": 100 * us}
        return {"length": 8192, "batch": 8, "decode_ms_median": us / 4, "profile": profile}

    stock = _engine(
        "cases", mode="stock", cases=[case("void vllm::cooperative::topk_cs8<2048u>(Params)", 8.77)]
    )
    ours = _engine(
        "cases", mode="ours", cases=[case("void gvr_topk::resident::resident_topk<float>(x)", 8.62)]
    )
    calls = {"batch": 8, "length": 8192, "calls": 12, "rows": 65536, "stock_us": 9000.0, "ours_us": 4000.0}
    said = _write(tmp_path / "h1", vllm_trial_t=_trial(stock, ours, prefill=[calls]))
    assert "| 8 x 8,192 | 8.8 (`topk_cs8`) | 8.6 (`resident_topk`) |" in said
    assert "| 8 x 8,192 | 12 | 65,536 | 9.00 | 4.00 |" in said
    assert "| 8 x 8,192 | 2.19 | 2.15 | 0.877 | 0.862 |" in said
    files = Results(tmp_path / "h1")
    told = in_engine(files)
    wanted = (
        "at 8 x 8,192 tokens a decode top-k takes 8.6 us instead of 8.8, a whole step takes 2.15 ms instead "
        "of 2.19, the top-k of all prefill takes 4.00 ms instead of 9.00"
    )
    assert told is not None and told["cases"] == [wanted]
    assert list(files.quoted) == ["vllm_trial_t.json"]


def test_slices(tmp_path: Path) -> None:
    def engine(mode: str, us: float, peak: int) -> dict[str, Any]:
        chunks = [{"width": width, "rows": 4096, "us": us} for width in (1 << 16, (1 << 16) + 8192)]
        case = {"length": 1 << 17, "peak_bytes": peak << 20, "prefill": {"chunks": chunks}}
        return _engine("cases", mode=mode, shapes="glm5", logits_mb=512, cases=[case])

    trial = _trial(engine("stock", 9000.0, 2500), engine("ours", 4100.0, 1900))
    said = _write(tmp_path / "h1", vllm_slices_a=trial)
    assert "| 32 | 512 | 65,536 | 18.0 | 8.2 |" in said and "73,728" not in said
    assert "| 32 | 512 | 131,072 | 2,500 | 1,900 |" in said
    assert "for 8,192 rows of one layer" in " ".join(said.split())
    trial["engines"] += [engine("ours", 90_000.0, 1500) | {"logits_mb": 128, "shapes": "v32"}]
    _write(tmp_path / "h1", vllm_slices_a=trial)
    draw_slices(slices_figures(Results(tmp_path / "h1")), tmp_path / "slices.svg")
    drawn = (tmp_path / "slices.svg").read_text()
    for text in (
        "32 heads",
        "64 heads",
        "8,192 rows of a layer (ms)",
        "memory of a step (MiB)",
        "64K",
        "128K",
    ):
        assert f"<!-- {text} -->" in drawn
    for text in ("vLLM's, 512 MiB", "this package, 512 MiB", "this package, 128 MiB", "1000", "NVIDIA H200"):
        assert text in drawn
    assert "vLLM's, 128 MiB" not in drawn


def test_invariance(tmp_path: Path) -> None:
    answers = {"requests": 3, "tokens": 12, "different_answers": 2, "most_agree": 2, "first_difference": 7}
    twins = {"all": {"set": {"rows": 0}, "order": {"rows": 5}}}
    engine = _engine("invariance", mode="ours", invariance={"answers": answers, "twins": twins})
    said = _write(tmp_path / "h1", vllm_trial_i=_trial(engine))
    assert "| FULL graphs | this package | 8,192 | 0 | 5 | 2 in 3 requests, from token 7 on |" in said
    older = _engine("preempted", mode="ours", invariance={"twins": twins}, preemptions=9)
    assert "| FULL graphs, 9 preemptions | this package | 8,192 | 0 | 5 | - |" in _write(
        tmp_path / "h1", vllm_trial_i=_trial(older)
    )
    same = answers | {"different_answers": 1, "first_difference": None}
    newer = _engine("invariance", mode="stock", split_k=False, invariance={"answers": same})
    said = _write(tmp_path / "h1", vllm_trial_j=_trial(newer))
    assert "| FULL graphs, no split-K | vLLM's | 8,192 | - | - | 1 in 3 requests |" in said


def test_sampler(tmp_path: Path) -> None:
    cases = [{"batch": batch, "kind": "mixed"} for batch in (64, 8, 64)]
    told = {"batch": 64, "top_p": 0.8, "top_k": 20, "equals": 1, "why": "unexplained"}
    differences = [
        {"why": "near tie"},
        {"why": "tie at the border"},
        told | {"gap": 1.0, "shares": [[0.7, 1.25]]},
        told | {"shares": [[1.1, 1.2]]},
        told | {"shares": [[1.1, 1.2]], "top_k": 1 << 17, "batch": 70},
    ]
    draws = {"rows": 7000, "calls": 70, "differences": differences}
    drafts = {"drafts_calls": 9, "drafts_first_drafts": 30, "drafts_accepted_by_ours": 12}
    compared = _engine("sampler", cases=cases, draws=draws | drafts | {"drafts_accepted_by_vllm_alone": 3})
    timed = [
        _engine(
            "sampler",
            mode=mode,
            drafts=drafts,
            cases=[cases[0] | {"gpu_us": 50.4 * scale, "rows": 64} | more],
        )
        for mode, scale in (("stock", 2), ("ours", 1))
        for drafts in (0, 3)
        for more in ({"host_us": 90.0, "decode_ms_median": 2.5},)
    ]
    stream = {"drafts": 3, "requests": 32, "requests_alike": 31, "tokens": 2048}
    streams = [stream | {"tokens_before_a_difference": 2000}]
    said = _write(tmp_path / "h1", vllm_sampler_a=_trial(compared, *timed, streams=streams))
    assert "| 8 and 64 | 70 | 7,000 | 1 | 1 | 0 | 1 | 1 | 1 | 0 | 0 | 0 |" in said
    assert "| 8 and 64 | 9 | 0 | 0 | 30 | 12 | 0 | 0 | 3 |" in said
    for drafts_shown in ("none", "3"):
        assert f"| {drafts_shown} | 64 | mixed | 101 | 50 | 90 | 90 | 2.50 | 2.50 |" in said
    assert "With 3 drafts and without, 31 of 32 seeded requests had the same" in said
    assert "the smallest batch with such a row had 70 of them." in " ".join(said.split())
    assert "2,000 of 2,048 tokens" in said and "commit abc1234" in said


def test_figures_of_the_page_stand_in_the_generated_block_alone() -> None:
    page = (ROOT / "docs" / "engine_evidence.md").read_text()
    before, rest = page.split("<!-- results:begin -->")
    outside = before + rest.split("<!-- results:end -->")[1]
    assert re.findall(r"[\d.]+ [um]s\b|\d{2,3},\d{3} (?:rows|decode|prefill)", outside) == []
