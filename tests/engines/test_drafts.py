"""Guessed tokens: what is looked up, and that what is kept is what would have been drawn without guesses."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.engines.vllm.drafts import install
from rlgraph.errors import GraphError, PlanError
from rlgraph.values.drafts import PromptLookup, accept_draft, guesses


def looked_up(row: list[int], length: int, count: int, longest: int, shortest: int) -> list[int]:
    """The guess by its definition, a place at a time."""
    for n in range(min(longest, length - 1), shortest - 1, -1):
        for place in range(length - 1, n - 1, -1):
            if row[place - n : place] == row[length - n : length]:
                return (row[place:length] * count)[:count]
    return [0] * count


def test_guesses_are_those_of_the_definition() -> None:
    draw = random.Random(0)
    for _ in range(200):
        width = draw.randint(4, 40)
        rows = [[draw.randint(1, 4) for _ in range(width)] for _ in range(5)]
        lengths = [draw.randint(1, width) for _ in rows]
        longest = draw.randint(1, 4)
        shortest, count = draw.randint(1, longest), draw.randint(1, 5)
        found = guesses(torch.tensor(rows), torch.tensor(lengths), count, longest=longest, shortest=shortest).tolist()
        assert found == [looked_up(row, length, count, longest, shortest) for row, length in zip(rows, lengths, strict=True)]


def drawn_after(sequence: list[int], seed: int) -> int:
    """What a model with a seed draws behind a sequence: mostly what stood there before, so that some guesses are right."""
    draw = random.Random(f"{seed} {len(sequence)} {sequence[-3:]}")
    return sequence[-4] if draw.random() < 0.7 else draw.randint(1, 5)


def test_sequences_with_guesses_are_those_without() -> None:
    count, several = 3, 4
    begun = [[1, 2, 3, 4 + row] for row in range(several)]
    plain = [list(row) for row in begun]
    for seed, row in enumerate(plain):
        while len(row) < 60:
            row.append(drawn_after(row, seed))
    sequences, steps = [list(row) for row in begun], 0
    while any(len(row) < 60 for row in sequences):
        steps += 1
        longest = max(map(len, sequences))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in sequences])
        guessed = guesses(padded, torch.tensor([len(row) for row in sequences]), count, longest=2, shortest=1).tolist()
        asked = [guess if row % 2 else guess[:1] for row, guess in enumerate(guessed)]  # not all read as many
        read = [[row[-1], *guess] for row, guess in zip(sequences, asked, strict=True)]
        drawn = [
            [drawn_after([*row, *guess[:place]], seed) for place in range(len(guess) + 1)]
            for seed, (row, guess) in enumerate(zip(sequences, asked, strict=True))
        ]
        begins = torch.tensor([0, *torch.tensor([len(each) for each in read]).cumsum(0).tolist()])
        flat = (torch.tensor([token for each in rows for token in each]) for rows in (drawn, read))
        tokens, counts = accept_draft(*flat, begins, count)
        for row, own, number in zip(sequences, tokens.tolist(), counts.tolist(), strict=True):
            row += own[:number]
    assert [row[:60] for row in sequences] == plain
    assert steps < 45  # of 56 without guesses


def test_no_guess_is_kept_that_was_not_drawn() -> None:
    tokens, counts = accept_draft(torch.tensor([5, 6, 7]), torch.tensor([1, 4, 6]), torch.tensor([0, 3]), 2)
    assert counts.tolist() == [1]
    assert tokens[0, 0] == 5


def test_large_steps_do_not_guess() -> None:
    assert PromptLookup(tokens=3, below=8).schedule(64) == [[1, 8, 3], [9, 64, 0]]
    assert PromptLookup(below=64).schedule(16) == [[1, 16, 4]]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(GraphError, match="shortest=5, longest=2"):
        PromptLookup(longest=2, shortest=5)


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.engines.vllm.drafts.version", lambda name: "0.32.0")
    with pytest.raises(GraphError, match=r"vLLM 0.26 and this is 0.32.0"):
        install()


@pytest.mark.parametrize(
    ("given", "cluster", "says"),
    [
        ({"tensor_parallel": 2}, rg.Cluster(gpus=2, cpus=8, gpu="H200"), "tensor_parallel=2.*with drafts runs on one GPU"),
        ({}, rg.Cluster(cpus=8), "drafts, for vLLM's runner of a GPU, but it runs on the host"),
    ],
)
def test_engines_that_cannot_guess_are_refused_before_anything_starts(given: dict[str, Any], cluster: rg.Cluster, says: str) -> None:
    generator = rg.Generator("tiny", pool=rg.Pool("rollout"), drafts=rg.options.PromptLookup(), **given)
    rollout = generator.rollout(rg.prompts([{"prompt": "1"}], count=4))
    with pytest.raises(PlanError, match=says):
        rg.compile(rg.Graph("planned", rg.reward(length, rollout)), cluster)


def length(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("draft", ["Qwen/Qwen3-0.6B", Path("models/small")])
def test_a_draft_model_is_refused_and_the_error_says_why(engine: str, draft: Any) -> None:
    says = rf"drafts='{draft}'\): a draft model is not offered: the runner of vLLM 0.26 .* no 'draft_model'.*rg.options.PromptLookup"
    with pytest.raises(GraphError, match=says):
        rg.Generator("tiny", pool=rg.Pool("rollout"), engine=engine, drafts=draft)


def test_an_engine_without_guesses_has_no_such_setting() -> None:
    with pytest.raises(GraphError, match="'transformers' has no such setting"):
        rg.Generator("tiny", pool=rg.Pool("rollout"), engine="transformers", drafts=rg.options.PromptLookup())
