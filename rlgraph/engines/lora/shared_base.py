"""The frozen base of models that train adapters, in memory once for all models of one process, or for all processes of a host.

Processes share an unnamed segment of memory, which the kernel frees with the last process that maps it, however that ends. The first
that loads makes it and leaves a note in the job's folder; the others open the segment by that process's handle. Weights lie at multiples
of 64 bytes, as PyTorch's own do: products with a vector have other bits at other addresses, so the files cannot be mapped as they are.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
import torch

ALIGNMENT = 64
Wanted: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by the name in the model's folder
Fill: TypeAlias = Callable[[str, torch.Tensor], None]  # copies the weight of a name into a tensor


class SharedBase(Protocol):
    """Frozen weights that several models hold together."""

    def take(self, wanted: Wanted, fill: Fill) -> dict[str, torch.Tensor]:
        """Give the weights of these names; `fill` is called for those that no other model has loaded."""


class ThreadBase:
    """The base of the models of this process: the same tensors for all."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, wanted: Wanted, fill: Fill) -> dict[str, torch.Tensor]:
        """Give the weights of these names; see `SharedBase`."""
        for name, (shape, dtype) in wanted.items():
            if name not in self._held:
                tensor = torch.empty(shape, dtype=dtype)
                fill(name, tensor)
                self._held[name] = tensor
        return {name: self._held[name] for name in wanted}


class _Segment(msgspec.Struct, frozen=True):
    """Where the segment is: handle and inode in the process that made it, and the byte at which each weight begins."""

    process: int
    handle: int
    inode: int
    size: int
    begins: dict[str, int]


class HostBase:
    """The base of the models of a host, which have a process each; they meet at `path`, in a folder that only they can enter."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._handle: int | None = None  # of a segment that this process made; open as long as it lives, for others to find

    def take(self, wanted: Wanted, fill: Fill) -> dict[str, torch.Tensor]:
        """Give the weights of these names; see `SharedBase`. Processes take turns: a later one waits until an earlier one has loaded."""
        with open(f"{self._path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with self._segment() as (handle, note):
                begins, size = dict(note.begins), note.size
                lacking = [name for name in wanted if name not in begins]
                for name in lacking:
                    begins[name] = -(-size // ALIGNMENT) * ALIGNMENT
                    size = begins[name] + _bytes(*wanted[name])
                if lacking:
                    os.ftruncate(handle, size)
                    whole = mmap.mmap(handle, size)
                    for name in lacking:
                        fill(name, _view(whole, begins[name], *wanted[name]))
                    self._tell(msgspec.structs.replace(note, size=size, begins=begins))
                # Pages of a private mapping are shared until they are written to: nobody changes the base of another.
                whole = mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE)
                return {name: _view(whole, begins[name], *wanted[name]) for name in wanted}

    @contextlib.contextmanager
    def _segment(self) -> Iterator[tuple[int, _Segment]]:
        """Open the segment that another process has made, or else make one."""
        found = self._open_segment()
        if found is not None:
            try:
                yield found
            finally:
                os.close(found[0])
            return
        self._handle = os.memfd_create("rlgraph base", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self._handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        yield self._handle, _Segment(os.getpid(), self._handle, os.fstat(self._handle).st_ino, 0, {})

    def _open_segment(self) -> tuple[int, _Segment] | None:
        try:
            note = msgspec.json.decode(self._path.read_bytes(), type=_Segment)
            handle = os.open(f"/proc/{note.process}/fd/{note.handle}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # nobody has loaded it, or who did is gone
            return None
        if os.fstat(handle).st_ino == note.inode and os.fstat(handle).st_size >= note.size:
            return handle, note
        os.close(handle)  # of another process, that has got the number of one that is gone
        return None

    def _tell(self, note: _Segment) -> None:
        beside = Path(f"{self._path}.new")
        beside.write_bytes(msgspec.json.encode(note))
        beside.rename(self._path)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _view(memory: mmap.mmap, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=begin).view(shape)
