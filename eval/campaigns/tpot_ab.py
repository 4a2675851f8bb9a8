"""Time per output token with the heuristic top-k off and on, at batch 1 with one fixed prompt.

    python -m eval tpot --model MODEL --prompts 64K=swe_bench_64k.jsonl --entry 1 --dry-run
    python -m eval tpot --engine vllm --model MODEL --prompts 64K=swe_bench_64k.jsonl --entry 1 --dry-run

The method is that of the paper's section 6.7 and appendix A: for every MTP setting and prompt, the two
variants take turns for a number of repetitions; each repetition is a fresh process that serves the same
prompt several times and reports the mean TPOT and the draft acceptance rate (DAR).

* ``--via bench`` (TensorRT-LLM's default) starts ``trtllm-bench throughput`` for each repetition.
* ``--via serve`` (vLLM's default) starts ``trtllm-serve`` or ``vllm serve`` for each repetition and streams
  from it.
* ``--via running`` streams from two servers that already run (``--url-off``, ``--url-on``), whose logs
  (``--log-off``, ``--log-on``) have to show which of them has the heuristic top-k. The build of such a server
  is not known here: after a restart with another one, use another ``--out``.

TensorRT-LLM's two sides are two YAML files. vLLM's are one command with ``GVR_TOPK_DISABLE=1`` and with
``=0``. With ``--concurrency`` the fixed prompt is served so many times at once, instead of at batch 1.

The table has every repetition, the means, and the reduction of TPOT with its interval: from a fit of the
logarithms by level, linear drift and variant, so that a machine that warms up does not count as a
difference. The unit of the statistics is the repetition, not the request: requests of one process share its
clocks and memory layout. A case is ``faster`` or ``slower`` where that is shown, and else ``open``.

**What the verdicts are worth.** In a whole campaign the chance of any false ``faster`` or ``slower`` is at
most 5 %: over all cases together, and also for somebody who looks after every run and adds repetitions until
the answer pleases. The intervals hold in the same sense. A verdict may change at 6, 8, 12, 16 and 32
repetitions; between them it stays. How: `eval/campaigns/sequential.py`; that it holds: docs/verdicts.md.

The paper's figures stand beside. They are of DeepSeek-V3.2-Exp NVFP4 on eight B200: a reference, not a
target for another machine.

A run counts only if its log shows that the heuristic top-k was on (or off, on the other side).

The same command goes on where an interrupted one stopped, on the same builds and GPU.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from eval.campaigns.configs import combined_configs
from eval.campaigns.exits import clean_exits, refuse_disabled
from eval.campaigns.identity import build_identity
from eval.campaigns.order import Order, Variant, variant_order
from eval.campaigns.pairs import check_pair
from eval.campaigns.plan import PlannedRun, Server, describe_plan, execute, remarks
from eval.campaigns.prompts import InputError, prompt_lines, read_prompt, text_hash, tokenize
from eval.campaigns.reports import read_bench_log, read_bench_report, read_client_report
from eval.campaigns.store import RunStore, file_hash
from eval.campaigns.tpot_report import (
    Case,
    acceptance_table,
    collect_rows,
    describe_power,
    draw,
    tpot_table,
)
from eval.common.machine import compute_capability
from eval.common.options import check_label, refuse_repeats, require_program
from eval.common.status import TOOL_FAULT, UNDECIDED
from gvr_topk.integrations.environment import DISABLE

Via = Literal["bench", "serve", "running"]
Engine = Literal["tensorrt-llm", "vllm"]

CLIENT = Path(__file__).with_name("streaming_client.py")
PROGRAMS: dict[tuple[Engine, Via], str] = {
    ("tensorrt-llm", "bench"): "trtllm-bench",
    ("tensorrt-llm", "serve"): "trtllm-serve",
    ("vllm", "serve"): "vllm",
}
PACKAGES: dict[Engine, str] = {"tensorrt-llm": "tensorrt_llm", "vllm": "vllm"}


def default_configs(via: Via) -> str:
    """Pattern of the YAML files of one way to run; those of bench fit one GPU's checkpoint and kernels."""
    base = f"bench_{bench_gpu()}_tep8" if via == "bench" else "serve_tep8"
    return str(combined_configs() / (base + "_mtp{mtp}_{variant}.yaml"))


