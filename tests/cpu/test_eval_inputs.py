"""A comparison starts only from a fair pair of files and one well-defined prompt."""

import json
import sys
from pathlib import Path

import pytest

from eval.campaigns.configs import check_pair, combined_configs
from eval.campaigns.prompts import Prompt, apply_template, read_prompt
from eval.common.status import InputError

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "tests" / "data" / "eval_samples"
OFF = (combined_configs() / "bench_b200_tep8_mtp1_off.yaml").read_text()
ON = OFF.replace("heuristic_topk: false", "heuristic_topk: true")


def _pair(folder: Path, off: str, on: str) -> tuple[Path, Path]:
    (folder / "off.yaml").write_text(off)
    (folder / "on.yaml").write_text(on)
    return folder / "off.yaml", folder / "on.yaml"


def test_swapped_or_equal_pair(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"off.yaml: .*enable_heuristic_topk: wanted false, got true"):
        check_pair(*_pair(tmp_path, ON, OFF))
    with pytest.raises(InputError, match=r"on.yaml: .*wanted true, got false"):
        check_pair(*_pair(tmp_path, OFF, OFF))


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("tokens_per_block: 64", "tokens_per_block: 32", "kv_cache_config"),
        ("backend: TRTLLM", "backend: CUTLASS", "moe_config"),
        ("layers: 1", "layers: 3", "speculative_config"),
        ("enable_attention_dp: false", "max_stats_len: 5", "max_stats_len"),
    ],
)
def test_pair_that_differs_in_something_else(tmp_path: Path, old: str, new: str, key: str) -> None:
    assert old in OFF
    with pytest.raises(InputError, match=f"{key} differing too"):
        check_pair(*_pair(tmp_path, OFF, ON.replace(old, new)))


@pytest.mark.parametrize(
    ("off", "on", "key"),
    [
        ("", "future: {}", "future"),
        ("future: {}", "future: null", "future"),
        ("future: 1", "future: true", "future"),
        ("future: {a.b: 1}", "future: {a: {b: 1}}", "future"),
        ("", "stream_interval: 1", "stream_interval"),
        ("", "gvr_topk: {hint_offset: 0}", "gvr_topk"),
    ],
)
def test_pair_that_looks_alike_and_is_not(tmp_path: Path, off: str, on: str, key: str) -> None:
    text = "sparse_attention_config: {algorithm: dsa, enable_heuristic_topk: %s}\n"
    for first, second in ((off, on), (on, off)):
        with pytest.raises(InputError, match=rf"got .*{key}.* differing too"):
            check_pair(*_pair(tmp_path, text % "false" + first, text % "true" + second))


def test_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"on\.yaml"):
        check_pair(*_pair(tmp_path, OFF, OFF.replace("heuristic_topk: false", "heuristic_topkk: true")))


def test_prompt_forms() -> None:
    path = SAMPLES / "prompts.jsonl"
    assert read_prompt(path, 0) == Prompt("input_ids", [11, 12, 13, 14])
    assert read_prompt(path, 1) == Prompt("prompt", "Count to ten.")
    assert read_prompt(path, 2) == Prompt(
        "messages", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to ten."}]
    )


def test_unusable_prompts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="got no such file"):
        read_prompt(tmp_path / "none.jsonl", 0)
    with pytest.raises(InputError, match="wanted an entry from 0 to 2, got 3"):
        read_prompt(SAMPLES / "prompts.jsonl", 3)
    path = tmp_path / "p.jsonl"
    for line, message in (
        ("{", "is not JSON"),
        ('{"text": "x"}', r"got the keys \['text'\]"),
        ("[]", "keys list"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(InputError, match=message):
            read_prompt(path, 0)


@pytest.mark.parametrize("entry", [0, 1, 2])
def test_written_prompt_reads_back_the_same(tmp_path: Path, entry: int) -> None:
    prompt = read_prompt(SAMPLES / "prompts.jsonl", entry)
    path = tmp_path / "p.jsonl"
    path.write_text(prompt.lines(3, 1024))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["task_id"] for line in lines] == [0, 1, 2]
    assert {line["output_tokens"] for line in lines} == {1024}
    assert [read_prompt(path, index) for index in range(3)] == [prompt] * 3


def test_length_limit_follows_the_prompt() -> None:
    assert Prompt("prompt", "x").max_seq_len(1024) is None
    assert Prompt("input_ids", [1] * 65536).max_seq_len(1024) == 81920  # 1.25 times
    assert Prompt("input_ids", [1] * 1000).max_seq_len(1024) == 3072  # room for the output


def test_a_chat_template_makes_token_ids_or_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers.py").write_text(
        "class AutoTokenizer:\n"
        "    @classmethod\n"
        "    def from_pretrained(cls, name, trust_remote_code):\n"
        "        assert name == 'model'\n"
        "        return cls()\n"
        "    def apply_chat_template(self, messages, add_generation_prompt, tokenize):\n"
        "        assert add_generation_prompt\n"
        "        words = [m['content'] for m in messages]\n"
        "        return list(map(len, words)) if tokenize else '|'.join(words)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    chat = read_prompt(SAMPLES / "prompts.jsonl", 2)
    assert apply_template(chat, "model", as_text=False) == Prompt("input_ids", [9, 13])
    assert apply_template(chat, "model", as_text=True) == Prompt("prompt", "Be brief.|Count to ten.")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="needs the package transformers"):
        apply_template(Prompt("messages", []), "model", as_text=True)
