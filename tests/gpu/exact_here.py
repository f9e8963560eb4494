"""A job with exact=True on one GPU, models in turns: every ratio before an update is 1. `exact_here.py [MODEL]`."""

import sys

import rlgraph as rg

STEPS = 4
folder = rg.model_folder(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
sums = [{"prompt": f"{a} + {b} ="} for a in range(1, 9) for b in range(1, 9)]


def odd(responses: list[str]) -> list[float]:
    return [float(len(response) % 2) for response in responses]


pool = rg.Pool("gpu", gpus=1)
sampling = rg.Sampling(max_tokens=64, temperature=0.8, ignore_eos=True)
generator = rg.Generator(folder, pool=pool, sampling=sampling, max_context=256, memory=0.1, max_sequences=128, dtype="bfloat16")
policy = rg.Policy(folder, pool=pool, optimizer=rg.AdamW(lr=1e-4), dtype="bfloat16", exact=True)
weights = rg.feedback("weights", depth=0)
rollout = generator.rollout(rg.prompts(sums, count=16), weights, group_size=8)
advantages = rg.advantages(rollout, rg.reward(odd, rollout), estimator=rg.GRPO())
step = policy.update(rollout, advantages, policy.log_probs(rollout), loss=rg.ClippedLoss())
weights.close(step.weights)
plan = rg.compile(rg.Graph("exact", step.metrics), rg.local_cluster())
print(plan, flush=True)
with plan.launch(deadline_s=200) as job:
    for number, found in enumerate(job.steps(STEPS)):
        names = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "exact/tokens_checked")
        print(number, {name: found.metrics[name] for name in names}, flush=True)
        assert found.metrics["actor/ppo_kl"] == 0.0
        assert found.metrics["exact/tokens_checked"] == 4 * sampling.max_tokens
        assert found.metrics["actor/grad_norm"] > 0
print("equal", flush=True)
