"""The shipped YAML files are valid, and put together they are the configurations that their names say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.campaigns.configs import BASES, MTP, VARIANTS, check_pair, combined_configs
from gvr_topk import cli
from gvr_topk.config import ConfigError, load_config
from gvr_topk.config_files import combine

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PARTS = sorted(CONFIGS.rglob("*.yaml"))
COMBINED = combined_configs()
NAMES = [f"{base}_mtp{mtp}_{side}" for base in BASES for mtp in MTP for side in VARIANTS]


def _name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def test_every_part_is_told_and_used() -> None:
    told = set(re.findall(r"^\| (.+) \|.+\|$", (CONFIGS / "README.md").read_text(), re.MULTILINE))
    assert {name for cell in told for name in re.findall(r"`([\w/]+\.yaml)`", cell)} == set(map(_name, PARTS))
    assert {path.stem for path in (CONFIGS / "base").iterdir()} == set(BASES)


@pytest.mark.parametrize("path", PARTS, ids=_name)
def test_part_is_valid(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize("name", NAMES)
def test_combination_holds_what_its_name_says(name: str) -> None:
    config = load_config(COMBINED / f"{name}.yaml")
    assert config.heuristic_enabled is name.endswith("_on")
    assert config.next_n == 1 + int(name.rpartition("_mtp")[2].partition("_")[0])
    assert config.model_dump()["enable_attention_dp"] is ("dep8" in name)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_off")])
def test_pair_is_a_fair_comparison(name: str) -> None:
    check_pair(COMBINED / f"{name}.yaml", COMBINED / f"{name.removesuffix('off')}on.yaml")


@pytest.mark.parametrize("base", BASES)
def test_settings_of_a_base_survive_and_mtp_changes_speculation_only(base: str) -> None:
    def load(file: Path) -> dict[str, Any]:
        return dict(yaml.safe_load(file.read_text()))

    alone = load(CONFIGS / "base" / f"{base}.yaml")
    for mtp in MTP:
        combined = load(COMBINED / f"{base}_mtp{mtp}_on.yaml")
        assert combined.pop("sparse_attention_config") == {"algorithm": "dsa", "enable_heuristic_topk": True}
        layers = combined.pop("speculative_config", {}).get("num_nextn_predict_layers", 0)
        assert layers == mtp
        assert combined == alone


@pytest.mark.parametrize("base", [base for base in BASES if base.startswith("bench")])
def test_min_latency_files_are_of_batch_one(base: str) -> None:
    config = yaml.safe_load((CONFIGS / "base" / f"{base}.yaml").read_text())
    assert config["cuda_graph_config"]["max_batch_size"] == 1
    # A fixed prompt would be prefilled once only.
    assert config["kv_cache_config"]["enable_block_reuse"] is False


def test_later_files_count_and_sections_are_put_together(tmp_path: Path) -> None:
    under, over = tmp_path / "under.yaml", tmp_path / "over.yaml"
    under.write_text(
        "max_batch_size: 8\nkv_cache_config: {tokens_per_block: 64, free_gpu_memory_fraction: 0.8}\n"
        "cuda_graph_config: {batch_sizes: [1, 2]}\n"
    )
    over.write_text(
        "max_batch_size: 4\nkv_cache_config: {tokens_per_block: 32}\ncuda_graph_config: {batch_sizes: [8]}\n"
    )
    text = combine([under, over])
    assert text.startswith(f"# Combined from {under}, {over}\n")
    assert yaml.safe_load(text) == {
        "max_batch_size": 4,
        "kv_cache_config": {"tokens_per_block": 32, "free_gpu_memory_fraction": 0.8},
        "cuda_graph_config": {"batch_sizes": [8]},
    }


def test_wrong_files_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("gvr_topk: {stats: 3}\n")
    with pytest.raises(ConfigError, match=r"wrong\.yaml:1: gvr_topk\.stats: wanted a valid boolean, got 3"):
        combine([CONFIGS / "heuristic_on.yaml", wrong])
    with pytest.raises(ValueError, match="files: wanted at least one"):
        combine([])


def test_sections_that_hold_themselves_are_not_combined(tmp_path: Path) -> None:
    files = tmp_path / "one.yaml", tmp_path / "two.yaml"
    for file in files:
        file.write_text("x: &a {y: *a}\n")
    with pytest.raises(ConfigError, match=r"two\.yaml: wanted sections that can be combined key by key"):
        combine(files)


def test_a_combination_is_checked_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "few.yaml", tmp_path / "path.yaml"
    files[0].write_text("sparse_attention_config: {algorithm: dsa, index_topk: 1000}\n")
    files[1].write_text("gvr_topk: {path: paper_gvr}\n")
    out = tmp_path / "out.yaml"
    assert cli.main(["config", "combine", *map(str, files), "--out", str(out)]) == 1
    assert not out.exists()
    said = "wanted index_topk 512, 1024 or 2048 with path paper_gvr, got index_topk 1000"
    assert capsys.readouterr() == ("", f"gvr-topk: combined from {files[0]}, {files[1]}: {said}\n")
    assert cli.main(["config", "combine", str(files[1]), "--out", str(files[1])]) == 1
    assert files[1].read_text() == "gvr_topk: {path: paper_gvr}\n"


def test_names_stay_inside_of_the_comment(tmp_path: Path) -> None:
    odd = tmp_path / "a\nmax_batch_size: 7\n#.yaml"
    odd.write_text("max_batch_size: 8\n")
    text = combine([odd])
    assert text.splitlines()[0] == f"# Combined from {str(odd)!r}"
    assert yaml.safe_load(text) == {"max_batch_size": 8}


def test_exit_codes_of_both_commands_are_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text("gvr_topk: {stats: 3}\n")
    right.write_text("max_batch_size: 8\n")
    for command in (["config", "check"], ["config", "combine"]):
        assert cli.main([*command, str(wrong)]) == 1
        assert cli.main([*command, str(tmp_path / "none.yaml")]) == 2
        assert cli.main([*command, str(right)]) == 0
    out = tmp_path / "none" / "out.yaml"
    capsys.readouterr()
    assert cli.main(["config", "combine", str(right), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"gvr-topk: [Errno 2] No such file or directory: {str(out)!r}\n"


def test_command_writes_a_file_that_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [CONFIGS / "base" / "serve_tep8.yaml", CONFIGS / "mtp1.yaml", CONFIGS / "heuristic_on.yaml"]
    command = ["config", "combine", *map(str, parts)]
    assert cli.main([*command, "--out", str(tmp_path / "serve.yaml")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'serve.yaml'}\n"
    assert cli.main(command) == 0
    assert capsys.readouterr().out == (tmp_path / "serve.yaml").read_text()
    config = load_config(tmp_path / "serve.yaml")
    assert config.heuristic_enabled and config.next_n == 2
