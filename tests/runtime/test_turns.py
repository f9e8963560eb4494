"""Whole runs with environments: workers sample what a single process does, and rewards go up."""

from pathlib import Path

import pytest
import torch
from support.digests import ITEMS, DigestPolicy, digest, run_here, run_in_workers
from support.templates import model_with

import rlgraph as rg
from rlgraph.columns import Columns

pytestmark = pytest.mark.stage("jobs")

TURN = rg.Sampling(max_tokens=150, stop_token_ids=tuple(range(10, 60)))


class Again:
    """Asks for more, twice."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self) -> list[rg.agents.Message]:
        return [rg.agents.Message("user", "Letters, please.")]

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        self.turns += 1
        letters = sum(letter.isalpha() and letter.isascii() for letter in said.content)
        return rg.agents.Turn([rg.agents.Message("user", "more")], reward=letters / 24, done=self.turns == 3)

    async def close(self) -> None: ...


@rg.node(reads="responses response_mask", writes="seen")
def seen(batch: Columns) -> tuple[rg.Columns, dict[str, float]]:
    """Digest what was sampled, and tell how many tokens were somebody else's words."""
    mask, tokens = batch["response_mask"], batch["responses"]
    assert isinstance(mask, torch.Tensor)
    assert isinstance(tokens, torch.Tensor)
    told = ~mask & (tokens != 0)
    return {"seen": told.sum(-1).float()}, {"digest/responses": digest([tokens]), "told": float(told.sum())}


def loop(model: Path, depth: int) -> rg.Graph:
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=TURN, dtype="float32")
    policy = DigestPolicy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=8e-3), dtype="float32")
    weights = rg.feedback("weights", depth=depth)
    rollout = generator.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4, agent=Again, max_turns=3)
    advantages = rg.advantages(rollout, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("turns", step.metrics, seen(rollout))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("model") / "qwen2_5", "qwen2_5")


def test_responses_of_several_turns_learn(model: Path) -> None:
    found = run_here(loop(model, 1), 12)
    assert all(step["told"] > 0 for step in found)
    first, last = (sum(step["critic/rewards/mean"] for step in part) / len(part) for part in (found[:4], found[-4:]))
    assert last > first + 0.1, (first, last)


def test_turns_of_a_worker_are_sampled_as_in_one_process(model: Path) -> None:
    # Which turns decode together depends on when they were answered, and with it the last bits: so the first step alone is compared.
    graph = loop(model, 1)
    ours, theirs = run_here(graph, 1), run_in_workers(graph, 3)
    assert theirs[0]["digest/responses"] == ours[0]["digest/responses"]
    assert [step["staleness/max"] for step in theirs] == [0, 1, 1]
