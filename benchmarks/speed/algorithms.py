"""Time of advantage estimators, losses and rollout correction against verl 0.9.1's functions on the same input, on the CPU.

    python benchmarks/speed/algorithms.py [--rows 1024] [--tokens 4096] [--rounds 7] [--threads 1] [--json PATH] [--only NAME ...]

Needs `make oracle`, whose Python runs verl in a process beside this one. The two take turns on every item, so that both see the
same machine. Losses are timed forward and backward. Both sides start from the same columns and must give the same result.
The speed-up is that of the medians, since both took turns under the same load. Items `part_...` are what every grouped estimator
begins and ends with, on both sides.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.lib.command import command_line, write
from benchmarks.lib.machine import machine

ORACLE = Path(__file__).parents[2] / ".venv-oracle" / "bin" / "python"
GROUPED = ("grpo", "rloo", "opo", "gpg_advantage", "grpo_passk", "reinforce_plus_plus_baseline", "gdpo")
Columns = dict[str, torch.Tensor]
Item = Callable[[], tuple[torch.Tensor, ...]]


def make_columns(rows: int, tokens: int) -> Columns:
    """Draw one ragged batch, the same in both processes: groups of 8, lengths from 1 to `tokens`."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=g)
    log_probs = -normal(rows, tokens).abs() - 0.01
    old = (log_probs + 0.1 * normal(rows, tokens)).clamp(max=-1e-4)
    last = mask.sum(-1, keepdim=True) - 1
    token_rewards = torch.zeros(rows, tokens).scatter_(1, last, torch.randint(0, 9, (rows, 1), generator=g) / 8)
    return {
        "response_mask": mask,
        "group_ids": (torch.arange(rows) // 8)[torch.randperm(rows, generator=g)],
        "log_probs": log_probs,
        "old_log_probs": old,
        "rollout_log_probs": (old + 0.02 * normal(rows, tokens)).clamp(max=-1e-4),
        "ref_log_probs": log_probs + 0.1 * normal(rows, tokens),
        "advantages": normal(rows, tokens),
        "token_rewards": token_rewards,
        "baseline_rewards": normal(rows),
        "accuracy": torch.randint(0, 9, (rows,), generator=g) / 8,
        "format": torch.randint(0, 9, (rows,), generator=g) / 8,
        "values": normal(rows, tokens),
        "returns": normal(rows, tokens),
        "sum_pi_squared": old.exp().square() + 0.1,
    }


def with_gradient(column: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> Item:
    """Make a function that computes a loss and its gradient."""

    def run() -> tuple[torch.Tensor, ...]:
        leaf = column.detach().requires_grad_()
        value = loss(leaf)
        return value.detach(), *torch.autograd.grad(value, leaf)

    return run


def rlgraph_items(c: Columns) -> dict[str, Item]:
    """The timed functions of rlgraph, by name."""
    import rlgraph.algorithms as alg
    from rlgraph.algorithms.masks import spread

    totals = alg.Totals.of(c["response_mask"])
    policies = (c["old_log_probs"], c["rollout_log_probs"], c["response_mask"])
    icepop, k3 = alg.RolloutCorrection(alg.IcePop()), alg.RolloutCorrection(alg.TruncatedIS(), (alg.Rejection("seq_mean_k3", 0.01),))

    def estimate(estimator: Any) -> Item:
        # verl's grouped estimators sum token rewards; summing here too keeps the input the same.
        grouped = "rewards" in estimator.reads
        return lambda: tuple(estimator({**c, "rewards": c["token_rewards"].sum(-1)} if grouped else c).values())

    def lose(loss: Any) -> Item:
        return with_gradient(c["log_probs"], lambda leaf: loss(leaf, c, totals)[0])

    def correct(correction: alg.RolloutCorrection) -> Item:
        weights = correction.weights
        assert weights is not None
        return lambda: (weights(*policies), correction.acceptance_mask(*policies), alg.diagnostics(*policies, correction))[:1]

    rows = c["baseline_rewards"]
    return {
        "part_sums_of_rewards": lambda: (c["token_rewards"].sum(-1),),
        "part_spread_over_tokens": lambda: (spread(rows, c["response_mask"]),),
        "grpo": estimate(alg.GRPO()),
        "rloo": estimate(alg.RLOO()),
        "opo": estimate(alg.OPO()),
        "gpg_advantage": estimate(alg.GPG()),
        "grpo_passk": estimate(alg.PassK()),
        "reinforce_plus_plus_baseline": estimate(alg.ReinforcePlusPlusBaseline()),
        "gdpo": estimate(alg.GDPO(keys=("accuracy", "format"))),
        "gae": estimate(alg.GAE()),
        "gae_discounted": estimate(alg.GAE(gamma=0.99, lam=0.95)),
        "reinforce_plus_plus": estimate(alg.ReinforcePlusPlus()),
        "remax": estimate(alg.ReMax()),
        "optimal_token_baseline": estimate(alg.OptimalTokenBaseline()),
        "tir_optimal_token_baseline": estimate(alg.OptimalTokenBaseline(align="token")),
        "clipped": lose(alg.ClippedLoss()),
        "gspo": lose(alg.GSPO(aggregation="token-mean")),
        "cispo": lose(alg.CISPO()),
        "reinforce": lose(alg.Reinforce()),
        "gmpo": lose(alg.GMPO()),
        "sapo": lose(alg.SAPO()),
        "dppo_tv": lose(alg.DPPO("tv", clip_c=3.0)),
        "dppo_kl": lose(alg.DPPO("kl", clip_c=3.0)),
        "dro": lose(alg.DRO(beta=0.1)),
        "clip_cov": lose(alg.ClipCov()),
        "kl_cov": lose(alg.KlCov()),
        "bypass_pg_token_icepop": lose(alg.loss("bypass_pg_token_icepop")),
        "value_loss": with_gradient(c["log_probs"], lambda leaf: alg.ValueLoss()(leaf, c, totals)[0]),
        "kl_k3": with_gradient(
            c["log_probs"], lambda leaf: alg.aggregate(alg.kl_penalty(leaf, c["ref_log_probs"]), c["response_mask"], totals)
        ),
        "token_icepop": correct(icepop),
        "token_tis_seq_mean_k3": correct(k3),
    }


def verl_items(c: Columns) -> dict[str, Item]:
    """List verl's counterparts, by the same names."""
    return {**verl_estimators(c), **verl_losses(c)}


def verl_estimators(c: Columns) -> dict[str, Item]:
    """List verl's advantage estimators."""
    from verl.trainer.config.algorithm import AlgoConfig
    from verl.trainer.ppo import core_algos

    mask, ids = c["response_mask"].float(), c["group_ids"].numpy().astype(object)
    ones = torch.ones(len(ids), 1 + mask.shape[1], dtype=torch.long)
    gdpo_batch = {"prompts": ones[:, :1], "attention_mask": ones}
    common = {"token_level_rewards": c["token_rewards"], "response_mask": mask, "config": AlgoConfig()}
    token = {"old_log_probs": c["old_log_probs"], "sum_pi_squared": c["sum_pi_squared"]}

    def estimate(name: str, **extra: Any) -> Item:
        function = core_algos.ADV_ESTIMATOR_REGISTRY[name]
        return lambda: function(**{"index": ids, **common, **extra})

    def gae(gamma: float, lam: float) -> Item:
        function = core_algos.ADV_ESTIMATOR_REGISTRY["gae"]
        return lambda: function(c["token_rewards"], c["values"], mask, gamma, lam)

    gdpo = {"gdpo_reward_keys": ["accuracy", "format"]}
    rewards = {key: c[key].numpy() for key in ("accuracy", "format")}
    return {
        "part_sums_of_rewards": lambda: (c["token_rewards"].sum(-1),),
        "part_spread_over_tokens": lambda: (c["baseline_rewards"].unsqueeze(-1) * mask,),
        **{name: estimate(name) for name in ("grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline", "reinforce_plus_plus")},
        "gpg_advantage": estimate("gpg"),
        "gdpo": estimate("gdpo", config=gdpo, non_tensor_batch=rewards, batch=gdpo_batch),
        "gae": gae(1.0, 1.0),
        "gae_discounted": gae(0.99, 0.95),
        "remax": estimate("remax", reward_baselines=c["baseline_rewards"]),
        **{name: estimate(name, **token) for name in ("optimal_token_baseline", "tir_optimal_token_baseline")},
    }


def verl_losses(c: Columns) -> dict[str, Item]:
    """List verl's losses and corrections."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import ActorConfig, PolicyLossConfig

    mask = c["response_mask"].float()

    def config(**options: Any) -> Any:
        made = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(**options))
        info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask), "loss_scale_factor": None}
        object.__setattr__(made, "global_batch_info", info)
        return made

    def lose(name: str, old: str = "old_log_probs", **options: Any) -> Item:
        function, made = core_algos.POLICY_LOSS_REGISTRY[name], config(**options)

        def loss(leaf: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(0)
            minimised: torch.Tensor = function(c[old], leaf, c["advantages"], mask, "token-mean", made)[0]
            return minimised

        return with_gradient(c["log_probs"], loss)

    def correct(**options: Any) -> Item:
        function = compute_rollout_correction_and_rejection_mask
        return lambda: (function(c["old_log_probs"], c["rollout_log_probs"], mask, **options)[0].batch["rollout_is_weights"],)

    kl = lambda leaf: core_algos.agg_loss(core_algos.kl_penalty(leaf, c["ref_log_probs"], "k3"), mask, "token-mean")  # noqa: E731
    value = lambda leaf: core_algos.compute_value_loss(leaf, c["returns"], c["values"], mask, 0.5)[0]  # noqa: E731
    return {
        **{name: lose(name) for name in ("gspo", "cispo", "sapo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")},
        **{name: lose(theirs) for name, theirs in (("clipped", "vanilla"), ("reinforce", "gpg"), ("gmpo", "geo_mean"))},
        "dro": lose("dro", dro_beta=0.1),
        "bypass_pg_token_icepop": lose(
            "bypass_mode", "rollout_log_probs", rollout_correction=RolloutCorrectionConfig.bypass_pg_token_icepop()
        ),
        "value_loss": with_gradient(c["log_probs"], value),
        "kl_k3": with_gradient(c["log_probs"], kl),
        "token_icepop": correct(rollout_is="token", rollout_is_threshold="0.5_5.0"),
        "token_tis_seq_mean_k3": correct(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01),
    }


def timed(item: Item, mask: torch.Tensor) -> tuple[float, list[float]]:
    """Time one call, and sum its results under the mask to compare two implementations."""
    start = time.perf_counter()
    results = item()
    seconds = time.perf_counter() - start
    return seconds, [float((torch.where(mask, r, 0) if r.shape == mask.shape else r).abs().double().sum()) for r in results]


def serve(columns: Columns) -> None:
    """Time the items named on the standard input, one a line, and answer as JSON; verl's side of the benchmark."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what verl prints is no answer
    items = verl_items(columns)
    for line in sys.stdin:
        answers.write(json.dumps(timed(items[line.strip()], columns["response_mask"])) + "\n")
        answers.flush()


def compare(name: str, items: dict[str, Item], mask: torch.Tensor, verl: subprocess.Popen[str], rounds: int) -> dict[str, Any]:
    """Time one item on both sides alternately, after a warm-up round."""
    assert verl.stdin is not None
    assert verl.stdout is not None
    mine, theirs = [], []
    for turn in range(rounds + 1):
        seconds, sums = timed(items[name], mask)
        verl.stdin.write(name + "\n")
        verl.stdin.flush()
        verl_seconds, verl_sums = json.loads(verl.stdout.readline())
        for left, right in zip(sums, verl_sums, strict=False):
            if abs(left - right) > 1e-3 * max(abs(left), 1e-6):
                raise SystemExit(f"{name}: rlgraph gives {left}, verl {right}; a time of different results means nothing")
        if turn:
            mine.append(seconds)
            theirs.append(verl_seconds)
    speedup = statistics.median(theirs) / statistics.median(mine)
    return {"name": name, "rlgraph_s": mine, "verl_s": theirs, "speedup": speedup, "grouped": name in GROUPED}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    columns = make_columns(options.rows, options.tokens)
    if options.serve:
        serve(columns)
        return
    if not ORACLE.exists():
        raise SystemExit(f"{ORACLE} is not there, which runs verl; set it up with: make oracle")
    command = [
        str(ORACLE),
        "-W",
        "ignore",
        __file__,
        "--serve",
        *(f"--{key}={getattr(options, key)}" for key in ("rows", "tokens", "threads")),
    ]
    verl = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    items = rlgraph_items(columns)
    measured_on = {**machine(), "threads": torch.get_num_threads(), "verl": "0.9.1"}
    print(f"{options.rows} rows x {options.tokens} tokens, least (median, most) of {options.rounds} rounds in ms; {measured_on}\n")
    print(f"{'':30} {'rlgraph':>26} {'verl 0.9.1':>26} {'speed-up':>9}")
    results = []
    for name in options.only or items:
        result = compare(name, items, columns["response_mask"], verl, options.rounds)
        results.append(result)
        times = [
            f"{min(t) * 1e3:9.1f} ({statistics.median(t) * 1e3:.1f}, {max(t) * 1e3:.1f})" for t in (result["rlgraph_s"], result["verl_s"])
        ]
        print(f"{name:30} {times[0]:>26} {times[1]:>26} {result['speedup']:8.1f}x", flush=True)
    assert verl.stdin is not None
    verl.stdin.close()
    verl.wait(timeout=60)
    if options.json:
        shape = {"rows": options.rows, "tokens": options.tokens, "rounds": options.rounds}
        write(options.json, {"machine": measured_on, **shape, "results": results})


if __name__ == "__main__":
    main()
