"""Send columns on GPUs between hosts by NCCL, straight from the writer's staging buffer into the reader's.

This calls the functions of the NCCL library that torch has loaded. A `ProcessGroupNCCL` would watch its transfers with a thread that
ends the process when a peer dies, and the variable that turns this off also applies to the trainer's groups.
"""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import Store

from rlgraph.channels.remote.transfer import Finish

UINT8, SUCCESS, IN_PROGRESS = 1, 0, 7  # ncclDataType_t, ncclResult_t
FIRST = 64  # bytes of the transfer that connects the two ends


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Nccl:
    """A communicator of two processes. Its transfers run on their own stream."""

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self._library = _library()
        self._peer, self._device, self._stream = 1 - rank, device, torch.cuda.Stream(device)
        self._communicator = ctypes.c_void_p()
        identity = _UniqueId()
        if rank == 0:
            self._must(self._library.ncclGetUniqueId(ctypes.byref(identity)))
            store.set("identity", bytes(identity))  # type: ignore[arg-type]  # stores take bytes too
        agreed = store.get("identity")
        if len(agreed) != ctypes.sizeof(_UniqueId):
            raise RuntimeError(f"NCCL: the writer sent an id of {len(agreed)} bytes; a ncclUniqueId has {ctypes.sizeof(_UniqueId)}")
        with torch.cuda.device(device):
            joined = self._library.ncclCommInitRank(ctypes.byref(self._communicator), 2, _UniqueId.from_buffer_copy(agreed), rank)
            self._must(joined)
        first = self.memory(FIRST)  # connects both ends, so that a later receive is posted without its sender
        (self.send(first) if rank == 0 else self.receive(first))()

    def memory(self, size: int) -> torch.Tensor:
        with torch.cuda.stream(self._stream):  # no earlier use of the memory on another stream can still be going on
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, memory: torch.Tensor) -> Finish:
        return self._begin(self._library.ncclSend, memory)

    def receive(self, memory: torch.Tensor) -> Finish:
        return self._begin(self._library.ncclRecv, memory)

    def check(self) -> None:
        state = ctypes.c_int()
        self._must(self._library.ncclCommGetAsyncError(self._communicator, ctypes.byref(state)))
        self._must(state.value)

    def abort(self) -> None:
        with torch.cuda.device(self._device):
            self._library.ncclCommAbort(self._communicator)

    def _begin(self, transfer: Callable[..., int], memory: torch.Tensor) -> Finish:
        with torch.cuda.stream(self._stream):
            self._must(transfer(memory.data_ptr(), memory.numel(), UINT8, self._peer, self._communicator, self._stream.cuda_stream))
            event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps
            event.record(self._stream)
        return event.synchronize

    def _must(self, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            raise RuntimeError(f"NCCL: {self._library.ncclGetErrorString(result).decode()}")


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError("the library 'libnccl.so.2' is not installed; install a torch for CUDA, which includes it") from error
    handle, number = ctypes.c_void_p, ctypes.c_int
    transfer = [handle, ctypes.c_size_t, number, number, handle, handle]
    for name, arguments in {
        "ncclGetUniqueId": [handle],
        "ncclCommInitRank": [handle, number, _UniqueId, number],
        "ncclSend": transfer,
        "ncclRecv": transfer,
        "ncclCommGetAsyncError": [handle, handle],
        "ncclCommAbort": [handle],
        "ncclGetErrorString": [number],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