@dataclass(frozen=True)
class FixedPrompt:
    """A prompt ready to be served.

    Attributes
    ----------
    file : Path
        Where it is written, in trtllm-bench's dataset format.
    content : str
    max_seq_len : int or None
        Length limit that fits it; None where the number of tokens is not known.
    """

    file: Path
    content: str
    max_seq_len: int | None


@dataclass(frozen=True)
class Settings:
    """How every repetition is run; names as the options of the command line."""

    model: str
    via: Via
    out: Path
    requests: int = 5
    warmup: int = 2
    output_tokens: int = 1024
    model_path: str | None = None
    gpus: int = 8
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    configs: str | None = None
    config_flag: str = "--config"
    url_off: str | None = None
    url_on: str | None = None
    log_off: Path | None = None
    log_on: Path | None = None
    port: int = 8123
    launcher: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()
    engine: Engine = "tensorrt-llm"
    program: tuple[str, ...] = ()
    concurrency: int = 1

    @property
    def command(self) -> list[str]:
        """The words that start the engine's program."""
        return list(self.program or (PROGRAMS[self.engine, self.via],))

    def config(self, mtp: int, variant: Variant) -> Path:
        """YAML file of one side."""
        pattern = self.configs or default_configs(self.via)
        try:
            return Path(pattern.format(mtp=mtp, variant=variant))
        except (KeyError, IndexError, ValueError):
            raise InputError(f"--configs: wanted {{mtp}} and {{variant}} in it, got {pattern!r}") from None

    def url(self, variant: Variant) -> str:
        """Server of one side."""
        return (self.url_off if variant == "off" else self.url_on) or f"http://127.0.0.1:{self.port}"


def _check_settings(settings: Settings, mtps: Sequence[int]) -> None:
    """Refuse MTP settings that no shipped configuration has, if none of the caller's own are given."""
    if settings.engine == "vllm" or settings.via == "running" or settings.configs is not None:
        return
    shipped = Path(default_configs(settings.via))
    pattern = shipped.name.format(mtp="*", variant="off")
    prefix, _, suffix = pattern.partition("*")
    known = [file.name.removeprefix(prefix).removesuffix(suffix) for file in shipped.parent.glob(pattern)]
    if unknown := [mtp for mtp in mtps if str(mtp) not in known]:
        raise InputError(
            f"--mtp: wanted one of {', '.join(sorted(known))} (--configs names other configurations), "
            f"got {', '.join(map(str, unknown))}"
        )


def bench_gpu() -> str:
    """Which base under ``configs`` fits the GPU of this machine; where it has none, that of Hopper."""
    return "b200" if compute_capability() >= 10 else "h200"


def prepare_prompt(
    settings: Settings, file: Path, label: str, entry: int, tokenizer: str | None
) -> FixedPrompt:
    """Read one prompt and bring it into the form that the chosen way of running takes.

    Raises
    ------
    InputError
        The file or entry cannot be used, or trtllm-bench would get chat messages.
    """
    prompt = read_prompt(file, entry)
    if prompt.messages is not None and tokenizer is not None:
        prompt = tokenize(prompt, tokenizer)
    if prompt.messages is not None and settings.via == "bench":
        raise InputError(
            f"{file}: trtllm-bench takes no chat messages; give --tokenizer MODEL to apply its chat template"
        )
    content = prompt_lines(prompt, settings.requests, settings.output_tokens)
    name = f"{label}_entry{entry}_{text_hash(content)[:12]}.jsonl"
    return FixedPrompt(settings.out / "prompts" / name, content, prompt.max_seq_len(settings.output_tokens))


def bench_command(settings: Settings, prompt: FixedPrompt, config: Path, report: Path) -> tuple[str, ...]:
    """``trtllm-bench throughput``; ``--streaming`` is what makes it report TPOT.

    Without ``--model_path``, trtllm-bench takes the model for a name on the Hugging Face hub, even a folder.
    """
    command = [*settings.launcher, *settings.command, "--model", settings.model]
    model_path = settings.model_path or (settings.model if Path(settings.model).is_dir() else None)
    if model_path:
        command += ["--model_path", model_path]
    command += ["throughput", "--backend", "pytorch", "--tp", str(settings.gpus), "--ep", str(settings.gpus)]
    command += ["--dataset", str(prompt.file), "--num_requests", str(settings.requests)]
    at_once = str(settings.concurrency)
    command += ["--warmup", str(settings.warmup), "--concurrency", at_once, "--max_batch_size", at_once]
    command += ["--max_num_tokens", str(settings.max_num_tokens)]
    limit = settings.max_seq_len or prompt.max_seq_len
    if limit is not None:
        command += ["--max_seq_len", str(limit)]
    command += ["--streaming", settings.config_flag, str(config), "--report_json", str(report)]
    return (*command, *settings.extra_args)


