"""Write scripts.json: advantages and loss that verl 0.9.1 computes for five of its example scripts, composed by its own configuration.

Runs in the oracle's own environment: `make oracle`.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from batches import batch
from generate import Padded, columns_of, core_algos, glue
from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass

FACTS = json.loads(Path(__file__).with_name("verl_overrides.json").read_text())
SCRIPTS = (
    "examples/cispo_trainer/run_qwen3_8b_fsdp",
    "examples/gspo_trainer/run_qwen3_8b_fsdp",
    "examples/rloo_trainer/run_qwen3_8b_fsdp",
    "verl/experimental/one_step_off_policy/shell/dapo_7b_math_fsdp2_4_12",
    "verl/experimental/one_step_off_policy/shell/grpo_0.6b_gsm8k_fsdp2_2_6",
)
NAMES = {"old_log_probs": "old_log_probs", "advantages": "advantages", "response_mask": "response_mask", "ref_log_prob": "ref_log_probs"}


def composed(script: str) -> Any:
    found = FACTS["scripts"][script]
    apart = "one_step_off" in found["module"]
    path = Path(verl.__file__).parent / ("experimental/one_step_off_policy/config" if apart else "trainer/config")
    where = [f"hydra.searchpath=[file://{Path(verl.__file__).parent / 'trainer' / 'config'}]"] if apart else []
    with initialize_config_dir(str(path), version_base=None):
        return compose("one_step_off_ppo_trainer" if apart else "ppo_trainer", [FACTS["settings"][at] for at in found["settings"]] + where)


def first_step(script: str, name: str) -> dict[str, Any]:
    config, columns = composed(script), columns_of(batch(name, "float64"))
    if config.algorithm.rollout_correction.bypass_mode:
        columns["old_log_probs"] = columns["rollout_log_probs"]
    algorithm = config.algorithm
    options = {"norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo} if algorithm.adv_estimator == "grpo" else {"config": algorithm}
    columns["advantages"], _ = core_algos.get_adv_estimator_fn(algorithm.adv_estimator)(
        token_level_rewards=columns["token_rewards"],
        response_mask=columns["response_mask"],
        index=columns["group_ids"].numpy().astype(object),
        **options,
    )
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rows = Padded({theirs: columns[ours] for theirs, ours in NAMES.items()})
    rows |= {"dp_size": 1, "batch_num_tokens": int(columns["response_mask"].sum()), "global_batch_size": len(columns["response_mask"])}
    output = {"log_probs": columns["log_probs"], "entropy": columns["new_values"].abs()}
    loss, _ = glue.ppo_loss(actor, output, rows)
    advantages = torch.where(columns["response_mask"] > 0, columns["advantages"], 0)
    return {"advantages": np.asarray(advantages).round(9).tolist(), "loss": float(loss)}


def main() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"
    glue.no_padding_2_padding = lambda values, data: values
    steps = {script: {name: first_step(script, name) for name in ("ragged", "singles")} for script in SCRIPTS}
    lines = ",\n".join(f"{json.dumps(script)}: {json.dumps(found)}" for script, found in steps.items())
    Path(__file__).with_name("scripts.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
