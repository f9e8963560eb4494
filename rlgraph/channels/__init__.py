"""Bounded channels between the workers of a plan: one writer, its readers, a fixed number of slots, deadlines."""

from rlgraph.channels.base import Reader, Statistics, Writer
from rlgraph.channels.local import local_channel
from rlgraph.channels.shm import ShmReader, ShmWriter

__all__ = ["Reader", "ShmReader", "ShmWriter", "Statistics", "Writer", "local_channel"]
