"""Mixtures of experts: their routers, what is replayed of their choices, and the products of all experts in one call."""

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from rlgraph.errors import DataError, GraphError

# The routers of a mixture of experts: what they choose in a pass, or what is replayed, the loss that balances experts, and metrics.
#
# The experts themselves are in `grouped_experts`: tokens sorted by expert and one grouped product, summed in a fixed order, so that equal
# passes give equal bits. No token is dropped, however many an expert gets.

OUTPUTS = 3  # of a router that tells its choice: logits `[N, E]`, weights `[N, k]`, experts `[N, k]`
TELLING = "families that do are Qwen 2, 3 and 3.5 MoE, Mixtral and OLMoE"


def routers_of(model: Any) -> list[Any]:
    """List the routers of a model, in the order of its layers; none for a dense model."""
    recorded = getattr(type(model), "_can_record_outputs", None) or {}  # dense families have none
    recorder = recorded.get("router_logits")
    kinds = [one.target_class for one in (recorder if isinstance(recorder, list) else [recorder]) if one is not None]
    return [module for module in model.modules() if any(isinstance(module, kind) for kind in kinds)]


def tells(output: Any) -> bool:
    """Whether what a router gives is logits, weights and experts."""
    return isinstance(output, tuple) and len(output) == OUTPUTS and output[2].dtype == torch.int64


