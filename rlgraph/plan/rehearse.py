"""Simulate a whole run: its schedule, played step after step with drawn lengths, links, stragglers, checkpoints, failures and restarts."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Annotated

import numpy as np

from rlgraph import settings
from rlgraph.channels.api import transport_of
from rlgraph.errors import PlanError
from rlgraph.graph.graph import Graph
from rlgraph.plan import forecast
from rlgraph.plan.channels import crossing_s, ends_on_hosts, least_part, message_bytes, shape_of
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import best_plan, settings_on
from rlgraph.plan.costs import Costs
from rlgraph.plan.forecast import bursts, drawn_times
from rlgraph.plan.lengths import Array
from rlgraph.plan.model_shapes import Shapes
from rlgraph.plan.placement import homes_of
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedEnd, PlannedWorker
from rlgraph.plan.play import Engines, Played, play
from rlgraph.plan.roofline import priced_for
from rlgraph.plan.schedule import MOVING, Dependency, Event, Schedule
from rlgraph.settings import AtLeastZero, Fraction, Positive, Range, Seconds

# The site of a cluster: the speed of its hosts' links, the rate of failures, the time of a restart and of a checkpoint, and slow hosts.

Factor = Annotated[float, Range(least=1)]


@settings.refuse_unknown
@dataclass(frozen=True)
class ClusterSite:
    """Describe a cluster for a simulated run, besides its counts. By default nothing fails, no host is slow, and costs set transfer times.

    * `bandwidth`: bytes per second of a host's link, each way. Transfers between hosts then depend on their bytes, instead of the
      `receive_s` of the costs.
    * `latency_s`: seconds before the first byte arrives.
    * `gpu_mtbf_s`: the mean seconds between two failures of one GPU.
    * `host_mtbf_s`: the mean seconds between two failures of one host.
    * `restart_s`: seconds from a failure to the first step; the run then resumes from its last checkpoint.
    * `checkpoint_s`: seconds for which a checkpoint stops the trainer.
    * `stragglers`: the share of hosts that are slow in a step.
    * `slow_down`: the factor by which a slow host is slower.

    Raises PlanError for an impossible number, and for a number that has no effect without another.

    >>> ClusterSite(gpu_mtbf_s=3e8, host_mtbf_s=5e7, restart_s=300).mtbf_s(gpus=1024, hosts=128)
    167410.7142857143
    >>> ClusterSite(restart_s=300)
    Traceback (most recent call last):
    rlgraph.errors.PlanError: ClusterSite(restart_s=300): nothing fails and restarts; pass gpu_mtbf_s or host_mtbf_s, or leave it out
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
                raise PlanError(f"ClusterSite({given}): {why}; pass {missing}, or leave it out")

    @property
    def fails(self) -> bool:
        """Whether anything ever fails."""
        return self.gpu_mtbf_s is not None or self.host_mtbf_s is not None

    def mtbf_s(self, gpus: int, hosts: int) -> float:
        """Compute the mean seconds between two failures of a run on `gpus` GPUs and `hosts` hosts; infinity if nothing fails."""
        rate = (gpus / self.gpu_mtbf_s if self.gpu_mtbf_s else 0.0) + (hosts / self.host_mtbf_s if self.host_mtbf_s else 0.0)
        return 1 / rate if rate else float("inf")


# The cost of the hosts' links: the seconds in which a version, or a batch, crosses them, and a schedule with those seconds.


def with_links(plan: Plan, graph: Graph, costs: Costs, site: ClusterSite) -> tuple[Schedule, tuple[str, ...]]:
    """Add an event for each batch and each version that crosses a link, in the shape that the plan chose: it leaves as soon as it exists,
    and readers wait for it.

    Also names the channels of unknown size, which are left out. Raises PlanError for costs without the bytes of a version that crosses.
    """
    if site.bandwidth is None:
        return plan.schedule, ()
    found = _with_versions(plan, graph, costs, site)
    seconds, unknown = {}, []
    for channel in plan.channels:
        if channel.kind == "batch" and transport_of(channel.transport).reach == "hosts":
            size = channel.bytes if channel.bytes is not None else batch_bytes(graph, channel, costs)
            if size is None:
                unknown.append(channel.name)
            else:
                seconds[channel] = _crossing_s(size, plan, channel, site)

    def cross_link(d: Dependency) -> tuple[str, float] | None:
        reading = next(
            (c for c in seconds if d.reason == "data" and c.writer == d.via and d.after in _firings(plan.schedule, c.readers)), None
        )
        return None if reading is None else (reading.name, seconds[reading])

    return _add_transfers(found, cross_link), tuple(unknown)


