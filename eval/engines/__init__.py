"""The ops inside engines: vLLM with a small model."""
