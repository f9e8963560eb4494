"""A process with a vLLM engine in it that is driven step by step, started by a test: `python vllm_stepping.py FOLDER OUT`."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from stepping import stepped

from rlgraph.engines.vllm.engine import VllmEngine


def main(folder: Path, out: Path) -> None:
    engine = VllmEngine(folder, max_model_len=64, dtype="float32", kv_cache_bytes=64 << 20, threads=1)
    torch.save(stepped(engine, load_file(folder / "model.safetensors")), out)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
