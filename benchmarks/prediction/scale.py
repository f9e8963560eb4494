"""Runs on 1,024 and 10,240 GPUs, rehearsed: step time, best split, time lost to failures by checkpoint interval, the weights' fan-out.

    python benchmarks/prediction/scale.py --json benchmarks/results/scale.json    # three minutes; needs no GPU
    python benchmarks/report/table.py                                         # the tables and the picture of docs/developers/scale.md
    python benchmarks/prediction/scale.py --smoke

Nothing here was measured on such a machine. Costs come from the models' shapes (`rlgraph/plan/roofline.py`), calibrated by runs on one
and two H200s (docs/prediction.md). What others have published stands beside the model's own figure for the same settings.
"""

import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from benchmarks.prediction import daly
from benchmarks.prediction.scale_graphs import LINK, Case, gathers_s, shape
from rlgraph.channels.remote.transfer import PART_BYTES
from rlgraph.plan.channels import crossing_s, soonest, ways
from rlgraph.plan.model_shapes import shapes_of
from rlgraph.plan.plan import Plan
from rlgraph.plan.rehearse import add_failures, prepare_course

# 419 unexpected interruptions in 54 days on 16,384 H100s (The Llama 3 Herd of Models, 2024, section 3.3.4), whatever failed.
GPU_MTBF_S = 16_384 * 54 * 86_400 / 419
RESTART_S, CHECKPOINT_S = 600.0, 30.0  # assumed
SITE = rg.planning.ClusterSite(bandwidth=8 * LINK, gpu_mtbf_s=GPU_MTBF_S, restart_s=RESTART_S, checkpoint_s=CHECKPOINT_S)
STRAGGLING = replace(SITE, stragglers=1e-4, slow_down=1.5)  # one host in 10,000 at each step; assumed
STEPS, EVERY, SEEDS = 1000, 10, 3
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200)
LARGE = tuple(
    Case(model, gpus, kind, prompts=gpus // 2, group=16, most_tokens=16_384, mean_tokens=4_096, width=width, a_host=a_host)
    for model, kind, width, a_host in (
        ("8B", "H100", 1, 8),
        ("32B", "H100", 4, 8),
        ("235B-A22B", "H200", 8, 8),
        ("1T-A32B", "B200", 16, 64),
    )
    for gpus in (1_024, 10_240)
)


@dataclass(frozen=True)
class Published:
    """A step time of others, and the case of the same settings; `split` says which GPUs are known to do what."""

    name: str
    seconds: float
    case: Case


def nemo(name: str, seconds: float, most: int, mean: float, gpus: int, rows: int, width: int, depth: int) -> Published:
    """Make a row of NeMo RL v0.4's table of performance (docs/about/performance-summary.md there): GRPO on H100s, 1-step off or on policy.

    Its generation batch has `rows` responses, its training batches 512. The split of the GPUs is not in the table: the best is taken.
    """
    together = 0 if depth == 0 else None
    case = Case(
        name, gpus, "H100", prompts=rows // 16, group=16, most_tokens=most, mean_tokens=mean - 100, prompt_tokens=100.0, depth=depth,
        rollout=together, train=together, width=width, scores=True, mini_batches=rows // 512,
    )  # fmt: skip
    return Published(f"{name}, {gpus} H100, {'1-step off' if depth else 'on policy'}", seconds, case)


PUBLISHED = (
    nemo("Llama 8B", 97.7, 4096, 1060, 16, 2048, 1, 0),
    nemo("Llama 8B", 74.6, 4096, 1129, 16, 2048, 1, 1),
    nemo("32B", 393.0, 4096, 3206, 32, 2048, 4, 0),
    nemo("32B", 215.0, 4096, 3207, 64, 2048, 4, 1),
    nemo("30B-A3B", 225.0, 4096, 3154, 32, 2048, 4, 0),
    nemo("30B-A3B", 244.0, 4096, 3158, 32, 2048, 2, 1),
    nemo("235B-A22B", 241.0, 8192, 5691, 256, 512, 8, 1),
)
TRANSFER = ("1T, 256 GPUs (bfloat16) to 128 (fp8)", 1.3)  # Perplexity, "Weight Transfer for RL Post-Training in under 2 seconds", 2025


def pools(plan: Plan) -> dict[str, int]:
    return {pool.name: len(pool.gpus) for pool in plan.pools}


def large(case: Case, models: Path) -> dict[str, Any]:
    """Rehearse a large run: at the best split, in the steady state and with all that goes wrong."""
    began = time.perf_counter()
    graph = case.graph(models)
    costs = case.costs(graph)
    best = rg.compile(graph, case.cluster, costs)
    split = pools(best)
    fixed = replace(case, rollout=split["rollout"], train=split["train"])
    compiled_s = time.perf_counter() - began
    graph = fixed.graph(models)
    site = replace(STRAGGLING, bandwidth=case.link)
    runs = [rg.planning.rehearse(graph, case.cluster, costs, site=site, steps=STEPS, every=EVERY, seed=seed) for seed in range(SEEDS)]
    tokens = case.rows * (case.mean_tokens + case.prompt_tokens)
    passes = -(-tokens * case.sharing // (split["train"] * case.micro_batch_tokens))
    lost = {name: statistics.fmean(run.lost_to[name] for run in runs) for name in runs[0].lost_to}
    return {
        "case": asdict(fixed),
        "parameters": shape(case.model).parameters,
        "split": split,
        "predicted_s": best.prediction.step_s,
        "busy": {pool.name: pool.busy for pool in best.pools},
        "step_s": runs[0].step_s,
        "p95_s": runs[0].p95_s,
        "tokens_per_s": tokens * STEPS / statistics.fmean(run.wall_s for run in runs),
        "lost_to": lost,
        "idle": runs[0].idle,
        "refused": fixed.refused(graph),
        "trainer_gathers_s": gathers_s(case, split["train"], int(passes)),
        "left_out": list(runs[0].left_out),
        "compile_s": compiled_s,
        "rehearse_s": (time.perf_counter() - began - compiled_s) / SEEDS,
    }


def intervals(row: Mapping[str, Any], models: Path) -> dict[str, Any]:
    """Rehearse a run with checkpoints at several intervals, beside Daly's formula."""
    case = Case(**row["case"])
    graph = case.graph(models)
    costs, site = case.costs(graph), replace(SITE, bandwidth=case.link)
    mtbf_s = site.mtbf_s(case.gpus, case.cluster.hosts)
    seeds = 16 if case.gpus < 10_000 else 6
    points = []
    bare_s = 0.0
    for every in INTERVALS:
        course = prepare_course(graph, case.cluster, costs, shapes_of(graph), site, STEPS, every, 0)[1]
        calm = course.play().step_ends()
        bare_s = bare_s or replace(course, saves={}).play().step_ends()[-1]
        walls = [add_failures(course, calm, site, mtbf_s, every, seed) for seed in range(seeds)]
        formula = daly.expected_s(bare_s, bare_s / STEPS * every, CHECKPOINT_S, RESTART_S, mtbf_s)
        lost = 1 - bare_s / statistics.fmean(wall.seconds for wall in walls)
        failures = statistics.fmean(wall.failures for wall in walls)
        points.append({"every": every, "lost": lost, "daly_lost": 1 - bare_s / formula, "failures": failures})
    best_s = daly.best_interval_s(CHECKPOINT_S, mtbf_s)
    daly_every = best_s * STEPS / bare_s
    return {"model": case.model, "gpus": case.gpus, "mtbf_s": mtbf_s, "seeds": seeds, "daly_every": daly_every, "points": points}


def ways_of_a_version(size: float, ranks: int, trainer_hosts: int, generators: float, generator_hosts: int) -> dict[str, Any]:
    """Compute the seconds of a version by two ways: from host to host, as rlgraph sends it, and from its ranks to each generator."""
    site = rg.planning.ClusterSite(bandwidth=8 * LINK)
    writers = dict.fromkeys(range(trainer_hosts), ranks / trainer_hosts)
    each = generators / generator_hosts
    readers = {trainer_hosts + host: each for host in range(generator_hosts)}
    direct_s = size * max(each, generators / trainer_hosts) / (8 * LINK)
    shape = soonest(ways(size, writers, readers, least=PART_BYTES, slots=1))
    passed_on_s = crossing_s(size, site, writers, readers, shape=shape, least=PART_BYTES)
    return {"direct_s": direct_s, "passed_on_s": passed_on_s, "shape": shape}


def fan_out() -> dict[str, Any]:
    """Compute the transfer of 1T from 256 to 128 GPUs: by engines' width and by the bytes of a parameter."""
    size, small = shape("1T-A32B").parameters, 2 * shape("8B").parameters
    rows = [
        {"dtype": name, "gpus_an_engine": width, **ways_of_a_version(size * itemsize, 256, 32, 128 / width, 16)}
        for name, itemsize in (("bfloat16", 2), ("fp8", 1))
        for width in (1, 8, 16, 32)
    ]
    hosts = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    by_hosts = [{"generator_hosts": count, **ways_of_a_version(small, 64, 8, 8 * count, count)} for count in hosts]
    return {"1T, 256 to 128 GPUs": rows, "8B, from 8 hosts": by_hosts, "published": dict([TRANSFER])}


def anchors(models: Path) -> Iterator[dict[str, Any]]:
    """Compare published step times with the model's own."""
    for row in PUBLISHED:
        graph = row.case.graph(models)
        plan = rg.compile(graph, row.case.cluster, row.case.costs(graph))
        own_s = plan.prediction.step_s
        nodes = {node.name: node.seconds for node in plan.nodes if node.pool}
        yield {
            "name": row.name,
            "published_s": row.seconds,
            "modelled_s": own_s,
            "ratio": own_s / row.seconds,
            "split": pools(plan),
            "nodes_s": nodes,
        }


def main() -> None:
    parser = command_line(__doc__, smoke="one small case")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        if given.smoke:
            small = Case("8B", 64, "H100", prompts=32, group=16, most_tokens=4096, mean_tokens=1024)
            print(json.dumps(large(small, models), indent=1))
            return
        rows = []
        for case in LARGE:
            rows.append(large(case, models))
            print(json.dumps({name: rows[-1][name] for name in ("split", "step_s", "lost_to", "compile_s", "rehearse_s")}), flush=True)
        values = {
            "machine": f"{platform.machine()}, Python {platform.python_version()}, NumPy {version('numpy')}; all modelled from shapes",
            "site": asdict(STRAGGLING),
            "steps": STEPS,
            "every": EVERY,
            "seeds": SEEDS,
            "large": rows,
            "intervals": [intervals(row, models) for row in rows if row["case"]["model"] in ("8B", "1T-A32B")],
            "fan_out": fan_out(),
            "anchors": list(anchors(models)),
        }
    print(json.dumps(values["anchors"], indent=1))
    write(given.json, values)


if __name__ == "__main__":
    main()
