"""Unnamed shared memory: segments behind file handles, freed with the last process that maps them."""

import fcntl
import mmap
import os

from rlgraph.channels.host.connection import ProtocolError


def new_segment(channel: str, size: int) -> tuple[int, mmap.mmap]:
    """Allocate a segment of at least `size` bytes and return its handle. Pages that are never touched take no memory."""
    capacity = max(mmap.PAGESIZE, 1 << (size - 1).bit_length())
    handle = os.memfd_create(f"rlgraph {channel}".encode()[:200].decode(errors="ignore"), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(handle, capacity)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return handle, mmap.mmap(handle, capacity)
    except BaseException:
        os.close(handle)
        raise


def segment_of(channel: str, segment: mmap.mmap | None, size: int) -> tuple[int | None, mmap.mmap]:
    """Reuse a slot's memory if it holds `size` bytes, else allocate new memory and return its handle too."""
    return (None, segment) if segment is not None and len(segment) >= size else new_segment(channel, size)


def map_segment(handle: int, size: int) -> mmap.mmap:
    """Map memory that a peer sent, and close its handle.

    Raises ProtocolError for memory that is smaller than announced or can shrink: touching it would kill this process.
    """
    try:
        if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(handle).st_size < size:
            raise ProtocolError(f"memory that does not hold the {size} bytes announced")
        return mmap.mmap(handle, size)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"memory that cannot be mapped: {error}") from error
    finally:
        os.close(handle)
