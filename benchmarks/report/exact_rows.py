"""The rows of `benchmarks/speed/exact.py` and `exact_gpu.py`: tokens that differ between vLLM and the trainer, and what equality takes."""

from benchmarks.lib.figures import count, share, times
from benchmarks.report.table import Row

FILE, SCRIPT = "exact_cpu.json", "benchmarks/speed/exact.py"
GPU, STEPS, GPU_SCRIPT = "exact_h200.json", "exact_steps_h200.json", "benchmarks/speed/exact_gpu.py"
NAMES = (("SmolLM2", "smollm2"), ("the shape of Qwen 3 1.7B", "1.7B"))
EXACT = [
    Row("SmolLM2, `exact=True`: of {all} tokens, those whose log-prob in the trainer differs from vLLM's in any bit",
        count(FILE, "exact", "different"), SCRIPT, "without exact", count(FILE, "without exact", "different"),
        {"all": count(FILE, "exact", "tokens")}),
    Row("SmolLM2, `exact=True`: update time relative to `exact=False`", times(FILE, "update", "ratio"), SCRIPT,
        "scores", times(FILE, "scores", "ratio")),
]  # fmt: skip
EXACT_ON_GPUS = [
    Row("`exact=True`, SmolLM2, the shape of Qwen 3 1.7B, and four layers of the 8B: of {all} tokens, those whose log-prob in "
        "the trainer differs from vLLM's in any bit",
        count(GPU, "all", "different"), GPU_SCRIPT, words={"all": count(GPU, "all", "tokens")}),
    Row("the same, SmolLM2 over {small} steps with updates and the shape of 1.7B over {large}: of {all} tokens",
        count(STEPS, "all", "different"), GPU_SCRIPT, words={
            "all": count(STEPS, "all", "tokens"), "small": count(STEPS, "smollm2", "steps"), "large": count(STEPS, "1.7B", "steps")}),
    *(Row(f"`exact=True`, {name}: time of {work} of 64 responses, relative to `exact=False`",
          times(STEPS, key, "price", field, "ratio"), GPU_SCRIPT)
      for name, key in NAMES for work, field in (("scores", "scores"), ("an update", "update"))),
    *(Row(f"`exact=True`, {name}: relative error of the gradient, against float32's",
          share(STEPS, key, "gradients", "exact"), GPU_SCRIPT, "without exact", share(STEPS, key, "gradients", "plain"))
      for name, key in NAMES),
    *(Row(f"`exact=True`, SmolLM2: time to generate {what}, relative to `exact=False`",
          times(STEPS, "smollm2", "tokens_a_second", sequences, "ratio"), GPU_SCRIPT)
      for sequences, what in (("1", "one response"), ("64", "64 responses at once"), ("512", "512 responses at once"))),
]  # fmt: skip
