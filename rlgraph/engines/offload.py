"""Moments of an optimizer in host memory while another model has the GPU."""

import torch

from rlgraph.engines.sharding import local


class OffloadedMoments:
    """Takes the moments of an optimizer off the device and puts them back; where they lie on the device may change, they do not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._host: dict[int, torch.Tensor] = {}
        self._away: list[torch.Tensor] = []

    def take_off(self) -> int:
        """Free the device memory of the moments, and of what no tensor is in; return the bytes that went to the host.

        Nothing happens if they are away already.
        """
        if self._away:
            return 0
        for index, tensor in enumerate(self._moments()):
            if index not in self._host:
                self._host[index] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host[index].copy_(tensor, non_blocking=True)
            self._away.append(tensor)
        torch.cuda.synchronize()
        for tensor in self._away:
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        return sum(tensor.numel() * tensor.itemsize for tensor in self._away)

    def put_back(self) -> None:
        """Let the moments be on the device again, once this returns."""
        for index, tensor in enumerate(self._away):
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            tensor.copy_(self._host[index], non_blocking=True)
        if self._away:
            torch.cuda.synchronize()
        self._away.clear()

    def _moments(self) -> list[torch.Tensor]:
        states = self._optimizer.state.values()
        return [local(value) for state in states for key, value in state.items() if key != "step"]
