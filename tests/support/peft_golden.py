"""Make `golden/peft.safetensors`: what PEFT computes for a small adapter. With PEFT installed, run `python tests/support/peft_golden.py`.

The matrices are drawn by names and counts alone, so the file holds only PEFT's results: log-probs, gradients, and the merged model's.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

GOLDEN = Path(__file__).parents[1] / "golden" / "peft.safetensors"
RANK, ALPHA, TARGETS = 2, 8.0, ("q_proj", "v_proj", "o_proj", "down_proj")


def matrices(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Draw the matrices of an adapter, A and B, by the order of their names."""
    draw = torch.Generator().manual_seed(5)
    return {name: 0.1 * torch.randn(shapes[name], generator=draw) for name in sorted(shapes)}


def tokens() -> torch.Tensor:
    return torch.randint(1, 288, (2, 14), generator=torch.Generator().manual_seed(6))


def loss_of(log_probs: torch.Tensor) -> torch.Tensor:
    return -(log_probs * torch.linspace(-1, 2, log_probs.numel()).view_as(log_probs)).sum()


def main(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from support.tiny import tiny_llama
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama(folder), dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, config).eval()
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    for name, values in matrices({name: tuple(p.shape) for name, p in trained.items()}).items():
        trained[name].data.copy_(values)

    def log_probs() -> torch.Tensor:
        table = model(tokens()).logits[:, :-1].log_softmax(-1)
        return table.gather(-1, tokens()[:, 1:, None])[..., 0]

    own = log_probs()
    loss_of(own).backward()
    found = {"log_probs": own.detach(), **{f"grad.{name}": p.grad for name, p in trained.items()}}
    with model.disable_adapter():
        found["base"] = log_probs().detach()
    model.save_pretrained(folder / "peft")
    config_text = (folder / "peft" / "adapter_config.json").read_text()
    merged = model.merge_and_unload()
    found["merged"] = merged.model.layers[1].mlp.down_proj.weight.detach()[:4]
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, GOLDEN, {"adapter_config": config_text})


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
