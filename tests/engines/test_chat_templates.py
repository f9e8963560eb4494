"""Conversations reach the engine as the model's own chat template writes them, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.templates import FOLDER, FRONT, SPECIAL, model_with, tokenizer_of

import rlgraph as rg
from rlgraph.errors import DataError
from rlgraph.nodes.base import Context
from rlgraph.nodes.rollout.fitting import check_prompts
from rlgraph.nodes.rollout.rollout import Generator

USER = {"role": "user", "content": "1 + 1 ="}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "plus 1?"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add", "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": "ü"}'}}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2", "tool_call_id": "c1"}]

QWEN = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
ASKED = "<|im_start|>user\n1 + 1 =<|im_end|>\n"
TEXTS = {  # of USER alone, by hand
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1 + 1 =<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<bos><start_of_turn>user\n1 + 1 =<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] 1 + 1 = [/INST]",
    "qwen2_5": f"{QWEN}{ASKED}<|im_start|>assistant\n",
    "qwen3": f"{ASKED}<|im_start|>assistant\n",
    "smollm2": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    f"{ASKED}<|im_start|>assistant\n",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: model_with(folder / name, name) for name in SPECIAL}


def generator_of(folder: Path) -> Generator:
    return rg.Generator(str(folder), pool=rg.Pool("rollout"), max_context=4096, sampling=rg.Sampling(max_tokens=4))


def sent(folder: Path, data: list[dict[str, Any]], chat: rg.options.Chat | None = None) -> list[list[int]]:
    """The token ids that a rollout sends to its engine, in the order of the data."""
    prompts = rg.prompts(data, count=len(data), chat=chat)
    rollout = generator_of(folder).rollout(prompts).node
    columns = prompts.node.operation.batch(0)
    [tasks] = rollout.operation.tasks(Context(), columns)
    requests = [task.request for task in tasks]
    order = [prompts.node.operation.order.row(place) for place in columns["prompt_ids"].tolist()]
    return [list(request.prompt) for _, request in sorted(zip(order, requests, strict=True), key=lambda pair: pair[0])]


def check(folder: Path, data: list[dict[str, Any]], chat: rg.options.Chat | None = None) -> None:
    """The checks of a launch."""
    prompts = rg.prompts(data, count=1, chat=chat)
    node = generator_of(folder).rollout(prompts).node
    prompts.node.operation.check(prompts.node)
    node.operation.check(node)


def test_the_notice_names_the_source_of_each_template() -> None:
    named = {line.split()[0] for line in (FOLDER / "NOTICE").read_text().splitlines() if line.startswith("  ")}
    assert named == {path.name for path in FOLDER.glob("*.jinja")} == {f"{name}.jinja" for name in SPECIAL}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_question_becomes_the_text_that_the_model_was_trained_on(models: dict[str, Path], name: str) -> None:
    [tokens] = sent(models[name], [{"prompt": [USER]}])
    tokenizer = tokenizer_of(models[name])
    assert tokenizer.decode(tokens) == TEXTS[name]
    assert tokens == tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    if name in FRONT:
        assert tokens.count(tokenizer.bos_token_id) == 1
        assert tokenizer(TEXTS[name])["input_ids"].count(tokenizer.bos_token_id) == 2, "what encoding the text would have given"


@pytest.mark.parametrize("name", SPECIAL)
def test_earlier_turns_and_system_prompts_are_rendered_as_the_template_does(models: dict[str, Path], name: str) -> None:
    tokenizer = tokenizer_of(models[name])
    conversations = [TURNS, [USER]] if name in ("gemma", "mistral") else [TURNS, [SYSTEM, *TURNS], [USER]]
    found = sent(models[name], [{"prompt": messages} for messages in conversations])
    wanted = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in conversations]
    assert found == wanted


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
@pytest.mark.parametrize("as_json", [False, True])
def test_tools_and_their_calls_are_rendered_with_arguments_as_mappings(models: dict[str, Path], name: str, as_json: bool) -> None:
    tokenizer = tokenizer_of(models[name])
    arguments = {"b": 1, "a": "ü"}
    parsed = {**CALL, "function": {"name": "add", "arguments": arguments}}
    wire = [USER, {**CALLED[1], "tool_calls": [parsed]}, CALLED[2]]
    wanted = tokenizer.apply_chat_template(wire, tools=[TOOL], add_generation_prompt=True, return_dict=False)
    row = {"prompt": CALLED, "tools": json.dumps([TOOL]) if as_json else [TOOL]}
    assert sent(models[name], [row]) == [wanted]
    assert sent(models[name], [{"prompt": CALLED}], rg.options.Chat(tools=(TOOL,))) == [wanted]
    text = tokenizer.decode(wanted)
    assert '{"name": "add", "arguments": {"b": 1, "a": "ü"}}' in text, "the order of keys and the letters stay"
    assert "<tool_response>\n2\n</tool_response>" in text


def test_thinking_is_switched_by_the_argument_of_the_template(models: dict[str, Path]) -> None:
    tokenizer = tokenizer_of(models["qwen3"])
    [on], [off] = (sent(models["qwen3"], [{"prompt": "1 + 1 ="}], rg.options.Chat(enable_thinking=flag)) for flag in (True, False))
    assert tokenizer.decode(on) == TEXTS["qwen3"]
    assert tokenizer.decode(off) == TEXTS["qwen3"] + "<think>\n\n</think>\n\n"
    rows = [{"prompt": [USER], "chat_template_kwargs": {"enable_thinking": False}}]
    assert sent(models["qwen3"], rows, rg.options.Chat(enable_thinking=True)) == [off], "a row's own argument replaces the chat's"


def test_text_becomes_a_message_only_with_a_chat_and_the_system_prompt_goes_before_it(models: dict[str, Path]) -> None:
    tokenizer = tokenizer_of(models["llama3"])
    [plain] = sent(models["llama3"], [{"prompt": "1 + 1 ="}])
    assert plain == tokenizer("1 + 1 =")["input_ids"]
    [chat] = sent(models["llama3"], [{"prompt": "1 + 1 ="}], rg.options.Chat(system="Be brief."))
    assert chat == tokenizer.apply_chat_template([SYSTEM, USER], add_generation_prompt=True, return_dict=False)
    own = sent(models["llama3"], [{"prompt": [SYSTEM, USER]}], rg.options.Chat(system="Think."))
    assert own == [chat], "a row's own system message stays"


def test_a_last_message_of_the_assistant_is_continued_where_that_is_asked_for(models: dict[str, Path]) -> None:
    begun = [USER, {"role": "assistant", "content": "The sum is"}]
    [tokens] = sent(models["qwen3"], [{"prompt": begun}], rg.options.Chat(continue_final=True))
    assert tokenizer_of(models["qwen3"]).decode(tokens).endswith("The sum is")
    with pytest.raises(DataError, match=r"item 1 .* ends with the assistant's message 'The sum is'; .*continue_final=True"):
        check(models["qwen3"], [{"prompt": [USER]}, {"prompt": begun}])


def test_parts_of_text_are_one_text_and_absent_keys_of_arrow_are_absent(models: dict[str, Path]) -> None:
    parts = [{"type": "text", "text": "1 + 1"}, {"type": "text", "text": "="}]
    row = {"prompt": [{"role": "user", "content": parts, "tool_calls": None, "name": None}], "tools": None, "chat_template_kwargs": None}
    joined = [{"role": "user", "content": "1 + 1\n="}]
    wanted = tokenizer_of(models["qwen2_5"]).apply_chat_template(joined, add_generation_prompt=True, return_dict=False)
    assert sent(models["qwen2_5"], [row]) == [wanted]


def test_every_way_to_sample_sends_the_same_conversation(models: dict[str, Path]) -> None:
    data, folder = [{"prompt": TURNS, "answer": "3"}], models["gemma"]
    [wanted] = sent(folder, data)
    asked: list[Any] = []

    class Engine:
        def submit(self, request: Any) -> None:
            asked.append(list(request.prompt))

        def generate(self, prompts: Any, sampling: Any, seeds: Any) -> list[Any]:
            from rlgraph.engines.api import Response

            asked.extend(prompts)
            return [Response([1], [0.0], [0]) for _ in prompts]

    prompts, weights = rg.prompts(data, count=1), rg.feedback("weights", depth=1)
    assert prompts.columns == ("prompt_texts", "prompt_messages", "prompt_ids", "answers")
    refilled = generator_of(folder).rollout(prompts, weights, group_size=2, refill=rg.options.Refill(reward=length), name="refilled").node
    sampler = refilled.operation.start(Context(engine=Engine()))
    sampler.newest = 0
    sampler._draw(0)
    evaluation = rg.evaluate(generator_of(folder), data, weights, reward=of_messages, every=1)
    evaluation.node.inputs[0].node.operation.fire(Context(engine=Engine()), 0)
    assert asked == [wanted] * 3
    grade = evaluation.node.operation.items
    assert grade["prompt_texts"] == ["plus 1?"] == prompts.node.operation.batch(0)["prompt_texts"], "the last message of the user"
    assert json.loads(grade["prompt_messages"][0])["messages"] == TURNS


def length(response: str) -> float:
    return float(len(response))


def of_messages(response: str, prompt_message: str) -> float:
    return float(len(json.loads(prompt_message)["messages"]))


WRONG: dict[str, tuple[str, list[dict[str, Any]], rg.options.Chat | None, str]] = {
    "a role that the template refuses": (
        "gemma",
        [{"prompt": [USER]}, {"prompt": [SYSTEM, USER]}],
        None,
        r"item 1 of the data set: the chat template of '.*' refuses it \(.*none of the system.*'system', 'user'",
    ),
    "an order that it refuses": ("mistral", [{"prompt": [USER, USER]}], None, r"item 0 .* must alternate"),
    "thinking where there is none": (
        "qwen2_5",
        [{"prompt": [USER]}],
        rg.options.Chat(enable_thinking=True),
        r"item 0 .* gives 'enable_thinking' to the chat template of '.*', which does not read it",
    ),
    "tools where there are none": ("smollm2", [{"prompt": [USER], "tools": [TOOL]}], None, "gives 'tools' .* does not read it"),
    "a misspelt argument": ("qwen3", [{"prompt": [USER]}], rg.options.Chat(template_kwargs={"enable_thinkin": True}), "'enable_thinkin'"),
    "a system prompt that no row needs": (
        "qwen3",
        [{"prompt": [SYSTEM, USER]}] * 2,
        rg.options.Chat(system="Think."),
        "every item has its own system message",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_template_does_not_take_is_an_error_at_the_launch(models: dict[str, Path], name: str) -> None:
    model, data, chat, words = WRONG[name]
    with pytest.raises(DataError, match=words):
        check(models[model], data, chat)


def test_a_template_that_writes_todays_date_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = model_with(tmp_path / "dated", "qwen3")
    dated = "{% set day = date_string if date_string is defined else strftime_now('%d %b %Y') %}{{ day }}: {{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(dated)
    fixed = rg.options.Chat(template_kwargs={"date_string": "1 Jan 2025"})
    check(folder, [{"prompt": [USER]}] * 3, fixed)
    assert not [message for message in caplog.messages if "today's date" in message]
    check(folder, [{"prompt": [USER]}] * 3)
    assert len([message for message in caplog.messages if "today's date" in message]) == 1
    [tokens] = sent(folder, [{"prompt": [USER]}], fixed)
    assert tokenizer_of(folder).decode(tokens) == "1 Jan 2025: 1 + 1 ="


def test_the_room_for_a_conversation_is_counted_as_it_is_sent(models: dict[str, Path]) -> None:
    data = [{"prompt": [USER]}]
    [tokens] = sent(models["llama3"], data)
    prompts = rg.prompts(data, count=1)
    for room, fits in ((len(tokens), True), (len(tokens) - 1, False)):
        generator = rg.Generator(str(models["llama3"]), pool=rg.Pool("rollout"), max_context=room + 4, sampling=rg.Sampling(max_tokens=4))
        node = generator.rollout(prompts).node
        if fits:
            check_prompts(node, generator, generator.sampling, prompts.node.operation)
        else:
            with pytest.raises(DataError, match=f"the prompt of item 0 of the data set has {len(tokens)} tokens"):
                check_prompts(node, generator, generator.sampling, prompts.node.operation)
