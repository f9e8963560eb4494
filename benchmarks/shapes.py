"""Models with the shapes of Qwen3 and random weights, to measure speed: nothing is downloaded, and their text has no meaning."""

import json
import shutil
from pathlib import Path

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


def config(shape: str) -> object:
    """Return the configuration of a shape."""
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
    """Return a folder with a model of that shape and a byte tokenizer, made at the first call.

    With `headers_only` the file of weights is a hole of the right size: for engines that are started with random weights.
    """
    from transformers import Qwen3ForCausalLM

    from rlgraph.engines.hf_models.pretrained import byte_tokenizer

    target = Path(folder) / f"qwen3-{shape}{'-headers' if headers_only else ''}"
    if (target / "config.json").exists():
        return str(target)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    device = "meta" if headers_only else "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM(config(shape))
        torch.set_default_dtype(default)
    if headers_only:
        _write_hole(target / "model.safetensors", {name: tuple(p.shape) for name, p in model.named_parameters()})
    else:
        model.save_pretrained(target)
        del model
        torch.cuda.empty_cache()  # the engine that comes takes most of this GPU
    byte_tokenizer().save_pretrained(target)
    config(shape).save_pretrained(target)  # type: ignore[attr-defined]
    return str(target)


def _write_hole(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + offset)


def parameters(shape: str) -> int:
    """Count the parameters of the model, a tied head once."""
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in Qwen3ForCausalLM(config(shape)).parameters())
