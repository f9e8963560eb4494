"""Every recipe runs: two steps on a tiny random model, as a program of its own, from a fresh folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.py"))
MORE = {"ppo": ["critic_warmup=1"]}  # so that the second of two steps trains the policy
TINY = ["model=tiny", "engine=transformers", "prompts=2", "group_size=2", "steps=2"]


def run(recipe: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(recipe), *arguments], cwd=folder, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.ray
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_leaves_its_metrics_pictures_and_timelines(recipe: Path, tmp_path: Path) -> None:
    found = run(recipe, tmp_path, *TINY, *MORE.get(recipe.stem, []), "out=run")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert all(line["staleness"] <= line["step"] for line in lines)
    assert {"critic/rewards/mean", "actor/pg_loss", "timing_s/gen", "timing_s/update_actor"} <= set(lines[0]) | set(lines[1])
    for name in ("run.html", "run.json", "graph.svg", "reward.svg", "plan.json", "costs.yaml", "trace.json", "timeline.json"):
        assert f"run/{name}" in found.stdout
        assert (tmp_path / "run" / name).stat().st_size > 0


@pytest.mark.ray
@pytest.mark.vllm
def test_the_one_step_off_recipe_runs_on_vllm(tmp_path: Path) -> None:
    recipe = next(path for path in RECIPES if path.stem == "one_step_off")
    found = run(recipe, tmp_path, *TINY, "engine=vllm", "out=run")
    assert found.returncode == 0, found.stdout + found.stderr


WRONG = {
    "an unknown key": (["learning_rate=1"], "Key 'learning_rate' not in 'Config'"),
    "none of the choices": (["engine=none"], "Invalid value 'none', expected one of ['vllm', 'transformers']"),
    "a value of another type": (["steps=many"], "Value 'many' of type 'str' could not be converted to Integer"),
    "a file that is not there": (["config=none.yaml"], "config=none.yaml: there is no such file"),
    "no setting at all": (["fast"], "argument 'fast' is no setting; write key=value"),
    "a model that is not there": (["model=nowhere"], "model 'nowhere': no such folder"),
    "a prompt that does not fit": (
        ["model=tiny", "engine=transformers", "max_tokens=60"],
        "tokens, but node 'rollout' has room for 1 to 4: a context of 64 less 60 for the response",
    ),
    "a negative depth": (["model=tiny", "depth=-1"], "depth=-1; depth is how many weight versions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_settings_end_with_a_clear_error_before_anything_starts(name: str, tmp_path: Path) -> None:
    arguments, message = WRONG[name]
    found = run(next(path for path in RECIPES if path.stem == "one_step_off"), tmp_path, *arguments)
    assert found.returncode != 0
    assert message in found.stderr
    assert "Ray" not in found.stderr
