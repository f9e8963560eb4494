"""The trace of a run's firings: costs are fitted to it, and it is replayed under other settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rlgraph.errors import PlanError
from rlgraph.plan.plan import Plan
from rlgraph.plan.plan_keys import with_new_names
from rlgraph.plan.schedule import Sampled, Span


@dataclass(frozen=True)
class Trace:
    """A recorded run: its plan, what each worker did, how much was sampled, and the bytes of a published version."""

    plan: Plan
    spans: Sequence[Span]
    sampled: Sequence[Sampled]
    published_bytes: int = 0

    def to_file(self, path: str | Path) -> None:
        """Write the trace as JSON, which `Trace.from_file` reads."""
        Path(path).write_bytes(msgspec.json.encode(replace(self, plan=self.plan.values)))

    @classmethod
    def from_file(cls, path: str | Path) -> "Trace":
        """Read a trace. Raises PlanError for a file that is missing or holds anything else."""
        file = Path(path)
        if not file.is_file():
            raise PlanError(f"replay('{path}'): there is no such trace; rg.record writes trace.json into its folder")
        try:
            raw = msgspec.json.decode(file.read_bytes())
            if isinstance(raw, dict):
                raw["plan"] = with_new_names(raw.get("plan"))
            return msgspec.convert(raw, Trace)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise PlanError(f"replay('{path}'): {error}; give the trace.json that rg.record writes") from None
