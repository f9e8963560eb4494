"""`rlgraph from-verl`: what is read, what becomes of it, the recipe, and what is refused."""

import ast
import contextlib
import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.batches import batch
from pyarrow import Table
from pyarrow.parquet import write_table
from safetensors.torch import save_file
from support import forked_workers
from support.paths import TESTS
from support.qwen3_shapes import QWEN3_8B, QWEN3_30B_A3B
from typer.testing import CliRunner

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import ConfigError
from rlgraph.graph.graph import Graph
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES
from rlgraph_cli import recipe as recipes
from rlgraph_cli.app import app
from rlgraph_cli.from_verl.command import translate
from rlgraph_cli.from_verl.recipe import write_recipe
from rlgraph_cli.from_verl.script import Call, parse_override, read_call
from rlgraph_cli.from_verl.settings import TABLES, values_of
from rlgraph_cli.translate.settings import Setting

FACTS: dict[str, Any] = json.loads((TESTS / "oracle" / "verl_overrides.json").read_text())
SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
NAME=GRPO-$(basename "${MODEL_PATH:-/models/Qwen3-0.6B}")
CKPTS="${HOME}/ckpts/${NAME}"
n_rollout=2
mkdir -p "$CKPTS"
echo "what a shell writes" > written_by_the_script.txt
EXTRA=()
case "$DEVICE" in
    gpu) EXTRA+=("actor_rollout_ref.rollout.gpu_memory_utilization=0.6") ;;
    *) exit 1 ;;
esac
# data.train_batch_size=1 is a comment
python3 -m verl.experimental.one_step_off_policy.main_ppo \
    --config-name='one_step_off_ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']" \
    data.train_batch_size=1152 data.max_prompt_length=$((1024 / 2)) \
    actor_rollout_ref.actor.ppo_mini_batch_size=192 \
    actor_rollout_ref.rollout.n=5 \
    trainer.logger='["console","tensorboard"]' \
    trainer.n_gpus_per_node=$((8 - n_rollout)) rollout.n_gpus_per_node=${n_rollout} \
    "${EXTRA[@]}" "$@" 2>&1 | tee train.log
