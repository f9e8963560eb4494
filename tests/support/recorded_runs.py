"""Records of runs that were only played: schedules whose events take given seconds, and the costs that are read off them."""

from collections.abc import Callable
from dataclasses import replace

from support.simulated_stages import LONG_TAIL, PROMPT_TOKENS, Loop

import rlgraph as rg
from rlgraph.plan.cost_functions import NodeCost
from rlgraph.plan.lengths import Lengths
from rlgraph.plan.play import simulate
from rlgraph.plan.schedule import Event, Sampled, Span

STEPS = 40


def record_run(
    loop: Loop, seconds: Callable[[str, list[int]], float], late_s: float = 0.0, lengths: Lengths = LONG_TAIL, cores: int | None = None
) -> tuple[rg.Plan, list[Span], list[Sampled]]:
    """Return the records of a run whose firings take `seconds(event, response lengths of the step)`, each begun late."""
    cluster = rg.Cluster(gpus=loop.devices) if loop.micro_batch_tokens else rg.Cluster(cpus=cores or loop.devices)
    plan = rg.compile(loop.graph(), cluster)
    drawn = lengths.batches(STEPS, loop.rows).astype(int)

    def taken(event: Event, step: int) -> float:
        return late_s + seconds(event.name, drawn[min(step, STEPS - 1)].tolist())  # a rollout may be ahead of the last step

    spans = [replace(span, start_s=span.start_s + late_s) for span in simulate(plan.schedule, STEPS, taken)]
    sampled = [Sampled("rollout", step, "generator", PROMPT_TOKENS * loop.rows, tuple(drawn[step].tolist())) for step in range(STEPS)]
    return plan, spans, sampled


def cost_of(costs: rg.planning.Costs, node: str) -> NodeCost:
    found = costs.nodes[node]
    assert isinstance(found, NodeCost)
    return found
