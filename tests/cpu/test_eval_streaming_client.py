"""The streaming client times what it says, and explains every stream that cannot be timed."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import typer
from eval_fakes import Answer, address, recorded_answer, send_json, send_stream, serving, vllm_answer
from typer.testing import CliRunner

from eval.campaigns.prompts import Prompt
from eval.campaigns.streaming_client import StreamError, main, request_body, stream_many, stream_once
from eval.common.options import InputError

SAMPLES = Path(__file__).resolve().parent.parent / "data" / "eval_samples"
PROMPT = Prompt("input_ids", [11, 12])


def _clock(*times: float) -> Callable[[], float]:
    return iter(times).__next__


def _events(*events: Any) -> list[bytes]:
    return [
        b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"
        for event in events
    ]


def _token(text: str = "a", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


def _stream(*events: Any, finish: bool = True) -> Answer:
    return lambda handler, body: send_stream(handler, _events(*events), finish=finish)


def _cut_in_a_chunk(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    send_stream(handler, _events(_token(), _token()), finish=False)
    handler.wfile.write(b"ff\r\ndata: {")


def _once(answer: Answer, prompt: Prompt = PROMPT, **options: Any) -> Any:
    with serving(answer) as server:
        path, body = request_body(prompt, "sample", 8)
        return stream_once(address(server), path, body, **options)


def test_times_of_a_recorded_completion() -> None:
    # One reading when sent, one per event: three tokens' chunks, the usage, [DONE].
    got = _once(recorded_answer, clock=_clock(100.0, 100.5, 100.75, 101.5, 103.0, 104.0))
    assert got.ttft_ms == 500.0
    assert got.tpot_ms == 250.0  # (101.5 - 100.5) / (5 - 1): 5 tokens in 3 chunks
    assert got.total_ms == 1500.0
    assert (got.output_tokens, got.chunks) == (5, 3)
    assert (got.tokens_per_step, got.finish_reason) == (1.75, "length")


def test_times_of_a_recorded_chat_answer() -> None:
    # Neither the role-only chunk that opens the answer nor the empty one that ends it is a token.
    prompt = Prompt("messages", [{"role": "user", "content": "x"}])
    got = _once(recorded_answer, prompt, clock=_clock(10.0, 11.0, 12.0, 13.0, 14.0, 20.0, 21.0, 22.0))
    assert got.ttft_ms == 2000.0
    assert got.tpot_ms == 1000.0
    assert (got.output_tokens, got.chunks, got.tokens_per_step, got.finish_reason) == (3, 3, None, "stop")


def _vllm(prompt: Prompt, tokens: int) -> Any:
    with serving(vllm_answer) as server:
        path, body = request_body(prompt, "sample", tokens)
        return stream_once(address(server), path, body)


def test_vllm_without_a_tokenizer_streams_tokens_without_text() -> None:
    got = _vllm(PROMPT, 16)
    assert (got.output_tokens, got.chunks) == (16, 16)
    assert (got.finish_reason, got.tokens_per_step) == ("length", None)
    with pytest.raises(StreamError, match=r"HTTP 400 .*Tokenizer not available"):
        _vllm(Prompt("prompt", "hello"), 16)


def test_vllm_reports_an_error_in_the_stream() -> None:
    error = {
        "error": {"message": "Token id 50000 is out of vocabulary", "type": "BadRequestError", "code": 400}
    }
    with pytest.raises(StreamError, match="Token id 50000"):
        _once(_stream(error, "[DONE]"))


def test_vllm_reports_tokens_per_step_with_the_usage() -> None:
    ending = _usage(4) | {"metrics": {"speculative_decoding": {"mean_acceptance_length": 1.75}}}
    got = _once(_stream(_token(""), _token("", finish_reason="length"), ending, "[DONE]"))
    assert (got.tokens_per_step, got.output_tokens, got.chunks) == (1.75, 4, 2)
    without = _usage(2) | {"metrics": {"time_to_first_token_ms": 1.0, "speculative_decoding": None}}
    last = _token(finish_reason="stop")
    assert _once(_stream(_token(), last, without, "[DONE]")).tokens_per_step is None


def test_so_many_requests_are_under_way_at_once(tmp_path: Path) -> None:
    """No answer ends before three requests are there, and never is there a fourth."""
    lock, now, most = threading.Lock(), [0], [0]
    together = threading.Barrier(3)

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait(timeout=20)
        with lock:
            now[0] -= 1
        vllm_answer(handler, body)

    prompts, report = tmp_path / "p.jsonl", tmp_path / "r.json"
    prompts.write_text('{"input_ids": [1, 2]}\n')
    app = typer.Typer()
    app.command()(main)
    options = ["--prompt-file", str(prompts), "--concurrency", "3", "--requests", "6", "--warmup", "3"]
    with serving(answer) as server:
        done = CliRunner().invoke(
            app, ["--url", address(server), *options, "--max-tokens", "4", "--report-json", str(report)]
        )
    assert done.exit_code == 0, done.output
    assert most == [3] and len(server.seen) == 9  # type: ignore[attr-defined]
    assert "warm-up 3/3: " in done.output and "request 6/6: " in done.output
    got = json.loads(report.read_text())
    assert (got["concurrency"], len(got["requests"])) == (3, 6)


def test_a_request_that_fails_among_many_ends_the_series(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(range(100))

    def once() -> Any:
        if next(answers) == 2:
            raise StreamError("no")
        return _vllm(PROMPT, 3)

    with pytest.raises(StreamError, match="no"):
        stream_many(40, 1, once, "request")
    said = capsys.readouterr().out
    assert "request 2/40: " in said and "request 3/40" not in said and next(answers) < 10


def _delta(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def _usage(tokens: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


OPENING = _delta(role="assistant", content="")


def test_empty_deltas_are_tokens_and_take_time() -> None:
    """Ten tokens of 110 ms each, of which the last nine have no text: not 10 ms."""
    events = [OPENING, _delta(content="a"), *[_delta(content="")] * 9, _delta("length"), _usage(10), "[DONE]"]
    times = [0.0, 0.5, *(1.0 + 0.11 * index for index in range(10)), 9.0, 9.0, 9.0]
    got = _once(_stream(*events), clock=_clock(*times))
    assert got.tpot_ms == pytest.approx(110.0)
    assert (got.ttft_ms, got.output_tokens, got.chunks) == (pytest.approx(1000.0), 10, 10)


def test_an_empty_delta_may_come_first() -> None:
    events = [OPENING, _delta(), _delta(content="a"), _delta("stop"), _usage(2), "[DONE]"]
    got = _once(_stream(*events), clock=_clock(0.0, 1.0, 2.0, 3.0, 9.0, 9.0, 9.0))
    assert (got.ttft_ms, got.tpot_ms, got.chunks) == (2000.0, 1000.0, 2)


def test_the_end_of_an_answer_is_a_token_where_the_server_counts_one_more() -> None:
    events = [OPENING, _delta(content="a"), _delta(content="b"), _delta("stop")]
    times = (0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 9.0)
    for tokens, tpot, chunks in ((2, 1000.0, 2), (3, 1000.0, 3)):
        got = _once(_stream(*events, _usage(tokens), "[DONE]"), clock=_clock(*times))
        assert (got.tpot_ms, got.chunks, got.output_tokens) == (tpot, chunks, tokens)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [], "usage": [3]},
        _usage("many"),
        _usage(True),
        _usage(-3),
        _usage(2.5),
        {"choices": {"a": 1}},
        {"choices": ["a"]},
        {"choices": [{"delta": "a"}]},
        _token(avg_decoded_tokens_per_iter="x"),
        _token(avg_decoded_tokens_per_iter=float("nan")),
        "{half",
        "[1]",
    ],
)
def test_malformed_events_are_explained(event: Any) -> None:
    ending = () if isinstance(event, dict) and event.get("usage") else (_usage(3),)
    with pytest.raises(StreamError, match=r"malformed|wanted at least 2 tokens"):
        _once(_stream(_token(), _token(), event, _token(finish_reason="stop"), *ending, "[DONE]"))


def test_usage_in_every_chunk_and_comments_and_blank_lines() -> None:
    parts = [
        b": ping\r\n\r\n",
        *_events({**_token(), "usage": {"completion_tokens": 1}}),
        b"event: message\n",
        *_events(
            {**_token(finish_reason="stop"), "usage": {"completion_tokens": 6}},
            {"choices": None, "usage": None},
            "[DONE]",
        ),
    ]
    got = _once(lambda handler, body: send_stream(handler, parts))
    assert (got.output_tokens, got.chunks) == (6, 2)


def test_request_is_greedy_streaming_and_of_fixed_length() -> None:
    with serving() as server:
        path, body = request_body(PROMPT, "sample", 8)
        stream_once(address(server), path, body)
        path, body = request_body(Prompt("prompt", "hi"), "sample", 8, endpoint="chat", ignore_eos=False)
        stream_once(address(server) + "/prefix/", path, body)
        first, second = server.seen  # type: ignore[attr-defined]
    assert first[0] == "/v1/completions"
    assert first[2] == {
        "model": "sample",
        "prompt": [11, 12],
        "max_tokens": 8,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert second[0] == "/prefix/v1/chat/completions"
    assert second[2]["messages"] == [{"role": "user", "content": "hi"}]
    assert "ignore_eos" not in second[2]


def test_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    with serving() as server:
        stream_once(address(server), *request_body(PROMPT, "sample", 8))
        assert server.seen[0][1]["Authorization"] == "Bearer abc"  # type: ignore[attr-defined]


def test_prompt_that_does_not_fit_the_endpoint() -> None:
    with pytest.raises(InputError, match="wanted completions for a prompt of token ids, got chat"):
        request_body(PROMPT, "m", 8, endpoint="chat")
    with pytest.raises(InputError, match="wanted chat for a prompt of messages, got completions"):
        request_body(Prompt("messages", []), "m", 8, endpoint="completions")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_stream("[DONE]"), "broke off after 0 chunks"),
        (_stream(), "broke off after 0 chunks"),
        (_stream(_token(), _token()), "broke off after 2 chunks, without a finish_reason"),
        (_stream(_token(), _token(), finish=False), "IncompleteRead|broke off after 2 chunks"),
        (_cut_in_a_chunk, "IncompleteRead"),
        (_stream(_token(), _token(finish_reason="stop"), "[DONE]"), "sends no count of tokens"),
        (
            _stream(_token(finish_reason="stop"), _usage(1), "[DONE]"),
            "wanted at least 2 tokens in 2 chunks for a TPOT, got 1 in 1",
        ),
        (_stream(_token(), {"error": {"message": "out of memory"}}), "reported an error.*out of memory"),
        (_stream({"object": "error", "message": "bad"}), "reported an error"),
        (
            lambda handler, body: send_json(handler, {"message": "no such model"}, 404),
            r"http://127\.0\.0\.1:\d+/v1/completions: HTTP 404 Not Found: .*no such model",
        ),
        (
            lambda handler, body: send_json(handler, {"choices": []}),
            "broke off after 0 chunks",
        ),
    ],
)
def test_unusable_answers_are_explained(answer: Answer, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        _once(answer)


def test_long_error_answer_is_cut() -> None:
    with pytest.raises(StreamError) as caught:
        _once(lambda handler, body: send_json(handler, "x" * 100_000, 500))
    assert len(str(caught.value)) < 1000


def test_silence_ends_the_request() -> None:
    go_on = threading.Event()

    def silent(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        send_stream(handler, _events(_token()), finish=False)
        handler.close_connection = False
        go_on.wait(10)

    try:
        with pytest.raises(StreamError, match=r"nothing came for 0\.2 s"):
            _once(silent, timeout_s=0.2)
    finally:
        go_on.set()


def test_nobody_there_and_wrong_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(StreamError, match="ConnectionRefusedError"):
            stream_once(url, *request_body(PROMPT, "m", 8))
    for wrong in ("127.0.0.1:8000", "ftp://host", "http://"):
        with pytest.raises(StreamError, match="url: wanted http://host:port"):
            stream_once(wrong, *request_body(PROMPT, "m", 8))


def _run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments))


def test_command_line_writes_the_report(tmp_path: Path) -> None:
    report = tmp_path / "deep" / "report.json"
    with serving() as server:
        result = _run(
            "--url", address(server), "--prompt-file", str(SAMPLES / "prompts.jsonl"), "--requests", "2",
            "--warmup", "1", "--max-tokens", "5", "--report-json", str(report),
        )  # fmt: skip
        assert len(server.seen) == 3  # type: ignore[attr-defined]
        assert server.seen[0][2]["model"] == "sample"  # type: ignore[attr-defined]
    assert result.exit_code == 0, result.output
    data = json.loads(report.read_text())
    assert data["tokens_per_step"] == 1.75
    assert (data["mean_output_tokens"], len(data["requests"])) == (5, 2)
    assert data["mean_tpot_ms"] == pytest.approx(sum(item["tpot_ms"] for item in data["requests"]) / 2)
    assert "warm-up" in result.output and "request 2/2" in result.output


def test_command_line_fails_with_the_reason(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with serving(_stream("[DONE]")) as server:
        result = _run(
            "--url", address(server), "--prompt-file", str(SAMPLES / "prompts.jsonl"),
            "--report-json", str(report),
        )  # fmt: skip
    assert result.exit_code == 3
    assert "error: the stream broke off after 0 chunks" in result.output
    assert not report.exists()
    result = _run("--url", "http://127.0.0.1:1", "--prompt-file", str(tmp_path / "none.jsonl"))
    assert result.exit_code == 2 and "got no such file" in result.output


def test_a_report_that_cannot_be_written_is_a_fault_of_the_tool(tmp_path: Path) -> None:
    with serving() as server:
        result = _run(
            "--url", address(server), "--prompt-file", str(SAMPLES / "prompts.jsonl"), "--requests", "1",
            "--warmup", "0", "--report-json", str(tmp_path),
        )  # fmt: skip
    assert result.exit_code == 4


@pytest.mark.parametrize("data", [[], {"data": []}, {"data": {"id": "x"}}, {"data": ["x"]}])
def test_a_malformed_list_of_models_is_named(
    data: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("eval_fakes.send_json", lambda handler, _: send_json(handler, data))
    with serving() as server:
        result = _run("--url", address(server), "--prompt-file", str(SAMPLES / "prompts.jsonl"))
    assert result.exit_code == 3 and "error: " in result.output
