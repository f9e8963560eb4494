"""Tiny tokenizers with the chat templates of published models, and the special tokens that these use."""

import json
from pathlib import Path
from typing import Any

from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlgraph.engines.hf.pretrained import tiny_model

FOLDER = Path(__file__).parent / "chat_templates"
CHATML = ("<|im_start|>", "<|im_end|>")
SPECIAL: dict[str, tuple[str, ...]] = {  # of each template; the tokenizers of the first three put their first token before any text
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]"),
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "smollm2": CHATML,
}
FRONT = ("llama3", "gemma", "mistral")


def model_with(folder: Path, name: str, context: int = 4096) -> Path:
    """Make a tiny model whose tokenizer has the template and the special tokens of a published one."""
    tiny_model(folder, vocab=320)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    bos, eos, *rest = SPECIAL[name]
    tokenizer.add_special_tokens({"bos_token": bos, "eos_token": eos, "additional_special_tokens": rest})
    if name in FRONT:
        ids = [(bos, tokenizer.convert_tokens_to_ids(bos))]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)
