"""What a plan estimates of an update of random sequences: its seconds and its memory."""

import math
import tempfile
from collections.abc import Mapping
from typing import Any


def predicted(*given: Any) -> dict[str, Any]:
    """The seconds of an update in a plan, the bytes on a GPU and what they are for, without those of generators: as `planned_update` is
    given it."""
    need, seconds, on_host = planned_update(*given)
    parts = {part: size for part, size in need.parts if part != "weights in staging"}
    return {"step_s": seconds, "peak_bytes": sum(parts.values()), "parts": parts, "host_bytes": on_host}


def planned_update(
    shape: str,
    size: tuple[int, int],
    gpu: str,
    way: Mapping[str, int],
    micro_batch_tokens: int,
    settings: Mapping[str, Any],
    one_rank_s: float | None = None,
) -> tuple[Any, float, int]:
    """Plan the update of a `size`, sequences and their length, by ranks that share passes in a `way`, with `settings` of `rg.Policy`.

    Returns the memory of a GPU, the seconds, and the bytes of moments on the host; with the seconds of one rank, as if these had been
    profiled.
    """
    import rlgraph as rg
    from benchmarks.lib.shapes import config

    sequences, length = size
    world, prompt = math.prod(way.values()), length // 4
    with tempfile.TemporaryDirectory() as folder:
        config(shape).save_pretrained(folder)
        sampling = rg.Sampling(max_tokens=length + 1 - prompt, ignore_eos=True)
        generator = rg.Generator(folder, pool=rg.Pool("rollout", gpus=1), sampling=sampling, max_context=length + 1)
        policy = rg.Policy(
            folder,
            pool=rg.Pool("train", gpus=world),
            tensor_parallel=way.get("tp", 1),
            context_parallel=way.get("cp", 1),
            expert_parallel=way.get("ep", 1),
            micro_batch_tokens=micro_batch_tokens,
            **settings,
        )
        weights = rg.feedback("weights", depth=1)
        # Three characters count as a token. A pass leaves out the last of a sequence, and each sequence has a prompt of its own.
        prompts = rg.prompts([{"prompt": "x" * 3 * (prompt - 1)}], count=sequences)
        rollout = generator.rollout(prompts, weights)
        rewards = rg.reward(constant, rollout)
        step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.estimators.ReinforcePlusPlus()), loss=rg.ClippedLoss())
        weights.close(step.weights)
        cluster = rg.Cluster(gpus=world + 1, cpus=64, gpus_per_node=world + 1, gpu=gpu)
        costs = None if one_rank_s is None else profiled(one_rank_s, size)
        plan = rg.compile(rg.Graph("update", step.metrics), cluster, costs)
    need = next(need for need in plan.memory if need.pool == "train" and not need.loading)
    on_host = sum(size for host in plan.memory if host.pool is None for part, size in host.parts if part == "optimizer")
    return need, plan.node("update").seconds, on_host


def profiled(seconds: float, size: tuple[int, int]) -> Any:
    """Costs in which one rank has taken so long for the update."""
    import rlgraph as rg
    from rlgraph.plan.cost_functions import NodeCost, Passes, Setting
    from rlgraph.plan.lengths import Lengths

    (sequences, length), prompt = size, size[1] // 4
    tokens = float(length + 1 - prompt)
    measured = Setting(rows=sequences, passes=Passes(length))
    update = NodeCost(token_s=seconds / (sequences * length), measured=measured)
    nodes: dict[str, Any] = {"prompts": 0.0, "rollout": 1.0, "reward": 0.0, "advantages": 0.0, "update": update}
    return rg.planning.Costs(nodes, lengths=Lengths((0.0, 1.0), (tokens, tokens), float(prompt - 1)))


def constant(responses: list[str]) -> list[float]:
    return [1.0 for _ in responses]
