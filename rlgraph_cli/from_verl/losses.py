"""Writes the algorithm of a training: estimator, loss, and correction of the rollout."""

from collections.abc import Mapping

from rlgraph.errors import ConfigError
from rlgraph_cli.from_verl.shape import ACTOR, Shape
from rlgraph_cli.translate.page import Page, call, show, unless
from rlgraph_cli.translate.settings import Values

KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
ESTIMATORS = {
    "grpo_passk": "rg.estimators.PassK()",
    "rloo": "rg.RLOO()",
    "rloo_vectorized": 'rg.RLOO(singleton="zero")',
    "opo": "rg.estimators.OPO()",
    "gpg": "rg.estimators.GPG()",
    "remax": "rg.estimators.ReMax()",
    "reinforce_plus_plus_baseline": "rg.estimators.ReinforcePlusPlusBaseline()",
    "optimal_token_baseline": "rg.estimators.OptimalTokenBaseline()",
    "tir_optimal_token_baseline": 'rg.estimators.OptimalTokenBaseline(align="token")',
}
LOSSES = {
    "vanilla": "rg.ClippedLoss",
    "gspo": "rg.losses.GSPO",
    "sapo": "rg.losses.SAPO",
    "gpg": "rg.losses.Reinforce",
    "clip_cov": "rg.losses.ClipCov",
    "kl_cov": "rg.losses.KlCov",
    "geo_mean": "rg.losses.GMPO",
    "cispo": "rg.losses.CISPO",
    "dppo_tv": "rg.losses.DPPO",
    "dppo_kl": "rg.losses.DPPO",
    "dro": "rg.losses.DRO",
}
ONE_AGGREGATION = ("sapo", "geo_mean")  # which verl, too, takes the mean of each response of


def estimator_of(values: Values) -> str:
    name, gamma = values["algorithm.adv_estimator"], values.decimal("algorithm.gamma")
    if name == "gae":
        lam = values.decimal("algorithm.lam")
        return call("rg.GAE", gamma=unless(1, gamma), lam=unless(1, lam))
    if name == "reinforce_plus_plus":
        return call("rg.estimators.ReinforcePlusPlus", gamma=unless(1, gamma))
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    return "rg.GRPO()" if values["algorithm.norm_adv_by_std_in_grpo"] else "rg.GRPO(normalize_std=False)"


def loss_of(values: Values, page: Page, shape: Shape, corrected: Mapping[str, str]) -> str:
    mode = values[f"{ACTOR}policy_loss.loss_mode"] or "vanilla"
    special = values.below(f"{ACTOR}policy_loss.")
    low, high = (
        min(1.0, values.decimal(f"{ACTOR}clip_ratio_low")),
        values.decimal(f"{ACTOR}clip_ratio_high"),
    )  # ratios are positive
    options: dict[str, str | None] = {}
    plain = bool(corrected) and shape.bypass and values["algorithm.rollout_correction.loss_type"] != "ppo_clip"
    mode = "gpg" if plain else mode
    if mode in ("vanilla", "gspo", "cispo", "geo_mean", "clip_cov"):
        options["clip_low"] = page.setting("clip_low", low)
        options["clip_high"] = page.setting("clip_high", high)
    if mode.startswith("dppo"):
        options |= {"divergence": show(mode[5:]), "low": show(low), "high": show(high), "clip_c": "3.0"}
    cut = values.decimal(f"{ACTOR}clip_ratio_c")
    if mode == "vanilla" and cut != 3:
        options["clip_c"] = show(cut)
    renamed = {
        "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
        "clip_cov": {"clip_cov_ratio": "fraction", "clip_cov_lb": "low", "clip_cov_ub": "high"},
        "kl_cov": {"kl_cov_ratio": "fraction", "ppo_kl_coef": "coef"},
        "dro": {"dro_beta": "beta"},
    }.get(mode, {})
    options |= {ours: show(special[theirs]) for theirs, ours in renamed.items() if theirs in special}
    aggregation, horizon = values[f"{ACTOR}loss_agg_mode"], values.whole(f"{ACTOR}loss_scale_factor", 0)
    if aggregation != ("seq-mean-token-mean" if mode == "gspo" else "token-mean") and mode not in ONE_AGGREGATION:
        options["aggregation"] = show(aggregation)
    if horizon and aggregation == "seq-mean-token-sum-norm":
        options["horizon"] = str(horizon)
    elif aggregation == "seq-mean-token-sum-norm":
        options["horizon"] = "cfg.max_tokens"
    if entropy := values.decimal(f"{ACTOR}entropy_coeff"):
        options["entropy_coef"] = show(entropy)
    if values[f"{ACTOR}use_kl_loss"] and values.decimal(f"{ACTOR}kl_loss_coef"):
        coef = values.decimal(f"{ACTOR}kl_loss_coef")
        options["kl_coef"] = page.setting(
            "kl_coef" if "kl_coef" not in page.fields else "kl_loss_coef", coef, "of the KL to the reference in the loss"
        )
        kind = KL.get(values[f"{ACTOR}kl_loss_type"], values[f"{ACTOR}kl_loss_type"])
        options["kl_estimator"] = show(kind) if kind != "k3" else None
    written = call(LOSSES[mode], **options)
    if not (corrected and shape.bypass):
        return written
    return call("rg.losses.Bypass", written, call("rg.estimators.RolloutCorrection", **corrected))


