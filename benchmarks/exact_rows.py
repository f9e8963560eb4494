"""The rows of `benchmarks/exact.py` and `exact_gpu.py`: tokens that differ between vLLM and the trainer, and what equality takes."""

from figures import count, times
from table import Row

FILE, SCRIPT = "exact_cpu.json", "benchmarks/exact.py"
GPU, GPU_SCRIPT = "exact_h200.json", "benchmarks/exact_gpu.py"
EXACT = [
    Row("SmolLM2, `exact=True`: of {all} tokens, those whose log-prob in the trainer differs from vLLM's in any bit",
        count(FILE, "exact", "different"), SCRIPT, "without exact", count(FILE, "without exact", "different"),
        {"all": count(FILE, "exact", "tokens")}),
    Row("SmolLM2, `exact=True`: an update, beside one without", times(FILE, "update", "ratio"), SCRIPT,
        "scores", times(FILE, "scores", "ratio")),
    Row("one H200, `exact=True`, SmolLM2, the shape of Qwen 3 1.7B, and four layers of the 8B: of {all} tokens, those whose log-prob in "
        "the trainer differs from vLLM's in any bit",
        count(GPU, "all", "different"), GPU_SCRIPT, words={"all": count(GPU, "all", "tokens")}),
    *(Row(f"one H200, `exact=True`, {name}: scores of 64 responses, beside those without",
          times(GPU, key, "price", "scores", "ratio"), GPU_SCRIPT)
      for name, key in (("SmolLM2", "smollm2"), ("the shape of Qwen 3 1.7B", "1.7B"))),
]  # fmt: skip
