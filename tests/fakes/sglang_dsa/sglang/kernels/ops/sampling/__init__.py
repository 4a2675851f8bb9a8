from sglang_base import CALLS


def softmax(logits, temperatures=None):
    CALLS["softmax"] += 1
    return (logits if temperatures is None else logits / temperatures).softmax(-1)