def _crossing_s(size: float, plan: Plan, end: PlannedEnd, site: ClusterSite) -> float:
    writers, readers = ends_on_hosts(plan, end)
    return crossing_s(size, site, writers, readers, shape=shape_of(plan, end), least=least_part(end), slots=end.slots)


def _with_versions(plan: Plan, graph: Graph, costs: Costs, site: ClusterSite) -> Schedule:
    """Let the versions that leave a host cross its link, in place of the receive seconds of the costs."""
    own, homes = {event.name: event for event in plan.schedule.events}, homes_of(plan.workers)
    crossing: dict[Dependency, float] = {}
    for d in plan.schedule.dependencies:
        if d.reason != "loop" or own[d.before].kind != "publish" or d.via not in {feedback.name for feedback in graph.feedbacks}:
            continue
        writer, reader = own[d.before].node, own[d.after].node
        if len({worker.host for node in (writer, reader) for worker in homes[node]}) > 1:
            if costs.publish_bytes is None:
                raise PlanError(
                    f"rehearse(site=ClusterSite(bandwidth={site.bandwidth:g})): the weights of '{writer}' go to another host, "
                    "and the costs do not say how large a version is; pass rg.planning.Costs(…, publish_bytes=…)"
                )
            loop = next(loop for loop in plan.loops if loop.writer == writer and reader in loop.readers)
            crossing[d] = _crossing_s(costs.publish_bytes, plan, loop, site)
    arrive = {d.after for d in crossing if own[d.after].kind != "wake"}  # a generator wakes for a version, and then loads it
    received = tuple(
        replace(event, seconds=max(event.seconds - costs.receive_s, 0.0)) if event.name in arrive else event
        for event in plan.schedule.events
    )
    return _add_transfers(replace(plan.schedule, events=received), lambda d: (d.after, crossing[d]) if d in crossing else None)


def _add_transfers(schedule: Schedule, carried: Callable[[Dependency], tuple[str, float] | None]) -> Schedule:
    """Insert an event between the two ends of each dependency that is `carried`: by what, and for how many seconds."""
    own = {event.name: event for event in schedule.events}
    carries: dict[str, Event] = {}
    dependencies: list[Dependency] = []
    for d in schedule.dependencies:
        by = carried(d)
        if by is None:
            dependencies.append(d)
            continue
        before, name = own[d.before], f"carry {d.before} by {by[0]}"
        if name not in carries:
            carries[name] = Event(name, "receive", before.node, name, None, by[1], edge=before.edge, lag=before.lag)
            dependencies += [replace(d, after=name, credits=0), Dependency(name, name, 1, "self")]
        dependencies.append(replace(d, before=name, put=0))
    return Schedule((*schedule.events, *carries.values()), tuple(dependencies))


def _firings(schedule: Schedule, nodes: Sequence[str]) -> Iterator[str]:
    return (event.name for event in schedule.events if event.kind == "fire" and event.node in nodes)


def batch_bytes(graph: Graph, channel: PlannedChannel, costs: Costs) -> int | None:
    """Estimate the bytes of a batch by the costs' lengths, padded to the longest response; None if a size is unknown."""
    if costs.lengths is None:
        return None
    sizes = {"T": costs.lengths.longest, "P": costs.lengths.prompt_tokens}
    size = message_bytes(channel.columns, graph.node(channel.writer).rows / channel.chunks, sizes)
    return None if size is None else int(size)


ALIKE = 256  # the most engines of a node that are played; each then stands for several
HEADWAY = 200  # failures in a row without a new checkpoint, after which the run is given up
WARM_UP = 8  # this fraction of the steps fills the pipeline, and does not count for the step time


