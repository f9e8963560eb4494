"""The rows of `benchmarks/speed/router_replay.py`: how far log-probs of the trainer are from the engine's, with and without its routes."""

from benchmarks.lib.figures import count, share
from benchmarks.report.table import Row

FILE, SCRIPT = "router_replay_cpu.json", "benchmarks/speed/router_replay.py"
ROUTES = [
    Row(f"random mixture of 32 experts, `router_replay=True`: {what} of {{all}} tokens' log-probs between a bfloat16 trainer and "
        "bfloat16 vLLM, in nats",
        share(FILE, "bfloat16", "replayed", field, form="{:.4f}"), SCRIPT,
        "own routers", share(FILE, "bfloat16", "own", field, form="{:.4f}"), {"all": count(FILE, "tokens")})
    for what, field in (("mean distance", "mean"), ("99th percentile of the distance", "p99"))
]  # fmt: skip
