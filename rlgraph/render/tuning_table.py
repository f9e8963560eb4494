"""The plans of a tuning as a table for the terminal: settings, devices of each pool, and predicted rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlgraph.analysis import words
from rlgraph.plan.plan import Plan
from rlgraph.render.tables import aligned, wrapped


@dataclass(frozen=True)
class TuningRow:
    """A row of the table: a plan with its settings and predicted rates."""

    settings: Mapping[str, Any]
    plan: Plan
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None  # prompts and responses; None where the costs hold no lengths
    gpu_s_per_sample: float


def table(rows: Sequence[TuningRow], looked_at: int, left_out: Mapping[str, int], verdict: str, warnings: Sequence[str] = ()) -> str:
    """Write the table, the reasons why plans were left out, the verdict on stale batches, and the warnings not in the verdict."""
    first = rows[0]
    names = list(first.settings)
    device = "GPU" if first.plan.cluster.gpus else "core"
    rate = "tokens/s" if first.tokens_per_s is not None else "samples/s"
    head = [*names, "devices", ">step", f">{rate}", f">{device}-s a sample", "busy"]
    cells = [
        [
            *(str(row.settings[name]) for name in names),
            ", ".join(f"{p.name} {len(p.gpus) or p.cpus}" for p in row.plan.pools),
            words.seconds(row.step_s, row.plan.prediction.cost),
            _rate(row.tokens_per_s if row.tokens_per_s is not None else row.samples_per_s),
            f"{row.gpu_s_per_sample:.4g}",
            ", ".join(f"{p.busy:.0%}" for p in row.plan.pools),
        ]
        for row in rows
    ]
    lines = [f"{words.counted(looked_at, 'plan')} compared on {words.cluster(first.plan.cluster)}, the best first"]
    lines += aligned(head, cells)
    lines += [part for reason, count in left_out.items() for part in wrapped(f"left out {count}: {words.clean(reason)}", indent=2)]
    lines += [part for warning in warnings if warning not in verdict for part in wrapped(f"warning: {warning}", indent=2)]
    lines += [*wrapped(verdict, indent=2)] if verdict else []
    return "\n".join(line.rstrip() for line in lines)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
