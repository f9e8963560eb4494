"""Settings of an adapter: low-rank matrices beside the frozen ones of a model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlgraph import settings
from rlgraph.errors import DataError, GraphError, show_value
from rlgraph.settings import Count, Name, Natural, Positive

ALL_LINEAR: Literal["all-linear"] = "all-linear"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # the files of PEFT's folder
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "granite")  # by tests/engines/test_lora.py
WITHOUT_EFFECT: tuple[
    tuple[str, tuple[Any, ...]], ...
] = (  # entries of PEFT's config that change what an adapter computes, and the values that do not
    ("peft_type", ("LORA",)),
    ("bias", ("none", None)),
    ("use_rslora", (False, None)),
    ("use_dora", (False, None)),
    ("rank_pattern", ({}, None)),
    ("alpha_pattern", ({}, None)),
    ("modules_to_save", ([], None)),
    ("layers_to_transform", ([], None)),
    ("fan_in_fan_out", (False, None)),
    ("lora_bias", (False, None)),
    ("trainable_token_indices", ([], None)),
    ("target_parameters", ([], None)),
    ("exclude_modules", ([], None)),
)


@settings.refuse_unknown
@dataclass(frozen=True)
class LoRA:
    """Train low-rank adapters and freeze the model: `y = x Wᵀ + (alpha / rank) x Aᵀ Bᵀ`, with A `[rank, in]` and B `[out, rank]`.

    Learning rates are usually about ten times higher than for full training. There is no dropout: log-probs would differ between two
    forward passes, and a step would depend on its micro-batches. Raises GraphError for a value out of its range.
    Source: Hu et al. 2021, arXiv:2106.09685.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"), adapter=rg.LoRA(rank=32), optimizer=rg.AdamW(lr=1e-5))
    >>> policy.adapter.scale
    1.0
    >>> rg.LoRA(rank=8, targets=("q_proj", "v_proj")).scale
    4.0

    * `rank`: the rank of the matrices, e.g. 8 to 64.
    * `alpha`: sets the scale of the adapter's product, `alpha / rank`.
    * `targets`: the projections with an adapter, by the last part of their names; "all-linear" is all linear layers but the head.
    * `seed`: draws the initial A, as PEFT does. B starts at 0.
    * `folder`: an adapter that PEFT or rlgraph wrote; both matrices start from it.
    * `base`: "nf4" stores the frozen matrices that have adapters with 4 bits per element (QLoRA, arXiv:2305.14314). It needs
      bitsandbytes (the extra `lowbit`) and one process. `base_log_probs`, generators and exports all use the quantised model.
    """

    rank: Count
    alpha: Positive = 32.0
    targets: Literal["all-linear"] | tuple[Name, ...] = ALL_LINEAR
    seed: Natural = 0
    folder: Name | None = None
    base: Literal["nf4"] | None = None

    def __post_init__(self) -> None:
        settings.check(self)
        if self.targets == ():
            raise GraphError(f"LoRA(targets=()): without a target nothing is trained; leave it out for {show_value(ALL_LINEAR)}")

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / self.rank

    @classmethod
    def load(cls, folder: str | Path) -> "LoRA":
        """Read the settings of an adapter's folder; the model then begins with its matrices.

        Raises DataError for a folder without an adapter, and for one that computes more than a low-rank product: DoRA, rank-stabilised
        scales, ranks by pattern, trained biases or whole modules.
        """
        config = read_config(folder)
        targets = config.get("target_modules")
        return cls(
            rank=config["r"],
            alpha=config["lora_alpha"],
            targets=targets if isinstance(targets, str) else tuple(sorted(targets or ())),  # type: ignore[arg-type] # the class refuses other texts
            folder=str(folder),
        )


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read PEFT's config of an adapter. Raises DataError as `LoRA.load` does."""
    where = f"adapter '{folder}'"
    for name in (CONFIG, TENSORS):
        if not (Path(folder) / name).is_file():
            raise DataError(f"{where}: it has no {name}; pass a folder that save_pretrained of PEFT, or an export of an adapter, wrote")
    try:
        config: dict[str, Any] = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
        missing = [name for name in ("r", "lora_alpha", "target_modules") if name not in config]
    except (ValueError, OSError, TypeError) as broken:
        raise DataError(f"{where}: {CONFIG} cannot be read ({broken}); write the adapter again") from None
    if missing:
        raise DataError(f"{where}: {CONFIG} has no {missing[0]}; write the adapter again")
    for name, plain in WITHOUT_EFFECT:
        if config.get(name) not in plain and name in config:
            raise DataError(
                f"{where}: {CONFIG} has {name}={show_value(config[name])}; rlgraph computes plain LoRA: train with "
                f"{name}={show_value(plain[0])}"
            )
    return config
