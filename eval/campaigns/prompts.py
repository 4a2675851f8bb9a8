"""One fixed prompt, read from the file formats that are in use."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eval.common.status import InputError


@dataclass(frozen=True)
class Prompt:
    """One prompt in one of three forms: token ids, text, or chat messages."""

    form: Literal["input_ids", "prompt", "messages"]
    content: Any

    def max_seq_len(self, output_tokens: int) -> int | None:
        """Length limit to serve this prompt with, as the paper's scripts choose it.

        A quarter above the prompt, in whole 1024s, and never less than the prompt and its output with
        room for draft tokens. None where the number of tokens is not known.
        """
        if self.form != "input_ids":
            return None
        tokens = len(self.content)
        return math.ceil(max(1.25 * tokens, tokens + output_tokens + 64) / 1024) * 1024

    def lines(self, requests: int, output_tokens: int) -> str:
        """The prompt `requests` times, in trtllm-bench's dataset format.

        trtllm-bench never runs more requests than its file has lines, so that a fixed prompt is repeated.
        """
        data = [
            {"task_id": index, self.form: self.content, "output_tokens": output_tokens}
            for index in range(requests)
        ]
        return "".join(json.dumps(line) + "\n" for line in data)


def read_prompt(path: Path, entry: int) -> Prompt:
    """Read line `entry` (from 0) of a JSON-lines prompt file.

    A line is of trtllm-bench (``input_ids`` or ``prompt``), of LongSeqTasks (``system`` and ``user``), or
    a chat request (``messages``).
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except FileNotFoundError:
        raise InputError(f"{path}: wanted a JSON-lines prompt file, got no such file") from None
    if not 0 <= entry < len(lines):
        raise InputError(f"{path}: wanted an entry from 0 to {len(lines) - 1}, got {entry}")
    try:
        data = json.loads(lines[entry])
    except ValueError as error:
        raise InputError(f"{path}: entry {entry} is not JSON: {error}") from None
    given = data if isinstance(data, dict) else {}
    if given.get("input_ids"):
        return Prompt("input_ids", [int(token) for token in given["input_ids"]])
    if isinstance(given.get("prompt"), str):
        return Prompt("prompt", given["prompt"])
    if isinstance(given.get("messages"), list):
        return Prompt("messages", given["messages"])
    if isinstance(given.get("user"), str):
        parts = [{"role": role, "content": given[role]} for role in ("system", "user") if given.get(role)]
        return Prompt("messages", parts)
    keys = sorted(data) if isinstance(data, dict) else type(data).__name__
    raise InputError(
        f"{path}: entry {entry}: wanted input_ids, prompt, messages or user, got the keys {keys}"
    )


def apply_template(prompt: Prompt, tokenizer: str, *, as_text: bool) -> Prompt:
    """Turn chat messages into token ids, or a text, with the model's chat template."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError("--tokenizer needs the package transformers (TensorRT-LLM brings it)") from None
    loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=True)
    given = loaded.apply_chat_template(prompt.content, add_generation_prompt=True, tokenize=not as_text)
    return Prompt("prompt", given) if as_text else Prompt("input_ids", list(given))
