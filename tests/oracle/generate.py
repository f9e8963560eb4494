"""Write golden.npz: what verl 0.9.1 computes on random ragged batches. Runs in the oracle's own environment: `make oracle`.

Every case is a name, the item of verl it calls, its options, and arrays: outputs and, for losses, gradients. Options are what the
item is called with, in verl's terms; the tests know what they are in rlgraph's.
"""

import asyncio
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from batches import DTYPES, SEEDS, Arrays, batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl import __version__ as verl_version
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
    from verl.trainer.config import KLControlConfig
    from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils.torch_functional import masked_mean
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils import losses as glue

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
HORIZON = 50
GOLDEN = Path(__file__).with_name("golden.npz")
Columns = dict[str, torch.Tensor]
Case = tuple[str, dict[str, Any], dict[str, torch.Tensor | float]]


def columns_of(arrays: Arrays) -> Columns:
    """Return the batch as verl wants it: masks as floats of the batch's dtype."""
    columns = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
    columns["response_mask"] = columns["response_mask"].to(columns["log_probs"].dtype)
    return columns


def estimators(c: Columns) -> Iterator[Case]:
    ids = c["group_ids"].numpy().astype(object)
    common = {"token_level_rewards": c["token_rewards"], "response_mask": c["response_mask"]}
    grouped = {**common, "index": ids}

    def run(name: str, options: dict[str, Any], shown: dict[str, Any] | None = None) -> Case:
        function = core_algos.ADV_ESTIMATOR_REGISTRY[name]
        fresh = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        advantages, returns = function(**fresh)
        return name, shown or {}, {"advantages": advantages, "returns": returns}

    for name in ("rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline", "grpo_vectorized"):
        yield run(name, grouped)
    for flag in (True, False):
        yield run("grpo", {**grouped, "norm_adv_by_std_in_grpo": flag}, {"normalize_std": flag})
        if min(np.unique(c["group_ids"].numpy(), return_counts=True)[1]) > 1:
            config = AlgoConfig(norm_adv_by_std_in_grpo=flag)
            yield run("grpo_passk", {**grouped, "config": config}, {"normalize_std": flag})
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (0.7, 0.0)):
        yield run("gae", {**common, "values": c["values"], "gamma": gamma, "lam": lam}, {"gamma": gamma, "lam": lam})
        yield run("reinforce_plus_plus", {**common, "config": AlgoConfig(gamma=gamma)}, {"gamma": gamma})
    yield run("remax", {**common, "reward_baselines": c["baseline_rewards"]})
    yield from token_baselines(c, grouped, run)
    for weights in (None, [2.0, 0.5]):
        config = {"gdpo_reward_keys": ["accuracy", "format"], "gdpo_reward_weights": weights}
        extra = {"non_tensor_batch": {key: c[key].numpy() for key in ("accuracy", "format")}}
        tokens = torch.ones(len(ids), 2 + c["response_mask"].shape[1], dtype=torch.long)
        extra["batch"] = {"prompts": tokens[:, :2], "attention_mask": tokens}
        yield run("gdpo", {**grouped, "config": config, **extra}, {"weights": weights})


def token_baselines(c: Columns, grouped: dict[str, Any], run: Callable[..., Case]) -> Iterator[Case]:
    options = {**grouped, "old_log_probs": c["old_log_probs"], "sum_pi_squared": c["sum_pi_squared"]}
    mask = c["response_mask"]
    gapless = bool((mask[:, 1:] <= mask[:, :-1]).all())
    for tail in (True, False):
        for weighted in (True, False):
            extra = {"handle_zero_tail": tail, "rollout_is_weights": c["rollout_is_weights"] if weighted else None}
            shown = {"zero_tail": tail, "weighted": weighted}
            yield run("tir_optimal_token_baseline", {**options, **extra}, shown)
            if gapless or not tail:  # with gaps verl begins the tail in the wrong column
                yield run("optimal_token_baseline", {**options, **extra}, shown)


def actor_config(mode: str, mask: torch.Tensor, policy_loss: PolicyLossConfig | None = None, **options: Any) -> ActorConfig:
    """Return an actor's configuration whose totals are those of the batch, every row counted, as verl's trainer sets them."""
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss or PolicyLossConfig(), **options
    )
    info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    info["loss_scale_factor"] = HORIZON if mode == "seq-mean-token-sum-norm" else None
    object.__setattr__(config, "global_batch_info", info)
    return config


