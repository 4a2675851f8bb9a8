from . import fused


def spec_sample_from_logits(
    advanced_sampling_mode, logits, temperatures, top_ks, top_ps, min_ps, *, seed=None, offset=None
):
    if not advanced_sampling_mode.is_fused:
        raise NotImplementedError("FlashInfer draws")
    filters = temperatures, top_ks, top_ps, min_ps
    return fused.fused_sample_from_logits(logits, *filters, seed=seed, offset=offset)


def spec_sample_from_logits_with_probs(
    advanced_sampling_mode, logits, temperatures, top_ks, top_ps, min_ps, *, seed=None, offset=None
):
    if not advanced_sampling_mode.is_fused:
        raise NotImplementedError("FlashInfer draws")
    filters = temperatures, top_ks, top_ps, min_ps
    return fused.fused_sample_from_logits_with_probs(logits, *filters, seed=seed, offset=offset)


def spec_compute_probs_from_logits(advanced_sampling_mode, logits, temperatures, top_ks, top_ps, min_ps):
    if not advanced_sampling_mode.is_fused:
        raise NotImplementedError("FlashInfer computes")
    return fused.fused_compute_probs_from_logits(logits, temperatures, top_ks, top_ps, min_ps)