def serve_command(settings: Settings, config: Path) -> tuple[str, ...]:
    """``trtllm-serve``; what is not here is in the YAML."""
    command = [*settings.launcher, *settings.command, settings.model, "--host", "127.0.0.1"]
    command += ["--port", str(settings.port), settings.config_flag, str(config)]
    return (*command, *settings.extra_args)


def vllm_command(settings: Settings, prompt: FixedPrompt, mtp: int, variant: Variant) -> tuple[str, ...]:
    """``vllm serve``; the sides differ in one variable of the environment, which stands in the command."""
    command = [*settings.launcher, "env", f"{DISABLE}={int(variant == 'off')}", *settings.command, "serve"]
    command += [settings.model_path or settings.model]
    if settings.model_path:
        command += ["--served-model-name", settings.model]
    command += ["--host", "127.0.0.1", "--port", str(settings.port)]
    command += ["--tensor-parallel-size", str(settings.gpus), "--max-num-seqs", str(settings.concurrency)]
    command += ["--max-num-batched-tokens", str(settings.max_num_tokens)]
    limit = settings.max_seq_len or prompt.max_seq_len
    if limit is not None:
        command += ["--max-model-len", str(limit)]
    if mtp:
        drafts = {"method": "mtp", "num_speculative_tokens": mtp}
        command += ["--speculative-config", json.dumps(drafts)]
        command += ["--per-request-spec-decode-metrics", "summary"]  # which the acceptance rate is read from
    return (*command, *settings.extra_args)


def client_command(settings: Settings, prompt: FixedPrompt, url: str, report: Path) -> tuple[str, ...]:
    """``streaming_client.py`` as a process of its own, so that it is timed out and logged alike."""
    command = [sys.executable, str(CLIENT), "--url", url, "--prompt-file", str(prompt.file)]
    command += ["--requests", str(settings.requests), "--warmup", str(settings.warmup)]
    if settings.concurrency > 1:
        command += ["--concurrency", str(settings.concurrency)]
    command += ["--max-tokens", str(settings.output_tokens), "--report-json", str(report)]
    return tuple(command)


def plan_run(
    settings: Settings,
    case: Case,
    prompt: FixedPrompt,
    variant: Variant,
    repetition: int,
    order: Order,
    build: Mapping[str, str],
) -> PlannedRun:
    """One repetition of one side of one case."""
    place = settings.out / f"mtp{case.mtp}_{case.label}" / f"{variant}_{repetition}"
    report = Path(f"{place}.json")
    inputs = {prompt.file.name: text_hash(prompt.content)}
    server = None
    if settings.via != "running" and settings.engine == "tensorrt-llm":
        config = settings.config(case.mtp, variant)
        inputs[str(config)] = file_hash(config)
    if settings.via == "bench":
        command = bench_command(settings, prompt, config, report)
        measure = partial(_measure_bench, report)
    else:
        url = settings.url(variant)
        command = client_command(settings, prompt, url, report)
        measure = partial(_measure_client, report, case.mtp)
        if settings.via == "serve":
            start = (
                vllm_command(settings, prompt, case.mtp, variant)
                if settings.engine == "vllm"
                else serve_command(settings, config)
            )
            server = Server(start, f"{url}/health", Path(f"{place}.server.log"))
    return PlannedRun(
        labels={
            "MTP": case.mtp,
            "prompt": case.label,
            "variant": variant,
            "repetition": repetition,
            "order": order,
        },
        command=command,
        log=Path(f"{place}.log"),
        inputs=inputs,
        measure=measure,
        build=build,
        reports=(report,),
        server=server,
        other_log=settings.log_off if variant == "off" else settings.log_on,
    )


