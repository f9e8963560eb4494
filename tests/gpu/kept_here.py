"""Jobs of which the later ones take the engine that the first has kept, and one with a new engine: `kept_here.py bfloat16|fp8|apart`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.digests import clockless_metrics, odd_tokens
from support.tiny import tiny_qwen

import rlgraph as rg

SUMS = [{"prompt": f"{a} + {b} ="} for a in range(1, 9) for b in range(1, 9)]
how = sys.argv[1]
folder = str(tiny_qwen(Path("model"), "qwen3", head=64))
pool = rg.Pool("gpu", gpus=1)
generator = rg.Generator(
    folder,
    pool=pool,
    sampling=rg.Sampling(max_tokens=24, ignore_eos=True),
    max_context=64,
    memory=0.2,
    max_sequences=64,
    weights_dtype="fp8" if how == "fp8" else None,
)
policy = rg.Policy(folder, pool=rg.Pool("train", gpus=1) if how == "apart" else pool, optimizer=rg.AdamW(lr=1e-3))
weights = rg.feedback("weights", depth=1 if how == "apart" else 0)
rollout = generator.rollout(rg.prompts(SUMS, count=8, seed=3), weights, group_size=4)
step = policy.update(rollout, rg.advantages(rollout, odd_tokens(rollout), estimator=rg.GRPO()), loss=rg.ClippedLoss())
weights.close(step.weights)
plan = rg.compile(rg.Graph("kept", step.metrics), rg.local_cluster())


def launched() -> tuple[list[dict[str, float]], int]:
    with plan.launch(deadline_s=200) as job:
        return [clockless_metrics(step) for step in job.steps(3)], job.pids["generator"]


with rg.runs.warm(engines=True):
    first, pid = launched()
    others = [launched() for _ in range(2)]
with rg.runs.warm():
    new, other = launched()
assert [pid for _, pid in others] == [pid, pid]
assert other != pid
assert len({found["digest/tokens"] for found in first}) == 3  # the weights have changed between the steps
for found in (*(found for found, _ in others), new):
    differ = {name for one, two in zip(first, found, strict=True) for name in one if one[name] != two[name]}
    assert not differ, (differ, first, found)
print("equal")
