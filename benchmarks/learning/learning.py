"""How the mathematics recipe learns: reward and held-out accuracy by step for three seeds, then the exported models by vLLM alone.

    python benchmarks/learning/learning.py --minutes 8          # call again until nothing is left
    python benchmarks/learning/learning.py --only seed=0
    python benchmarks/learning/learning.py --plot               # table, and curves as SVG in --work
    python benchmarks/learning/learning.py --smoke              # one run of two steps of a tiny model on the CPU

On a CPU the settings are the recipe's own, on a GPU those of `learning_runs.ON_GPU`. The folder that `job.export` writes is
then loaded by vLLM in a process of its own (`plain_vllm.py`): the same questions, chat template and sampling, without rlgraph's engines.
Its accuracy stands beside that of the last evaluations and of the model before training, each with its standard error over the questions.
"""

import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.lib.learning_plots import draw_learning, keep_curves, shown
from benchmarks.lib.learning_runs import (
    ON_GPU,
    Flat,
    Key,
    Results,
    Run,
    Settings,
    given_settings,
    held_out,
    interval,
    named,
    parser,
    recorded_settings,
    run_until_flat,
    runs_to_do,
)
from benchmarks.lib.machine import machine

PLAIN = Path(__file__).with_name("plain_vllm.py")
LIMIT_S = 300.0  # of vLLM alone


def by_vllm_alone(cfg: Settings, folder: Path, work: Path) -> dict[str, float]:
    """Evaluate a model folder in a process that loads vLLM and none of rlgraph's engines."""
    asked = {name: getattr(cfg, name) for name in ("system", "max_tokens", "max_context", "samples", "seed")}
    asked["rows"] = held_out(cfg)
    questions, answers = work / "questions.json", work / "answers.json"
    questions.write_text(json.dumps(asked), encoding="utf-8")
    ended = subprocess.run([sys.executable, str(PLAIN), str(folder), str(questions), str(answers)], capture_output=True, timeout=LIMIT_S)
    if ended.returncode:
        raise SystemExit(f"vLLM alone failed on {folder}: {ended.stderr.decode(errors='replace')[-2000:]}")
    found: dict[str, float] = json.loads(answers.read_text(encoding="utf-8"))
    return found


def evaluate_alone(cfg: Settings, results: Results, work: Path) -> None:
    """Evaluate by vLLM alone each export of the file that was not yet, and the model before training."""
    for name, run in list(results.runs.items()):
        own, folder = replace(cfg, seed=int(run["key"]["seed"])), work / name
        if "base_by_vllm" not in run and (folder / "model").exists():
            run["exported_by_vllm"] = by_vllm_alone(own, folder / "model", folder)
            run["base_by_vllm"] = by_vllm_alone(own, Path(rg.model_folder(own.model)), folder)
            print(f"{name}: export by vLLM alone {run['exported_by_vllm']}, before training {run['base_by_vllm']}", flush=True)
            results.keep(name, run)


def table(runs: Mapping[str, Run]) -> str:
    """Write a row for each seed, and one for their mean, as Markdown."""
    lines = ["| seed | steps | accuracy before | after | export, vLLM alone | before, vLLM alone | a step |", "|---" * 7 + "|"]
    for run in runs.values():
        before = next(iter(run["accuracy"]))
        vllm, base = (
            f"{shown(run[name]['accuracy'])} ± {shown(run[name]['stderr'])}" if name in run else "–"
            for name in ("exported_by_vllm", "base_by_vllm")
        )
        lines.append(
            f"| {run['key']['seed']} | {run['steps']} | {shown(before[2])} ± {shown(before[3])} | {shown(run['final_accuracy'])} ± "
            f"{shown(run['final_stderr'])} | {vllm} | {base} | {shown(run['step_s'], '{:.2f} s')} |"
        )
    mean, half = interval([run["final_accuracy"] for run in runs.values()])
    exported = [run["exported_by_vllm"]["accuracy"] for run in runs.values() if "exported_by_vllm" in run]
    plain = statistics.fmean(exported) if exported else math.nan
    where = sorted({", ".join(run["machine"]["gpus"]) or "CPU" for run in runs.values()})
    least = f" (95 % over seeds: ± {shown(half)})" if math.isfinite(half) else ""
    return "\n".join([*lines, "", f"Mean after training {shown(mean)}{least}; by vLLM alone {shown(plain)}. On {'; '.join(where)}."])


def main() -> None:
    gpus = rg.local_cluster().gpus
    arguments = parser(__doc__ or "", "mathematics_gpu.json" if gpus else "mathematics_cpu.json")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--learn-only", action="store_true", help="export nothing, so that vLLM alone has nothing to evaluate")
    given = arguments.parse_intermixed_args()
    cfg = given_settings(given, shared=gpus == 1, **(ON_GPU if gpus else {}))
    keys: list[Key] = [{"seed": seed} for seed in range(1 if given.smoke else given.seeds)]
    flat = Flat(least=60) if gpus else Flat(least=cfg.steps + 1, window=1)  # on a CPU all steps are done, and the last evaluation counts
    flat = Flat(1, 1, -1.0) if given.smoke else flat
    results = Results(given.json, recorded_settings(cfg, flat))
    if not given.plot:
        for key, until_s in runs_to_do(results, keys, given):
            own, folder = replace(cfg, seed=int(key["seed"])), given.work / named(key)
            run = run_until_flat(own, folder, flat, until_s, export=None if given.learn_only else folder / "model")
            if run is None:
                print("  the time is over: saved, call again", flush=True)
                break
            results.keep(named(key), run | {"key": key, "machine": machine()})
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        evaluate_alone(cfg, results, given.work)
    if results.runs:
        print(table(results.runs))
        keep_curves(given.work, {"learning": draw_learning(results.runs)})


if __name__ == "__main__":
    main()
