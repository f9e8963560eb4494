"""Advice from a finished run: the tuning guide of one-step-off training, applied to where its time went and to its metrics."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rlgraph.analysis import words
from rlgraph.analysis.run import Run
from rlgraph.plan.advice import UNUSED
from rlgraph.plan.plan import PlannedLoop, PlannedPool
from rlgraph.plan.schedule import MOVING

NOTICED = 0.10  # share of a pool's time: a longer wait is worth a change
SMALL = 0.02  # share of a pool's time: a higher cost should be hidden
TAIL = 3.0  # longest over mean response: above it, the longest one sets the time of a batch (uniform lengths have 2)
DISAGREE = {"rollout_corr/k3_kl": 0.01, "actor/ppo_kl_abs": 0.1}  # engine against trainer, per token: a difference of about 0.1 in log-prob
CLIPPED = 0.3  # share of tokens that the loss clips: above it, most of a step's gradient is thrown away
NOTHING_LEARNT = 0.9  # share of responses without an advantage: above it, a step teaches almost nothing
HELD_UP = 0.05  # share of a pool's time: waits for rewards, the driver or copies, which should be near 0


@dataclass(frozen=True)
class LoopBalance:
    """The generator and the trainer of a feedback edge: how long each works, and how long it waits for the other."""

    loop: PlannedLoop
    generate_s: float  # per step, the generator's own work
    train_s: float  # per step, all work of the trainer's pool
    trainer_waits: float  # share of its time that the trainer's pool waits for the generator
    generator_waits: float  # share of its time that the generator's pool waits for the trainer


def findings(run: Run) -> tuple[str, ...]:
    """List what to change, most important first. A well-balanced run gets a line that reports it; a run without steady steps gets none."""
    if not run.steady or not run.spans:
        return ()
    found = [*_flat(run), *(line for side in _loop_balances(run) for line in _balance(run, side))]
    rules: Sequence[Callable[[Run], Iterator[str]]] = (
        _idle_pools,
        _slow_publishes,
        _slow_wakes,
        _hosts,
        _driver,
        _own_work,
        _disagreement,
        _heavy_clipping,
    )
    found += [line for rule in rules for line in rule(run)]
    return (*run.notices, *(found or _balanced_edges(run)))


def _loop_balances(run: Run) -> Iterator[LoopBalance]:
    """Yield the balance of each feedback edge whose two ends have separate pools."""
    for loop in run.plan.loops:
        reader, writer = run.plan.node(loop.readers[0]), run.plan.node(loop.writer)
        if reader.pool is None or writer.pool is None or reader.pool == writer.pool:
            continue
        trained = {node.name for node in run.plan.nodes if node.pool == writer.pool}
        train_s = sum(median(run.durations(name) or [0.0]) for name in trained)
        yield LoopBalance(
            loop,
            sum(median(run.durations(name) or [0.0]) for name in loop.readers),
            train_s,
            _waits(run, writer.pool, set(loop.readers)),
            _waits(run, reader.pool, trained),
        )


def _waits(run: Run, pool: str, causes: set[str]) -> float:
    """Compute the share of a pool's time in which it waited for one of the nodes."""
    rows = run.steady_bubbles.of_pool(pool)
    return run.steady_bubbles.share((row for row in rows if row.use in ("data", "weights", "room", "order") and row.cause in causes), rows)


