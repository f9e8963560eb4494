"""A process that scores rows with vLLM, started by a test: `python scoring_process.py FOLDER BATCH OUT`."""

import sys
from pathlib import Path

import torch

from rlgraph.engines.vllm.scorer import VllmScorer


def main(folder: Path, batch: Path, out: Path) -> None:
    engine = VllmScorer(folder, dtype="float32", threads=1, context=64, kv_cache_bytes=64 << 20)
    rows = torch.load(batch)
    torch.save({"top": engine.top_scores(rows, 4), "all": engine.top_scores(rows, 1000), "own": engine.scores(rows)}, out)
    engine.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
