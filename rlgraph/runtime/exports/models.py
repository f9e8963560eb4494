"""The trained models of a graph, as an export and a checkpoint name them."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from rlgraph.engines.hf.export import AdapterForm
from rlgraph.engines.lora.peft_folder import SavedAdapter
from rlgraph.errors import ExportError, show_value
from rlgraph.graph.nodes import Graph
from rlgraph.nodes.training.trained_model import TrainedModel
from rlgraph.plan.plan import Plan


class TrainedEntry(msgspec.Struct, frozen=True):
    """A trained model: its name in the plan, the folder it came from, what it scores, the trainer that saves it, and the adapter that alone
    is trained, if one is."""

    name: str
    path: str
    scores: Literal["log_probs", "values"]
    trainer: str
    adapter: SavedAdapter | None = None


def trained_models(graph: Graph, plan: Plan) -> tuple[TrainedEntry, ...]:
    """List the models that the graph trains and that have a Hugging Face folder, in the order of their updates."""
    found: dict[str, TrainedEntry] = {}
    for node in graph.nodes:
        model = node.model
        if node.traits.work == "train" and isinstance(model, TrainedModel):
            name = plan.node(node.name).model or node.name
            found.setdefault(name, TrainedEntry(name, model.path, model.scores, model.spec.name, _adapter(model)))
    return tuple(found.values())


def _adapter(model: TrainedModel) -> SavedAdapter | None:
    return None if model.adapter is None else SavedAdapter.of(model.adapter)


def check_apart(model: TrainedEntry, adapter: AdapterForm, where: str) -> None:
    """Raise ExportError for an adapter that is to be exported apart and is none, and for one of a critic."""
    if model.adapter is not None and model.scores == "values":
        raise ExportError(f"{where}: '{model.name}' is a critic with an adapter, which checkpoints alone hold; export the policy")
    if adapter == "apart" and model.adapter is None:
        raise ExportError(f"{where}: '{model.name}' trained no adapter that could be apart; leave out adapter='apart'")


def choose_model(models: Sequence[TrainedEntry], policy: str | None, where: str) -> TrainedEntry:
    """Choose the model to export: the one of this name, or the graph's only policy.

    Raises ExportError where none is meant, or several may be.
    """
    names: Mapping[str, TrainedEntry] = {model.name: model for model in models}
    if not names:
        raise ExportError(f"{where}: the graph trains no model that has a Hugging Face folder; there is nothing to export")
    if policy is not None and policy not in names:
        raise ExportError(f"{where} has policy={show_value(policy)}; the trained models are {list(names)}: name one of them")
    policies = [model for model in models if model.scores == "log_probs"]
    only = policies if len(policies) == 1 else list(models)
    if policy is None and len(only) > 1:
        raise ExportError(f"{where}: the graph trains {list(names)}; say which one: policy={next(iter(names))!r}")
    return names[policy] if policy is not None else only[0]