def _balance(run: Run, side: LoopBalance) -> Iterator[str]:
    """Yield the advice for one feedback edge: overlap, more devices for one side, or shorter responses."""
    loop, name = side.loop, ", ".join(side.loop.readers)
    pools = {pool.name: pool for pool in run.plan.pools}
    generator = pools[run.plan.node(loop.readers[0]).pool or ""]
    trainer = pools[run.plan.node(loop.writer).pool or ""]
    if loop.depth == 0:
        if side.trainer_waits > NOTICED:
            best = max(side.generate_s, side.train_s)
            yield (
                f"depth=0 makes '{generator.name}' and '{trainer.name}' alternate: '{trainer.name}' waits {side.trainer_waits:.0%} of its "
                f"time; with depth=1 they overlap, at one version of staleness, and a step can come near {words.seconds(best)} "
                f"(now {words.seconds(run.step_s)})"
            )
    elif side.trainer_waits > NOTICED:
        wait = median(run.values("timing_s/wait_prev_gen") or [0.0])
        head = (
            f"wait_prev_gen is high: {words.seconds(wait)} per step of {words.seconds(run.step_s)}; '{trainer.name}' waits "
            f"{side.trainer_waits:.0%} of its time for '{name}'"
        )
        tail = _tail(run)
        if tail is not None and tail > TAIL:
            yield (
                f"{head}, and response lengths have a long tail (the longest is {tail:.1f} times the mean): more "
                f"devices will not help; cap max_tokens, set continuous=True, or raise depth above {loop.depth}"
            )
        else:
            even = "" if tail is None else f", and response lengths are even (the longest is {tail:.1f} times the mean)"
            yield f"{head}{even}: {_split_advice(generator, trainer, side)}"
    elif side.generator_waits > NOTICED:
        yield (
            f"'{name}' waits {side.generator_waits:.0%} of its time for a new version from '{loop.writer}': training limits the step; "
            f"{_split_advice(generator, trainer, side)}"
        )


def _split_advice(generator: PlannedPool, trainer: PlannedPool, side: LoopBalance) -> str:
    """Name the split of the devices at which both sides last equally long, assuming that a side speeds up in proportion to its devices."""
    counts = [generator.count, trainer.count]
    total = sum(counts)
    loads = [side.generate_s * counts[0], side.train_s * counts[1]]
    best = min(max(round(total * loads[0] / sum(loads)), 1), total - 1) if total > 1 and sum(loads) > 0 else counts[0]
    if best == counts[0]:
        more, less = (generator, trainer) if side.generate_s > side.train_s else (trainer, generator)
        return f"no split of {total} devices is more balanced; give '{more.name}' more devices or less work ('{less.name}' often waits)"
    return (
        f"share {best}:{total - best} for '{generator.name}':'{trainer.name}' instead of {counts[0]}:{counts[1]} would "
        "balance both sides, if their time scales with devices"
    )


def _tail(run: Run) -> float | None:
    """Compute how many times as long as the mean response the longest of a batch is, on average."""
    longest, mean = run.values("response_length/max"), run.values("response_length/mean")
    ratios = [most / average for most, average in zip(longest, mean, strict=False) if average > 0]
    return fmean(ratios) if ratios else None


def _idle_pools(run: Run) -> Iterator[str]:
    """Yield each pool that works so little that its nodes could share another pool."""
    working = [pool for pool in run.plan.pools if run.steady_bubbles.of_pool(pool.name)]
    for pool in working if len(working) > 2 else ():
        busy = run.steady_bubbles.busy(pool.name)
        if busy < UNUSED:
            yield f"pool '{pool.name}' is busy {busy:.0%} of its time: its nodes could share the devices of another pool"


def _slow_publishes(run: Run) -> Iterator[str]:
    """Yield each feedback edge whose transfers use a visible share of the reader's time."""
    for loop in run.plan.loops:
        reader = run.plan.node(loop.readers[0])
        rows = run.steady_bubbles.of_pool(reader.pool)
        moving = {event.name for event in run.plan.schedule.events if event.kind in MOVING}
        mine = [row for row in rows if (row.use == "moving" and row.name in moving) or (row.use == "weights" and row.cause in moving)]
        share = run.steady_bubbles.share(mine, rows)
        if share > SMALL:
            way = "buffers=2 receives it while the generator decodes" if loop.buffers == 1 and loop.depth else "it is not hidden"
            yield f"moving '{loop.name}' takes {share:.0%} of the time of '{reader.pool}': {way}"