def weights_at(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Compute the weights `[N, k]` that a router gives to `experts [N, k]`, as it weighs those it chooses itself.

    They are its softmax over all experts, of which most families take the chosen ones as a whole.
    """
    weights = logits.float().softmax(-1).gather(-1, experts)
    whole = getattr(router, "norm_topk_prob", True)  # of families that may do either
    return weights / weights.sum(-1, keepdim=True) if whole else weights


class Routing:
    """Takes what the routers of a model give in the passes over which it is entered, but not where layers are computed again.

    `coefficient` is the weight of the loss that balances experts; 0 leaves it out. With `replay` the experts of a pass are those that it
    is told by `begin`; their weights are computed from the router's own logits, and have gradients. Source: Ma et al. 2025,
    arXiv:2510.11370.

    Raises GraphError for a coefficient or a replay of a model without routers. A model whose routers do not tell the experts they chose
    has no metrics, and refuses both in its first pass.
    """

    def __init__(self, routers: Sequence[Any], coefficient: float = 0.0, *, replay: bool = False) -> None:
        self._coefficient, self.replay = coefficient, replay
        self._on, self._tells = False, True
        self._logits: list[torch.Tensor] = []
        self._experts: list[torch.Tensor] = []
        self._alike: list[torch.Tensor] = []  # whether the own choice is the replayed one, `[N]` of each layer
        self._routes: torch.Tensor | None = None  # of the pass
        self._weighed = False  # whether weights were seen to be those of `weights_at`
        self._layers = len(routers)
        self._counts: torch.Tensor | None = None  # [layers, E + 4]: tokens of each expert, entropies, tokens; replayed alike, replayed
        asked = f"load_balance={coefficient}" if coefficient else "router_replay=True"
        if (coefficient or replay) and not routers:
            raise GraphError(f"{asked}: the model has no routers of experts; leave it out")
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._take, layer))

    def begin(self, routes: torch.Tensor | None) -> None:
        """Replay `routes [N, layers, k]` in the next pass and wherever its layers are computed again; -1 is for own choice, as None is.

        Raises DataError for routes of another number of layers.
        """
        if routes is not None and routes.shape[1] != self._layers:
            raise DataError(
                f"router_replay=True: the batch has routes of {routes.shape[1]} layers, but the trainer's model has {self._layers} "
                "with experts; generator and policy must use the same model"
            )
        self._routes = routes

    def __enter__(self) -> None:
        self._on, self._logits, self._experts, self._alike = True, [], [], []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._on = False

    def _take(self, layer: int, router: Any, given: Any, output: Any) -> Any:
        self._tells = tells(output)
        if not self._tells:
            self._refuse(router)
            return output
        used = output if self._routes is None else self._replay_routes(layer, router, output, self._routes)
        if self._on:
            self._logits.append(output[0])
            self._experts.append(used[2])
            if self._routes is not None:
                self._alike.append((used[2].sort(-1).values == output[2].sort(-1).values).all(-1))
        return used

    def _refuse(self, router: Any) -> None:
        asked = "router_replay=True" if self.replay else f"load_balance={self._coefficient}" if self._coefficient and self._on else ""
        if asked:
            raise GraphError(f"{asked}: {type(router).__name__} does not report which experts it chose; {TELLING}: leave it out")

    def _replay_routes(self, layer: int, router: Any, output: Any, routes: torch.Tensor) -> Any:
        logits, weights, experts = output
        if routes.shape[-1] != experts.shape[-1]:
            raise DataError(
                f"router_replay=True: the routes of the batch are {routes.shape[-1]} experts per token, and the trainer's model has "
                f"{experts.shape[-1]}; generator and policy must use the same model"
            )
        if not self._weighed:
            _check_weighed(router, logits.detach(), weights.detach(), experts)
            self._weighed = True
        told = routes[:, layer].long()
        known = told[:, :1] >= 0
        chosen = torch.where(known, told, experts)
        return logits, torch.where(known, weights_at(router, logits, chosen).to(weights.dtype), weights), chosen

    def loss(self, repeats: torch.Tensor, share: float) -> tuple[torch.Tensor | None, dict[str, float]]:
        """Compute this pass's share of the loss that balances experts and of its metric, over tokens that count `repeats [N]` times.

        The loss is transformers' own. Source: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6.
        """
        if not self._coefficient:
            return None, {}
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        balance: Any = load_balancing_loss_func(tuple(self._logits), self._logits[0].shape[-1], self._experts[0].shape[-1], repeats)
        return self._coefficient * share * balance, {"moe/load_balance_loss": share * float(balance.detach())}

    @torch.no_grad()
    def count(self, repeats: torch.Tensor) -> None:
        """Count the experts of a pass's tokens, each `repeats [N]` times, as if each response had its own prompt; padding has 0.

        The host waits for nothing here: the GPU would stand still until the host has launched the next layers.
        """
        if not self._logits:
            return
        times, rows = repeats.double(), []
        real = times > 0
        for layer, (logits, experts) in enumerate(zip(self._logits, self._experts, strict=True)):
            logs = logits.float().log_softmax(-1)
            counts = times.new_zeros(logits.shape[-1])
            counts.index_add_(0, experts.flatten(), times.repeat_interleave(experts.shape[-1]))  # whole numbers, exact in any order
            entropies = (-(logs.exp() * logs).sum(-1).double() * times).where(real, 0.0)
            alike = replayed = times.new_zeros(())
            if self._routes is not None:
                known = times * (self._routes[:, layer, 0] >= 0)
                alike, replayed = (known * self._alike[layer]).sum(), known.sum()
            rows.append(torch.cat([counts, torch.stack([entropies.sum(), times.sum(), alike, replayed])]))
        found = torch.stack(rows)
        self._counts = found if self._counts is None else self._counts + found

    def metrics(self, add_up: Callable[[torch.Tensor], object]) -> dict[str, float]:
        """The metrics of the passes since the last call, over all ranks; `add_up(tensor)` sums a tensor over them, in place."""
        if self._counts is None:
            return {}
        counts, self._counts = self._counts, None
        add_up(counts)
        counts = counts.cpu()
        chosen, (entropies, tokens, alike, replayed) = counts[:, :-4], counts[:, -4:].unbind(-1)
        shares = chosen / chosen.sum(-1, keepdim=True).clamp(min=1)
        known = replayed.sum().item()
        return {
            "moe/expert_share_min": shares.min().item(),
            "moe/expert_share_max": shares.max().item(),
            "moe/routing_entropy": (entropies / tokens.clamp(min=1)).mean().item(),
            "moe/dropped_tokens": 0.0,
            **{f"moe/expert_share/{expert}": share for expert, share in enumerate(shares.mean(0).tolist())},
            **({"moe/route_agreement": alike.sum().item() / known} if known else {}),
            **({"moe/routes_replayed": known / max(tokens.sum().item(), 1)} if self.replay else {}),
        }


def _check_weighed(router: Any, logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> None:
    """Raise GraphError for a router that weighs the experts of its own choice in another way than `weights_at`."""
    if not torch.allclose(weights_at(router, logits, experts), weights.float(), rtol=0.02, atol=1e-3):
        raise GraphError(
            f"router_replay=True: {type(router).__name__} does not weigh experts by a softmax of its logits, so the weights of experts "
            "that it did not choose are not known; leave it out"
        )


# Rows of tokens in the order of their experts, and the products of all experts in one call: no wait of the host, no row that is masked.
#
# `torch.nn.functional.grouped_mm` multiplies the rows of each expert by its own matrix. Rows move by permutations whose gradients are
# gathers too: those of an index would be sorted first, or added by atomics in any order.

product: Any = torch.nn.functional.grouped_mm


def experts_of(model: Any) -> list[Any]:
    """List the modules of a model that hold the experts of a layer."""
    return [module for module in model.modules() if hasattr(module, "num_experts") and hasattr(module, "has_gate")]


def install(model: Any) -> None:
    """Have the layers of experts that `takes` names compute by `mix_experts`, instead of by transformers' function."""
    for module in experts_of(model):
        if takes(module):
            module.forward = partial(mix_experts, module)


def takes(module: Any) -> bool:
    """Whether `multiply_grouped` computes what this module does: gated experts without biases, whose products it groups itself."""
    grouped_there = getattr(module.config, "_experts_implementation", None) == "grouped_mm"  # private, of some versions
    return grouped_there and module.has_gate and not module.has_bias and module.gate_up_proj.dtype == module.down_proj.dtype


def mix_experts(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Compute tokens `[N, H]`, each by `k` experts `[N, k]`, and sum their results by the weights `[N, k]` in a fixed order."""
    chosen = top_k_index.shape[-1]
    results = multiply_grouped(module, hidden_states, top_k_index.reshape(-1), chosen) * top_k_weights.reshape(-1, 1)
    return results.view(-1, chosen, results.shape[-1]).sum(1).to(hidden_states.dtype)


def multiply_grouped(module: Any, rows: torch.Tensor, experts: torch.Tensor, each: int = 1) -> torch.Tensor:
    """Compute rows `[n, H]`, each by `each` of the module's experts `[n × each]`; equal rows and experts give equal bits."""
    experts, order = experts.sort(stable=True)
    back = inverse(order)
    ends = torch.searchsorted(experts, torch.arange(1, module.num_experts + 1, device=experts.device), out_int32=True)
    up, down = (one if module.is_transposed else one.transpose(-2, -1) for one in (module.gate_up_proj, module.down_proj))
    inner = module._apply_gate(product(spread(rows.to(up.dtype), order, back, each), up, offs=ends))
    return spread(product(inner, down, offs=ends), back, order).to(rows.dtype)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Invert a permutation `[n]`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def spread(rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """Copy each of the rows `[n, H]` so many times and put the copies in an `order`, of which `back` is the inverse; `[n × copies, H]`.

    >>> order = torch.tensor([2, 0, 1, 3])
    >>> spread(torch.tensor([[1.0], [2.0]]), order, inverse(order), copies=2).flatten().tolist()
    [2.0, 1.0, 1.0, 2.0]
    """
    found: torch.Tensor = _Spread.apply(rows, order, back, copies)
    return found


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows[order if copies == 1 else order // copies]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        own = grads[0][back]
        return own if ctx.copies == 1 else own.view(-1, ctx.copies, own.shape[-1]).sum(1), None, None, None
