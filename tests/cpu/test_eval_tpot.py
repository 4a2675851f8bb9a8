"""The TPOT script runs what it prints, takes turns, and reports what the tools measured."""

import json
import math
import shlex
from pathlib import Path

import pytest
from eval_fakes import (
    HOOK_LINE,
    VLLM_HOOK_LINE,
    Campaign,
    Ended,
    free_port,
    run_record,
    run_verb,
    write_program,
)

from eval.campaigns.configs import combined_configs
from eval.campaigns.runs import Comparison, Outcome
from eval.campaigns.tpot import Settings
from eval.campaigns.tpot_report import reduction
from eval.campaigns.verdicts import bounds, looks_at

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "tests" / "data" / "eval_samples"
FAKES = str(Path(__file__).with_name("eval_fakes.py"))
PROMPTS = ("--prompts", f"64K={SAMPLES / 'prompts.jsonl'}", "--entry", "0")
TEXT = (*PROMPTS[:2], "--entry", "1")
"""Prompts of token ids, which trtllm-bench takes, and of text, which the client of a server sends."""

FAKE_BENCH = """
value = lambda name: arguments[arguments.index(name) + 1]
dataset = Path(value("--dataset")).read_text().splitlines()
assert len(dataset) >= int(value("--num_requests")), dataset
config = value("--config")
side = "on" if config.endswith("_on.yaml") else "off"
if side == "on":
    print(hook)
number = int(Path(value("--report_json")).stem.rpartition("_")[2])
mtp = "mtp1" if "mtp1" in config else "mtp0"
report = json.loads(samples.joinpath(f"trtllm_bench_{mtp}.json").read_text())
report["streaming_metrics"]["avg_tpot_ms"] = (10.0 if side == "off" else 9.0) + number / 100
Path(value("--report_json")).write_text(json.dumps(report))
"""


