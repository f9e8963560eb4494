"""What an exact trainer asks of models and machines, and the table of rotations that it has in common with its engine on a GPU."""

from importlib.metadata import version
from typing import Any

import torch

from rlgraph.engines.hf.model_files import FamilyOptions, text_config
from rlgraph.errors import DataError

FAMILIES = ("llama", "qwen2", "qwen3")  # by tests/engines/test_exact.py


def check(path: str, model_type: str, dtype: str) -> None:
    """Raise DataError for a model that is not proven to be exact, or whose dtype is that of GPUs and that is not proven to be so there."""
    if model_type not in FAMILIES:
        raise DataError(
            f"exact=True with '{path}': a model of the family '{model_type}' is not proven to be exact; proven are: {', '.join(FAMILIES)}"
        )
    if dtype != "float32":
        check_model(text_config(path))


# The cosines and sines by which engine and trainer rotate queries and keys on a GPU, computed by the same lines.


def head_size(config: Any) -> int:
    """How many numbers a head of a model has."""
    size: int = FamilyOptions(config).head_dim or config.hidden_size // config.num_attention_heads
    return size


def table_of(config: Any, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The cosines, then the sines, of all positions of a model: `[positions, D]` for heads of D numbers.

    Computed in float64 on the host, so that no machine rounds otherwise.
    """
    given = config.rope_parameters
    size = head_size(config)
    speeds = given["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * speeds
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype).to(device)


# Which models and machines are proven to be exact on a GPU.

GPU_FAMILIES = ("llama", "qwen3")  # of those that are exact on a CPU
HEADS = (64, 128)  # sizes


def check_machine() -> None:
    """Raise DataError for a GPU or a vLLM that it is not proven with."""
    major, minor = torch.cuda.get_device_capability()
    if major != 9 or not version("vllm").startswith("0.26."):
        raise DataError(
            f"exact=True is proven on Hopper GPUs (9.0) with vLLM 0.26, and this is {torch.cuda.get_device_name()} ({major}.{minor}) with "
            f"vLLM {version('vllm')}; leave it out"
        )


def check_model(config: Any) -> None:
    """Raise DataError for a model that is exact on a CPU and not proven to be so on a GPU."""
    size = head_size(config)
    options = FamilyOptions(config)
    biased = options.attention_bias or options.mlp_bias
    if config.model_type not in GPU_FAMILIES or size not in HEADS or biased:
        raise DataError(
            f"exact=True: a model of the family '{config.model_type}' with heads of {size}{' and biases' if biased else ''} is not proven "
            f"to be exact on a GPU; {' and '.join(GPU_FAMILIES)} without biases are, with heads of {' or '.join(map(str, HEADS))}"
        )
    _check_rotation(config.rope_parameters)


def _check_rotation(given: dict[str, Any]) -> None:
    if given.get("rope_type", "default") != "default" or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise DataError(f"rope_parameters {given}: on a GPU exact=True is proven only for plain rotary embeddings; leave it out")


# What exact attention asks of a model, on a CPU and on a GPU.


def check_plain(module: Any, *settings: Any) -> None:
    """Raise DataError for an attention module with a window, a soft cap or sinks: `settings` that are not None."""
    if any(setting is not None for setting in settings):
        raise DataError(f"{type(module).__name__} has a window, a soft cap or sinks, which exact=True does not support; leave it out")
