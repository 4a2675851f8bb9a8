import torch

from sglang.srt.runtime_context import get_exec

TOP_K_ALL = 1 << 30


class SamplingBatchInfo:
    """Parameters of a batch, from requests with those of the API."""

    def __init__(self, requests, grammars=None, masks=None, watermark=False, processors=()):
        params = [{"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, **one} for one in requests]
        for one in params:
            if one["temperature"] < 1e-6:
                one.update(temperature=1.0, top_k=1)
            if one["top_k"] == -1:
                one["top_k"] = TOP_K_ALL

        def column(name, dtype):
            return torch.tensor([one[name] for one in params], dtype=dtype)

        self.temperatures = column("temperature", torch.float).view(-1, 1)
        self.top_ks = column("top_k", torch.int32)
        self.top_ps = column("top_p", torch.float)
        self.min_ps = column("min_p", torch.float)
        self.is_all_greedy = bool((self.top_ks <= 1).all())
        self.need_top_k_sampling = bool((self.top_ks != TOP_K_ALL).any())
        self.need_top_p_sampling = bool((self.top_ps != 1).any())
        self.need_min_p_sampling = bool((self.min_ps > 0).any())
        self.sampling_seed = None
        if get_exec().deterministic.enable_deterministic_inference:
            seeds = [one.get("sampling_seed", 42) for one in params]
            self.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        self.grammars, self.logit_bias = grammars, None
        self.sampling_mask_batch_indices = masks
        self.has_watermark_candidates = watermark
        self.processors, self.has_custom_logit_processor = processors, bool(processors)
