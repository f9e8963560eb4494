"""Router replay by hand: a forward of transformers, one row at a time, whose routers are told what to choose; and ranks that replay."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.forked_ranks import process_group
from support.tiny import LENGTHS, WeightedLikelihood, batch_of

PROMPTS = [[5, 6, 7], list(range(1, 41)), list(range(1, 41)), [9, 10, 11, 12, 13], list(range(1, 38)), [5, 6, 7]]  # prefixes are shared


def load_model(folder: Path) -> Any:
    """The model of transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder, in float32."""
    return {name: tensor.float() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def copy_with_weights(model: Path, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Copy a model's folder with other weights, in float32."""
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def gates(model: Any) -> list[Any]:
    """The routers of a Qwen 3 MoE."""
    return [layer.mlp.gate for layer in model.model.layers]


def force_experts(gate: Any, chosen: torch.Tensor) -> Any:
    """Replace a router's forward: the experts are `chosen [N, k]` where they are not negative."""

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
        probs = logits.softmax(-1)
        experts = torch.where(chosen < 0, probs.topk(gate.top_k).indices, chosen.long())
        weights = torch.stack([probs[row, own] / probs[row, own].sum() for row, own in enumerate(experts)])
        return logits, weights, experts

    return forward


def routes_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """The experts `[tokens, layers, k]` that a model chooses itself."""
    found: list[torch.Tensor] = []
    hooks = [gate.register_forward_hook(lambda gate, given, out: found.append(out[2])) for gate in gates(model)]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


def reference(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-probs `[B, T]` of a batch under the routes in its columns, with gradients; 0 where `response_mask` is false."""
    rows = []
    for row in range(len(batch["responses"])):
        keep = batch["prompt_mask"][row]
        count = int((batch["response_mask"][row] * torch.arange(1, batch["responses"].shape[1] + 1)).max())
        tokens = torch.cat([batch["prompts"][row][keep], batch["responses"][row][:count]])
        routes = torch.cat([batch["prompt_routes"][row][keep], batch["routes"][row][: count - 1]])
        for layer, gate in enumerate(gates(model)):
            gate.forward = force_experts(gate, routes[:, layer])
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0, int(keep.sum()) - 1 :]
        logs = logits.log_softmax(-1).gather(-1, tokens[-count:, None])[:, 0]
        rows.append(torch.nn.functional.pad(logs, (0, batch["responses"].shape[1] - count)))
    for gate in gates(model):
        del gate.forward
    return torch.stack(rows) * batch["response_mask"]


def replayed_batch(layers: int = 2, experts: int = 8, *, unknown: float = 0.2) -> dict[str, torch.Tensor]:
    """A batch with random routes, some of which are unknown; the responses to one prompt share the routes of its tokens."""
    batch = batch_of(LENGTHS, holes=True)
    draw = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        found = torch.rand(*shape, layers, experts, generator=draw).topk(2).indices.to(torch.int16)
        found[torch.rand(*shape, generator=draw) < unknown] = -1
        return found

    prompts = some(len(LENGTHS) // 2, batch["prompts"].shape[1]).repeat_interleave(2, 0)
    return batch | {"prompt_routes": prompts, "routes": some(*batch["responses"].shape)}


def be_replaying_rank(folder: Path, out: Path, rank: int, world: int) -> None:
    """Score and train on a rank."""
    from support.trainer_engines import fsdp_engine

    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.values.optimizers import AdamW

    with process_group(out, rank, world):
        settings: dict[str, Any] = {"rank": rank, "world": world, "dtype": torch.float32, "micro_batch_tokens": 16}
        engine = fsdp_engine(PolicyHead(folder), optimizer=AdamW(lr=1e-2, eps=1e-3), router_replay=True, shared=False, **settings)
        batch = replayed_batch()
        found = {"scores": engine.scores(batch), "metrics": engine.update(batch, WeightedLikelihood()), "after": engine.scores(batch)}
        torch.save(found, out / f"{rank}.pt")
        engine.close()
