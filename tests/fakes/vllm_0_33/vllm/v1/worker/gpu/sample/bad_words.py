import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


class BadWordsState(LogitsProcessor):
    """Here with words of one token each."""

    def __init__(self, max_num_reqs: int) -> None:
        self.num_bad_words = UvaBackedTensor(max_num_reqs, dtype=torch.int32)
        self.words: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.words[req_idx] = sampling_params.bad_words_token_ids
        self.num_bad_words.np[req_idx] = len(sampling_params.bad_words_token_ids)
        return bool(sampling_params.bad_words_token_ids)

    def apply_staged_writes(self) -> None:
        self.num_bad_words.copy_to_uva()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            logits[row, self.words.get(slot, [])] = -torch.inf
        return logits
