"""Every recipe runs: two steps on a tiny random model, from a fresh folder. One does so on Ray, as a program of its own.

The workers of the others are forked: what differs between recipes is their graphs, for which Ray starts the same processes.
"""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from support import forked_workers
from support.recipe_runs import RECIPES, run_recipe

import rlgraph as rg
from rlgraph.analysis.run import Run
from rlgraph.errors import RlgraphError
from rlgraph.render import charts
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES

MORE = {"ppo": ["critic_warmup=1"]}  # so that the second of two steps trains the policy
BEYOND: dict[str, tuple[list[str], set[str]]] = {  # recipes beyond policy gradients: their settings, and metrics that they report
    "distill": (["engine=transformers", "prompts=2", "teacher=tiny", "top_k=4"], {"actor/distillation", "timing_s/gen"}),
    "dpo": (["pairs=2"], {"preference/accuracy", "actor/pg_loss"}),
    "kto": (["examples=2"], {"preference/chosen", "actor/pg_loss"}),
    "mixture": (["prompts=2", "group_size=2", "examples=2"], {"examples/nll", "critic/rewards/mean"}),
    "online_dpo": (["prompts=2", "group_size=2"], {"critic/rewards/mean", "preferred/share"}),
    "reward_model": (["pairs=2"], {"reward/accuracy", "critic/vf_loss"}),
    "self_play": (["prompts=2", "group_size=2"], {"first/right", "second update/actor/pg_loss"}),
    "sft": (["engine=transformers", "examples=4", "every=1", "held_out=2"], {"actor/nll", "val/acc/mean@1"}),
}
LEAST = ("examples=2", "prompts=2", "group_size=2")
STAGED: dict[str, tuple[list[str], dict[str, set[str]]]] = {  # recipes of several graphs: their settings, and the metrics of each graph
    "process_rewards": (
        ["solutions=2", "judge_steps=1", "prompts=2", "group_size=2", "max_tokens=4", "steps=1"],
        {"judge": {"reward/accuracy"}, "policy": {"step_rewards/mean", "actor/pg_loss"}},
    ),
    "reasoning": (
        [*LEAST, "longest=4", "max_tokens=6", "held_out=2", "every=1", "sft_steps=1", "rl_steps=1", "mini_batches=2"],
        {"fine_tuning": {"actor/nll", "val/acc/mean@1"}, "reinforcement": {"critic/rewards/mean", "actor/pg_loss", "val/acc/mean@1"}},
    ),
    "teachers": (
        ["examples=2", "teacher_steps=1", "prompts=2", "top_k=4", "steps=1"],
        {"sums": {"actor/nll"}, "differences": {"actor/nll"}, "student": {"actor/distillation", "critic/right/mean", "teachers/sums"}},
    ),
    "vision": (
        [*LEAST, "held_out=2", "every=1", "sft_steps=1", "rl_steps=1"],
        {"fine_tuning": {"actor/nll"}, "reinforcement": {"critic/rewards/mean", "actor/pg_loss", "val/reward/mean@1"}},
    ),
}
VALIDATED = ["train=train.jsonl", "validation=train.jsonl", "samples=2", "evaluate_every=1", "continuous=true", "max_prompt_tokens=150"]
TINY = ["model=tiny", "engine=transformers", "prompts=2", "group_size=2", "steps=2"]


def quick(one: str, names: Iterable[str]) -> list[Any]:
    """List the names: `one` is quick, the others are in the stage of recipes; tools run in a sandbox."""
    marks = {name: [pytest.mark.stage("recipes")] * (name != one) + [pytest.mark.sandbox] * (name == "tools") for name in names}
    return [pytest.param(name, marks=marks[name]) for name in sorted(names)]


@pytest.mark.parametrize("name", quick("ppo", RECIPES.keys() - {"one_step_off", "dapo", "mathematics", *BEYOND, *STAGED, "curriculum"}))
def test_a_recipe_leaves_its_metrics_pictures_and_timelines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    run_recipe(name, monkeypatch, *TINY, *MORE.get(name, []), "out=run")
    assert_complete(tmp_path, capsys.readouterr().out)


@pytest.mark.stage("recipes")
def test_ppo_with_adapters_has_the_base_for_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    run_recipe("ppo", monkeypatch, *TINY, "rank=4", "critic_warmup=0", "lr=1e-3", "out=run")
    plan = rg.Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert {model.name for model in plan.models} == {"generator", "policy", "critic"}
    assert [loop.adapter.rank for loop in plan.loops if loop.adapter] == [4]
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["actor/reward_kl_penalty"] == 0.0  # an adapter begins as nothing
    assert "critic/vf_loss" in first


