"""A process that runs one step with dtype="auto", started by a test: `python precision_process.py FOLDER ENGINE`."""

import json
import sys

import rlgraph as rg
from rlgraph.analysis.words import graph_settings


def long_enough(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def main(folder: str, engine: str) -> None:
    sampling = rg.Sampling(max_tokens=4)
    generator = rg.Generator(folder, pool=rg.Pool("rollout"), sampling=sampling, engine=engine, max_context=64)
    policy = rg.Policy(folder, pool=rg.Pool("train"))
    weights = rg.feedback("weights", depth=0)
    prompts = rg.prompts([{"prompt": "1 + 1 ="}, {"prompt": "2 + 3 ="}], count=2)
    rollout = generator.rollout(prompts, weights, group_size=2)
    advantages = rg.advantages(rollout, rg.reward(long_enough, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    graph = rg.Graph("precision", step.metrics)
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