class Bench(Campaign):
    """Fake tools on PATH, and the script run against them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch, "trtllm-bench", FAKE_BENCH)
        serve = f"import runpy\nrunpy.run_path({FAKES!r}, run_name='__main__')\n"
        write_program(self.programs, "vllm", serve)

    def write_server(self, says: str, status: int = 200) -> None:
        """A server without the integration, or its client."""
        body = f"import runpy, sys\nf = runpy.run_path({FAKES!r})\n"
        body += "if 'bench' in sys.argv: sys.exit(f['bench'](sys.argv))\n"
        body += f"print({says!r}, flush=True)\nport = int(sys.argv[sys.argv.index('--port') + 1])\n"
        write_program(self.programs, "vllm", body + f"f['make_server'](port, {status}).serve_forever()\n")

    def run(self, *arguments: str, prompts: tuple[str, ...] = PROMPTS) -> Ended:
        return run_verb("tpot", "--model", "org/m", "--out", str(self.out), *prompts, *arguments)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def _commands(output: str) -> list[list[str]]:
    return [
        shlex.split(line.partition(" &  #")[0]) for line in output.splitlines() if not line.startswith("#")
    ]


@pytest.mark.parametrize(("capability", "family"), [("", "h200"), ("9.0", "h200"), ("10.0\n10.0", "b200")])
def test_default_files_are_those_of_the_gpu_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str, family: str
) -> None:
    write_program(tmp_path, "nvidia-smi", f"print({capability!r})")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Settings("m", []).config(1, "on")
    assert found == combined_configs() / f"bench_{family}_tep8_mtp1_on.yaml" and found.exists()
    mine = Settings("m", [], configs="mine_{mtp}_{variant}.yaml")
    assert mine.config(0, "off") == Path("mine_0_off.yaml")


def test_bench_from_start_to_end(bench: Bench) -> None:
    options = ("--mtp", "0", "--mtp", "1", "--repetitions", "6")
    printed = _commands(bench.run(*options, "--dry-run").output)
    result = bench.run(*options)
    assert result.exit_code == 0, result.output
    assert [["trtllm-bench", *call] for call in bench.calls] == printed
    sides = [call[call.index("--config") + 1].rpartition("_")[2] for call in bench.calls[:6]]
    assert sides == ["off.yaml", "on.yaml", "on.yaml", "off.yaml", "off.yaml", "on.yaml"]

    rows = bench.results["decisions"]
    assert [row["case"] for row in rows] == [{"MTP": 0, "prompt": "64K"}, {"MTP": 1, "prompt": "64K"}]
    for row in rows:
        assert row["off"] == pytest.approx([10.01, 10.02, 10.03, 10.04, 10.05, 10.06])
        assert row["on"] == pytest.approx([9.01, 9.02, 9.03, 9.04, 9.05, 9.06])
        decision = row["decision"]
        assert 1 - math.exp(decision["difference"]) == pytest.approx(1 - 9.035 / 10.035, abs=1e-5)
        assert decision["low"] < decision["difference"] < decision["high"]
        assert decision["verdict"] == "faster"
    assert rows[0]["acceptance_off"] == []
    assert rows[1]["acceptance_on"] == [0.4375] * 6
    assert "9.97 % [" in result.output and "5.47 %" in result.output
    assert "accepted drafts" in result.output and "0.92 -> 0.93" in result.output
    assert f"gvr_topk in the logs of the 'on' runs:\n  {HOOK_LINE}" in result.output

    # Nothing is measured twice, and the report is the same.
    again = bench.run(*options)
    assert len(bench.calls) == 24
    assert bench.results["decisions"] == rows
    assert again.output.count("done before") == 24


VLLM = (
    "--engine", "vllm", "--mtp", "0", "--gpus", "1", "--concurrency", "3", "--requests", "4", "--warmup", "1",
    "--output-tokens", "5",
)  # fmt: skip


def test_vllm_commands_differ_in_one_variable(bench: Bench) -> None:
    extra = ("--extra-args", "--skip-tokenizer-init", "--repetitions", "1", "--dry-run")
    result = bench.run(*VLLM, *extra, prompts=TEXT)
    assert result.exit_code == 0, result.output
    off, client, on, _ = _commands(result.output)
    dataset = client[client.index("--dataset-path") + 1]
    assert client == [
        "vllm", "bench", "serve", "--backend", "openai", "--base-url", "http://127.0.0.1:8123",
        "--model", "org/m", "--dataset-name", "custom", "--dataset-path", dataset, "--skip-chat-template",
        "--custom-output-len", "5", "--ignore-eos", "--temperature", "0", "--num-prompts", "4",
        "--num-warmups", "1", "--max-concurrency", "3", "--save-result",
        "--result-dir", str(bench.out / "mtp0_64K"), "--result-filename", "off_1.json",
    ]  # fmt: skip
    assert off == [
        "env", "GVR_TOPK_DISABLE=1", "vllm", "serve", "org/m", "--host", "127.0.0.1", "--port", "8123",
        "--tensor-parallel-size", "1", "--max-num-seqs", "3", "--max-num-batched-tokens", "8192",
        "--skip-tokenizer-init",
    ]  # fmt: skip
    assert on == ["env", "GVR_TOPK_DISABLE=0", *off[2:]]
    own = ("--program", "python3 -m vllm.entrypoints.cli.main", "--model-path", "/ckpt")
    own += ("--launcher", "srun -n1")
    drafts = bench.run(*VLLM, *own, *extra, "--mtp", "1", "--client", "other client", prompts=TEXT)
    (load, *_) = [words for words in _commands(drafts.output) if words[:2] == ["other", "client"]]
    assert load[load.index("--tokenizer") + 1] == "/ckpt"
    (command, *_) = [words for words in _commands(drafts.output) if "--speculative-config" in words]
    assert command[:9] == [
        "srun", "-n1", "env", "GVR_TOPK_DISABLE=1", "python3", "-m", "vllm.entrypoints.cli.main", "serve",
        "/ckpt",
    ]  # fmt: skip
    assert command[9:11] == ["--served-model-name", "org/m"]
    given = json.loads(command[command.index("--speculative-config") + 1])
    assert given == {"method": "mtp", "num_speculative_tokens": 1}
    sampler = ("--compares", "sampler", "--sampling", "--top-k 50", "--drafts", '{"method": "ngram"}')
    off, client, on, _ = _commands(bench.run(*VLLM, *sampler, *extra, "--mtp", "1", prompts=TEXT).output)[4:]
    assert "--temperature" not in client and client[client.index("--top-k") + 1] == "50"
    assert off[:2] == ["env", "GVR_TOPK_SAMPLER=0"] and on == ["env", "GVR_TOPK_SAMPLER=1", *off[2:]]
    given = json.loads(on[on.index("--speculative-config") + 1])
    assert given == {"method": "ngram", "num_speculative_tokens": 1}


@pytest.mark.parametrize("compares", ["top-k", "sampler"])
def test_vllm_serves_from_start_to_end(bench: Bench, compares: str) -> None:
    options = ("--repetitions", "2", "--port", str(free_port()), "--compares", compares)
    result = bench.run(*VLLM, *options, prompts=TEXT)
    assert result.exit_code == 0, result.output
    (row,) = bench.results["decisions"]
    assert len(row["off"]) == len(row["on"]) == 2 and row["decision"]["verdict"] == "open"
    runs = bench.results["runs"]
    assert [run["labels"]["variant"] for run in runs] == ["off", "on", "on", "off"]
    assert {run["figures"]["output_tokens"] for run in runs} == {5.0}
    assert {run["version"] for run in runs} == {"0.33.0"}
    assert VLLM_HOOK_LINE in result.output
    assert {run["figures"]["requests"] for run in runs} == {4}


def test_serve_failure_shows_the_servers_log_too(bench: Bench) -> None:
    bench.write_server("illegal memory access", 500)
    options = ("--repetitions", "1", "--port", str(free_port()), "--no-keep-going")
    result = bench.run(*VLLM, *options, prompts=TEXT)
    assert result.exit_code == 3
    assert "HTTP 500" in result.output
    assert "last lines of the server's log" in result.output and "| illegal memory access" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompts", "64K"), "LABEL=FILE"),
        (("--prompts", "64K=none.jsonl"), "got no such file"),
        (("--prompts", f"64K={SAMPLES / 'prompts.jsonl'}", "--entry", "2"), "--tokenizer MODEL applies"),
        ((*PROMPTS, "--engine", "vllm"), "wanted a text, which the client of a server sends, got token ids"),
        ((*PROMPTS, "--mtp", "2"), "--mtp: wanted one of 0, 1, 3"),
        ((*PROMPTS, "--mtp", "0", "--mtp", "0"), "each value once, got 0 more than"),
        ((*PROMPTS[:2], *PROMPTS), "each value once, got 64K more than"),
        (("--prompts", f"../../x={SAMPLES / 'prompts.jsonl'}"), "a label of letters, digits"),
        (("--prompts", f"..={SAMPLES / 'prompts.jsonl'}"), "a label of letters, digits"),
        ((*PROMPTS, "--configs", "x_{mpt}.yaml"), "wanted {mtp} and {variant} in it"),
        ((*PROMPTS, "--engine", "vllm", "--configs", "{mtp}_{variant}"), "variable alone"),
        ((*PROMPTS, "--compares", "sampler"), "wanted --engine vllm for the sampler"),
        ((*TEXT, *VLLM[:2], "--compares", "sampler", "--sampling", "--presence-penalty 1"), "no penalties"),
    ],
)
def test_wrong_use(bench: Bench, options: tuple[str, ...], message: str) -> None:
    result = bench.run(prompts=options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert bench.calls == []


def test_reduction_and_interval_are_of_the_logarithms() -> None:
    off, on = [10.0, 10.1, 10.05, 9.95, 10.0, 10.1], [9.0, 9.05, 9.1, 8.95, 9.05, 8.95]

    def compare(scale: float) -> Comparison:
        case = {"MTP": 0, "prompt": "64K"}
        records = [
            run_record(
                f"{side}{index}",
                {**case, "variant": side, "repetition": index + 1},
                {"tpot_ms": scale * value, "acceptance": None},
            )
            for side, values in (("off", off), ("on", on))
            for index, value in enumerate(values)
        ]
        return Outcome(len(records), records).compare([case], "tpot_ms", 3, math.log)[0]

    looks = looks_at(*([math.log(value) for value in side] for side in (off, on)))
    low, high = bounds(looks, 0.025 / 3)
    got = reduction(compare(1))
    assert got == pytest.approx([1 - math.exp(end) for end in (looks[0].difference, high, low)])
    assert reduction(compare(7)) == pytest.approx(got)
