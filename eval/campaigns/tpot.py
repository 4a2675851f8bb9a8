"""Time per output token with the heuristic top-k off and on, at batch 1 with one fixed prompt.

    python -m eval tpot --model MODEL --prompts 64K=swe_bench_64k.jsonl --entry 1 --dry-run
    python -m eval tpot --engine vllm --model MODEL --prompts 64K=swe_bench_64k.jsonl --entry 1 --dry-run

The method is that of the paper's section 6.7 and appendix A: for every MTP setting and prompt, the two
variants take turns for a number of repetitions; each repetition is a fresh process that serves the same
prompt several times and reports the mean TPOT and the draft acceptance rate (DAR).

* Of TensorRT-LLM each repetition is a ``trtllm-bench throughput``, and the two sides are two YAML files.
* Of vLLM it is a ``vllm serve``, with ``GVR_TOPK_DISABLE=1`` and with ``=0``, and ``vllm bench serve``
  (``--client``) as its client. Prompts are texts then; ``--tokenizer`` makes one of chat messages. With
  ``--compares sampler`` both sides have this package, and differ in ``GVR_TOPK_SAMPLER``.

With ``--concurrency`` the fixed prompt is served so many times at once, instead of at batch 1.

The table has the means, and the reduction of TPOT with its interval: from a fit of the logarithms by level,
linear drift and variant, so that a machine that warms up does not count as a difference. The unit of the
statistics is the repetition, not the request: requests of one process share its clocks and memory layout.
A case is ``faster`` or ``slower`` where that is shown, and else ``open``. ``results.json`` has every run.

The chance of any false ``faster`` or ``slower`` is at most 5 %, over all cases together and whenever one
stops; a verdict may change at 6, 8, 12, 16 and 32 repetitions (docs/verdicts.md). The intervals hold in the
same sense.

The paper's figures stand beside. They are of DeepSeek-V3.2-Exp NVFP4 on eight B200: a reference, not a
target for another machine. A run counts only if its log shows that the heuristic top-k was on (or off, on the
other side). The same command goes on where an interrupted one stopped, on the same builds and GPU.
"""

import inspect
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from eval.campaigns.configs import MTP, check_pair, combined_configs
from eval.campaigns.evidence import SAMPLER, TOP_K, Subject, build_identity
from eval.campaigns.prompts import Prompt, apply_template, read_prompt
from eval.campaigns.reports import read_bench_report, read_serve_report
from eval.campaigns.runs import Limits, PlannedRun, Server, refuse_repeats, run_campaign
from eval.campaigns.store import RunStore, text_hash
from eval.campaigns.tpot_report import tpot_table
from eval.campaigns.verdicts import Variant, variant_order
from eval.common.machine import compute_capability
from eval.common.status import TOOL_FAULT, UNDECIDED, InputError
from gvr_topk.integrations._kit.environment import DISABLE, ENABLE_SAMPLER

Engine = Literal["tensorrt-llm", "vllm"]

PROGRAMS: dict[Engine, str] = {"tensorrt-llm": "trtllm-bench", "vllm": "vllm"}
LABEL_AND_FILE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._+-]*)=(.+)")
"""A prompt; its label is the name of a folder, and a path in it would lead out of the results."""


