"""Cost functions of a node: how its seconds follow from its devices, engines, rows and the lengths of the responses."""

import heapq
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlgraph import settings
from rlgraph.batching.cutting import best, cut_batches
from rlgraph.conversions import Wrong, to_float
from rlgraph.errors import PlanError, show_value
from rlgraph.graph.traits import ModelTraits
from rlgraph.plan.lengths import Array, Lengths
from rlgraph.settings import AtLeastZero, Count, Natural, Plain, PositiveFraction, Range, Recompute

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Node

# The micro-batches of bounded tokens in which a GPU computes a batch; each costs the host time to launch.

ALIKE = 64  # the most ranks that get sequences; more ranks, with as many sequences each, have passes of the same lengths


@dataclass(frozen=True)
class Passes:
    """A batch is cut into `mini_batches` of equal rows. Each is cut as the trainer does: distributed to the ranks, in micro-batches
    (passes) of at most `tokens` tokens, packed one behind the other. The rows are in groups of `group` with one prompt, which a pass holds
    once. `tensor` × `context` × `pipeline` ranks compute a pass together: it is cut between them. A pipeline waits for one more pass per
    stage behind the first. `expert` ranks share experts, and cut no pass. `recompute` is what its layers compute again, and
    `compiled` whether they are (None: unknown, in costs that an earlier version wrote); these do not change the passes."""

    tokens: int
    mini_batches: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    group: int = 1
    recompute: Recompute | None = field(default=None, compare=False)
    compiled: bool | None = field(default=None, compare=False)

    @property
    def ranks_per_pass(self) -> int:
        """The ranks that compute one pass together."""
        return self.tensor * self.context * self.pipeline

    def of_a_rank(self, lengths: Array, prompt_tokens: float, ranks: int) -> Array:
        """Count the tokens `[steps, passes]` of each pass, 0 if a step has fewer passes, for responses `[steps, rows]`.

        Ranks wait for each other in every pass, so a pass counts the tokens of the rank that has the most. Ranks that share a pass count
        their share each. `ALIKE` ranks, with their share of the rows, stand for any larger number.
        """
        ranks_of_data = max(ranks // self.ranks_per_pass, 1)
        if ranks_of_data > ALIKE:
            rows = max(round(lengths.shape[1] * ALIKE / ranks_of_data), ALIKE, self.mini_batches)
            lengths, ranks_of_data = lengths[:, :rows], ALIKE
        groups = np.arange(lengths.shape[1]) // self.group
        mini_batches = zip(*(np.array_split(each, self.mini_batches, axis=-1) for each in (lengths, groups)), strict=True)
        by_mini_batch = [self._pass_tokens(batch, of_rows, max(prompt_tokens, 1.0), ranks_of_data) for batch, of_rows in mini_batches]
        filling = [batch.max(axis=1, keepdims=True).repeat(self.pipeline - 1, axis=1) for batch in by_mini_batch]
        found: Array = np.concatenate([*by_mini_batch, *filling], axis=1)
        return found if self.ranks_per_pass == 1 else found / self.ranks_per_pass

    def _pass_tokens(self, lengths: Array, groups: Array, prompt_tokens: float, ranks: int) -> Array:
        """Count the tokens `[steps, passes]` of the passes of a mini-batch `[steps, rows]`, each step cut in the best way."""
        cuts = cut_batches(np.full_like(lengths, prompt_tokens, dtype=float), lengths, groups, ranks, self.tokens, shared=self.group > 1)
        of_cuts = [each.of_passes(ranks) for each in cuts]
        width = max(passes.shape[1] for passes in of_cuts)
        padded = np.stack([np.pad(passes, ((0, 0), (0, width - passes.shape[1]))) for passes in of_cuts])
        found: Array = padded[best(cuts, ranks), np.arange(len(lengths))]
        return found


def passes_of(node: "Node", gpus: int) -> Passes | None:
    """Describe the passes in which a node computes its batch; None if it pads them, e.g. on a CPU."""
    model = node.model.traits if node.model is not None else ModelTraits()
    on_gpus = gpus > 0 and node.pool is not None and node.pool.cpus is None
    if model.micro_batch_tokens is None or not (on_gpus or model.recompute or model.ranks_per_pass > 1):
        return None
    tensor, context = model.tensor_parallel, model.context_parallel
    group = group_of(node) if model.shared_prompts else 1
    return Passes(
        model.micro_batch_tokens * context,
        max(node.traits.mini_batches, node.chunks),
        tensor,
        context,
        model.pipeline_parallel,
        model.expert_parallel,
        group,
        model.recompute,
        model.compiled,
    )


def group_of(node: "Node") -> int:
    """Find how many adjacent rows of a node have one prompt, from the node that its responses come from; 1 if unknown.

    An update on several batches counts each response with its own prompt.
    """
    source = node.source_of("responses") if "responses" in node.reads else node
    if source.rows != node.rows:
        return 1
    return source.traits.group_size or (2 if source.traits.preferences == "pairs" else 1)


# The share of the ideal speed-up that an engine keeps each time its devices double, if it was not measured: a decode
# step of tensor-parallel ranks adds two all-reduces per layer (Shoeybi et al., 2019, section 3).
DOUBLING = 0.85
SECONDS = Plain("a finite number", to_float, Range(least=0))


@dataclass(frozen=True)
class Setting:
    """Where a node runs, and on what: devices of its pool, engines (ranks of its model) on them, rows of a batch, and passes, if known."""

    devices: Count = 1
    engines: Count = 1
    rows: Natural = 1
    passes: Passes | None = None

    def __post_init__(self) -> None:
        settings.check(self, PlanError)

    @property
    def width(self) -> float:
        """The number of devices of one engine."""
        return self.devices / self.engines

    def sharing_shards(self, apart: int = 1) -> int:
        """The number of ranks that each hold a shard of the same parameters, if `apart` ranks hold other parameters."""
        return max(self.engines // apart, 1)

    @property
    def is_unsharded(self) -> bool:
        """Whether no rank gathers shards of others: a single rank, or ranks that share the matrices of one model."""
        return self.engines == (1 if self.passes is None else self.passes.tensor)


@dataclass(frozen=True)
class Shards:
    """Seconds of a pass in which ranks gather parameters from their shards and reduce gradients to them.

    A rank copies all parameters (`whole_s`) and its own shard of them (a part of `own_s`), and the others' shards pass its link (a part of
    `sent_s`). `apart` ranks hold other parameters, and share none of these shards.

    >>> Shards(whole_s=0.03, own_s=0.04, sent_s=0.06).seconds(Setting(2, 2))
    0.08
    """

    whole_s: AtLeastZero
    own_s: AtLeastZero
    sent_s: AtLeastZero
    apart: Count = 1

    def __post_init__(self) -> None:
        settings.check(self, PlanError)

    def seconds(self, setting: Setting) -> float:
        """The seconds of a pass; 0 if a rank shares no shards."""
        ranks = setting.sharing_shards(self.apart)
        return 0.0 if ranks == 1 else self.whole_s + (self.own_s + self.sent_s * (ranks - 1)) / ranks


@dataclass(frozen=True)
class Decode:
    """The time of one generating engine: `prefill_s` for each prompt token, then decode steps of `step_s + sequence_s · active`.

    Decoding is bound by memory traffic: reading the weights costs every step `step_s`, and each active sequence adds `sequence_s`. So the
    longest response sets the tail. `slots` is how many sequences an engine decodes at once. `doubling` is the share of the ideal speed-up
    that an engine keeps each time its devices double (None: not measured, 0.85 is assumed).

    `host_step_s` and `host_sequence_s` are the host's share of a step: more devices do not shorten it, and each doubling of the
    engines that share a device lengthens it by `host_sharing`.

    `divided` is True if one measured number was divided into these by the roofline of the device.
    """

    step_s: AtLeastZero = 0.0
    sequence_s: AtLeastZero = 0.0
    prefill_s: AtLeastZero = 0.0
    start_s: AtLeastZero = 0.0  # per firing, whatever its rows
    slots: Count | None = None
    doubling: PositiveFraction | None = None
    host_step_s: AtLeastZero = 0.0
    host_sequence_s: AtLeastZero = 0.0
    host_sharing: AtLeastZero = 1.0
    divided: bool = False

    def __post_init__(self) -> None:
        settings.check(self, PlanError)

    def at_width(self, wider: float, width: float) -> "Decode":
        """Scale the times, the host's share included, to an engine `wider` times as wide, which has `width` devices.

        Engines that share a device take turns on it: half a device needs twice as long, and no exchange of ranks is saved.
        """
        kept = DOUBLING if self.doubling is None else self.doubling
        faster = wider * kept ** np.log2(max(width, 1.0) / max(width / wider, 1.0))
        held_up = self.host_sharing ** max(np.log2(1 / max(width, 1e-9)), 0.0)
        return replace(
            self,
            step_s=self.step_s / faster + self.host_step_s * held_up,
            sequence_s=self.sequence_s / faster + self.host_sequence_s * held_up,
            prefill_s=self.prefill_s / faster,
            start_s=self.start_s / faster,
            host_step_s=0.0,
            host_sequence_s=0.0,
        )

    def seconds(self, lengths: Array, prompt_tokens: float, engines: int) -> Array:
        """Predict the seconds `[steps, engines]` of batches `[steps, rows]`; an engine without a row needs 0."""
        rows = lengths.shape[1]
        engines = min(engines, rows)
        firsts = [rows * rank // engines for rank in range(engines)]
        counts = np.diff([*firsts, rows])
        active = np.add.reduceat(lengths, firsts, axis=1)
        steps = np.maximum.reduceat(lengths, firsts, axis=1)
        if self.slots is not None and max(counts) > self.slots:
            steps = _steps_in_slots(lengths, tuple(firsts), self.slots)
        each: Array = self.start_s + self.prefill_s * prompt_tokens * counts + self.step_s * steps + self.sequence_s * active
        return each

    def chunk_shares(self, lengths: Array, prompt_tokens: float, chunks: int) -> Array:
        """Compute the share `[steps, chunks]` of a firing for each chunk of its batch `[steps, rows]`.

        A chunk leaves with the longest response of it and of earlier chunks. A response of L tokens ends after L
        decode steps, and each sequence has taken part in the steps that it needed.
        """
        longest = np.stack([chunk.max(axis=1) for chunk in np.array_split(lengths, chunks, axis=1)], axis=1)
        until = np.maximum.accumulate(longest, axis=1)
        active = np.minimum(lengths[:, None, :], until[:, :, None]).sum(axis=2)
        at = self.start_s + self.prefill_s * prompt_tokens * lengths.shape[1] + self.step_s * until + self.sequence_s * active
        shares: Array = np.diff(at, axis=1, prepend=0.0) / np.maximum(at[:, -1:], 1e-12)
        return shares


def _steps_in_slots(lengths: Array, firsts: Sequence[int], slots: int) -> Array:
    """Count the decode steps of each engine if a waiting sequence takes the slot of the first one that ends."""
    ends = [*firsts[1:], lengths.shape[1]]
    return np.array([[_makespan(batch[a:b], slots) for a, b in zip(firsts, ends, strict=True)] for batch in lengths])


def _makespan(lengths: Array, slots: int) -> float:
    free = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + float(length))
    return max(free)


@settings.refuse_unknown
@dataclass(frozen=True)
class NodeCost:
    """Seconds of one firing: `serial_s` on any number of devices, plus device-seconds that the devices share.

    * `serial_s`: seconds per firing that do not depend on the devices.
    * `parallel_s`: device-seconds per firing (of `measured.rows` rows, if known).
    * `token_s`: device-seconds per token of the batch, prompts included.
    * `pass_s`: the minimum seconds per micro-batch: the host's work to launch it.
    * `sharded_pass_s`: the same if ranks gather shards of the model.
    * `shards`: the GPU's seconds per micro-batch to gather shards; `token_s` already includes them for the `measured` ranks.
    * `decode`: the function of a generator, of response lengths.
    * `spread`: the measured seconds of single firings, divided by the function's, so its mean is about 1.
    * `measured`: the setting that the numbers come from; for any other setting they are scaled.
    * `by_devices`: measured seconds per firing by device count, instead of a function: `((1, 38.2), (2, 19.0))`, as
      `NodeCost.on({1: 38.2, 2: 19.0})` builds it. Other counts follow `a + b / devices` through the nearest two.

    Raises PlanError for a negative number or a value that is not a number.

    >>> NodeCost.on({1: 40.0, 2: 24.0}).on_devices(4)
    16.0
    """

    serial_s: AtLeastZero = 0.0
    parallel_s: AtLeastZero = 0.0
    token_s: AtLeastZero = 0.0
    pass_s: AtLeastZero = 0.0
    sharded_pass_s: AtLeastZero = 0.0
    shards: tuple[Shards, ...] = ()
    decode: Decode | None = None
    spread: tuple[AtLeastZero, ...] = ()
    measured: Setting | None = None
    by_devices: tuple[tuple[Count, AtLeastZero], ...] = ()

    def __post_init__(self) -> None:
        settings.check(self, PlanError)

    @classmethod
    def on(cls, seconds: Mapping[int, float]) -> "NodeCost":
        """Make the cost of a node from seconds by device count."""
        return cls(by_devices=tuple(sorted(seconds.items())))

    def on_devices(self, devices: int) -> float:
        """Predict the seconds on a device count: the given seconds, else `a + b / devices` with non-negative a and b."""
        given = sorted(self.by_devices)
        if not given or devices in dict(given):
            return dict(given).get(devices, 0.0)
        place = bisect(given, (devices, 0.0))
        first = max(min(place - 1, len(given) - 2), 0)
        (n, at_n), (m, at_m) = given[first], given[min(first + 1, len(given) - 1)]
        shared = at_n * n if n == m else (at_n - at_m) / (1 / n - 1 / m)
        nearest, seconds = (n, at_n) if devices < n else (m, at_m)
        if not n < devices < m:
            shared = min(max(shared, 0.0), seconds * nearest)
        return seconds + shared * (1 / devices - 1 / nearest)

    @property
    def by_length(self) -> bool:
        """Whether the seconds depend on the tokens of a batch."""
        return bool(self.decode or self.token_s or self.pass_s or self.sharded_pass_s)

    def seconds(self, setting: Setting, lengths: Lengths | None, steps: int, rows_drawn: int) -> Array:
        """Predict the seconds `[steps]` of firings, each until its last engine is done."""
        last: Array = self.each(setting, lengths, steps, rows_drawn).max(axis=1)
        return last

    def each(self, setting: Setting, lengths: Lengths | None, steps: int, rows_drawn: int) -> Array:
        """Predict the seconds `[steps, engines]` of firings, `[steps, 1]` if engines work together.

        Lengths are the same for every node of a step; the spread is the same for every engine. The array is read-only.
        """
        return _each(self, setting, lengths, steps, rows_drawn)

    def of(self, setting: Setting, batch: Array | None, prompt_tokens: float, steps: int) -> Array:
        """Predict the seconds `[steps, engines]` for response lengths `[steps, rows]`; without lengths, the part that needs none."""
        together = np.full(steps, self.serial_s + self.parallel_s * self._rows_scale(setting) / max(setting.devices, 1))
        together += self.on_devices(max(setting.devices, 1))
        decoding = np.zeros((steps, 1))
        if batch is not None:
            together = together + self._training(batch, prompt_tokens, setting)
            if self.decode is not None:
                decoding = self._decode(self.decode, batch, prompt_tokens, setting)
        each: Array = together[:, None] + decoding
        return each * _spread(self.spread, steps)[:, None] if self.spread else each

    def chunk_shares(self, setting: Setting, lengths: Lengths | None, steps: int, rows_drawn: int, node: "Node") -> Array:
        """Compute the share `[steps, chunks]` of each chunk in the seconds of its firing: for a generator by decode steps, otherwise equal,
        or by tokens if its groups come in the order in which they finish."""
        chunks, rollout = node.chunks, node.stream
        reorders = rollout is not None and rollout.traits.reorders
        if lengths is None or chunks == 1 or not (reorders or self.decode is not None):
            return np.full((steps, chunks), 1 / chunks)
        batch = lengths.batches(steps, rows_drawn)[:, : setting.rows]
        if rollout is not None and reorders:
            groups = batch.reshape(steps, -1, rollout.traits.group_size or 1)
            order = groups.max(axis=2).argsort(axis=1, kind="stable")
            batch = np.take_along_axis(groups, order[:, :, None], axis=1).reshape(batch.shape)
        if self.decode is not None:
            return self.decode_at(self.decode, setting).chunk_shares(batch, lengths.prompt_tokens, chunks)
        tokens = np.stack([chunk.sum(axis=1) for chunk in np.array_split(batch + lengths.prompt_tokens, chunks, axis=1)], axis=1)
        shares: Array = tokens / tokens.sum(axis=1, keepdims=True)
        return shares

    def paces(self, steps: int) -> Sequence[float]:
        """Draw the ratio of single firings' seconds to the function's."""
        return _spread(self.spread, steps).tolist() if self.spread else [1.0] * steps

    def _training(self, batch: Array, prompt_tokens: float, setting: Setting) -> Array:
        floor = self.pass_s if setting.is_unsharded else self.sharded_pass_s or self.pass_s
        gathering = self.gathering_s(setting)
        if setting.passes is not None and (floor or gathering or setting.passes.group > 1):
            passes = setting.passes.of_a_rank(batch, prompt_tokens, setting.engines) / setting.width
            found: Array = np.where(passes > 0, np.maximum(self.token_s * passes + gathering, floor), 0.0).sum(axis=1)
        else:
            found = self.token_s * (batch.sum(axis=1) + prompt_tokens * setting.rows) / max(setting.devices, 1)
        return found

    def gathering_s(self, setting: Setting) -> float:
        """Predict how many seconds longer than measured a micro-batch lasts, because ranks gather shards and reduce gradients."""
        measured = 0.0 if self.measured is None else sum(each.seconds(self.measured) for each in self.shards)
        return sum(each.seconds(setting) for each in self.shards) - measured

    def computes_otherwise(self, setting: Setting) -> bool:
        """Whether layers recompute more or less in a setting than in the measured one, or are compiled in only one of the two."""
        if self.measured is None or self.measured.passes is None or setting.passes is None:
            return False
        then, now = self.measured.passes, setting.passes
        return then.recompute not in (None, now.recompute) or then.compiled not in (None, now.compiled)

    def _rows_scale(self, setting: Setting) -> float:
        return setting.rows / self.measured.rows if self.measured else 1.0

    def _decode(self, decode: Decode, batch: Array, prompt_tokens: float, setting: Setting) -> Array:
        return self.decode_at(decode, setting).seconds(batch, prompt_tokens, setting.engines)

    def decode_at(self, decode: Decode, setting: Setting) -> Decode:
        """Scale decoding to the engines of another setting."""
        return decode.at_width(setting.width / (self.measured.width if self.measured else 1.0), setting.width)


@lru_cache(maxsize=32)  # a choice among splits asks for the same firings several times, and cutting their batches takes long
def _each(cost: NodeCost, setting: Setting, lengths: Lengths | None, steps: int, rows_drawn: int) -> Array:
    batch = lengths.batches(steps, rows_drawn)[:, : setting.rows] if lengths is not None and cost.by_length else None
    found = cost.of(setting, batch, lengths.prompt_tokens if lengths else 0.0, steps)
    found.setflags(write=False)
    return found


@dataclass(frozen=True)
class SleepCost:
    """The cost of a model that time-shares its devices: seconds to free their memory, and to restore it.

    `bytes` go to host memory and come back, on each device. `measured` is the setting that the numbers come from; `estimated`
    says that the seconds are those of the bytes on the device's link to its host.

    Raises PlanError for a number that is negative or none.
    """

    sleep_s: AtLeastZero = 0.0
    wake_s: AtLeastZero = 0.0
    bytes: Natural | None = None
    measured: Setting | None = None
    estimated: bool = False

    def __post_init__(self) -> None:
        settings.check(self, PlanError)

    def at(self, setting: Setting, *, sharded: bool) -> "SleepCost":
        """Scale the cost to another setting by the bytes that a device holds: a shard (`sharded`), or a copy for each engine."""
        if self.measured is None:
            return self
        copies = 1.0 if sharded else setting.engines / self.measured.engines
        scale = copies * self.measured.devices / setting.devices
        size = None if self.bytes is None else round(self.bytes * scale)
        return replace(self, sleep_s=self.sleep_s * scale, wake_s=self.wake_s * scale, bytes=size)


@lru_cache(maxsize=256)
def _spread(spread: tuple[float, ...], steps: int) -> Array:
    """Repeat the sample in mixed orders, each firing equally often, so that the mean does not change."""
    rounds = [np.random.default_rng(i).permutation(np.asarray(spread)) for i in range(-(-steps // len(spread)))]
    found: Array = np.concatenate(rounds)[:steps]
    even: Array = found * (np.mean(spread) / found.mean())
    return even


def refuse_seconds(name: str, value: object) -> NoReturn:
    """Raise PlanError for the cost of `name`; the error explains what a cost is."""
    raise PlanError(
        f"the cost of '{name}' is {show_value(value)}; a cost is a number of seconds of at least 0, or one per device count, e.g."
        " {1: 38.2, 2: 19.0}"
    )


def number_or_function(name: str, cost: object) -> Any:
    """Turn seconds by device count into a NodeCost. Raises PlanError for anything else."""
    if isinstance(cost, NodeCost):
        return cost
    try:
        if isinstance(cost, Mapping) and cost:
            return NodeCost.on(cost)
        return SECONDS.take(name, cost)
    except (Wrong, PlanError, TypeError):
        refuse_seconds(name, cost)
