"""Random tensors of the fuzzer and of the stress runs."""

import torch
from torch import Tensor


class Draw:
    """Random tensors on a device; the same ones for the same seed, if they are drawn in the same order."""

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self.device = self._generator.device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers of ``[low, high)``; `low` where there are none."""
        high = max(high, low + 1)
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def any_int32(self, *shape: int) -> Tensor:
        """Any numbers of 32 bits, int32."""
        return self.integers(-(1 << 31), 1 << 31, *shape).to(torch.int32)

    def chosen(self, values: Tensor, *shape: int) -> Tensor:
        """Some of the values, on the device."""
        return values.to(self.device)[self.integers(0, len(values), *shape)]

    def order(self, count: int) -> Tensor:
        """The numbers below `count` in any order."""
        return torch.randperm(count, generator=self._generator, device=self.device)
