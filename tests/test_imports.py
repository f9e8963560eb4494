"""Importing rlgraph is light: it brings neither Ray nor vLLM nor transformers."""

import subprocess
import sys

import rlgraph as rg


def test_import_brings_no_heavy_library() -> None:
    code = "import sys, rlgraph; print([m for m in ('ray', 'vllm', 'transformers', 'torch.distributed.fsdp') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_has_a_docstring() -> None:
    for name in rg.__all__:
        value = getattr(rg, name)
        assert callable(value) is False or value.__doc__ or name == "Columns", name
