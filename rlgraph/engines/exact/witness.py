"""What the operations of a model gave for some texts, in an engine and in a trainer, by the same names: to find the first that differs.

Names are `embedding`; `3.norm`, `3.qkv`, … of layer 3; and `norm` at the end. Each is `[tokens, width]`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

OF_LAYER = (
    *("norm", "qkv", "q_norm", "k_norm", "query", "key", "attention", "output"),
    *("mlp_norm", "gate_up", "activation", "down"),
)
ALIKE = {  # modules of both sides, by their path below a layer
    "input_layernorm": "norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.down_proj": "down",
}
INPUTS = {"self_attn.o_proj": "attention", "mlp.down_proj": "activation"}
MERGED = {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": "gate_up"}  # of vLLM
PARTS = {  # of Transformers
    "self_attn.q_proj": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "mlp.gate_proj": ("gate_up", 0),
    "mlp.up_proj": ("gate_up", 1),
}


def names(layers: int) -> list[str]:
    """All names of a model, in the order of its computation."""
    return ["embedding", *(f"{layer}.{name}" for layer in range(layers) for name in OF_LAYER), "norm"]


class Witness:
    """Keeps what the modules of a model give, pass by pass, from now until `leave`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.passes: list[dict[str, torch.Tensor]] = []
        self.positions: list[torch.Tensor] = []
        self._leading = False
        self.layer, self._hooks = -1, list[Any]()
        for path, module in model.named_modules():
            self._watch(path, module)

    def _watch(self, path: str, module: torch.nn.Module) -> None:
        number, _, below = path.partition("layers.")[2].partition(".")
        if path.endswith("embed_tokens"):
            self._keep(module, "embedding")
        elif path.endswith(".norm") and not number:
            self._keep(module, "norm")
        elif path.endswith("rotary_emb") and hasattr(module, "cos_sin_cache"):
            self._hooks.append(module.register_forward_hook(self._rotated))
        if not below:
            return
        layer = int(number)
        if below == "self_attn":
            self._hooks.append(module.register_forward_pre_hook(lambda module, given: self._at(layer)))
        if below in ALIKE or below in MERGED:
            self._keep(module, f"{layer}.{(ALIKE | MERGED)[below]}")
        if below in PARTS:
            self._keep(module, f"{layer}.{PARTS[below][0]}/{PARTS[below][1]}")
        if below in INPUTS:
            name = f"{layer}.{INPUTS[below]}"
            self._hooks.append(module.register_forward_pre_hook(lambda module, given: self.add(name, given[0])))

    def _at(self, layer: int) -> None:
        self.layer = layer

    def _keep(self, module: torch.nn.Module, name: str) -> None:
        self._hooks.append(
            module.register_forward_hook(lambda module, given, out: self.add(name, out[0] if isinstance(out, tuple) else out))
        )

    def _rotated(self, module: torch.nn.Module, given: Any, out: Any) -> None:
        for name, states in zip(("query", "key"), out, strict=True):
            self.add(f"{self.layer}.{name}", states)

    def add(self, name: str, states: torch.Tensor) -> None:
        """Keep the states `[…, tokens, …]` of an operation."""
        if name == "embedding":
            self.passes.append({})
            self._leading = states.dim() == 3  # a trainer's states are [1, tokens, …]
        if self.passes:
            rows = states.detach()[0] if self._leading else states.detach()
            self.passes[-1][name] = rows.reshape(len(rows), -1).clone()

    def leave(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()


def watch_positions(model: torch.nn.Module, witness: Witness) -> None:
    """Note the positions of the tokens of each pass of vLLM's model."""

    def note(module: Any, given: Any, named: dict[str, Any]) -> None:
        witness.positions.append((named["positions"] if "positions" in named else given[1]).detach().clone())

    witness._hooks.append(model.register_forward_pre_hook(note, with_kwargs=True))


@contextmanager
def watch_rotation(attention: Any, witness: Witness) -> Iterator[None]:
    """Keep what the attention modules of a trainer's family rotate. On a CPU an exact one rotates elsewhere, so nothing is kept."""
    module = sys.modules[type(attention).__module__]
    own = module.apply_rotary_pos_emb

    def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        found = own(query, key, cos, sin)
        if not sin.is_floating_point():
            for name, states in zip(("query", "key"), found, strict=True):
                witness.add(f"{witness.layer}.{name}", states.transpose(1, 2))
        return found

    module.apply_rotary_pos_emb = rotate  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = own  # type: ignore[attr-defined]


def of_text(witness: Witness, prompt: int, tokens: int) -> dict[str, torch.Tensor]:
    """Put together what an engine computed of one text, a prompt of that length and so many tokens: first the prompt, then each token.

    The texts of the passes have prompts of lengths of their own, further apart than they have tokens.
    """
    parts: dict[str, list[torch.Tensor]] = {}
    for at, (positions, found) in enumerate(zip(witness.positions, witness.passes, strict=True)):
        rows = _prompt_rows(positions, prompt) if at == 0 else ((positions >= prompt) & (positions < prompt + tokens)).nonzero()[:, 0]
        for name, states in found.items():
            parts.setdefault(name, []).append(states[rows[rows < len(states)]])
    return {name: torch.cat(rows) for name, rows in parts.items()}


def _prompt_rows(positions: torch.Tensor, prompt: int) -> torch.Tensor:
    begins = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
    for start, end in pairwise(begins):
        if end - start == prompt and int(positions[start + prompt - 1]) == prompt - 1:
            return torch.arange(start, end, device=positions.device)
    raise ValueError(f"no prompt of {prompt} tokens in the first pass, whose texts begin at {begins}")


def merged(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the parts of merged products of a trainer's pass together, as vLLM has them."""
    whole = {name: states for name, states in found.items() if "/" not in name}
    parts = sorted(name for name in found if "/" in name)
    for name in {part.split("/")[0] for part in parts}:
        whole[name] = torch.cat([found[part] for part in parts if part.split("/")[0] == name], dim=-1)
    return whole
