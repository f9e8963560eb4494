"""Test whether rlgraph computes a model's log-probs as the model itself does, on a small random model of the same architecture.

Each way that batches are laid out is compared, in float32 and over a few hundred tokens, with transformers' plain attention over each
sequence alone. A layer that looks further than its window, or a state that runs on into the next sequence, is off by 0.1 to 3 nats.
"""

import re
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from rlgraph.batching.packing import pack, pack_flat, plan_micro_batches
from rlgraph.engines.forward import packed_attention
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.hf.backbone import backbone_of, layers_of
from rlgraph.engines.hf.model_files import FamilyOptions, text_config
from rlgraph.engines.hf.pretrained import check_model, quiet
from rlgraph.engines.hf.unloaded import causal_class
from rlgraph.errors import DataError

# A small random model of the same making as a large one: its attention and its kinds of layers, at a width that costs nothing.
#
# Windows, blocks and soft caps come down with the length of a test's sequences and the size of its scores, so that leaving one out is seen.

VOCAB, WINDOW, CAP, EXPERTS, WIDTH, CHUNK = 96, 12, 2.0, 8, 64, 16
MOST_LAYERS, MOST_PARAMETERS = 16, 100_000_000
# The lengths beyond which layers compute something else.
LENGTHS = re.compile(
    "sliding_window|window_size$|^attention_chunk_size$|^block_size$|^index_topk$|^indexer_budget$|^floor_scale$|^local_attention$"
)
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
                return _build_miniature(config, shrink, implementation)
        except Exception as failure:  # noqa: BLE001, a configuration that cannot be narrowed is tried in its own width
            error = error or failure
    assert error is not None
    raise error


def _build_miniature(config: Any, shrink: Callable[[Any], dict[str, Any]], implementation: str) -> Any:
    def make() -> Any:
        small = type(config).from_dict(shrink(config))
        return causal_class(small).from_config(small, dtype=torch.float32, attn_implementation=implementation)

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
    blocks = FamilyOptions(config).layers_block_type
    if isinstance(blocks, list) and len(blocks) == count:
        kinds = list(zip(kinds, blocks, strict=True))
    picks = _pick_layers([repr(kind) for kind in kinds], found.get("num_kv_shared_layers") or 0)
    names = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
    found |= {name: len(picks) for name in names if found.get(name) == count}
    found |= {name: [value[layer] for layer in picks] for name, value in lists.items()}
    if "num_kv_shared_layers" in found:
        found["num_kv_shared_layers"] = sum(layer >= count - (found["num_kv_shared_layers"] or 0) for layer in picks)
    if found.get("per_layer_config"):  # settings of single layers, by their numbers
        by_layer = {int(layer): value for layer, value in found["per_layer_config"].items()}
        found["per_layer_config"] = {place: by_layer[layer] for place, layer in enumerate(picks) if layer in by_layer}
    found |= {name: VOCAB for name in ("vocab_size", "vocab_size_per_layer_input") if name in found}
    found |= {name: 0 for name in TOKENS if name in found}  # no config takes an id outside, some none
    for name, value in found.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 0 and LENGTHS.search(name):
            found[name] = min(value, WINDOW)
        elif isinstance(value, int | float) and "softcap" in name:
            found[name] = min(value, CAP)
    return found


