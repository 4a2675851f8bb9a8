def get_tensor_model_parallel_rank() -> int:
    return 0
