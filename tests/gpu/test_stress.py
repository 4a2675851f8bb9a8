"""Exactness beside other work, under delays, in part of a GPU, and of launches whose arguments are rewritten.

`python -m eval stress` runs the same for as long as one likes; here every part gets a second or two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import full_lengths, new_state, run, wrong_rows

import gvr_topk
from eval.stress.stress_cases import CONFIGURATIONS, REWRITINGS, Configuration
from eval.stress.stress_library import CHAOS_MODES, chaos_files, chaos_modes, neighbours_library, set_chaos
from eval.stress.stress_neighbours import NEIGHBOURS, Neighbour, make_neighbour, make_rewriter
from eval.stress.stress_run import Limits, replay_beside
from eval.stress.stress_workload import GUARD, Workload

ROOT = Path(__file__).resolve().parents[2]
NAMES = [configuration.name for configuration in CONFIGURATIONS]
SECONDS = 0.1
"""For which each configuration runs beside each neighbour."""

needs_neighbours = pytest.mark.skipif(
    neighbours_library() is None, reason="the library of neighbours was not built (make neighbours)"
)
needs_chaos = pytest.mark.skipif(chaos_modes() == 0, reason="the library is no chaos build (GVR_TOPK_CHAOS)")


def configuration(name: str) -> Configuration:
    (found,) = (configuration for configuration in CONFIGURATIONS if configuration.name == name)
    return found


def run_some(workload: Workload, neighbour: Neighbour, seconds: float = SECONDS) -> None:
    """Replay for a while, at least three times, and assert that nothing was wrong."""
    workload.reset()
    done = replay_beside(workload, neighbour, 3, Limits())
    done += replay_beside(workload, neighbour, 10_000, Limits().within(seconds))
    counts = workload.counts()
    assert counts.clean, counts
    assert counts.launches == done * workload.launches


@pytest.fixture(scope="module")
def neighbours() -> dict[str, Neighbour]:
    """Neighbours that serve beside every configuration; they are made when they are first asked for."""
    return {}


@needs_neighbours
@pytest.mark.parametrize("name", NAMES)
def test_exact_beside_every_neighbour(name: str, neighbours: dict[str, Neighbour]) -> None:
    workload = Workload(configuration(name), "cuda", launches=32)
    for other in NEIGHBOURS:
        neighbour = neighbours.get(other) or make_neighbour(other, "cuda", workload.configuration)
        if neighbour.workload is None:
            neighbours[other] = neighbour
        run_some(workload, neighbour)
        assert other == "none" or neighbour.groups > 0
        if neighbour.workload is not None:
            assert neighbour.workload.counts().clean


@needs_chaos
@pytest.mark.parametrize("name", NAMES)
def test_exact_under_every_delay(name: str) -> None:
    assert len(CHAOS_MODES) == chaos_modes()
    assert chaos_files() >= 3
    workload = Workload(configuration(name), "cuda", launches=32)
    for mode in range(1, chaos_modes()):
        set_chaos(mode)
        run_some(workload, Neighbour("none"), 2 * SECONDS)


@needs_chaos
@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="times launches, which other tests on the GPU slow down"
)
def test_delays_take_time() -> None:
    """A mode that does nothing would find nothing."""
    workload = Workload(configuration("fp32-131072x4"), "cuda", launches=32)
    times = []
    for mode in range(chaos_modes()):
        set_chaos(mode)
        workload.replay()
        replays = []
        for _ in range(40):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(workload.stream)
            workload.replay()
            stop.record(workload.stream)
            stop.synchronize()
            replays.append(start.elapsed_time(stop))
        times.append(min(replays))  # Other work on the GPU only adds.
    assert all(time > 1.3 * times[0] for time in times[1:]), times


class TestComparison:
    """Whether a launch that goes wrong is noticed, by the kernel that compares and by torch alike."""

    tiny = Configuration(
        "tiny",
        20_000,
        2,
        k=512,
        row_slot=True,
        counts=True,
        stats=True,
        page_size=64,
        cache_slots=True,
        chains=2,
    )

    @pytest.fixture(params=[True, False], ids=["kernel", "torch"])
    def workload(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Workload:
        if not request.param:
            monkeypatch.setattr("eval.stress.stress_workload.neighbours_library", lambda: None)
        elif neighbours_library() is None:
            pytest.skip("the library of neighbours was not built (make neighbours)")
        return Workload(self.tiny, "cuda", launches=4)

    def test_wrong_results_are_counted_once_for_each_launch(self, workload: Workload) -> None:
        block = workload._written["out"][2].view(workload.expected)
        block[1, 5:8] += 1
        for _ in range(3):
            workload.replay()
        counts = workload.counts()
        assert (counts.launches, counts.wrong_launches, counts.wrong_words) == (12, 3, 9)
        assert (counts.guard_words, counts.wrong_hints) == (0, 0)
        assert counts.first_wrong.startswith("result of launch 2 row 1 column ")

    def test_results_are_poisoned_and_guards_put_back(self, workload: Workload) -> None:
        workload.replay()
        torch.cuda.synchronize()
        assert torch.equal(
            workload._written["out"][0].view(workload.words),
            workload._written["out"][0].view(workload._initial),
        )
        behind = workload._written["out"][3].end
        workload.words[behind : behind + 7] = 3
        workload.words[workload._states[1].end + 100] = 3
        torch.cuda.synchronize()
        for _ in range(2):
            workload.replay()
        counts = workload.counts()
        assert (counts.guard_words, counts.wrong_launches) == (8, 0)
        assert int(workload.words[behind]) == GUARD

    def test_wrong_hints_are_counted(self, workload: Workload) -> None:
        slot = next(slot for slot in range(self.tiny.slots) if slot not in workload._slots)
        workload.words[workload._indices[1].first + slot * workload._indices[1].pitch] = 7
        torch.cuda.synchronize()
        workload.replay()
        counts = workload.counts()
        assert (counts.wrong_hints, counts.wrong_launches, counts.guard_words) == (1, 0, 0)


@needs_neighbours
def test_a_rewriter_writes_all_words_of_the_tensor_and_no_other() -> None:
    buffer = torch.zeros(5, 100, dtype=torch.int32, device="cuda")
    target = buffer[1:4, :60]
    pool = torch.arange(1, 4, dtype=torch.int32, device="cuda")[:, None, None].repeat(1, 3, 60)
    torch.cuda.synchronize()
    with make_rewriter(target, pool) as rewriter:
        for _ in range(4):
            rewriter.feed()
            torch.cuda.synchronize()
    assert set(target.unique().tolist()) == {1, 2, 3}
    target.zero_()
    assert int(buffer.abs().sum()) == 0


@needs_neighbours
def test_rewritten_arguments_cannot_hang_or_corrupt(tmp_path: Path) -> None:
    """In a process of its own: a GPU that hangs or faults would take all later tests with it."""
    options = [
        "--rewrite",
        "--rewrite-seconds",
        "2",
        "--hang-seconds",
        "20",
        "--out",
        str(tmp_path / "rewrite.json"),
    ]
    command = [sys.executable, "-m", "eval", "stress", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "rewrite.json").read_text())["results"]
    for name in REWRITINGS:
        met = [result["launches_during_rewriting"] for result in results if result["rewritten"] == name]
        assert sum(met) > 0, name


@contextmanager
def green_stream(sms: int) -> Iterator[torch.cuda.Stream]:
    """A stream whose kernels have so many SMs, in multiples of what the GPU can be split by."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name in ("cuGreenCtxCreate", "cuGreenCtxStreamCreate", "cuDevSmResourceSplitByCount"):
        if not hasattr(driver, name):
            pytest.skip(f"cuda-bindings has no {name}")

    def call(name: str, *arguments: Any) -> Any:
        status, *results = getattr(driver, name)(*arguments)
        if status == driver.CUresult.CUDA_ERROR_NOT_SUPPORTED:
            pytest.skip(f"{name}: {status}")
        assert status == driver.CUresult.CUDA_SUCCESS, (name, status)
        return results[0] if len(results) == 1 else results

    torch.cuda.synchronize()  # makes the primary context
    device = call("cuDeviceGet", torch.cuda.current_device())
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    every = call("cuDeviceGetDevResource", device, kind)
    groups = call("cuDevSmResourceSplitByCount", 1, every, 0, sms)[0]
    given = groups[0].sm.smCount
    assert sms <= given < sms + 8
    description = call("cuDevResourceGenerateDesc", groups[:1], 1)
    default_stream = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM.value
    context = call("cuGreenCtxCreate", description, device, default_stream)
    non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
    stream = call("cuGreenCtxStreamCreate", context, non_blocking, 0)
    try:
        yield torch.cuda.ExternalStream(int(stream))
    finally:
        torch.cuda.synchronize()
        driver.cuStreamDestroy(stream)
        driver.cuGreenCtxDestroy(context)


@pytest.mark.parametrize("sms", [8, 16, 32, 66])
@pytest.mark.parametrize("width", [8192, 70_690, 1_048_576])
@pytest.mark.parametrize("batch", [1, 8])
def test_exact_in_part_of_a_gpu(sms: int, width: int, batch: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(sms + width)
    steps = torch.randn(3, batch, width, device="cuda", generator=generator)
    lengths = full_lengths(steps[0])
    k = 2048
    state = new_state(batch, k, keep_indices=True)
    with green_stream(sms) as stream:
        for logits in steps:
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                got = run(logits, lengths, k, state=state)
            torch.cuda.synchronize()
            assert wrong_rows(got, logits, lengths, k) == []
        logits = steps[0].clone()
        out = torch.full((batch, k), -9, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            gvr_topk.indexer_topk_decode(logits, lengths, k, out=out, state=state)
        for step in steps.flip(0):
            logits.copy_(step)
            out.fill_(-9)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.synchronize()
            assert wrong_rows(out, logits, lengths, k) == []
        del graph
