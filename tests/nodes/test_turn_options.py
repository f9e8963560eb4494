"""Conversations with the options of a rollout: refills, batches that join early, versions that interrupt."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.scripted_conversations import Scripted
from support.templates import model_with

import rlgraph as rg
from rlgraph.nodes.base import Context


class Sum:
    """Rewards the answer, after a turn and a random time."""

    def __init__(self, answer: str) -> None:
        self.answer, self.turns = answer, 0

    async def reset(self) -> list[rg.agents.Message]:
        return [rg.agents.Message("user", f"Say {self.answer}.")]

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        self.turns += 1
        await asyncio.sleep(random.random() * 0.01)
        return rg.agents.Turn([rg.agents.Message("user", "Again.")], reward=float(said.content == self.answer), done=self.turns == 2)

    async def close(self) -> None: ...


class Published:
    """Versions that are there as soon as they are asked for; `poll` finds the next one at each third look."""

    def __init__(self, context: Context) -> None:
        self.context, self.looks, self.most = context, 0, 0

    def poll(self) -> None:
        self.looks += 1
        if self.looks % 3 == 0 and self.context.version < self.most:
            self.wait(self.context.version + 1)

    def wait(self, version: int) -> None:
        while self.context.version < version:
            self.context.version += 1
            self.context.engine.load_weights({}, version=self.context.version)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("models") / "qwen2_5", "qwen2_5")


def batches(folder: Path, steps: int, depth: int, **options: Any) -> list[Any]:
    """Fire a rollout as a worker does: each batch after the versions that it needs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), sampling=rg.Sampling(max_tokens=120), max_context=900)
    source = rg.prompts([{"prompt": "", "answer": str(i)} for i in range(8)], count=2)
    node = generator.rollout(source, rg.feedback("weights", depth=depth), agent=Sum, group_size=2, **options).node
    engine = Scripted(tokenizer, lambda text: text.partition("Say ")[2][0], "<|im_end|>")
    context = Context(engine=engine, cache={str(folder): tokenizer})
    stage, published = node.operation.start(context), Published(context)
    context.arrivals = published
    found = []
    for step in range(steps):
        published.most = step
        published.wait(max(0, step - depth))
        found.append((node, *stage(step, source.node.operation.batch(step))))  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("options", [{"continuous": True}, {"interrupt": "keep"}, {"interrupt": "recompute", "continuous": True}])
def test_every_token_of_a_conversation_keeps_the_bound(folder: Path, options: dict[str, Any]) -> None:
    for step, (_, columns, metrics) in enumerate(batches(folder, 5, 1, **options)):
        versions = columns["weight_version"][columns["response_mask"]]
        assert max(0, step - 1) <= int(versions.min()) <= int(versions.max()) <= step
        assert metrics["agent/turns_mean"] == 2
        assert columns["group_ids"].tolist() == [2 * step, 2 * step, 2 * step + 1, 2 * step + 1]


@pytest.mark.parametrize("options", [{}, {"continuous": True}])
def test_a_refill_replaces_groups_of_conversations_by_a_reward_of_their_own(folder: Path, options: dict[str, Any]) -> None:
    refill = rg.options.Refill(reward=twice, writes="kept", rounds=2)
    seen: list[int] = []
    for node, columns, metrics in batches(folder, 3, 1, refill=refill, **options):
        assert set(columns) == set(node.writes)
        assert (columns["kept"] == 2 * columns["rewards"]).all()
        assert metrics["dynamic_sampling/prompts"] == 4, "all groups are constant, so that a step draws twice its prompts"
        seen += columns["group_ids"].tolist()
    assert seen == sorted(seen)
    assert len(set(seen)) == 6


def twice(reward: float) -> float:
    return 2 * reward
