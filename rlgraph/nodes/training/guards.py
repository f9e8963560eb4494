"""Guards of an update: conditions that must hold before weights change. A breach skips the optimizer step, warns, or ends the job."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import torch

from rlgraph import notices, settings
from rlgraph.columns import Columns
from rlgraph.errors import GuardError
from rlgraph.settings import Range

Limit: TypeAlias = Annotated[float, Range(above=0, rule="a number above 0, or None for no limit")]
FLAT = 3  # batches in a row without a difference between rewards: a single one may be chance
log = logging.getLogger("rlgraph.guards")


@settings.refuse_unknown
@dataclass(frozen=True)
class Guards:
    """The batches and optimizer steps that an update refuses.

    >>> import rlgraph as rg
    >>> guards = rg.options.Guards(nonfinite="stop", stop_kl=0.5)  # for policy.update(..., guards=guards)
    >>> guards.stop_kl, guards.empty, guards.patience
    (0.5, 'skip', 5)

    * `nonfinite`: a loss or a gradient is NaN or infinite: "skip" the optimizer step, or "stop" the job.
    * `empty`: a batch has no token to learn from: "skip" the optimizer step, or "stop" the job. An empty mini-batch of a batch with tokens,
      e.g. after a filter, is skipped and counted, and does not use up `patience`.
    * `patience`: the job also stops after this many skipped steps in a row.
    * `warn_kl` and `stop_kl`: the largest distance between the policy and the sampling one: the size of `actor/ppo_kl`, in nats per token.
    * `warn_mismatch` and `stop_mismatch`: the largest distance between the engine's log-probs and the trainer's: the mean of
      |old_log_probs - rollout_log_probs| over the tokens. The update measures it if its inputs carry both columns, that is with
      `policy.log_probs(rollout)` among them; without, `actor/ppo_kl` is the distance to the engine, and `warn_kl` warns.

    None means no limit. Metrics: `guards/skipped` and `guards/skipped_total` (optimizer steps), `guards/mismatch`,
    `guards/warnings` (of this step), and with mini-batches `guards/empty_mini_batches`. Raises GraphError for a value out of its range.
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
    """Decides on each optimizer step of one update node. All ranks see the same numbers, so they decide equally."""

    node: str
    guards: Guards
    total: int = 0
    in_a_row: int = 0
    skipped: int = 0
    warnings: int = 0
    flat: int = 0  # batches in a row in which every advantage is 0
    found: dict[str, float] = field(default_factory=dict)
    zero: list[torch.Tensor] = field(default_factory=list)  # whether each response's advantages are all 0, by the chunks of a batch
    differences: list[tuple[float, int]] = field(default_factory=list)  # of log-probs: the mean over so many tokens, by chunk
    tokens: bool = False  # whether a chunk has a token to learn from

    def batch(self, columns: Columns) -> bool:
        """Decide whether a batch has something to learn from. Raises GuardError if the guards demand a stop."""
        self.begin()
        self.look(columns)
        return self.judge()

    def begin(self) -> None:
        """Begin a batch, which `look` is shown in chunks and `judge` decides on."""
        self.skipped, self.warnings, self.found = 0, 0, {}
        self.zero, self.differences, self.tokens = [], [], False

    def look(self, chunk: Columns) -> None:
        """Measure a chunk of the batch."""
        mask = chunk["response_mask"]
        assert isinstance(mask, torch.Tensor)
        if not bool(mask.any()):
            return
        self.tokens = True
        if isinstance(advantages := chunk.get("advantages"), torch.Tensor):
            self.zero.append(((advantages == 0) | ~mask).all(-1))
        old, sampled = chunk.get("old_log_probs"), chunk.get("rollout_log_probs")
        if isinstance(old, torch.Tensor) and isinstance(sampled, torch.Tensor) and old is not sampled:
            self.differences.append(((old - sampled).abs()[mask].mean().item(), int(mask.sum())))

    def judge(self) -> bool:
        """Decide whether the batch has something to learn from. Raises GuardError if the guards demand a stop."""
        if not self.tokens:
            self._skip(self.guards.empty, "the batch has no token to learn from: every response is empty or masked out")
            return False
        if self.zero:
            self._advantages(torch.cat(self.zero))
        if self.differences:
            mismatch = sum(mean * tokens for mean, tokens in self.differences) / sum(tokens for _, tokens in self.differences)
            self.found["guards/mismatch"] = mismatch
            what = "engine and trainer give the sampled tokens log-probs that differ by {:.3g} on average"
            self._limit(what, mismatch, self.guards.warn_mismatch, self.guards.stop_mismatch, "mismatch")
        return True

    def _advantages(self, zero: torch.Tensor) -> None:
        """Keep the share of responses whose advantages are all 0. Report it if that is every response of three batches in a row."""
        self.found["critic/advantages/zero"] = zero.float().mean().item()
        self.flat = self.flat + 1 if bool(zero.all()) else 0
        if self.flat == FLAT:
            notices.here.say(
                f"node '{self.node}': every advantage of {FLAT} batches in a row is 0, so nothing is learnt: the responses to each prompt "
                "have equal rewards. Look at some samples; the task may be too hard or too easy, or the reward never finds the answer"
            )

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        """Decide from the loss's metrics and the gradients' norm whether the optimizer may step. Raises GuardError if it must stop."""
        bad = [name for name, value in metrics.items() if name.endswith(("_loss", "grad_norm")) and not math.isfinite(value)]
        if bad:
            self._skip(self.guards.nonfinite, f"{', '.join(f'{name} is {metrics[name]}' for name in bad)}")
            return False
        what = "the policy is {:.3g} nats a token from the one that sampled"
        self._limit(what, abs(metrics.get("actor/ppo_kl", 0.0)), self.guards.warn_kl, self.guards.stop_kl, "kl")
        self.in_a_row = 0
        return True

    def metrics(self) -> dict[str, float]:
        """Return the counts of this batch and of the run."""
        counts = {"guards/skipped": self.skipped, "guards/skipped_total": self.total, "guards/warnings": self.warnings}
        return {name: float(count) for name, count in counts.items()} | self.found

    def _skip(self, answer: str, why: str) -> None:
        self.total, self.in_a_row, self.skipped = self.total + 1, self.in_a_row + 1, self.skipped + 1
        if answer == "stop":
            raise GuardError(f"node '{self.node}': {why}; the weights are unchanged. Guards(...='skip') would continue with the next batch")
        if self.in_a_row >= self.guards.patience:
            raise GuardError(
                f"node '{self.node}': {why}, {self.in_a_row} times in a row; the weights are unchanged. "
                "Look at the rewards and the learning rate, or raise Guards(patience)"
            )
        log.warning("node '%s' skips an optimizer step: %s", self.node, why)

    def _limit(self, what: str, value: float, warn: float | None, stop: float | None, name: str) -> None:
        if stop is not None and not value <= stop:
            raise GuardError(f"node '{self.node}': {what.format(value)}, and stop_{name} is {stop:g}; the weights are unchanged")
        if warn is not None and not value <= warn:
            self.warnings += 1
            log.warning("node '%s': %s, and warn_%s is %g", self.node, what.format(value), name, warn)


@dataclass
class Outliers:
    """Counts rewards far outside of a function's earlier rewards, and changes none of them.

    `limit` is in standard deviations of the earlier rewards (Welford's running mean and variance).
    """

    node: str
    limit: float
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    LEARNT = 100  # earlier rewards before the first outlier: fewer have no stable deviation

    def look(self, rewards: torch.Tensor) -> int:
        """Count the outliers among these rewards, and warn of the farthest."""
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
