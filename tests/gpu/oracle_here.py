"""A job on GPUs against one process on a CPU in float32, which is given its batches: `oracle_here.py colocated|one_step_off`.

The learning rate is high, so that a batch under another version of the weights would show: each token's log-prob of the engine is near
that of the oracle at the version which is said to have sampled it, and far from it at the next. Loss and norm of each update are the
oracle's, and so are the weights' changes, since the log-probs of later batches follow them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.digests import ITEMS
from support.tiny import tiny_llama
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead

STEPS, NEAR, TOLERANCE = 4, 0.05, 2e-3  # nats of a bfloat16 engine; a share of loss and norm
TAKEN = "prompts prompt_mask responses response_mask rollout_log_probs weight_version rewards advantages"
STEP = rg.AdamW(lr=2e-2, eps=1e-3)
kept = Path("batches").absolute()


@rg.node(reads="responses response_mask", writes="rewards")
def odd_tokens(batch: rg.Columns) -> rg.Columns:
    """Reward the share of odd tokens."""
    mask = batch["response_mask"]
    return {"rewards": (((batch["responses"] % 2 == 1) & mask).sum(-1) / mask.sum(-1).clamp(min=1)).float()}


@rg.node(reads=TAKEN, writes="seen", trial=False)
def keep(batch: rg.Columns) -> rg.Columns:
    """Write the batch to a file of its own."""
    torch.save(dict(batch), kept / f"{len(list(kept.iterdir()))}.pt")
    return {"seen": batch["rewards"]}


colocated = sys.argv[1] == "colocated"
kept.mkdir()
folder = str(tiny_llama(Path("model").absolute()))
rollout_pool = rg.Pool("rollout", gpus=1 if torch.cuda.is_available() else None)
train_pool = rollout_pool if colocated else rg.Pool("train", gpus=1 if torch.cuda.is_available() else None)
memory = {"memory": 0.2} if torch.cuda.is_available() else {}
generator = rg.Generator(folder, pool=rollout_pool, sampling=rg.Sampling(max_tokens=16), max_context=48, max_sequences=16, **memory)
policy = rg.Policy(folder, pool=train_pool, optimizer=STEP, dtype="float32")
weights = rg.feedback("weights", depth=0 if colocated else 1)
prompts = rg.prompts(ITEMS, count=4)
rollout = generator.rollout(prompts, weights, group_size=4)
rewards = odd_tokens(rollout)
advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
weights.close(step.weights)
plan = rg.compile(rg.Graph("oracle", step.metrics, keep(rollout, rewards, advantages)), rg.local_cluster())
with plan.launch(deadline_s=200) as job:
    steps = list(job.steps(STEPS))
print("staleness", [done.staleness for done in steps])

oracle = fsdp_engine(PolicyHead(folder), optimizer=STEP, device="cpu", dtype=torch.float32)
batches = [torch.load(kept / f"{index}.pt", weights_only=True) for index in range(STEPS)]
scores = []  # of each version: what the oracle gives each batch
for index, done in enumerate(steps):
    scores.append([oracle.scores(batch) for batch in batches])
    batch = {**batches[index], "old_log_probs": batches[index]["rollout_log_probs"]}
    metrics = oracle.update(batch, rg.ClippedLoss())
    for name in ("actor/pg_loss", "actor/grad_norm"):
        apart = abs(metrics[name] - done.metrics[name])
        print(f"step {index}: {name} {done.metrics[name]:.6f}, the oracle's {metrics[name]:.6f}")
        assert apart <= TOLERANCE * max(abs(metrics[name]), 0.05), (name, apart)
for index, batch in enumerate(batches):
    mask, version = batch["response_mask"], max(0, index - (not colocated))
    assert set(batch["weight_version"][mask].tolist()) == {version}
    near, next_one = (
        float((scores[v][index] - batch["rollout_log_probs"])[mask].abs().mean()) for v in (version, min(version + 1, STEPS - 1))
    )
    print(f"batch {index}: {near:.4f} nats from the oracle's version {version}, {next_one:.4f} from the next")
    assert near < NEAR
    assert version + 1 == STEPS or next_one > 2 * near
print("equal")
