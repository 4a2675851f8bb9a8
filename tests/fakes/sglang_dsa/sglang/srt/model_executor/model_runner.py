from types import SimpleNamespace

from sglang.srt.layers.sampler import create_sampler


class ModelRunner:
    """Only what it does with its sampler."""

    def __init__(self):
        self.sampler = create_sampler()

    def sample(self, logits, sampling_info, positions, return_logprob=False, **others):
        """Tokens, and what the sampler has written beside them."""
        output = SimpleNamespace(next_token_logits=logits)
        nums = [2 if return_logprob else 0] * len(logits)
        tokens = self.sampler(
            output, sampling_info, return_logprob, nums, [None] * len(logits), positions, **others
        )
        return tokens, output
