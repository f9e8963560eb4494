"""The DAPO recipe on a tiny model: batches of groups that all teach, refilled within the step."""

import sys
from pathlib import Path

import pytest

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
import dapo

pytestmark = pytest.mark.stage("recipes")


def rare(responses: list[str], answers: list[str]) -> list[float]:
    """A reward that is the same for most groups of two."""
    return [float(sum(map(ord, response)) % 4 == 0) for response in responses]


def config(folder: Path, **settings: object) -> dapo.Config:
    model = str(tiny_model(folder / "tiny"))
    return dapo.Config(model=model, engine="transformers", prompts=3, group_size=2, rounds=20, max_tokens=4, lr=1e-3, **settings)  # type: ignore[arg-type]


def test_every_group_of_a_batch_teaches_and_prompts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dapo, "right_number", rare)
    with rg.compile(dapo.graph(config(tmp_path)), rg.Cluster(cpus=2)).run_here() as job:
        found = [step.metrics for step in job.steps(3)]
    assert all(step["critic/accuracy/mean"] == 0.5 for step in found)  # of each two responses one is right
    assert all(step["actor/grad_norm"] > 0 for step in found)
    assert all(step["dynamic_sampling/prompts"] == 3 + step["dynamic_sampling/filtered_groups"] for step in found)
    assert sum(step["dynamic_sampling/filtered_groups"] for step in found) > 0
    assert all(step["critic/overlong/fraction"] > 0 for step in found)
    assert [step["staleness/max"] for step in found] == [0, 1, 1]


def test_the_plan_has_a_batch_of_static_size_and_is_certified(tmp_path: Path) -> None:
    plan = rg.compile(dapo.graph(config(tmp_path, depth=2)), rg.Cluster(cpus=2))
    assert plan.node("rollout").rows == 6
    assert plan.node("rollout").reads == ()
    assert (plan.certificate.staleness_bound, plan.certificate.deadlock_free) == (2, True)


def test_a_run_is_a_function_of_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dapo, "right_number", rare)
    runs = []
    for _ in range(2):
        with rg.compile(dapo.graph(config(tmp_path)), rg.Cluster(cpus=2)).run_here() as job:
            runs.append([{name: value for name, value in step.metrics.items() if "timing" not in name} for step in job.steps(2)])
    assert runs[0] == runs[1]


def test_a_resumed_run_continues_with_the_next_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dapo, "right_number", rare)

    def run(steps: int, folder: Path | None) -> list[dict[str, float]]:
        graph = dapo.graph(config(tmp_path))
        plan = rg.compile(graph, rg.Cluster(cpus=2))
        with LocalJob(graph, plan, Checkpoints(graph, plan, Recovery(folder, every=2, keep=1)) if folder else None) as job:
            return [{name: value for name, value in step.metrics.items() if "timing" not in name} for step in job.steps(steps)]

    whole = run(5, None)
    assert run(3, tmp_path / "kept") + run(5, tmp_path / "kept") == whole
    assert len({step["dynamic_sampling/prompts"] for step in whole}) > 1
