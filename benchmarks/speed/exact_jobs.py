"""What exact=True costs a whole job on one GPU: models in turns, on policy, the same batches with and without.

    python benchmarks/speed/exact_jobs.py [--models smollm2,1.7B] [--steps 8] [--json OUT.json]
    python benchmarks/speed/exact_jobs.py --smoke               # two steps of a tiny model in float32, on a CPU

Each graph has a node for old log-probs. With exact it is no pass, since the rollout's are equal; "plain, on policy" is the graph without
that node and without exact. The file keeps the kinds of earlier runs on such a machine with the same sizes.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg

KINDS = ("exact", "plain", "plain, on policy")
BEGAN = time.time()


def odd(responses: list[str]) -> list[float]:
    return [float(len(response) % 2) for response in responses]


def graph(folder: str, kind: str, prompts: int, group: int, tokens: int, *, memory: float | None, on_gpu: bool) -> rg.Graph:
    pool = rg.Pool("gpu", gpus=1) if on_gpu else rg.Pool("cpu", cpus=1)
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if on_gpu else "float32"
    sampling = rg.Sampling(max_tokens=tokens, ignore_eos=True)
    generator = rg.Generator(folder, pool=pool, sampling=sampling, max_context=tokens + 64, memory=memory, dtype=dtype)
    policy = rg.Policy(folder, pool=pool, optimizer=rg.AdamW(lr=1e-6), dtype=dtype, exact=kind == "exact")
    weights = rg.feedback("weights", depth=0)
    sums = [{"prompt": f"{a} + {b} ="} for a in range(1, 33) for b in range(1, 33)]
    rollout = generator.rollout(rg.prompts(sums, count=prompts), weights, group_size=group)
    advantages = rg.advantages(rollout, rg.reward(odd, rollout), estimator=rg.GRPO())
    given = [rollout, advantages] if kind == KINDS[2] else [rollout, advantages, policy.log_probs(rollout)]
    step = policy.update(*given, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("exact_job", step.metrics)


def run(folder: str, kind: str, steps: int, sizes: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """Run a job, and give the seconds of its steps but the first two."""
    plan = rg.compile(graph(folder, kind, **sizes, on_gpu=on_gpu), rg.local_cluster())
    seconds, checked, apart = [], 0.0, []
    with plan.launch(deadline_s=200) as job:
        for step in job.steps(steps):
            seconds.append(step.seconds)
            checked += step.metrics.get("exact/tokens_checked", 0.0)
            apart.append(step.metrics["actor/ppo_kl"])
    found = {"step_s": statistics.median(seconds[2:] or seconds), "steps_s": seconds, "tokens_checked": checked, "ppo_kl": apart}
    print(f"[{time.time() - BEGAN:4.0f} s] {kind}: {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2,1.7B")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--memory", type=float, help="the engine's share of the GPU")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names, steps = (["tiny"], 2) if given.smoke else (given.models.split(","), given.steps)
    from benchmarks.lib.machine import machine
    from benchmarks.speed.exact_gpu import folder_of

    here = machine()
    earlier = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    results: dict[str, Any] = earlier if {key: earlier.get(key) for key in here} == here else {}
    for name in names:
        folder = folder_of(name, Path("runs/exact_jobs").resolve())
        tokens = 8 if given.smoke else 256
        sizes: dict[str, Any] = {
            "memory": given.memory,
            "prompts": 2 if given.smoke else 64,
            "group": 4 if name == "1.7B" else 8,
            "tokens": tokens,
        }
        if {key: results.get(name, {}).get(key) for key in sizes} != sizes:
            results[name] = dict(sizes)
        for kind in given.kinds:
            try:
                results[name][kind] = run(folder, kind, steps, sizes, on_gpu=not given.smoke)
            except Exception:  # noqa: BLE001 (the others run)
                results[name][kind] = {"error": traceback.format_exc()[-2000:]}
                print(results[name][kind]["error"], flush=True)
            if given.json:  # a later kind may run into a limit of time
                given.json.write_text(json.dumps(results | here, indent=1) + "\n")
        print(f"{name}: {json.dumps(results[name])}", flush=True)


if __name__ == "__main__":
    main()
