"""The job that verl's trainers were timed with, on the same kind of machine: SmolLM2-135M, 1024 responses a step, GRPO.

    python benchmarks/peer_job.py [mode=one_step_off|colocated] [response_tokens=1024] [json=PATH] …

Two GPUs of one host. `one_step_off` trains on one and generates on the other; `colocated` has both do both, in turns, on policy.
verl 0.9.1 on two H200: one-step-off 38 to 40 s a step (generation 38.2, update 9.2), 2.9 to 3.4 s with 64 tokens;
synchronous and colocated 24.2 s (generation 19.0, update 4.9).
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import rlgraph as rg


@dataclass
class Config:
    mode: str = "one_step_off"
    model: str = "smollm2"
    prompts: int = 128  # a step
    group_size: int = 8
    response_tokens: int = 1024  # of every response: the end-of-text token does not end it
    engines_per_gpu: int = 4  # decode steps of a small model are shorter than the engine's own work between two of them
    micro_batch_tokens: int = 65536
    steps: int = 7
    warm_up: int = 2
    json: str = ""


def length(responses: list[str]) -> list[float]:
    """A reward that differs between responses; what it says does not matter here."""
    return [float(len(response)) for response in responses]


SUMS = [{"prompt": f"2 + 3 = 5\n7 + 6 = 13\n{a} + {b} ="} for a in range(1, 10) for b in range(1, 10)]


def graph(cfg: Config) -> rg.Graph:
    colocated = cfg.mode == "colocated"
    rollout_pool = rg.Pool("gpus" if colocated else "rollout")
    train_pool = rollout_pool if colocated else rg.Pool("train")
    model = rg.model_folder(cfg.model)
    generator = rg.Generator(
        model,
        pool=rollout_pool,
        sampling=rg.Sampling(max_tokens=cfg.response_tokens, ignore_eos=True),
        max_context=64 + cfg.response_tokens,
        engines_per_gpu=cfg.engines_per_gpu,
        max_sequences=cfg.prompts * cfg.group_size // cfg.engines_per_gpu,
    )
    policy = rg.Policy(model, pool=train_pool, optimizer=rg.AdamW(lr=1e-6), micro_batch_tokens=cfg.micro_batch_tokens)
    weights = rg.feedback("weights", depth=0 if colocated else 1, buffers=1 if colocated else 2)

    prompts = rg.prompts(SUMS, count=cfg.prompts)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    rewards = rg.reward(length, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph(f"peer_job_{cfg.mode}", step.metrics)


def main() -> None:
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.local_cluster())
    print(plan, flush=True)
    steps = []
    with plan.launch() as job:
        for step in job.steps(cfg.steps):
            steps.append(step)
            print(f"step {step.index}: {step.seconds:.2f} s, generation {step.metrics['timing_s/gen']:.2f}, "
                  f"update {step.metrics['timing_s/update_actor']:.2f}, staleness {step.staleness}", flush=True)  # fmt: skip
        predicted = rg.compile(graph(cfg), rg.local_cluster(), job.costs()).prediction.period_s
    timed = steps[cfg.warm_up :]
    seconds = statistics.median(step.seconds for step in timed)
    names = [name for name in sorted(timed[0].metrics) if name.startswith("timing_s/")]
    parts = {name: statistics.median(step.metrics.get(name, 0.0) for step in timed) for name in names}
    tokens = cfg.prompts * cfg.group_size * cfg.response_tokens
    print(f"{cfg.mode}: {seconds:.2f} s a step (median of {len(timed)}), predicted {predicted:.2f} s")
    print(f"{tokens / seconds:.0f} response tokens/s")
    for name, value in parts.items():
        print(f"  {name}: {value:.3f}")
    if cfg.json:
        from weights import machine

        row = {
            "settings": {key: value for key, value in vars(cfg).items() if key != "json"},
            "step_s": seconds,
            "spread_s": [min(s.seconds for s in timed), max(s.seconds for s in timed)],
            "timings": parts,
            "predicted_s": predicted,
            "response_tokens": tokens,
        }
        Path(cfg.json).write_text(json.dumps(row | machine(), indent=1) + "\n")


if __name__ == "__main__":
    main()
