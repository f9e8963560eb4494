"""The feedback edges of one worker: publish weights after the firing that trains them, load them before the first that uses them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlgraph.channels.weights.endpoints import WeightsReader, WeightsWriter
from rlgraph.engines.api import GenerateEngine
from rlgraph.engines.lora import A, B, BaseWeights, read_adapter
from rlgraph.errors import ChannelTimeout
from rlgraph.graph.nodes import Model
from rlgraph.nodes.base import Context
from rlgraph.plan.events import load_event, publish_event
from rlgraph.plan.model_shapes import PROJECTIONS
from rlgraph.plan.plan import PlannedAdapter, PlannedLoop
from rlgraph.runtime.worker.activity import Activity, SpanRecorder
from rlgraph.runtime.worker.spec import WorkerSpec
from rlgraph.values.lora import ALL_LINEAR

# The weights that an engine loads from a feedback edge: the received ones, or the folder's weights with a received adapter merged in.


class Merging:
    """Merges each version of an adapter into the base weights of one model, which it keeps."""

    def __init__(self, model: Model | None) -> None:
        self._model = model
        self._base: BaseWeights | None = None

    def weights(self, adapter: PlannedAdapter | None, received: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The weights of a version: as `received`, or merged if an adapter was received."""
        if adapter is None:
            return received
        return self._merge_adapter(adapter, received)

    def initial_weights(self, adapter: PlannedAdapter, device: torch.device) -> Mapping[str, torch.Tensor] | None:
        """The weights with the adapter's initial values, merged on `device`; None if they equal the folder's weights."""
        if adapter.folder is not None:
            return self._merge_adapter(adapter, {name: tensor.to(device) for name, tensor in read_adapter(Path(adapter.folder)).items()})
        if adapter.base is None:
            return None
        targets = PROJECTIONS if adapter.targets == ALL_LINEAR else adapter.targets
        base = self._base_weights(adapter)
        changed = [name.removesuffix(".weight") for name in base if name.endswith(tuple(f".{target}.weight" for target in targets))]
        nothing = {name + A: torch.zeros(1, base[name + ".weight"].shape[1], device=device) for name in changed}
        return self._merge_adapter(
            adapter, nothing | {name + B: torch.zeros(len(base[name + ".weight"]), 1, device=device) for name in changed}
        )

    def _merge_adapter(self, adapter: PlannedAdapter, matrices: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        assert self._model is not None
        return self._base_weights(adapter).with_adapter(matrices, adapter.scale, getattr(torch, self._model.traits.dtype or "float32"))

    def _base_weights(self, adapter: PlannedAdapter) -> BaseWeights:
        assert self._model is not None
        self._base = self._base or BaseWeights(self._model.path, adapter.base)
        return self._base


OnEnter = Callable[[int, Activity], None]


@dataclass
class Loop:
    """A feedback edge as one worker sees it; it holds the writing end, the reading end, or both."""

    plan: PlannedLoop
    writer: WeightsWriter | None = None
    reader: WeightsReader | None = None
    begun: bool = False  # whether the engine has the adapter's initial values


@dataclass
class WeightLoops:
    """All feedback edges of one worker. It calls `enter` when an activity begins, and `wake(step)` before an engine loads weights."""

    loops: list[Loop]
    spec: WorkerSpec
    context: Context
    recorder: SpanRecorder
    enter: OnEnter
    wake: Callable[[int], None]
    merging: Merging = field(init=False)

    def __post_init__(self) -> None:
        self.merging = Merging(self.spec.model)

    def written_by(self, node: str) -> list[PlannedLoop]:
        """List the edges whose weights a node trains."""
        return [loop.plan for loop in self.loops if loop.writer is not None and node == loop.plan.writer]

    def publish(self, node: str, step: int) -> None:
        """Publish the weights that a node has trained at this step, on each of their edges."""
        for loop in self.loops:
            if loop.writer is not None and node == loop.plan.writer and loop.plan.carries(step):
                name, version = loop.plan.name, step + 1
                self.enter(step, Activity("publish", node, name, version))
                wait_s, event = loop.writer.blocked_s, publish_event(name)
                with self.recorder.time_transfer(name, "room", wait_s, (event, "publish"), step, version=version):
                    loop.writer.publish(version, self.context.engine.weight_shards(), self.spec.deadline_s)

    def republish(self, step: int) -> None:
        """Resume from a checkpoint after `step` steps: publish its weights, the next version of every reader."""
        for loop in self.loops:
            if loop.writer is not None and loop.plan.due is None:
                loop.writer.publish(step, self.context.engine.weight_shards(), self.spec.deadline_s)
            if loop.reader is not None:
                self.context.version = step - 1

    def loops_loaded_by(self, node: str) -> list[Loop]:
        """List the edges whose weights load before this node: the first that uses them, since all nodes of a step use one version."""
        return [loop for loop in self.loops if loop.reader is not None and node == self._first_user(loop)]

    def _first_user(self, loop: Loop) -> str | None:
        return next((node.name for node in self.spec.nodes if node.name in loop.plan.readers), None)

    def arrivals(self, node: str, step: int) -> "Arriving | None":
        """Make the object that loads new versions while a node runs; None for a node that reads no edge."""
        loop = next((loop for loop in self.loops if loop.reader is not None and node in loop.plan.readers), None)
        return Arriving(self, loop, node, step) if loop is not None else None

    def load(self, loop: Loop, node: str, step: int) -> None:
        """Load exactly version `step - depth`, or with `latest` every version up to the newest that has arrived."""
        self._begin(loop, node, step)
        if loop.plan.due is not None:  # an evaluation of the version that this step publishes
            if loop.plan.carries(step):
                self._load_next(loop, node, step, step + 1)
            return
        self.load_up_to(loop, node, step, step - loop.plan.depth)
        if loop.plan.latest:
            self.load_arrived(loop, node, step)

    def _begin(self, loop: Loop, node: str, step: int) -> None:
        """Load an adapter's initial values into an engine, which starts with the weights of its folder, if they differ."""
        if loop.begun or loop.plan.adapter is None:
            return
        loop.begun = True
        resumed = self.spec.resume is not None  # then the checkpoint has the first version with which it samples
        weights = None if resumed else self.merging.initial_weights(loop.plan.adapter, torch.device(self.context.device))
        if weights is not None:
            self._take(loop, node, step, self.context.version, weights)

    def load_up_to(self, loop: Loop, node: str, step: int, version: int) -> None:
        """Load the versions up to `version`, waiting for each."""
        while self.context.version < version:
            self._load_next(loop, node, step, self.context.version + 1)

    def _load_next(self, loop: Loop, node: str, step: int, version: int) -> None:
        assert loop.reader is not None
        self.enter(step, Activity("receive", node, loop.plan.name, version))
        with self.recorder.span(loop.plan.name, "wait", step, version=version):
            weights = loop.reader.receive(version, self.spec.deadline_s)
        self._swap(loop, node, step, version, weights)

    def load_arrived(self, loop: Loop, node: str, step: int) -> None:
        """Load every version that has arrived, without waiting for more."""
        assert loop.reader is not None
        newest = self.spec.saving.newest_version(step) if self.spec.saving else float("inf")
        while self.context.version < newest:
            try:
                weights = loop.reader.receive(self.context.version + 1, 0.0)
            except ChannelTimeout:
                break
            self._swap(loop, node, step, self.context.version + 1, weights)

    def _swap(self, loop: Loop, node: str, step: int, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        assert loop.reader is not None
        self._take(loop, node, step, version, self.merging.weights(loop.plan.adapter, weights))
        loop.reader.release()
        self.context.version = version

    def _take(self, loop: Loop, node: str, step: int, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        engine = self.context.engine
        self.wake(step)
        self.enter(step, Activity("load", node, loop.plan.name, version))
        with self.recorder.span(load_event(loop.plan.name, node, apart=loop.plan.due is not None), "load", step, version=version):
            if isinstance(engine, GenerateEngine):
                engine.load_weights(weights, version=version, running=self.spec.node(node).traits.interrupt_rule)
            else:  # a user's engine
                engine.load_weights(weights)

    def close(self) -> None:
        """Close the ends of all edges."""
        for loop in self.loops:
            if loop.writer is not None:
                loop.writer.writer.close()
            for reader in loop.reader.readers if loop.reader is not None else ():
                reader.close()

    def published_bytes(self) -> int:
        """Count the bytes of a weight version that this worker publishes: the bytes of its shards."""
        ends = [loop.writer.writer.statistics() for loop in self.loops if loop.writer is not None]
        return sum(end.bytes // max(end.messages, 1) for end in ends)


@dataclass(frozen=True)
class Arriving:
    """New versions of a loop for one firing of a node; see `rlgraph.nodes.base.Arrivals`."""

    weights: WeightLoops
    loop: Loop
    node: str
    step: int

    def poll(self) -> None:
        with self._meanwhile():
            self.weights.load_arrived(self.loop, self.node, self.step)

    def wait(self, version: int) -> None:
        with self._meanwhile():
            self.weights.load_up_to(self.loop, self.node, self.step, version)

    @contextmanager
    def _meanwhile(self) -> Iterator[None]:
        """Report that the node runs again after loading new weights, so that its next work does not count as loading."""
        before = self.weights.context.version
        yield
        if self.weights.context.version > before:
            self.weights.enter(self.step, Activity("fire", self.node))
