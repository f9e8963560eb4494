"""GPUs of a Ray that others use too: reserved by a placement group, so that two jobs, or a job and other work on Ray, never share one."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlgraph.errors import PlanError
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.bounded import RAY_S
from rlgraph.runtime.driver.ray_cluster import gpus_wanted

RESERVE_S = 30.0  # in which what another job frees is free
SLIVER = 0.001  # of the resource by which Ray knows a host: it ties a bundle to that host


class Reservation:
    """The GPUs of a plan's hosts, all or none. `gpus` are their numbers on each host, by its id.

    Raises PlanError if others hold them for longer than `patience_s`, and `RESERVE_S` at least.
    """

    def __init__(self, plan: Plan, hosts: Sequence[tuple[str, str]], patience_s: float = 0.0) -> None:
        self.gpus: Mapping[str, Sequence[str]] = {}
        self._group: Any = None
        self._holders: list[Any] = []
        wanted = [(host, address, count) for (host, address), count in zip(hosts, gpus_wanted(plan), strict=True) if count]
        if not wanted:
            return
        self._group = placement_group([{"GPU": count, f"node:{address}": SLIVER} for _, address, count in wanted], strategy="SPREAD")
        patience_s = max(patience_s, RESERVE_S)
        with self._freed_on_error():
            if not self._group.wait(patience_s):
                asked = ", ".join(f"{count} of {address}" for _, address, count in wanted)
                free = ray.available_resources().get("GPU", 0)
                raise PlanError(
                    f"the plan takes GPUs that others hold: {asked}; {free:g} are free in all of Ray after {patience_s:g} s. Wait until "
                    "the other job ends, or compile for fewer GPUs"
                )
            for index, (_, _, count) in enumerate(wanted):
                within = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
                self._holders.append(ray.remote(_Holder).options(num_cpus=0, num_gpus=count, scheduling_strategy=within).remote())
            numbers = ray.get([holder.numbers.remote() for holder in self._holders], timeout=RAY_S)
            self.gpus = {host: found for (host, _, _), found in zip(wanted, numbers, strict=True)}

    def free(self) -> None:
        """Give the GPUs back. It is done also where Ray no longer answers: Ray itself frees what an ended driver held."""
        with contextlib.suppress(ray.exceptions.RayError):
            for holder in self._holders:
                ray.kill(holder)
            if self._group is not None:
                remove_placement_group(self._group)
        self._holders, self._group = [], None

    @contextlib.contextmanager
    def _freed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.free()
            raise


class _Holder:
    """An actor that holds GPUs, and knows which."""

    def numbers(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]
