"""Say which host was lost, or between which hosts the network is cut, from what the driver sees and what workers report."""

from collections import Counter
from collections.abc import Collection, Sequence

from rlgraph.errors import ChannelBroken, WorkerDied
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.hosts import Hosts
from rlgraph.runtime.messages import Failure


def host_lost(plan: Plan, hosts: Hosts, lost: Collection[int], why: str = "") -> WorkerDied:
    """Make the error for hosts that answer nothing; `why` is what ended on the way, if anything did."""
    names = " and ".join(hosts.name(host) for host in sorted(lost))
    workers = [worker for host in sorted(lost) for worker in hosts.on(host)]
    told = f"{names} {'was' if len(lost) == 1 else 'were'} lost, with worker{'s' * (len(workers) > 1)} {_listed(workers)}"
    silent_s = max(hosts.silent_s(host) for host in lost)
    asked = f"no answer for {silent_s:.1f} s" if silent_s else "connections to it ended without a word"
    advice = "it is down, frozen, or cut off from the network; start it again, with Ray on it"
    if len(hosts.addresses) - 1 == len(lost) > 1:
        advice = f"no other host answers, so look first at the network of the driver's own, {hosts.name(hosts.driver)}"
    nodes = [f"'{node}'" for worker in plan.workers if worker.name in workers for node in worker.nodes]
    return WorkerDied(f"{told}: {asked}; {advice}\n  nodes there: {', '.join(nodes)}{why}")


def link_lost(hosts: Hosts, failures: Sequence[Failure]) -> ChannelBroken | None:
    """Make the error for a connection between two hosts that ended though both answer; None if no worker reports one."""
    cuts: Counter[tuple[int, int]] = Counter()
    channels: dict[tuple[int, int], list[str]] = {}
    for failure in failures:
        if hosts.addresses.count(failure.host) == 1:  # else several hosts of a test have one address
            here, there = hosts.of[failure.worker], hosts.addresses.index(failure.host)
            ends = min(here, there), max(here, there)
            cuts[ends] += 1
            channels.setdefault(ends, []).append(failure.channel)
    if not cuts:
        return None
    (one, other), _ = cuts.most_common(1)[0]
    own = [list(hosts.on(host)) for host in (one, other)]
    names = sorted(set(channels[one, other]))
    return ChannelBroken(
        f"the network between {hosts.name(one)}, with {_listed(own[0])}, and {hosts.name(other)}, with {_listed(own[1])}, is cut: "
        f"the connection of channel{'s' * (len(names) > 1)} {_listed(names)} ended, and both hosts answer the driver\n"
        f"  worker '{failures[0].worker}': {failures[0].message}"
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names) or "none"