@pytest.mark.parametrize("name", quick("sft", BEYOND))
def test_a_recipe_beyond_policy_gradients_leaves_its_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    arguments, metrics = BEYOND[name]
    run_recipe(name, monkeypatch, "model=tiny", "steps=2", "out=run", *arguments)
    assert_recorded(tmp_path, capsys.readouterr().out, metrics)


@pytest.mark.stage("recipes")
@pytest.mark.parametrize("name", STAGED)
def test_a_recipe_of_several_graphs_leaves_the_records_of_each(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    arguments, graphs = STAGED[name]
    run_recipe(name, monkeypatch, "model=tiny", "engine=transformers", "out=run", *arguments)
    for graph, metrics in graphs.items():
        (line,) = (tmp_path / "run" / graph / "metrics.jsonl").read_text().splitlines()
        assert metrics <= set(json.loads(line))
    assert (tmp_path / "run" / "run.html").exists()


def test_chains_are_solved_by_their_completions_and_by_nothing_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPES["reasoning"].parent)
    from tasks.chains import chains, right_answer

    rows = chains(200, seed=0, longest=12)
    answers, solved = [row["answer"] for row in rows], [row["completion"] for row in rows]
    assert right_answer(solved, answers) == [1.0] * 200
    assert right_answer([text.rpartition("\n")[0] for text in solved], answers) == [0.0] * 200
    assert right_answer([f"{text}\n1: 2+2=4" for text in solved], answers) == [0.0] * 200  # it did not end there
    assert {text.count("\n") for text in solved} == set(range(4, 13))
    assert all(eval(left, {"max": max}) == int(right) for text in solved for left, right in equations(text))


def equations(text: str) -> list[list[str]]:
    """Both sides of each line of a solution."""
    return [line.split(": ")[1].split("=") for line in text.splitlines()[:-1]]


@pytest.mark.stage("recipes")
def test_a_curriculum_trains_its_second_graph_from_the_weights_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    few = ["examples=2", "sft_steps=1", "prompts=2", "group_size=2", "rl_steps=1"]
    run_recipe("curriculum", monkeypatch, "model=tiny", "engine=transformers", "out=run", *few)
    assert "one_step_off: run/one_step_off, weights None" in capsys.readouterr().out
    plan = rg.Plan.from_json((tmp_path / "run" / "one_step_off" / "plan.json").read_text())
    settings = json.loads((tmp_path / "run" / "one_step_off" / "run.json").read_text())["settings"]
    assert plan.certificate.staleness_bound == 1
    assert settings["policy of update"]["path"].strip("'") == "run/sft/model"
    assert (tmp_path / "run" / "run.html").exists()


@pytest.mark.stage("recipes")
def test_dapo_streams_and_validates_on_data_of_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    Path("train.jsonl").write_text(rows_of_verl())
    run_recipe("dapo", monkeypatch, *TINY, *VALIDATED, "out=run")
    assert_complete(tmp_path, capsys.readouterr().out)
    assert_validated(tmp_path)


@pytest.mark.stage("recipes")
def test_dapo_at_the_published_scale_is_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPES["dapo"].parent)
    shape = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **shape, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "train.jsonl").write_text(rows_of_verl())
    recipe = runpy.run_path(str(RECIPES["dapo"]))
    file = RECIPES["dapo"].parent / "configs" / "dapo_math.yaml"
    given = [f"config={file}", f"model={tmp_path}", f"train={tmp_path}/train.jsonl", f"validation={tmp_path}/train.jsonl"]
    cfg = rg.config(recipe["Config"], given)
    assert (cfg.max_tokens, cfg.buffer_tokens, cfg.group_size, cfg.continuous) == (20480, 4096, 16, True)
    plan = rg.compile(recipe["graph"](cfg), rg.Cluster(gpus=16, gpus_per_node=8, cpus=128, gpu="H200"))
    assert plan.certificate.staleness_bound == 1
    assert plan.certificate.deadlock_free


