"""What ``python -m eval vllm-trial`` puts around vLLM's sampler: a comparison with vLLM's own, and times.

``Sampler.sample`` and ``RejectionSampler._verify`` are wrapped whatever they run by then. Tokens that differ
are judged one by one on the CPU, with the exact masses of `gvr_topk.sampling.reference`.
"""

import functools
import importlib
import inspect
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gvr_topk.integrations._kit.transaction import Transaction
from gvr_topk.integrations.vllm.sampler import NEAR, native_noise
from gvr_topk.sampling import arithmetic
from gvr_topk.sampling.arguments import Noise
from gvr_topk.sampling.reference import Kept, Row, Setting, draw, keep

GREEDY, LIKE_CHAT, MIXED = "greedy", "k = 50, p = 0.9", "mixed"
LOGPROBS, GRAMMAR, FEW = "mixed, 20 log-probabilities", "mixed, a grammar", "few tokens"
MASKED = (f"{LIKE_CHAT}, masks", "mixed, masks", "few tokens, masks")
KINDS: dict[str, list[dict[str, Any]]] = {
    GREEDY: [{"temperature": 0.0}],
    LIKE_CHAT: [{"temperature": 0.7, "top_k": 50, "top_p": 0.9}],
    MIXED: [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": 1},
        {"temperature": 0.1, "top_p": 0.95, "seed": 2},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "seed": 3},
        {"temperature": 0.05},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.3, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ],
}
"""Parameters of the requests of a batch, in turn; ``regex`` is what a grammar allows."""

KINDS[LOGPROBS] = [setting | {"logprobs": 20} for setting in KINDS[MIXED]]
KINDS[GRAMMAR] = [setting | {"regex": "[a-m]+"} for setting in KINDS[MIXED]]
# Of which drafts of n-grams are often right, because a grammar leaves three tokens.
KINDS[FEW] = [{"temperature": warmth, "regex": "(aaaa|aaab|aaba)+"} for warmth in (0.5, 1.0, 2.0)]
# vLLM demands a top-k where masks of kept tokens are returned, and refuses greedy requests.
for _kind, _masked in zip((LIKE_CHAT, MIXED, FEW), MASKED, strict=True):
    KINDS[_masked] = [{"top_k": 1000} | setting for setting in KINDS[_kind] if setting["temperature"] > 0]


def settings_of(kind: str, batch: int, number: int, drafts: bool) -> list[dict[str, Any]]:
    """Parameters of one batch of several, each request with a seed of its own where it has one.

    vLLM refuses min-p beside drafts.
    """
    settings = [setting for setting in KINDS[kind] if not (drafts and "min_p" in setting)]
    given = [settings[at % len(settings)] for at in range(number * batch, (number + 1) * batch)]
    return [
        setting | ({"seed": setting["seed"] + 100 * at} if "seed" in setting else {})
        for at, setting in enumerate(given)
    ]


def shows(kind: str, batch: int, compares: bool, masks: bool) -> bool:
    """Whether a kind of batch is run: mixed ones are compared, and timed where one batch has all settings."""
    if masks != (kind in MASKED):
        return False
    if compares:
        return len(KINDS[kind]) > 1
    return batch >= len(KINDS[kind]) and "regex" not in KINDS[kind][0]


TIED, TIE, CUTOFF, LAST = "near tie", "tie at the border", "cutoff", "last candidate"
BEYOND, UNEXPLAINED, WRONG_TOKEN = "beyond top-p", "unexplained", "ours is wrong"
FILTERS = ("temperature", "top_k", "top_p", "min_p")

NO_TOP_K = 1 << 15
"""A top-k of so many tokens is none: it is the vocabulary."""

MARGIN = 5e-3
"""By what share of itself the top-p or min-p that vLLM's search amounts to may be another."""

WRONG = (
    WRONG_TOKEN,
    UNEXPLAINED,
    "logprob_rows_that_differ",
    "mask_rows_that_differ",
    "drafts_greedy_requests_that_differ",
)
"""Counts of a comparison that should be 0."""

