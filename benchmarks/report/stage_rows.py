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


SCRIPT = "benchmarks/speed/tool_rollouts.py"


def turns(file: str, what: str, options: str = "") -> Row:
    return Row(f"{{conversations}} conversations of up to 4 turns, {what}: tokens/s relative to the same without tools",
               share(file, "ratio"), SCRIPT + options, "without tools, tokens/s", count(file, "without"),
               {"conversations": count(file, "settings", "conversations")})  # fmt: skip


def over_bound(file: str, what: str, options: str, form: str = "{:.2f}") -> Row:
    return Row(f"{what}: step time relative to its lower bound", share(file, "step_over_bound", form=form), SCRIPT + options,
               "share of it that the engine was idle while a conversation could decode",
               percent(file, "engine_idle_while_any_could_decode"))  # fmt: skip


def thousand(where: str, model: str) -> Row:
    what = f"1,000 conversations of up to 4 turns at once, {model}, sandboxes of 1 to 60 s"
    return over_bound(f"tool_rollouts_thousand_{where}.json", what, " --conversations 1000", "{:.3f}")


STAGES = [
    *rollouts("rollout_cpu.json", "a tiny model"),
    turns("tool_rollouts_smollm2_cpu.json", "SmolLM2's shape, turns of 43 tokens"),
    turns("tool_rollouts_long_turns_cpu.json", "SmolLM2's shape, turns of 170 tokens"),
    thousand("cpu", "a tiny model"),
    turns("tool_rollouts_cpu.json", "a tiny model, turns of 43 tokens, on a busy machine"),
]
TURNS_ON_H200 = [
    turns("tool_rollouts_h200.json", "SmolLM2, turns of 43 tokens, tools of 20 ms"),
    turns("tool_rollouts_long_turns_h200.json", "SmolLM2, turns of 170 tokens, tools of 20 ms"),
    turns("tool_rollouts_256_h200.json", "SmolLM2, turns of 43 tokens, tools of 20 ms", " --conversations 256"),
    over_bound("tool_rollouts_tail_h200.json", "64 such conversations with long-tailed tools (p99 = 10 x median)", " --tail 10"),
    thousand("h200", "SmolLM2"),
]
