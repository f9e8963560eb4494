"""Models with the shapes of Qwen3, dense and mixtures, and random weights, to measure speed: nothing is downloaded, their text is noise."""

import json
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

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
MIXTURES = {  # hidden, layers, heads, key-value heads, intermediate of an expert, experts, those that a token takes; not tied
    "pair-moe": (64, 2, 4, 2, 64, 4, 2),  # for the first seconds of a script on a CPU
    "30B-A3B": (2048, 48, 32, 4, 768, 128, 8),
    "30B-A3B-8": (2048, 8, 32, 4, 768, 128, 8),  # eight layers of it: 90 GB of weights, gradients and moments
}
SEEING = {  # the language model of Qwen2.5-VL as above, then its tower: layers, hidden, heads, intermediate, those that see all of an image
    "toy-VL": ((64, 2, 2, 1, 128, True), (2, 32, 2, 48, [1])),  # for the first seconds of a script on a CPU
    "3B-VL": ((2048, 36, 16, 2, 11008, True), (32, 1280, 16, 3420, [7, 15, 23, 31])),
}
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)
VOCAB, CONTEXT = 151936, 40960
BLOCK = 15_485_863  # numbers, a prime: rows of a matrix do not repeat


def config(shape: str) -> Any:
    """Make the configuration of a shape."""
    if shape in SEEING:
        return seeing_config(shape)
    from transformers import Qwen3Config, Qwen3MoeConfig

    own: dict[str, Any] = {}
    if shape in MIXTURES:
        hidden, layers, heads, kv_heads, intermediate, experts, used = MIXTURES[shape]
        own = {"moe_intermediate_size": intermediate, "num_experts": experts, "num_experts_per_tok": used, "norm_topk_prob": True}
        tied = False
    else:
        hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[shape]
    return (Qwen3MoeConfig if own else Qwen3Config)(
        **own,
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
        architectures=[f"Qwen3{'Moe' if own else ''}ForCausalLM"],
    )


def seeing_config(shape: str) -> Any:
    """Make the configuration of a shape that reads images, for a byte tokenizer with `MARKS` behind its bytes."""
    from transformers import Qwen2_5_VLConfig

    (hidden, layers, heads, kv_heads, intermediate, tied), (depth, width, tower_heads, tower_intermediate, whole) = SEEING[shape]
    axes = [hidden // heads // 8, hidden // heads * 3 // 16, hidden // heads * 3 // 16]
    text = {"vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "max_position_embeddings": CONTEXT,
            "eos_token_id": VOCAB - 1, "bos_token_id": None, "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": axes}}  # fmt: skip
    tower = {"depth": depth, "hidden_size": width, "num_heads": tower_heads, "intermediate_size": tower_intermediate,
             "fullatt_block_indexes": whole, "out_hidden_size": hidden, "patch_size": 14, "window_size": 112}  # fmt: skip
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, range(257, 257 + len(names)), strict=True))
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=tied, **ids,
                            architectures=["Qwen2_5_VLForConditionalGeneration"])  # fmt: skip


def causal_model(shape: str) -> Any:
    """Make a model of a shape, on the device of the context and with random weights."""
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3ForCausalLM, Qwen3MoeForCausalLM

    if shape in SEEING:
        return Qwen2_5_VLForConditionalGeneration(config(shape))
    return (Qwen3MoeForCausalLM if shape in MIXTURES else Qwen3ForCausalLM)(config(shape))


def random_model(shape: str, folder: str | Path, *, headers_only: bool = False) -> str:
    """Find a folder with a model of that shape and a byte tokenizer; the first call makes it, as fast as the disk writes.

    Matrices hold normal numbers of deviation 0.02 from one block that repeats, norms hold ones. With `headers_only` the file of weights
    is a hole of the right size: for engines that are started with random weights.
    """
    from rlgraph.engines.hf.pretrained import byte_tokenizer

    target = Path(folder) / f"qwen3-{shape}{'-headers' if headers_only else ''}"
    if (target / "config.json").exists():
        return str(target)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    _write(target / "model.safetensors", dict(tensors_of(shape)), hole=headers_only)
    tokenizer = byte_tokenizer()
    if shape in SEEING:
        from transformers import Qwen2VLImageProcessorPil

        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
        tokenizer.chat_template = TEMPLATE
        Qwen2VLImageProcessorPil(patch_size=14, merge_size=2).save_pretrained(target)
    tokenizer.save_pretrained(target)
    config(shape).save_pretrained(target)
    return str(target)


def tensors_of(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a folder: of experts that are one parameter in memory, each has its own."""
    with torch.device("meta"):
        named = {name: tuple(p.shape) for name, p in causal_model(shape).named_parameters()}
    for name, size in named.items():
        place, _, last = name.rpartition(".")
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ()) if len(size) == 3 else ()
        for kind, expert in product(kinds, range(size[0])):
            yield f"{place}.{expert}.{kind}.weight", (size[1] // len(kinds), size[2])
        if not kinds:
            yield name, size


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
    with torch.device("meta"):
        return sum(p.numel() for p in causal_model(shape).parameters())


def multiplied(shape: str) -> int:
    """Count the parameters that a token is multiplied with: all but an embedding, which is a look-up, and the experts of other tokens."""
    found = parameters(shape)
    if shape not in MIXTURES:
        hidden, *_, tied = SHAPES[shape]
        return found - (0 if tied else VOCAB * hidden)
    hidden, layers, _, _, intermediate, experts, used = MIXTURES[shape]
    return found - VOCAB * hidden - layers * (experts - used) * 3 * hidden * intermediate
