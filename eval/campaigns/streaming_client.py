"""Time to first token and time per output token of any OpenAI-compatible server, by streaming.

    python -m eval stream --url http://127.0.0.1:8000 --prompt-file prompts.jsonl --max-tokens 1024

Requests go one after another (batch 1), or ``--concurrency`` at once, a new one as soon as one has ended. Per
request, with the arrival time of each chunk:

    TTFT = t_first - t_sent            TPOT = (t_last - t_first) / (tokens - 1)

Every chunk that stands for a token is timed, whether or not it has text: a special token and the bytes of
an unfinished character come as empty chunks, and take as long as others. Left out are the role that opens
a chat answer, and an empty chunk that only says why the answer ended; where the server counts more tokens
than chunks were seen, the latter may have carried one and is timed too.

``tokens`` is the server's own count (``usage.completion_tokens``); with speculative decoding one chunk
holds several tokens, so that chunks are counted only where the server sends no usage, and the report
says so. It also says in how many requests the two counts disagree. trtllm-serve adds the mean number of
tokens per decoding step, from which the draft acceptance rate follows, and so does ``vllm serve
--per-request-spec-decode-metrics summary``.

Only the standard library speaks HTTP here: the script runs wherever the server runs.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

if __package__ in (None, ""):  # the verb tpot starts this file in a process of its own
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import typer

from eval.campaigns.prompts import InputError, Prompt, read_prompt
from eval.common.status import TOOL_FAULT, UNDECIDED, WRONG_USE

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
        Chunks that stood for a token, with text or without.
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

    @property
    def disagrees(self) -> bool:
        """Whether the server counts another number of tokens than chunks were timed."""
        return self.output_tokens != self.chunks


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
        empty, malformed or reports an error, or fewer than two tokens.
    """
    sent = clock()
    times: list[float] = []
    ending: float | None = None
    finish_reason, usage_tokens, tokens_per_step, ended = None, None, None, False
    for data in _events(url, path, body, timeout_s):
        now = clock()
        if data == "[DONE]":
            ended = True
            break
        event = _parse_event(data)
        counted = _completion_tokens(event)
        carries = counted is not None and usage_tokens is not None and counted > usage_tokens
        usage_tokens = usage_tokens if counted is None else counted
        tokens_per_step = _vllm_tokens_per_step(event) or tokens_per_step
        for choice in _choices(event):
            finish_reason = choice.get("finish_reason") or finish_reason
            if choice.get("avg_decoded_tokens_per_iter") is not None:
                tokens_per_step = _number(choice, "avg_decoded_tokens_per_iter")
            kind = _kind(choice)
            carries = carries or kind == "token"
            if kind == "ending":
                ending = now
        if carries:
            times.append(now)
    if not ended and finish_reason is None:
        raise StreamError(f"the stream broke off after {len(times)} chunks: no finish_reason and no [DONE]")
    if ending is not None and usage_tokens is not None and usage_tokens > len(times):
        times.append(max([*times, ending]))
    if not times:
        raise StreamError("the stream was empty: it ended without a token")
    tokens = len(times) if usage_tokens is None else usage_tokens
    if tokens < 2 or len(times) < 2:
        raise StreamError(f"wanted at least 2 tokens in 2 chunks for a TPOT, got {tokens} in {len(times)}")
    return StreamResult(
        ttft_ms=1e3 * (times[0] - sent),
        tpot_ms=1e3 * (times[-1] - times[0]) / (tokens - 1),
        total_ms=1e3 * (times[-1] - sent),
        output_tokens=tokens,
        token_source="chunks" if usage_tokens is None else "usage",
        chunks=len(times),
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


def stream_many(
    count: int, concurrency: int, once: Callable[[], StreamResult], see: Callable[[int, StreamResult], None]
) -> list[StreamResult]:
    """Send `count` requests, at most `concurrency` at once.

    Parameters
    ----------
    count, concurrency : int
    once : callable
        Sends one request and times its stream.
    see : callable
        Takes each result with its number, in the order of sending.

    Raises
    ------
    StreamError
        That of the first request that failed; those that were sent are waited for.
    """
    results = []
    with ThreadPoolExecutor(concurrency) as pool:
        for number, sent in enumerate([pool.submit(once) for _ in range(count)]):
            try:
                results.append(sent.result())
            except StreamError:
                pool.shutdown(cancel_futures=True)
                raise
            see(number, results[-1])
    return results


def summarize(
    url: str, model: str, path: str, results: list[StreamResult], concurrency: int = 1
) -> dict[str, Any]:
    """The report of a series of requests, as written by ``--report-json``."""
    steps = [result.tokens_per_step for result in results if result.tokens_per_step is not None]
    sources = {result.token_source for result in results}
    return {
        "url": url,
        "model": model,
        "endpoint": path,
        "concurrency": concurrency,
        "mean_tpot_ms": statistics.fmean(result.tpot_ms for result in results),
        "mean_ttft_ms": statistics.fmean(result.ttft_ms for result in results),
        "mean_output_tokens": statistics.fmean(result.output_tokens for result in results),
        "tokens_per_step": statistics.fmean(steps) if len(steps) == len(results) else None,
        "token_source": "usage" if sources == {"usage"} else "chunks",
        "mean_chunks": statistics.fmean(result.chunks for result in results),
        "requests_where_counts_disagree": sum(result.disagrees for result in results),
        "requests": [asdict(result) for result in results],
    }


def _kind(choice: dict[str, Any]) -> Literal["token", "opening", "ending"]:
    """What one choice of a chunk stands for; see the top of this file."""
    if "delta" in choice:
        delta = _mapping(choice["delta"] or {}, "delta")
        text = any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))
        if not text and delta.get("role") and not choice.get("finish_reason"):
            return "opening"
    else:
        text = bool(choice.get("text"))
    return "ending" if not text and choice.get("finish_reason") else "token"


