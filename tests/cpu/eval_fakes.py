"""Stand-ins for the tools that the evaluation scripts start: small programs on PATH, and a server.

Run as a program, this file is a `trtllm-serve`: it takes ``--port`` and serves the recorded stream. With
``serve`` among its words it is a `vllm serve`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).resolve().parent.parent / "data" / "eval_samples"
HOOK_LINE = "[I] gvr_topk in TensorRT-LLM 1.2.1: on: 61 layers, k = 2048, 64 requests, 0.1 MiB of state"
"""What the integration logs at the first step that it computes."""

VLLM_HOOK_LINE = "(EngineCore pid=7) INFO 11-23 [plugin.py:9] gvr_topk in vLLM 0.33.0: on: decode, k = 2048"
VLLM_LOGO = "(APIServer pid=6) INFO 11-23 01:56:40 [startup.py:38]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.33.0"
"""What `vllm serve` and the integration log there."""

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def write_program(folder: Path, name: str, body: str) -> Path:
    """Write an executable Python program; -I -S keeps its start short."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable} -IS\n{body}")
    path.chmod(0o755)
    return path


def send_stream(handler: BaseHTTPRequestHandler, parts: list[bytes], *, finish: bool = True) -> None:
    """Send a chunked event stream; without `finish` the connection closes in its middle."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for part in parts:
        handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        handler.wfile.flush()
    if finish:
        handler.wfile.write(b"0\r\n\r\n")
    handler.close_connection = True


def send_sample(handler: BaseHTTPRequestHandler, name: str) -> None:
    """Send one of the recorded streams, an event at a time."""
    events = (SAMPLES / name).read_bytes().split(b"\n\n")
    send_stream(handler, [event + b"\n\n" for event in events if event])


def send_json(handler: BaseHTTPRequestHandler, data: Any, status: int = 200) -> None:
    body = json.dumps(data).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def recorded_answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    chat = handler.path.endswith("/chat/completions")
    send_sample(handler, "trtllm_serve_chat.sse" if chat else "trtllm_serve_completions.sse")


def vllm_answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Answer as vLLM 0.33 does without a tokenizer: prompts of token ids, and a textless chunk per token."""
    if not isinstance(body["prompt"], list):
        error = {
            "message": "Tokenizer not available when `skip_tokenizer_init=True`",
            "type": "BadRequestError",
        }
        send_json(handler, {"error": error}, 400)
        return
    sample = (SAMPLES / "vllm_serve_completions.sse").read_text(encoding="utf-8").split("\n\n")
    first, last, usage, done = (sample[index] for index in (1, -4, -3, -2))
    count = body["max_tokens"]
    ended = json.loads(usage.removeprefix("data: "))
    ended["usage"] = {
        "prompt_tokens": len(body["prompt"]),
        "total_tokens": len(body["prompt"]) + count,
        "completion_tokens": count,
    }
    events = [first] * (count - 1) + [last]
    if body.get("stream_options", {}).get("include_usage"):
        events.append(f"data: {json.dumps(ended)}")
    send_stream(handler, [f"{event}\n\n".encode() for event in [*events, done]])


def make_server(answer: Answer, port: int = 0) -> ThreadingHTTPServer:
    """An OpenAI-compatible server on 127.0.0.1 that answers every POST with `answer`.

    The requests it got are in its attribute ``seen`` as (path, headers, body).
    """
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            send_json(self, {"data": [{"id": "sample"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, dict(self.headers), body))
            answer(self, body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.seen = seen  # type: ignore[attr-defined]
    return server


@contextmanager
def serving(answer: Answer = recorded_answer) -> Iterator[ThreadingHTTPServer]:
    """`make_server` on a free port, for the time of the block."""
    server = make_server(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    if "serve" in sys.argv:
        print(VLLM_LOGO, flush=True)
        print("plain" if os.environ["GVR_TOPK_DISABLE"] == "1" else VLLM_HOOK_LINE, flush=True)
        make_server(vllm_answer, port).serve_forever()
    print("[TensorRT-LLM] TensorRT-LLM version: 1.2.1", flush=True)
    print(HOOK_LINE if any("_on" in word for word in sys.argv) else "plain", flush=True)
    make_server(recorded_answer, port).serve_forever()
