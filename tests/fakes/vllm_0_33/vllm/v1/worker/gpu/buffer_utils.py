import numpy as np
import torch

DEVICE = "cpu"
"""That of the runner; tests on a GPU set it."""


class UvaBackedTensor:
    """`np` is written by the host; a copy, which the device reads where it lies, is `gpu`."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np: np.ndarray = self.cpu.numpy()
        self.copy_to_uva()

    def copy_to_uva(self) -> torch.Tensor:
        self.gpu = self.cpu.to(DEVICE, copy=True)
        return self.gpu
