"""Which models and machines are proven to be exact on a GPU."""

from importlib.metadata import version
from typing import Any

import torch

from rlgraph.engines.exact.gpu_table import head_size
from rlgraph.errors import DataError

FAMILIES = ("llama", "qwen3")  # of those that are exact on a CPU
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
    biased = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    if config.model_type not in FAMILIES or size not in HEADS or biased:
        raise DataError(
            f"exact=True: a model of the family '{config.model_type}' with heads of {size}{' and biases' if biased else ''} is not proven "
            f"to be exact on a GPU; {' and '.join(FAMILIES)} without biases are, with heads of {' or '.join(map(str, HEADS))}"
        )
    _check_rotation(config.rope_parameters)


def _check_rotation(given: dict[str, Any]) -> None:
    if given.get("rope_type", "default") != "default" or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise DataError(f"rope_parameters {given}: on a GPU exact=True is proven for plain rotations alone; leave it out")
