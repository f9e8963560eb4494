"""Carries columns in host memory by gloo: the twin of NCCL for machines without a GPU."""

from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo, Work

from rlgraph.channels.remote.transfer import Finish, Meeting


class Gloo:
    """A group of two, apart from the default group. `timeout_s` bounds each transfer."""

    def __init__(self, meeting: Meeting, rank: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._peer = 1 - rank
        self._group = ProcessGroupGloo(meeting, rank, 2, self._timeout)

    def memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, memory: torch.Tensor) -> Finish:
        return self._finish(self._group.send([memory], self._peer, 0))  # type: ignore[attr-defined]  # missing in torch's stubs

    def receive(self, memory: torch.Tensor) -> Finish:
        return self._finish(self._group.recv([memory], self._peer, 0))  # type: ignore[attr-defined]

    def check(self) -> None:
        """Gloo tells of its failures by itself."""

    def abort(self) -> None:
        """Close the connections, once no transfer holds them."""
        del self._group

    def _finish(self, work: Work) -> Finish:
        timeout = self._timeout

        def finish() -> None:
            work.wait(timeout)

        return finish
