"""A policy whose log-probs are the engine's to the bit: what its settings may be, and a check of some rows in each step."""

from collections.abc import Sequence
from typing import Any

import torch

from rlgraph.columns import Columns, rows_of
from rlgraph.errors import CertificateError, GraphError
from rlgraph.graph.exact_rules import EXACT_DTYPES
from rlgraph.nodes.base import carried, tensor_of

CHECKED = 4  # rows of a step


def check_exact_settings(model: Any) -> None:
    """Raise GraphError for settings that are not proven to be exact."""
    where = f"{type(model).__name__}(exact=True"
    if model.dtype not in EXACT_DTYPES:
        raise GraphError(
            f"{where}, dtype='{model.dtype}'): it is proven in {' and '.join(f'{d} on {p}' for d, p in EXACT_DTYPES.items())}; write "
            f"{' or '.join(f'dtype={d!r}' for d in EXACT_DTYPES)}"
        )
    given = {
        "tensor_parallel": (model.tensor_parallel, 1),
        "context_parallel": (model.context_parallel, 1),
        "expert_parallel": (model.expert_parallel, 1),
        "recompute": (model.recompute, False),
        "fused_head": (model.fused_head, None),
        "compiled": (model.compiled, False),
        "load_balance": (model.load_balance, 0.0),
        "router_replay": (model.router_replay, False),
        "adapter": (model.adapter, None),
    }
    for name, (value, plain) in given.items():
        if value != plain:
            raise GraphError(f"{where}, {name}={value!r}): the two together are not proven to be exact; leave out one")


def columns_to_check(name: str, model: Any, inputs: Sequence[Any]) -> tuple[str, ...]:
    """The columns that an update reads for its check. Raises GraphError for an exact policy's batch that no engine sampled."""
    if model.exact and "rollout_log_probs" not in carried(inputs):
        raise GraphError(
            f"node '{name}' trains a policy with exact=True on a batch that no engine sampled; pass it a rollout, or leave out exact"
        )
    return ("rollout_log_probs",) if model.exact else ()


def checked_rows(engine: Any, batch: Columns, step: int, temperature: float) -> dict[str, float]:
    """Score some rows of a batch before its first update, other ones in each step; give the number of their tokens as a metric.

    Raises CertificateError for a token whose log-prob differs from the engine's in any bit.
    """
    rows = rows_of(batch)
    chosen = torch.arange(step * CHECKED, step * CHECKED + min(CHECKED, rows)) % rows
    some = {name: tensor_of(batch, name)[chosen] for name in ("prompts", "prompt_mask", "responses", "response_mask")}
    sampled, mask = tensor_of(batch, "rollout_log_probs")[chosen], some["response_mask"].bool()
    own = engine.scores(some, temperature=temperature)
    differ = (own != sampled) & mask
    if bool(differ.any()):
        most = (own - sampled)[mask].abs().max().item()
        raise CertificateError(
            f"step {step}: {int(differ.sum())} of {int(mask.sum())} tokens of {len(chosen)} rows have other log-probs in the trainer than "
            f"in the engine, by up to {most:.1e}; Policy(exact=True) says that all are equal. Leave out exact to go on without that promise"
        )
    return {"exact/tokens_checked": float(mask.sum())}
