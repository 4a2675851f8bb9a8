"""Stand-ins for the tools that the evaluation scripts start: small programs on PATH, and a server.

Run as a program, this file is a `vllm serve`: it takes ``--port`` and answers every GET. With ``bench`` among
its words it is the client of a server.
"""

import contextlib
import io
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).resolve().parent.parent / "data" / "eval_samples"
HOOK_LINE = "[I] gvr_topk in TensorRT-LLM 1.2.1: on: 61 layers, k = 2048, 64 requests, 0.1 MiB of state"
"""What the integration logs at the first step that it computes."""

VLLM_HOOK_LINE = "(EngineCore pid=7) INFO 11-23 [plugin.py:9] gvr_topk in vLLM 0.33.0: on: decode, k = 2048"
VLLM_LOGO = "(APIServer pid=6) INFO 11-23 01:56:40 [startup.py:38]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.33.0"
"""What `vllm serve` and the integration log there."""


def write_program(folder: Path, name: str, body: str) -> Path:
    """Write an executable Python program; -I -S keeps its start short."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable} -IS\n{body}")
    path.chmod(0o755)
    return path


@dataclass
class Ended:
    """How a verb ended, and what it printed to both streams."""

    exit_code: int
    output: str


def run_verb(*arguments: str) -> Ended:
    """Run a verb of ``python -m eval`` in this process."""
    from eval.__main__ import main  # not where this file is a program, of another Python

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = main(arguments)
    return Ended(status, output.getvalue())


def run_record(key: str, labels: dict[str, Any], figures: dict[str, float | None]) -> Any:
    """Record of a finished run."""
    from eval.campaigns.store import RunRecord

    return RunRecord(key, labels, [], {}, {}, "", 0.0, figures, [], None)


FAKE = """
import json, sys
from pathlib import Path
state, samples, hook, arguments = Path({state!r}), Path({samples!r}), {hook!r}, sys.argv[1:]
with state.joinpath("calls").open("a") as stream:
    stream.write(json.dumps(arguments) + "\\n")
"""
"""How the program of a campaign begins: it keeps the words of its calls."""


class Campaign:
    """A campaign's verb, run against a program of `folder`, of which the `body` is what a test file gives."""

    def __init__(self, folder: Path, monkeypatch: Any, program: str, body: str) -> None:
        self.state = folder / "state"
        self.state.mkdir()
        self.out = folder / "out"
        self.programs = folder / "bin"
        begin = FAKE.format(state=str(self.state), samples=str(SAMPLES), hook=HOOK_LINE)
        write_program(self.programs, program, begin + body)
        monkeypatch.setenv("PATH", f"{self.programs}:/usr/bin:/bin")

    @property
    def calls(self) -> list[list[str]]:
        path = self.state / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "results.json").read_text())


def gone(pid: int) -> bool:
    """Whether the process ends within a few seconds (a zombie counts as ended)."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):  # The latter if it ends while it is read.
            return True
        time.sleep(0.02)
    return False


def free_port() -> int:
    with serving() as server:
        return int(server.server_address[1])


def make_server(port: int = 0, status: int = 200) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 that answers GETs of ``/health`` with 200, and every other one with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server


@contextmanager
def serving() -> Iterator[ThreadingHTTPServer]:
    """`make_server` on a free port, for the time of the block."""
    server = make_server()
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


def bench(words: list[str]) -> None:
    """Ask the server once, and write a report, as `vllm bench serve` does after many requests.

    It loads the engine's plugins, too, and what they say there is no evidence of what the server runs.
    """
    print("gvr_topk in vLLM 0.33.0: refused: no engine here")
    value = {name: words[at + 1] for at, name in enumerate(words[:-1]) if name.startswith("--")}
    lines = [json.loads(line) for line in Path(value["--dataset-path"]).read_text().splitlines()]
    count = int(value["--num-prompts"])
    assert len(lines) == count and all(isinstance(line["prompt"], str) for line in lines)
    try:
        urllib.request.urlopen(f"{value['--base-url']}/v1/models").close()
    except urllib.error.HTTPError as error:
        sys.exit(f"server: HTTP {error.code}")
    report = json.loads((SAMPLES / "vllm_bench_serve_mtp1.json").read_text())
    report |= {"completed": count, "total_output_tokens": count * int(value["--custom-output-len"])}
    Path(value["--result-dir"], value["--result-filename"]).write_text(json.dumps(report))


if __name__ == "__main__":
    if "bench" in sys.argv:
        bench(sys.argv)
        sys.exit()
    port = int(sys.argv[sys.argv.index("--port") + 1])
    print(VLLM_LOGO, flush=True)
    print(VLLM_HOOK_LINE if os.environ.get("GVR_TOPK_DISABLE", "0") == "0" else "plain", flush=True)
    if os.environ.get("GVR_TOPK_SAMPLER") == "1":
        for said in ("on: tokens of the V2 model runner", "sampler: x of vLLM draws calls with penalties y"):
            print(VLLM_HOOK_LINE.replace("on: decode", said), flush=True)
    make_server(port).serve_forever()
