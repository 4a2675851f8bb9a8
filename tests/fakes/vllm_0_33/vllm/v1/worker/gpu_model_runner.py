class GPUModelRunner:
    """The V1 model runner."""
