"""Families of causal models, and what rlgraph does with each.

`python tests/support/families.py docs/developers/families.md` writes the table.

They are all types of transformers' own mapping, each with its default configuration, and some with other settings.
"""

import logging
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from support import seeing

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[1:3]]

WINDOWS = {"use_sliding_window": True, "max_window_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # those that are no type of transformers alone: a type, and settings
    "qwen2, with windows": ("qwen2", WINDOWS),
    "qwen3, with windows": ("qwen3", WINDOWS),
    "phi3, with windows": ("phi3", {"sliding_window": 2047}),
    "bert-generation, as a decoder": ("bert-generation", {"is_decoder": True}),
    "minimax, first layer linear": ("minimax", {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
}
QWEN3_5_VISION = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
}
NESTED: dict[str, dict[str, Any]] = {  # multimodal folders, by their type of transformers: a small tower beside the language model
    "gemma3": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "qwen3_5": QWEN3_5_VISION,
    "qwen3_5_moe": QWEN3_5_VISION,
}
NESTED_PART, WIDTH = ", text part", 110
COLUMNS = {
    "padded": "trainer, padded",
    "shared": "trainer, shared prompts",
    "flat": "trainer, flat (GPU)",
    "generator": '`engine="transformers"`',
}
TEXT = """# Families

`python tests/support/families.py docs/developers/families.md` writes this page with transformers {version}. It lists all types of
transformers' causal language models, each with its default configuration, and some with other settings.
Trainers accept {right} of them and refuse {refused} by name before a run starts. {skipped} are skipped.

* **right**: log-probs and gradients equal the model's own forward pass over each row separately, to 1e-4 in float32.
* **own prompts**, **padded**: a packed layout would change log-probs, so the trainer uses this one instead.
* **refused**: an error names the model's folder and the reason in the last column.

`tests/engines/test_families.py` checks each row of the table. It trains tiny random models in every layout and with every value
of `recompute`, and with adapters in the [families that have them](../memory.md#adapters). Their rows are shorter and longer than each
window and block; masks have gaps, and one response is empty.

"""
KINDS = ["sliding_attention", "full_attention"]
# fmt: off
# What default configurations lack to make a model of, or leave out of its layers, by type of the text model.
COMPLETE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": KINDS, "num_hidden_layers": 2,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in KINDS},
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2}, "ffn_config": {"moe_num_experts": 4}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_hidden_layers": 3},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"],
    },
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "num_key_value_heads": 2, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
# What the rules of `SIZES` do not make fit together, by type.
FITTING: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "blenderbot": {"max_position_embeddings": 128},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]} for kind in KINDS},
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n_text": {
        "layer_types": KINDS * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0], "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "global_head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"block_multiple_of": 16},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"index_n_heads": 2},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 8},
    "qwen4_exp_text": {"head_dim": 16, "indexer_head_dim": 16, "indexer_budget": 24},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16]},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 8},
}
# The most that a field of a tiny configuration has; the first rule of a name counts.
SIZES = [(re.compile(name), size) for name, size in (
    (r"vocab_size|^ngram_vocab_size_base$|^make_ngram_vocab_size_divisible_by$", 96),
    (r"sliding_window|window_size|^attention_chunk_size$|^block_size$|^local_attention$|attn_chunk_length$|^floor_scale$|^index_topk$", 24),
    (r"^original_max_position_embeddings$|^indexer_budget$", 24),
    (r"^index_block_size$", 8),
    (r"^index_topk_blocks$|experts_per_tok|^moe_k$|^moe_topk$|topk_group$|^n_group$|key_value_heads$|^num_kv_heads$", 2),
    (r"heads$|^n_head$|experts$|expert_num$", 4),
    (r"^qk_head_dim$", 32),
    (r"rotary_dim", 8),
    (r"head_dim$|^d_head$|^dim_head$|^mamba_headdim$|_rank$", 16),
    (r"^hidden_size$|^d_model$|^n_embd$|^emb_dim$|^embedding_(size|dim)$|^word_embed_proj_dim$|^lru_width$|^attention_hidden_size$", 64),
    (r"intermediate_size|ffn_dim|ffn_hidden|^n_inner$|^d_inner$|^dim_ff$|^dff$", 48),
)]
# fmt: on
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "encoder_layers")


def default_config(name: str) -> Any:
    """Make the default configuration of a family, complete enough to make a model of. Raises what its class does."""
    from transformers import AutoConfig

    kind, settings = FAMILIES.get(name, (name, {}))
    config = AutoConfig.for_model(kind, **{**COMPLETE.get(kind, {}), **settings, **NESTED.get(kind, {})})
    text = config.get_text_config()
    if text is not config and text.model_type in COMPLETE:
        config.text_config = type(text)(**COMPLETE[text.model_type])
    return config