"""


def script(folder: Path, text: str = SCRIPT) -> Path:
    path = folder / "train.sh"
    path.write_text(text.replace('echo "what a shell writes" > written_by_the_script.txt\n', ""))
    return path


def given(call: Call) -> dict[str, Any]:
    return {setting.key: setting.value for setting in call.settings}


def test_a_script_is_read_as_bash_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    call = read_call(script(tmp_path), ["trainer.total_epochs=2"])
    assert (call.module, call.config) == ("verl.experimental.one_step_off_policy.main_ppo", "one_step_off_ppo_megatron_trainer")
    assert given(call) == {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": ["/home/me/a.parquet", "/home/me/b.parquet"],
        "data.train_batch_size": 1152,
        "data.max_prompt_length": 512,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 192,
        "actor_rollout_ref.rollout.n": 5,
        "trainer.logger": ["console", "tensorboard"],
        "trainer.n_gpus_per_node": 6,
        "rollout.n_gpus_per_node": 2,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
        "trainer.total_epochs": 2,
    }
    lines = {setting.key: setting.line for setting in call.settings}
    assert (lines["data.train_batch_size"], lines["trainer.total_epochs"]) == (18, 0)  # the comment in front is none


@pytest.mark.parametrize(
    "line",
    [
        "echo text > made",
        "cat > made <<END\ntext\nEND",
        "/usr/bin/touch made",
        "touch made",
        "PATH=/usr/bin; touch made",
        'python3 -c \'open("made", "w")\'',
        "exec touch made",
        "bash -c 'touch made'",
        "source ./other.sh",
        ". ./other.sh",
        "set +r; touch made",
        "command -p touch made",
        "enable -f ./made.so made",
    ],
)
def test_nothing_of_a_script_runs_but_the_shell(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.sh").write_text("touch made\n/usr/bin/touch made\n")
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(ConfigError):
        read_call(script(tmp_path, f"{line}\npython3 -m verl.trainer.main_ppo a=1\n"), [])
    assert not (tmp_path / "made").exists()


def test_a_configuration_is_read_by_its_leaves(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("data: {train_batch_size: 64}\nactor_rollout_ref: {actor: {optim: {lr: 1e-6}}}\nrollout: {nnodes: 1}\n")
    call = read_call(file, ["data.train_batch_size=32"])
    assert call.module == "verl.experimental.one_step_off_policy.main_ppo"
    assert given(call) == {"data.train_batch_size": 32, "actor_rollout_ref.actor.optim.lr": 1e-6, "rollout.nnodes": 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo nothing", "starts no training of verl"),
        ("set -u\nX=1\npython3 -m verl.trainer.main_ppo model=$MODEL_DIR", r"train\.sh:3: the script needs MODEL_DIR"),
        ("python3 -m verl.trainer.main_ppo data.train_batch_size", r"train\.sh:1: 'data\.train_batch_size' is not an override"),
        ("python3 -m verl.trainer.main_generation_server a=1", "is not a trainer that from-verl knows"),
        ("while true; do :; done", "has not ended within"),
        (
            "python3 -m verl.trainer.main_ppo \\\n data.train_batchsize=3",
            r"train\.sh:2: data\.train_batchsize=3: verl 0\.9\.1 has no such setting; did you mean data\.train_batch_size",
        ),
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=trtllm", "trtllm has no counterpart; known are vllm, sglang, hf"),
        (
            "python3 -m verl.trainer.main_ppo data.train_batch_size=64",
            "ppo_mini_batch_size=256 does not divide data.train_batch_size=64, which verl refuses",
        ),
        (
            "python3 -m verl.trainer.main_ppo data.train_batch_size=256 actor_rollout_ref.rollout.n=2.5",
            r"rollout\.n=2\.5 is not a whole number",
        ),
        ("python3 -m verl.trainer.main_ppo data.train_batch_size=256 actor_rollout_ref.actor.optim.lr=.nan", "lr=nan is not a number"),
        ("python3 -m verl.trainer.main_ppo trainer.generate_ahead_steps=0", "counts from 1, which is on-policy"),
        ("python3 -m verl.trainer.main_ppo data.train_batch_size=many", "train_batch_size=many is not a whole number"),
    ],
)
def test_what_cannot_be_is_an_error_with_its_line(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph_cli.from_verl.script.LIMIT_S", 1.0)
    with pytest.raises(ConfigError, match=says):
        translate(script(tmp_path, text), [], tmp_path / "recipe.py", skip=False)
    assert not (tmp_path / "recipe.py").exists()


def test_a_recipe_that_is_there_stays_and_what_is_not_possible_can_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["algorithm.use_pf_ppo=True", "data.train_batch_size=256", "algorithm.adv_estimator=grpo"]
    file, table = translate(None, words, None, skip=True)
    assert re.search(r"IS NOT POSSIBLE \(1\)\n +algorithm.use_pf_ppo=True +rows are not drawn again", table)
    with pytest.raises(ConfigError, match=r"'from_verl\.py' exists"):
        translate(None, words, None, skip=True)
    assert file.read_text().startswith('"""What overrides starts with verl')


MODELS = ("model", "teacher_model", "teacher_gsm8k", "teacher_geo3k")


