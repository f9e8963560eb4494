"""What staleness costs and brings: the mathematics recipe at depths 0 to 8 with several corrections, until held-out accuracy is flat.

    python benchmarks/learning/staleness.py --minutes 8   # on one or two GPUs; call again until nothing is left
    python benchmarks/learning/staleness.py --only depth=1,correction=disabled,seed=0
    python benchmarks/learning/staleness.py --alone --only seed=0,depth=1   # seconds of a step, where runs shared the machine with others
    python benchmarks/learning/staleness.py --plot   # table, and curves as SVG in --work
    python benchmarks/learning/staleness.py --smoke   # two runs of two steps of a tiny model on the CPU

On one GPU generator and trainer take turns, so that a depth hides the host's work alone; on two they overlap. The JSON has an entry a
run. A run that `--minutes` stops is saved in `--work` and goes on there; the files of `--work` are large and stay on the machine.
The picture of docs/benchmarks.md is the curves by updates of `results/staleness_h200.json`: `table.py` draws it.

Corrections, by the library's names:
* `disabled`: none. Ratios are taken against the trainer's own log-probs, as if the batch were fresh.
* `decoupled_token_is`: the same, with each token weighed by trainer over engine, at most 2.
* `proximal`: decoupled PPO. The clipped ratio is taken against a policy between the engine's and the current one, and weighed.
* `bypass_ppo_clip` (by `--corrections`): the clipped ratio is taken against the engine's log-probs.

Runs that share a GPU learn the same, each in its own call with `--only`, and their seconds mean nothing. `--alone` measures the steps of
such settings with nothing beside them; table and curves then count these seconds.

Accuracy belongs to the weights that answered: evaluations at step k use version max(0, k - depth), and stand in table and curves at the
number of its updates and at the seconds after which it was published.
"""

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.lib.learning_plots import draw_staleness, keep_curves, staleness_table, with_seconds_alone
from benchmarks.lib.learning_runs import (
    Flat,
    Key,
    Results,
    Settings,
    chosen,
    given_settings,
    named,
    parser,
    recorded_settings,
    run_until_flat,
    runs_to_do,
)
from benchmarks.lib.machine import machine

ALONE = 12  # steps
DEPTHS = (0, 1, 2, 4, 8)
CORRECTIONS = ("disabled", "decoupled_token_is", "proximal")
IN_THE_LOSS = ("proximal", "bypass_ppo_clip")  # which need no pass for old log-probs


def main() -> None:
    arguments = parser(__doc__ or "", "staleness_gpu.json")
    arguments.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    arguments.add_argument("--corrections", nargs="+", default=CORRECTIONS)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--alone", action="store_true", help=f"measure {ALONE} steps of each setting, without an evaluation")
    given = arguments.parse_intermixed_args()
    gpus = rg.local_cluster().gpus
    cfg = given_settings(given, prompts=16, steps=300, every=10, questions=128, shared=gpus == 1, export=False)
    flat = Flat()
    keys: list[Key] = [
        {"depth": depth, "correction": correction, "seed": seed}
        for seed in range(given.seeds)
        for depth in given.depths
        for correction in given.corrections
    ]
    if given.smoke:
        keys, flat = (
            [{"depth": 0, "correction": "disabled", "seed": 0}, {"depth": 1, "correction": "proximal", "seed": 0}],
            Flat(1, 1, -1.0),
        )
    results = Results(given.json, recorded_settings(cfg, flat, "depth", "correction", "loss"))
    if given.alone:
        measure_alone(results, chosen(keys, given.only), cfg, given.work)
    elif not given.plot:
        for key, until_s in runs_to_do(results, keys, given):
            run = run_until_flat(settings_of(cfg, key), given.work / named(key), flat, until_s)
            if run is None:
                print("  the time is over: saved, call again", flush=True)
                break
            results.keep(named(key), run | {"key": key, "machine": machine()})
            shutil.rmtree(given.work / named(key) / "checkpoints", ignore_errors=True)
    if results.runs:
        runs = with_seconds_alone(results.runs, results.alone)
        print(staleness_table(runs))
        keep_curves(given.work, draw_staleness(runs))


def settings_of(cfg: Settings, key: Key) -> Settings:
    """The settings of a run."""
    correction = str(key["correction"])
    loss, node = (correction, "") if correction in IN_THE_LOSS else ("clipped", correction)
    return replace(cfg, depth=int(key["depth"]), seed=int(key["seed"]), loss=loss, correction=node)


def measure_alone(results: Results, keys: list[Key], cfg: Settings, work: Path) -> None:
    """Measure the seconds of a step of each setting, and add them to the file, with the machine."""
    results.keep("machine", machine(), "alone_on")
    for key in keys:
        setting = named({name: value for name, value in key.items() if name != "seed"})
        if setting in results.alone:
            continue
        own = replace(settings_of(cfg, key), steps=ALONE, every=ALONE * 1000)
        run = run_until_flat(own, work / f"alone,{setting}", Flat(), math.inf)
        assert run is not None
        results.keep(setting, run["step_s"], "alone")
        print(f"{setting}: {run['step_s']:.2f} s a step alone", flush=True)


if __name__ == "__main__":
    main()
