"""Moments of an optimizer in host memory while another model has the GPU."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rlgraph.channels.weights.double_buffer import in_one_memory
from rlgraph.engines.fsdp.sharding import local

TOUCHING = 16  # threads that touch new memory, whatever the worker computes with


class OffloadedMoments:
    """Takes the moments of an optimizer off the device and puts them back; where they lie on the device may change, they do not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._host: list[torch.Tensor] = []  # of each moment, pinned
        self._away: list[torch.Tensor] = []

    def take_off(self) -> int:
        """Free the device memory of the moments, and of what no tensor is in; return the bytes that went to the host.

        Nothing happens if they are away already.
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
        """Let the moments be on the device again, once this returns."""
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
    """Return host memory of these shapes and dtypes that copies from and to a GPU are fast with; it stays so until the process ends.

    One memory for all is touched by many threads and registered as it is: torch's own pinned memory takes the next power of two for
    each tensor, and over twice as long, since one thread touches it page by page.
    """
    if not tensors:
        return []
    memory = in_one_memory({str(i): (tensor.shape, tensor.dtype) for i, tensor in enumerate(tensors)}, torch.device("cpu"))
    whole = torch.empty(0, dtype=torch.uint8).set_(memory["0"].untyped_storage())
    with ThreadPoolExecutor(TOUCHING) as pool:
        list(pool.map(torch.Tensor.zero_, whole.chunk(TOUCHING)))
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
    return list(memory.values())
