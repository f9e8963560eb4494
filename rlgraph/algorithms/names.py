"""Algorithms by name, for configuration: `estimator("grpo")`, `loss("gspo", clip_high=4e-4)`, `correction("decoupled_k3_rs")`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlgraph.algorithms.advantages import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    OptimalTokenBaseline,
    PassK,
    ProcessGRPO,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from rlgraph.algorithms.correction import BYPASS, DECOUPLED, RolloutCorrection
from rlgraph.algorithms.policy_losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    Bypass,
    ClipCov,
    ClippedLoss,
    KlCov,
    ProximalLoss,
    Reinforce,
)
from rlgraph.algorithms.supervised_losses import DPO, IPO, KTO, ORPO, SFTLoss, SimPO
from rlgraph.errors import GraphError

ESTIMATORS: Mapping[str, Callable[..., Any]] = {
    "gae": GAE,
    "grpo": GRPO,
    "dr_grpo": partial(GRPO, normalize_std=False),
    "grpo_process": ProcessGRPO,
    "grpo_passk": PassK,
    "gdpo": GDPO,
    "rloo": RLOO,
    "opo": OPO,
    "gpg": GPG,
    "remax": ReMax,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "optimal_token_baseline": OptimalTokenBaseline,
    "tir_optimal_token_baseline": partial(OptimalTokenBaseline, align="token"),
}


def _bypass(name: str, **options: Any) -> Bypass:
    loss = Reinforce(**options) if name.startswith("bypass_pg") else ClippedLoss(**options)
    return Bypass(loss, BYPASS[name])


LOSSES: Mapping[str, Callable[..., Any]] = {
    "clipped": ClippedLoss,
    "dapo": partial(ClippedLoss, clip_low=0.2, clip_high=0.28),
    "gspo": GSPO,
    "cispo": CISPO,
    "reinforce": Reinforce,
    "gmpo": GMPO,
    "sapo": SAPO,
    "clip_cov": ClipCov,
    "kl_cov": KlCov,
    "dppo_tv": partial(DPPO, divergence="tv"),
    "dppo_kl": partial(DPPO, divergence="kl"),
    "dro": DRO,
    "proximal": ProximalLoss,
    "dpo": DPO,
    "ipo": IPO,
    "kto": KTO,
    "orpo": ORPO,
    "simpo": SimPO,
    "sft": SFTLoss,
    "dft": partial(SFTLoss, dft=True),
    **{name: partial(_bypass, name) for name in BYPASS},
}


def estimator(name: str, **options: Any) -> Any:
    """Make the advantage estimator called `name` (one of `ESTIMATORS`), with its options.

        >>> estimator("dr_grpo")
        GRPO(singleton='reward', normalize_std=False)

    Raises GraphError for an unknown name, with those that exist, and for an unknown option.
    """
    return _make("estimator", ESTIMATORS, name, options)


def loss(name: str, **options: Any) -> Any:
    """Make the policy loss called `name` (one of `LOSSES`), with its options; a `bypass_...` loss takes those of its inner loss.

        >>> loss("dapo").clip_high
        0.28

    Raises GraphError for an unknown name, with those that exist, and for an unknown option.
    """
    return _make("loss", LOSSES, name, options)


def correction(name: str) -> RolloutCorrection:
    """Look up the rollout correction that verl's preset `name` stands for.

        >>> correction("decoupled_k3_rs").rejections
        (Rejection(statistic='seq_mean_k3', high=0.01, low=None),)

    Raises GraphError for an unknown name, with those that exist, and for a `bypass_...` preset, which is a loss.
    """
    if name in BYPASS:
        raise GraphError(f"correction '{name}' takes ratios against the rollout inside of the loss; use it as a loss: loss='{name}'")
    if name not in DECOUPLED:
        raise GraphError(f"there is no correction '{name}'; the corrections are {sorted(DECOUPLED)}")
    return DECOUPLED[name]


def _make(kind: str, table: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any]) -> Any:
    if name not in table:
        raise GraphError(f"there is no {kind} '{name}'; choose one of {sorted(table)}")
    try:
        return table[name](**options)
    except TypeError as error:
        raise GraphError(f"{kind} '{name}' cannot be made with {dict(options)}: {error}; see docs/algorithms.md for its options") from error
