"""The routers of a mixture of experts: what they choose in a pass, the loss that balances experts, and metrics of both.

The experts themselves are transformers' own: tokens sorted by expert and one grouped product, summed in a fixed order, so that equal
passes give equal bits. No token is dropped, however many an expert gets.
"""

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from rlgraph.errors import DataError

CHOSEN = 3  # outputs of a router that tells its choice: logits `[N, E]`, weights `[N, k]`, experts `[N, k]`


def routers_of(backbone: Any) -> list[Any]:
    """List the routers of a model, in the order of its layers; none for a dense model."""
    recorded = getattr(type(backbone), "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    kinds = [one.target_class for one in (recorder if isinstance(recorder, list) else [recorder]) if one is not None]
    return [module for module in backbone.modules() if any(isinstance(module, kind) for kind in kinds)]


@dataclass
class Chosen:
    """The outputs of the routers in one pass: logits `[N, E]` and experts `[N, k]` of each layer."""

    logits: list[torch.Tensor] = field(default_factory=list)
    experts: list[torch.Tensor] = field(default_factory=list)


class RouterTap:
    """Takes what the routers of a model give while it is entered; the passes that recompute layers are not.

    Raises DataError for a model without routers, or whose routers do not tell which experts they chose.
    """

    def __init__(self, backbone: Any, where: str) -> None:
        self._routers = routers_of(backbone)
        if not self._routers:
            raise DataError(f"{where}: {type(backbone).__name__} has no routers of experts that rlgraph knows; leave the setting out")
        self._where, self._on, self.chosen = where, False, Chosen()
        for router in self._routers:
            router.register_forward_hook(self._take)

    def __enter__(self) -> Chosen:
        self._on, self.chosen = True, Chosen()
        return self.chosen

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._on = False

    def _take(self, router: Any, given: Any, output: Any) -> None:
        if not self._on:
            return
        if not (
            isinstance(output, tuple) and len(output) == CHOSEN and output[2].shape == output[1].shape and not output[2].is_floating_point()
        ):
            raise DataError(
                f"{self._where}: {type(router).__name__} does not tell which experts it chose; families that do are Qwen 2, 3 and 3.5 MoE, "
                "Mixtral and OLMoE: leave the setting out"
            )
        self.chosen.logits.append(output[0])
        self.chosen.experts.append(output[2])


def load_balance(chosen: Chosen, real: torch.Tensor) -> torch.Tensor:
    """Compute the loss that balances experts over the tokens where `real [N]` is true: 1 at best times the experts of a token.

    It is transformers' own. Source: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    loss: Any = load_balancing_loss_func(tuple(chosen.logits), chosen.logits[0].shape[-1], chosen.experts[0].shape[-1], real)
    assert isinstance(loss, torch.Tensor)
    return loss


class RoutingMetrics:
    """Counts how often each expert of each layer was chosen, over the passes of an update."""

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None  # [layers, E + 2]: tokens of each expert, entropies, tokens

    @torch.no_grad()
    def add(self, chosen: Chosen, real: torch.Tensor) -> None:
        """Count the tokens of a pass where `real [N]` is true."""
        rows = []
        for logits, experts in zip(chosen.logits, chosen.experts, strict=True):
            logs = logits[real].float().log_softmax(-1)
            counts = torch.bincount(experts[real].flatten(), minlength=logits.shape[-1]).double()
            entropy = -(logs.exp() * logs).sum().double()
            rows.append(torch.cat([counts, torch.stack([entropy, real.sum().double()])]))
        found = torch.stack(rows)
        self._counts = found if self._counts is None else self._counts + found

    def summed(self, add_up: Any) -> dict[str, float]:
        """The metrics over all ranks; `add_up(tensor)` sums a tensor over them, in place."""
        assert self._counts is not None
        counts = self._counts.clone()
        add_up(counts)
        chosen, entropies, tokens = counts[:, :-2], counts[:, -2], counts[:, -1].clamp(min=1)
        shares = chosen / chosen.sum(-1, keepdim=True).clamp(min=1)
        by_expert = {f"moe/expert_share/{expert}": share for expert, share in enumerate(shares.mean(0).tolist())}
        return {
            "moe/expert_share_min": shares.min().item(),
            "moe/expert_share_max": shares.max().item(),
            "moe/routing_entropy": (entropies / tokens).mean().item(),
            "moe/dropped_tokens": 0.0,
            **by_expert,
        }