def stand_in(folder: Path) -> dict[str, str]:
    """Write two folders that plans can read, with shapes of Qwen3, data, a reward, and the settings that name them."""
    for name, shape in (("dense", QWEN3_8B), ("mixture", QWEN3_30B_A3B | {"num_key_value_heads": 8})):
        (folder / name).mkdir()
        known = {"model_type": "qwen3_moe" if "num_experts" in shape else "qwen3", "max_position_embeddings": 262144, "eos_token_id": 0}
        (folder / name / "config.json").write_text(json.dumps(shape | known))
        save_file({"weight": torch.zeros(1)}, folder / name / "model.safetensors")
    asked = [{"role": "user", "content": "1 + 1 ="}]
    row = {
        "prompt": asked,
        "messages": [*asked, {"role": "assistant", "content": "2"}],
        "reward_model": {"ground_truth": "2"},
        "data_source": "openai/gsm8k",
    }
    write_table(Table.from_pylist([row] * 2048), folder / "rows.parquet")
    (folder / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    dense, rows = str(folder / "dense"), str(folder / "rows.parquet")
    models = dict.fromkeys(MODELS, dense)
    return {"train": rows, "validation": rows, "reward": str(folder / "reward.py"), "reward_model": dense, "critic": dense, **models}


def graph_of(file: Path, settings: dict[str, str]) -> tuple[Graph, rg.Cluster]:
    """Build the graph of a recipe with those of the settings that it has."""
    found = recipes.read(file)
    assert found.cluster_of is not None
    cfg = found.configured([f"{name}={value}" for name, value in settings.items() if name in found.config_class.__dataclass_fields__])
    return found.graph(cfg), found.cluster_of(cfg)


def call_of(name: str) -> Call:
    """The call of a script of verl's."""
    found = FACTS["scripts"][name]
    return Call(name, found["module"], found["config"], tuple(parse_override(FACTS["settings"][at], 0) for at in found["settings"]))


def recipe_of(name: str) -> str:
    call = call_of(name)
    return write_recipe(call, values_of(call, [TABLES.outcome_of(setting) for setting in call.settings]), "recipe")


WITHOUT = {  # what a script needs and a recipe does not have
    "examples/mtp_trainer/run_mimo_7b_mtp_fully_async_megatron_multinode": "heads of multi-token prediction are not trained",
    "examples/mtp_trainer/run_mimo_7b_mtp_megatron": "heads of multi-token prediction are not trained",
    "examples/rollout_correction/run_qwen2_5_7b_fsdp": "normalize=True would depend on how the batch is split",
    "verl/experimental/fully_async_policy/shell/dapo_7b_async_retool": "a data set by a class of verl",
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_examples_of_verl_become_recipes_that_compile_for_their_clusters(tmp_path: Path) -> None:
    settings, kinds, failed = stand_in(tmp_path), Counter[str](), {}
    for name in FACTS["scripts"]:
        call = call_of(name)
        outcomes = [TABLES.outcome_of(setting) for setting in call.settings]
        kinds.update(outcome.kind for outcome in outcomes)
        impossible = next((outcome.text for outcome in outcomes if outcome.kind not in ("becomes", "no effect")), "")
        if impossible:
            failed[name] = impossible
            continue
        file = tmp_path / f"{re.sub(r'[^a-z0-9]', '_', name)}.py"
        file.write_text(write_recipe(call, values_of(call, outcomes), file.stem))
        own = settings | ({"model": str(tmp_path / "mixture")} if "expert_parallel" in file.read_text() else {})
        try:
            rg.compile(*graph_of(file, own))
        except rg.RlgraphError as error:
            failed[name] = str(error)
    assert {name: WITHOUT.get(name, "") in why for name, why in failed.items()} == dict.fromkeys(WITHOUT, True)
    count, explained = len(FACTS["scripts"]), kinds["becomes"] + kinds["no effect"]
    assert len(failed) <= 0.1 * count
    assert kinds["unknown"] == 0
    assert explained >= 0.95 * kinds.total()
    said = f"Of the {count} example scripts of verl 0.9 for text models, with {kinds.total():,} settings, {explained:,} settings have"
    page = (TESTS.parent / "docs" / "from_verl.md").read_text()
    assert said in page
    assert f"and {count - len(failed)} scripts become recipes" in page


TRAININGS = """
verl.trainer.main_ppo data.train_batch_size=256 model_engine=megatron algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive
 actor_rollout_ref.rollout.enable_rollout_routing_replay=True
verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True trainer.test_freq=1
 reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=4
 actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
 actor_rollout_ref.model.lora_rank=8
verl.trainer.main_ppo reward.reward_model.enable=True reward.reward_model.model_path=judge actor_rollout_ref.actor.use_kl_loss=True
 algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_rs=token_k1
 algorithm.rollout_correction.rollout_rs_threshold=2.0
verl.trainer.main_ppo trainer.v1.trainer_mode=separate_async trainer.use_nodes_ratios=[0.5,0.5,0.5,0.5]
 reward.custom_reward_function.path=score.py
verl.experimental.fully_async_policy.fully_async_main rollout.test_freq=2 trainer.test_freq=2
verl.trainer.sft_trainer model.lora_rank=8
verl.trainer.main_ppo trainer.val_only=True
verl.trainer.main_ppo distillation.enabled=True distillation.distillation_loss.use_task_rewards=False
 distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True
 distillation.teacher_models.teacher_model.model_path=larger
verl.trainer.main_ppo distillation.enabled=True distillation.distillation_loss.use_task_rewards=False
 distillation.distillation_loss.loss_mode=forward_kl_topk distillation.teacher_models.one.model_path=larger
 distillation.teacher_models.one.key=sums distillation.teacher_models.two.model_path=other distillation.teacher_models.two.key=code
"""


def test_the_writer_reads_each_setting_that_becomes_something() -> None:
    read: set[str] = set()
    for training in TRAININGS.replace("\n ", " ").split("\n")[1:-1]:
        module, *words = training.split()
        call = Call("", module, "", tuple(parse_override(text, 0) for text in words))
        values = values_of(call, [TABLES.outcome_of(setting) for setting in call.settings])
        write_recipe(call, values, "written")
        read |= values.read
    assert {key for key in TABLES.rules["becomes"] if key not in read} == set()


@cache
def imported(code: str) -> set[str]:
    """The names that a program imports anywhere."""
    return {each.name for part in ast.walk(ast.parse(code)) if isinstance(part, ast.Import | ast.ImportFrom) for each in part.names}


JUNK = ("x", -1, 0, 2.5, True, [1], ["a"], {"a": 1}, 'a"; import os; b="', "a\n\nimport os\n", None)


@pytest.mark.parametrize("program", TRAININGS.replace("\n ", " ").split("\n")[1:-1])
def test_values_that_are_none_are_errors_and_never_code(program: str) -> None:
    module, *words = program.split()
    given = tuple(parse_override(text, 0) for text in words)
    outcomes = [TABLES.outcome_of(setting) for setting in given]  # once, as looking up takes longer than writing
    for key in (key for key in TABLES.rules["becomes"] if "*" not in key):
        for value in JUNK:
            junk = Setting(key, value, f"{key}={value}")
            call = Call("run.sh", module, "", (*given, junk))
            values = values_of(call, [*outcomes, TABLES.outcome_of(junk)])
            with contextlib.suppress(ConfigError):
                assert imported(write_recipe(call, values, "written")) <= {"dataclass", "run_path", "rlgraph"}, (key, value)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ("distillation.distillation_loss.loss_mode=k3", "loss_mode=k3 has no counterpart here; k1 with use_policy_gradient=True has one"),
        ("distillation.distillation_loss.use_policy_gradient=True", "loss_mode=forward_kl_topk has no counterpart here"),
        ("distillation.distillation_loss.use_task_rewards=True", "a loss distils, or follows the rewards; give False"),
        ("distillation.teacher_models.two.key=sums", "set at least one teacher, each with its own key, not ['sums']"),
        ("distillation.teacher_models.two.model_path=", "two needs a model_path, and a key if there are several teachers"),
    ],
)
def test_a_distillation_without_counterpart_is_refused_by_name(changed: str, rule: str) -> None:
    _, *words = TRAININGS.replace("\n ", " ").split("\n")[-2].split()
    call = Call("", "verl.trainer.main_ppo", "", tuple(parse_override(text, 0) for text in [*words, changed]))
    with pytest.raises(ConfigError, match=re.escape(rule)):
        write_recipe(call, values_of(call, [TABLES.outcome_of(setting) for setting in call.settings]), "written")


