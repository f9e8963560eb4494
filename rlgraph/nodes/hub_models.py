"""Put the folder of a model in the place of its hub id, before a graph is planned or run."""

from collections.abc import Callable

from rlgraph.engines.hf_models import model_files
from rlgraph.graph.nodes import Graph
from rlgraph.nodes.rewards.reward_model import RewardModel
from rlgraph.nodes.rollout.rollout import Generator
from rlgraph.nodes.training.trained_model import TrainedModel


def place_models(graph: Graph, find: Callable[[str], str | None]) -> None:
    """Give each model of the graph that is named by a hub id the folder that `find` has for it; where it has none, the id stays.

    The models of the graph change, so that its nodes and workers all read the same revision.
    """
    for model in dict.fromkeys(node.model for node in graph.nodes):
        if isinstance(model, Generator | TrainedModel | RewardModel) and model_files.is_hub_id(model.path):
            folder = find(model.path)
            if folder is not None:
                object.__setattr__(model, "path", folder)
