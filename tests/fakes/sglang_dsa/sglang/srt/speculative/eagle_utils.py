"""Verification of trees of drafts. The tree kernel draws a token of each node and accepts none."""

import torch

from sglang.kernels.ops.sampling import softmax as sampling_softmax
from sglang.kernels.ops.sampling.renorm import top_k_renorm_prob, top_p_renorm_prob

VERIFIED = []
"""What drafts were verified against."""


def eagle_sample(
    verify_input, batch, logits_output, grammar_mask=None, uno_target_max_top_k=None, *, watermark_state=None
):
    """Of a batch that is not idle, and with a request that is not greedy."""
    info, width, logits = batch.sampling_info, verify_input.draft_token_num, logits_output.next_token_logits
    count, predict = len(batch.seq_lens), torch.zeros(len(logits), dtype=torch.int32)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(width, dim=0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    probs = sampling_softmax(logits, temperatures=info.temperatures.repeat_interleave(width, dim=0))
    if info.need_top_k_sampling:
        probs = top_k_renorm_prob(probs, info.top_ks.repeat_interleave(width, dim=0))
    if info.need_top_p_sampling:
        probs = top_p_renorm_prob(probs, info.top_ps.repeat_interleave(width, dim=0))
    coins = torch.rand(len(logits))
    tree_speculative_sampling_target_only(predict, coins, probs.reshape(count, width, -1))
    return predict, torch.ones(count, dtype=torch.int32), torch.arange(len(logits))[::width, None]


def tree_speculative_sampling_target_only(predicts, uniform_samples_for_final_sampling, target_probs):
    VERIFIED.append(target_probs)
    sums = target_probs.flatten(0, 1).cumsum(-1)
    wanted = uniform_samples_for_final_sampling[:, None] * sums[:, -1:]
    predicts.copy_(torch.searchsorted(sums, wanted, right=True)[:, 0].clamp(max=sums.shape[1] - 1))
