"""Metrics of the difference between trainer and engine, and of its correction. Names are verl's.

For an empty mask the result is empty.
"""

from collections.abc import Callable

import torch

from rlgraph.algorithms.correction import IcePop, ImportanceWeights, Rejection, RolloutCorrection, masked_log_ratio
from rlgraph.algorithms.kl import CLAMP
from rlgraph.algorithms.masks import EPSILON, Totals, count, keep, lengths, masked_mean, masked_sum
from rlgraph.algorithms.policy_loss import Metrics, to_floats


@torch.no_grad()
def diagnostics(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    correction: RolloutCorrection | None = None,
) -> dict[str, float]:
    """Measure the distance between trainer and engine from their log-probs `[B, T]`: 13 metrics, and the metrics of the correction.

        >>> found = diagnostics(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2).bool())
        >>> len(found), round(found["rollout_corr/kl"], 4)
        (13, 0.5)

    All names begin with `rollout_corr/`. Perplexities, KL and chi-squared are of the two policies. Weights add 14 (`rollout_is_...`),
    each rejection up to 15 (`rollout_rs_...`) and 2 in total. An effective sample size of 0 means that every weight is 0.

    Raises DataError for tensors of different shapes, or a mask that is not bool.
    """
    log_ratio = masked_log_ratio("diagnostics", old_log_probs, rollout_log_probs, response_mask)
    if not bool(response_mask.any()):
        return {}
    tokens = count(response_mask)
    sums, rows = _policies(old_log_probs, rollout_log_probs, log_ratio, response_mask)
    metrics = {name: total / (tokens.to(total.dtype) + EPSILON) for name, total in sums.items()}
    metrics |= {name: values.mean() for name, values in rows.items()}
    metrics |= {"log_ppl_diff_max": rows["log_ppl_diff"].max(), "log_ppl_diff_min": rows["log_ppl_diff"].min()}
    if correction is not None and correction.weights is not None:
        metrics |= _weights(correction.weights, log_ratio, response_mask, tokens)
    if correction is not None and correction.rejections:
        rejected = torch.zeros_like(response_mask)
        for rejection in correction.rejections:
            distance = rejection.distance(log_ratio, response_mask)
            metrics |= _rejection(rejection, distance, response_mask)
            rejected |= ~(rejection.accepts(distance) if rejection.by_token else rejection.accepts(distance)[:, None])
        rejected &= response_mask
        metrics["rollout_rs_masked_fraction"] = count(rejected) / tokens
        metrics["rollout_rs_seq_masked_fraction"] = rejected.any(-1).double().mean()
    return {f"rollout_corr/{name}": value for name, value in to_floats(metrics).items()}


@torch.no_grad()
def partial_diagnostics(
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    totals: Totals,
    correction: RolloutCorrection,
    kept: torch.Tensor,
) -> dict[str, float]:
    """Compute this micro-batch's share of those metrics that add up over micro-batches: means over the mini-batch's tokens or rows.

    Extremes, deviations and the effective sample size do not add up. A row without tokens adds nothing. `kept` `[b, T]` is the
    correction's own mask of what no rejection takes out.

    Raises DataError for tensors of different shapes, or a mask that is not bool.
    """
    log_ratio = masked_log_ratio("partial_diagnostics", log_probs, rollout_log_probs, response_mask)
    sums, rows = _policies(log_probs, rollout_log_probs, log_ratio, response_mask)
    if correction.weights is not None:
        raw = correction.weights.raw(log_ratio, response_mask)
        sums["rollout_is_mean"] = correction.weights.bound(raw).sum()
        high, low = _beyond(correction.weights, log_ratio, raw, response_mask)
        if correction.weights.level == "sequence":
            rows["rollout_is_ratio_fraction_high"], rows["rollout_is_ratio_fraction_low"] = high, low
        else:
            sums["rollout_is_ratio_fraction_high"], sums["rollout_is_ratio_fraction_low"] = count(high), count(low)
    if correction.rejections:
        rejected = response_mask & ~kept
        sums["rollout_rs_masked_fraction"] = count(rejected)
        rows["rollout_rs_seq_masked_fraction"] = rejected.any(-1)
    present = response_mask.any(-1)
    metrics = {name: total / max(totals.tokens, 1) for name, total in sums.items()}
    metrics |= {name: masked_sum(values, present) / max(totals.rows, 1) for name, values in rows.items()}
    return {f"rollout_corr/{name}": value for name, value in to_floats(metrics).items()}


