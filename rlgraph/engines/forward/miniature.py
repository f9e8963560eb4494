"""A small random model of the same making as a large one: its attention and its kinds of layers, at a width that costs nothing.

Windows, blocks and soft caps come down with the length of a test's sequences and the size of its scores, so that leaving one out is seen.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

VOCAB, WINDOW, CAP, EXPERTS, WIDTH, CHUNK = 96, 11, 2.0, 8, 64, 16
MOST_LAYERS, MOST_PARAMETERS = 16, 100_000_000
# The lengths beyond which layers compute something else.
LENGTHS = re.compile("sliding_window|window_size$|^attention_chunk_size$|^block_size$|^index_topk$")
GAIN = 1.5  # of random matrices over those that keep the size of what they multiply: attention that looks somewhere
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHUNKS = ("chunk_size", "mamba_chunk_size")  # that a recurrence is computed in: of no effect but on the time of a short sequence
MAMBA_HEADS = {
    "mamba_n_heads": "mamba_d_head",
    "n_mamba_heads": "mamba_headdim",
    "mamba_num_heads": "mamba_head_dim",
    "num_heads": "head_dim",
}
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "ffn_dim")


def miniature(config: Any, implementation: str, seed: int = 0) -> Any:
    """Build a random float32 model that transformers makes of a configuration much like the one given.

    Raises what the making raises, and ValueError where the model would still be large.
    """
    error: Exception | None = None
    for shrink in (_narrow, _shallow):
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return _built(config, shrink, implementation)
        except Exception as failure:  # noqa: BLE001, a configuration that cannot be narrowed is tried in its own width
            error = error or failure
    assert error is not None
    raise error


def _built(config: Any, shrink: Callable[[Any], dict[str, Any]], implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    def make() -> Any:
        small = type(config).from_dict(shrink(config))
        return AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation=implementation)

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make().parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"cut to a few layers it still has {size / 1e6:.0f} million parameters")
    model = make().eval()
    _draw(model)
    with torch.no_grad():
        model(input_ids=torch.arange(3)[None], use_cache=False)
    return model


def _draw(model: Any) -> None:
    """Draw every parameter at random, so that those that begin as 0 or 1, like sinks, biases and norms, have an effect."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, GAIN * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _shallow(config: Any) -> dict[str, Any]:
    """The configuration with as few layers as show every kind of them, and a small vocabulary."""
    found: dict[str, Any] = config.to_dict()
    for name in ("architectures", "model_type", "torch_dtype", "dtype", "quantization_config", "_attn_implementation"):
        found.pop(name, None)
    count = config.num_hidden_layers
    lists = {name: value for name, value in found.items() if isinstance(value, list) and len(value) == count}
    kinds: list[Any] = list(zip(*lists.values(), strict=True)) if lists else [()] * count
    blocks = getattr(config, "layers_block_type", None)  # of models whose kinds follow from a period
    if isinstance(blocks, list) and len(blocks) == count:
        kinds = list(zip(kinds, blocks, strict=True))
    keep = _covering([repr(kind) for kind in kinds])
    names = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
    found |= {name: keep for name in names if found.get(name) == count} | {name: value[:keep] for name, value in lists.items()}
    found |= {"vocab_size": VOCAB} | {name: None for name in TOKENS if name in found}
    for name, value in found.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 0 and LENGTHS.search(name):
            found[name] = min(value, WINDOW)
        elif isinstance(value, int | float) and "softcap" in name:
            found[name] = min(value, CAP)
    return found


def _covering(kinds: list[str]) -> int:
    """Count the first layers that include each kind, at least 2 and at most `MOST_LAYERS`."""
    return min(max(2, *(kinds.index(kind) + 1 for kind in set(kinds))), MOST_LAYERS, len(kinds))


def _narrow(config: Any) -> dict[str, Any]:
    """The shallow configuration with few heads of their own size, few small experts and small perceptrons."""
    found = _shallow(config)
    heads = found.get("num_attention_heads")
    if isinstance(heads, int) and heads > 2:
        keys = found.get("num_key_value_heads") or heads
        size = found.get("head_dim") or config.hidden_size // heads
        few, shared = min(keys, 2 if size <= 128 else 1), min(heads // keys, 2)
        found |= {"num_attention_heads": few * shared, "hidden_size": few * shared * size}
        found |= {"num_key_value_heads": few} if found.get("num_key_value_heads") else {}
    most = dict.fromkeys(WIDTHS, WIDTH) | dict.fromkeys(EXPERT_COUNTS, EXPERTS) | dict.fromkeys(CHUNKS, CHUNK)
    most |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    found |= {name: min(found[name], limit) for name, limit in most.items() if isinstance(found.get(name), int)}
    found |= _narrow_mamba(found)
    return found


def _narrow_mamba(found: dict[str, Any]) -> dict[str, Any]:
    """The heads of a state-space layer, which make up its inner width, a multiple of the hidden one."""
    expand = found.get("mamba_expand", found.get("expand"))
    for heads, size in MAMBA_HEADS.items():
        if expand and isinstance(found.get(heads), int) and isinstance(found.get(size), int):
            hidden = found["hidden_size"] if "num_attention_heads" in found else 2 * found[size]
            return {"hidden_size": hidden, heads: max(int(expand * hidden) // found[size], 1)}
    return {}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings about a made-up configuration."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
