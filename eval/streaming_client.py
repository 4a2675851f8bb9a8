"""Time to first token and time per output token of any OpenAI-compatible server, by streaming.

    python -m eval stream --url http://127.0.0.1:8000 --prompt-file prompts.jsonl --max-tokens 1024

Requests go one after another (batch 1). Per request, with the arrival time of each chunk:

    TTFT = t_first - t_sent            TPOT = (t_last - t_first) / (tokens - 1)

``tokens`` is the server's own count (``usage.completion_tokens``); with speculative decoding one chunk
holds several tokens, so that chunks are counted only where the server sends no usage, and the report
says so. trtllm-serve adds the mean number of tokens per decoding step, from which the draft acceptance
rate follows.

Only the standard library speaks HTTP here: the script runs wherever the server runs.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from eval.common.prompts import InputError, Prompt, read_prompt

Endpoint = Literal["auto", "completions", "chat"]
TokenSource = Literal["usage", "chunks"]

BODY_CHARS = 500
"""Characters of an error answer that go into the message."""


class StreamError(RuntimeError):
    """A request brought no usable stream; the message says what came instead."""


@dataclass(frozen=True)
class StreamResult:
    """One streamed answer.

    Attributes
    ----------
    ttft_ms, tpot_ms, total_ms : float
        Milliseconds; `total_ms` until the last token.
    output_tokens : int
    token_source : str
        ``usage`` (counted by the server) or ``chunks``.
    chunks : int
        Chunks that carried a token.
    tokens_per_step : float or None
        Mean tokens per decoding step, where the server reports it.
    finish_reason : str or None
    """

    ttft_ms: float
    tpot_ms: float
    total_ms: float
    output_tokens: int
    token_source: TokenSource
    chunks: int
    tokens_per_step: float | None
    finish_reason: str | None


def request_body(
    prompt: Prompt, model: str, max_tokens: int, *, endpoint: Endpoint = "auto", ignore_eos: bool = True
) -> tuple[str, dict[str, Any]]:
    """Path and JSON body of a streaming request with greedy decoding.

    Raises
    ------
    InputError
        The prompt's form does not fit the endpoint.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True  # a fixed output length; not in OpenAI's API, known to most servers
    if endpoint == "auto":
        endpoint = "chat" if prompt.messages is not None else "completions"
    if endpoint == "completions":
        if prompt.messages is not None:
            raise InputError("endpoint: wanted chat for a prompt of messages, got completions")
        body["prompt"] = list(prompt.input_ids) if prompt.input_ids is not None else prompt.text
        return "/v1/completions", body
    if prompt.input_ids is not None:
        raise InputError("endpoint: wanted completions for a prompt of token ids, got chat")
    if prompt.messages is not None:
        body["messages"] = list(prompt.messages)
    else:
        body["messages"] = [{"role": "user", "content": prompt.text}]
    return "/v1/chat/completions", body


def stream_once(
    url: str,
    path: str,
    body: dict[str, Any],
    *,
    timeout_s: float = 600.0,
    clock: Callable[[], float] = time.perf_counter,
) -> StreamResult:
    """Send one request and time its stream.

    Parameters
    ----------
    url : str
        Address of the server, ``http://host:port``, with any prefix before ``/v1``.
    path, body
        From `request_body`.
    timeout_s : float
        Longest silence on the connection, seconds.
    clock : callable
        Seconds.

    Raises
    ------
    StreamError
        No connection, an HTTP error, an answer that is no event stream, a stream that breaks off, is
        empty or reports an error, or fewer than two tokens.
    """
    sent = clock()
    first = last = 0.0
    chunks, finish_reason, usage_tokens, tokens_per_step, ended = 0, None, None, None, False
    for data in _events(url, path, body, timeout_s):
        now = clock()
        if data == "[DONE]":
            ended = True
            break
        event = _parse_event(data)
        if usage := event.get("usage"):
            usage_tokens = usage.get("completion_tokens", usage_tokens)
        for choice in event.get("choices") or []:
            finish_reason = choice.get("finish_reason") or finish_reason
            if choice.get("avg_decoded_tokens_per_iter") is not None:
                tokens_per_step = float(choice["avg_decoded_tokens_per_iter"])
            if _carries_token(choice):
                chunks += 1
                first, last = first or now, now
    if not ended and finish_reason is None:
        raise StreamError(f"the stream broke off after {chunks} chunks: no finish_reason and no [DONE]")
    if chunks == 0:
        raise StreamError("the stream was empty: it ended without a token")
    tokens = int(usage_tokens) if usage_tokens is not None else chunks
    if tokens < 2 or chunks < 2:
        raise StreamError(f"wanted at least 2 tokens in 2 chunks for a TPOT, got {tokens} in {chunks}")
    return StreamResult(
        ttft_ms=1e3 * (first - sent),
        tpot_ms=1e3 * (last - first) / (tokens - 1),
        total_ms=1e3 * (last - sent),
        output_tokens=tokens,
        token_source="usage" if usage_tokens is not None else "chunks",
        chunks=chunks,
        tokens_per_step=tokens_per_step,
        finish_reason=finish_reason,
    )


