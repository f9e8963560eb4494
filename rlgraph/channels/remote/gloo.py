"""Send columns in host memory by gloo: the stand-in for NCCL on machines without a GPU."""

from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo, Work

from rlgraph.channels.remote.transfer import Finish


class Gloo:
    """A process group of two, separate from the default group. `timeout_s` bounds each transfer."""

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._peer = 1 - rank
        self._group = ProcessGroupGloo(store, rank, 2, self._timeout)

    def memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, memory: torch.Tensor) -> Finish:
        return self._finish(self._group.send([memory], self._peer, 0))  # type: ignore[attr-defined]  # missing in torch's stubs

    def receive(self, memory: torch.Tensor) -> Finish:
        return self._finish(self._group.recv([memory], self._peer, 0))  # type: ignore[attr-defined]

    def check(self) -> None:
        """Do nothing: gloo raises its failures by itself."""

    def abort(self) -> None:
        """Close the connections as soon as no transfer holds them."""
        del self._group

    def _finish(self, work: Work) -> Finish:
        timeout = self._timeout

        def finish() -> None:
            work.wait(timeout)

        return finish
