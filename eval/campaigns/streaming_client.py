"""Time to first token and time per output token of any OpenAI-compatible server, by streaming.

    python -m eval stream --url http://127.0.0.1:8000 --prompt-file prompts.jsonl --max-tokens 1024

Requests go one after another (batch 1), or ``--concurrency`` at once, a new one as soon as one has ended. Per
request, with the arrival time of each chunk:

    TTFT = t_first - t_sent            TPOT = (t_last - t_first) / (tokens - 1)

Every chunk that stands for a token is timed, whether or not it has text: a special token and the bytes of
an unfinished character come as empty chunks, and take as long as others. Left out are the role that opens
a chat answer, and an empty chunk that only says why the answer ended; where the server counts more tokens
than chunks were seen, the latter may have carried one and is timed too.

``tokens`` is the server's own count (``usage.completion_tokens``): with speculative decoding one chunk holds
several tokens. A server that sends no count cannot be measured. trtllm-serve adds the mean number of tokens
per decoding step, from which the draft acceptance rate follows, and so does ``vllm serve
--per-request-spec-decode-metrics summary``.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from eval.campaigns.prompts import Prompt, read_prompt
from eval.campaigns.reports import ClientReport, StreamResult
from eval.common.options import InputError
from eval.common.status import TOOL_FAULT, UNDECIDED, WRONG_USE

Endpoint = Literal["auto", "completions", "chat"]

BODY_CHARS = 500
"""Characters of an answer that go into a message."""


class StreamError(RuntimeError):
    """A server gave no answer that can be timed."""


@contextmanager
def answer(
    url: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 600.0
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET, or to a POST of `body`, never through a proxy.

    The standard library reads a line in a tenth of the time of the usual SDK's typed events, so that this
    process does not delay many streams at once. The key of the environment is sent.

    Raises
    ------
    StreamError
        No connection, an HTTP error, `timeout_s` seconds of silence, or an answer that is malformed.
    """
    where, parts = f"{url}{path}", urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StreamError(f"url: wanted http://host:port, got {url!r}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        sent = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", parts.path.rstrip("/") + path, sent, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            text = response.read(4 * BODY_CHARS).decode("utf-8", errors="replace")[:BODY_CHARS]
            raise StreamError(f"{where}: HTTP {response.status} {response.reason}: {text}")
        yield response
    except TimeoutError:
        raise StreamError(f"{where}: nothing came for {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise StreamError(f"{where}: {type(error).__name__}: {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise StreamError(f"{where}: the answer is malformed: {str(error)[:BODY_CHARS]}") from None
    finally:
        connection.close()


def request_body(
    prompt: Prompt, model: str, max_tokens: int, endpoint: Endpoint = "auto", ignore_eos: bool = True
) -> tuple[str, dict[str, Any]]:
    """Path and JSON body of a streaming request with greedy decoding.

    Raises
    ------
    InputError
        The prompt's form does not fit the endpoint.
    """
    chat = prompt.form == "messages" if endpoint == "auto" else endpoint == "chat"
    if not chat and prompt.form == "messages":
        raise InputError("endpoint: wanted chat for a prompt of messages, got completions")
    if chat and prompt.form == "input_ids":
        raise InputError("endpoint: wanted completions for a prompt of token ids, got chat")
    body = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        # A fixed output length; not in OpenAI's API, known to most servers.
        **({"ignore_eos": True} if ignore_eos else {}),
    }
    if not chat:
        return "/v1/completions", body | {"prompt": prompt.content}
    text = [{"role": "user", "content": prompt.content}]
    return "/v1/chat/completions", body | {"messages": prompt.content if prompt.form == "messages" else text}


def stream_once(
    url: str,
    path: str,
    body: dict[str, Any],
    timeout_s: float = 600.0,
    clock: Callable[[], float] = time.perf_counter,
) -> StreamResult:
    """Send one request and time its stream.

    Raises
    ------
    StreamError
        As of `answer`, and for a stream that breaks off, is empty or reports an error, has no count of
        tokens, or fewer than two.
    """
    times: list[float] = []
    ending, finish_reason, tokens, per_step = None, None, None, None
    sent = clock()
    with answer(url, path, body, timeout_s) as response:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            now, data = clock(), line[len(b"data:") :].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if event.get("error") or event.get("object") == "error":
                raise StreamError(f"the server reported an error in the stream: {event}"[:BODY_CHARS])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            metrics = (event.get("metrics") or {}).get("speculative_decoding") or {}
            per_step = metrics.get("mean_acceptance_length", per_step)
            for choice in event.get("choices") or ():
                finish_reason = choice.get("finish_reason") or finish_reason
                per_step = choice.get("avg_decoded_tokens_per_iter", per_step)
                delta = choice.get("delta") or {}
                text = choice.get("text") or any(value for name, value in delta.items() if name != "role")
                if choice.get("finish_reason") and not text:
                    ending = now
                elif text or not delta.get("role"):
                    times.append(now)
        if finish_reason is None:
            raise StreamError(f"the stream broke off after {len(times)} chunks, without a finish_reason")
        if tokens is None:
            raise StreamError("the server sends no count of tokens (usage.completion_tokens)")
        if ending is not None and tokens > len(times):
            times.append(ending)
        if tokens < 2 or len(times) < 2:
            raise StreamError(
                f"wanted at least 2 tokens in 2 chunks for a TPOT, got {tokens} in {len(times)}"
            )
        return StreamResult(
            ttft_ms=1e3 * (times[0] - sent),
            tpot_ms=1e3 * (times[-1] - times[0]) / (tokens - 1),
            total_ms=1e3 * (times[-1] - sent),
            output_tokens=tokens,
            chunks=len(times),
            tokens_per_step=per_step,
            finish_reason=finish_reason,
        )


def stream_many(
    count: int, concurrency: int, once: Callable[[], StreamResult], name: str
) -> list[StreamResult]:
    """Send `count` requests, at most `concurrency` at once, and say how each went under `name`.

    Raises
    ------
    StreamError
        That of the first request that failed; those that were sent are waited for.
    """
    results: list[StreamResult] = []
    with ThreadPoolExecutor(concurrency) as pool:
        for number, sent in enumerate([pool.submit(once) for _ in range(count)], start=1):
            try:
                results.append(got := sent.result())
            except StreamError:
                pool.shutdown(cancel_futures=True)
                raise
            typer.echo(
                f"{name} {number}/{count}: TTFT {got.ttft_ms:.2f} ms, TPOT {got.tpot_ms:.4f} ms, "
                f"{got.output_tokens} tokens in {got.chunks} chunks"
            )
    return results


def summarize(url: str, model: str, concurrency: int, results: list[StreamResult]) -> ClientReport:
    """The report of a series of requests."""
    steps = [result.tokens_per_step for result in results if result.tokens_per_step is not None]
    return ClientReport(
        url=url,
        model=model,
        concurrency=concurrency,
        mean_tpot_ms=statistics.fmean(result.tpot_ms for result in results),
        mean_ttft_ms=statistics.fmean(result.ttft_ms for result in results),
        mean_output_tokens=statistics.fmean(result.output_tokens for result in results),
        tokens_per_step=statistics.fmean(steps) if len(steps) == len(results) else None,
        requests=results,
    )


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
            with answer(url, "/v1/models", timeout_s=30.0) as response:
                model = str(json.load(response)["data"][0]["id"])
        path, body = request_body(prompt, model, max_tokens, endpoint, ignore_eos)
        once = partial(stream_once, url, path, body, timeout)
        stream_many(warmup, concurrency, once, "warm-up")
        report = summarize(url, model, concurrency, stream_many(requests, concurrency, once, "request"))
        typer.echo(f"mean TPOT {report.mean_tpot_ms:.4f} ms, mean TTFT {report.mean_ttft_ms:.2f} ms")
        if report_json is not None:
            report_json.parent.mkdir(parents=True, exist_ok=True)
            report_json.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except (InputError, StreamError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        statuses = {InputError: WRONG_USE, StreamError: UNDECIDED}
        raise typer.Exit(statuses.get(type(error), TOOL_FAULT)) from None
    except Exception:
        traceback.print_exc()
        raise typer.Exit(TOOL_FAULT) from None
