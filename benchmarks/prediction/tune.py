"""Tuning: the chosen plan against trying every one, and how long compiling and tuning take.

    python benchmarks/prediction/tune.py [--json PATH]

For clusters of 2 to 16 GPUs and several mixes of work, every combination of settings and every split is compiled with exact
counts and played; the best of them is held against the plan that `rlgraph.tune` puts first.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import rlgraph as rg
from rlgraph.algorithms.advantages import ReinforcePlusPlus
from rlgraph.graph.nodes import Output, declare
from rlgraph.nodes.base import FunctionOperation
from rlgraph.plan.cost_functions import Decode, NodeCost, Setting
from rlgraph.plan.lengths import Lengths

TAIL = Lengths((0.0, 0.5, 0.9, 0.99, 1.0), (100.0, 800.0, 3000.0, 7000.0, 8192.0), prompt_tokens=300.0)
EVEN = Lengths((0.0, 1.0), (900.0, 1100.0), prompt_tokens=300.0)
ONE = Setting(1, 1, 512)
DEPTHS, BUFFERS, WIDTHS, HOMES = (0, 1, 2), (1, 2), (1, 2), ("train", "own")


@dataclass(frozen=True)
class Mix:
    """Seconds a decode step, a sequence in it, a trained token and a reference token, on one GPU."""

    name: str
    lengths: Lengths
    step_s: float
    sequence_s: float
    train_token_s: float
    score_token_s: float

    def costs(self) -> rg.planning.Costs:
        decode = NodeCost(decode=Decode(self.step_s, self.sequence_s, prefill_s=1e-5), measured=ONE)
        nodes: dict[str, float | NodeCost] = {
            "prompts": 0.001,
            "rollout": decode,
            "reward": 0.1,
            "shaped": 0.01,
            "old_log_probs": NodeCost(token_s=self.score_token_s, measured=ONE),
            "ref_log_probs": NodeCost(token_s=self.score_token_s, measured=ONE),
            "advantages": 0.01,
            "update": NodeCost(token_s=self.train_token_s, measured=ONE),
        }
        return rg.planning.Costs(nodes, publish_s=0.1, receive_s=0.2, swap_s=0.1, lengths=self.lengths)


MIXES = [
    Mix("balanced, even lengths", EVEN, 0.012, 2e-5, 1.5e-4, 3e-5),
    Mix("generation with a long tail", TAIL, 0.02, 4e-5, 1e-4, 2e-5),
    Mix("training", EVEN, 0.004, 1e-5, 5e-4, 1e-4),
]


def no_reward(responses: list[str]) -> list[float]:
    return [0.0 for _ in responses]


def graph(depth: int, buffers: int, tensor_parallel: int, score: str, gpus: dict[str, int] | None = None) -> rg.Graph:
    """GRPO with a reference; `gpus` fixes the counts, otherwise they are open. Depth 0 is colocated."""

    def pool(name: str) -> rg.Pool:
        return rg.Pool(name, gpus=gpus[name]) if gpus else rg.Pool(name, share=None)

    rollout_pool = pool("shared") if depth == 0 else pool("rollout")
    train_pool = rollout_pool if depth == 0 else pool("train")
    score_pool = pool("score") if score == "own" and depth > 0 else train_pool
    generator = rg.Generator("m", pool=rollout_pool, tensor_parallel=tensor_parallel)
    policy, reference = rg.Policy("m", pool=train_pool), rg.Reference("m", pool=score_pool)
    weights = rg.feedback("weights", depth=depth, buffers=buffers)
    prompts = rg.prompts([{"prompt": "1"}], count=64)
    rollout = generator.rollout(prompts, weights, group_size=8)
    rewards = rg.reward(no_reward, rollout)
    old, ref = policy.log_probs(rollout), reference.log_probs(rollout)
    shaped = rg.stages.kl_shaped_rewards(rollout, rewards, old, ref, coef=0.05)
    targets = rg.advantages(rollout, shaped, estimator=ReinforcePlusPlus())
    step = policy.update(rollout, old, targets, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("grpo", step.metrics)


def divisions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in divisions(total - first, parts - 1):
            yield (first, *rest)


def exhaustive(gpus: int, costs: rg.planning.Costs) -> tuple[float, int]:
    """Find the least predicted step over every setting and every division of the GPUs, and how many plans there were."""
    times = []
    for depth, buffers, width, score in product(DEPTHS, BUFFERS, WIDTHS, HOMES):
        if depth == 0 and buffers == 2:
            continue
        names = ["shared"] if depth == 0 else ["rollout", "train", *(["score"] if score == "own" else [])]
        for counts in divisions(gpus, len(names)):
            if counts[0] % width:  # an engine spans that many
                continue
            declared = graph(depth, buffers, width, score, dict(zip(names, counts, strict=True)))
            times.append(rg.compile(declared, rg.Cluster(gpus=gpus, cpus=64), costs).prediction.step_s)
    return min(times), len(times)


def twenty() -> rg.Graph:
    """A rollout, sixteen nodes on the host and on pools behind it, and an update: twenty nodes with the prompts."""
    generator, policy = rg.Generator("m", pool=rg.Pool("rollout")), rg.Policy("m", pool=rg.Pool("train"))
    weights = rg.feedback("weights", depth=2, buffers=2)
    rollout = generator.rollout(rg.prompts([{"prompt": "1"}], count=128), weights)
    rewards = rg.reward(no_reward, rollout)
    last = rewards
    for index in range(15):
        operation = FunctionOperation(lambda columns: columns)
        last = Output(declare(f"stage {index}", operation, (last,), reads=("rewards",), writes=("rewards",)))
    advantages = rg.advantages(rollout, last, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("twenty", step.metrics)


def timed(call: Callable[[], Any], times: int) -> list[float]:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def large() -> dict[str, Any]:
    """Time compiling for large clusters, with given and open shares, and tuning over 1,024 GPUs."""
    rows = []
    for gpus in (64, 256, 1024, 4096):
        cluster = rg.Cluster(gpus=gpus, cpus=64)
        equal = {"rollout": gpus // 2, "train": gpus // 4, "score": gpus // 4}
        given, opened = graph(1, 1, 1, "own", equal), graph(1, 1, 1, "train")
        seconds = {name: timed(partial(rg.compile, of, cluster), 3) for name, of in (("given", given), ("open", opened))}
        rows.append({"gpus": gpus, **{f"{name}_s": statistics.median(found) for name, found in seconds.items()}})
        print(f"compile for {gpus} GPUs: {rows[-1]['given_s']:.2f} s, with open shares {rows[-1]['open_s']:.2f} s", flush=True)
    settings: dict[str, Any] = {"depth": DEPTHS, "buffers": BUFFERS, "tensor_parallel": WIDTHS, "score": ("train",)}
    start = time.perf_counter()
    tuned = rg.tune(graph, rg.Cluster(gpus=1024, cpus=64), MIXES[1].costs(), **settings)
    taken = time.perf_counter() - start
    print(f"tune over 1,024 GPUs, {tuned.looked_at} candidates: {taken:.2f} s", flush=True)
    return {"compile": rows, "tune_1024_gpus": {"candidates": tuned.looked_at, "seconds": taken}}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write the figures here as well")
    arguments.add_argument("--large", action="store_true", help="only large clusters; the file keeps the other figures")
    given = arguments.parse_args()
    path, load = given.json, os.getloadavg()
    if given.large:
        of_large = {**large(), "load_before": load}
        if path:
            path.write_text(json.dumps({**json.loads(path.read_text()), "large": of_large}, indent=1) + "\n")
        return
    rows: list[dict[str, Any]] = []
    print(f"{'mix':28} {'GPUs':>4} {'plans':>6} {'best of all':>12} {'tuned':>10} {'apart':>7}")
    for mix, gpus in product(MIXES, (2, 4, 8, 16)):
        costs = mix.costs()
        best, plans = exhaustive(gpus, costs)
        cluster = rg.Cluster(gpus=gpus, cpus=64)
        tuned = rg.tune(graph, cluster, costs, depth=DEPTHS, buffers=BUFFERS, tensor_parallel=WIDTHS, score=HOMES).best.step_s
        rows.append({"mix": mix.name, "gpus": gpus, "plans": plans, "best_s": best, "tuned_s": tuned, "apart": tuned / best - 1})
        print(f"{mix.name:28} {gpus:4} {plans:6} {best:10.3f} s {tuned:8.3f} s {tuned / best - 1:+7.2%}", flush=True)
    declared = twenty()
    assert len(declared.nodes) == 20
    compiled = timed(lambda: rg.compile(declared, rg.Cluster(gpus=8, cpus=64)), 20)
    costs, sixteen = MIXES[1].costs(), rg.Cluster(gpus=16, cpus=64)
    search = partial(rg.tune, graph, sixteen, costs, depth=(1, 2, 3), buffers=(1, 2), tensor_parallel=(1,), score=("own",))
    looked_at = search().looked_at
    tuning = timed(search, 3)
    print(f"compile, 20 nodes: {1e3 * statistics.median(compiled):.1f} ms (worst {1e3 * max(compiled):.1f} ms)")
    print(f"tune, {looked_at} candidates: {statistics.median(tuning):.2f} s (worst {max(tuning):.2f} s); load {load[0]:.1f} before")
    if path:
        figures = {
            "large": {**large(), "load_before": load},
            "machine": {"cores": rg.local_cluster().cpus, "load_before": load, "load_after": os.getloadavg()},
            "worst_apart": max(row["apart"] for row in rows),
            "searches": rows,
            "compile_20_nodes_s": {"median": statistics.median(compiled), "worst": max(compiled)},
            "tune_s": {"candidates": looked_at, "median": statistics.median(tuning), "worst": max(tuning)},
        }
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
