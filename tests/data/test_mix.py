"""Mixtures: shares as their weights say, each row of a data set once an epoch of it, the same order after a resume."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.templates import model_with

import rlgraph as rg
from rlgraph.errors import CheckpointError, DataError, RlgraphError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Output
from rlgraph.nodes.base import Context
from rlgraph.plan.cluster import Cluster
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob

EASY = [{"prompt": f"easy {n}", "answer": "e"} for n in range(5)]
HARD = rg.data.rows([{"prompt": f"hard {n}", "answer": "h"} for n in range(11)])
SOURCES: dict[str, Any] = {"easy": EASY, "hard": HARD}
THREE_TO_ONE = {"easy": 3.0, "hard": 1.0}


def harder(seed: int, step: int) -> dict[str, float]:
    return {"easy": 1.0, "hard": step / 10}


def source(weights: Any, count: int = 8, seed: int = 0) -> Any:
    return rg.prompts(rg.data.mix(SOURCES, weights=weights), count, seed=seed).node.operation


def drawn(operation: Any, steps: int) -> list[str]:
    return [text for step in range(steps) for text in operation.batch(step)["prompt_texts"]]


def test_prompts_are_drawn_by_their_weights() -> None:
    count = Counter(text.split()[0] for text in drawn(source(THREE_TO_ONE), 500))
    assert abs(count["easy"] / 4000 - 0.75) < 0.03


def test_each_data_set_is_drawn_in_an_order_of_its_own_each_row_once_an_epoch() -> None:
    texts = drawn(source(THREE_TO_ONE), 60)
    for kind, size in (("easy", 5), ("hard", 11)):
        own = [text for text in texts if text.startswith(kind)]
        epochs = [own[at : at + size] for at in range(0, len(own) - size, size)]
        assert all(len({*epoch}) == size for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1, "each epoch is shuffled anew"


def test_the_order_depends_on_the_seed_and_the_step_alone() -> None:
    whole = source(harder)
    texts = drawn(whole, 30)
    assert drawn(source(harder), 30) == texts != drawn(source(harder, seed=1), 30)
    later = pickle.loads(pickle.dumps(source(harder)))
    assert later.batch(29)["prompt_texts"] == texts[-8:], "a step is drawn without those before it"
    ids = whole.batch(29)["prompt_ids"].tolist()
    assert ids == list(range(29 * 8, 30 * 8))
    assert [whole.item(place)["prompt"] for place in ids] == texts[-8:]


def test_a_curriculum_changes_the_shares_from_step_to_step_and_they_are_metrics() -> None:
    operation = source(harder, count=64)
    stage = operation.start(Context())
    shares = []
    for step in (0, 10, 90):
        _, metrics = stage(step, {})
        assert metrics["data/mix/easy"] + metrics["data/mix/hard"] == 64
        shares.append(metrics["data/mix/hard"] / 64)
    assert shares[0] == 0
    assert 0.3 < shares[1] < 0.7
    assert shares[2] > 0.8


def test_what_is_set_aside_is_passed_over_and_nothing_before_it_changes() -> None:
    operation = source(THREE_TO_ONE)
    texts = drawn(operation, 20)
    gone = texts[30]
    left = [text for step in range(20) for text in (operation.item(p)["prompt"] for p in operation.positions(step, (30,)))]
    assert left[:24] == texts[:24], "steps before that place"
    assert left == [text for place, text in enumerate(drawn(operation, 30)) if place < 30 or text != gone][:160]


def numbers(columns: Any) -> Any:
    return {"sizes": columns["prompt_texts"]}, {
        "sum": float(sum(hash_of(text) * (n + 1) for n, text in enumerate(columns["prompt_texts"])))
    }


def hash_of(text: str) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(text))


def graph(weights: Any, sources: Any = SOURCES) -> Graph:
    node = rg.node(reads="prompt_texts", writes="sizes")(numbers)
    return rg.Graph("mixed", node(rg.prompts(rg.data.mix(sources, weights=weights), 8)))


def run(made: Graph, steps: int, folder: Path | None = None) -> list[dict[str, float]]:
    plan = rg.compile(made, Cluster(cpus=2))
    checkpoints = Checkpoints(made, plan, Recovery(folder, 2, 2)) if folder else None
    with LocalJob(made, plan, checkpoints) as job:
        return [{k: v for k, v in step.metrics.items() if not k.startswith("timing_s")} for step in job.steps(steps)]


@pytest.mark.parametrize("weights", [THREE_TO_ONE, harder], ids=["constant", "curriculum"])
def test_a_run_that_resumes_draws_the_same_and_one_of_other_weights_is_refused(weights: Any, tmp_path: Path) -> None:
    whole = run(graph(weights), 12)
    assert run(graph(weights), 5, tmp_path) + run(graph(weights), 12, tmp_path) == whole
    with pytest.raises(CheckpointError, match="'shares' was"):
        run(graph({"easy": 1.0, "hard": 2.5}), 13, tmp_path)
    with pytest.raises(CheckpointError, match=r"'items' was 16 and is 15|'mix' 'easy' was 5 and is 4"):
        run(graph(weights, {**SOURCES, "easy": EASY[:4]}), 13, tmp_path)


def test_prompts_that_are_too_long_are_dropped_from_their_data_set(tmp_path: Path) -> None:
    folder = model_with(tmp_path / "qwen", "qwen2_5")

    def launched(sizes: dict[str, list[int]]) -> Output:
        sources = {name: rg.data.rows([{"prompt": name[0] * n} for n in lengths], overlong="drop") for name, lengths in sizes.items()}
        prompts = rg.prompts(rg.data.mix(sources, weights=dict.fromkeys(sizes, 1.0)), count=4)
        generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), max_context=12, sampling=rg.Sampling(max_tokens=4))
        rollout = generator.rollout(prompts).node
        for node in (prompts.node, rollout):
            node.operation.check(node)
        return prompts

    operation = launched({"a": [3, 20, 4], "b": [20, 5, 6, 20]}).node.operation
    assert {*drawn(operation, 20)} == {"aaa", "aaaa", "bbbbb", "bbbbbb"}
    assert operation.metrics == {"data/overlong_prompts": 3.0}
    with pytest.raises(DataError, match="all prompts of data set 'b' of the mixture are too long"):
        launched({"a": [3], "b": [20]})


WRONG: dict[str, tuple[Any, str]] = {
    "no data set": (lambda: rg.data.mix({}, weights={}), "at least one data set"),
    "a name that is missing": (
        lambda: rg.data.mix(SOURCES, weights={"easy": 1.0}),
        r"there must be a number for each of \['easy', 'hard'\]",
    ),
    "a name too many": (lambda: rg.data.mix(SOURCES, weights={**THREE_TO_ONE, "x": 1.0}), "there must be a number for each"),
    "a negative weight": (lambda: rg.data.mix(SOURCES, weights={"easy": 2.0, "hard": -1.0}), "a finite number of at least 0"),
    "a weight of 0": (lambda: rg.data.mix(SOURCES, weights={"easy": 2.0, "hard": 0.0}), "never drawn; leave it out"),
    "a curriculum without weights": (
        lambda: rg.data.mix(SOURCES, weights=lambda seed, step: {}),
        "the weights of the mixture at step 0 are",
    ),
    "a stream": (lambda: rg.data.mix({"a": lambda: iter(EASY), "b": EASY}, weights={"a": 1.0, "b": 1.0}), "a data set has a length"),
    "other fields": (
        lambda: rg.prompts(rg.data.mix({"a": EASY, "b": [{"prompt": "x"}]}, {"a": 1.0, "b": 1.0}), 1).node.operation.check(None),
        "item 0 of data set '.*' of the mixture lacks the field 'answer'",
    ),
    "other limits": (
        lambda: rg.data.mix({"a": EASY, "b": rg.data.rows(EASY, overlong="drop")}, weights={"a": 1.0, "b": 1.0}),
        "treat long prompts differently",
    ),
    "an evaluation": (
        lambda: rg.evaluate(
            rg.Generator("tiny", pool=rg.Pool("p")),
            rg.data.mix(SOURCES, weights=THREE_TO_ONE),
            rg.feedback("weights", depth=1),
            reward=lambda response: 0.0,
            every=1,
        ),
        "evaluate on each of its data sets",
    ),
    "a curriculum that fails later": (
        lambda: source(lambda seed, step: {"easy": 1.0, "hard": -float(step)}).batch(1),
        "the weights of the mixture at step 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mixture_that_cannot_be_drawn_from_is_an_error(name: str) -> None:
    make, words = WRONG[name]
    with pytest.raises(RlgraphError, match=words):
        make()
