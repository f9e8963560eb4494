"""The rows of continuous rollouts, and of conversations."""

from benchmarks.lib.figures import count, percent, share, times
from benchmarks.report.table import Row

WAITING = {
    "depth 1, update 0.0 of a step": "depth 1, an update of 0 s",
    "depth 1, update 0.3 of a step": "depth 1, an update of 0.3 of a step",
    "depth 2, update 0.3 of a step": "depth 2, an update of 0.3 of a step",
}


def rollouts(file: str, model: str) -> list[Row]:
    """Continuous rollouts against batch by batch, with every update that was tried."""
    ways = {"continuous": "a continuous rollout", "continuous, recompute": "a continuous rollout that new weights interrupt,"}
    return [
        Row(f"speed-up of {what} over batch by batch, long-tailed lengths (p99 = 10 x median), {model}, {told}",
            times(file, at, way, "speed"), "benchmarks/speed/rollout.py", "the slowest round", share(file, at, way, "speed_min"))
        for way, what in ways.items()
        for at, told in WAITING.items()
    ]  # fmt: skip


def turns(file: str, what: str) -> list[Row]:
    return [Row(f"64 conversations of up to 4 turns, {what}: tokens/s relative to the same without tools", share(file, "ratio"),
                "benchmarks/speed/tool_rollouts.py", "without tools, tokens/s", count(file, "without"))]  # fmt: skip


STAGES = [
    *rollouts("rollout_cpu.json", "a tiny model"),
    *turns("tool_rollouts_smollm2_cpu.json", "SmolLM2's shape, turns of 43 tokens"),
    *turns("tool_rollouts_long_turns_cpu.json", "SmolLM2's shape, turns of 170 tokens"),
    Row("1,000 conversations of up to 4 turns at once, a tiny model, sandboxes of 1 to 60 s: step time relative to its lower bound",
        share("tool_rollouts_thousand_cpu.json", "step_over_bound", form="{:.3f}"),
        "benchmarks/speed/tool_rollouts.py --conversations 1000",
        "share of it that the engine was idle while a conversation could decode",
        percent("tool_rollouts_thousand_cpu.json", "engine_idle_while_any_could_decode")),
    *turns("tool_rollouts_cpu.json", "a tiny model, turns of 43 tokens, on a busy machine"),
]  # fmt: skip