def policy_losses(c: Columns) -> Iterator[Case]:
    mask = c["response_mask"]

    def run(name: str, mode: str = "token-mean", weighted: bool = False, shown: dict[str, Any] | None = None, **config: Any) -> Case:
        log_probs = c["log_probs"].clone().requires_grad_()
        torch.manual_seed(0)
        loss, metrics = core_algos.POLICY_LOSS_REGISTRY[name](
            old_log_prob=c["rollout_log_probs" if name == "bypass_mode" else "old_log_probs"],
            log_prob=log_probs,
            advantages=c["advantages"].clone(),
            response_mask=mask,
            loss_agg_mode=mode,
            config=actor_config(mode, mask, **config),
            rollout_is_weights=c["rollout_is_weights"] if weighted else None,
        )
        loss.backward()
        options = {"mode": mode, "weighted": weighted, **(shown or {})}
        return (
            name,
            options,
            {"loss": loss, "gradient": log_probs.grad, **{k: v for k, v in metrics.items() if k.startswith(("actor/", "rollout_corr/"))}},
        )

    for mode in MODES:
        for name in ("vanilla", "gspo", "cispo", "gpg"):
            yield run(name, mode)
    for name in ("vanilla", "gspo", "cispo", "gpg"):
        yield run(name, weighted=True)
    for name in ("vanilla", "gspo", "cispo", "geo_mean", "dppo_tv", "dppo_kl"):
        options = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 20.0 if name.startswith("dppo") else 1.5}
        yield run(name, shown=options, weighted=name == "geo_mean", **options)
    for name in ("dppo_tv", "dppo_kl", "sapo", "geo_mean"):
        yield run(name)
        yield run(name, weighted=True)
    yield run("sapo", shown={"tau_pos": 0.8, "tau_neg": 1.3}, tau_pos=0.8, tau_neg=1.3)
    yield from special_losses(run, bool(((c["log_probs"] - c["old_log_probs"]) * mask).abs().max() < 20))


