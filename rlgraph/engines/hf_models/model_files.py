"""Check that a model folder can be loaded, by its config, its tokenizer and the headers of its weights, before anything starts.

It takes milliseconds, and nothing is looked up on a network. Weights are read only where a head is tied by the config and in the files.
"""

import functools
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlgraph.engines.hf_models.text_part import is_head, text_config
from rlgraph.errors import DataError, shown

MOST_HEADER_BYTES = 100_000_000  # what safetensors takes itself
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32}
BITS |= {"U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
PLAIN = {"llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "granite"}  # whose layers have the shapes that `_plain_shapes` says
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
AGAIN = "write the folder again, or copy it anew"

Shapes = dict[str, tuple[int, ...]]


def check_loadable(path: str | Path, config: Mapping[str, Any]) -> None:
    """Raise DataError, which names the file, for an unknown architecture, broken weights or weights of other shapes than `config` says."""
    folder = Path(path)
    _check_config(folder / "config.json", config)
    shapes: Shapes = {}
    places: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, shape in header_shapes(file).items():
            shapes[name], places[name] = shape, file
    _check_index(folder, places)
    if not shapes:
        raise DataError(f"model '{path}': its *.safetensors hold no tensor; {AGAIN}")
    for name, wanted in _expected(config, shapes).items():
        if shapes[name] != wanted:
            raise DataError(
                f"'{places[name]}': '{name}' has the shape {list(shapes[name])}, but by config.json it is {list(wanted)}: "
                "weights and config are of two models; take both from one"
            )
    _check_layers(folder, config, shapes)
    _check_tied(folder, shapes, places)


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config["model_type"] not in CONFIG_MAPPING_NAMES:
        import transformers

        raise DataError(
            f"'{file}': model_type {shown(config['model_type'])} is unknown to transformers {transformers.__version__}; install a "
            "version that knows it, or take another model: code that comes with a model is not run"
        )
    if config.get("is_encoder_decoder"):
        raise DataError(f"'{file}': an encoder with a decoder; rlgraph takes decoder-only text models")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        if not isinstance(config[name], int) or isinstance(config[name], bool) or config[name] < 1:
            raise DataError(f"'{file}': {name} is {config[name]!r:.60}; it is a whole number above 0")


def header_shapes(file: Path) -> Shapes:
    """Read name and shape of every tensor from the header of a safetensors file. Raises DataError for one that is broken or cut off."""
    return {name: shape for name, (_, shape, _) in header_places(file).items()}


def header_places(file: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Read of every tensor the dtype as the header names it, the shape, and the byte at which it begins; raises the same errors."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            kind = (
                "a pointer of Git LFS, not the weights: run `git lfs pull`" if start.startswith(b"version ") else f"no safetensors; {AGAIN}"
            )
            raise DataError(f"'{file}' has {size} bytes and is {kind}")
        try:
            header = json.loads(opened.read(length))
            tensors = {name: (*_tensor(found), found) for name, found in header.items() if name != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError) as broken:
            raise DataError(f"'{file}': its header is broken ({broken!s:.80}); {AGAIN}") from None
    end = max((ends for _, ends, _ in tensors.values()), default=0)
    if size != 8 + length + end:
        raise DataError(f"'{file}' has {size} bytes, but by its header {8 + length + end}: it was cut off or overwritten; {AGAIN}")
    return {name: (found["dtype"], shape, 8 + length + found["data_offsets"][0]) for name, (shape, _, found) in tensors.items()}


def _tensor(found: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Read a tensor's shape and its end offset. Raises ValueError if its bytes do not match its shape."""
    shape, (begin, end) = tuple(map(int, found["shape"])), found["data_offsets"]
    bits = BITS[found["dtype"]]
    for size in shape:
        bits *= size
    if end - begin != bits // 8:
        raise ValueError(f"a tensor of shape {list(shape)} and {found['dtype']} has {end - begin} bytes")
    return shape, end


def _check_index(folder: Path, places: Mapping[str, Path]) -> None:
    """Raise DataError if the index names a file or a weight that is missing."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    try:
        weights = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, TypeError, KeyError) as broken:
        raise DataError(f"'{index}' is no index of weights ({broken!s:.80}); {AGAIN}") from None
    for name, file in weights.items():
        if name not in places or not (folder / file).exists():
            lacks = f"there is no '{file}'" if not (folder / file).exists() else f"'{file}' lacks the weight '{name}'"
            raise DataError(f"'{index}': {lacks}; download what is missing")


def _expected(config: Mapping[str, Any], shapes: Shapes) -> Shapes:
    """The shapes by the config, of the weights in the folder."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    known: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    if config["model_type"] in PLAIN and "quantization_config" not in config:
        known |= {"lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
        known |= _plain_shapes(config, shapes)
    return {name: wanted for name, wanted in known.items() if name in shapes}


def _plain_shapes(config: Mapping[str, Any], shapes: Shapes) -> Shapes:
    hidden, heads = config["hidden_size"], config.get("num_attention_heads")
    if not heads or not config.get("intermediate_size"):
        return {}
    size, narrow = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
    of = {
        "self_attn.q_proj.weight": (heads * size, hidden),
        "self_attn.k_proj.weight": (narrow * size, hidden),
        "self_attn.v_proj.weight": (narrow * size, hidden),
        "self_attn.o_proj.weight": (hidden, heads * size),
        "mlp.gate_proj.weight": (config["intermediate_size"], hidden),
        "mlp.up_proj.weight": (config["intermediate_size"], hidden),
        "mlp.down_proj.weight": (hidden, config["intermediate_size"]),
    }
    found: Shapes = {}
    for name in shapes:
        _, _, part = name.partition("layers.")
        wanted = of.get(part.partition(".")[2])
        if wanted is not None:
            found[name] = wanted
    return found


def _check_layers(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> None:
    there = {int(found[1]) for name in shapes if (found := LAYER.search(name))}
    missing = sorted(set(range(config["num_hidden_layers"])) - there) if there else []
    if missing:
        raise DataError(
            f"model '{folder}': config.json has {config['num_hidden_layers']} layers, but the weights of layers {missing[:8]} are "
            f"in no *.safetensors; {AGAIN}"
        )
    if config["model_type"] in PLAIN and len(there) > config["num_hidden_layers"]:
        raise DataError(f"model '{folder}': config.json has {config['num_hidden_layers']} layers, the weights have {len(there)}; {AGAIN}")


def _check_tied(folder: Path, shapes: Shapes, places: Mapping[str, Path]) -> None:
    """Raise DataError if the config ties the head to the embeddings and the files hold two that differ: readers would not agree on one."""
    for head in filter(is_head, shapes):
        same = (name for name in shapes if name != head and shapes[name] == shapes[head] and ("embed" in name or "wte" in name))
        embeddings = next(same, None)
        if embeddings is None or not text_config(folder).tie_word_embeddings:
            continue
        one, other = (places[name] for name in (head, embeddings))
        if not _equal(one, head, other, embeddings, one.stat().st_mtime_ns, other.stat().st_mtime_ns):
            raise DataError(
                f"'{places[head]}': '{head}' differs from '{embeddings}', but config.json ties them, as a folder with a merged adapter of "
                'the head does; write "tie_word_embeddings": false into config.json, so that every engine reads both'
            )


@functools.cache
def _equal(one: Path, first: str, other: Path, second: str, *modified: int) -> bool:
    """Compare two tensors of files, which were `modified` at these times, bit for bit and some rows at a time."""
    import torch
    from safetensors import safe_open

    with safe_open(one, "pt") as ones, safe_open(other, "pt") as others:
        left, right = ones.get_slice(first), others.get_slice(second)
        for row in range(0, left.get_shape()[0], 4096):
            a, b = left[row : row + 4096], right[row : row + 4096]
            if not torch.equal(a.contiguous().view(torch.uint8), b.to(a.dtype).contiguous().view(torch.uint8)):
                return False
    return True


def check_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model folder, from its files alone. Raises DataError where it cannot be."""
    from rlgraph.engines.hf_models.tokenizer import load_tokenizer

    folder = Path(path)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tokenizer_config.json")
    files = [folder / name for name in names if (folder / name).exists()]
    if not files:
        raise DataError(
            f"model '{path}': no tokenizer among its files; copy tokenizer.json and tokenizer_config.json from where it comes from"
        )
    for file in files:
        if file.suffix == ".json":
            try:
                json.loads(file.read_text())
            except ValueError as broken:
                raise DataError(f"'{file}' is not JSON ({broken!s:.80}); {AGAIN}") from None
    try:
        return load_tokenizer(folder)
    except Exception as broken:
        raise DataError(f"'{files[0]}': the tokenizer cannot be loaded ({type(broken).__name__}: {broken!s:.120}); {AGAIN}") from broken
