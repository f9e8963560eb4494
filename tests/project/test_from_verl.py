"""What docs/from_verl.md tells users to write exists: names of the library, and the keywords of what it calls."""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlgraph as rg

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_verl.md").read_text()
TEXT = re.sub(r"```.*?```", "", PAGE, flags=re.S)  # without the worked example, which runs as it stands
CALLS = sorted(set(re.findall(r"([\w.]+)\(([^()`]*)", " ".join(re.findall(r"`([^`]+)`", TEXT)))))
METHODS: dict[str, Callable[..., Any]] = {
    "Pool": rg.Pool,
    "Generator": rg.Generator,
    "Policy": rg.Policy,
    "Reference": rg.Reference,
    "ClippedLoss": rg.ClippedLoss,
    "rollout": rg.Generator.rollout,
    "policy.update": rg.Policy.update,
    "critic.update": rg.Critic.update,
    "reference.log_probs": rg.Reference.log_probs,
    "reference.old_log_probs": rg.Reference.old_log_probs,
    "job.steps": lambda count: None,
    "job.costs": lambda: None,
    "job.export": lambda folder: None,
    "plan.launch": rg.Plan.launch,
    "launch": rg.Plan.launch,
}


def found(name: str) -> Callable[..., Any]:
    """Return what a name in the document stands for."""
    if name in METHODS:
        return METHODS[name]
    value: Any = rg
    assert name.startswith("rg."), f"the document calls {name}, which is neither of rg nor known to this test"
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    assert callable(value)
    return value


def test_every_name_of_the_library_exists() -> None:
    names = set(re.findall(r"\brg((?:\.\w+)+)", TEXT))
    assert len(names) > 20
    for name in names:
        value: Any = rg
        for part in name.split(".")[1:]:
            value = getattr(value, part)


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[f"{name}({arguments})" for name, arguments in CALLS])
def test_every_keyword_is_accepted(name: str, arguments: str) -> None:
    parameters = inspect.signature(found(name)).parameters
    for keyword in re.findall(r"(\w+)=", arguments):
        assert keyword in parameters, f"{name} takes no {keyword}=; it takes {list(parameters)}"


def test_every_file_it_points_to_exists() -> None:
    for file in re.findall(r"`((?:recipes|docs)/[\w.]+)`", TEXT):
        assert (ROOT / file).exists(), file


# The overrides of verl's two example scripts for one step off, `actor_rollout_ref.` left out.
OVERRIDES = [
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.filter_overlong_prompts",
    "data.truncation",
    "data.prompt_key",
    "algorithm.adv_estimator",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.kl_coef",
    "critic.strategy",
    "hybrid_engine",
    "model.path",
    "model.use_remove_padding",
    "model.enable_gradient_checkpointing",
    "model.override_config.max_position_embeddings",
    "actor.fsdp_config.strategy",
    "actor.fsdp_config.param_offload",
    "actor.fsdp_config.optimizer_offload",
    "actor.fsdp_config.fsdp_size",
    "actor.optim.lr",
    "actor.optim.lr_warmup_steps",
    "actor.optim.weight_decay",
    "actor.ppo_mini_batch_size",
    "actor.ppo_micro_batch_size_per_gpu",
    "actor.use_dynamic_bsz",
    "actor.ppo_max_token_len_per_gpu",
    "actor.use_kl_loss",
    "actor.kl_loss_coef",
    "actor.kl_loss_type",
    "actor.entropy_coeff",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.clip_ratio_c",
    "actor.grad_clip",
    "actor.loss_agg_mode",
    "actor.ulysses_sequence_parallel_size",
    "rollout.n",
    "rollout.name",
    "rollout.nnodes",
    "rollout.n_gpus_per_node",
    "rollout.tensor_model_parallel_size",
    "rollout.gpu_memory_utilization",
    "rollout.load_format",
    "rollout.layered_summon",
    "rollout.enable_chunked_prefill",
    "rollout.max_num_batched_tokens",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.log_prob_micro_batch_size_per_gpu",
    "rollout.log_prob_use_dynamic_bsz",
    "rollout.log_prob_max_token_len_per_gpu",
    "rollout.val_kwargs.temperature",
    "rollout.val_kwargs.top_p",
    "rollout.val_kwargs.top_k",
    "rollout.val_kwargs.do_sample",
    "rollout.val_kwargs.n",
    "ref.log_prob_micro_batch_size_per_gpu",
    "ref.log_prob_use_dynamic_bsz",
    "ref.log_prob_max_token_len_per_gpu",
    "ref.fsdp_config.param_offload",
    "ref.ulysses_sequence_parallel_size",
    "reward.reward_manager.name",
    "reward_kwargs.overlong_buffer_cfg.enable",
    "reward_kwargs.overlong_buffer_cfg.len",
    "reward_kwargs.overlong_buffer_cfg.penalty_factor",
    "reward_kwargs.overlong_buffer_cfg.log",
    "reward_kwargs.max_resp_len",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.val_before_train",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.critic_warmup",
]


def expanded(name: str) -> list[str]:
    """The names that braces in a name stand for."""
    before, brace, rest = name.partition("{")
    if not brace:
        return [name]
    inside, _, after = rest.partition("}")
    return [name for part in inside.split(",") for name in expanded(f"{before}{part.strip()}{after}")]


def test_each_override_of_the_example_scripts_has_a_row() -> None:
    cells = [line.split(" | ")[0] for line in TEXT.splitlines() if line.startswith("| ")]
    named = {
        name.partition("=")[0].removeprefix("actor_rollout_ref.")
        for cell in cells
        for span in re.findall(r"`([^`]+)`", cell)
        for name in expanded(span)
    }
    assert [name for name in OVERRIDES if name not in named] == []


def test_the_worked_example_compiles_as_it_stands() -> None:
    example, use = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    scope: dict[str, Any] = {}
    exec(example, scope)
    rows = [{"prompt": "1 + 1 =", "answer": "2"}] * 1152
    plan = rg.compile(scope["graph"]("model", rows, rows), rg.Cluster(gpus=8, cpus=64))
    assert plan.certificate.staleness_bound == 1
    assert plan.node("update").rows == 1152 * 5
    assert {pool.name: len(pool.gpus) for pool in plan.pools} == {"rollout": 2, "train": 6}
    assert scope["right"]("so 2 pairs\n#### 1,024", "1024") == 1.0
    ast.parse(use)