@dataclass(frozen=True)
class Settings:
    """What is measured, and how every repetition is run."""

    model: Annotated[str, typer.Option(help="Model name, as for the engine's program.")]
    prompts: Annotated[list[str], typer.Option(help="LABEL=FILE, repeatable; the paper's are 64K and 100K.")]
    engine: Annotated[Engine, typer.Option(help="What runs the model.")] = "tensorrt-llm"
    model_path: Annotated[str | None, typer.Option(help="Checkpoint.")] = None
    mtp: Annotated[list[int] | None, typer.Option(help="MTP setting, repeatable. Default: 0 1 3.")] = None
    configs: Annotated[
        str | None,
        typer.Option(
            help="TensorRT-LLM's YAML files, with {mtp} and {variant} (off, on). Default: shipped ones."
        ),
    ] = None
    repetitions: Annotated[int, typer.Option(min=1, help="Of each variant.")] = 8
    entry: Annotated[int, typer.Option(help="Line of the prompt file, from 0.")] = 1
    requests: Annotated[int, typer.Option(min=1, help="Timed requests per repetition.")] = 5
    warmup: Annotated[int, typer.Option(min=0, help="Requests before those.")] = 2
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1
    output_tokens: Annotated[int, typer.Option(min=2)] = 1024
    gpus: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 8
    max_num_tokens: Annotated[int, typer.Option(help="Prefill chunk.")] = 8192
    max_seq_len: Annotated[int | None, typer.Option(help="Default: 1.25 times the prompt.")] = None
    tokenizer: Annotated[str | None, typer.Option(help="Model whose chat template to apply.")] = None
    port: Annotated[int, typer.Option(help="Of vLLM's server.")] = 8123
    extra_args: Annotated[str, typer.Option(help="More arguments for the engine's program.")] = ""
    launcher: Annotated[str, typer.Option(help="Words before the engine's program.")] = ""
    program: Annotated[str, typer.Option(help="Words that start it. Default: its name, from PATH.")] = ""
    client: Annotated[str, typer.Option(help="Words that start the client of vLLM's server.")] = (
        "vllm bench serve"
    )
    compares: Annotated[Subject, typer.Option(help="All that differs in vLLM, or its sampler alone.")] = TOP_K
    sampling: Annotated[str, typer.Option(help="How vLLM's client asks for tokens.")] = "--temperature 0"
    drafts: Annotated[str, typer.Option(help="vLLM's drafts, --mtp in number.")] = '{"method": "mtp"}'
    config_flag: Annotated[str, typer.Option(help="Or --extra_llm_api_options.")] = "--config"
    timeout: Annotated[float, typer.Option(help="Seconds for one repetition.")] = 3600.0
    start_timeout: Annotated[float, typer.Option(help="Seconds until a started server is ready.")] = 1800.0
    keep_going: Annotated[bool, typer.Option(help="Go on after a failed run.")] = True
    out: Annotated[Path, typer.Option(help="Folder for logs, the run store and results.")] = Path("out/tpot")
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and stop.")] = False

    @property
    def by_bench(self) -> bool:
        """Whether trtllm-bench measures two YAML files, and no server is started."""
        return self.engine == "tensorrt-llm"

    @property
    def command(self) -> list[str]:
        """The words that start the engine's program."""
        return shlex.split(self.program) or [PROGRAMS[self.engine]]

    def config(self, mtp: int, variant: Variant) -> Path:
        """YAML file of one side; the shipped ones fit one GPU's checkpoint and kernels."""
        if self.configs is None:
            gpu = "b200" if compute_capability() >= 10 else "h200"  # h200 where there is no GPU
            return combined_configs() / f"bench_{gpu}_tep8_mtp{mtp}_{variant}.yaml"
        try:
            return Path(self.configs.format(mtp=mtp, variant=variant))
        except (KeyError, IndexError, ValueError):
            raise InputError(
                f"--configs: wanted {{mtp}} and {{variant}} in it, got {self.configs!r}"
            ) from None

    def start(self, prompt: Prompt, file: Path, mtp: int, variant: Variant, report: Path) -> list[str]:
        """The command that starts the engine's program, for one side."""
        limit = self.max_seq_len or prompt.max_seq_len(self.output_tokens)
        words = shlex.split(self.launcher)
        if not self.by_bench:
            # The sides differ in one variable of the environment, which stands in the command.
            variable, set_on = (ENABLE_SAMPLER, "on") if self.compares == SAMPLER else (DISABLE, "off")
            words += ["env", f"{variable}={int(variant == set_on)}", *self.command, "serve"]
            words += [self.model_path, "--served-model-name"] if self.model_path else []
            words += [self.model, "--host", "127.0.0.1", "--port", str(self.port)]
            words += ["--tensor-parallel-size", str(self.gpus)]
            words += ["--max-num-seqs", str(self.concurrency)]
            words += ["--max-num-batched-tokens", str(self.max_num_tokens)]
            words += ["--max-model-len", str(limit)] if limit else []
            if mtp:
                drafts = json.loads(self.drafts) | {"num_speculative_tokens": mtp}
                words += ["--speculative-config", json.dumps(drafts)]
        else:
            # Without --model_path, trtllm-bench takes the model for a name on the hub, even a folder.
            checkpoint = self.model_path or (self.model if Path(self.model).is_dir() else None)
            words += [*self.command, "--model", self.model]
            words += ["--model_path", checkpoint] if checkpoint else []
            words += ["throughput", "--backend", "pytorch", "--tp", str(self.gpus), "--ep", str(self.gpus)]
            words += ["--dataset", str(file), "--num_requests", str(self.requests)]
            words += ["--warmup", str(self.warmup), "--concurrency", str(self.concurrency)]
            words += ["--max_batch_size", str(self.concurrency), "--max_num_tokens", str(self.max_num_tokens)]
            words += ["--max_seq_len", str(limit)] if limit else []
            words += ["--streaming", self.config_flag, str(self.config(mtp, variant))]  # reports TPOT
            words += ["--report_json", str(report)]
        return words + shlex.split(self.extra_args)

    def load(self, file: Path, url: str, report: Path) -> list[str]:
        """The command of the client that sends the prompts to a server, and reports."""
        words = [*shlex.split(self.client), "--backend", "openai", "--base-url", url, "--model", self.model]
        words += ["--tokenizer", self.model_path] if self.model_path else []
        words += ["--dataset-name", "custom", "--dataset-path", str(file), "--skip-chat-template"]
        words += ["--custom-output-len", str(self.output_tokens), "--ignore-eos", *shlex.split(self.sampling)]
        words += ["--num-prompts", str(self.requests), "--num-warmups", str(self.warmup)]
        words += ["--max-concurrency", str(self.concurrency), "--save-result"]
        return [*words, "--result-dir", str(report.parent), "--result-filename", report.name]


