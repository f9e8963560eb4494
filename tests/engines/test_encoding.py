"""Prompts are encoded with the special tokens in front that a tokenizer adds, and with no second ones."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import rlgraph as rg
from rlgraph.engines.hf.chat_template import prompt_tokens
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import DataError
from rlgraph.nodes.base import Context
from rlgraph.nodes.rollout.fitting import check_prompts

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TURN = [{"role": "user", "content": "hi"}]


def with_front(folder: Path, front: tuple[str, ...], back: tuple[str, ...] = ()) -> Any:
    """Save a tokenizer to the folder that puts these special tokens around every text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": front[0] if front else "<|s|>", "additional_special_tokens": [*front[1:], *back]})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (*front, *back)]
    single = " ".join([*front, "$A", *back])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.chat_template = TEMPLATE.replace("{{ bos_token }}", "".join(front))
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_model(tmp_path / "model"))


@pytest.mark.parametrize("front", [("<|begin|>",), ("[gMASK]", "<sop>")])
@pytest.mark.parametrize("back", [(), ("<|over|>",)])
def test_a_rendered_prompt_gets_no_second_start_and_a_plain_one_gets_its_first(
    folder: Path, front: tuple[str, ...], back: tuple[str, ...]
) -> None:
    tokenizer = with_front(folder, front, back)
    start = [tokenizer.convert_tokens_to_ids(token) for token in front]
    rendered = tokenizer.apply_chat_template(TURN, tokenize=False, add_generation_prompt=True)
    chat, plain, empty = prompt_tokens(tokenizer, [rendered, "hi", ""])
    assert chat == tokenizer.apply_chat_template(TURN, add_generation_prompt=True, return_dict=False)
    assert plain == tokenizer("hi")["input_ids"]
    assert plain[: len(start)] == start == empty[: len(start)]
    twice = prompt_tokens(tokenizer, ["".join(front) * 2])[0]
    assert twice == start * 2, "what the text says itself stays"


def test_a_tokenizer_that_adds_nothing_encodes_as_before(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert prompt_tokens(tokenizer, ["<|end|>hi", "hi", ""]) == tokenizer(["<|end|>hi", "hi", ""])["input_ids"]


def test_every_rollout_and_evaluation_sends_its_prompts_with_one_start(folder: Path) -> None:
    tokenizer = with_front(folder, ("<|begin|>",))
    begin = tokenizer.convert_tokens_to_ids("<|begin|>")
    rendered = tokenizer.apply_chat_template(TURN, tokenize=False, add_generation_prompt=True)
    data = [{"prompt": rendered}, {"prompt": rendered}]
    generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), sampling=rg.Sampling(max_tokens=4))
    prompts, weights = rg.prompts(data, count=2), rg.feedback("weights", depth=1)
    rollout = generator.rollout(prompts).node
    tasks = rollout.operation.tasks(Context(), prompts.node.operation.batch(0))
    asked = [task.request.prompt for part in tasks for task in part]
    engine = Asked()
    refilled = generator.rollout(prompts, weights, group_size=2, refill=rg.options.Refill(reward=length), name="refilled").node
    sampler = refilled.operation.start(Context(engine=engine))
    sampler.newest = 0
    sampler._draw(0)
    evaluation = rg.evaluate(generator, data, weights, reward=length, every=1).node.inputs[0].node
    evaluation.operation.fire(Context(engine=engine), 0)
    asked += engine.asked
    assert len(asked) == 2 + 4 + 2
    assert all(list(prompt).count(begin) == 1 for prompt in asked)


def test_the_room_for_a_prompt_is_counted_as_it_is_sent(folder: Path) -> None:
    tokenizer = with_front(folder, ("<|begin|>",))
    prompts = rg.prompts([{"prompt": "<|begin|>1234"}], count=1)
    node = rg.Generator(str(folder), pool=rg.Pool("p"), max_context=9, sampling=rg.Sampling(max_tokens=4)).rollout(prompts).node
    assert len(prompt_tokens(tokenizer, ["<|begin|>1234"])[0]) == 5
    generator = node.operation.generator
    check_prompts(node, generator, rg.Sampling(max_tokens=4), prompts.node.operation)
    with pytest.raises(DataError, match="has 5 tokens, but node 'rollout' has room for 1 to 4"):
        check_prompts(node, generator, rg.Sampling(max_tokens=5), prompts.node.operation)


class Asked:
    """An engine that notes the prompts it is sent."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def submit(self, request: Any) -> None:
        self.asked.append(request.prompt)

    def generate(self, prompts: Any, sampling: Any, seeds: Any) -> list[Any]:
        from rlgraph.engines.api import Response

        self.asked += prompts
        return [Response([1], [0.0], [0]) for _ in prompts]


def length(response: str) -> float:
    return float(len(response))