def tiny_config(name: str) -> Any:
    """Make a configuration like that of a family's text model, with a layer of each kind, and all sizes small: windows and blocks too."""
    config = default_config(name).get_text_config()
    given, kind = config.to_dict(), config.model_type
    found: dict[str, Any] = _sizes(given)
    if given.get("num_key_value_heads") == given.get("num_attention_heads") and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    count = config.num_hidden_layers
    lists = {field: value for field, value in given.items() if isinstance(value, list) and len(value) == count}
    kinds = [repr(layer) for layer in zip(*lists.values(), strict=True)] or [""] * count
    picks = [kinds.index(layer) for layer in dict.fromkeys(kinds)]
    picks = picks if len(picks) > 1 else [0, min(1, count - 1)]
    for field, value in lists.items():
        sizes = _sizes({field: value[0]})
        found[field] = [sizes.get(field, value[layer]) for layer in picks]
    found |= {field: len(picks) for field in LAYERS if given.get(field) in (count, count // 2)}
    found |= {field: 0 for field in ("bos_token_id", "eos_token_id", "pad_token_id") if field in given}
    rope = given.get("rope_parameters")
    found |= {"rope_parameters": rope | _sizes(rope)} if isinstance(rope, dict) else {}
    return type(config)(**{**COMPLETE.get(kind, {}), **FAMILIES.get(name, (kind, {}))[1], **found, **FITTING.get(kind, {})})


def _sizes(given: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        most = next((size for rule, size in SIZES if rule.search(name)), None)
        if most is not None and type(value) is int:
            found[name] = min(value, most)
    return found


def folder_of(name: str, parent: Path) -> Path:
    """Make a folder with a small random model of a family, its heads as wide as those of the published ones."""
    from rlgraph.engines.forward.self_test import miniature

    folder, kind = parent / name, name.removesuffix(NESTED_PART)
    if kind in NESTED:
        return nested_folder(kind, folder)
    if kind in seeing.KINDS:
        return seeing.folder_of(kind, folder)
    return save(miniature(default_config(name), "eager"), folder)


def tiny_folder(name: str, parent: Path) -> tuple[Path, Any]:
    """Make a folder with a tiny random model of a family, and the model, or of a multimodal one the text model in it."""
    from transformers import AutoModelForCausalLM

    from rlgraph.engines.forward.self_test import _draw
    from rlgraph.engines.hf.pretrained import quiet

    folder = parent / "tiny"
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in NESTED:
            kind = {"dtype": torch.float32, "attn_implementation": "eager"}
            return nested_folder(name, folder), AutoModelForCausalLM.from_pretrained(folder, **kind).eval()
        model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32, attn_implementation="eager").eval()
        _draw(model)
    return save(model, folder), model


def save(model: Any, folder: Path) -> Path:
    from rlgraph.engines.hf.pretrained import byte_tokenizer, quiet

    with quiet():
        model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def nested_folder(kind: str, folder: Path) -> Path:
    """Make a folder with a small random multimodal model, whose language model is as a family's."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from rlgraph.engines.forward.self_test import _draw, miniature
    from rlgraph.engines.hf.pretrained import quiet

    with quiet():
        text = miniature(AutoConfig.for_model(kind).get_text_config(), "eager").config
        config = AutoConfig.for_model(kind, text_config=text.to_dict(), **NESTED[kind])
        config.tie_word_embeddings = text.tie_word_embeddings
        model = AutoModelForImageTextToText.from_config(config)
        _draw(model)
    return save(model, folder)


def outcome(name: str, parent: Path) -> tuple[dict[str, str], str]:
    """Say what rlgraph does with the default configuration of a family, by the columns of the table, and why it refuses a trainer."""
    from safetensors.torch import save_file

    from rlgraph.engines.forward.self_test import FLAT_SHARED, generator_result, trainer_results
    from rlgraph.engines.hf.pretrained import quiet
    from rlgraph.errors import DataError

    folder = parent / "default"
    with quiet():
        try:
            default_config(name).save_pretrained(folder)
        except Exception:  # noqa: BLE001, whatever the code of a configuration raises
            return dict.fromkeys(COLUMNS, "skipped"), "transformers has no default configuration"
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    try:
        found = {**trainer_results(folder), "generator": generator_result(folder)}
    except DataError as error:
        return dict.fromkeys(COLUMNS, "refused"), reason(str(error))
    right = {way: result.right for way, result in found.items()}
    instead = {"shared": "own prompts", "flat": "padded"}  # what a trainer does where only that layout is out
    words = {way: "right" if right[way] else instead[way] if way in instead and right["padded"] else "refused" for way in COLUMNS}
    words |= {"flat": "own prompts"} if right["flat"] and not right[FLAT_SHARED] else {}
    why = "" if right["padded"] else reason(found["padded"].error) or "other log-probs than the model's own forward"
    return words, why


def reason(text: str) -> str:
    """Cut an error down to what does not depend on a machine."""
    found = re.sub(r"^model '[^']*'(?: \([^)]*\))?: |^DataError: |; .*|[\n|].*", "", text, flags=re.DOTALL)
    return found if len(found) <= WIDTH else f"{found[: WIDTH - 1]}…"


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES})


def is_listed_by_its_text_model(name: str) -> bool:
    """Whether the text model of a multimodal family is a family too, and no folder of the whole is made to try it."""
    return name not in NESTED and default_config(name).get_text_config().model_type in {*names()} - {FAMILIES.get(name, (name,))[0]}


def table_row(name: str, words: dict[str, str], why: str) -> str:
    return f"| {name} | " + " | ".join([*(words[column] for column in COLUMNS), why]) + " |"


def page() -> str:
    """Write the page with the table of all families."""
    rows = []
    for name in names():
        with tempfile.TemporaryDirectory() as parent:
            rows.append(table_row(name, *outcome(name, Path(parent))))
    counts = Counter(line.split(" | ")[1] for line in rows)
    head = ["| family | " + " | ".join([*COLUMNS.values(), "why"]) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    return TEXT.format(version=transformers_version(), **counts) + "\n".join([*head, *rows]) + "\n"


def transformers_version() -> str:
    import transformers

    return ".".join(transformers.__version__.split(".")[:2])


if __name__ == "__main__":
    logging.disable()
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
