"""A job on GPUs: `job_here.py colocated|colocated_tensor_parallel|one_step_off|second_buffer` prints the staleness of its steps."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.tiny import tiny_llama

import rlgraph as rg

SUMS = [{"prompt": f"{a} + {b} ="} for a in range(1, 9) for b in range(1, 9)]


def length(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


colocated = sys.argv[1].startswith("colocated")
gpus = 2 if sys.argv[1].endswith("tensor_parallel") else 1  # for one engine, and as many ranks of the trainer in turns
folder = str(tiny_llama(Path("model")))
rollout_pool = rg.Pool("rollout", gpus=gpus)
generator = rg.Generator(
    folder, pool=rollout_pool, sampling=rg.Sampling(max_tokens=8), max_context=48, memory=0.2, max_sequences=16, tensor_parallel=gpus
)
policy = rg.Policy(folder, pool=rollout_pool if colocated else rg.Pool("train", gpus=1))
weights = rg.feedback("weights", depth=0 if colocated else 1, buffers=2 if sys.argv[1] == "second_buffer" else 1)
prompts = rg.prompts(SUMS, count=2)
rollout = generator.rollout(prompts, weights, group_size=2)
step = policy.update(rollout, rg.advantages(rollout, rg.reward(length, rollout), estimator=rg.GRPO()), loss=rg.ClippedLoss())
weights.close(step.weights)
plan = rg.compile(rg.Graph("job", step.metrics), rg.local_cluster())
with plan.launch(deadline_s=200) as job:
    print("staleness", [step.staleness for step in job.steps(3)])
