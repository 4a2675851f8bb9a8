"""Counters: what they count, the measured numbers, and the Prometheus text."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from engine import Engine, Request, fake_package
from integration_setup import hooked, lines_of, running, state_of
from prometheus_client.parser import text_string_to_metric_families

from gvr_topk.constants import StatsColumn
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations._kit import counters as counters_module
from gvr_topk.integrations.tensorrt_llm import hook as layer_hook

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def engine(monkeypatch):
    with fake_package("trtllm_1_2"):
        # With few heads, scores are often exactly 0 and tie at the k-th.
        yield Engine(hooked(monkeypatch, stats=True), heads=16)
        integration.uninstall()


def samples(text: str) -> dict[tuple, float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_hit_ratio_is_the_overlap_of_two_steps(engine):
    requests = [Request(i, 30, 99, seed=i, done=60) for i in (1, 2)]
    first = engine.step([], requests)
    assert integration.counters().measured.hit_ratio is None  # no hint yet
    for request in requests:
        request.done += 1
    second = engine.step([], requests)
    overlaps = [
        len(set(a.tolist()) & set(b.tolist())) / engine.topk
        for before, after in zip(first, second, strict=True)
        for a, b in zip(before, after, strict=True)
    ]
    measured = integration.counters().measured
    assert measured.hinted == 4
    assert measured.hit_ratio == pytest.approx(sum(overlaps) / 4)


def test_guess_misses_come_from_the_statistics(engine):
    engine.step([], [Request(1, 30, 99, seed=1, done=60), Request(2, 30, 99, seed=2, done=60)])
    stats = state_of(engine).stats
    stats[:, :, StatsColumn.GUESS] = 0
    stats[:, :2, StatsColumn.GUESS] = torch.tensor([1, 2], dtype=torch.int32)
    stats[0, :2, StatsColumn.GUESS_HIT] = torch.tensor([1, 0], dtype=torch.int32)
    stats[1, :2, StatsColumn.GUESS_HIT] = 1
    measured = integration.counters().measured
    assert (measured.guess_rows, measured.guess_misses) == (4, 1)


def test_nothing_is_read_from_the_device_during_a_capture(engine):
    engine.step([], running(1, done=60))
    hook = integration.plugin._integration.hook
    hook._capturing = True
    assert integration.counters().measured == counters_module.Measured()
    engine.step([], running(1, done=61))
    assert integration.counters().measured.hinted == 2


def test_counts_of_a_short_run(engine):
    running, prompt = Request(1, 30, 99, seed=1, done=60), Request(2, 50, 99, seed=2)
    engine.step([(prompt, 50)], [running], next_n=2)
    prompt.done, running.done = 50, 62
    graph = engine.metadata.create_cuda_graph_metadata(4, max_draft_tokens=1)
    engine.step([], [prompt, running], next_n=2, padding=1, metadata=graph)
    seen = integration.counters()
    assert seen.steps == {"eager": 1, "graph": 1}
    assert seen.rows == {"hinted": 2 + 4, "dummy": 2}
    assert {k: v for k, v in seen.requests.items() if v} == {"admitted": 2, "seeded": 1}
    assert seen.calls == {("gvr_topk", "hint"): 4}
    calls = json.loads(json.dumps(seen.as_dict()))["calls"]
    assert calls == [{"path": "gvr_topk", "reason": "hint", "count": 4}]
    nothing = counters_module.Counters().snapshot().as_dict()["measured"]
    assert nothing == {"hit_ratio": None, "hinted": 0, "guess_rows": 0, "guess_misses": 0}


def test_prometheus_text_says_the_same(engine):
    request = Request(1, 30, 99, seed=1, done=60)
    for _ in range(2):
        engine.step([], [request])
        request.done += 1
    seen, text = integration.counters(), integration.prometheus_text()
    read = samples(text)
    assert read["gvr_topk_calls_total", "gvr_topk", "hint"] == 4
    assert read["gvr_topk_steps_total", "eager"] == 2
    assert read["gvr_topk_rows_total", "hinted"] == 2
    assert read["gvr_topk_requests_total", "admitted"] == 1
    assert read[("gvr_topk_hit_ratio",)] == pytest.approx(seen.measured.hit_ratio)
    assert "python_info" not in text  # only ours: the default registry is left alone


def test_without_prometheus_client_the_counters_still_work(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    engine.step([], running(1, done=60))
    assert integration.counters().steps["eager"] == 1
    with pytest.raises(ImportError):
        integration.prometheus_text()


def test_each_process_keeps_a_metrics_file(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("TRTLLM_GVR_TOPK_METRICS_DIR", str(tmp_path))
    request = Request(1, 30, 99, seed=1, done=60)
    engine.step([], [request])
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".prom" and samples(file.read_text())["gvr_topk_steps_total", "eager"] == 1
    engine.step([], [request])
    assert samples(file.read_text())["gvr_topk_steps_total", "eager"] == 1  # not at every step
    integration.plugin._integration.counters._next_write = 0.0
    engine.step([], [request])
    assert samples(file.read_text())["gvr_topk_steps_total", "eager"] == 3


def test_a_write_is_due_when_the_interval_has_passed(monkeypatch, tmp_path):
    counters, texts = counters_module.Counters(), []
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setattr(counters, "prometheus_text", lambda: texts.append(1) or "")
    for now in (100.0, 100.0 + counters_module.WRITE_INTERVAL / 2, 100.0 + counters_module.WRITE_INTERVAL):
        monkeypatch.setattr(counters_module.time, "monotonic", lambda now=now: now)
        counters.write_if_due("FOLDER", print)
    assert len(texts) == 2


def test_the_metrics_file_comes_again_with_its_folder_and_behind_an_error(engine, monkeypatch, tmp_path):
    folder = tmp_path / "metrics"
    monkeypatch.setenv("TRTLLM_GVR_TOPK_METRICS_DIR", str(folder))
    monkeypatch.setattr(counters_module, "WRITE_INTERVAL", 0.0)
    request = Request(1, 30, 99, seed=1, done=60)
    engine.step([], [request])
    shutil.rmtree(folder)
    monkeypatch.setattr(layer_hook, "indexer_topk_decode", Mock(side_effect=ZeroDivisionError))
    for _ in range(3):
        engine.step([], [request])
    (file,) = folder.iterdir()
    assert samples(file.read_text())["gvr_topk_calls_total", "original", "error: ZeroDivisionError"] >= 2


@pytest.mark.parametrize("folder", [None, ""])
def test_no_metrics_file_is_written_unless_asked_for(monkeypatch, tmp_path, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOLDER", raising=False)
    if folder is not None:
        monkeypatch.setenv("FOLDER", folder)
    counters_module.Counters().write_if_due("FOLDER", pytest.fail)
    assert not list(tmp_path.iterdir())


WRITES = """
import os, sys
from multiprocessing import get_context
from gvr_topk.integrations._kit.counters import Counters

