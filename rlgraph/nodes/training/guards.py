"""Guards of an update: what must hold before weights change, and what happens where it does not."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import torch

from rlgraph import settings
from rlgraph.columns import Columns
from rlgraph.errors import GuardError
from rlgraph.kinds import Range

Limit: TypeAlias = Annotated[float, Range(above=0, rule="a number above 0, or None for no limit")]
log = logging.getLogger("rlgraph.guards")


@dataclass(frozen=True)
class Guards:
    """What an update refuses to learn from.

    `nonfinite`: a loss or a gradient that is NaN or infinite; `empty`: a batch without a token to learn from. "skip" leaves the
    weights as they are for that optimizer step, "stop" ends the job; after `patience` skipped steps in a row it ends either way.
    A mini-batch that is empty in a batch that is not, as a filter may leave it, is passed over and counted, no more.
    `warn_kl` and `stop_kl`: how far the policy may be from the one that sampled (`actor/ppo_kl`, in nats a token, without sign).
    `warn_mismatch` and `stop_mismatch`: how far the engine's log-probs may be from the trainer's, as the mean of
    |old_log_probs - rollout_log_probs| over the tokens, where the update is given both. None is no limit.

    Metrics: `guards/skipped` and `guards/skipped_total` (optimizer steps), `guards/mismatch`, `guards/warnings` (of this step), and
    where there are mini-batches `guards/empty_mini_batches`.
    Raises GraphError for a setting that cannot be.
    """

    nonfinite: Literal["skip", "stop"] = "skip"
    empty: Literal["skip", "stop"] = "skip"
    patience: Annotated[int, Range(least=1, rule="a whole number of skipped steps, at least 1")] = 5
    warn_kl: Limit | None = 1.0
    stop_kl: Limit | None = None
    warn_mismatch: Limit | None = 0.5
    stop_mismatch: Limit | None = None

    def __post_init__(self) -> None:
        settings.check(self)


@dataclass
class UpdateGuard:
    """Decides on each optimizer step of one update node; every rank decides alike, since it is shown the same numbers."""

    node: str
    guards: Guards
    total: int = 0
    in_a_row: int = 0
    skipped: int = 0
    warnings: int = 0
    found: dict[str, float] = field(default_factory=dict)

    def batch(self, columns: Columns) -> bool:
        """Whether there is something to learn from. Raises GuardError where the guards say stop."""
        self.skipped, self.warnings, self.found = 0, 0, {}
        mask = columns["response_mask"]
        assert isinstance(mask, torch.Tensor)
        if not bool(mask.any()):
            self._skip(self.guards.empty, "the batch has no token to learn from: every response is empty or masked out")
            return False
        old, sampled = columns.get("old_log_probs"), columns.get("rollout_log_probs")
        if isinstance(old, torch.Tensor) and isinstance(sampled, torch.Tensor) and old is not sampled:
            mismatch = (old - sampled).abs()[mask].mean().item()
            self.found["guards/mismatch"] = mismatch
            what = "engine and trainer give the sampled tokens log-probs that differ by {:.3g} on average"
            self._limit(what, mismatch, self.guards.warn_mismatch, self.guards.stop_mismatch, "mismatch")
        return True

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        """Whether the optimizer may step, by the metrics of the loss and the norm of the gradients."""
        bad = [name for name, value in metrics.items() if name.endswith(("_loss", "grad_norm")) and not math.isfinite(value)]
        if bad:
            self._skip(self.guards.nonfinite, f"{', '.join(f'{name} is {metrics[name]}' for name in bad)}")
            return False
        what = "the policy is {:.3g} nats a token from the one that sampled"
        self._limit(what, abs(metrics.get("actor/ppo_kl", 0.0)), self.guards.warn_kl, self.guards.stop_kl, "kl")
        self.in_a_row = 0
        return True

    def metrics(self) -> dict[str, float]:
        """What was counted since the batch came in, and over the run."""
        counts = {"guards/skipped": self.skipped, "guards/skipped_total": self.total, "guards/warnings": self.warnings}
        return {name: float(count) for name, count in counts.items()} | self.found

    def _skip(self, answer: str, why: str) -> None:
        self.total, self.in_a_row, self.skipped = self.total + 1, self.in_a_row + 1, self.skipped + 1
        if answer == "stop":
            raise GuardError(f"node '{self.node}': {why}; the weights are as they were. Guards(...='skip') would go on with the next batch")
        if self.in_a_row >= self.guards.patience:
            raise GuardError(
                f"node '{self.node}': {why}, and so it was {self.in_a_row} times in a row; the weights are as they were before. "
                "Look at the rewards and the learning rate, or raise Guards(patience)"
            )
        log.warning("node '%s' skips an optimizer step: %s", self.node, why)

    def _limit(self, what: str, value: float, warn: float | None, stop: float | None, name: str) -> None:
        if stop is not None and not value <= stop:
            raise GuardError(f"node '{self.node}': {what.format(value)}, and stop_{name} is {stop:g}; the weights are as they were")
        if warn is not None and not value <= warn:
            self.warnings += 1
            log.warning("node '%s': %s, and warn_%s is %g", self.node, what.format(value), name, warn)


@dataclass
class Outliers:
    """Counts rewards that lie far outside of what a function has given so far; nothing is changed by it.

    `limit` is in standard deviations of the rewards before (Welford's running mean and variance).
    """

    node: str
    limit: float
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    LEARNT = 100  # rewards before any can be called an outlier

    def look(self, rewards: torch.Tensor) -> int:
        """Count the outliers among these rewards, with a warning for the farthest."""
        found = 0
        if self.count >= self.LEARNT:
            spread = max(math.sqrt(self.squares / self.count), 1e-6 * max(abs(self.mean), 1.0))
            away = (rewards.double() - self.mean).abs() / spread
            found = int((away > self.limit).sum())
            if found:
                row = int(away.argmax())
                log.warning(
                    "node '%s': %d of %d rewards are outliers; response %d got %g, where %d before had mean %.4g and deviation %.4g",
                    *(self.node, found, len(rewards), row, float(rewards[row]), self.count, self.mean, spread),
                )
        for value in rewards.double().tolist():
            self.count += 1
            step = value - self.mean
            self.mean += step / self.count
            self.squares += step * (value - self.mean)
        return found
