"""How the mathematics recipe learns on a GPU with `exact=True` and without: three seeds each, on policy.

    python benchmarks/learning/exact_learning.py --at-once 6 memory=0.03      # six runs share a GPU, each with 3 % for its engine
    python benchmarks/learning/exact_learning.py --only exact=yes,seed=0
    python benchmarks/learning/exact_learning.py --plot                       # the table alone
    python benchmarks/learning/exact_learning.py --smoke                      # one run of two steps of a tiny model on a CPU, without exact

The losses take ratios against the rollout's own log-probs. With `exact=True` these are the trainer's, so each ratio is 1 and `ppo_kl` is
0; without it they differ by rounding in bfloat16. The settings are those of `learning_runs.ON_GPU`. Runs that share a GPU learn the same,
and their seconds mean nothing. `python benchmarks/report/table.py` writes the table into docs/developers/measurements.md.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.lib.figures import RESULTS
from benchmarks.lib.learning_plots import shown
from benchmarks.lib.learning_runs import (
    ON_GPU,
    Flat,
    Key,
    Results,
    Run,
    given_settings,
    interval,
    metrics_of,
    named,
    parser,
    recorded_settings,
    run_until_flat,
    runs_to_do,
)
from benchmarks.lib.machine import machine

FILE = "exact_learning_h200.json"
STEPS = 60
HEAD = (
    "`exact`",
    "reward of the first 4 steps",
    "of the last 4, each seed",
    "accuracy, each seed",
    "mean (95 % over seeds)",
    "`ppo_kl` at most",
)


def tables() -> dict[str, str]:
    """Write the table by its name; nothing while nothing is measured."""
    file = RESULTS / FILE
    return {"exact-learning": table(json.loads(file.read_text(encoding="utf-8"))["runs"])} if file.is_file() else {}


def table(runs: Mapping[str, Run]) -> str:
    """Write a row with `exact=True` and one without, as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for exact in ("no", "yes"):
        own = sorted((run for run in runs.values() if run["key"]["exact"] == exact), key=lambda run: int(run["key"]["seed"]))
        if not own:
            continue
        mean, half = interval([run["final_accuracy"] for run in own])
        most = max(run["ppo_kl_most"] for run in own)
        cells = (
            exact,
            shown(statistics.fmean(run["first_reward"] for run in own)),
            ", ".join(shown(run["last_reward"]) for run in own),
            ", ".join(shown(run["final_accuracy"]) for run in own),
            f"{shown(mean)} ± {shown(half)}",
            f"{most:.1e}" if most else "0",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parser(__doc__ or "", FILE)
    arguments.add_argument("--seeds", type=int, default=3)
    given = arguments.parse_intermixed_args()
    usual = ON_GPU | {"steps": STEPS, "shared": True, "depth": 0, "export": False}
    cfg = given_settings(given, **usual)
    keys: list[Key] = [{"exact": exact, "seed": seed} for seed in range(given.seeds) for exact in ("no", "yes")]
    if given.smoke:
        cfg, keys = replace(cfg, shared=True, depth=0), keys[:1]
    flat = Flat(least=cfg.steps + 1)  # all steps are done
    results = Results(given.json, recorded_settings(cfg, flat, "exact"))
    if not given.plot:
        rg.model_folder(cfg.model)  # made once
    for key, until_s in [] if given.plot else runs_to_do(results, keys, given):
        own = replace(cfg, exact=key["exact"] == "yes", seed=int(key["seed"]))
        run = run_until_flat(own, given.work / named(key), flat, until_s)
        if run is None:
            print("  the time is over: saved, call again", flush=True)
            break
        most = max(abs(line["actor/ppo_kl"]) for line in metrics_of(given.work / named(key)))
        results.keep(named(key), run | {"key": key, "ppo_kl_most": most, "machine": machine()})
    if results.runs:
        print(table(results.runs))


if __name__ == "__main__":
    main()
