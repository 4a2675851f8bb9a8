"""The modules that are mutated, the tests that have to notice, and what is asked of each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SAMPLE = 12
"""Mutants of a module that is not named in `SAMPLES`."""

SAMPLES = {f"gvr_topk/{name}.py": 64 for name in ("arguments", "contract", "cpu", "ops", "policy")}
"""Modules that decide which items are selected, and how many mutants of them are run."""

OUTSIDE_OF_THE_PRODUCT = {
    "gvr_topk/evaluation/": "models and references that tests and replays compare with; none serves a call",
    "gvr_topk/_build.py": "written by the build",
    "gvr_topk/constants.py": "generated from the C++ headers, which test_policy.py compares byte for byte",
    "gvr_topk/__main__.py": "calls the command line; tests run it in processes of their own",
}
"""Parts of the package that need no row in the report, and why."""

# What is left out takes seconds a mutant and adds nothing to the tests beside it, or runs in other processes,
# which import the module as it is.
_OP_FILES = (
    *("test_ops.py", "test_op_defaults.py", "test_prefill.py", "test_blocks.py", "test_arguments.py"),
    *("test_prefill_carry.py", "test_random_calls.py"),
)
_WITHOUT_COMPILING = ("-k", "not opcheck and not compiled")
_OPS = (*_OP_FILES, *_WITHOUT_COMPILING)
_VLLM_POINTS, _VLLM_SLICES = "test_integration_vllm_points.py", "test_integration_vllm_slices.py"
_VLLM = (
    *("test_integration_vllm.py", _VLLM_SLICES, _VLLM_POINTS),
    *("-k", "not doctor and not register_imports and not entry_point"),
)
_VLLM_SAMPLER = (
    "test_integration_vllm_logprobs.py",
    "test_integration_vllm_masks.py",
    _VLLM_POINTS,
    "test_integration_vllm_sampler.py",
    "test_integration_vllm_sampler_verify.py",
)
_VLLM_DCP = ("test_integration_vllm_dcp.py", "-k", "not processes")
_SGLANG = ("test_sglang.py", "test_sglang_sampler.py")
_TENSORRT_LLM = (
    "test_integration_models.py",
    "test_integration_steps.py",
    "test_integration_drafts.py",
    "test_integration_counters.py",
    "-k",
    "not 1_3_package and not rc25 and not that_of_the_last_accepted and (not same_sets or compressed)",
)
_IN_THIS_PROCESS = (
    "not worker_that and not parent_to_worker and not worker_process and not process_that"
    " and not broken_integration and not metrics_files"
)
_INSTALL = (
    *("test_integration_install.py", "test_integration_upstream.py", "test_integration_counters.py"),
    *("-k", _IN_THIS_PROCESS),
)
_SOME_ROWS = "not all_outputs or tied or NaN or (two and left)"
_DISTRIBUTED = ("test_distributed.py", "-k", "not process and not killed and not late")
_SAMPLING = ("test_sampling.py", "test_sampling_verify.py", "-k", _SOME_ROWS)

_TOPK = ("test_topk.py", "-k", "not one_graph")

TARGETS: dict[str, tuple[str, ...]] = {
    "gvr_topk/arguments.py": (
        "test_argument_memory.py",
        *_OP_FILES,
        "test_state.py",
        "test_config.py",
        *_WITHOUT_COMPILING,
    ),
    "gvr_topk/carry.py": ("test_prefill_carry.py", *_WITHOUT_COMPILING),
    "gvr_topk/cli.py": ("test_cli.py", "test_configs.py"),
    "gvr_topk/config.py": ("test_config.py", "test_configs.py"),
    "gvr_topk/config_files.py": (
        "test_integration_kit.py",
        "test_configs.py",
        "test_config.py",
        "test_cli.py",
    ),
    "gvr_topk/contract.py": ("test_contract.py", *_OPS),
    "gvr_topk/cpu.py": _OPS,
    "gvr_topk/layers.py": ("test_layers.py", "test_arguments.py"),
    "gvr_topk/library.py": ("test_library.py",),
    "gvr_topk/ops.py": _OPS,
    "gvr_topk/policy.py": ("test_policy.py", "test_policy_machine.py", "test_library.py"),
    "gvr_topk/request_slots.py": ("test_request_slots.py",),
    "gvr_topk/sampling/arithmetic.py": ("test_sampling_arithmetic.py", *_SAMPLING),
    "gvr_topk/sampling/command.py": ("test_cli.py", "-k", "test_sample"),
    "gvr_topk/sampling/reference.py": (
        "test_sampling_draws.py",
        "test_sampling.py",
        "test_sampling_verify.py",
        "-k",
        f"({_SOME_ROWS}) and not gumbel",
    ),
    "gvr_topk/state.py": ("test_state.py",),
    "gvr_topk/torch_backend.py": _TOPK,
    "gvr_topk/torch_topk.py": _TOPK,
    "gvr_topk/integrations/_kit/counters.py": (
        *("test_integration_counters.py", "test_integration_vllm_logprobs.py"),
    ),
    "gvr_topk/integrations/_kit/device.py": ("test_integration_kit.py",),
    "gvr_topk/integrations/_kit/engine.py": (*_SGLANG, *_VLLM),
    "gvr_topk/integrations/_kit/environment.py": (
        *("test_integration_verify.py", _VLLM_POINTS, "test_cli.py"),
        *_INSTALL,
    ),
    "gvr_topk/integrations/_kit/log.py": (*_SGLANG, *_VLLM),
    "gvr_topk/integrations/_kit/replacement.py": _VLLM_SAMPLER,
    "gvr_topk/integrations/_kit/signatures.py": _INSTALL,
    "gvr_topk/integrations/_kit/switch.py": ("test_integration_kit.py", *_SGLANG),
    "gvr_topk/integrations/_kit/transaction.py": ("test_integration_kit.py", *_INSTALL),
    "gvr_topk/integrations/_kit/verify.py": ("test_integration_verify.py",),
    "gvr_topk/integrations/tensorrt_llm/hint_state.py": _TENSORRT_LLM,
    "gvr_topk/integrations/tensorrt_llm/hook.py": _TENSORRT_LLM,
    "gvr_topk/integrations/tensorrt_llm/llm_config.py": ("test_integration_models.py", *_INSTALL),
    "gvr_topk/integrations/tensorrt_llm/sampler.py": ("test_integration_trtllm_sampler.py",),
    "gvr_topk/integrations/tensorrt_llm/selection.py": ("test_integration_kit.py", *_TENSORRT_LLM),
    "gvr_topk/integrations/tensorrt_llm/type_hints.py": ("test_integration_kit.py",),
    "gvr_topk/integrations/sglang/sampler.py": ("test_sglang_sampler.py",),
    "gvr_topk/integrations/vllm/candidates.py": ("test_integration_vllm_candidates.py",),
    "gvr_topk/integrations/vllm/dcp.py": _VLLM_DCP,
    "gvr_topk/integrations/vllm/drafts.py": (
        "test_integration_vllm_drafts.py",
        "test_integration_vllm_masks.py",
    ),
    "gvr_topk/integrations/vllm/logprobs.py": ("test_integration_vllm_logprobs.py",),
    "gvr_topk/integrations/vllm/plugin.py": (
        *("test_integration_vllm.py", _VLLM_SLICES, *_VLLM_SAMPLER),
        *_VLLM_DCP,
    ),
    "gvr_topk/integrations/vllm/sampler.py": _VLLM_SAMPLER[1:],
    "gvr_topk/integrations/vllm/slices.py": (_VLLM_SLICES,),
}
"""Tests of modules of the product, in `tests/cpu`, and options of pytest that choose among them."""

FOLDERS = {
    "gvr_topk/distributed/": _DISTRIBUTED,
    "gvr_topk/integrations/sglang/": _SGLANG,
    "gvr_topk/integrations/tensorrt_llm/": _INSTALL,
    "gvr_topk/integrations/vllm/": _VLLM,
    "gvr_topk/sampling/": _SAMPLING,
}
"""The same for all other modules of a folder."""

_NO_SMALLER_KEY = "the least key of a score is that of -inf, 0x7FFFFF"
_FLAG_IS_CHECKED = "a flag that is compared with one bool less is checked, which returns the same, later"
_ANY_NEGATIVE = "any negative number ranks below every key"

EQUIVALENT: dict[str, dict[tuple[str, str], str]] = {
    "gvr_topk/integrations/sglang/sampler.py": {
        (
            "seeds, at = torch.randint(2**63 - 1, logits.shape[:1], device=logits.device), 0",
            "0 to 1",
        ): "with a random seed any position will do",
        ("seeds=0,", "0 to 1"): "nobody reads the token",
    },
    "gvr_topk/arguments.py": {
        (
            "rows = tensor.shape[0] if tensor.dim() == 2 else 1",
            "1 to 2",
        ): "rows of a vector have no stride, so that any number of them is one run",
        ("torch.empty(0, device=device)", "0 to 1"): "asks whether the device is there, with any size",
    },
    "gvr_topk/contract.py": {
        (
            "ranked = (keys << 21) | (MAX_WIDTH - 1 - position)",
            "21 to 22",
        ): "33 bits of the key and 22 of the index fit an integer of 64, too",
        ("ranked = torch.where(visible, ranked, -1)", "1 to 2"): _ANY_NEGATIVE,
        (
            "top, index = torch.topk(ranked, taken, dim=1, sorted=False)",
            "to True",
        ): "the next line sorts in another order",
        (
            "index = torch.sort(torch.where(top >= 0, index, MAX_WIDTH), dim=1).values",
            "GtE to Gt",
        ): _NO_SMALLER_KEY,
        (
            "index = torch.sort(torch.where(top >= 0, index, MAX_WIDTH), dim=1).values",
            "0 to 1",
        ): _NO_SMALLER_KEY,
        (
            "keys = torch.full((rows, blocks * BLOCK_SIZE), -1, dtype=torch.int64, device=logits.device)",
            "1 to 2",
        ): _ANY_NEGATIVE,
        ("keys[:, :width] = torch.where(visible, order_key(logits), -1)", "1 to 2"): _ANY_NEGATIVE,
        (
            "keys = torch.where(is_newest, KEY_NAN + 1, keys)",
            "1 to 2",
        ): "any number above the key of NaN puts the newest block first",
        (
            "return largest(keys, keys > (KEY_MASKED if drop else -1), block_k).to(torch.int32)",
            "1 to 2",
        ): _ANY_NEGATIVE,
        (
            "place = largest(keys, visible & (keys > (KEY_MASKED if drop else -1)), k)",
            "1 to 2",
        ): _NO_SMALLER_KEY,
    },
    "gvr_topk/distributed/shards.py": {
        (
            '(("rows", MAX_ROWS.bit_length()), ("k", _WIDTH_BITS), ("gather", 1), ("expected", 1)),',
            "1 to 2",
        ): "a field of a header may have more bits than it needs",
        (
            "self, logits: Tensor, k: int, step: int | Tensor, gather: bool = False, expected: bool = False",
            "to True",
        ): "calls of `sharded_sample` have the same of either, on all ranks",
    },
    "gvr_topk/distributed/topk.py": {
        (
            "words = pad(words, (0, 1), value=-1)  # one more column, for every index behind the words",
            "1 to 2",
        ): "any negative word ranks below all others, and one more column is never read",
        (
            "right = ((gathered[:, :, 2] > kth) & (gathered[:, :, -1] <= kth)).all(0)",
            "Gt to GtE",
        ): "the k-th word is one of those sent, and never the one before them",
    },
    "gvr_topk/ops.py": {
        **{
            (
                f'if {flag} is not False and ({flag} is True or DECODE.flag("{flag}", {flag})):',
                "to False",
            ): _FLAG_IS_CHECKED
            for flag in ("pdl", "clamp_pages", "drop_masked")
        },
        (
            'flags = FLAG_PDL if pdl is True or (pdl is not False and PREFILL.flag("pdl", pdl)) else 0',
            "to True",
        ): _FLAG_IS_CHECKED,
    },
    "gvr_topk/sampling/arithmetic.py": {
        (
            "above = aligned > _SQRT2_MANTISSA",
            "Gt to GtE",
        ): "both splits of the one number that is equal round to the same logarithm",
    },
    "gvr_topk/policy.py": {
        ("min_length: int = 0,", "0 to 1"): "a row of at most k >= 1 items is decided before its length is",
    },
}
"""Mutants that change no behavior: the line and the change, and why nothing can notice."""


def product_modules() -> list[str]:
    """Every module of the package that the report has to cover, as paths from the root of the repository."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "gvr_topk").rglob("*.py"))
    return [module for module in found if not module.startswith(tuple(OUTSIDE_OF_THE_PRODUCT))]


def tests_of(module: str) -> tuple[str, ...]:
    """Return the tests of a module, as pytest takes them."""
    folder = module.rpartition("/")[0] + "/"
    return TARGETS.get(module) or FOLDERS[folder]


def sample_of(module: str) -> int:
    """Return how many mutants of a module are run; fewer where it has no more."""
    return SAMPLES.get(module, SAMPLE)


def test_files(modules: Iterable[str]) -> set[str]:
    """Names of the test files that `modules` name."""
    return {name for module in modules for name in tests_of(module) if name.endswith(".py")}