def _pick_layers(kinds: list[str], sharing: int) -> list[int]:
    """Pick the first layers that include each kind, at least 2 and at most `MOST_LAYERS`.

    If the last ones are `sharing` keys and values of earlier ones, pick one layer of each kind: a prefix would reach too deep.
    """
    if sharing:
        kinds = [f"{kind} {layer < len(kinds) - sharing}" for layer, kind in enumerate(kinds)]
        return [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    return [*range(min(max(2, *(kinds.index(kind) + 1 for kind in set(kinds))), MOST_LAYERS, len(kinds)))]


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
    found |= {name: [min(size, WIDTH) for size in found[name]] for name in WIDTHS if isinstance(found.get(name), list)}
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


PADDED, SHARED, FLAT, FLAT_SHARED = "padded", "shared", "flat", "flat with shared prompts"
PATHS = (PADDED, SHARED, FLAT, FLAT_SHARED)
NEAR = 1e-3  # nats, at most, in float32
NEAR_HALF = 0.06  # nats, the median, of a kernel that takes bfloat16: single tokens go to other experts by rounding, and are far off
Found = TypeVar("Found")
SHAPE = ((40, (21, 30)), (37, (13, 17)), (12, (34, 6)))  # tokens of each prompt and of its responses: longer than a window


@dataclass(frozen=True)
class SelfTestResult:
    """The largest error of a layout's log-probs, in nats, and the limit that rounding explains; or the error that prevented them."""

    off: float = float("inf")
    limit: float = NEAR
    error: str = ""

    @property
    def right(self) -> bool:
        return not self.error and self.off <= self.limit

    def __str__(self) -> str:
        return self.error or f"its log-probs are off by {self.off:.2g} nats"


@dataclass(frozen=True)
class BatchLayout:
    """The layout of a trainer's batches: packed `flat` or padded, with or without `shared` prompts.

    `note` gives the reason if it is not the layout asked for.
    """

    flat: bool
    shared: bool
    note: str = ""


def trainer_layout(
    path: str | Path, *, flat: bool, shared: bool = True, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> BatchLayout:
    """Choose a correct layout for a model: the one asked for, else without shared prompts, else padded, then with them if they are right.

    Raises DataError if none is correct, or for a model that transformers cannot make.
    """
    asked = (FLAT, FLAT_SHARED) if flat and shared else (FLAT,) if flat else (PADDED, SHARED)
    found = _run_cached(trainer_results, path, asked, device=device, dtype=dtype)
    if flat and found[FLAT].right:
        right = all(result.right for result in found.values())
        note = "" if right else f"{_name_folder(path)}: each response has its own prompt, since rlgraph cannot share prompts in flat passes"
        return BatchLayout(flat=True, shared=shared and right, note=note if right else f"{note} ({found[FLAT_SHARED]})")
    if flat:
        found = {FLAT: found[FLAT]} | _run_cached(trainer_results, path, (PADDED, SHARED), device=device, dtype=dtype)
    where = _name_folder(path)
    if not found[PADDED].right:
        raise DataError(
            f"{where}: rlgraph's log-probs differ from the model's own forward pass: {found[PADDED]}; train a model of a family in "
            "docs/developers/families.md, or skip this test at your own risk: self_test=False"
        )
    wrong = [f"{way} ({result})" for way, result in found.items() if not result.right]
    note = f"{where}: batches are padded{'' if found[SHARED].right else ', each response with its own prompt'}, since rlgraph cannot lay"
    return BatchLayout(flat=False, shared=found[SHARED].right, note=f"{note} them out {' or '.join(wrong)}" if wrong else "")


def _name_folder(path: str | Path) -> str:
    return f"model '{path}' ({check_model(path).model_type})"


def check_generator(path: str | Path, *, device: str = "cpu") -> None:
    """Raise DataError for a model whose responses the engine `transformers` does not sample from the model's distribution."""
    result = _run_cached(generator_result, path, device=device)
    if not result.right:
        raise DataError(
            f"model '{path}' ({check_model(path).model_type}): the engine 'transformers' does not decode like the model's own forward "
            f"pass: {result}; use engine='vllm', or skip this test at your own risk: self_test=False"
        )


_FOUND: dict[tuple[Any, ...], Any] = {}


def _run_cached(test: Callable[..., Found], path: str | Path, *ways: Any, **place: Any) -> Found:
    """Run a test of a model's configuration, or take what it found in this process before: its small model has the same weights."""
    text = (Path(path) / "config.json").read_bytes()
    key = test, text, *ways, *place.values()
    if key not in _FOUND:
        _FOUND[key] = test(path, *ways, **place)
    found: Found = copy(_FOUND[key])
    return found


def trainer_results(
    path: str | Path, ways: Sequence[str] = PATHS, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, SelfTestResult]:
    """Try the ways in which a trainer lays out its batches. On a GPU rows packed flat take the kernel for `dtype`.

    Raises DataError for a model that transformers cannot make.
    """
    model, batch, expected = _score_small_model(path, device)
    found = {}
    error = "" if dtype == torch.float32 else _half_error(model, batch, dtype)
    for way in ways:
        if error:
            found[way] = SelfTestResult(error=error)
            continue
        if way != PADDED and any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
            found[way] = SelfTestResult(error="its layers have a convolution over time, which runs on into the next sequence")
            continue
        flat = way in (FLAT, FLAT_SHARED)
        half = flat and device != "cpu" and dtype != torch.float32
        kind = packed_attention.FLAT_HALF if half else packed_attention.FLAT if flat else packed_attention.PADDED
        found[way] = _result(partial(_laid_out, model, batch, way, kind), expected, batch, half)
    return found


def _half_error(model: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> str:
    """Run a pass in `dtype` as a trainer does, its tables in float32, and return the error: "" if there is none."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    half = deepcopy(model)
    for parameter in half.parameters():
        parameter.data = cast(parameter.data)
    try:
        for layer in layers_of(backbone_of(half)):
            layer.register_forward_pre_hook(lambda layer, *given: tree_map(cast, given), with_kwargs=True)
        with torch.no_grad(), quiet():
            _laid_out(half, batch, PADDED, packed_attention.PADDED)
    except Exception as error:  # noqa: BLE001, whatever the code of a model raises
        return f"in {str(dtype).removeprefix('torch.')} {_reason(error)}"
    return ""


def generator_result(path: str | Path, *, device: str = "cpu") -> SelfTestResult:
    """Try the engine `transformers`: prompts padded on the left, one token at a time behind a cache.

    Raises DataError for a model that transformers cannot make.
    """
    model, batch, expected = _score_small_model(path, device)
    return _result(lambda: _decode_rows(model, batch), expected, batch)


def small_model(path: str | Path) -> Any:
    """The small model of a folder's configuration, with transformers' plain attention. Raises DataError where there is none."""
    kind = check_model(path).model_type
    packed_attention.register()
    try:
        return miniature(text_config(path), "eager")
    except Exception as error:  # whatever the code of a model raises
        raise DataError(
            f"model '{path}' ({kind}): no small test model can be built from its configuration ({_reason(error)}); rlgraph supports "
            "only decoder-only text models of transformers; without the test: self_test=False"
        ) from error


def _score_small_model(path: str | Path, device: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """Build the small model of a folder's configuration, a batch, and the log-probs of its own forward."""
    model, batch = small_model(path).to(device), _batch()
    try:
        return model, batch, score_single_rows(model, batch)
    except Exception as error:  # whatever the code of a model raises
        raise DataError(
            f"{_name_folder(path)}: transformers' own forward over a sequence fails ({_reason(error)}); rlgraph supports only decoder-only "
            "text models of transformers"
        ) from error


@torch.no_grad()
def score_single_rows(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-probs `[B, T]` of the responses by the model's own forward over each row, without padding; 0 behind its end."""
    found = torch.zeros(batch["responses"].shape)
    for row, (prompt, prompt_mask, response, mask) in enumerate(zip(*batch.values(), strict=True)):
        tokens, size = torch.cat([prompt[prompt_mask], response[mask]]).to(model.device), int(mask.sum())
        table = model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)[-size - 1 : -1]
        found[row, :size] = table.gather(-1, tokens[-size:, None])[:, 0].cpu()
    return found


def _result(
    scores: Callable[[], torch.Tensor], expected: torch.Tensor, batch: dict[str, torch.Tensor], half: bool = False
) -> SelfTestResult:
    limit = NEAR_HALF if half else NEAR
    try:
        with torch.no_grad(), quiet():
            apart = (scores() - expected).abs()[batch["response_mask"]]
    except Exception as error:  # noqa: BLE001, whatever the code of a model raises
        return SelfTestResult(limit=limit, error=_reason(error))
    off = (apart.median() if half else apart.max()).item()
    return SelfTestResult(off if off == off else float("inf"), limit)


def _laid_out(model: Any, batch: dict[str, torch.Tensor], way: str, kind: str) -> torch.Tensor:
    packed_attention.install(model, kind)
    head = PolicyHead(model)
    assert len(head.layers)  # by which a trainer shards a model; it raises DataError
    found = torch.zeros(batch["responses"].shape)
    flat = way in (FLAT, FLAT_SHARED)
    for sequences in plan_micro_batches(batch, 1, 1 << 20, flat=flat, shared=way in (SHARED, FLAT_SHARED))[0]:
        micro_batch = (pack_flat if flat else pack)(batch, sequences)
        with torch.set_grad_enabled(way == PADDED):
            scores = head(micro_batch.to(model.device))[0]
            if way == PADDED:  # a model may refuse to be trained, as Reformer does outside of its training mode
                scores.sum().backward()
        found[micro_batch.rows[micro_batch.row], micro_batch.column] = scores.detach().cpu()
    model.zero_grad()
    return found


def _decode_rows(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    from rlgraph.engines.transformers.engine import score_by_decoding

    packed_attention.install(model, packed_attention.PADDED)
    prompts = [prompt[mask].tolist() for prompt, mask in zip(batch["prompts"], batch["prompt_mask"], strict=True)]
    return torch.where(batch["response_mask"], score_by_decoding(model, prompts, batch["responses"]), 0)


def _batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    rows = [(prompt, size) for prompt, sizes in SHAPE for size in sizes]
    most, width = max(prompt for prompt, _ in rows), max(size for _, size in rows)
    prompts = torch.randint(1, VOCAB, (len(SHAPE), most), generator=draw).repeat_interleave(2, 0)
    responses = torch.randint(1, VOCAB, (len(rows), width), generator=draw)
    prompt_mask = torch.arange(most)[None] >= torch.tensor([most - prompt for prompt, _ in rows])[:, None]
    mask = torch.arange(width)[None] < torch.tensor([size for _, size in rows])[:, None]
    return {"prompts": prompts * prompt_mask, "prompt_mask": prompt_mask, "responses": responses * mask, "response_mask": mask}


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"
