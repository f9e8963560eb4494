"""Learning curves of the recipes with agents on two cores: a program, an environment and tools, several seeds each.

    python benchmarks/learning/agents_learning.py [--json PATH] [--only agent] [--seeds 3] [--minutes 12] [--smoke] [key=value ...]

Each run is the recipe's own command, as `python recipes/agent.py seed=0`, one after the other; its curve is read from the metrics that it
records. A run that stands in the file is not done again. `--minutes` ends a run early, and its entry has the steps until then; settings
of the recipes, as `steps=40`, hold for all runs. The file says the machine's load before and after each run. `--smoke` runs two steps of
each on a tiny random model.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import write
from benchmarks.lib.machine import machine

ROOT = Path(__file__).resolve().parents[2]
RECIPES: dict[str, tuple[str, ...]] = {  # and what each tells of its conversations
    "agent": ("agent/turns_mean", "agent/errors", "agent/blocked"),
    "environment": ("agent/turns_mean", "agent/info/no_guess"),
    "tools": ("tools/turns_mean", "tools/failures"),
}
ENDS = 4  # steps at each end of a run, whose mean reward is given
SMOKE = ["model=tiny", "engine=transformers", "steps=2", "prompts=2", "group_size=2"]
REWARD = "critic/rewards/mean"
ENDING_S = 300.0  # for the steps in flight


def run(name: str, seed: int, settings: list[str], folder: Path, minutes: float) -> str:
    """Run a recipe's command to its end, or for so long. Returns by what it ended; raises CalledProcessError where it failed."""
    command = [sys.executable, str(ROOT / "recipes" / f"{name}.py"), f"seed={seed}", f"out={folder}", *settings]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            status = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # finishes the steps in flight
            process.wait(ENDING_S)
            return "minutes"
    if status:
        raise subprocess.CalledProcessError(status, command)
    return "steps"


def curve(name: str, folder: Path) -> dict[str, Any]:
    """Read what a run has recorded."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line[REWARD] for line in lines]
    few = ENDS if len(rewards) >= 2 * ENDS else 1
    return {
        "steps": len(lines),
        "reward": [round(reward, 5) for reward in rewards],
        "first": statistics.fmean(rewards[:few]),
        "last": statistics.fmean(rewards[-few:]),
        "step_s": statistics.median([line["timing_s/step"] for line in lines[1:]] or [lines[0]["timing_s/step"]]),
        "steps_s": sum(line["timing_s/step"] for line in lines),
        "staleness": max(line["staleness"] for line in lines),
        **{metric: [round(line.get(metric, 0.0), 4) for line in lines] for metric in RECIPES[name]},
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "agents_learning_cpu.json")
    arguments.add_argument("--only", choices=list(RECIPES), action="append", help="this recipe, again and again for several")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--minutes", type=float, default=60.0, help="of a run at most")
    arguments.add_argument("--smoke", action="store_true", help="two steps of each on a tiny random model, one seed")
    arguments.add_argument("settings", nargs="*", help="settings of the recipes, as steps=40")
    given = arguments.parse_args()
    settings = [*(SMOKE if given.smoke else []), *given.settings]
    held = json.loads(given.json.read_text()) if given.json.exists() else {"machine": machine(), "runs": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(1 if given.smoke else given.seeds):
            for name in given.only or RECIPES:
                key = f"{name}, seed {seed}"
                if key in held["runs"]:
                    continue
                folder, before = Path(temporary) / f"{name}-{seed}", os.getloadavg()[0]
                ended = run(name, seed, settings, folder, given.minutes)
                found = {"ended": ended, "settings": given.settings, "load": [before, os.getloadavg()[0]], **curve(name, folder)}
                print(
                    f"{key}: reward {found['first']:.3f} to {found['last']:.3f} in {found['steps']} steps of {found['step_s']:.1f} s",
                    flush=True,
                )
                held["runs"][key] = found
                write(given.json, held)


if __name__ == "__main__":
    main()
