"""An engine that gives up its weights in sleep, where new ones are loaded next: runs have the bits of engines that keep them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import digests
import pytest
import torch
from digests import ITEMS, DigestPolicy, odd_tokens

import rlgraph as rg
from rlgraph.engines.hf_models.pretrained import tiny_model
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob

DATA = [{**item, "data_source": "sums"} for item in ITEMS[:3]]
sleeps: list[str] = []


@dataclass(frozen=True, eq=False, kw_only=True)
class Forgetful(rg.Generator):
    """A generator whose engine forgets what it may, and writes down how it slept."""

    def load(self, context: Any) -> Any:
        engine = super().load(context)

        def forget() -> None:
            sleeps.append("forgot")
            for parameter in engine._model.parameters():
                parameter.data.fill_(float("nan"))

        engine.sleep = lambda: sleeps.append("kept")
        engine.sleep_until_loaded = forget
        return engine


def graph(model: str, kind: type[rg.Generator], *, depth: int = 0, every: int = 0, adapter: bool = False, **more: Any) -> rg.Graph:
    pool = rg.Pool("gpu")
    generator = kind(model, pool=pool, engine="transformers", sampling=rg.Sampling(max_tokens=6), dtype="float32")
    policy = DigestPolicy(model, pool=pool, optimizer=rg.AdamW(lr=1e-3), dtype="float32", adapter=rg.LoRA(rank=4) if adapter else None)
    weights = rg.feedback("weights", depth=depth, **more)
    rollout = generator.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4)
    examined = [rg.evaluate(generator, DATA, weights, every=every, samples=2, reward=length, at_start=True)] if every else []
    step = policy.update(rollout, rg.advantages(rollout, odd_tokens(rollout), estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("in_turns", step.metrics, *examined)


def length(response: str) -> float:
    return float(len(response))


def run(made: rg.Graph, steps: int, folder: Path | None = None) -> list[dict[str, float]]:
    """The bits of a run on a GPU that models time-share, which is this host."""
    sleeps.clear()
    plan = rg.compile(made, rg.Cluster(gpus=1))
    with LocalJob(made, plan, Checkpoints(made, plan, Recovery(folder, 2, 2)) if folder else None) as job:
        return [digests.bits(step) for step in job.steps(steps)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize(
    ("settings", "slept"),
    [
        ({}, ["forgot"] * 5),
        ({"adapter": True}, ["forgot"] * 5),
        ({"depth": 1}, ["kept", *["forgot"] * 4]),  # the second rollout has the first weights, too
        ({"depth": 2}, ["kept", "kept", *["forgot"] * 3]),
        ({"every": 2}, ["forgot"] * 5),
        ({"depth": 1, "every": 2}, ["kept", *["forgot"] * 4]),
    ],
)
def test_a_run_has_the_bits_of_an_engine_that_keeps_its_weights(model: str, settings: dict[str, Any], slept: list[str]) -> None:
    kept = run(graph(model, rg.Generator, **settings), 5)
    assert run(graph(model, Forgetful, **settings), 5) == kept
    assert sleeps == slept


@pytest.mark.parametrize("depth", [0, 1])
def test_a_run_that_is_resumed_has_them_too(model: str, depth: int, tmp_path: Path) -> None:
    kept = run(graph(model, rg.Generator, depth=depth), 6)
    found = run(graph(model, Forgetful, depth=depth), 3, tmp_path)
    found += run(graph(model, Forgetful, depth=depth), 6, tmp_path)
    assert found[-1] == kept[-1]
    assert [step for step in found if step not in kept] == []
    assert "forgot" in sleeps


def test_weights_that_were_forgotten_are_seen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests rest on: an engine that forgot its weights where none were loaded next samples other tokens, or fails."""
    from rlgraph.runtime.worker.weight_loops import WeightLoops

    kept = run(graph(model, rg.Generator, depth=1), 3)
    monkeypatch.setattr(WeightLoops, "loads_before", lambda self, node, step: True)
    try:
        found = run(graph(model, Forgetful, depth=1), 3)
    except Exception:  # noqa: BLE001 (it has no numbers to draw by)
        return
    assert found != kept
    assert torch.isnan(torch.tensor([value for step in found for value in step.values()])).any()
