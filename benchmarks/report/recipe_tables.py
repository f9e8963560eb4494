"""The table of recipes in README.md: what each shows, on which devices, how long it ran, and what it reached."""

from collections.abc import Sequence

from benchmarks.lib.figures import Figure, share
from benchmarks.report.mathematics_rows import of_seeds
from benchmarks.report.table import table

REWARD = "critic/rewards/mean"
CORES = "2 cores"
UNKNOWN = "–"  # no run of it is recorded


def minutes(file: str) -> str:
    return Figure(file, ("timing_s/step",), "{:.0f}", 1 / 60, "sum").text()


def learned(file: str) -> str:
    """Write the mean reward of the first and of the last 4 steps."""
    first, last = (share(file, REWARD, reduce=f"{which} 4").text() for which in ("first", "last"))
    return f"{first} to {last}"


def conversed(run: str) -> tuple[str, str]:
    """Write the minutes and the rewards of a recipe with agents."""
    at = ("agents_learning_cpu.json", "runs", run)
    return Figure(at[0], (*at[1:], "steps_s"), "{:.0f}", 1 / 60).text(), f"{share(*at, 'first').text()} to {share(*at, 'last').text()}"


def lines() -> list[Sequence[str]]:
    """The cells of each line."""
    interrupt, continuous = "interrupt_cpu.jsonl", "continuous_cpu.jsonl"
    environment, agent = conversed("environment, seed 0"), conversed("agent, seed 0")
    accuracy = f"held-out accuracy {of_seeds('accuracy', 0, 2).text()} to {of_seeds('final_accuracy').text()}"
    return [
        ("`one_step_off`, `sync`, `k_step_off`", "GRPO at depth 1, 0 and more", CORES, minutes("one_step_off_cpu.jsonl"),
         f"mean reward {learned('one_step_off_cpu.jsonl')}"),
        ("`interrupt`, `continuous`, `chunks`", "new weights in mid-rollout, batches that join, slow rewards", CORES,
         f"{minutes(interrupt)}, {minutes(continuous)}, {UNKNOWN}", f"{learned(interrupt)}, {learned(continuous)}"),
        ("`ppo`, `grpo_kl`, `decoupled_ppo`, `dapo`, `by_name`", "critic, reference, correction, dynamic sampling, presets", CORES,
         f"{minutes('ppo_cpu.jsonl')}, {UNKNOWN}", f"`ppo`: {learned('ppo_cpu.jsonl')}"),
        ("`tools`, `environment`, `agent`", "conversations", CORES, f"{minutes('tools_cpu.jsonl')}, {environment[0]}, {agent[0]}",
         f"{learned('tools_cpu.jsonl')}, {environment[1]}, {agent[1]}"),
        ("`mathematics`", "chat data, validation, export", CORES, UNKNOWN, accuracy),
        ("`reasoning`", "long-tailed answers, fine-tuned and then reinforced", "2 H200", UNKNOWN, "the first picture above"),
        ("`vision`", "a model that reads [images](docs/engines.md#images), fine-tuned and then reinforced", CORES, UNKNOWN,
         learned("vision_cpu.jsonl")),
        ("`one_gpu`", "models that time-share a GPU, with an adapter or fp8", "1 GPU", UNKNOWN, UNKNOWN),
        ("`sft`, `dpo`, `online_dpo`, `kto`, `distill`, `teachers`, `reward_model`, `process_rewards`, `mixture`, `self_play`, "
         "`curriculum`", "[beyond RL](docs/beyond_rl.md)", CORES, UNKNOWN, UNKNOWN),
    ]  # fmt: skip


def tables() -> dict[str, str]:
    """Write the table."""
    head, _ = table(("recipe", "shows", "devices", "minutes", "result"), (), 5)
    return {"recipes": head + "".join(f"| {' | '.join(cells)} |\n" for cells in lines())}
