"""Every mistake a user can make in the YAML file gets one message that names it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gvr_topk.arguments import PAPER_K
from gvr_topk.config import (
    MOST_BYTES,
    ConfigError,
    ConfigFileError,
    GvrTopkConfig,
    load_config,
    parse_config,
    parse_text,
)
from gvr_topk.constants import MAX_WIDTH
from gvr_topk.constants import Path as OpPath
from gvr_topk.policy import plan

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

SERVE = """
backend: pytorch
tensor_parallel_size: 8
moe_expert_parallel_size: 8
enable_attention_dp: false
max_batch_size: 64
max_num_tokens: 8192
max_seq_len: 131072
print_iter_log: true
trust_remote_code: true
kv_cache_config:
  free_gpu_memory_fraction: 0.8
  dtype: fp8
  enable_block_reuse: false
  tokens_per_block: 64
cuda_graph_config:
  enable_padding: true
  batch_sizes: [1, 2, 4, 8, 64]
moe_config:
  backend: TRTLLM
speculative_config:
  decoding_type: MTP
  num_nextn_predict_layers: 3
sparse_attention_config:
  algorithm: dsa
  index_topk: 1024
  enable_heuristic_topk: true
gvr_topk:
  hint_offset: 1
  min_length: 8192
"""

SPARSE = "sparse_attention_config"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message(tmp_path: Path, text: str) -> str:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value).replace(str(path), "serve.yaml")


def test_a_full_serve_file_is_read(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SERVE))
    assert config.heuristic_enabled
    assert config.index_topk == 1024
    assert config.next_n == 4
    assert config.gvr_topk.hint_offset == 1
    assert config.gvr_topk.min_length == 8192 and config.gvr_topk.max_length is None
    assert config.model_dump(exclude_unset=True) == yaml.safe_load(SERVE)


def test_defaults_are_those_of_the_paper(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "sparse_attention_config: {algorithm: dsa}"))
    assert not config.heuristic_enabled
    assert config.index_topk == 2048
    assert config.next_n == 1
    assert config.gvr_topk.hint_offset == 0 and config.gvr_topk.path == "auto"
    assert config.gvr_topk.max_ctas == 0
    text = "sparse_attention_config: {algorithm: dsa, index_topk: null}\ngvr_topk:\n"
    assert load_config(write(tmp_path, text)).index_topk == 2048


@pytest.mark.parametrize(
    ("decoding", "next_n"),
    [
        ("{decoding_type: MTP}", 2),
        ("{decoding_type: MTP, max_draft_len: 3}", 4),
        ("{decoding_type: Eagle, max_draft_len: 4}", 5),
        ("{decoding_type: User_Provided}", 1),
    ],
)
def test_rows_per_request(tmp_path: Path, decoding: str, next_n: int) -> None:
    assert load_config(write(tmp_path, f"speculative_config: {decoding}")).next_n == next_n


@pytest.mark.parametrize("path", OpPath)
def test_every_path_of_the_op_can_be_configured(path: OpPath) -> None:
    assert GvrTopkConfig(path=path.name.lower()).path == path.name.lower()  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, 2, 4, 8, 16])
def test_cap_of_the_cluster_size(tmp_path: Path, size: int) -> None:
    assert load_config(write(tmp_path, f"gvr_topk: {{max_ctas: {size}}}")).gvr_topk.max_ctas == size


def test_measuring_file_lists_every_key_of_ours() -> None:
    text = (CONFIGS / "heuristic_measure.yaml").read_text(encoding="utf-8")
    assert set(yaml.safe_load(text)["gvr_topk"]) == set(GvrTopkConfig.model_fields)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, False),
        ({"path": "no_hint"}, False),
        ({"path": "radix_rounds"}, False),
        ({"path": "paper_gvr"}, True),
        ({"stats": True}, True),
        ({"stats": True, "keep_positions": False}, False),
        ({"keep_positions": True}, True),
    ],
)
def test_positions_are_kept_where_something_reads_them(options: dict[str, Any], kept: bool) -> None:
    assert GvrTopkConfig(**options).positions_kept is kept


@pytest.mark.parametrize(
    ("configured", "limits"),
    [
        ({}, (0, MAX_WIDTH)),
        ({"min_length": 5}, (5, MAX_WIDTH)),
        ({"max_length": 9}, (0, 9)),
        ({"min_length": 5, "max_length": 9}, (5, 9)),
    ],
)
def test_limits_of_a_configuration(configured: dict[str, int], limits: tuple[int, int]) -> None:
    assert GvrTopkConfig(**configured).length_limits == limits


MESSAGES = """
gvr_topk: {hint_ofset: 1}
  gvr_topk.hint_ofset: wanted a key of gvr_topk, got an unknown key (did you mean hint_offset?)
gvr_topk: {path: fast}
  gvr_topk.path: wanted 'auto', 'paper_gvr', 'no_hint' or 'radix_rounds', got 'fast'
