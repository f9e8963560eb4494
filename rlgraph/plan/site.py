"""The site of a cluster: what its hosts' links carry, how often something fails, how long a restart and a checkpoint take, who is slow."""

from dataclasses import dataclass
from typing import Annotated

from rlgraph import settings
from rlgraph.errors import PlanError
from rlgraph.settings import AtLeastZero, Fraction, Positive, Range, Seconds

Factor = Annotated[float, Range(least=1)]


@settings.refuse_unknown
@dataclass(frozen=True)
class ClusterSite:
    """Describe a cluster for a rehearsal, besides its counts. By default nothing fails, no host is slow, and costs say what moving takes.

    A host's link carries `bandwidth` bytes a second each way, after `latency_s`. Data that crosses it takes the time of its bytes,
    instead of the `receive_s` of the costs.

    A GPU fails once in `gpu_mtbf_s` seconds on average and a host once in `host_mtbf_s` (mean time between failures); the whole run
    then starts again, which takes `restart_s` from the failure to the first step, and goes on from its last checkpoint. A checkpoint
    stops the trainer for `checkpoint_s`. At each step a share `stragglers` of the hosts takes `slow_down` times as long.

    Raises PlanError for a number that cannot be, and for one that has no effect without another.

    >>> ClusterSite(gpu_mtbf_s=3e8, host_mtbf_s=5e7, restart_s=300).mtbf_s(gpus=1024, hosts=128)
    167410.7142857143
    >>> ClusterSite(restart_s=300)
    Traceback (most recent call last):
    rlgraph.errors.PlanError: ClusterSite(restart_s=300): nothing fails and restarts; give gpu_mtbf_s or host_mtbf_s, or leave it out
    """

    bandwidth: Positive | None = None
    latency_s: AtLeastZero = 0.0
    gpu_mtbf_s: Seconds | None = None
    host_mtbf_s: Seconds | None = None
    restart_s: AtLeastZero = 0.0
    checkpoint_s: AtLeastZero = 0.0
    stragglers: Fraction = 0.0
    slow_down: Factor = 1.0

    def __post_init__(self) -> None:
        settings.check(self, PlanError)
        alone = (
            (
                self.restart_s and not self.fails,
                f"restart_s={self.restart_s:g}",
                "nothing fails and restarts",
                "gpu_mtbf_s or host_mtbf_s",
            ),
            (
                self.stragglers and self.slow_down == 1,
                f"stragglers={self.stragglers:g}",
                "they take no longer than the others",
                "slow_down above 1",
            ),
            (self.slow_down > 1 and not self.stragglers, f"slow_down={self.slow_down:g}", "no host is slow", "stragglers, a share above 0"),
            (self.latency_s and self.bandwidth is None, f"latency_s={self.latency_s:g}", "links are left to the costs", "bandwidth"),
        )
        for holds, given, why, missing in alone:
            if holds:
                raise PlanError(f"ClusterSite({given}): {why}; give {missing}, or leave it out")

    @property
    def fails(self) -> bool:
        """Whether anything ever fails."""
        return self.gpu_mtbf_s is not None or self.host_mtbf_s is not None

    def mtbf_s(self, gpus: int, hosts: int) -> float:
        """The mean seconds between two failures of a run on so many GPUs and hosts; infinity if nothing fails."""
        rate = (gpus / self.gpu_mtbf_s if self.gpu_mtbf_s else 0.0) + (hosts / self.host_mtbf_s if self.host_mtbf_s else 0.0)
        return 1 / rate if rate else float("inf")
