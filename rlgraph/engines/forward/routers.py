"""The routers of a mixture of experts: what they choose in a pass, the loss that balances experts, and metrics of both.

The experts themselves are transformers' own: tokens sorted by expert and one grouped product, summed in a fixed order, so that equal
passes give equal bits. No token is dropped, however many an expert gets.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from rlgraph.errors import GraphError

OUTPUTS = 3  # of a router that tells its choice: logits `[N, E]`, weights `[N, k]`, experts `[N, k]`


def routers_of(model: Any) -> list[Any]:
    """List the routers of a model, in the order of its layers; none for a dense model."""
    recorded = getattr(type(model), "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    kinds = [one.target_class for one in (recorder if isinstance(recorder, list) else [recorder]) if one is not None]
    return [module for module in model.modules() if any(isinstance(module, kind) for kind in kinds)]


class Routing:
    """Takes what the routers of a model give in the passes over which it is entered, but not where layers are computed again.

    `coefficient` is the weight of the loss that balances experts; 0 leaves it out. Raises GraphError for a coefficient of a model without
    routers. A model whose routers do not tell the experts they chose has no metrics, and refuses a coefficient in its first pass.
    """

    def __init__(self, routers: Sequence[Any], coefficient: float = 0.0) -> None:
        self._coefficient = coefficient
        self._on, self._tells = False, True
        self._logits: list[torch.Tensor] = []
        self._experts: list[torch.Tensor] = []
        self._counts: torch.Tensor | None = None  # [layers, E + 2]: tokens of each expert, entropies, tokens
        if coefficient and not routers:
            raise GraphError(f"load_balance={coefficient}: the model has no routers of experts; leave it out")
        for router in routers:
            router.register_forward_hook(self._take)

    def __enter__(self) -> None:
        self._on, self._logits, self._experts = True, [], []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._on = False

    def _take(self, router: Any, given: Any, output: Any) -> None:
        if not self._on:
            return
        self._tells = isinstance(output, tuple) and len(output) == OUTPUTS and output[2].dtype == torch.int64
        if self._tells:
            self._logits.append(output[0])
            self._experts.append(output[2])
        elif self._coefficient:
            raise GraphError(
                f"load_balance={self._coefficient}: {type(router).__name__} does not tell which experts it chose; families "
                "that do are Qwen 2, 3 and 3.5 MoE, Mixtral and OLMoE: leave it out"
            )

    def loss(self, real: torch.Tensor, share: float) -> tuple[torch.Tensor | None, dict[str, float]]:
        """Compute this pass's share of the loss that balances experts and of its metric, over the tokens where `real [N]` is true.

        The loss is transformers' own. Source: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6.
        """
        if not self._coefficient:
            return None, {}
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        balance: Any = load_balancing_loss_func(tuple(self._logits), self._logits[0].shape[-1], self._experts[0].shape[-1], real)
        return self._coefficient * share * balance, {"moe/load_balance_loss": share * float(balance.detach())}

    @torch.no_grad()
    def count(self, real: torch.Tensor) -> None:
        """Count the experts of a pass's tokens where `real [N]` is true."""
        if not self._logits:
            return
        rows = []
        for logits, experts in zip(self._logits, self._experts, strict=True):
            logs = logits[real].float().log_softmax(-1)
            counts = torch.bincount(experts[real].flatten(), minlength=logits.shape[-1]).double()
            rows.append(torch.cat([counts, torch.stack([-(logs.exp() * logs).sum().double(), real.sum().double()])]))
        found = torch.stack(rows)
        self._counts = found if self._counts is None else self._counts + found

    def metrics(self, add_up: Callable[[torch.Tensor], object]) -> dict[str, float]:
        """The metrics of the passes since the last call, over all ranks; `add_up(tensor)` sums a tensor over them, in place."""
        if self._counts is None:
            return {}
        counts, self._counts = self._counts, None
        add_up(counts)
        chosen, entropies, tokens = counts[:, :-2], counts[:, -2], counts[:, -1].clamp(min=1)
        shares = chosen / chosen.sum(-1, keepdim=True).clamp(min=1)
        return {
            "moe/expert_share_min": shares.min().item(),
            "moe/expert_share_max": shares.max().item(),
            "moe/routing_entropy": (entropies / tokens).mean().item(),
            "moe/dropped_tokens": 0.0,
            **{f"moe/expert_share/{expert}": share for expert, share in enumerate(shares.mean(0).tolist())},
        }
