"""GPU memory that another process of the same host maps: the slot of a channel for columns on a GPU.

The reader copies straight from it over NVLink, by the copy engines: no kernel of either side waits for the other, and neither
needs the other's device to be visible. The control path is the channel's; a peer that dies leaves nothing behind.
"""

import weakref
from dataclasses import dataclass, field

import msgspec
import torch


class Handle(msgspec.Struct, tag="device", array_like=True):
    """Device memory as its owner exports it: `size` bytes, and what CUDA needs to map them."""

    size: int
    memory: bytes
    allocation_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


class DeviceMemory:
    """Memory of this process on a GPU, with the handle under which others map it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.handle = handle_of(self.bytes)


# The memories of other processes that are mapped here, by address, while their `Mapped` keeps them.
_of_others: dict[int, tuple[weakref.ref[torch.Tensor], Handle]] = {}


def handle_of(tensor: torch.Tensor) -> Handle:
    """Export the GPU memory that a tensor lies in. For memory of another process this is its owner's handle."""
    storage = tensor.untyped_storage()
    memory, handle = _of_others.get(storage.data_ptr(), (None, None))
    if memory is not None and handle is not None and memory() is not None:  # else the address is this process's again
        return handle
    _, exported, allocation, offset, counter, counter_offset, event, needed = storage._share_cuda_()
    return Handle(storage.nbytes(), exported, allocation, offset, counter, counter_offset, event, needed)


@dataclass
class Mapped:
    """The device memories of a peer that this process has mapped, by handle."""

    memories: dict[tuple[bytes, int], torch.Tensor] = field(default_factory=dict)

    def open(self, handle: Handle) -> torch.Tensor:
        """Map the peer's memory, as bytes to copy from."""
        key = (handle.memory, handle.offset)
        if key not in self.memories:
            here = torch.cuda.current_device()  # the mapping is this device's, wherever the memory lies
            storage = torch.UntypedStorage._new_shared_cuda(
                here,
                handle.memory,
                handle.allocation_bytes,
                handle.offset,
                handle.counter,
                handle.counter_offset,
                handle.event,
                handle.event_needed,
            )
            self.memories[key] = torch.empty(0, dtype=torch.uint8, device=f"cuda:{here}").set_(storage)[: handle.size]
            _of_others[storage.data_ptr()] = (weakref.ref(self.memories[key]), handle)
        return self.memories[key]
