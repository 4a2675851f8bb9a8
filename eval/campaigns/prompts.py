"""One fixed prompt, read from the file formats that are in use."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """A prompt file or a pair of configurations cannot be used."""


@dataclass(frozen=True)
class Prompt:
    """One prompt in exactly one of three forms: token ids, text, or chat messages."""

    input_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None

    def max_seq_len(self, output_tokens: int) -> int | None:
        """Length limit to serve this prompt with, as the paper's scripts choose it.

        A quarter above the prompt, in whole 1024s, and never less than the prompt and its output with
        room for draft tokens. None where the number of tokens is not known.
        """
        if self.input_ids is None:
            return None
        wanted = max(1.25 * len(self.input_ids), len(self.input_ids) + output_tokens + 64)
        return math.ceil(wanted / 1024) * 1024


def read_prompt(path: Path, entry: int) -> Prompt:
    """Read line `entry` (from 0) of a JSON-lines prompt file.

    A line is of trtllm-bench (``input_ids`` or ``prompt``), of LongSeqTasks (``system`` and ``user``), or
    a chat request (``messages``).

    Raises
    ------
    InputError
        No such file or line, or a line of another form.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            lines = [line for line in stream if line.strip()]
    except FileNotFoundError:
        raise InputError(f"{path}: wanted a JSON-lines prompt file, got no such file") from None
    if not 0 <= entry < len(lines):
        raise InputError(f"{path}: wanted an entry from 0 to {len(lines) - 1}, got {entry}")
    try:
        data = json.loads(lines[entry])
    except ValueError as error:
        raise InputError(f"{path}: entry {entry} is not JSON: {error}") from None
    keys = sorted(data) if isinstance(data, dict) else type(data).__name__
    if isinstance(data, dict):
        if data.get("input_ids"):
            return Prompt(input_ids=tuple(int(token) for token in data["input_ids"]))
        if isinstance(data.get("prompt"), str):
            return Prompt(text=data["prompt"])
        if isinstance(data.get("messages"), list):
            return Prompt(messages=tuple(data["messages"]))
        if isinstance(data.get("user"), str):
            system = [{"role": "system", "content": data["system"]}] if data.get("system") else []
            return Prompt(messages=(*system, {"role": "user", "content": data["user"]}))
    raise InputError(
        f"{path}: entry {entry}: wanted input_ids, prompt, messages or user, got the keys {keys}"
    )


def tokenize(prompt: Prompt, tokenizer: str) -> Prompt:
    """Turn chat messages into token ids with the model's chat template (needs ``transformers``).

    Raises
    ------
    InputError
        ``transformers`` is missing.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError("--tokenizer needs the package transformers (TensorRT-LLM brings it)") from None
    loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=True)
    ids = loaded.apply_chat_template(list(prompt.messages or ()), add_generation_prompt=True)
    return Prompt(input_ids=tuple(ids))


def prompt_lines(prompt: Prompt, requests: int, output_tokens: int) -> str:
    """The prompt `requests` times, in trtllm-bench's dataset format.

    trtllm-bench never runs more requests than its file has lines, so that a fixed prompt is repeated.
    """
    body: dict[str, Any]
    if prompt.input_ids is not None:
        body = {"input_ids": list(prompt.input_ids)}
    elif prompt.text is not None:
        body = {"prompt": prompt.text}
    else:
        body = {"messages": list(prompt.messages or ())}
    return "".join(
        json.dumps({"task_id": index, **body, "output_tokens": output_tokens}) + "\n"
        for index in range(requests)
    )


def text_hash(text: str) -> str:
    """SHA-256 of a text that is, or will be, the content of a file."""
    return hashlib.sha256(text.encode()).hexdigest()
