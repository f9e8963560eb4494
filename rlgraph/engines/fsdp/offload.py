"""Moments of an optimizer in host memory while another model has the GPU."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rlgraph.channels.weights.endpoints import in_one_memory
from rlgraph.engines.fsdp.sharding import local

TOUCHING = 16  # threads that touch new memory, whatever the worker computes with


class OffloadedMoments:
    """Moves the moments of an optimizer to host memory and back. Their device addresses may change, their values do not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._host: list[torch.Tensor] = []  # of each moment, pinned
        self._away: list[torch.Tensor] = []

    def take_off(self) -> int:
        """Free the device memory of the moments and torch's unused memory; return the bytes moved to the host.

        It does nothing if they are on the host already.
        """
        if self._away:
            return 0
        self._away = self._moments()
        if len(self._host) != len(self._away):
            self._host = pinned_like(self._away)
        for host, tensor in zip(self._host, self._away, strict=True):
            host.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        for tensor in self._away:
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        return sum(tensor.numel() * tensor.itemsize for tensor in self._away)

    def put_back(self) -> None:
        """Copy the moments back to the device."""
        if not self._away:
            return
        for host, tensor in zip(self._host, self._away, strict=True):
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            tensor.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        self._away = []

    def _moments(self) -> list[torch.Tensor]:
        states = self._optimizer.state.values()
        return [local(value) for state in states for key, value in state.items() if key != "step"]


def pinned_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Allocate pinned host memory of these shapes and dtypes; it stays pinned until the process ends.

    Many threads touch one memory for all tensors, which is then registered. torch's own pinned memory takes the next power of two for each
    tensor, and over twice the time, since one thread touches it page by page.
    """
    if not tensors:
        return []
    memory = in_one_memory({str(i): (tensor.shape, tensor.dtype) for i, tensor in enumerate(tensors)}, torch.device("cpu"))
    whole = torch.empty(0, dtype=torch.uint8).set_(memory["0"].untyped_storage())
    with ThreadPoolExecutor(TOUCHING) as pool:
        list(pool.map(torch.Tensor.zero_, whole.chunk(TOUCHING)))
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
    return list(memory.values())
