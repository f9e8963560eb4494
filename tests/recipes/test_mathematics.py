"""The recipe of mathematics trains models of several families unchanged, and exports a folder that others load."""

import json
import shutil
from pathlib import Path

import pytest
from support import forked_workers
from support.recipe_runs import run_recipe
from support.templates import model_with
from support.tiny import tiny_qwen
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlgraph.runtime.driver.ray_dispatch import DISPATCHES

pytestmark = pytest.mark.stage("recipes")
pytest.importorskip("reasoning_gym", exc_type=ImportError)  # one of its packages is built from source, by a C compiler

SMALL = [
    "engine=transformers",
    "prompts=2",
    "group_size=2",
    "steps=2",
    "every=1",
    "questions=4",
    "samples=2",
    "max_tokens=8",
    "max_context=400",
]
FAMILIES = {"smollm2": None, "qwen3": "qwen3"}  # template, and the kind of weights if not Llama's; more are in test_chat_templates.py


def model_of(folder: Path, template: str) -> Path:
    """Make a tiny model of a family with the chat template of that family."""
    made = model_with(folder / "llama", template)
    if (kind := FAMILIES[template]) is None:
        return made
    other = tiny_qwen(folder, kind, vocab=330)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(made / file, other / file)
    return Path(other)


@pytest.mark.parametrize("template", FAMILIES)
def test_a_family_is_trained_validated_and_exported(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path, template)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DISPATCHES, "compiled_graph", forked_workers.Forked)
    thinking = ["thinking=false"] if template == "qwen3" else []
    run_recipe("mathematics", monkeypatch, *SMALL, f"model={model}", *thinking, "correction=decoupled_token_is", "out=run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"val/acc/mean@2", "val/acc/best@2/mean", "val/acc/maj@2/mean", "val/pass@2", "val/chain_sum/acc/mean@2"} <= set(lines[-1])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    before = AutoModelForCausalLM.from_pretrained(model)
    assert exported.config.model_type == before.config.model_type
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (exported, before)]
    assert shapes[0] == shapes[1]
    messages = [{"role": "user", "content": "1 + 1 ="}]
    new, old = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "run/model", model))
    assert new.apply_chat_template(messages, tokenize=False) == old.apply_chat_template(messages, tokenize=False)


def test_no_held_out_question_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "recipes")
    from tasks.school import questions

    held_out = questions(64, seed=1_000_003, terms=3, digits=2)
    asked = {row["prompt"] for row in held_out}
    train = questions(512, 0, frozenset(asked), terms=3, digits=2)
    assert len(asked) == 64
    assert len({row["prompt"] for row in train}) == 512
    assert not asked & {row["prompt"] for row in train}
    assert {row["data_source"] for row in train} == {row["data_source"] for row in held_out} == {"chain_sum", "products"}


def test_each_task_is_drawn_as_often_although_one_has_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "recipes")
    import mathematics

    train, _ = mathematics.data(mathematics.Config())
    sizes = {name: len(rows) for name, rows in train.sources.items()}
    assert sizes["products"] < 100 < sizes["chain_sum"]
    assert train.at(0, 0) == [0.5, 0.5]


def test_examples_are_earlier_turns_of_every_question_and_are_asked_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "recipes")
    import mathematics

    drawn, held_out = mathematics.data(mathematics.Config(questions=16, shots=2))
    train = list(drawn)
    first = train[0]["prompt"][:4]
    assert [message["role"] for message in first] == ["user", "assistant"] * 2
    assert all(row["prompt"][:4] == first and len(row["prompt"]) == 5 for row in (*train, *held_out))
    asked = [{row["prompt"][-1]["content"] for row in rows} for rows in (train, held_out)]
    assert not asked[0] & asked[1]
    assert not {message["content"] for message in first} & (asked[0] | asked[1])
    assert mathematics.data(mathematics.Config(questions=16, shots=0))[1][0]["prompt"][0]["role"] == "user"
