"""Read tensors of safetensors files into memory of a host or a GPU, several pieces at once."""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from rlgraph.engines.hf_models.model_files import header_places
from rlgraph.errors import DataError
from rlgraph.plan.estimates import PIECE_BYTES

READERS = 4  # threads, which share PIECE_BYTES: one alone reads as fast as it copies from the page cache, 2 to 4 GB/s
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class FileBox:
    """Where the numbers of a box lie in a file, one after the other, and `out`, contiguous, which they are to fill in its own dtype."""

    file: Path
    begin: int
    dtype: torch.dtype
    out: torch.Tensor


class PieceReader:
    """Reads boxes of the files in pieces of `PIECE_BYTES` over all threads, each of which reads, copies and casts one at a time.

    What crosses the bus to a GPU has the dtype of the file, and lies in pinned memory. Nothing is mapped, so that pages which were read
    don't count as memory of the process.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._places = {name: (file, place) for file in files for name, place in header_places(file).items()}
        self._own = threading.local()  # of a thread: its piece of memory, and its stream
        self._pool: ThreadPoolExecutor | None = None  # its threads end with it

    def box(self, source: str, offsets: tuple[int, ...], out: torch.Tensor) -> FileBox | None:
        """Find the box of a tensor that begins at `offsets` and is as large as `out`; None where it does not lie in one run of the file."""
        file, (kind, shape, begin) = self._places[source]
        same = tuple(out.shape[1:]) == shape[1:] and out.is_contiguous()
        if kind not in DTYPES or not shape or not same:
            return None
        dtype, row = DTYPES[kind], torch.Size(shape[1:]).numel()
        return FileBox(file, begin + offsets[0] * row * dtype.itemsize, dtype, out)

    def read(self, boxes: Iterable[FileBox]) -> None:
        """Fill the boxes. Raises DataError for a file that ends early."""
        pieces = [piece for box in boxes for piece in _pieces(box)]
        if not pieces:
            return
        device = pieces[0].out.device
        begun = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None  # earlier work may use this memory
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READERS, "reader")
        with ExitStack() as stack:
            opened = {file: stack.enter_context(file.open("rb", buffering=0)).fileno() for file in {piece.file for piece in pieces}}
            for _ in self._pool.map(lambda piece: self._read(opened[piece.file], piece, begun), pieces):
                pass

    def _read(self, opened: int, piece: FileBox, begun: torch.cuda.Event | None) -> None:
        size, on_gpu = piece.out.numel() * piece.dtype.itemsize, begun is not None
        if not hasattr(self._own, "memory"):
            self._own.memory = torch.empty(PIECE_BYTES // READERS, dtype=torch.uint8, pin_memory=on_gpu)
            self._own.stream = torch.cuda.Stream(piece.out.device) if on_gpu else None
        held = self._own.memory[:size]
        into = memoryview(held.numpy())
        done = 0
        while done < size:
            count = os.preadv(opened, [into[done:]], piece.begin + done)
            if not count:
                raise DataError(f"'{piece.file}' ends at byte {piece.begin + done}, within a tensor: it was cut off while it was read")
            done += count
        numbers = held.view(piece.dtype).view(piece.out.shape)
        if begun is None:
            piece.out.copy_(numbers)
            return
        with torch.cuda.stream(self._own.stream):
            begun.wait(self._own.stream)
            piece.out.copy_(numbers.to(piece.out.device, non_blocking=True))
            self._own.stream.synchronize()  # then this memory is free for the next piece


def _pieces(box: FileBox) -> Iterator[FileBox]:
    flat = box.out.view(-1)
    numbers = PIECE_BYTES // READERS // box.dtype.itemsize
    for start in range(0, flat.numel(), numbers):
        yield FileBox(box.file, box.begin + start * box.dtype.itemsize, box.dtype, flat[start : start + numbers])
