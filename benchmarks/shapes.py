"""Models with the shapes of Qwen3 and random weights, to measure speed: nothing is downloaded, and their text has no meaning."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import BinaryIO

import torch

SHAPES = {  # hidden, layers, heads, key-value heads, intermediate, tied
    "toy": (64, 2, 2, 1, 128, True),  # for the first seconds of a script on a CPU
    "pair": (64, 2, 4, 2, 128, True),  # the same with heads that two ranks share
    "0.2B": (768, 6, 6, 2, 2048, True),  # 0.6 GB in float32: what two cores load in seconds
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "1.7B": (2048, 28, 16, 8, 6144, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "8B-4": (4096, 4, 32, 8, 12288, False),  # four layers of the 8B
    "32B": (5120, 64, 64, 8, 25600, False),
}
VOCAB, CONTEXT = 151936, 40960
BLOCK = 15_485_863  # numbers, a prime: rows of a matrix do not repeat


def config(shape: str) -> object:
    """Make the configuration of a shape."""
    from transformers import Qwen3Config

    hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[shape]
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        intermediate_size=intermediate,
        max_position_embeddings=CONTEXT,
        rope_theta=1_000_000,
        tie_word_embeddings=tied,
        eos_token_id=VOCAB - 1,
        bos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )


def random_model(shape: str, folder: str | Path, *, headers_only: bool = False) -> str:
    """Find a folder with a model of that shape and a byte tokenizer; the first call makes it, as fast as the disk writes.

    Matrices hold normal numbers of deviation 0.02 from one block that repeats, norms hold ones. With `headers_only` the file of weights
    is a hole of the right size: for engines that are started with random weights.
    """
    from transformers import Qwen3ForCausalLM

    from rlgraph.engines.hf_models.pretrained import byte_tokenizer

    target = Path(folder) / f"qwen3-{shape}{'-headers' if headers_only else ''}"
    if (target / "config.json").exists():
        return str(target)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Qwen3ForCausalLM(config(shape)).named_parameters()}
    _write(target / "model.safetensors", shapes, hole=headers_only)
    byte_tokenizer().save_pretrained(target)
    config(shape).save_pretrained(target)  # type: ignore[attr-defined]
    return str(target)


def _write(file: Path, shapes: dict[str, tuple[int, ...]], *, hole: bool) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        if hole:
            out.truncate(8 + len(text) + offset)
            return
        for index, shape in enumerate(shapes.values()):
            _write_numbers(out, torch.Size(shape).numel(), index if len(shape) > 1 else None)


def _write_numbers(out: BinaryIO, count: int, drawn: int | None) -> None:
    """Write so many bfloat16: normal ones from place `drawn` of the block on, or ones."""
    block = _normal() if drawn is not None else torch.ones(min(count, BLOCK), dtype=torch.bfloat16)
    at = 7919 * (drawn or 0) % len(block)  # no two matrices begin alike
    while count:
        part = block[at : at + count]
        out.write(part.view(torch.uint8).numpy().data)
        count, at = count - len(part), 0


@cache
def _normal() -> torch.Tensor:
    return torch.empty(BLOCK).normal_(0, 0.02, generator=torch.Generator().manual_seed(0)).bfloat16()


def parameters(shape: str) -> int:
    """Count the parameters of the model, a tied head once."""
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in Qwen3ForCausalLM(config(shape)).parameters())
