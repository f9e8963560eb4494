"""More sequences than tokens of the context: every recorded step keeps to the sequences' blocks, and responses repeat."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.tiny import tiny_qwen

from rlgraph.engines.vllm.engine import VllmEngine
from rlgraph.values.sampling import Sampling

ROWS = 512
engine = VllmEngine(
    tiny_qwen(Path("model"), "qwen3", head=64), max_model_len=64, kv_cache_bytes=256 << 20, max_sequences=ROWS, memory=0.2, dtype="bfloat16"
)
prompts = [[5 + row % 200, 6, 7 + row % 11] for row in range(ROWS)]
sampling = Sampling(max_tokens=16, ignore_eos=True)
first = engine.generate(prompts, sampling, list(range(ROWS)))
assert all(len(response.tokens) == 16 for response in first)
assert engine.generate(prompts, sampling, list(range(ROWS))) == first
print("equal")