LOGPROB_TOLERANCE = 1e-4
"""By how much a log-probability of vLLM's, which sums in fp32, may differ."""

TIMED_EVERY = 8
"""Of so many calls, one is timed on the GPU, behind a pause of `PAUSE_CYCLES`, while the host gets ahead."""

PAUSE_CYCLES = 10_000_000  # some 5 ms


def _classes() -> tuple[Any, Any]:
    """Return vLLM's module of the sampler, and the class that verifies drafts."""
    modules = ("vllm.v1.worker.gpu.sample.sampler", "vllm.v1.worker.gpu.spec_decode.rejection_sampler")
    sampler, rejection = map(importlib.import_module, modules)
    return sampler, rejection.RejectionSampler


def _wrap_masks(patches: Transaction, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap ``SamplingMaskTensors.from_logits`` where it is called, not in its class, where ours has to be."""
    module, rejection = _classes()
    masks = module.SamplingMaskTensors
    around = type(masks.__name__, (masks,), {"from_logits": staticmethod(wrap(masks.from_logits))})
    for each in (module, sys.modules[rejection.__module__]):
        patches.set_attribute(each, masks.__name__, around)


class Comparison:
    """Draws every call a second time with vLLM's native sampler, from the same logits.

    Attributes
    ----------
    counts : Counter
        Calls, rows, and rows by how their tokens differ; for drafts, what both accept.
    differences : list of dict
        Every row whose tokens differ, and why.
    """

    def __init__(self) -> None:
        self.reset()
        self._filtered: tuple[dict[str, Any], Tensor]  # the last call, and its logits by vLLM

    def observe(self, patches: Transaction) -> None:
        """Put the comparison around all that draws in this process."""
        module, rejection = _classes()
        verify = self.wrap_verify(rejection._verify, module.Sampler.sample)
        patches.set_attribute(rejection, "_verify", verify)
        patches.wrap(module, "Sampler.sample", self.wrap_sample)
        patches.wrap(module, "compute_topk_scores", self.wrap_scores)
        _wrap_masks(patches, self.wrap_masks)

    def reset(self) -> None:
        """Forget what was counted, such as vLLM's warm-up."""
        self.counts: Counter[str] = Counter()
        self.differences: list[dict[str, Any]] = []
        self.largest_logprob_difference = 0.0

    def as_dict(self) -> dict[str, Any]:
        """What was counted."""
        largest = {"largest_logprob_difference": self.largest_logprob_difference}
        return dict.fromkeys(WRONG, 0) | self.counts | largest | {"differences": self.differences}

    def wrap_sample(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Sampler.sample``, which is ours by now."""
        original = inspect.unwrap(sample)
        signature = inspect.signature(original)

        def observed(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named).arguments
            sampler = given["self"]
            results = sample(*args, **named)
            with native_noise(sampler):
                theirs, filtered = original(*args, **named)
            self._filtered = given, filtered
            rows = torch.arange(len(theirs), device=theirs.device)
            self._see(given, rows, results[0], theirs)
            return results

        return observed

    def _see(self, given: dict[str, Any], rows: Tensor, ours: Tensor, theirs: Tensor) -> None:
        """Count tokens of some rows of a call, and judge those that differ."""
        self.counts["calls"] += 1
        self.counts["rows"] += len(rows)
        for at in (ours != theirs).nonzero().flatten().tolist():
            values, filters, seed = self._row(given, int(rows[at]))
            position = int(given["pos"][rows[at]])
            judged = judge(values, filters, seed, position, int(ours[at]), int(theirs[at]))
            self.counts[judged["why"]] += 1
            self.differences.append({"batch": len(given["logits"]), "position": position} | filters | judged)

    @staticmethod
    def _row(given: dict[str, Any], row: int) -> tuple[Any, dict[str, Any], int]:
        """Logits, filters and seed of one row of a call."""
        states = getattr(given["self"], "sampler", given["self"]).sampling_states
        slot = int(given["expanded_idx_mapping"][row])
        filters = {name: getattr(states, name).np[slot].item() for name in FILTERS}
        return given["logits"][row].float().cpu().numpy(), filters, states.seeds.np[slot].item()

    def wrap_scores(self, scores: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compute_topk_scores``, which is ours by now; of equal logits either may be named."""
        original = inspect.unwrap(scores)

        def observed(logits: Tensor, *args: Any, **named: Any) -> Any:
            ours, theirs = scores(logits, *args, **named), original(logits, *args, **named)
            alike = ours.logprobs == theirs.logprobs  # such as -inf
            apart = (ours.logprobs - theirs.logprobs).abs().masked_fill(alike, 0).amax(1)
            values = [logits.gather(1, each.logprob_token_ids.long()) for each in (ours, theirs)]
            differ = (values[0] != values[1]).any(1) | ~(apart <= LOGPROB_TOLERANCE)
            differ |= ours.logprob_token_ids[:, 1:].sort(1).values.diff().eq(0).any(1)
            differ |= ours.selected_token_ranks != theirs.selected_token_ranks
            self.counts["logprob_rows"] += len(differ)
            self.counts["logprob_rows_that_differ"] += int(differ.sum())
            self.largest_logprob_difference = max(self.largest_logprob_difference, float(apart.max()))
            return ours

        return observed

    def wrap_masks(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``SamplingMaskTensors.from_logits``, ours by now; vLLM's gets what its own filters leave."""
        original = inspect.unwrap(make)

        def observed(logits: Tensor, starts: Tensor, *args: Any, **named: Any) -> Any:
            given, filtered = self._filtered
            both = make(logits, starts, *args, **named), original(filtered, starts, *args, **named)
            columns = torch.arange(both[0].token_ids.shape[1], device=starts.device)
            ours, theirs = (torch.where(columns < each.counts[:, None], each.token_ids, -1) for each in both)
            self.counts["mask_rows"] += int((both[1].counts > 0).sum())
            differ = (both[0].counts != both[1].counts) | (ours != theirs).any(1)
            for at in differ.nonzero().flatten().tolist():
                request, behind = divmod(at, both[0].rows_per_request)
                values, filters, _ = self._row(given, int(starts[request]) + behind)
                sets = [set(each[at].tolist()) - {-1} for each in (ours, theirs)]
                explained = masks_agree(values, filters, *sets)
                self.counts["mask_rows_at_borders" if explained else "mask_rows_that_differ"] += 1
                if not explained:
                    only = {"ours": sorted(sets[0] - sets[1]), "theirs": sorted(sets[1] - sets[0])}
                    self.differences.append({"batch": len(logits), "why": UNEXPLAINED} | filters | only)
            return both[0]

        return observed

    def wrap_verify(self, verify: Callable[..., Any], sample: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``RejectionSampler._verify``, which is ours by now, as is `sample`.

        Each token must be the one that vLLM's native sampler draws of its row without drafts, and greedy
        requests must have the tokens of vLLM's own verification. Of the others, the first drafts that one
        side alone accepts are counted: as both have the same law, half of them should be of either side.
        """
        original = inspect.unwrap(verify)
        native = inspect.unwrap(sample)
        signature = inspect.signature(original)

        def observed(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named).arguments
            ours, theirs = verify(*args, **named), original(*args, **named)
            self._filtered = given, theirs[0]
            slots = torch.from_numpy(np.asarray(given["idx_mapping_np"])).to(ours[1].device)
            starts, drafts = given["cu_num_logits"].long(), given["verify_draft_sampled"]
            greedy = given["self"].sampler.sampling_states.temperature.gpu[slots] == 0
            drafted = starts.diff() > 1
            drafted &= drafts[(starts[:-1] + 1).clamp(max=len(drafts) - 1)] >= 0
            columns = torch.arange(ours[1].shape[1], device=slots.device)
            emitted = [
                torch.where(columns < lengths[:, None], tokens, -1) for _, tokens, lengths in (ours, theirs)
            ]
            first, second = (lengths > 1 for *_, lengths in (ours, theirs))
            by_chance = drafted & ~greedy
            seen = {
                "calls": torch.ones((), dtype=torch.bool),
                "requests": drafted | ~drafted,
                "greedy_requests": greedy,
                "greedy_requests_that_differ": greedy & (emitted[0] != emitted[1]).any(1),
                "first_drafts": by_chance,
                "accepted_by_ours": by_chance & first,
                "accepted_by_vllm": by_chance & second,
                "accepted_by_ours_alone": by_chance & first & ~second,
                "accepted_by_vllm_alone": by_chance & second & ~first,
            }
            for name, which in seen.items():
                self.counts[f"drafts_{name}"] += int(which.sum())
            sampler, (_, tokens, lengths) = given["self"].sampler, ours
            inputs = {name: given[name] for name in inspect.signature(native).parameters if name in given}
            with native_noise(sampler):
                alone, _ = native(**inputs | {"self": sampler, "input_ids": given["draft_sampled"]})
            got = columns < lengths[:, None]
            rows = (starts[:-1, None] + columns)[got]
            self._see(given, rows, tokens[got], alone[rows])
            return ours

        return observed


def judge(
    values: np.ndarray[Any, Any], filters: dict[str, Any], seed: int, position: int, ours: int, theirs: int
) -> dict[str, Any]:
    """Say why two samplers drew other tokens of a row: ``why``, and the figures behind it.

    ``near tie`` has scores that differ by no more than `NEAR`. Otherwise a token is at a border: the one of
    vLLM's that the exact arithmetic does not keep, or ours if it keeps both. ``shares`` are the exact mass
    ahead of all of its equals and behind them, of what top-p asks for, or its mass, of what min-p asks for.
    `reason` makes ``why`` of them.
    """
    row, setting, kept = _exact(values, filters)
    told: dict[str, Any] = {"kept": len(kept.ids)}
    if int(draw(kept, row, Noise.MURMUR, seed, position)[0]) != ours:
        return told | {"why": WRONG_TOKEN, "ours": ours, "theirs": theirs, "seed": seed}
    if not 0 <= theirs < len(values):
        return told | {"why": UNEXPLAINED, "theirs": theirs}
    if theirs in kept.ids:
        ids = np.array([ours, theirs])
        noise = arithmetic.gumbel(arithmetic.hash32(seed, position, ids)).astype(np.float64)
        scores = values[ids].astype(np.float64) / setting.temperature + noise
        told["gap"] = float(scores[0] - scores[1])
        if abs(told["gap"]) <= NEAR * (1 + abs(scores).max()):
            return told | {"why": TIED}
        at_border = ours  # vLLM did not keep it, or it would have drawn it
    else:
        at_border = theirs
    told |= at_borders(row, setting, at_border)
    return told | {"why": reason(told | filters)}


def masks_agree(
    values: np.ndarray[Any, Any], filters: dict[str, Any], ours: set[int], theirs: set[int]
) -> bool:
    """Whether ours is the exact set, and there is a `reason` for each token that only one of two sets has."""
    row, setting, kept = _exact(values, filters)
    told = (
        at_borders(row, setting, token) | filters | ({"gap": 1.0} if token in ours else {})
        for token in ours ^ theirs
    )
    return ours == set(kept.ids.tolist()) and UNEXPLAINED not in map(reason, told)


def _exact(values: np.ndarray[Any, Any], filters: dict[str, Any]) -> tuple[Row, Setting, Kept]:
    """What the exact arithmetic keeps of a row."""
    temperature, top_k, top_p, min_p = (filters[name] for name in FILTERS)
    setting = Setting(np.float32(temperature), top_k, np.float32(top_p), np.float32(min_p))
    row = Row(values)
    return row, setting, keep(row, setting)


def reason(told: dict[str, Any]) -> str:
    """Why vLLM keeps another set than the exact arithmetic, by what `judge` has told of a token.

    `TIE`: the border of top-p is among equals, of which vLLM keeps all, or one more or less. `CUTOFF`: it is
    within `MARGIN` of them. `LAST`: top-p needs the least candidate that the other filters leave, and vLLM's
    search, which begins above it, never keeps it. `BEYOND`: without top-k, vLLM keeps a token although those
    ahead of it have more mass than top-p asks for.
    """
    shares, equals, top_p = told["shares"], told["equals"], told["top_p"]
    if equals > 1 and any(ahead < 1 < behind for ahead, behind in shares):
        return TIE
    if any(abs(ahead - 1) <= MARGIN for ahead, _ in shares):
        return CUTOFF
    ahead, behind = shares[-1] if shares and top_p < 1 else (0.0, 0.0)
    if "gap" in told and told["gap"] > 0 and ahead < 1 and abs(behind * top_p - 1) < 1e-6:
        return LAST
    if "gap" not in told and ahead > 1 and told["top_k"] >= NO_TOP_K:
        return BEYOND
    return UNEXPLAINED


def why_of(told: dict[str, Any]) -> str:
    """The `reason` of a listed difference; some have no more than a word."""
    return reason(told) if "shares" in told else str(told["why"])


def at_borders(row: Row, setting: Setting, token: int) -> dict[str, Any]:
    """How close a token and its equals are to the borders of min-p and top-p, and how many equals it has."""
    ranked = row.candidates()
    ranked = ranked[np.argsort(~row.keys[ranked], kind="stable")]
    masses = arithmetic.masses(row.distances(ranked), arithmetic.mass_scale(setting.temperature))
    shares = []
    if setting.min_p > 0:
        least = arithmetic.min_p_mass(setting.min_p)
        share = int(masses[ranked == token].sum()) / least
        shares.append((share, share))
        masses = np.where(masses >= least, masses, np.uint64(0))
    if setting.top_k > 0:
        masses[setting.top_k :] = 0
    equal = row.keys[ranked] == row.keys[token]
    if setting.top_p < 1:
        wanted = arithmetic.top_p_mass(setting.top_p, int(masses.sum()))
        ahead = int(masses[row.keys[ranked] > row.keys[token]].sum())
        shares.append((ahead / wanted, (ahead + int(masses[equal].sum())) / wanted))
    return {"shares": shares, "equals": int((equal & (masses > 0)).sum())}


class Times:
    """Times every call of what samples: on the host, and on the GPU in one of `TIMED_EVERY` calls.

    Attributes
    ----------
    ours : bool
        Whether ours samples, or vLLM's own functions do: so one engine times both in turns.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, float, Any]] = []
        self.flashinfer = False  # whether vLLM has FlashInfer's sampler for batches that it can draw
        self.ours = True

    def observe(self, patches: Transaction) -> None:
        """Time the calls of both samplers of this process, and choose whose functions these call."""
        module, rejection = _classes()
        for cls, method in ((module.Sampler, "sample"), (rejection, "_verify")):
            patches.set_attribute(cls, "__call__", self.wrap(cls.__call__))
            for owner, name in ((cls, method), (sys.modules[cls.__module__], "compute_topk_scores")):
                patches.set_attribute(owner, name, self.choose(getattr(owner, name)))
        _wrap_masks(patches, self.choose)

    def choose(self, replaced: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of ours, or of the function of vLLM's that it is in place of."""
        own = inspect.unwrap(replaced)

        @functools.wraps(own)
        def chosen(*args: Any, **named: Any) -> Any:
            return (replaced if self.ours else own)(*args, **named)

        return chosen

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call whose second argument is the logits."""

        def timed(sampler: Any, logits: Tensor, *args: Any, **named: Any) -> Any:
            events = None
            if len(self._calls) % TIMED_EVERY == 0 and logits.is_cuda:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                torch.cuda._sleep(PAUSE_CYCLES)
                events[0].record()
            begun = time.perf_counter()
            result = call(sampler, logits, *args, **named)
            spent = time.perf_counter() - begun
            if events is not None:
                events[1].record()
            self._calls.append((len(logits), spent, events))
            self.flashinfer = getattr(sampler, "sampler", sampler).use_flashinfer
            return result

        return timed

    def take(self) -> dict[str, Any]:
        """Medians of the calls with the most frequent number of rows since the last time, in microseconds."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls, self._calls = self._calls, []
        if not calls:
            return {"calls": 0}
        rows, count = Counter(rows for rows, *_ in calls).most_common(1)[0]
        same = [(spent, events) for number, spent, events in calls if number == rows]
        on_gpu = [1e3 * events[0].elapsed_time(events[1]) for _, events in same if events is not None]
        return {
            "rows": rows,
            "calls": count,
            "flashinfer": self.flashinfer,
            "host_us": round(1e6 * statistics.median(spent for spent, _ in same), 1),
            "gpu_us": round(statistics.median(on_gpu), 1) if on_gpu else None,
        }


class Digests:
    """Keeps a digest of the logits of each sampled row, the last one of each seed and position."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def observe(self, patches: Transaction) -> None:
        """Put this around all that draws in this process."""
        module, rejection = _classes()
        for cls, method in ((module.Sampler, "sample"), (rejection, "_verify")):
            patches.set_attribute(cls, method, self.wrap(getattr(cls, method)))

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call that gets logits, the slots of their requests, and positions."""
        signature = inspect.signature(inspect.unwrap(call))

        @functools.wraps(call)
        def observed(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named).arguments
            logits, slots, positions = (given[name] for name in ("logits", "expanded_idx_mapping", "pos"))
            states = getattr(given["self"], "sampler", given["self"]).sampling_states
            bits = logits.view({2: torch.int16, 4: torch.int32}[logits.element_size()]).long()
            odd = 2 * torch.arange(bits.shape[1], device=bits.device) + 1
            digests = (bits * (odd * 0x1E3779B97F4A7C15)).sum(1)  # modulo 2^64
            self._seen.append(torch.stack([states.seeds.gpu[slots], positions.long(), digests], 1))
            return call(*args, **named)

        return observed

    def of_answers(self, answers: list[list[int]]) -> list[list[int | None]]:
        """What each token was drawn from, of prompts of one length in requests whose numbers are seeds."""
        found = {(seed, position): digest for seed, position, digest in torch.cat(self._seen).tolist()}
        first = min(position for _, position in found)
        return [
            [found.get((number, first + at)) for at in range(len(answer))]
            for number, answer in enumerate(answers)
        ]


def common_tokens(plain: dict[str, Any], drafted: dict[str, Any]) -> dict[str, int]:
    """Compare the tokens of the same requests: how many requests have the same, and how many tokens agree.

    Of the tokens before a first difference, and of first differences, those of the same logits are counted.
    """
    told: Counter[str] = Counter()
    both = [
        list(zip(*(side[what] for side in (plain, drafted)), strict=True)) for what in ("tokens", "logits")
    ]
    for (first, second), logits in zip(*both, strict=True):
        alike = [one == other for one, other in zip(first, second, strict=True)]
        same = [None not in pair and pair[0] == pair[1] for pair in zip(*logits, strict=True)]
        agree = alike.index(False) if False in alike else len(alike)
        told["requests"] += 1
        told["requests_alike"] += all(alike)
        told["tokens"] += len(alike)
        told["tokens_before_a_difference"] += agree
        told["of_the_same_logits"] += sum(same[:agree])
        told["differences_of_the_same_logits"] += sum(same[agree : agree + 1])
    return dict(told)
