"""Exact, deterministic sampling of tokens from logits."""