def test_a_limit_of_the_penalty_and_mini_batches_of_the_critic_are_those_given() -> None:
    words = "data.train_batch_size=256 critic.ppo_mini_batch_size=64 data.max_response_length=100 reward.reward_kwargs.max_resp_len=80"
    words += " reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=8"
    call = Call("", "verl.trainer.main_ppo", "", tuple(parse_override(text, 0) for text in words.split()))
    written = " ".join(write_recipe(call, values_of(call, [TABLES.outcome_of(setting) for setting in call.settings]), "own").split())
    assert "OverlongPenalty(max_tokens=80, buffer_tokens=cfg.buffer_tokens)" in written
    assert "critic.update(rollout, values, advantages, loss=rg.losses.ValueLoss(), mini_batches=4)" in written


def test_one_step_off_becomes_a_graph_of_depth_one(tmp_path: Path) -> None:
    words = [
        *("trainer.nnodes=2", "trainer.n_gpus_per_node=6", "rollout.nnodes=2", "rollout.n_gpus_per_node=2", "rollout.n=12"),
        *("data.train_batch_size=512", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "algorithm.adv_estimator=grpo"),
        *("actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio_c=10.0", "trainer.test_freq=10"),
        *("actor_rollout_ref.actor.optim.lr_warmup_steps=10", "actor_rollout_ref.actor.optim.weight_decay=0.1"),
        "actor_rollout_ref.actor.ppo_epochs=2",
        *("actor_rollout_ref.rollout.enable_dual_buffer=True", "trainer.generate_ahead_steps=2", "trainer.total_training_steps=100"),
    ]
    file, _ = translate(None, ["actor_rollout_ref.hybrid_engine=False", *words], tmp_path / "one.py", skip=False)
    graph, cluster = graph_of(file, stand_in(tmp_path))
    plan = rg.compile(graph, cluster)
    assert (cluster.gpus, cluster.gpus_per_node, cluster.hosts) == (16, 8, 2)
    assert {worker.name.partition("[")[0]: len(worker.gpus) for worker in plan.workers}["generator"] == 2  # an engine spans two
    assert plan.certificate.staleness_bound == 1
    update = next(node for node in graph.nodes if node.name == "update")
    assert (update.operation.loss.clip_high, update.operation.loss.clip_c, update.operation.schedule.mini_batches) == (0.28, 10.0, 16)
    assert (update.model.optimizer.warmup_steps, update.model.optimizer.weight_decay) == (10 * 16 * 2, 0.1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["ragged", "singles"])