def plan_runs(
    settings: Settings, mtps: Sequence[int], prompts: dict[str, FixedPrompt], repetitions: int, order: Order
) -> list[PlannedRun]:
    """Every run, case by case, after checking that each pair of files is a fair comparison.

    Raises
    ------
    InputError
        A pair differs in more than the heuristic top-k, or its MTP setting is another one.
    """
    if settings.via != "running" and settings.engine == "tensorrt-llm":
        for mtp in mtps:
            off, on = settings.config(mtp, "off"), settings.config(mtp, "on")
            loaded, _ = check_pair(off, on)
            if loaded.next_n - 1 != mtp:
                raise InputError(f"{off}: wanted MTP {mtp}, got {loaded.next_n - 1}")
    build = (
        {} if settings.via == "running" else build_identity(settings.command[0], PACKAGES[settings.engine])
    )
    return [
        plan_run(settings, Case(mtp, label), prompt, variant, repetition, order, build)
        for mtp in mtps
        for label, prompt in prompts.items()
        for repetition, variant in variant_order(repetitions, order)
    ]


def _measure_bench(report: Path, log: str) -> dict[str, Any]:
    # The printed summary has the same figures, with fewer digits, should there be no JSON.
    return read_bench_report(report) if report.exists() else read_bench_log(log)


def _measure_client(report: Path, draft_tokens: int, log: str) -> dict[str, Any]:
    return read_client_report(report, draft_tokens)


def _split_prompts(items: Sequence[str]) -> dict[str, Path]:
    files = {}
    for item in items:
        label, _, name = item.partition("=")
        if not label or not name:
            raise typer.BadParameter(f"wanted LABEL=FILE, got {item!r}", param_hint="--prompts")
        check_label(label, "--prompts")
        files[label] = Path(name)
    refuse_repeats([item.partition("=")[0] for item in items], "--prompts")
    return files


