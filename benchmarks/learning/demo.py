"""The demo, as `make demo` runs it: seconds of steps until the mean reward reaches 0.90, with all instructions of the CPU and with AVX2.

    python benchmarks/learning/demo.py [--steps 25] [--json PATH]
    python benchmarks/learning/demo.py --smoke                     # two steps of a tiny model

The second run forbids PyTorch and oneDNN anything beyond AVX2 (`ATEN_CPU_CAPABILITY`, `ONEDNN_MAX_CPU_ISA`), as on a CPU without bf16.
Seconds of steps are those from the first tick on; `load` is the machine's, of which the demo's own workers are about as many as
it has cores: what is above that ran beside it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write
from benchmarks.lib.machine import machine

RECIPE = Path(__file__).parents[2] / "recipes" / "one_step_off.py"
SETS = {"all instructions": {}, "AVX2 alone": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}
REWARD, WANTED = "critic/rewards/mean", 0.90
TIMEOUT_S = 3000.0


def run(steps: int, limits: dict[str, str], settings: list[str]) -> dict[str, Any]:
    """Run the recipe, and read what it recorded."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(RECIPE), f"steps={steps}", f"out={out}", *settings]
        began_s = time.monotonic()
        done = subprocess.run(command, env=os.environ | limits, capture_output=True, text=True, timeout=TIMEOUT_S)
        whole_s = time.monotonic() - began_s
        if done.returncode:
            raise RuntimeError(done.stderr)
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    seconds, rewards = [line["timing_s/step"] for line in lines], [line[REWARD] for line in lines]
    reached = next((step for step, reward in enumerate(rewards) if reward >= WANTED), None)
    return {
        "bits": {name: value for name, value in lines[0].items() if name.startswith("dtype/")},
        "steps_until_0.90": None if reached is None else reached + 1,
        "seconds_until_0.90": None if reached is None else sum(seconds[: reached + 1]),
        "mean_reward_of_last_five": statistics.fmean(rewards[-5:]),
        "median_step_s": statistics.median(seconds),
        "seconds_of_all_steps": sum(seconds),
        "seconds_of_the_command": whole_s,
        "load": os.getloadavg()[0],
        "steps": [
            {"reward": reward, "seconds": each, "rollout_s": line["timing_s/gen"], "update_s": line["timing_s/update_actor"]}
            for line, reward, each in zip(lines, rewards, seconds, strict=True)
        ],
    }


def main() -> None:
    parser = command_line(__doc__, smoke="two steps of a tiny model")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", choices=SETS, help="this run alone; the file keeps the other as it is")
    given = parser.parse_args()
    settings = ["model=tiny", "engine=transformers", "prompts=2", "group_size=2"] if given.smoke else []
    result: dict[str, Any] = {"script": "benchmarks/learning/demo.py", "machine": machine(), "runs": {}}
    if given.only and given.json and given.json.exists():
        result["runs"] = json.loads(given.json.read_text())["runs"]
    for name, limits in SETS.items():
        if given.only not in (None, name):
            continue
        found = result["runs"][name] = run(2 if given.smoke else given.steps, limits, settings)
        print(f"{name}: 0.90 after {found['seconds_until_0.90']} s of steps, {found['median_step_s']:.1f} s a step", flush=True)
        write(given.json, result)


if __name__ == "__main__":
    main()