def get_json(url: str, path: str, timeout_s: float = 30.0) -> dict[str, Any]:
    """GET a JSON object from the server.

    Raises
    ------
    StreamError
        No connection, an HTTP error, or no JSON object.
    """
    connection = _connect(url, timeout_s)
    try:
        connection.request("GET", urlsplit(url).path.rstrip("/") + path, headers=_headers())
        response = connection.getresponse()
        text = response.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise StreamError(f"GET {url}{path}: {_describe(error)}") from None
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise StreamError(f"GET {url}{path}: HTTP {response.status} {response.reason}: {text[:BODY_CHARS]}")
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise StreamError(f"GET {url}{path}: wanted a JSON object, got {text[:BODY_CHARS]!r}")
    return data


def summarize(url: str, model: str, path: str, results: list[StreamResult]) -> dict[str, Any]:
    """The report of a series of requests, as written by ``--report-json``."""
    steps = [result.tokens_per_step for result in results if result.tokens_per_step is not None]
    sources = {result.token_source for result in results}
    return {
        "url": url,
        "model": model,
        "endpoint": path,
        "mean_tpot_ms": statistics.fmean(result.tpot_ms for result in results),
        "mean_ttft_ms": statistics.fmean(result.ttft_ms for result in results),
        "mean_output_tokens": statistics.fmean(result.output_tokens for result in results),
        "tokens_per_step": statistics.fmean(steps) if len(steps) == len(results) else None,
        "token_source": "usage" if sources == {"usage"} else "chunks",
        "requests": [asdict(result) for result in results],
    }


def _carries_token(choice: dict[str, Any]) -> bool:
    """Whether a chunk stands for generated tokens.

    Text may be empty for a special token; left out are the role-only chunk that opens a chat answer and
    an empty chunk that only says why the answer ended.
    """
    if "delta" in choice:
        delta = choice["delta"] or {}
        return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def _events(url: str, path: str, body: dict[str, Any], timeout_s: float) -> Iterator[str]:
    """Yield the data of each server-sent event."""
    where = f"POST {url}{path}"
    connection = _connect(url, timeout_s)
    try:
        connection.request(
            "POST", urlsplit(url).path.rstrip("/") + path, body=json.dumps(body), headers=_headers()
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            text = response.read(4 * BODY_CHARS).decode("utf-8", errors="replace")[:BODY_CHARS]
            raise StreamError(f"{where}: HTTP {response.status} {response.reason}: {text}")
        kind = response.getheader("Content-Type", "")
        if "text/event-stream" not in kind:
            text = response.read(4 * BODY_CHARS).decode("utf-8", errors="replace")[:BODY_CHARS]
            raise StreamError(f"{where}: wanted an event stream, got Content-Type {kind!r}: {text}")
        while line := response.readline():
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].strip().decode("utf-8", errors="replace")
    except TimeoutError:
        raise StreamError(f"{where}: nothing came for {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise StreamError(f"{where}: {_describe(error)}") from None
    finally:
        connection.close()


def _parse_event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise StreamError(f"wanted JSON in an event, got {data[:BODY_CHARS]!r}") from None
    if not isinstance(event, dict):
        raise StreamError(f"wanted a JSON object in an event, got {data[:BODY_CHARS]!r}")
    if event.get("error") or event.get("object") == "error":
        raise StreamError(f"the server reported an error in the stream: {data[:BODY_CHARS]}")
    return event


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StreamError(f"url: wanted http://host:port, got {url!r}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=timeout_s)


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _describe(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused; is the server running?"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection closed in the middle of the stream"
    return f"{type(error).__name__}: {error}"


def main(
    url: Annotated[str, typer.Option(help="Server, http://host:port (before /v1).")],
    prompt_file: Annotated[Path, typer.Option(help="JSON lines: input_ids, prompt, messages or user.")],
    entry: Annotated[int, typer.Option(help="Line of the prompt file, from 0.")] = 0,
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="auto: chat for messages, else completions.")] = "auto",
    requests: Annotated[int, typer.Option(min=1, help="Timed requests, one after another.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before those.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens per request.")] = 1024,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for the full output length.")] = True,
    timeout: Annotated[float, typer.Option(help="Longest silence on the connection, seconds.")] = 600.0,
    report_json: Annotated[Path | None, typer.Option(help="Where to write the report.")] = None,
) -> None:
    """Measure TTFT and TPOT of an OpenAI-compatible server."""
    try:
        prompt = read_prompt(prompt_file, entry)
        if model is None:
            served = get_json(url, "/v1/models").get("data") or []
            if not served:
                raise StreamError(f"GET {url}/v1/models: no model listed; name one with --model")
            model = str(served[0]["id"])
        path, body = request_body(prompt, model, max_tokens, endpoint=endpoint, ignore_eos=ignore_eos)
        results = []
        for index in range(-warmup, requests):
            result = stream_once(url, path, body, timeout_s=timeout)
            name = "warm-up" if index < 0 else f"request {index + 1}/{requests}"
            typer.echo(
                f"{name}: TTFT {result.ttft_ms:.2f} ms, TPOT {result.tpot_ms:.4f} ms, "
                f"{result.output_tokens} tokens ({result.token_source})"
            )
            if index >= 0:
                results.append(result)
    except (StreamError, InputError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    report = summarize(url, model, path, results)
    typer.echo(f"mean TPOT {report['mean_tpot_ms']:.4f} ms, mean TTFT {report['mean_ttft_ms']:.2f} ms")
    if report_json is not None:
        report_json.parent.mkdir(parents=True, exist_ok=True)
        report_json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
