"""Placement: how many devices each pool gets, and which processes run on them."""

import heapq
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import networkx as nx

from rlgraph.errors import PlanError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Model, Node
from rlgraph.graph.rules import EXACT_DTYPES, exact_models
from rlgraph.graph.traits import ModelTraits
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.plan import PlannedWorker

Counts = Mapping[str, int]  # devices of each pool, by name
Homes = Mapping[str, Sequence[PlannedWorker]]  # the workers of each node, by its name


@dataclass(frozen=True)
class _Request:
    name: str
    share: float
    group: int


@dataclass(frozen=True)
class Divisions:
    """The ways to divide the cluster among the pools: one if every share is given, else one for each choice of devices for the pools whose
    share is open, in whole groups. Iterating yields the devices of each pool."""

    fixed: Counts
    open: tuple[tuple[str, int], ...]  # pools that the compiler may size, and the devices of a group of each
    given: tuple[_Request, ...]
    total: int  # for open and given pools

    @property
    def free(self) -> tuple[tuple[str, int], ...]:
        """The pools whose devices are chosen. If no share is given, the last open pool gets the rest."""
        return self.open if self.given else self.open[:-1]

    @property
    def room(self) -> int:
        """The most devices that the open pools can have together."""
        return self.total - sum(request.group for request in self.given)

    def counts(self, chosen: Sequence[int]) -> Counts:
        """Return the devices of each pool for these counts of the free pools."""
        found = dict(zip((name for name, _ in self.free), chosen, strict=True))
        left = self.total - sum(chosen)
        for name, group in self.open[len(self.free) :]:
            found[name] = left // group * group
        return {**self.fixed, **found, **_largest_remainder(list(self.given), left)}

    def __iter__(self) -> Iterator[Counts]:
        return (self.counts(chosen) for chosen in self._choices([group for _, group in self.open], self.room))

    def __len__(self) -> int:
        """Count the divisions without making them."""
        if not self.free:
            return 1
        ways = {self.room: 1}  # by what is left
        rest = sum(group for _, group in self.open)
        *others, (_, last) = self.free
        for _, group in others:
            rest -= group
            found: dict[int, int] = {}
            for left, count in ways.items():
                for taken in range(group, left - rest + 1, group):
                    found[left - taken] = found.get(left - taken, 0) + count
            ways = found
        return sum(count * ((left - rest + last) // last) for left, count in ways.items())

    def _choices(self, groups: list[int], room: int) -> Iterator[tuple[int, ...]]:
        if len(groups) == len(self.open) - len(self.free):
            yield ()
            return
        for count in range(groups[0], room - sum(groups[1:]) + 1, groups[0]):
            for others in self._choices(groups[1:], room - count):
                yield (count, *others)


def splits(graph: Graph, cluster: Cluster) -> Divisions:
    """Find the ways to divide the cluster among the pools. Raises PlanError if the pools need more than the cluster has."""
    shared = [p for p in graph.pools if p.cpus is None and p.gpus is None]
    fixed = {p.name: p.cpus or p.gpus or 0 for p in graph.pools if p not in shared}
    if cluster.gpus == 0 and any(p.gpus is not None for p in graph.pools):
        name = next(p.name for p in graph.pools if p.gpus is not None)
        raise PlanError(f"pool '{name}' asks for GPUs, but the cluster has none; give it a share, or compile for a cluster with GPUs")
    exact = sum(p.gpus or 0 for p in graph.pools)
    total = (cluster.gpus or cluster.cpus) - exact
    _check_host_pools(graph, cluster)
    groups = {
        p.name: lcm(*(m.group * m.traits.worker_multiple for m in graph.models if m.pool is p)) if cluster.gpus else 1 for p in shared
    }
    least = sum(groups.values())
    if exact > cluster.gpus or (cluster.gpus and total < least):
        raise PlanError(
            f"graph '{graph.name}' needs at least {exact + least} GPUs for its pools {[p.name for p in graph.pools if p.cpus is None]}, "
            f"but the cluster has {cluster.gpus}; use a larger cluster, fewer GPUs for a pool, or one pool for several models"
        )
    total = max(total, least)  # cores, unlike GPUs, can be shared by the operating system
    given = tuple(_Request(p.name, p.share, groups[p.name]) for p in shared if p.share is not None)
    return Divisions(fixed, tuple((p.name, groups[p.name]) for p in shared if p.share is None), given, total)


def _check_host_pools(graph: Graph, cluster: Cluster) -> None:
    for pool in graph.pools:
        if pool.cpus is not None and pool.cpus > cluster.cpus:
            raise PlanError(f"pool '{pool.name}' asks for {pool.cpus} cores, but the cluster has {cluster.cpus}; ask for fewer")


def divide_devices(shares: Mapping[str, float], groups: Mapping[str, int], total: int) -> dict[str, int]:
    """Divide `total` devices by share, in whole groups."""
    return _largest_remainder([_Request(name, share, groups[name]) for name, share in shares.items()], total)


def _largest_remainder(requests: list[_Request], total: int) -> dict[str, int]:
    """Divide `total` devices by share, in whole groups, at least one group each; the rest goes to the largest remainders."""
    if not requests:
        return {}
    scale = total / sum(r.share for r in requests)
    quota = {r.name: r.share * scale for r in requests}
    counts = {r.name: max(int(quota[r.name]) // r.group, 1) * r.group for r in requests}
    while sum(counts.values()) > total:
        over = [r for r in requests if counts[r.name] > r.group]
        most = max(over, key=lambda r: counts[r.name] - quota[r.name])
        counts[most.name] -= most.group
    while fitting := [r for r in requests if sum(counts.values()) + r.group <= total]:
        short = max(fitting, key=lambda r: quota[r.name] - counts[r.name])
        counts[short.name] += short.group
    return counts


def host_count(counts: Mapping[str, int], cluster: Cluster) -> int:
    """Count the hosts of the GPU pools: pools that fit on one host together share it, else each pool has its own hosts."""
    per_host = [min(n, cluster.gpus_per_node) for n in counts.values()]
    hosts = [-(-n // cluster.gpus_per_node) for n in counts.values()]
    return max(hosts, default=1) if sum(per_host) <= cluster.gpus_per_node else sum(hosts)


def devices(graph: Graph, cluster: Cluster, counts: Counts) -> dict[str, tuple[int, ...]]:
    """Assign GPU numbers to the pools in order of first use; pools on the host get none."""
    dealt, free = {}, 0
    for pool in graph.pools:
        count = counts[pool.name] if cluster.gpus and pool.cpus is None else 0
        dealt[pool.name] = tuple(range(free, free + count))
        free += count
    return dealt


def place_workers(graph: Graph, cluster: Cluster, counts: Counts, order: Mapping[str, int]) -> tuple[PlannedWorker, ...]:
    """Place the processes: one for each (model, rank), and one for each host node that can run by itself.

    `order` is each node's place in the schedule, by which a worker fires its nodes.
    """
    gpus = devices(graph, cluster, counts)
    cores = _first_cores(graph, cluster, counts)
    found: list[PlannedWorker] = []
    exact = exact_models(graph)
    for name, model in model_names(graph).items():
        names = tuple(sorted((n.name for n in graph.nodes if n.model is model), key=order.__getitem__))
        found += _ranks(model, name, names, gpus[model.pool.name], counts[model.pool.name], cluster, cores[model.pool.name])
        if model in exact:
            _check_exact(name, model, found[-1])
    for chain in _host_chains(graph):
        names = tuple(sorted((n.name for n in chain), key=order.__getitem__))
        found.append(PlannedWorker(chain[0].name, None, None, 0, 1, (), 1, names))
    first = {w.name: min(order[n] for n in w.nodes) for w in found}
    return tuple(sorted(found, key=lambda w: (first[w.name], w.rank)))


def _check_exact(name: str, model: Model, worker: PlannedWorker) -> None:
    dtype = str(model.traits.dtype)
    place = EXACT_DTYPES[dtype]
    if place == "cores" and (worker.gpus or worker.threads > 1):
        on = "a GPU" if worker.gpus else f"{worker.threads} cores"
        raise PlanError(
            f"{name} would run on {on}, and exact=True with dtype='{dtype}' is proven on one core each: give its pool as many cores as it "
            f"has processes, rg.Pool('{model.pool.name}', cpus=1)"
        )
    if place == "GPUs" and not worker.gpus:
        raise PlanError(f"{name} would run on cores, and exact=True with dtype='{dtype}' is proven on GPUs; write dtype='float32'")


def _first_cores(graph: Graph, cluster: Cluster, counts: Counts) -> dict[str, int]:
    """Find the first core of each pool, with the pools side by side; pools on GPUs use none."""
    first, free = {}, 0
    for pool in graph.pools:
        first[pool.name] = free
        free += 0 if cluster.gpus and pool.cpus is None else counts[pool.name]
    return first


def _ranks(
    model: Model, name: str, nodes: tuple[str, ...], gpus: tuple[int, ...], count: int, cluster: Cluster, core: int
) -> list[PlannedWorker]:
    groups = _groups(model, count, on_gpus=bool(gpus))
    if gpus and groups * model.group > len(gpus):
        raise PlanError(
            f"{name} asks for {groups} ranks of {model.group} GPU(s), but pool '{model.pool.name}' has {len(gpus)}; ask for fewer ranks"
        )
    _check_sharing(model, name, len(gpus), groups)
    share = len(gpus) // groups
    world = groups * model.engines if gpus else groups
    threads = 1 if gpus else max(count // world, 1)

    def host(rank: int) -> int:
        own = gpus[rank // model.engines * share : (rank // model.engines + 1) * share]
        hosts = {cluster.host_of_gpu(gpu) for gpu in own} or {cluster.host_of_core(core + rank * threads)}
        if len(hosts) > 1:
            raise PlanError(
                f"{name}[{rank}] gets GPUs {list(own)}, on hosts {sorted(hosts)} of {cluster.gpus_per_node} GPUs each; "
                f"one worker runs on one host: choose shares, or a group of {model.group}, that divide the hosts evenly"
            )
        return hosts.pop()

    _check_one_host(model, name, [host(rank) for rank in range(world)])
    return [
        PlannedWorker(
            f"{name}[{rank}]" if world > 1 else name,
            model.pool.name,
            name,
            rank,
            world,
            gpus[rank // model.engines * share : (rank // model.engines + 1) * share],
            threads,
            nodes,
            host(rank),
        )
        for rank in range(world)
    ]


def _groups(model: Model, count: int, *, on_gpus: bool) -> int:
    """Count the groups of devices on which a model has its workers."""
    together = model.traits.worker_multiple
    return model.ranks or (count // (model.group * together) if on_gpus else 1) * together


def _check_sharing(model: Model, name: str, gpus: int, groups: int) -> None:
    """Raise PlanError for a pool whose size is not a multiple of the workers per pass, or per set of experts."""
    together = model.traits.worker_multiple
    if together > 1 and gpus and model.ranks is None and (not groups or gpus % (model.group * together)):
        what = "computes each pass" if together == model.traits.ranks_per_pass else "has its passes and experts"
        raise PlanError(
            f"{name} {what} on {together} GPUs ({split_text(model.traits)}), but pool '{model.pool.name}' has {gpus}; give it a "
            "multiple of "
            f"{together}"
        )


def _check_one_host(model: Model, name: str, hosts: Sequence[int]) -> None:
    """Raise PlanError for workers on several hosts that exchange tokens in every layer; stages of a pipeline may span several hosts."""
    sharing = model.traits.tensor_parallel * model.traits.context_parallel
    for first in range(0, len(hosts), sharing):
        if len(set(hosts[first : first + sharing])) > 1:
            raise PlanError(
                f"{name}[{first}] to {name}[{first + sharing - 1}] compute each pass together ({split_text(model.traits)}), but are "
                f"on hosts {sorted(set(hosts[first : first + sharing]))}; choose shares, or a smaller group, that divide the hosts evenly"
            )


def split_text(traits: ModelTraits, ranks: int = 0, ring: int = 1) -> str:
    """Describe how the ranks of a model share its work, e.g. "tp 2 × dp 2"; empty if each has separate passes and all experts.

    `ring` of the ranks that share a row pass keys and values round.

    >>> split_text(ModelTraits(tensor_parallel=2), 4), split_text(ModelTraits(expert_parallel=2), 4)
    ('tp 2 × dp 2', 'dp 4 (ep 2)')
    >>> split_text(ModelTraits(context_parallel=4), 4, ring=2)
    'cp 4 (ring 2) × dp 1'
    """
    if traits.worker_multiple == 1:
        return ""
    shared = [("tp", traits.tensor_parallel), ("cp", traits.context_parallel), ("pp", traits.pipeline_parallel)]
    parts = [*shared, ("dp", ranks // traits.ranks_per_pass)]
    rings = {"cp": f" (ring {ring})"} if ring > 1 else {}
    found = " × ".join(f"{what} {size}{rings.get(what, '')}" for what, size in parts if size > 1 or (what == "dp" and size))
    return f"{found} (ep {traits.expert_parallel})".strip() if traits.expert_parallel > 1 else found


def ranks_of(model: Model, count: int, cluster: Cluster) -> int:
    """Count the workers of a model in a pool of `count` devices."""
    on_gpus = bool(cluster.gpus) and model.pool.cpus is None and count > 0
    return _groups(model, count, on_gpus=on_gpus) * (model.engines if on_gpus else 1)


def _host_chains(graph: Graph) -> list[list[Node]]:
    """Group host nodes: a node joins its producer's process if all its other inputs come before that producer."""
    chains: list[list[Node]] = []
    for node in (n for n in graph.nodes if n.model is None):
        sources = set(graph.forward.predecessors(node))
        for chain in chains:
            last = chain[-1]
            if last in sources and sources - {last} <= nx.ancestors(graph.forward, last):
                chain.append(node)
                break
        else:
            chains.append([node])
    return chains


def model_names(graph: Graph) -> dict[str, Model]:
    """Name the models of a graph as plans and costs do: by their roles, numbered if several have the same role."""
    found: dict[str, Model] = {}
    for model in graph.models:
        found[_unique(model.role, found)] = model
    return found


def _unique(name: str, taken: Container[str]) -> str:
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name}{number}", number + 1
    return unique


def first_workers(workers: Sequence[PlannedWorker]) -> dict[str, str]:
    """Name the first worker of each node; nodes that run in the same processes have the same one."""
    return {node: home[0].name for node, home in homes_of(workers).items()}


def homes_of(workers: Sequence[PlannedWorker]) -> Homes:
    """List the workers of each node."""
    found: dict[str, list[PlannedWorker]] = {}
    for worker in workers:
        for node in worker.nodes:
            found.setdefault(node, []).append(worker)
    return found


# Find the best ways to divide many devices among pools without trying every one.
#
# A step is no longer if each of its nodes has more devices. So the period with the most devices that each pool has in a box of divisions
# bounds the period of every division in the box. Boxes are halved best first, and divisions are found in the order of their periods (branch
# and bound; Land and Doig, 1960). If more devices cost more time, a division may be found too late.

FEW = 128  # divisions that are tried one by one


@dataclass(frozen=True)
class Division:
    """One way to divide the devices, and its period."""

    counts: Counts
    period_s: float


@dataclass(frozen=True)
class _Box:
    """For each free pool the fewest and the most groups of devices."""

    least: tuple[int, ...]
    most: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(most - least for least, most in zip(self.least, self.most, strict=True))

    def halves(self) -> "tuple[_Box, _Box]":
        """Cut the box in two along its longest side."""
        axis = max(range(len(self.least)), key=lambda i: self.most[i] - self.least[i])
        middle = (self.least[axis] + self.most[axis]) // 2
        return (
            _Box(self.least, (*self.most[:axis], middle, *self.most[axis + 1 :])),
            _Box((*self.least[:axis], middle + 1, *self.least[axis + 1 :]), self.most),
        )


def best_first(divisions: Divisions, period: Callable[[Counts], float]) -> Iterator[Division]:
    """Yield divisions by their period, the shortest first; divisions of infinite period are left out."""
    groups = [group for _, group in divisions.free]
    whole = _Box((1,) * len(groups), tuple(divisions.room // group for group in groups))
    tickets, bounds = itertools.count(), dict[tuple[int, ...], float]()

    def entry(box: _Box) -> Iterator[tuple[float, int, int, _Box]]:
        most = _most_in_box(divisions, groups, box)
        if most is not None:
            key = tuple(most.values())
            if key not in bounds:
                bounds[key] = period(most)
            if bounds[key] < float("inf"):
                yield bounds[key], box.size, next(tickets), box

    heap = list(entry(whole))
    while heap:
        bound, size, _, box = heapq.heappop(heap)
        if not size:
            yield Division(divisions.counts([n * group for n, group in zip(box.least, groups, strict=True)]), bound)
            continue
        for half in box.halves():
            for item in entry(half):
                heapq.heappush(heap, item)


def _most_in_box(divisions: Divisions, groups: Sequence[int], box: _Box) -> Counts | None:
    """Find the most devices that each pool has in a box; None for a box without a division."""
    fewest = [n * group for n, group in zip(box.least, groups, strict=True)]
    rest = sum(group for _, group in divisions.open[len(groups) :])
    spare = divisions.room - rest - sum(fewest)
    if spare < 0:
        return None
    found = dict(divisions.counts(fewest))
    for (name, group), least, most in zip(divisions.free, fewest, box.most, strict=True):
        found[name] = min(most * group, least + spare // group * group)
    return found