def correction_of(values: Values, page: Page, shape: Shape) -> dict[str, str]:
    """Write the weights and rejections of verl's rollout correction; empty where it has none."""
    section = "algorithm.rollout_correction."
    options: dict[str, str] = {}
    level, threshold = values[f"{section}rollout_is"], str(values[f"{section}rollout_is_threshold"])
    normalize = "True" if values[f"{section}rollout_is_batch_normalize"] else None
    ratios = shape.bypass and values[f"{section}loss_type"] == "ppo_clip"  # which correct by themselves: verl, too, leaves out the weights
    if level not in (None, "null", False) and not ratios:
        bounds = bounds_of(threshold, f"{section}rollout_is_threshold")
        kind = "TruncatedIS" if len(bounds) == 1 else "IcePop"
        named = [] if bounds == ["2.0"] else bounds
        options["weights"] = call(f"rg.estimators.{kind}", *named, level=show(level), normalize=normalize)
    statistics, limits = values[f"{section}rollout_rs"], values[f"{section}rollout_rs_threshold"]
    if statistics not in (None, "null", False):
        names = [part.strip() for part in str(statistics).split(",")]
        limited = [part.strip() for part in str(limits).split(",")]
        if len(limited) not in (1, len(names)) or limits is None:
            raise ConfigError(
                f"from-verl: rollout_rs={statistics} has {len(names)} statistics and rollout_rs_threshold={limits}: give a bound for each"
            )
        pairs = zip(names, limited * len(names) if len(limited) == 1 else limited, strict=True)
        read = [(name, bounds_of(bound, f"{section}rollout_rs_threshold")) for name, bound in pairs]
        rejections = [call("rg.estimators.Rejection", show(name), *reversed(bounds)) for name, bounds in read]
        options["rejections"] = "(" + "".join(f"{each}, " for each in rejections).strip() + ")"
    return options


def bounds_of(text: str, key: str) -> list[str]:
    """Read a bound, or two as `0.5_2.0`. Raises ConfigError for anything but numbers."""
    try:
        return [show(float(part)) for part in text.split("_", 1)]
    except ValueError:
        raise ConfigError(f"from-verl: {key}={text} must be one bound such as 2.0, or two such as 0.5_2.0") from None


def critic_update_of(values: Values, shape: Shape) -> str:
    """Write the critic's update; verl cuts its batch as the policy's unless told otherwise."""
    clip, aggregation = values.decimal("critic.cliprange_value"), values["critic.loss_agg_mode"]
    epochs = values.whole("critic.ppo_epochs")
    own = shape.prompts // values.count("critic.ppo_mini_batch_size") if values.has("critic.ppo_mini_batch_size") else shape.mini_batches
    loss = call(
        "rg.losses.ValueLoss",
        clip=unless(0.5, clip),
        aggregation=unless("token-mean", aggregation),
    )
    return call(
        "critic.update",
        "rollout",
        "values",
        "advantages",
        loss=loss,
        epochs=str(epochs) if epochs > 1 else None,
        mini_batches="cfg.mini_batches" if own == shape.mini_batches else str(own),
    )
