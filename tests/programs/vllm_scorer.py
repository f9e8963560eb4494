"""A process that scores rows with vLLM, forked by a test: `be_scorer`."""

from pathlib import Path

import torch


def be_scorer(folder: Path, batch: Path, out: Path) -> None:
    from rlgraph.engines.vllm.scorer import VllmScorer

    engine = VllmScorer(folder, dtype="float32", threads=1, context=64, kv_cache_bytes=64 << 20)
    rows = torch.load(batch)
    torch.save({"top": engine.top_scores(rows, 4), "all": engine.top_scores(rows, 1000), "own": engine.scores(rows)}, out)
    engine.close()