gvr_topk: {path: paper_gvr, keep_positions: false}
  gvr_topk: wanted keep_positions true or null with path paper_gvr, got keep_positions false
gvr_topk: {max_ctas: 3}
  gvr_topk.max_ctas: wanted 0, 1, 2, 4, 8 or 16, got 3
gvr_topk: {max_ctas: true}
  gvr_topk.max_ctas: wanted a valid integer, got true
gvr_topk: {max_ctas: "8"}
  gvr_topk.max_ctas: wanted a valid integer, got '8'
gvr_topk: {hint_offset: 9999999}
  gvr_topk.hint_offset: wanted less than or equal to 1048576, got 9999999
gvr_topk: {min_length: 9, max_length: 3}
  gvr_topk: wanted min_length <= max_length, got min_length 9, max_length 3
gvr_topk: {max_length: 2097153}
  gvr_topk.max_length: wanted less than or equal to 2097152, got 2097153
SPARSE: {algorithm: dsa, hint_offset: 1}
  SPARSE.hint_offset: wanted a key of SPARSE, got an unknown key (it belongs under gvr_topk)
SPARSE: {algorithm: dsa, enable_heuristic_topk: "true"}
  SPARSE.enable_heuristic_topk: wanted a valid boolean, got 'true'
SPARSE: {algorithm: dsa, index_topk: 2048.5}
  SPARSE.index_topk: wanted a valid integer, got 2048.5
SPARSE: {algorithm: dsa, index_topk: true}
  SPARSE.index_topk: wanted a valid integer, got true
SPARSE: {algorithm: dsa, index_topk: 0}
  SPARSE.index_topk: wanted greater than or equal to 1, got 0
SPARSE: {algorithm: dsa, index_topk: 2097153}
  SPARSE.index_topk: wanted less than or equal to 2097152, got 2097153
SPARSE: {index_topk: 2048}
  SPARSE.algorithm: wanted a value, got no such key
SPARSE: dsa
  SPARSE: wanted a valid dictionary or instance of SparseAttentionConfig, got 'dsa'
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 1024}
  speculative_config.num_nextn_predict_layers: wanted less than or equal to 1023, got 1024
speculative_config: {decoding_type: Eagle, max_draft_len: 1024}
  speculative_config.max_draft_len: wanted less than or equal to 1023, got 1024
enable_heuristic_topk: true
  enable_heuristic_topk: wanted a key at the top level, got an unknown key (it belongs under SPARSE)
gvr-topk: {}
  gvr-topk: wanted a key at the top level, got an unknown key (did you mean gvr_topk?)
sparse_attention_confg: {algorithm: dsa}
  sparse_attention_confg: wanted a key at the top level, got an unknown key (did you mean SPARSE?)
"""
LINES = MESSAGES.replace("SPARSE", SPARSE).strip().splitlines()
"""A line of YAML, and in the next one what is said of it."""


@pytest.mark.parametrize(("text", "said"), list(zip(LINES[::2], LINES[1::2], strict=True)))
def test_message(tmp_path: Path, text: str, said: str) -> None:
    assert message(tmp_path, text) == f"serve.yaml:1: {said.strip()}"


OURS = "hint_offset, keep_positions, max_ctas, max_length, min_length, nvtx, path, stats"
TWICE = "wanted each key once, got it again (first on line 3)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("on: 1", ": True: wanted a text as key, got an unknown key"),
        ("1: 2", ":1: 1: wanted a text as key, got an unknown key"),
        ("gvr_topk: {zzz: 1}", f":1: gvr_topk.zzz: wanted one of {OURS}, got an unknown key"),
        (
            f"{SPARSE}:\n  algorithm: dsa\n  index_topk: 5\n  index_topk: 2\n",
            f":4: {SPARSE}.index_topk: {TWICE}",
        ),
        ("future:\n  - a: 1\n  - {b: {c: 1, c: 2}}\n", f":3: future.1.b.c: {TWICE}"),
        ("a: {b\n", ":2: wanted valid YAML, got an error: expected ',' or '}', but got '<stream end>'"),
        ("- a\n", ": wanted a mapping of keys at the root, got a list"),
        ("", ": wanted a mapping of keys at the root, got nothing"),
        ("dsa", ": wanted a mapping of keys at the root, got a str"),
        (
            f"gvr_topk: {{path: paper_gvr}}\n{SPARSE}: {{algorithm: dsa, index_topk: 1000}}",
            ": wanted index_topk 512, 1024 or 2048 with path paper_gvr, got index_topk 1000",
        ),
    ],
    ids=lambda text: text[:40],
)
def test_message_of_a_file(tmp_path: Path, text: str, said: str) -> None:
    assert message(tmp_path, text) == f"serve.yaml{said}"


NEWER = """
sparse_attention_config:
  algorithm: deepseek_v4
  index_topk: 512
  enable_heuristic_topk: true
  use_self_sampling_topk: false
  use_gvr_emission: true
  index_share_for_mtp_iteration: true
  compress_ratios: [4, 128]
  window_size: 128