def plan_run(
    settings: Settings,
    case: Mapping[str, Any],
    prompt: Prompt,
    turn: tuple[int, Variant],
    build: Mapping[str, str],
) -> PlannedRun:
    """One repetition of one side of one case."""
    (repetition, variant), mtp = turn, case["MTP"]
    place = settings.out / f"mtp{mtp}_{case['prompt']}" / f"{variant}_{repetition}"
    report = Path(f"{place}.json")
    read_report = read_bench_report if settings.by_bench else read_serve_report
    content = prompt.lines(settings.requests, settings.output_tokens)
    file = settings.out / "prompts" / f"{case['prompt']}_{text_hash(content)[:12]}.jsonl"
    inputs = {file.name: text_hash(content)}
    if settings.by_bench:
        config = settings.config(mtp, variant)
        inputs[str(config)] = text_hash(config.read_text(encoding="utf-8"))
    server = None
    command = settings.start(prompt, file, mtp, variant, report)
    if not settings.by_bench:
        url = f"http://127.0.0.1:{settings.port}"
        server = Server(tuple(command), f"{url}/health", Path(f"{place}.server.log"))
        command = settings.load(file, url, report)
    return PlannedRun(
        labels={**case, "variant": variant, "repetition": repetition},
        command=tuple(command),
        log=Path(f"{place}.log"),
        inputs=inputs,
        measure=lambda printed: read_report(report),
        build=build,
        report=report,
        files={file: content},
        server=server,
        subject=settings.compares,
    )


