"""Random ragged batches that the oracle's cases run on. Names say what is special about them."""

import numpy as np

Arrays = dict[str, np.ndarray]

SEEDS = {"ragged": 11, "gaps": 12, "singles": 13, "extreme": 14, "equal": 15}
DTYPES = ("float32", "float64")


def batch(name: str, dtype: str) -> Arrays:
    """Return the columns of a batch, verl's and rlgraph's alike; masks are bool, ids int64, the rest of `dtype`."""
    random = np.random.default_rng(SEEDS[name])
    rows, length = (6, 7) if name == "singles" else (9, 11)
    mask = _mask(name, random, rows, length)
    log_probs = -np.abs(random.normal(0.8, 0.7, (rows, length))) - 1e-3
    spread = 1.0 if name == "extreme" else 0.25
    old = np.minimum(log_probs + spread * random.normal(size=(rows, length)), -1e-4)
    rollout = np.minimum(old + 0.3 * spread * random.normal(size=(rows, length)), -1e-4)
    if name == "extreme":  # far beyond the clamp at 20, both ways
        old[0, :4], old[1, 1], rollout[2, :3], rollout[0, 0] = -45.0, -24.0, -50.0, -0.1
        log_probs[3, :2] = -60.0
    token_rewards = random.integers(-16, 17, (rows, length)) / 8
    if name == "equal":
        token_rewards[:] = 0
        token_rewards[:, 0] = 0.75
    advantages = random.normal(0, 1.5, (rows, length)) * (random.random((rows, length)) > 0.1)
    probabilities = np.exp(old)
    arrays = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "rollout_log_probs": rollout,
        "ref_log_probs": log_probs + 0.8 * spread * random.normal(size=(rows, length)),
        "advantages": advantages,
        "token_rewards": token_rewards,
        "rewards": token_rewards.sum(-1),
        "baseline_rewards": random.integers(-8, 9, rows) / 8,
        "accuracy": random.integers(0, 5, rows) / 4,
        "format": random.integers(0, 3, rows) / 2,
        "values": random.normal(0, 1, (rows, length)),
        "new_values": random.normal(0, 1, (rows, length)),
        "returns": random.normal(0, 1, (rows, length)),
        "rollout_is_weights": random.uniform(0.2, 2.0, (rows, length)),
        "sum_pi_squared": probabilities**2 + (1 - probabilities) ** 2 * random.uniform(0.2, 1.0, (rows, length)),
        "upstream": random.normal(size=(rows, length)),
    }
    return {"response_mask": mask, "group_ids": _groups(name, random, rows), **{key: value.astype(dtype) for key, value in arrays.items()}}


def _mask(name: str, random: np.random.Generator, rows: int, length: int) -> np.ndarray:
    if name == "singles":
        lengths = np.array([1, 1, 2, 1, length, 1])[:rows]
    else:
        lengths = random.integers(2, length + 1, rows)
        lengths[0] = length
        lengths[-1] = 1
    mask = np.arange(length) < lengths[:, None]
    if name in ("gaps", "extreme"):
        gaps = random.random((rows, length)) < 0.3
        gaps[:4, :4] = False
        mask &= ~gaps
    if name == "gaps":
        mask[4] = False
        mask[5, 0] = False
    return mask


def _groups(name: str, random: np.random.Generator, rows: int) -> np.ndarray:
    if name == "ragged":
        return np.repeat(np.arange(3), 3)[:rows]
    if name == "singles":
        return np.array([4, 9, 4, 7, 1, 2])
    if name == "equal":
        return np.array([2, 2, 2, 2, 5, 5, 8, 8, 8])
    return random.permutation(np.array([70, 70, 70, 70, 31, 31, 31, 12, 50]))[:rows]
