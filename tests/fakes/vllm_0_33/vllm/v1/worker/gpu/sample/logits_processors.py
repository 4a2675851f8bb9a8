"""What changes logits ahead of the temperature; in vLLM each class has a module of its own."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.sampling_params import SamplingParams


class LogitsProcessor:
    """Changes the rows of requests that ask for it by a parameter; `mirror` is where the host sees which."""

    parameter: str
    mirror: str

    def __init__(self, max_num_reqs: int) -> None:
        self.values: list[Any] = [None] * max_num_reqs
        self.asked = np.zeros(max_num_reqs, dtype=bool)
        setattr(self, self.mirror, self.asked)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.values[req_idx] = getattr(sampling_params, self.parameter)
        self.asked[req_idx] = bool(self.values[req_idx])
        return bool(self.asked[req_idx])

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        for row, slot in zip(logits, slots.tolist(), strict=True):
            if self.asked[slot]:
                self.change(row, self.values[slot])
        return logits

    def change(self, row: torch.Tensor, value: Any) -> None:
        raise NotImplementedError


class LogitBiasState(LogitsProcessor):
    parameter, mirror = "logit_bias", "use_logit_bias"

    def change(self, row: torch.Tensor, value: dict[int, float]) -> None:
        for token, bias in value.items():
            row[token] += bias


class PenaltiesState(LogitsProcessor):
    """Here as if the output so far had the tokens 0 to 9."""

    parameter, mirror = "presence_penalty", "use_penalty"

    def change(self, row: torch.Tensor, value: float) -> None:
        row[:10] -= value


class BadWordsState(LogitsProcessor):
    """Here with words of one token each."""

    parameter, mirror = "bad_words_token_ids", "num_bad_words"

    def __init__(self, max_num_reqs: int) -> None:
        super().__init__(max_num_reqs)
        self.num_bad_words = SimpleNamespace(np=self.asked)  # as of a `UvaBackedTensor`

    def change(self, row: torch.Tensor, value: list[int]) -> None:
        row[value] = -torch.inf


class ThinkingBudgetState(LogitsProcessor):
    """Here a budget is always spent, and token 0 ends the thinking."""

    parameter, mirror = "thinking_token_budget", "use_thinking_budget"

    def __init__(self, max_num_reqs: int, enabled: bool) -> None:
        super().__init__(max_num_reqs)
        self.enabled = enabled
        if not enabled:
            del self.use_thinking_budget  # vLLM makes it only where budgets are on

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return self.enabled and super().add_request(req_idx, sampling_params)

    def change(self, row: torch.Tensor, value: int) -> None:
        row[0] = 1.0e9
