"""The oracle's cases, and what each of its items is in rlgraph."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlgraph.algorithms as alg

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden.npz"
HORIZON = 50
Outputs = dict[str, torch.Tensor | float]


@dataclass(frozen=True)
class Case:
    """One call of verl: on which batch, of what, with which options, and what came out."""

    index: int
    batch: str
    dtype: str
    family: str
    item: str
    options: dict[str, Any]
    scalars: dict[str, float]

    @property
    def name(self) -> str:
        options = "-".join(f"{key}={value}" for key, value in self.options.items() if value is not None)
        return f"{self.item}-{self.batch}-{self.dtype}-{options}"

    def columns(self) -> dict[str, torch.Tensor]:
        prefix = f"{self.batch}/{self.dtype}/"
        return {key.removeprefix(prefix): torch.from_numpy(value) for key, value in _arrays().items() if key.startswith(prefix)}

    def expected(self) -> Outputs:
        prefix = f"{self.index}/"
        arrays = {key.removeprefix(prefix): torch.from_numpy(value) for key, value in _arrays().items() if key.startswith(prefix)}
        return {**self.scalars, **arrays}


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


def load_metadata() -> dict[str, Any]:
    """Return how the golden file was made: versions and seeds, and its cases."""
    return json.loads(_arrays()["about"].tobytes())


def cases(family: str) -> list[Case]:
    return [case for case in (Case(index, **entry) for index, entry in enumerate(load_metadata()["cases"])) if case.family == family]


ESTIMATORS = {
    "grpo": lambda o: alg.GRPO(normalize_std=o["normalize_std"]),
    "grpo_vectorized": lambda o: alg.GRPO(),
    "grpo_passk": lambda o: alg.PassK(normalize_std=o["normalize_std"]),
    "rloo": lambda o: alg.RLOO(),
    "rloo_vectorized": lambda o: alg.RLOO(singleton="zero"),
    "opo": lambda o: alg.OPO(),
    "gpg": lambda o: alg.GPG(),
    "reinforce_plus_plus_baseline": lambda o: alg.ReinforcePlusPlusBaseline(),
    "reinforce_plus_plus": lambda o: alg.ReinforcePlusPlus(gamma=o["gamma"]),
    "gae": lambda o: alg.GAE(gamma=o["gamma"], lam=o["lam"]),
    "remax": lambda o: alg.ReMax(),
    "gdpo": lambda o: alg.GDPO(keys=("accuracy", "format"), weights=tuple(o["weights"]) if o["weights"] else None),
    "optimal_token_baseline": lambda o: alg.OptimalTokenBaseline(zero_tail=o["zero_tail"], weighted=o["weighted"]),
    "tir_optimal_token_baseline": lambda o: alg.OptimalTokenBaseline(align="token", zero_tail=o["zero_tail"], weighted=o["weighted"]),
}


def _clips(o: dict[str, Any]) -> dict[str, float]:
    return {"clip_low": o.get("clip_ratio_low", 0.2), "clip_high": o.get("clip_ratio_high", 0.2)}


def _bounds(o: dict[str, Any]) -> dict[str, float]:
    return {"low": o.get("clip_ratio_low", 0.2), "high": o.get("clip_ratio_high", 0.2), "clip_c": o.get("clip_ratio_c", 3.0)}


def _aggregation(o: dict[str, Any]) -> dict[str, Any]:
    return {"aggregation": o["mode"], "horizon": HORIZON if o["mode"] == "seq-mean-token-sum-norm" else None}


LOSSES = {
    "vanilla": lambda o: alg.ClippedLoss(clip_c=o.get("clip_ratio_c", 3.0), **_clips(o), **_aggregation(o)),
    "gspo": lambda o: alg.GSPO(**_clips(o), **_aggregation(o)),
    "cispo": lambda o: alg.CISPO(**_clips(o), **_aggregation(o)),
    "gpg": lambda o: alg.Reinforce(**_aggregation(o)),
    "geo_mean": lambda o: alg.GMPO(**_clips(o)),
    "sapo": lambda o: alg.SAPO(tau_pos=o.get("tau_pos", 1.0), tau_neg=o.get("tau_neg", 1.05)),
    "dppo_tv": lambda o: alg.DPPO(divergence="tv", **_bounds(o)),
    "dppo_kl": lambda o: alg.DPPO(divergence="kl", **_bounds(o)),
    "dro": lambda o: alg.DRO(beta=o["beta"]),
    "clip_cov": lambda o: alg.ClipCov(fraction=o["clip_cov_ratio"], low=o["clip_cov_lb"], high=o["clip_cov_ub"]),
    "kl_cov": lambda o: alg.KlCov(fraction=o["kl_cov_ratio"], coef=o["ppo_kl_coef"]),
    "bypass_mode": lambda o: alg.loss(o["preset"]),
}


def whole_loss(o: dict[str, Any]) -> alg.ClippedLoss:
    """Return the actor's loss with its entropy bonus and KL term."""
    estimator = {"low_var_kl": "k3", "mse": "k2"}.get(o["estimator"], o["estimator"])
    return alg.ClippedLoss(entropy_coef=0.3, kl_coef=0.2, kl_estimator=estimator, **_aggregation(o))


def correction(o: dict[str, Any]) -> alg.RolloutCorrection:
    """Return the correction that verl's settings mean."""
    if "preset" in o:
        return alg.correction(o["preset"])
    weights = None
    if o.get("rollout_is"):
        level, normalize, threshold = o["rollout_is"], o["rollout_is_batch_normalize"], o["rollout_is_threshold"]
        low, _, high = str(threshold).rpartition("_")
        weights = (
            alg.IcePop(level=level, normalize=normalize, low=float(low), high=float(high))
            if low
            else alg.TruncatedIS(level=level, normalize=normalize, threshold=float(high))
        )
    names = o["rollout_rs"].split(",") if o.get("rollout_rs") else []
    thresholds = str(o.get("rollout_rs_threshold")).split(",")
    return alg.RolloutCorrection(weights, tuple(alg.Rejection.from_verl(n, t) for n, t in zip(names, thresholds, strict=bool(names))))