@pytest.mark.parametrize("of", json.loads((TESTS / "oracle" / "scripts.json").read_text()))
def test_the_first_loss_of_a_recipe_is_that_of_verl_with_its_own_configuration(of: str, name: str, tmp_path: Path) -> None:
    golden = json.loads((TESTS / "oracle" / "scripts.json").read_text())[of][name]
    file = tmp_path / "recipe.py"
    file.write_text(recipe_of(of))
    graph, _ = graph_of(file, stand_in(tmp_path))
    operations = {node.name: node.operation for node in graph.nodes}
    columns = {key: torch.from_numpy(value) for key, value in batch(name, "float64").items()}
    mask = columns["response_mask"]
    del columns["rollout_is_weights"]  # no script of these has them
    given = operations["advantages"].function(columns)
    torch.testing.assert_close(given["advantages"], torch.tensor(golden["advantages"], dtype=torch.float64), atol=1e-6, rtol=1e-6)
    update = operations["update"]
    columns |= {**given, "old_log_probs": columns[update.behaviour]}
    loss, _ = update.loss(columns["log_probs"], columns, rg.algorithms.Totals.of(mask))
    assert float(loss) == pytest.approx(golden["loss"], rel=1e-6)


RUNS = {  # scripts whose recipes have other nodes or trainers than the others', and what a step of each writes
    "examples/grpo_trainer/run_qwen3_8b_megatron": "actor/kl_loss",
    "examples/on_policy_distillation_trainer/run_qwen3_8b_fsdp": "actor/pg_loss",
    "examples/on_policy_distillation_trainer/run_qwen3_8b_megatron": "actor/distillation",
    "examples/on_policy_distillation_trainer/run_qwen3_8b_mopd_fsdp": "teachers/openai/gsm8k",
    "examples/ppo_trainer/run_qwen3_8b_fsdp": "critic/vf_loss",
    "examples/remax_trainer/run_qwen3_8b_fsdp": "actor/pg_loss",
    "examples/rollout_correction/run_qwen2_5_7b_fsdp_multi_rs": "actor/pg_loss",
    "examples/sft/multiturn/run_qwen2_5_0_5b_fsdp": "actor/pg_loss",
    "verl/experimental/one_step_off_policy/shell/dapo_7b_math_megatron_4_12": "actor/pg_loss",
}
SMALL = {
    "engine": "transformers",
    "trainer": "fsdp",
    "gpus": "0",
    "prompts": "2",
    "group_size": "2",
    "mini_batches": "1",
    "examples": "2",
    "max_prompt_tokens": "200",
    "max_tokens": "4",
    "steps": "2",
    "rollout_tensor_parallel": "1",
    "tensor_parallel": "1",
    "pipeline_parallel": "1",
    "context_parallel": "1",
    "expert_parallel": "1",
    "validation": "",
    "critic": "",
    "log": "false",
    "memory": "null",
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.stage("recipes")
def test_recipes_of_scripts_train(name: str, tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(recipe_of(name))
    own = stand_in(tmp_path) | SMALL | dict.fromkeys(MODELS, str(tiny_model(tmp_path / "model", chat=True, context=4096)))
    own |= {"max_tokens": "200"} if "sft" in name else {}
    own |= {"trainer": "megatron", "buffer_tokens": "2"} if "one_step_off_policy/shell/dapo" in name else {}
    graph, cluster = graph_of(file, own)
    with rg.compile(graph, cluster).run_here() as job:
        steps = [step.metrics for step in job.steps(2)]
    assert all(RUNS[name] in step for step in steps), sorted(steps[0])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_evaluation_alone_is_of_one_step(tmp_path: Path) -> None:
    words = ["trainer.val_only=True", "trainer.n_gpus_per_node=2", "trainer.save_freq=5", "data.val_max_samples=3"]
    file, _ = translate(None, words, tmp_path / "alone.py", skip=False)
    stood = stand_in(tmp_path)
    assert rg.compile(*graph_of(file, stood)).certificate.staleness_bound == 0
    own = stood | SMALL | {"model": str(tiny_model(tmp_path / "model", chat=True, context=1024)), "validation": stood["train"]}
    with rg.compile(*graph_of(file, own)).run_here() as job:
        (step,) = job.steps(1)
    assert (step.metrics["val/acc/mean@1"], step.metrics["val/version"]) == (0, 0)


PROPOSAL = """
actor_rollout_ref.async_pipeline=True trainer.use_nodes_ratios=[0.5,0.5,0.5,0.5] trainer.generate_ahead_steps=2
actor_rollout_ref.rollout.enable_dual_buffer=True actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb=512
actor_rollout_ref.rollout.param_update_consume_bucket_size_mb=128 algorithm.adv_estimator=grpo
"""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.stage("recipes")
def test_the_flags_of_the_proposal_run_one_step_off(tmp_path: Path) -> None:
    file, table = translate(None, PROPOSAL.split(), tmp_path / "proposal.py", skip=False)
    assert "IS NOT POSSIBLE" not in table
    own = stand_in(tmp_path) | SMALL | {"model": str(tiny_model(tmp_path / "model", chat=True, context=1024))}
    graph, cluster = graph_of(file, own)
    plan = rg.compile(graph, cluster)
    with plan.run_here() as job:
        assert [step.staleness for step in job.steps(3)] == [0, 1, 1]
    assert plan.certificate.staleness_bound == 1


@pytest.mark.stage("recipes")
def test_a_script_runs_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("argv", "path"):  # the command changes both
        monkeypatch.setattr(sys, name, [*vars(sys)[name]])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    stood = stand_in(tmp_path)
    model = tiny_model(tmp_path / "model", chat=True, context=1024)
    text = script(tmp_path, SCRIPT.replace("--config-name='one_step_off_ppo_megatron_trainer.yaml' \\\n", "\\\n"))
    graph_has = "engine trainer gpus prompts group_size mini_batches max_prompt_tokens max_tokens steps memory rollout_tensor_parallel log"
    chosen = {name: SMALL[name] for name in graph_has.split()} | {
        "model": str(model),
        "train": stood["train"],
        "out": str(tmp_path / "run"),
    }
    small = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    done = CliRunner().invoke(app, ["from-verl", str(text), "-o", str(tmp_path / "written.py"), "--plan", "--run", *small])
    assert done.exit_code == 0, done.output
    assert "BECOMES (" in done.output
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
