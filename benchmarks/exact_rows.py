"""The rows of `benchmarks/exact.py`: tokens that differ between vLLM and the trainer, and what equality takes."""

from figures import count, times
from table import Row

FILE, SCRIPT = "exact_cpu.json", "benchmarks/exact.py"
EXACT = [
    Row("SmolLM2, `exact=True`: of {all} tokens, those whose log-prob in the trainer differs from vLLM's in any bit",
        count(FILE, "exact", "different"), SCRIPT, "without exact", count(FILE, "without exact", "different"),
        {"all": count(FILE, "exact", "tokens")}),
    Row("SmolLM2, `exact=True`: an update, beside one without", times(FILE, "update", "ratio"), SCRIPT,
        "scores", times(FILE, "scores", "ratio")),
]  # fmt: skip
