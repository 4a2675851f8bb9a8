"""The ops inside engines: vLLM with a small model, and a simulated decode with TensorRT-LLM's hook."""
