"""Memory of a GPU that another process of the same host maps: what a channel's slot is for columns on a GPU.

The reader copies straight from it over NVLink, by the copy engines: no kernel of either side waits for the other, and neither
needs the other's device to be visible. The control path is the channel's; a peer that dies leaves nothing behind.
"""

import weakref
from dataclasses import dataclass, field

import msgspec
import torch

# Memories of other processes that are mapped here, by address: CUDA lets only the owner export one.
_of_others: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


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


def handle_of(tensor: torch.Tensor) -> Handle:
    """Return the handle of the whole memory of this process that a tensor lies in."""
    storage = tensor.untyped_storage()
    _, memory, allocation, offset, counter, counter_offset, event, needed = storage._share_cuda_()
    return Handle(storage.nbytes(), memory, allocation, offset, counter, counter_offset, event, needed)


def can_export(tensor: torch.Tensor) -> bool:
    """Return whether `handle_of` can be asked for: the memory is a GPU's, and of this process."""
    return tensor.is_cuda and tensor.untyped_storage().data_ptr() not in _of_others


@dataclass
class Mapped:
    """The device memories of a peer that this process has mapped, by handle."""

    memories: dict[tuple[bytes, int], torch.Tensor] = field(default_factory=dict)

    def open(self, handle: Handle) -> torch.Tensor:
        """Return the peer's memory as bytes that can be copied from."""
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
            _of_others[storage.data_ptr()] = self.memories[key]
        return self.memories[key]
