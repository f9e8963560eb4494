"""Carries columns on GPUs between hosts by NCCL, straight from the writer's staging buffer into the reader's.

NCCL's own functions are called, those of the library that torch has loaded. A `ProcessGroupNCCL` would watch its transfers by a
thread that ends the process when a peer dies, and the variable that forbids it holds for the trainer's groups as well.
"""

import ctypes
import functools
from collections.abc import Callable

import torch

from rlgraph.channels.remote.transfer import Finish, Meeting

UINT8, SUCCESS, IN_PROGRESS = 1, 0, 7  # ncclDataType_t, ncclResult_t
FIRST = 64  # bytes of the transfer that connects the two ends


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Nccl:
    """A communicator of two. Its transfers run on a stream of their own."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        self._library = _library()
        self._peer, self._device, self._stream = 1 - rank, device, torch.cuda.Stream(device)
        self._communicator = ctypes.c_void_p()
        identity = _UniqueId()
        if rank == 0:
            self._must(self._library.ncclGetUniqueId(ctypes.byref(identity)))
            meeting.set("identity", bytes(identity))
        told = meeting.get("identity")
        if len(told) != ctypes.sizeof(_UniqueId):
            raise RuntimeError(f"NCCL: the writer told an identity of {len(told)} bytes, where one has {ctypes.sizeof(_UniqueId)}")
        with torch.cuda.device(device):
            joined = self._library.ncclCommInitRank(ctypes.byref(self._communicator), 2, _UniqueId.from_buffer_copy(told), rank)
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
            event = torch.cuda.Event(blocking=True)  # who waits sleeps
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
        raise RuntimeError("NCCL's library 'libnccl.so.2' is not there; install a torch for CUDA, which brings it") from error
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
