"""An adapter on disk as PEFT writes it: its names, its config, and its matrices read back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import safe_open

from rlgraph.engines.lora.modules import PEFT
from rlgraph.values.lora import CONFIG, TENSORS, LoRA

Numbers = tuple[int, ...]


class SavedAdapter(msgspec.Struct, frozen=True):
    """The settings of an adapter, as checkpoints name it."""

    rank: int
    alpha: float
    targets: Literal["all-linear"] | tuple[str, ...]
    base: str | None = None  # how its model was rounded

    @classmethod
    def of(cls, lora: LoRA) -> "SavedAdapter":
        """The settings of a trained adapter."""
        return cls(lora.rank, lora.alpha, lora.targets, lora.base)

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / self.rank


def peft_names(shapes: Mapping[str, Numbers]) -> dict[str, tuple[str, Numbers]]:
    """Name the matrices of an adapter as PEFT does: (trainer's name, shape) by each name.

    >>> peft_names({"model.layers.0.self_attn.q_proj.lora_A.weight": (8, 64)})
    {'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight': ('model.layers.0.self_attn.q_proj.lora_A.weight', (8, 64))}
    """
    return {PEFT + name: (name, shape) for name, shape in shapes.items()}


def write_config(folder: Path, adapter: SavedAdapter, base: str, names: Mapping[str, Numbers]) -> None:
    """Write adapter_config.json; `base` is the hub id or the folder of the model, `names` are those of the trainer's matrices."""
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "revision": None,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Read the matrices of an adapter's folder, float32, by the trainer's names."""
    with safe_open(folder / TENSORS, "pt") as tensors:
        return {name.removeprefix(PEFT): tensors.get_tensor(name).float() for name in tensors.keys()}  # noqa: SIM118
