BUILT_IN_SAMPLING_BACKENDS = frozenset({"flashinfer", "pytorch", "ascend", "intel_xpu"})
SAMPLING_BACKEND_CHOICES = set(BUILT_IN_SAMPLING_BACKENDS)


class ServerArgs:
    """The arguments of a sampler; deterministic inference overrules the backend."""

    def __init__(self, sampling_backend=None, enable_deterministic_inference=False, rl_on_policy_target=None):
        if sampling_backend is not None and sampling_backend not in SAMPLING_BACKEND_CHOICES:
            raise ValueError(f"invalid choice: {sampling_backend!r}")
        self.rl_on_policy_target = rl_on_policy_target
        self.enable_deterministic_inference = enable_deterministic_inference or bool(rl_on_policy_target)
        self.sampling_backend = sampling_backend or "flashinfer"
        if self.enable_deterministic_inference and self.sampling_backend != "ascend":
            self.sampling_backend = "pytorch"