def _completion_tokens(event: dict[str, Any]) -> int | None:
    """The server's count of tokens so far, where the event has one."""
    usage = event.get("usage")
    if not usage:
        return None
    count = _mapping(usage, "usage").get("completion_tokens")
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise StreamError(f"usage.completion_tokens: wanted a count, got {_shown(count)}")
    return count


def _vllm_tokens_per_step(event: dict[str, Any]) -> float | None:
    """Tokens per decoding step as ``vllm serve`` reports them with the usage at the end."""
    metrics = _mapping(event.get("metrics") or {}, "metrics")
    speculative = _mapping(metrics.get("speculative_decoding") or {}, "speculative_decoding")
    name = "mean_acceptance_length"
    return None if speculative.get(name) is None else _number(speculative, name)


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices") or []
    if not isinstance(choices, list):
        raise StreamError(f"choices: wanted a list, got {_shown(choices)}")
    return [_mapping(choice, "choices") for choice in choices]


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StreamError(f"{name}: wanted a JSON object, got {_shown(value)}")
    return value


def _number(data: dict[str, Any], name: str) -> float:
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise StreamError(f"{name}: wanted a number, got {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    return repr(value)[:BODY_CHARS]


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
    requests: Annotated[int, typer.Option(min=1, help="Timed requests.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before those.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens per request.")] = 1024,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for the full output length.")] = True,
    timeout: Annotated[float, typer.Option(help="Longest silence on the connection, seconds.")] = 600.0,
    report_json: Annotated[Path | None, typer.Option(help="Where to write the report.")] = None,
) -> None:
    """Measure TTFT and TPOT of an OpenAI-compatible server."""
    try:
        prompt = read_prompt(prompt_file, entry)
        if model is None:
            model = _first_model(url)
        path, body = request_body(prompt, model, max_tokens, endpoint=endpoint, ignore_eos=ignore_eos)

        def once() -> StreamResult:
            return stream_once(url, path, body, timeout_s=timeout)

        stream_many(warmup, concurrency, once, lambda number, result: _say("warm-up", result))
        results = stream_many(
            requests,
            concurrency,
            once,
            lambda number, result: _say(f"request {number + 1}/{requests}", result),
        )
        report = summarize(url, model, path, results, concurrency)
        typer.echo(f"mean TPOT {report['mean_tpot_ms']:.4f} ms, mean TTFT {report['mean_ttft_ms']:.2f} ms")
        if report["requests_where_counts_disagree"]:
            typer.echo(
                f"the server counts {report['mean_output_tokens']:g} tokens, "
                f"{report['mean_chunks']:g} chunks were timed: several tokens came in one chunk, "
                "as with draft tokens, or some came in none"
            )
        if report_json is not None:
            report_json.parent.mkdir(parents=True, exist_ok=True)
            report_json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(WRONG_USE) from None
    except StreamError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(UNDECIDED) from None
    except Exception:
        traceback.print_exc()
        raise typer.Exit(TOOL_FAULT) from None


def _say(name: str, result: StreamResult) -> None:
    note = f", in {result.chunks} chunks" if result.disagrees else ""
    typer.echo(
        f"{name}: TTFT {result.ttft_ms:.2f} ms, TPOT {result.tpot_ms:.4f} ms, "
        f"{result.output_tokens} tokens ({result.token_source}){note}"
    )


def _first_model(url: str) -> str:
    served = get_json(url, "/v1/models").get("data")
    if not isinstance(served, list) or not served:
        raise StreamError(f"GET {url}/v1/models: no model listed; name one with --model")
    return str(_mapping(served[0], "data").get("id"))


if __name__ == "__main__":
    typer.run(main)
