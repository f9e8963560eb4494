"""Examples and pairs: what is learnt of text and of conversations, in which columns, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.templates import model_with
from transformers import AutoTokenizer

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import DataError
from rlgraph.graph.nodes import Output
from rlgraph.nodes.base import Context

TALK = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "Four."},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: model_with(folder / name, name) for name in ("smollm2", "qwen2_5", "qwen3", "llama3", "gemma")}
    return made | {"tiny": tiny_model(folder / "tiny", vocab=288)}


def policy(path: Path) -> rg.Policy:
    return rg.Policy(str(path), pool=rg.Pool("train"))


def batch(output: Output, step: int = 0) -> dict[str, Any]:
    """Draw the columns of a step, as the worker of a source does."""
    output.node.operation.check(output.node)
    return dict(output.node.operation.start(Context())(step, {}))


def learnt(path: Path, columns: dict[str, Any]) -> list[str]:
    """Decode what each row learns: runs of tokens under the mask, parted by a bar."""
    tokenizer, found = AutoTokenizer.from_pretrained(path), []
    for tokens, mask in zip(columns["responses"].tolist(), columns["response_mask"].tolist(), strict=True):
        runs: list[list[int]] = [[]]
        for token, kept in zip(tokens, mask, strict=True):
            if kept:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        found.append("|".join(tokenizer.decode(run) for run in runs if run))
    return found


def whole(columns: dict[str, Any], row: int = 0) -> list[int]:
    prompt = columns["prompts"][row][columns["prompt_mask"][row]].tolist()
    return [*prompt, *columns["responses"][row].tolist()]


@pytest.mark.parametrize(
    ("name", "end"), [("smollm2", "<|im_end|>"), ("qwen2_5", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>")]
)
def test_the_assistants_turns_are_learnt_with_their_end_and_nothing_else(models: dict[str, Path], name: str, end: str) -> None:
    path = models[name]
    columns = batch(rg.examples([{"messages": TALK}], 1, policy(path)))
    assert learnt(path, columns) == [f"Two.{end}|Four.{end}"]
    rendered = AutoTokenizer.from_pretrained(path).apply_chat_template(TALK, tokenize=True, return_dict=False)
    assert whole(columns) == rendered[: len(whole(columns))], "token by token what the template renders"
    assert learnt(path, batch(rg.examples([{"messages": TALK}], 1, policy(path), learns="last"))) == [f"Four.{end}"]


def test_messages_of_weight_0_are_read_and_not_learnt(models: dict[str, Path]) -> None:
    path, talk = models["qwen2_5"], [TALK[0], TALK[1] | {"weight": 0}, TALK[2], TALK[3] | {"weight": 1}]
    columns = batch(rg.examples([{"messages": talk}], 1, policy(path)))
    assert learnt(path, columns) == ["Four.<|im_end|>"]
    every = batch(rg.examples([{"messages": TALK}], 1, policy(path)))
    assert whole(columns) == whole(every)


def test_prompt_and_completion_are_learnt_from_the_completion_on(models: dict[str, Path]) -> None:
    path = models["qwen2_5"]
    as_messages = rg.examples([{"prompt": TALK[:3], "completion": TALK[3:]}], 1, policy(path))
    as_answer = rg.examples([{"prompt": TALK[:3], "answer": "Four."}], 1, policy(path))
    assert learnt(path, batch(as_messages)) == learnt(path, batch(as_answer)) == ["Four.<|im_end|>"]
    assert whole(batch(as_messages)) == whole(batch(as_answer))


def test_text_is_learnt_with_the_token_that_ends_it(models: dict[str, Path]) -> None:
    path, tokenizer = models["tiny"], AutoTokenizer.from_pretrained(models["tiny"])
    columns = batch(rg.examples([{"prompt": "1 + 1 =", "completion": " 2"}], 1, policy(path)))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    assert whole(columns) == tokenizer("1 + 1 = 2")["input_ids"] + end
    assert columns["responses"][0].tolist() == tokenizer("1 + 1 = 2")["input_ids"][len(tokenizer("1 + 1 =")["input_ids"]) :] + end
    alone = batch(rg.examples([{"text": "1 + 1 = 2"}], 1, policy(path)))
    assert whole(alone) == whole(columns)
    assert alone["prompts"].shape == (1, 1), "nothing predicts the first token, so it is the prompt"
    assert alone["response_mask"].all()


def test_a_token_across_the_boundary_of_prompt_and_completion_is_learnt(models: dict[str, Path], tmp_path: Path) -> None:
    path = model_with(tmp_path / "merging", "qwen2_5")
    file = path / "tokenizer.json"
    written = json.loads(file.read_text())
    for number, pair in enumerate(("Ġ2", "Ċ2"), 300):
        written["model"]["vocab"][pair] = number
        written["model"]["merges"].append([*pair])
    file.write_text(json.dumps(written))
    row = {"prompt": "1 + 1 = ", "completion": "2 it is", "chosen": "2", "rejected": "3"}
    end = AutoTokenizer.from_pretrained(path).eos_token
    assert learnt(path, batch(rg.examples([row], 1, policy(path)))) == [f" 2 it is{end}"]
    assert learnt(path, batch(rg.pairs([row], 1, policy(path)))) == [f" 2{end}", f"3{end}"]
    talk = [TALK[0], {"role": "assistant", "content": "2"}]
    assert learnt(path, batch(rg.examples([{"messages": talk}], 1, policy(path)))) == ["\n2<|im_end|>"]


@pytest.mark.parametrize("ends", [[0], [7, 0], 7])
def test_texts_whose_end_does_not_end_a_response_are_named_at_the_launch(
    ends: int | list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model(tmp_path / "tiny", vocab=288)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    batch(rg.examples([{"prompt": "1 + 1 =", "completion": " 2"}], 1, policy(folder)))
    named = "node 'examples': texts end with '<|end|>' (token 0), but responses of model" in caplog.text
    assert named == (ends == 7)


def test_a_pair_is_two_rows_with_its_prompt_and_margin(models: dict[str, Path]) -> None:
    path = models["qwen2_5"]
    rows = [{"chosen": TALK, "rejected": [*TALK[:3], {"role": "assistant", "content": "Five."}], "by": 0.5}]
    columns = batch(rg.pairs(rows, 2, policy(path), margin="by"))
    assert learnt(path, columns) == ["Four.<|im_end|>", "Five.<|im_end|>"] * 2
    assert columns["preferences"].tolist() == [1.0, -1.0] * 2
    assert columns["margins"].tolist() == [0.5] * 4
    assert columns["prompts"][0].tolist() == columns["prompts"][1].tolist()


def test_mismatched_rows_have_the_response_of_the_row_before(models: dict[str, Path]) -> None:
    path = models["tiny"]
    rows = [{"prompt": f"{n} =", "completion": f" {n}", "good": n != 2} for n in range(1, 4)]
    columns = batch(rg.examples(rows, 3, policy(path), label="good", mismatched=True))
    said = [text.split()[0][0] for text in learnt(path, columns)]
    assert said[1::2] == [said[-2], *said[0:-2:2]]
    assert columns["preferences"].tolist() == [value for n in said[0::2] for value in (-1.0 if n == "2" else 1.0, 0.0)]
    assert columns["prompts"][0::2].tolist() == columns["prompts"][1::2].tolist()


def test_the_draw_depends_on_seed_and_step_alone_and_covers_each_epoch(models: dict[str, Path]) -> None:
    rows = [{"prompt": f"{n} =", "completion": f" {n}"} for n in range(6)]
    source = rg.examples(rows, 4, policy(models["tiny"]), seed=3)
    steps = [learnt(models["tiny"], batch(source, step)) for step in range(3)]
    assert steps == [learnt(models["tiny"], batch(source, step)) for step in range(3)]
    drawn = [text for step in steps for text in step]
    assert sorted(drawn[:6]) == sorted(drawn[6:]) == sorted(set(drawn))
    cursor, other = source.node.operation.cursor(2), rg.examples(rows[::-1], 4, policy(models["tiny"]), seed=3).node.operation.cursor(2)
    assert cursor is not None
    assert cursor == {"items": 6, "digest": cursor["digest"], "seed": 3, "next": 8}
    assert other == {**cursor, "digest": other["digest"]} != cursor  # type: ignore[index]


def test_long_rows_are_refused_or_cut(models: dict[str, Path]) -> None:
    rows = [{"prompt": "1 =", "completion": " 1" * 20}]
    with pytest.raises(DataError, match=r"item 0 of the data set has \d+ tokens, more than max_tokens=12"):
        batch(rg.examples(rows, 1, policy(models["tiny"]), max_tokens=12))
    assert len(whole(batch(rg.examples(rows, 1, policy(models["tiny"]), max_tokens=12, overlong="cut")))) == 12
    with pytest.raises(DataError, match="item 0 of the data set has no token to learn within its first 2 of"):
        batch(rg.examples(rows, 1, policy(models["tiny"]), max_tokens=2, overlong="cut"))


THINKS = [TALK[0], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTwo."}, *TALK[2:]]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
WRONG: dict[str, tuple[str, Sequence[dict[str, Any]], str]] = {
    "a row of another form": ("tiny", [{"question": "?"}], "an example has 'messages', 'prompt' and 'completion'"),
    "a conversation for a model without a template": ("tiny", [{"messages": TALK}], "the model has no chat template"),
    "a conversation without an answer": ("qwen2_5", [{"messages": TALK[:1]}], "has no assistant message to learn"),
    "a role that the template refuses": ("gemma", [{"messages": [TALK[1], TALK[1]]}], "the chat template refuses its messages of"),
    "a turn that is rendered in another way later": (
        "qwen3",
        [{"messages": THINKS}],
        "renders message 1 differently once more messages follow",
    ),
    "tools that the template does not write": (
        "smollm2",
        [{"messages": TALK}, {"messages": TALK, "tools": [TOOL]}],
        "item 1 .* gives 'tools'",
    ),
    "a setting that the template does not read": (
        "qwen2_5",
        [{"messages": TALK, "chat_template_kwargs": {"enable_thinking": True}}],
        "gives 'enable_thinking' to the chat template, which does not read it",
    ),
    "a call that the template does not write": ("smollm2", [{"messages": [TALK[0], CALLS]}], "gives 'tool_calls'"),
    "words that the template leaves out": (
        "qwen3",
        [{"messages": [TALK[0], {"role": "assistant", "content": "<think>Hm.</think>lost</think>Two."}]}],
        "does not write content of message 1",
    ),
    "tools beside text": ("tiny", [{"prompt": "1", "completion": "2", "tools": [TOOL]}], "is text, .* and has tools=; leave that out"),
    "half of a character": ("tiny", [{"prompt": "1", "completion": "2\ud83d"}], "item 0 .* a lone surrogate"),
    "half of a character in a message": (
        "qwen2_5",
        [{"messages": [TALK[0], TALK[1] | {"content": "\ud83d"}]}],
        "holds a value that JSON cannot hold",
    ),
    "half a weight": ("qwen2_5", [{"messages": [TALK[0], TALK[1] | {"weight": 0.5}]}], "message 1 has weight=0.5; a weight is 1, or 0"),
    "nothing of a weight": ("qwen2_5", [{"messages": [TALK[0], TALK[1] | {"weight": 0}]}], "has no assistant message to learn"),
    "a later row of another form": ("tiny", [{"text": "1"}, {"prompt": "1"}], "item 1 of the data set has the fields"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_learnt_is_an_error_at_the_launch(what: str, models: dict[str, Path]) -> None:
    name, rows, message = WRONG[what]
    with pytest.raises(DataError, match=message):
        batch(rg.examples(list(rows), 1, policy(models[name])))


def test_the_last_turn_of_a_template_that_drops_thinking_can_be_learnt(models: dict[str, Path]) -> None:
    path = models["qwen3"]
    columns = batch(rg.examples([{"messages": THINKS}], 1, policy(path), learns="last"))
    assert learnt(path, columns)[0].endswith("Four.<|im_end|>")


def test_settings_without_effect_are_refused() -> None:
    one = rg.Policy("tiny", pool=rg.Pool("train"))
    with pytest.raises(DataError, match="overlong='cut' has no effect without max_tokens"):
        rg.examples([{"text": "1"}], 1, one, overlong="cut")
    with pytest.raises(DataError, match="mismatched=True requires a label"):
        rg.examples([{"text": "1"}], 2, one, mismatched=True)
    with pytest.raises(DataError, match="the data set is a stream"):
        rg.examples(rg.data.stream(lambda: iter([{"text": "1"}])), 1, one)
    with pytest.raises(DataError, match="one of 'chosen' and 'rejected' begins the other"):
        rg.pairs([{"chosen": TALK, "rejected": TALK[:3]}], 1, one)


def test_masks_are_bool_and_padding_is_outside(models: dict[str, Path]) -> None:
    rows = [{"prompt": "1 =", "completion": " 1"}, {"prompt": "12345 =", "completion": " 12345"}]
    columns = batch(rg.examples(rows, 2, policy(models["tiny"])))
    assert columns["response_mask"].dtype is torch.bool
    assert columns["prompt_mask"].dtype is torch.bool
    assert len({int(n) for n in columns["response_mask"].sum(-1)}) == 2