def check_settings(settings: Settings, mtps: Sequence[int]) -> None:
    """Require that each pair of files is a fair comparison of its MTP setting."""
    if not settings.by_bench:
        return
    if settings.configs is None and (unknown := [str(mtp) for mtp in mtps if mtp not in MTP]):
        raise InputError(
            f"--mtp: wanted one of {', '.join(map(str, MTP))} (--configs names other configurations), "
            f"got {', '.join(unknown)}"
        )
    for mtp in mtps:
        off, on = settings.config(mtp, "off"), settings.config(mtp, "on")
        loaded, _ = check_pair(off, on)
        if loaded.next_n - 1 != mtp:
            raise InputError(f"{off}: wanted MTP {mtp}, got {loaded.next_n - 1}")


def read_prompts(settings: Settings) -> dict[str, Prompt]:
    """The prompts, in the form that the chosen way of running takes."""
    prompts = {}
    for item in settings.prompts:
        if (match := LABEL_AND_FILE.fullmatch(item)) is None:
            wanted = "wanted LABEL=FILE, a label of letters, digits and . _ + -, the first a letter or digit"
            raise typer.BadParameter(f"{wanted}, got {item!r}", param_hint="--prompts")
        label, name = match.groups()
        prompt = read_prompt(Path(name), settings.entry)
        if prompt.form == "messages" and settings.tokenizer is not None:
            prompt = apply_template(prompt, settings.tokenizer, as_text=not settings.by_bench)
        if prompt.form == "messages":
            raise InputError(f"{name}: wanted no chat messages; --tokenizer MODEL applies its template")
        if prompt.form == "input_ids" and not settings.by_bench:
            raise InputError(f"{name}: wanted a text, which the client of a server sends, got token ids")
        prompts[label] = prompt
    refuse_repeats([item.partition("=")[0] for item in settings.prompts], "--prompts")
    return prompts


def with_settings(function: Callable[[Settings], None]) -> Callable[..., None]:
    """Decorator by which a command has the fields of `Settings` for options."""

    def main(**given: Any) -> None:
        function(Settings(**given))

    main.__annotations__ = hints = get_type_hints(Settings, include_extras=True)
    main.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            its.replace(annotation=hints[name], kind=its.KEYWORD_ONLY)
            for name, its in inspect.signature(Settings).parameters.items()
        ]
    )
    return main


@with_settings
def main(settings: Settings) -> None:
    """Measure TPOT with the heuristic top-k, or vLLM's sampler, off and on, taking turns."""
    if not settings.by_bench and settings.configs is not None:
        raise typer.BadParameter(
            "wanted none for vLLM, whose sides differ in one variable alone", param_hint="--configs"
        )
    if settings.by_bench and settings.compares == SAMPLER:
        raise typer.BadParameter("wanted --engine vllm for the sampler", param_hint="--compares")
    if settings.compares == SAMPLER and "penalty" in settings.sampling:
        raise typer.BadParameter("wanted no penalties, with which vLLM draws itself", param_hint="--sampling")
    mtps = settings.mtp or list(MTP)
    refuse_repeats(mtps, "--mtp")
    store = RunStore(settings.out / "runs")
    fixed = read_prompts(settings)
    check_settings(settings, mtps)
    cases: list[dict[str, Any]] = [{"MTP": setting, "prompt": label} for setting in mtps for label in fixed]
    build = build_identity(settings.command[0], "tensorrt_llm" if settings.by_bench else "vllm")
    planned = [
        plan_run(settings, case, fixed[case["prompt"]], turn, build)
        for case in cases
        for turn in variant_order(settings.repetitions)
    ]
    family = store.family(cases)
    outcome = run_campaign(
        planned,
        store,
        Limits(settings.timeout, settings.start_timeout, settings.keep_going),
        program=[*shlex.split(settings.launcher), *settings.command],
        option="--program",
        dry_run=settings.dry_run,
    )
    compared = outcome.compare(cases, "tpot_ms", family, math.log)
    typer.echo(f"\n{tpot_table(compared)}\n")
    outcome.report(settings.out, family, compared)
    finished = len(outcome.records) == len(planned)
    raise typer.Exit(0 if finished else TOOL_FAULT if outcome.faulty else UNDECIDED)
