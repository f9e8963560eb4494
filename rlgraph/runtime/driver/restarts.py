"""What a job does after a failure: how often it starts again, and prompts that kill their worker."""

from dataclasses import dataclass

from rlgraph.errors import CheckpointError, NodeError, StalenessError
from rlgraph.graph.nodes import Graph
from rlgraph.nodes.prompts import Prompts
from rlgraph.plan.plan import Plan
from rlgraph.runtime.worker.activity import Heartbeat

# Limit how often a job starts again without making progress in between.

HOPELESS = (CheckpointError, StalenessError)  # errors that the same job meets again


@dataclass
class Restarts:
    """Counts failures in a row; a checkpoint that is newer than at the last failure makes them count anew."""

    allowed: int
    used: int = 0
    newest: int = 0

    def allows(self, error: Exception, newest: int, *, ready: bool) -> bool:
        """Count a failure and tell whether the job may start again; `ready` says that all workers were ready when it failed."""
        if newest > self.newest:
            self.used, self.newest = 0, newest
        unloadable = isinstance(error, NodeError) and not ready  # an engine that failed to load will fail again
        if isinstance(error, HOPELESS) or unloadable or self.used >= self.allowed:
            return False
        self.used += 1
        return True


# Find prompts that kill their worker by firing for one prompt at a time; set aside one that has killed a worker twice.


@dataclass
class PoisonPrompts:
    """The evidence of the deaths so far. `probe` is the (node, step) that the next session tries prompt by prompt."""

    graph: Graph
    plan: Plan
    probe: tuple[str, int] | None = None
    accused: int | None = None  # the place in the data order of the prompt at which the last probe died

    def saw(self, did: Heartbeat | None, set_aside: tuple[int, ...]) -> int | None:
        """Learn from what a worker did when it failed; give the place of a prompt that has now killed its worker twice."""
        if did is None:
            return None
        activity = did.activity
        if activity.kind == "probe":
            place = self._place(did.step, activity.prompt, set_aside)
            guilty, self.accused = place == self.accused, place
            if guilty:
                self.probe = self.accused = None
            return place if guilty else None
        self.accused = None
        self.probe = (activity.node, did.step) if activity.kind == "fire" and self._can_probe(activity.node) else None
        return None

    def _source(self) -> Prompts | None:
        sources = [node.operation for node in self.graph.nodes if isinstance(node.operation, Prompts)]
        return sources[0] if len(sources) == 1 and not sources[0].by_results else None  # whose order only its worker knows

    def _place(self, step: int, prompt: int, set_aside: tuple[int, ...]) -> int:
        source = self._source()
        assert source is not None
        return source.positions(step, set_aside)[prompt]

    def _can_probe(self, node: str) -> bool:
        """Tell whether a node can be fired for one prompt without changing the run: a node of a trained model cannot."""
        planned = next((found for found in self.plan.nodes if found.name == node), None)
        trained = {found.model for found in self.plan.nodes if found.work == "train"}
        return planned is not None and bool(planned.reads) and planned.model not in {*trained} - {None} and self._source() is not None

    def describe(self, place: int) -> str:
        """Describe a prompt in words."""
        source = self._source()
        assert source is not None
        return f"prompt {place} of the data order ({source.item(place)[source.prompt_field]!r:.80})"
