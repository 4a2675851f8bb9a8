from dataclasses import dataclass, field


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words_token_ids: list[int] = field(default_factory=list)
    thinking_token_budget: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < 1e-2:
            self.temperature = 1e-2
        if self.temperature < 1e-5:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