@dataclass(frozen=True)
class Rehearsal:
    """A run that was played: its wall time, its steps, and what each cause costs. It prints.

    A share is a part of `wall_s`. For failures it is the time that they add. For other causes it is the time that a run without failures
    would save if the cause cost nothing, so overlapping causes do not add up. `idle` is the share of the time without failures in which the
    devices do nothing.
    """

    plan: Plan = field(repr=False)
    site: ClusterSite
    steps: int
    every: int | None
    wall_s: float
    calm_s: float  # without failures
    step_s: float  # the median, without failures
    p95_s: float
    failures: int
    redone: int  # steps that were done again
    lost_to: Mapping[str, float]  # shares of wall_s, by "failures", "checkpoints", "weights", "batches", "stragglers"
    idle: float
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        cluster = self.plan.cluster
        devices = f"{cluster.gpus} GPUs" if cluster.gpus else f"{cluster.cpus} cores"
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.lost_to.items())
        lines = [
            f"{self.plan.graph}: {self.steps} steps on {devices} of {cluster.hosts} host(s) ({self.plan.split_text}) "
            f"in {_long(self.wall_s)}",
            f"  a step: median {self.step_s:.4g} s, p95 {self.p95_s:.4g} s",
            f"  lost to {shares}",
            f"  {self.failures} failures, {self.redone} steps done again; devices idle {self.idle:.1%} of the time without failures",
            *(f"  not counted: {what}" for what in self.left_out),
        ]
        return "\n".join(lines)


