"""The routes of a rollout: the experts that its engine chose for each token, as columns, and what they can be asked of."""

from collections.abc import Sequence
from typing import Any

import torch

from rlgraph.columns import Column
from rlgraph.engines.api import Response
from rlgraph.errors import GraphError
from rlgraph.nodes.rollout.fitting import text_config
from rlgraph.plan.model_shapes import ModelShape

ROUTES = ("prompt_routes", "routes")


def check_told(generator: Any) -> None:
    """Raise GraphError for a generator with routes whose engine would not tell them."""
    if generator.routes and (generator.tensor_parallel > 1 or generator.drafts is not None):
        given = "drafts" if generator.drafts is not None else f"tensor_parallel={generator.tensor_parallel}"
        raise GraphError(
            f"Generator(routes=True, {given}): routes are told by engines of one GPU that decode one token at a time; leave out one"
        )


def route_dims(path: str) -> dict[str, int]:
    """Bound the layers with experts L, and count the experts E of a token, by a model's config.json; empty if it says nothing of them."""
    shape = ModelShape.from_config(text_config(path))
    return {} if shape is None or shape.experts == 1 else {"L": shape.layers, "E": shape.experts_used}


def check_routes(where: str, path: str) -> None:
    """Raise GraphError for a model without experts, which has no routes."""
    shape = ModelShape.from_config(text_config(path))
    if shape is not None and shape.experts == 1:
        raise GraphError(f"{where} reads the model '{path}', which has no experts to choose from; leave out routes and router_replay")


def routes_of(prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> dict[str, Column]:
    """Pack the experts that an engine chose into columns, padded with -1 as tokens are: prompts on the left, responses on the right."""
    found = [response.routes for response in responses]
    assert all(routes is not None for routes in found), "an engine with routes=True gave none"
    told = [(routes[: len(prompt)], routes[len(prompt) :]) for prompt, routes in zip(prompts, found, strict=True) if routes is not None]
    if not told:  # a rank without a share of the batch
        return {name: torch.zeros(0, 0, 0, 0, dtype=torch.int16) for name in ROUTES}
    sides = zip(ROUTES, ("left", "right"), zip(*told, strict=True), strict=True)
    packed: dict[str, Column] = {}
    for name, side, rows in sides:
        column = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1, padding_side=side)
        packed[name] = column if column.shape[1] else column.new_full((len(column), 1, *column.shape[2:]), -1)
    return packed