def main(
    model: Annotated[
        str, typer.Option(help="Model name, as for trtllm-bench --model, trtllm-serve and vllm serve.")
    ],
    prompts: Annotated[
        list[str],
        typer.Option(help="LABEL=FILE, JSON lines, repeatable; the paper's labels are 64K and 100K."),
    ],
    engine: Annotated[Engine, typer.Option(help="What runs the model.")] = "tensorrt-llm",
    model_path: Annotated[
        str | None, typer.Option(help="Checkpoint folder, for trtllm-bench and vllm serve.")
    ] = None,
    mtp: Annotated[list[int] | None, typer.Option(help="MTP setting, repeatable. Default: 0 1 3.")] = None,
    via: Annotated[
        Via | None, typer.Option(help="How the model is run. Default: bench; serve for vLLM.")
    ] = None,
    configs: Annotated[
        str | None,
        typer.Option(
            help="Pattern of YAML files with {mtp} and {variant} (off, on), for TensorRT-LLM alone. "
            "Default: for the GPU found."
        ),
    ] = None,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Of each variant; verdicts change at 4, 6, 8, 12, 16, 32.")
    ] = 8,
    order: Annotated[Order, typer.Option(help="abba turns every second pair round.")] = "abba",
    entry: Annotated[int, typer.Option(help="Line of the prompt file, from 0.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Timed requests per repetition.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before those.")] = 2,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    output_tokens: Annotated[int, typer.Option(min=2)] = 1024,
    gpus: Annotated[
        int,
        typer.Option(min=1, help="Tensor parallel size, for trtllm-bench (expert parallel, too) and vLLM."),
    ] = 8,
    max_num_tokens: Annotated[int, typer.Option(help="Prefill chunk, for trtllm-bench and vLLM.")] = 8192,
    max_seq_len: Annotated[
        int | None, typer.Option(help="For trtllm-bench and vLLM. Default: 1.25 times the prompt.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Apply this model's chat template to chat prompts.")
    ] = None,
    url_off: Annotated[str | None, typer.Option(help="Running server without the heuristic top-k.")] = None,
    url_on: Annotated[str | None, typer.Option(help="Running server with it.")] = None,
    log_off: Annotated[Path | None, typer.Option(help="Log of the running server without it.")] = None,
    log_on: Annotated[Path | None, typer.Option(help="Log of the running server with it.")] = None,
    port: Annotated[int, typer.Option(help="For --via serve.")] = 8123,
    extra_args: Annotated[
        str, typer.Option(help="More arguments for trtllm-bench throughput, trtllm-serve or vllm serve.")
    ] = "",
    launcher: Annotated[str, typer.Option(help="Words before the engine's program.")] = "",
    program: Annotated[
        str,
        typer.Option(
            help="Words that start the program. Default: trtllm-bench, trtllm-serve or vllm, from PATH."
        ),
    ] = "",
    config_flag: Annotated[
        str, typer.Option(help="--extra_llm_api_options on releases without --config.")
    ] = "--config",
    timeout: Annotated[float, typer.Option(help="Seconds for one repetition.")] = 3600.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds until a started server is ready.")] = 1800.0,
    keep_going: Annotated[bool, typer.Option(help="Go on after a failed run.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for logs, the run store and results.")] = Path("out/tpot"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and stop.")] = False,
) -> None:
    """Measure TPOT with the heuristic top-k off and on, taking turns."""
    via = via or ("serve" if engine == "vllm" else "bench")
    if engine == "vllm" and via == "bench":
        raise typer.BadParameter("wanted serve or running for vLLM, got bench", param_hint="--via")
    if engine == "vllm" and configs is not None:
        raise typer.BadParameter(
            "wanted none for vLLM, whose sides differ in GVR_TOPK_DISABLE alone", param_hint="--configs"
        )
    of_running = (url_off, url_on, log_off, log_on)
    if any((value is not None) != (via == "running") for value in of_running):
        raise typer.BadParameter(
            "wanted --url-off, --url-on, --log-off and --log-on with --via running, and only then",
            param_hint="--via",
        )
    mtps = mtp or [0, 1, 3]
    refuse_repeats(mtps, "--mtp")
    if via == "running" and len(mtps) != 1:
        raise typer.BadParameter("wanted one setting, that of the running servers", param_hint="--mtp")
    settings = Settings(
        model=model,
        via=via,
        out=out,
        requests=requests,
        warmup=warmup,
        output_tokens=output_tokens,
        model_path=model_path,
        gpus=gpus,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        configs=configs,
        config_flag=config_flag,
        url_off=url_off,
        url_on=url_on,
        log_off=log_off,
        log_on=log_on,
        port=port,
        launcher=tuple(shlex.split(launcher)),
        extra_args=tuple(shlex.split(extra_args)),
        engine=engine,
        program=tuple(shlex.split(program)),
        concurrency=concurrency,
    )
    with clean_exits():
        store = RunStore(out / "runs.jsonl")
        fixed = {
            label: prepare_prompt(settings, file, label, entry, tokenizer)
            for label, file in _split_prompts(prompts).items()
        }
        _check_settings(settings, mtps)
        planned = plan_runs(settings, mtps, fixed, repetitions, order)
        cases = [Case(setting, label) for setting in mtps for label in fixed]
        # A case that was run before belongs to the campaign, whether or not it is asked for now.
        before = {
            (record["labels"].get("MTP"), record["labels"].get("prompt")) for record in store.finished()
        }
        family = len({(case.mtp, case.label) for case in cases} | before)
        typer.echo(describe_power(cases, repetitions, order, family))
        if dry_run:
            typer.echo(describe_plan(planned, store))
            return
        for log in (log_off, log_on):
            if log is not None and not log.is_file():
                raise InputError(f"{log}: wanted the log of a running server, got no such file")
        if via != "running":
            refuse_disabled()
            require_program([*settings.launcher, *settings.command], "--program")
        for prompt in fixed.values():
            prompt.file.parent.mkdir(parents=True, exist_ok=True)
            prompt.file.write_text(prompt.content, encoding="utf-8")
        with store:
            outcome = execute(
                planned,
                store,
                timeout_s=timeout,
                start_timeout_s=start_timeout,
                keep_going=keep_going,
                say=typer.echo,
            )
        rows = collect_rows(cases, outcome.records, order, family)
        tables = [tpot_table(rows), acceptance_table(rows), remarks(outcome.records)]
        typer.echo("\n\n".join(["", *filter(None, tables)]))
        if outcome.failures:
            typer.echo(f"{len(outcome.failures)} of {len(planned)} runs failed")
        outcome.write(out / "results.json", family, rows=[asdict(row) for row in rows])
        typer.echo(f"written: {out / 'results.json'}")
        if any(row.reduction is not None for row in rows):
            draw(rows, out / "tpot.png")
            typer.echo(f"written: {out / 'tpot.png'}")
        if len(outcome.records) == len(planned):
            raise typer.Exit(0)
        raise typer.Exit(TOOL_FAULT if outcome.faulty else UNDECIDED)
