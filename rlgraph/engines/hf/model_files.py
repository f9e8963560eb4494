"""Model folders: found by hub id or path, and checked by config, tokenizer and headers of weights before anything starts.

A multimodal config has the config of its language model in `text_config`, and the weights of it below `language_model.`,
`model.language_model.` or `model.text_model.`. rlgraph trains and publishes this text part as a text model; the towers of other
modalities stay as the folder has them.
"""

import contextlib
import functools
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from rlgraph import notices
from rlgraph.errors import DataError, show_value

T = TypeVar("T")

# The text part of a model folder: of a folder of a text model all of it, of a multimodal one its language model.

NESTED = "text_config"
PREFIXES = ("model.language_model.", "language_model.", "model.text_model.")
VISION = "vision."  # begins the names of a tower's parameters in a trained model, of which it is a module
PLAIN_PREFIXES = ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")  # of multimodal folders without one of the former
FLAT_CONFIGS = ("qwen2_5_vl",)  # types whose published config.json has the entries of the language model beside the tower's
UNSCALED = ("aya_vision", "cohere2_vision")  # types whose class of transformers ignores the text model's logit_scale
DRAFTS = ("mtp.", "model.mtp.")  # layers that predict several tokens at once, which no trainer and no plain decoding uses


def is_nested(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a multimodal model with a language model in it."""
    return isinstance(config.get(NESTED), dict) or config.get("model_type") in FLAT_CONFIGS


def text_config(path: str | Path) -> Any:
    """Load the configuration of a folder's text model by transformers, all defaults filled in."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    if text is not config:
        tied = json.loads((Path(path) / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings")
        text.tie_word_embeddings = text.tie_word_embeddings if tied is None else tied
        if config.model_type in UNSCALED and text.logit_scale != 1.0:
            notices.here.say(
                f"model '{path}' is trained and decoded with its logit_scale={text.logit_scale:g}, as by vLLM; transformers' class for "
                f"'{config.model_type}' leaves that out, so it would sample from an export at {text.logit_scale:g} times the temperature"
            )
    return text


class Option(Generic[T]):
    """A setting that the configurations of only some families of models have; the others count as having `default`, as None does."""

    def __init__(self, default: T) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, options: "FamilyOptions", owner: type) -> T:
        # Read when it is asked for: some families raise for settings that differ by layer.
        value: T | None = getattr(options.config, self._name, None)
        return self._default if value is None else value


class FamilyOptions:
    """The settings of a configuration of transformers that not all families have."""

    attention_bias = Option(False)
    mlp_bias = Option(False)
    head_dim = Option[int | None](None)
    num_experts = Option[int | None](None)
    num_local_experts = Option[int | None](None)
    layer_types = Option[Sequence[str]](())
    layers_block_type = Option[Sequence[str] | None](None)  # of models whose kinds of layers follow from a period
    quantization_config = Option[Any](None)
    rope_parameters = Option[Mapping[str, Any]](MappingProxyType({}))
    logit_scale = Option[float | None](None)
    lm_head_multiplier = Option[float | None](None)
    logits_scaling = Option[float | None](None)
    final_logit_softcapping = Option[float | None](None)
    attn_logit_softcapping = Option[float | None](None)

    def __init__(self, config: Any) -> None:
        self.config = config


def rotary_limit(config: Any) -> int | None:
    """Read off a text model's configuration the most tokens that a row may have; None where the rotary factors depend on no length.

    Of the types "longrope" and "dynamic" transformers computes other factors if any row of a batch is longer, for all its rows.
    """
    rope = FamilyOptions(config).rope_parameters
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]  # or one for each type of layer
    found = [
        config.max_position_embeddings if "dynamic" in kind["rope_type"] else kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope" or "dynamic" in kind.get("rope_type", "")
    ]
    return min(found, default=None)


def text_entries(path: str | Path, config: dict[str, Any]) -> dict[str, Any]:
    """The entries of a config.json that describe the text model, under the type of the whole model."""
    if not is_nested(config):
        return config
    return {**config, **text_config(path).to_dict(), "model_type": config["model_type"]}


def is_text(name: str, nested: bool) -> bool:
    """Whether a tensor of a folder belongs to the text model.

    >>> is_text("model.language_model.norm.weight", True), is_text("vision_tower.norm.weight", True), is_text("mtp.norm.weight", False)
    (True, False, False)
    """
    return not name.startswith(DRAFTS) and (not nested or name.startswith((*PLAIN_PREFIXES, *PREFIXES)))


def is_head(name: str) -> bool:
    """Whether a tensor of a folder is the language head."""
    return in_text_model(name) == "lm_head.weight"


def in_text_model(name: str) -> str:
    """The name of a tensor of a multimodal folder as a folder of the text model alone would have it.

    >>> in_text_model("language_model.model.norm.weight"), in_text_model("model.language_model.norm.weight")
    ('model.norm.weight', 'model.norm.weight')
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return name
    rest = name.removeprefix(prefix)
    return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"


# Check that a model folder can be loaded, by its config, its tokenizer and the headers of its weights, before anything starts.
#
# It takes milliseconds, and nothing is looked up on a network. Weights are read only where a head is tied by the config and in the files.

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
    for name, wanted in _expected_shapes(config, shapes).items():
        if shapes[name] != wanted:
            raise DataError(
                f"'{places[name]}': '{name}' has the shape {list(shapes[name])}, but by config.json it is {list(wanted)}: "
                "weights and config belong to different models; take both from one"
            )
    _check_layers(folder, config, shapes)
    _check_tied(folder, shapes, places)


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config["model_type"] not in CONFIG_MAPPING_NAMES:
        import transformers

        raise DataError(
            f"'{file}': model_type {show_value(config['model_type'])} is unknown to transformers {transformers.__version__}; install a "
            "version that knows it, or use another model: code that comes with a model is never run"
        )
    if config.get("is_encoder_decoder"):
        raise DataError(f"'{file}': an encoder with a decoder; rlgraph supports only decoder-only text models")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        if not isinstance(config[name], int) or isinstance(config[name], bool) or config[name] < 1:
            raise DataError(f"'{file}': {name} is {config[name]!r:.60}; it must be a whole number above 0")


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
            pointer = start.startswith(b"version ")
            kind = "a pointer of Git LFS, not the weights: run `git lfs pull`" if pointer else f"not in safetensors format; {AGAIN}"
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
        raise DataError(f"'{index}' is not an index of weights ({broken!s:.80}); {AGAIN}") from None
    for name, file in weights.items():
        if name not in places or not (folder / file).exists():
            lacks = f"there is no '{file}'" if not (folder / file).exists() else f"'{file}' lacks the weight '{name}'"
            raise DataError(f"'{index}': {lacks}; download the missing files")


def _expected_shapes(config: Mapping[str, Any], shapes: Shapes) -> Shapes:
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
    folder = Path(path)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tokenizer_config.json")
    files = [folder / name for name in names if (folder / name).exists()]
    if not files:
        raise DataError(
            f"model '{path}': no tokenizer among its files; copy tokenizer.json and tokenizer_config.json from the original model"
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


# Models by hub id: found in the cache of huggingface_hub, or downloaded once; a folder of that cache names its revision.

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # of a model's repository; code that comes with it is not run
OFFLINE = "HF_HUB_OFFLINE"  # the environment variable that keeps libraries from asking a hub
PROBE_S = 5.0  # in which a hub that can be reached answers


def is_hub_id(path: str) -> bool:
    """Whether a path is not a folder of this machine, but may be the id of a model on a hub.

    >>> is_hub_id("Qwen/Qwen3-0.6B"), is_hub_id("models"), is_hub_id("./models/mine")
    (True, False, False)
    """
    return HUB_ID.fullmatch(path) is not None and not path.startswith(".") and not Path(path).exists()


def find_cached_folder(model: str) -> str | None:
    """Find the folder of a hub id in the cache, without a network; None if there is none, or half of one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, local_files_only=True, allow_patterns=list(WANTED)))
    except LocalEntryNotFoundError:
        return None
    return str(folder) if (folder / "config.json").exists() and any(folder.glob("*.safetensors")) else None


