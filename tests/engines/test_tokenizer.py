"""A tokenizer is loaded without a look at the model's class only where AutoTokenizer would take the same one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny import tiny_qwen
from transformers import AutoTokenizer

from rlgraph.engines.hf.model_files import KNOWN, class_of, load_tokenizer

TEXTS = ["2 + 3 = 5\n7 + 6 = 13", "naïve déjà vu", "<|end|> <|im_start|>user", ""]


@pytest.mark.parametrize(("model_type", "kind"), sorted(KNOWN))
def test_the_class_is_the_one_that_auto_tokenizer_takes(tied: Path, tmp_path: Path, model_type: str, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tied.iterdir():
        if not file.name.endswith(".safetensors"):
            (folder / file.name).write_bytes(file.read_bytes())
    for name, change in {"config.json": {"model_type": model_type}, "tokenizer_config.json": {"tokenizer_class": kind}}.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    assert class_of(folder) == kind
    ours, auto = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(auto)
    assert ours(TEXTS)["input_ids"] == auto(TEXTS)["input_ids"]


def test_any_other_is_left_to_auto_tokenizer(tied: Path, tmp_path: Path) -> None:
    assert class_of(tiny_qwen(tmp_path / "qwen", "qwen3")) is None  # its tokenizer is another type's
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (changed / name).write_bytes((tied / name).read_bytes())
    assert class_of(changed) == "TokenizersBackend"
    for config in ({"tokenizer_class": "LlamaTokenizer"}, {"auto_map": {"AutoTokenizer": "mine.Tokenizer"}}):
        (changed / "tokenizer_config.json").write_text(json.dumps(json.loads((tied / "tokenizer_config.json").read_text()) | config))
        assert class_of(changed) is None
    (changed / "tokenizer_config.json").write_text("not JSON")
    assert class_of(changed) is None


def test_it_brings_no_compiler(tied: Path) -> None:
    load = f"from rlgraph.engines.hf.model_files import load_tokenizer; load_tokenizer({str(tied)!r})"
    code = f"import sys; {load}; print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert found.stdout.strip() == "False"
