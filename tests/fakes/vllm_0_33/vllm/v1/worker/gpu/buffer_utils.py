import numpy as np
import torch


class UvaBackedTensor:
    """`np` is written by the host; a copy, which the device reads where it lies, is `gpu`."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np: np.ndarray = self.cpu.numpy()
        self.gpu = self.cpu.clone()

    def copy_to_uva(self) -> torch.Tensor:
        self.gpu = self.cpu.clone()
        if torch.cuda.is_available():
            self.gpu = self.gpu.cuda()
        return self.gpu
