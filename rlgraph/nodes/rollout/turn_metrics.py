"""The metrics of a batch of conversations: turns, calls, and how often each limit was hit."""

from collections import defaultdict
from collections.abc import MutableMapping, Sequence

from rlgraph.nodes.rollout.decode_loop import Outcome

LIMITS = ("limit_tokens", "limit_turns", "limit_seconds", "limit_cost", "overlong_prompts", "cut_turns", "cut_messages", "malformed_calls")
FAILURES = ("errors", "timeouts", "blocked", "template_errors")
TOOL_COUNTS = ("calls", "failures")  # of the calls of tools


def turn_metrics(
    sampled: Sequence[Outcome], seconds: MutableMapping[str, float], of_tools: bool, share: int, more: Sequence[str] = ()
) -> dict[str, float]:
    """Count what happened in conversations, and clear `seconds`, those of the loop since the last batch. `more` names further counts.

    Metrics are averaged over ranks and chunks of a batch: a count is reported `share` times, so that the average is the total.
    """
    rows = max(len(sampled), 1)
    totals: dict[str, float] = defaultdict(float)
    for one in sampled:
        for name, value in one.counts.items():
            totals[name] += value
    counted = (*LIMITS, *FAILURES, "tokens", "cost", *more)
    found = {name: float(totals[name]) * share for name in counted}
    found |= {name: seconds.get(name, 0.0) * share for name in ("close_errors", "reply_s")}
    found |= {"idle_s": seconds.get("idle_s", 0.0), "turns_mean": totals["turns"] / rows}
    found |= _quantiles("turns", [one.counts["turns"] for one in sampled])
    found |= _quantiles("seconds", [one.counts["seconds"] for one in sampled])
    seconds.clear()
    infos = {name: value for name, value in totals.items() if name.startswith("info/")}
    if of_tools:
        found |= {name: float(totals[f"info/{name}"]) * share for name in TOOL_COUNTS}
        return {f"tools/{name}": value for name, value in found.items()}
    metrics = {f"agent/{name}": value for name, value in (found | {name: value / rows for name, value in infos.items()}).items()}
    return metrics | _spread([sum(one.rewards.values()) for one in sampled])


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median, the 90th and the 99th percentile and the most: values that occurred, not averages of them."""
    ordered = sorted(values) or [0.0]
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {f"{name}/{key}": float(ordered[min(int(share * len(ordered)), len(ordered) - 1)]) for key, share in places.items()}


def _spread(rewards: Sequence[float]) -> dict[str, float]:
    if not rewards:
        return {}
    spread = {"mean": sum(rewards) / len(rewards), "max": max(rewards), "min": min(rewards)}
    return {f"critic/rewards/{name}": value for name, value in spread.items()}