def download_folder(model: str) -> str:
    """The folder of a hub id: that of the cache, else a download of the revision that the hub names now.

    Raises DataError at once where the hub cannot be reached, or has no such model.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    found = find_cached_folder(model)
    if found is not None:
        return found
    fix = f"give a folder that holds config.json and *.safetensors, or fetch it where there is a network: `hf download {model}`"
    try:
        HfApi().model_info(model, timeout=PROBE_S)  # asked once: a download would try again and again
        return snapshot_download(model, allow_patterns=list(WANTED))
    except RepositoryNotFoundError:
        raise DataError(
            f"model '{model}': neither a folder here nor a model on {constants.ENDPOINT} that this user may read; {fix}"
        ) from None
    except OfflineModeIsEnabled:
        raise DataError(f"model '{model}': no such folder, it is not in the cache, and HF_HUB_OFFLINE forbids a download; {fix}") from None
    except Exception as error:  # noqa: BLE001 (of the library by which huggingface_hub asks, which its versions change)
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise DataError(
            f"model '{model}': no such folder, it is not in the cache, and {constants.ENDPOINT} could not provide it ({why}); {fix}"
        ) from None


def revision_of(folder: str) -> tuple[str, str] | None:
    """The hub id and the revision of a folder in the cache of huggingface_hub; None for any other folder.

    >>> revision_of("/cache/models--Qwen--Qwen3-0.6B/snapshots/c1899de")
    ('Qwen/Qwen3-0.6B', 'c1899de')
    """
    repository, snapshots, revision = Path(folder).parts[-3:] if len(Path(folder).parts) > 3 else ("", "", "")
    if snapshots != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/", 1), revision


@contextlib.contextmanager
def no_hub() -> Iterator[None]:
    """Keep libraries from asking a hub while they load a folder: without a network they would try for a minute."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def forbid_downloads() -> Iterator[None]:
    """Keep this process, and those that it starts meanwhile, from asking a hub while an engine loads.

    Afterwards the environment is as it was: a reward or a tool in the same process is a user's own, and may ask.
    """
    with no_hub():  # which reads the variable as the user has it, so before it is set
        given = os.environ.get(OFFLINE)
        os.environ[OFFLINE] = "1"
        try:
            yield
        finally:
            os.environ.pop(OFFLINE, None)
            os.environ.update({} if given is None else {OFFLINE: given})


# Load the tokenizer of a model folder, where possible without `AutoTokenizer`, whose imports take three seconds.

# The classes that AutoTokenizer takes for these types of models, by what the folder names: a test compares.
KNOWN = {("llama", "TokenizersBackend"), ("qwen2", "Qwen2Tokenizer"), ("qwen3", "Qwen2Tokenizer")}


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer that transformers' `AutoTokenizer` would load."""
    import transformers

    kind = class_of(Path(path))
    with no_hub():
        return getattr(transformers, kind or "AutoTokenizer").from_pretrained(path)


def class_of(folder: Path) -> str | None:
    """The class of a folder's tokenizer, if its files name a known one; else None."""
    try:
        config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    except (OSError, ValueError):  # AutoTokenizer raises its own error
        return None
    if not isinstance(config, dict) or not isinstance(tokenizer, dict) or "auto_map" in tokenizer:
        return None
    kind = tokenizer.get("tokenizer_class")
    return str(kind) if (config.get("model_type"), kind) in KNOWN else None
