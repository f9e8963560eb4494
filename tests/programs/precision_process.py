"""A process that runs one step with dtype="auto", started by a test: `python precision_process.py FOLDER ENGINE`."""

import json
import sys

from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph.analysis.words import graph_settings


def long_enough(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def main(folder: str, engine: str) -> None:
    sampling = rg.Sampling(max_tokens=4)
    generator = rg.Generator(folder, pool=rg.Pool("rollout"), sampling=sampling, engine=engine, max_context=64)
    policy = rg.Policy(folder, pool=rg.Pool("train"))
    graph = grpo_graph(
        generator, policy, [{"prompt": "1 + 1 ="}, {"prompt": "2 + 3 ="}], name="precision", reward=long_enough, count=2, depth=0
    )
    plan = rg.compile(graph, rg.local_cluster())
    with plan.run_here() as job:
        done = next(iter(job.steps(1)))
        loaded = job.progress["generator"].worker.context.engine
        model = loaded.model() if engine == "vllm" else loaded._model
        computes = str(next(model.parameters()).dtype)
    found = {
        "plan": {m.name: [m.dtype, m.why] for m in plan.models},
        "bits": {name: value for name, value in done.metrics.items() if name.startswith("dtype/")},
        "settings": [values["dtype"] for values in graph_settings(graph, plan).values() if "dtype" in values],
        "computes": computes,
        "loss": done.metrics["actor/pg_loss"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