def _long(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds < 600 else f"{seconds / 3600:.4g} h"


def rehearse_graph(
    graph: Graph, cluster: Cluster, costs: Costs | None, shapes: Shapes, site: ClusterSite, steps: int, every: int | None, seed: int
) -> Rehearsal:
    """Compile the graph, and play this many steps of its plan at the site.

    Raises PlanError for settings without effect, or a run without an end.
    """
    plan, course, unknown = prepare_course(graph, cluster, costs, shapes, site, steps, every, seed)
    return _summarize(plan, course, site, every, unknown, seed)


def prepare_course(
    graph: Graph, cluster: Cluster, costs: Costs | None, shapes: Shapes, site: ClusterSite, steps: int, every: int | None, seed: int
) -> "tuple[Plan, Course, tuple[str, ...]]":
    """Compile the graph and draw its run; also names the channels between hosts whose bytes are unknown."""
    priced = priced_for(graph, cluster, costs, shapes)
    plan = best_plan(graph, cluster, priced, shapes)
    _check(plan, graph, site, every)
    joining = [node.name for node in graph.nodes if forecast.is_played(graph, node, priced)]
    if joining:
        raise PlanError(
            f"rehearse: batches or versions join while '{joining[0]}' decodes, which a rehearsal does not simulate; leave `continuous` and "
            "`interrupt` out, or use plan.prediction.step_s"
        )
    settings = settings_on(graph, cluster, plan.counts)
    schedule, unknown = with_links(plan, graph, priced, site)
    drawn = drawn_times(schedule, graph, settings, priced, priced.choose_draws(graph.rows))
    course = Course.draw(schedule, drawn, plan.workers, _trainer_names(graph), site, steps, every, np.random.default_rng(seed))
    uneven = bursts(schedule, graph, steps + schedule.most_lag)
    seconds = {name: each * uneven[name][:, None] if name in uneven else each for name, each in course.seconds.items()}
    return plan, replace(course, seconds=seconds), unknown


def _check(plan: Plan, graph: Graph, site: ClusterSite, every: int | None) -> None:
    if every is None and site.fails:
        raise PlanError(
            "rehearse(every=None): at this site something fails, and without checkpoints a run begins again each time; pass every=10"
        )
    if every is None and site.checkpoint_s:
        raise PlanError(
            f"rehearse(every=None): ClusterSite(checkpoint_s={site.checkpoint_s:g}) has no effect without checkpoints; set every=10"
        )
    if every is not None and not site.fails and not site.checkpoint_s:
        raise PlanError(
            f"rehearse(every={every}): at this site checkpoints cost nothing and nothing fails, so it has no effect; leave it out, or "
            "pass ClusterSite(checkpoint_s=…, host_mtbf_s=…)"
        )
    if every is not None and not _trainer_names(graph):
        raise PlanError(f"rehearse(every={every}): graph '{plan.graph}' trains nothing, so there is nothing to save; leave it out")


@dataclass(frozen=True)
class Course:
    """The data for playing the run: the schedule, and the seconds of each event at each step, `[steps]`, or `[steps, engines]`.

    `slow` are the factors of stragglers on these, and `saves` the seconds that a checkpoint adds to the events that wait for it.
    """

    schedule: Schedule
    seconds: Mapping[str, Array]
    slow: Mapping[str, Array]
    saves: Mapping[str, Array]
    steps: int

    @classmethod
    def draw(
        cls,
        schedule: Schedule,
        drawn: Mapping[str, Array],
        workers: Sequence[PlannedWorker],
        trained: Collection[str],
        site: ClusterSite,
        steps: int,
        every: int | None,
        draw: np.random.Generator,
    ) -> "Course":
        """Draw a run: which of the drawn steps each step is, and which hosts are slow at it."""
        total = steps + schedule.most_lag
        count = len(next(iter(drawn.values()))) if drawn else 1
        order = np.concatenate([draw.permutation(count) for _ in range(-(-total // count))])[:total]
        hosts, homes = 1 + max(worker.host for worker in workers), homes_of(workers)
        slow = draw.random((total, hosts)) < site.stragglers
        seconds = {
            e.name: _quantile_engines(drawn[e.name])[order] if e.name in drawn else np.full((total, 1), e.seconds) for e in schedule.events
        }
        factors = {
            e.name: 1 + (site.slow_down - 1) * _slow(slow, sorted({worker.host for worker in homes[e.node]}), seconds[e.name].shape[1])
            for e in schedule.events
            if e.kind == "fire" and site.stragglers
        }
        saves = np.array([site.checkpoint_s if every and (step + 1) % every == 0 else 0.0 for step in range(total)])
        waiting = {e.name: saves for e in schedule.events if e.kind == "fire" and e.node in trained and site.checkpoint_s}
        return cls(schedule, seconds, factors, waiting if every else {}, steps)

    def without(self, moving: Collection[str]) -> "Course":
        """The run without the time of these events."""
        return replace(self, seconds={name: each * (name not in moving) for name, each in self.seconds.items()})

    def play(self, first: int = 0, steps: int | None = None) -> Played:
        """Play this many steps from step `first` on, with an empty pipeline before them; by default all to the end."""
        last = first + (self.steps - first if steps is None else steps)
        total = last + self.schedule.most_lag
        times = {name: each[first:total] for name, each in self.times.items()}
        apart = {name: Engines(list(each)) for name, each in times.items() if each.shape[1] > 1}
        alone = {name: each[:, 0].tolist() for name, each in times.items() if name not in apart}
        return play(self.schedule, last - first, lambda event, step: alone[event.name][step], apart)

    @cached_property
    def times(self) -> Mapping[str, Array]:
        """The seconds of each event with stragglers and checkpoints."""
        found = {name: each * self.slow.get(name, 1.0) for name, each in self.seconds.items()}
        return {name: each + self.saves[name][:, None] if name in self.saves else each for name, each in found.items()}

    def busy_s(self, event: Event) -> float:
        """Sum the seconds of an event over the steps, averaged over its engines, without the seconds of checkpoints."""
        return float((self.seconds[event.name] * self.slow.get(event.name, 1.0))[: self.steps].mean(axis=1).sum())


def _trainer_names(graph: Graph) -> set[str]:
    return {node.name for node in graph.nodes if node.traits.work == "train"}


def _quantile_engines(drawn: Array) -> Array:
    """Let at most `ALIKE` engines stand for all: the quantiles of each step, with the longest, in the order of the first engines."""
    engines = drawn.shape[1]
    if engines <= ALIKE:
        return drawn
    places = ((np.arange(ALIKE) + 0.5) * engines / ALIKE).astype(int)
    places[-1] = engines - 1
    ranks = drawn[:, :ALIKE].argsort(axis=1).argsort(axis=1)
    found: Array = np.take_along_axis(np.sort(drawn, axis=1)[:, places], ranks, axis=1)
    return found


def _slow(slow: Array, hosts: Sequence[int], engines: int) -> Array:
    """Find which engines are slow `[steps, engines]`: engines with a slow host. Engines that work together are one, on all hosts."""
    own, firsts = slow[:, hosts], np.arange(engines) * len(hosts) // engines
    found: Array = own[:, firsts] if engines >= len(hosts) else np.logical_or.reduceat(own, firsts, axis=1)
    return found


@dataclass(frozen=True)
class Walls:
    """The wall time of a run with failures, their number, and the repeated steps."""

    seconds: float
    failures: int
    redone: int


def with_failures(
    ends: Callable[[int, int], Sequence[float]], steps: int, step_s: float, every: int, restart_s: float, gaps: Callable[[], float]
) -> Walls:
    """Play a run through its failures: each sets it back to the last checkpoint, from which it resumes after `restart_s`.

    `ends(first, count)` plays `count` steps from step `first` on and returns when each ends. `gaps()` draws the seconds to the next
    failure. Raises PlanError if the run makes no progress.
    """
    clock, saved, failures, redone, stuck = 0.0, 0, 0, 0, 0
    left = gaps()  # until the next failure
    while True:
        done = _finished_step_ends(ends, saved, steps, step_s, left)
        if len(done) == steps - saved:
            return Walls(clock + done[-1], failures, redone)
        reached = saved + len(done)
        held = max(reached // every * every, saved)
        redone, stuck, saved = redone + reached - held, 0 if held > saved else stuck + 1, held
        clock, failures = clock + left, failures + 1
        while (left := gaps()) < restart_s:  # the restart itself fails
            clock, failures, stuck = clock + left, failures + 1, stuck + 1
            if stuck > HEADWAY:
                break
        clock, left = clock + restart_s, left - restart_s
        if stuck > HEADWAY:
            raise PlanError(
                f"rehearse(every={every}): {stuck} failures in a row came before a checkpoint, {every} steps of {step_s:.4g} s after a "
                f"restart of {restart_s:.4g} s; save more often, or pass a site that fails more rarely"
            )


def _finished_step_ends(ends: Callable[[int, int], Sequence[float]], first: int, steps: int, step_s: float, left: float) -> Sequence[float]:
    """List when the steps from `first` on end, up to `left` seconds."""
    for factor in count(1):
        wanted = min(int(factor * (left / max(step_s, 1e-12) + 4)) + 1, steps - first) if left < float("inf") else steps - first
        found = ends(first, wanted)
        if wanted == steps - first or found[-1] > left:
            return [end for end in found if end <= left]
    raise AssertionError("unreachable")


def add_failures(course: Course, calm: Sequence[float], site: ClusterSite, mtbf_s: float, every: int, seed: int) -> Walls:
    """Play a run, whose steps end at `calm` without failures, with the failures that the seed draws."""
    draw = np.random.default_rng([seed, 1])

    def ends(first: int, steps: int) -> Sequence[float]:
        return calm[:steps] if first == 0 else course.play(first, steps).step_ends()

    return with_failures(ends, course.steps, calm[-1] / course.steps, every, site.restart_s, lambda: float(draw.exponential(mtbf_s)))


def _summarize(plan: Plan, course: Course, site: ClusterSite, every: int | None, unknown: tuple[str, ...], seed: int) -> Rehearsal:
    played = course.play()
    ends = played.step_ends()
    calm_s, warm = ends[-1], course.steps // WARM_UP
    walls = Walls(calm_s, 0, 0)
    if every is not None and site.fails:
        walls = add_failures(course, ends, site, site.mtbf_s(plan.cluster.gpus, plan.cluster.hosts), every, seed)
    events = course.schedule.events
    kinds = {
        "weights": {e.name for e in events if e.kind in MOVING and e.edge},
        "batches": {e.name for e in events if e.kind == "receive" and not e.edge},
    }
    saved = {name: calm_s - course.without(moving).play().step_ends()[-1] if moving else 0.0 for name, moving in kinds.items()}
    saved["checkpoints"] = calm_s - replace(course, saves={}).play().step_ends()[-1] if course.saves else 0.0
    saved["stragglers"] = calm_s - replace(course, slow={}).play().step_ends()[-1] if course.slow else 0.0
    saved["failures"] = walls.seconds - calm_s
    lasted = np.diff(ends)[warm:] if len(ends) > warm + 1 else np.array(ends[:1])
    return Rehearsal(
        plan=plan,
        site=site,
        steps=course.steps,
        every=every,
        wall_s=walls.seconds,
        calm_s=calm_s,
        step_s=float(np.median(lasted)),
        p95_s=float(np.quantile(lasted, 0.95)),
        failures=walls.failures,
        redone=walls.redone,
        lost_to={name: saved[name] / walls.seconds for name in ("failures", "checkpoints", "weights", "batches", "stragglers")},
        idle=_idle(plan, course, calm_s),
        left_out=(*plan.prediction.left_out, *(f"the bytes of channel '{name}' between hosts, which are not known" for name in unknown)),
    )


def _idle(plan: Plan, course: Course, calm_s: float) -> float:
    devices = plan.counts
    busy = sum(course.busy_s(event) * devices[event.pool] for event in course.schedule.events if event.pool is not None)
    return 1 - busy / max(calm_s * sum(devices.values()), 1e-12)