def special_losses(run: Callable[..., Case], moderate: bool) -> Iterator[Case]:
    for weighted in (False, True):
        yield run("dro", weighted=weighted, shown={"beta": 0.3}, policy_loss=PolicyLossConfig(dro_beta=0.3))
        for ratio in (2e-4, 0.2) if moderate else ():  # beyond 20 verl does not clamp the log-ratio of these two
            covariance = {"clip_cov_ratio": ratio, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
            yield run("clip_cov", weighted=weighted, shown=covariance, policy_loss=PolicyLossConfig(**covariance))
            covariance = {"kl_cov_ratio": ratio, "ppo_kl_coef": 0.1}
            yield run("kl_cov", weighted=weighted, shown=covariance, policy_loss=PolicyLossConfig(**covariance))
    for name in PRESETS:
        if name.startswith("bypass"):
            preset = PolicyLossConfig(rollout_correction=getattr(RolloutCorrectionConfig, name)())
            yield run("bypass_mode", shown={"preset": name}, policy_loss=preset)


class Padded(dict[str, Any]):
    """A batch that is padded already, as far as verl's glue looks at it."""

    def select(self, *names: str) -> "Padded":
        return Padded({name: self[name] for name in names})

    def to_padded_tensor(self) -> "Padded":
        return self


def totals(c: Columns) -> Iterator[Case]:
    """The actor's whole loss, entropy and KL included, on one rank, and as the mean over two that share the rows."""
    glue.no_padding_2_padding = lambda values, data: values
    mask, entropy = c["response_mask"], c["new_values"].abs()

    def run(mode: str, estimator: str, ranks: int) -> Case:
        log_probs, entropies = c["log_probs"].clone().requires_grad_(), entropy.clone().requires_grad_()
        scale = HORIZON if mode == "seq-mean-token-sum-norm" else None
        loss = torch.zeros((), dtype=log_probs.dtype)
        for rank in range(ranks):
            config = ActorConfig(
                strategy="fsdp",
                rollout_n=1,
                ppo_micro_batch_size_per_gpu=1,
                loss_agg_mode=mode,
                loss_scale_factor=scale,
                use_kl_loss=True,
                kl_loss_coef=0.2,
                kl_loss_type=estimator,
                entropy_coeff=0.3,
            )
            own = slice(rank, None, ranks)
            names = {
                "old_log_probs": "old_log_probs",
                "advantages": "advantages",
                "response_mask": "response_mask",
                "ref_log_prob": "ref_log_probs",
            }
            data = Padded({theirs: c[ours][own] for theirs, ours in names.items()})
            data |= {"dp_size": ranks, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
            output = {"log_probs": log_probs[own], "entropy": entropies[own]}
            loss = loss + glue.ppo_loss(config, output, data)[0] / ranks
        loss.backward()
        outputs = {"entropy": entropy, "loss": loss, "gradient": log_probs.grad, "entropy_gradient": entropies.grad}
        return "ppo_loss", {"mode": mode, "estimator": estimator, "ranks": ranks}, outputs

    for ranks in (1, 2):
        for mode in MODES:
            yield run(mode, "low_var_kl", ranks)
        for estimator in ("mse", "k1+"):
            yield run("token-mean", estimator, ranks)


def entropies(c: Columns) -> Iterator[Case]:
    if c["log_probs"].dtype is not torch.float32:
        return  # what the engines compute it in
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(*c["response_mask"].shape, 7, generator=generator)).requires_grad_()
    loss = core_algos.compute_entropy_loss(logits, c["response_mask"])
    loss.backward()
    yield "entropy", {}, {"logits": logits, "loss": loss, "gradient": logits.grad}


class Sequence:
    """One response, as far as verl's reward manager looks at it."""

    def __init__(self, length: int, width: int) -> None:
        attended = torch.arange(width) < length
        self.batch = {"responses": torch.zeros(width, dtype=torch.long), "attention_mask": attended.long()}
        self.non_tensor_batch = {"data_source": "", "reward_model": {"ground_truth": ""}}

    def __getitem__(self, item: object) -> "Sequence":
        return self


def shaping(c: Columns) -> Iterator[Case]:
    width = c["response_mask"].shape[1]
    lengths = (c["response_mask"] * torch.arange(1, width + 1)).amax(-1).long().tolist()  # tool tokens between count

    async def shaped(manager: Any) -> list[float]:
        manager.loop = asyncio.get_running_loop()
        found = []
        for length, reward in zip(lengths, c["rewards"].tolist(), strict=True):

            async def score(reward: float = reward, **ignored: object) -> float:
                return reward

            manager.compute_score = score
            found.append(float((await manager.run_single(Sequence(length, width)))["reward_score"]))
        return found

    for most, buffer, factor in ((width, 3, 1.0), (width - 2, width - 2, 0.5), (4, 1, 2.0)):
        manager = object.__new__(DAPORewardManager)
        manager.overlong_buffer_cfg = SimpleNamespace(enable=True, len=buffer, penalty_factor=factor, log=False)
        manager.max_resp_len, manager.is_async_reward_score, manager.reward_router_address = most, True, None
        manager.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
        rewards = torch.tensor(asyncio.run(shaped(manager)), dtype=torch.float64)
        yield "overlong", {"max_tokens": most, "buffer_tokens": buffer, "factor": factor}, {"rewards": rewards}


def value_losses(c: Columns) -> Iterator[Case]:
    mask = c["response_mask"]
    for mode in MODES:
        for clip in (0.5, 0.2):
            values = c["new_values"].clone().requires_grad_()
            info = actor_config(mode, mask).global_batch_info
            loss, fraction = core_algos.compute_value_loss(values, c["returns"], c["values"], mask, clip, mode, **info)
            loss.backward()
            yield "value_loss", {"mode": mode, "clip": clip}, {"loss": loss, "gradient": values.grad, "critic/vf_clipfrac": fraction}


def kl(c: Columns) -> Iterator[Case]:
    for estimator in ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"):
        log_probs = c["log_probs"].clone().requires_grad_()
        value = core_algos.kl_penalty(log_probs, c["ref_log_probs"], estimator)
        (value * c["upstream"]).sum().backward()
        yield "kl_penalty", {"estimator": estimator}, {"value": value, "gradient": log_probs.grad}
        for controller in () if estimator.endswith("+") else ("adaptive", "fixed"):
            yield kl_in_reward(c, estimator, controller)


def kl_in_reward(c: Columns, estimator: str, controller: str) -> Case:
    """The lines of verl's trainer, whose module would take much to import that computes nothing here."""
    control = core_algos.get_kl_controller(KLControlConfig(type=controller, kl_coef=0.05, target_kl=0.1, horizon=100))
    penalty = core_algos.kl_penalty(c["old_log_probs"], c["ref_log_probs"], estimator) * c["response_mask"]
    rewards = c["token_rewards"] - control.value * penalty
    current = masked_mean(penalty, c["response_mask"], axis=-1).mean(0).item()
    control.update(current_kl=current, n_steps=len(rewards))
    return (
        "kl_in_reward",
        {"estimator": estimator, "controller": controller},
        {"token_rewards": rewards, "kl": current, "next_coef": control.value},
    )


PRESETS = (
    *("decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs", "decoupled_geo_rs"),
    *("decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs", "decoupled_k3_rs_seq_tis"),
    *("decoupled_k3_rs_token_tis", "disabled", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is"),
    *("bypass_pg_token_icepop", "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis"),
)
REJECTIONS = {
    **dict.fromkeys(("token_k1", "seq_sum_k1", "seq_mean_k1"), "0.8_1.3"),
    **dict.fromkeys(("token_k2", "token_k3"), 0.02),
    **dict.fromkeys(("seq_sum_k2", "seq_sum_k3"), 0.1),
    **dict.fromkeys(("seq_mean_k2", "seq_mean_k3"), 0.01),
    **dict.fromkeys(("seq_max_k2", "seq_max_k3"), 0.05),
}


def corrections(c: Columns) -> Iterator[Case]:
    def run(shown: dict[str, Any], **options: Any) -> Case:
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            c["old_log_probs"], c["rollout_log_probs"], c["response_mask"], **options
        )
        outputs = {"mask": mask > 0.5, **metrics}
        if weights is not None:
            outputs["weights"] = weights.batch["rollout_is_weights"]
        return "correction", {**options, **shown}, outputs

    for level in ("token", "sequence"):
        for threshold in (2.0, 1.1, "0.5_5.0", "0.8_1.2"):
            for normalize in (False, True):
                yield run({}, rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalize)
    for name, threshold in REJECTIONS.items():
        yield run({}, rollout_rs=name, rollout_rs_threshold=threshold)
    yield run({}, rollout_rs="token_k1", rollout_rs_threshold=1.25)
    yield run({}, rollout_rs="token_k2,seq_mean_k1", rollout_rs_threshold="0.05,0.7_1.5")
    for name in PRESETS:
        if not name.startswith("bypass"):
            preset = getattr(RolloutCorrectionConfig, name)()
            options = {key: getattr(preset, key) for key in ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")}
            yield run({"preset": name}, **options)


FAMILIES = (estimators, policy_losses, totals, entropies, shaping, value_losses, kl, corrections)


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    cases = []
    for name in SEEDS:
        for dtype in DTYPES:
            columns = batch(name, dtype)
            arrays |= {f"{name}/{dtype}/{key}": value for key, value in columns.items()}
            for family in FAMILIES:
                for item, options, outputs in family(columns_of(columns)):
                    numbers = {k: v for k, v in outputs.items() if not isinstance(v, torch.Tensor) or v.ndim == 0}
                    tensors = {k: v.detach().numpy() for k, v in outputs.items() if k not in numbers}
                    arrays |= {f"{len(cases)}/{key}": value for key, value in tensors.items()}
                    where = {"batch": name, "dtype": dtype, "family": family.__name__, "item": item, "options": options}
                    cases.append({**where, "scalars": {key: float(value) for key, value in numbers.items()}})
    about = {"verl": verl_version, "torch": torch.__version__, "numpy": np.__version__, "seeds": SEEDS, "cases": cases}
    np.savez_compressed(GOLDEN, about=np.frombuffer(json.dumps(about).encode(), dtype=np.uint8), **arrays)
    print(f"{len(cases)} cases, {GOLDEN.stat().st_size / 1e6:.2f} MB, verl {verl_version}", file=sys.stderr)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    main()