"""


def test_keys_that_are_not_ours_pass(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, NEWER))
    assert config.heuristic_enabled and config.index_topk == 512
    text = "sparse_attention_config: {algorithm: rocket, prompt_budget: 2048}\ntelemetry_config: {a: 1}\n"
    assert load_config(write(tmp_path, text)).model_dump(exclude_unset=True) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "key",
    [
        *("enable_heuristic_top_k", "enable_heuristic_topkk", "enable_heuristics_topk", "enable_heuristic"),
        *("use_heuristic_topk", "heuristic_topk", "Enable-Heuristic-TopK"),
    ],
)
def test_misspelled_switch(tmp_path: Path, key: str) -> None:
    text = f"sparse_attention_config:\n  algorithm: dsa\n  {key}: true\n"
    assert message(tmp_path, text) == (
        f"serve.yaml:3: sparse_attention_config.{key}: wanted a key of "
        "sparse_attention_config, got an unknown key (did you mean enable_heuristic_topk?)"
    )


def test_every_problem_is_listed_on_its_own_line(tmp_path: Path) -> None:
    text = "gvr_topk:\n  pth: auto\n  stats: 3\nspeculative_config: MTP\n"
    places = [line.split(": ")[:2] for line in message(tmp_path, text).splitlines()]
    keys = {2: "gvr_topk.pth", 4: "speculative_config", 3: "gvr_topk.stats"}
    assert places == [[f"serve.yaml:{line}", key] for line, key in keys.items()]


def test_merged_keys_are_no_duplicates(tmp_path: Path) -> None:
    load_config(write(tmp_path, "future: [{a: 1}, {a: 1}]"))  # the same key in two entries of a list
    text = "x: &x {a: 1}\nz: &z {a: 2}\ny: {<<: [*x, *z], a: 3}\n"
    assert load_config(write(tmp_path, text)).model_dump()["y"] == {"a": 3}
    assert "y.a: wanted each key once" in message(tmp_path, "x: &x {a: 1}\ny: {<<: *x, a: 3, a: 4}\n")


@pytest.mark.parametrize(
    "value",
    [
        *("2024-02-30", "!!int abc", "!!int ''", "!!bool abc", "!!float abc", "!!timestamp abc"),
        *("!!binary abc", "!!omap abc", "!!python/object:os.system a", "9" * 5000, "*nowhere"),
    ],
    ids=lambda value: value[:20],
)
def test_value_that_python_cannot_read_is_broken_yaml(tmp_path: Path, value: str) -> None:
    text = message(tmp_path, f"dtype: auto\nmax_seq_len: {value}\n")
    assert re.match(r"serve\.yaml(:2)?: wanted valid YAML, got an error: ", text)
    assert "\n" not in text and len(text) < 400


def test_aliases_that_lead_back_end(tmp_path: Path) -> None:
    for text in ("x: &a [*a]\n", "x: &a {<<: *a}\n", "x: &a {y: [*a, {z: *a}]}\n"):
        load_config(write(tmp_path, text))
    assert "gvr_topk.loop" in message(tmp_path, "gvr_topk: &a {loop: *a}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large.yaml"
    os.mkfifo(pipe)  # to read it would wait for a writer
    large.write_text("#" * (MOST_BYTES + 1))
    untold = [path for path in (Path("/proc/kallsyms"),) if path.exists()]  # empty, by the size that is told
    for path in (tmp_path, pipe, large, *untold):
        with pytest.raises(ConfigFileError, match="a regular one of at most 1048576 bytes, got another"):
            load_config(path)
    with pytest.raises(ConfigFileError, match=r"got no such file$"):
        load_config(tmp_path / "nowhere.yaml")


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(b"gvr_topk: \xff\xfe")
    with pytest.raises(ConfigError, match=r"wanted UTF-8 text, got bytes that are not UTF-8 at offset 10$"):
        load_config(path)


def test_problems_are_structured() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"gvr_topk": {"stats": "on"}}, source="args")
    (problem,) = caught.value.problems
    assert (problem.file, problem.key, problem.wanted) == ("args", "gvr_topk.stats", "a valid boolean")
    assert isinstance(caught.value, ValueError)


def test_the_papers_path_serves_what_the_plan_says() -> None:
    served = []
    for k in (1, 256, 512, 1000, 1024, 1536, 2048, 4096):
        try:
            plan(rows=1, width=65_536, k=k, path="paper_gvr")
        except ValueError:
            continue
        served.append(k)
    assert tuple(served) == PAPER_K


def test_an_empty_file_means_the_defaults() -> None:
    ours = {"hint_offset": 0, "path": "auto", "stats": False, "nvtx": False, "max_ctas": 0}
    assert parse_text("{}", "f").model_dump() == {
        "sparse_attention_config": None,
        "speculative_config": None,
        "gvr_topk": ours | dict.fromkeys(("min_length", "max_length", "keep_positions")),
    }
