"""The critic: value estimates, and the update that fits them to returns."""

from dataclasses import dataclass
from typing import Any, ClassVar

from rlgraph.errors import GraphError
from rlgraph.graph import Node, Output, Work, declare
from rlgraph.nodes.base import Context, Stage
from rlgraph.nodes.policy import TOKENS, TrainedModel, Update, check_loss


@dataclass(frozen=True, eq=False, kw_only=True)
class Critic(TrainedModel):
    """A model with a value head, trained beside the policy. `path` is a folder in Hugging Face format."""

    role: ClassVar[str] = "critic"

    def values(self, *inputs: Output, name: str = "values") -> Output:
        """Declare `values` [B, T]: the estimated return from each response token on."""
        return Output(declare(name, CriticWork("forward"), inputs, reads=TOKENS, writes=("values",), model=self))

    def update(self, *inputs: Output, loss: Any, name: str = "critic_update") -> Update:
        """Declare one optimizer step of the critic. Raises GraphError for a column that the loss reads and no input carries."""
        check_loss(name, loss)
        reads = tuple(dict.fromkeys((*TOKENS, *loss.reads)))
        node = declare(name, CriticWork("train"), inputs, reads=reads, writes=(), model=self)
        return Update(Output(node, "weights"), Output(node, "metrics"))


@dataclass(frozen=True)
class CriticWork:
    """A critic's node. Graphs with a critic are declared, planned and drawn; its engine is not there to run it yet."""

    work: Work

    def check(self, node: Node) -> None:
        raise GraphError(f"node '{node.name}' is a critic's, which this version declares, plans and draws but does not run yet")

    def start(self, context: Context) -> Stage:
        raise AssertionError("a critic's node is refused before it starts")