def write():
    Counters().write_if_due("FOLDER", print)
    print(*sorted(os.listdir(os.environ["FOLDER"])), flush=True)

if __name__ == "__main__":
    write()
    if sys.argv[1] == "crash":
        os._exit(1)
    child = get_context(sys.argv[1]).Process(target=write)
    child.start()
    child.join()
    print(*os.listdir(os.environ["FOLDER"]))
"""


@pytest.mark.parametrize("start", ["fork", "spawn", "crash"])
def test_metrics_files_go_with_their_process(tmp_path, start):
    """In a folder that is created, under a name of host, process and start; a crash leaves the file."""
    program, folder = tmp_path / "writes.py", tmp_path / "not" / "there"
    program.write_text(WRITES)
    environ = {**os.environ, "FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program, start], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    if start == "crash":
        (left,) = folder.iterdir()
        host, process, began = left.stem.removeprefix("gvr_topk_").rsplit("_", 2)
        assert host == platform.node() and process.isdigit() and int(began) > 1.7e12
        return
    first, both, after = (line.split() for line in done.stdout.splitlines())
    assert len(first) == 1 and len(both) == 2 and set(first) < set(both) and after == first
    assert not list(folder.iterdir())


def test_an_unwritable_metrics_directory_does_not_stop_the_hook(engine, monkeypatch, tmp_path):
    (tmp_path / "missing").touch()
    monkeypatch.setenv("TRTLLM_GVR_TOPK_METRICS_DIR", str(tmp_path / "missing"))
    request = Request(1, 30, 99, seed=1, done=60)
    for _ in range(2):
        engine.step([], [request])
    assert integration.counters().calls == {("gvr_topk", "hint"): 4}
    (line,) = lines_of("warning")
    assert "metrics" in line and "missing" in line