def rows_of_verl() -> str:
    rows = [
        {
            "data_source": "math",
            "prompt": f"{a} + 1 =",  # text, since the tiny model has no chat template
            "reward_model": {"style": "rule", "ground_truth": str(a + 1)},
            "extra_info": {"index": str(a)},
        }
        for a in range(4)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


RUNS = [
    pytest.param("one_step_off", "engine=vllm", marks=pytest.mark.vllm),
    pytest.param("tools", "engine=sglang", marks=pytest.mark.stage("sglang")),
    pytest.param("dapo", "engine=sglang", marks=pytest.mark.stage("sglang")),  # batches that join, refill and evaluation
    pytest.param("one_step_off", "engine=sglang trainer=megatron", marks=pytest.mark.stage("sglang")),
]


@pytest.mark.ray
@pytest.mark.parametrize(("name", "settings"), RUNS)
def test_a_recipe_is_a_program_that_runs_on_ray(name: str, settings: str, tmp_path: Path) -> None:
    more = VALIDATED if name == "dapo" else []
    (tmp_path / "train.jsonl").write_text(rows_of_verl())
    command = [sys.executable, str(RECIPES[name]), *TINY, *more, *settings.split(), "out=run"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_complete(tmp_path, ended.stdout)
    if name == "dapo":
        assert_validated(tmp_path)


def assert_complete(folder: Path, said: str) -> None:
    assert_recorded(folder, said, {"critic/rewards/mean", "actor/pg_loss", "timing_s/gen", "timing_s/update_actor"})
    metrics = charts.metric_names(Run.load(folder / "run").steps)
    assert {name.partition("/")[0] for name in metrics} <= charts.OURS, "a report draws others as the user's own"


def assert_validated(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all({"val/acc/mean@2", "val/math/acc/maj@2/mean", "dynamic_sampling/prompts"} <= set(line) for line in lines)


def assert_recorded(folder: Path, said: str, metrics: set[str]) -> None:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert all(line["staleness"] <= line["step"] for line in lines)
    assert metrics <= set(lines[0]) | set(lines[1])
    for name in ("run.html", "run.json", "graph.svg", "reward.svg", "plan.json", "costs.yaml", "trace.json", "timeline.json"):
        assert f"run/{name}" in said
        assert (folder / "run" / name).stat().st_size > 0


WRONG = {
    "an unknown key": (["learning_rate=1"], "Key 'learning_rate' not in 'Config'"),
    "a value of another type": (["steps=many"], "Value 'many' of type 'str' could not be converted to Integer"),
    "a model that is not there": (["model=nowhere"], "model 'nowhere': no such folder"),
    "a prompt that does not fit": (
        ["model=tiny", "engine=transformers", "max_tokens=60"],
        "tokens, but node 'rollout' has room for 1 to 4: a context of 64 less 60 for the response",
    ),
}


class Started(Exception):
    """Something was started."""


def begin(self: object) -> None:
    raise Started


@pytest.mark.parametrize("name", WRONG)
def test_bad_settings_end_with_a_clear_error_before_anything_starts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, message = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", begin)
    with pytest.raises(RlgraphError, match=re.escape(message)):
        run_recipe("one_step_off", monkeypatch, *arguments)


WRONG_BEYOND = {  # by recipe: what its own settings do; other mistakes are in `user_mistakes.py`
    "distill": (["top_k=0", "divergence=jsd"], "leave divergence=jsd out, or set top_k=64"),
    "process_rewards": (["judge_steps=3", "steps=0"], "run(steps=[3, 0])"),
    "reward_model": (
        [],
        "'run/model' holds the weights of an earlier run, and an export replaces nothing: give another out=, or remove it",
    ),
    "teachers": (["scored_by=megatron"], "which trainer='megatron' does not return"),
}


@pytest.mark.stage("recipes")
@pytest.mark.parametrize("name", WRONG_BEYOND)
def test_bad_settings_beyond_policy_gradients_end_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, message = WRONG_BEYOND[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", begin)
    if name == "reward_model":
        Path("run/model").mkdir(parents=True)
    with pytest.raises(RlgraphError, match=re.escape(message)):
        run_recipe(name, monkeypatch, "model=tiny", *arguments, "out=run")


def test_a_setting_that_is_none_of_its_choices_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RlgraphError, match=re.escape("Invalid value 'never', expected one of ['keep', 'recompute']")):
        run_recipe("interrupt", monkeypatch, "interrupt=never")


def test_a_recipe_says_its_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_recipe("one_step_off", monkeypatch, "--help")
    assert "depth: 1\n" in capsys.readouterr().out


@pytest.mark.stage("recipes")
def test_the_plans_of_all_recipes_are_those_of_before(tmp_path: Path) -> None:
    here, now = Path(__file__).parent, tmp_path / "now.txt"
    subprocess.run([sys.executable, str(here / "golden_plans.py"), str(now)], check=True, timeout=280)
    before = (here / "golden_plans.txt").read_text().splitlines()
    changed = [line for line in now.read_text().splitlines() if line not in before] + [
        line for line in before if line not in now.read_text()
    ]
    assert changed == [], "plans have changed; if they are right: python tests/recipes/golden_plans.py tests/recipes/golden_plans.txt"