def _slow_wakes(run: Run) -> Iterator[str]:
    """Yield each pool whose engines spend too much time waking and sleeping."""
    for pool in run.plan.pools:
        rows = run.steady_bubbles.of_pool(pool.name)
        share = run.steady_bubbles.share((row for row in rows if row.use == "sleep"), rows)
        if share > NOTICED:
            yield (
                f"engines that time-share '{pool.name}' wake and sleep for {share:.0%} of its time: use larger batches, or give each "
                "engine its own pool, with depth=1"
            )


def _hosts(run: Run) -> Iterator[str]:
    """Yield each host node, such as a reward, that keeps a pool waiting."""
    hosts = [node.name for node in run.plan.nodes if node.pool is None]
    for pool in run.plan.pools:
        for node in hosts:
            share = _waits(run, pool.name, {node})
            if share > HELD_UP:
                took = words.seconds(median(run.durations(node) or [0.0]))
                yield (
                    f"'{pool.name}' waits {share:.0%} of its time for '{node}' ({took} per step): make it faster or concurrent, let it "
                    "process parts of a batch (chunks), or raise depth so that it overlaps"
                )


def _driver(run: Run) -> Iterator[str]:
    """Yield each pool that has no step to work on because the driver is late."""
    for pool in run.plan.pools:
        rows = run.steady_bubbles.of_pool(pool.name)
        share = run.steady_bubbles.share((row for row in rows if row.use == "idle" and row.name == "between steps"), rows)
        if share > HELD_UP:
            yield (
                f"'{pool.name}' is idle between steps for {share:.0%} of its time: the code in your loop over job.steps() delays the "
                "next step, or steps are shorter than their dispatch"
            )


def _own_work(run: Run) -> Iterator[str]:
    """Yield each pool with too long copies and checks."""
    for pool in run.plan.pools:
        rows = run.steady_bubbles.of_pool(pool.name)
        share = run.steady_bubbles.share((row for row in rows if row.use == "carry"), rows)
        if share > HELD_UP:
            yield f"copies and checks around the nodes of '{pool.name}' take {share:.0%} of its time: send fewer or smaller columns"


def _disagreement(run: Run) -> Iterator[str]:
    """Yield a line if engine and trainer disagree about the log-probs of the same tokens.

    `ppo_kl_abs` also differs if the policy has changed since, so a stale run ignores it.
    """
    stale = any(loop.depth for loop in run.plan.loops)
    for metric, most in DISAGREE.items():
        values = [abs(value) for value in run.values(metric)]
        if values and median(values) > most and not (stale and metric.startswith("actor/")):
            yield (
                f"engine and trainer give the same tokens different log-probs ({metric} {median(values):.2g}, above {most:g}): compare "
                "their dtypes and sampling settings, and correct the rest with rollout_correction(...)"
            )
            return


def _flat(run: Run) -> Iterator[str]:
    """Yield a line if most responses have an advantage of 0: a faster step would not help."""
    values = run.values("critic/advantages/zero")
    if values and median(values) > NOTHING_LEARNT:
        yield (
            f"{median(values):.0%} of the responses have an advantage of 0, since all responses to the same prompt have equal rewards: "
            "choose easier or harder prompts, check the reward on some samples, raise group_size, or drop such groups with refill"
        )


def _heavy_clipping(run: Run) -> Iterator[str]:
    """Yield a line if the loss clips too many tokens."""
    values = run.values("actor/pg_clipfrac")
    if values and median(values) > CLIPPED:
        depth = max((loop.depth for loop in run.plan.loops), default=0)
        reason = f"batches {depth} versions old are far from the policy" if depth else "the step is too large"
        yield f"the loss clips {median(values):.0%} of the tokens: {reason}; lower the learning rate{' or the depth' if depth else ''}"


def _balanced_edges(run: Run) -> Iterator[str]:
    """Yield a line for each feedback edge: there is nothing to gain."""
    for side in _loop_balances(run):
        yield (
            f"generation ({words.seconds(side.generate_s)}) and training ({words.seconds(side.train_s)}) overlap well: a step takes "
            f"{words.seconds(run.step_s)}, and no wait is above {NOTICED:.0%}; a faster step needs faster nodes"
        )