def _mean(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Average values that are 0 outside of the mask over `tokens` tokens."""
    return values.sum() / (tokens.to(values.dtype) + EPSILON)


def _policies(trainer: torch.Tensor, rollout: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> tuple[Metrics, Metrics]:
    """Compare the two policies: sums over tokens, and statistics of each row `[B]`."""
    trainer_mean, rollout_mean = masked_mean(trainer, mask, -1), masked_mean(rollout, mask, -1)
    difference = rollout_mean - trainer_mean
    sums = {
        "kl": -log_ratio.sum(),
        "k3_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
        "chi2_token": log_ratio.clamp(-CLAMP, CLAMP).mul_(2).expm1_().sum(),
    }
    rows = {
        "training_ppl": (-trainer_mean).exp(),
        "training_log_ppl": -trainer_mean,
        "rollout_ppl": (-rollout_mean).exp(),
        "rollout_log_ppl": -rollout_mean,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": difference.exp(),
        "chi2_seq": torch.expm1(2 * log_ratio.sum(-1).clamp(-CLAMP, CLAMP)),
    }
    return sums, rows


def _weights(weights: ImportanceWeights, log_ratio: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor) -> Metrics:
    raw = weights.raw(log_ratio, mask)
    bounded = weights.bound(raw)
    low, high = weights.bounds()
    mean = _mean(bounded, tokens)
    # Of centered weights, so that a small variance is not lost beside the square of the mean.
    variance = _mean(keep(bounded - mean, mask).square_(), tokens)
    ess_denominator = (variance + mean.square()) / (mean + 1e-8).square()
    metrics = {
        "rollout_is_mean": mean,
        **_extremes(weights, log_ratio, raw, bounded, mask, tokens),
        "rollout_is_std": variance.sqrt(),
        "rollout_is_eff_sample_size": torch.where(ess_denominator > 0, 1 / ess_denominator, 0.0),
    }
    counts = lengths(mask, raw.dtype)
    rows, raw_rows = bounded.sum(-1) / counts, raw.sum(-1) / counts
    metrics |= {
        **_row_statistics("rollout_is_seq", rows),
        "rollout_is_seq_max_deviation": (rows - 1).abs().max(),
        "rollout_is_seq_fraction_high": (raw_rows > high).double().mean(),
        "rollout_is_seq_fraction_low": (raw_rows < low).double().mean(),
    }
    if isinstance(weights, IcePop):
        metrics["rollout_is_oob_ratio"] = count(((raw < low) | (raw > high)) & mask) / tokens
    if weights.normalize:
        metrics["rollout_is_batch_norm_factor"] = torch.tensor(weights.scale(bounded, mask), dtype=torch.float64, device=mask.device)
    return metrics


def _extremes(
    weights: ImportanceWeights,
    log_ratio: torch.Tensor,
    raw: torch.Tensor,
    bounded: torch.Tensor,
    mask: torch.Tensor,
    tokens: torch.Tensor,
) -> Metrics:
    high, low = _beyond(weights, log_ratio, raw, mask)
    if weights.level == "sequence":
        ratios = _ratios_of_rows(log_ratio)
        return {
            "rollout_is_max": ratios.max(),
            "rollout_is_min": ratios.min(),
            "rollout_is_ratio_fraction_high": high.double().mean(),
            "rollout_is_ratio_fraction_low": low.double().mean(),
        }
    return {
        "rollout_is_max": bounded.max(),
        "rollout_is_min": torch.where(mask, bounded, float("inf")).min(),
        "rollout_is_ratio_fraction_high": count(high) / tokens,
        "rollout_is_ratio_fraction_low": count(low) / tokens,
    }


def _beyond(
    weights: ImportanceWeights, log_ratio: torch.Tensor, raw: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flag the ratios above and those below the bounds: of responses `[B]` or of tokens `[B, T]`, by the level of the weights."""
    low, high = weights.bounds()
    if weights.level == "sequence":
        ratios = _ratios_of_rows(log_ratio)
        return ratios > high, ratios < low
    return (raw > high) & mask, (raw < low) & mask


def _ratios_of_rows(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.sum(-1).double().clamp(max=CLAMP).exp()


def _rejection(rejection: Rejection, distance: torch.Tensor, mask: torch.Tensor) -> Metrics:
    """Describe one rejection, by the distance of each token `[B, T]`, or of each response `[B]` for all of its tokens."""
    low, high = rejection.bounds()
    two_sided = rejection.statistic.endswith("k1")
    lengths_of_rows = count(mask, -1).to(distance.dtype)
    present = lengths_of_rows > 0
    rows = (masked_mean(distance, mask, -1) if rejection.by_token else distance)[present]
    selected = distance[mask] if rejection.by_token else rows

    def mean(values: torch.Tensor) -> torch.Tensor:
        """Average over tokens; all tokens of a response share its value."""
        return masked_mean(values, mask) if rejection.by_token else (values * lengths_of_rows).sum() / lengths(mask, values.dtype, None)

    capped = distance.clamp(low if two_sided else 0.0, high)
    rejected = ~rejection.accepts(distance)
    metrics = {
        "mean": mean(distance),
        "max": selected.max(),
        "min": selected.min(),
        "fraction_high": (selected > high).double().mean(),
        "fraction_low": (selected < low).double().mean(),
        "std": mean((capped - mean(capped)).square()).sqrt(),
        **_row_statistics("seq", rows),
        "seq_max_deviation": rows.abs().max(),
        "seq_fraction_high": (rows > high).double().mean(),
        **({"seq_fraction_low": (rows < low).double().mean()} if two_sided else {}),
        "masked_fraction": mean(rejected.to(distance.dtype)),
        "seq_masked_fraction": (rejected & mask if rejection.by_token else rejected[:, None]).any(-1)[present].double().mean(),
    }
    return {f"rollout_rs_{rejection.statistic}_{name}": value for name, value in metrics.items()}


def _row_statistics(prefix: str, rows: torch.Tensor) -> Metrics:
    deviation: Callable[[torch.Tensor], torch.Tensor] = torch.std if len(rows) > 1 else torch.zeros_like
    return {
        f"{prefix}_mean": rows.mean(),
        f"{prefix}_std": deviation(rows).squeeze(),
        f"{prefix}_max": rows.max(),
        f"{prefix}_min": rows.min(),
    }
