"""Rollouts of several turns, on an engine that writes what a script says."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.columns import FINISH_REASONS
from rlgraph.engines.api import GenerateEngine, Request, Response, Running
from rlgraph.engines.hf_models.pretrained import tiny_model
from rlgraph.nodes.base import Context

CALL = '<tool_call>{"name": "double", "arguments": {"number": %d}}</tool_call>'
POOL = rg.Pool("sandbox", cpus=2)


async def double(number: int) -> int:
    return 2 * number


class Scripted(GenerateEngine):
    """Writes, one token a step, what the script says to the text that it is given."""

    def __init__(self, tokenizer: Any, script: Callable[[str], str]) -> None:
        super().__init__()
        self.tokenizer, self.script = tokenizer, script
        self.asked: list[Request] = []
        self.open: dict[str, tuple[list[int], int]] = {}
        self.most: dict[str, int] = {}

    def submit(self, request: Request) -> None:
        self.asked.append(request)
        self.most[request.id] = request.sampling.max_tokens
        text = self.script(self.tokenizer.decode(request.prompt))
        self.open[request.id] = (self.tokenizer(text)["input_ids"][: request.sampling.max_tokens], 0)

    def decode(self) -> dict[str, Response]:
        done = {}
        for name, (tokens, count) in list(self.open.items()):
            self.open[name] = (tokens, count + 1)
            if count + 1 >= len(tokens):
                del self.open[name]
                cut = len(tokens) == self.most[name]
                done[name] = Response(tokens, [-0.5] * len(tokens), finish="length" if cut else "stop")
        return done

    def unfinished(self) -> int:
        return len(self.open)

    def written(self) -> dict[str, int]:
        return {name: count for name, (_, count) in self.open.items()}

    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        return {name: Response(*self.open.pop(name)) for name in ids if name in self.open}  # type: ignore[arg-type]

    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None: ...

    def context_length(self) -> int:
        return 1000

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=1024)


def converse(
    folder: Path, script: Callable[[str], str], tools: rg.Tools, prompts: list[dict[str, str]], max_tokens: int = 300, **options: Any
) -> tuple[dict[str, Any], dict[str, float], Scripted]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), sampling=rg.Sampling(max_tokens=max_tokens), max_context=900)
    source = rg.prompts(prompts, count=len(prompts))
    node = generator.rollout(source, tools=tools, **options).node
    engine = Scripted(tokenizer, script)
    stage = node.operation.start(Context(engine=engine, cache={str(folder): tokenizer}))
    columns, metrics = stage(0, source.node.operation.batch(0))  # type: ignore[attr-defined]
    columns["texts"] = [
        (tokenizer.decode(row[mask]), tokenizer.decode(row))
        for row, mask in zip(columns["responses"], columns["response_mask"], strict=True)
    ]
    return columns, metrics, engine


def ask_once(text: str) -> str:
    return "it is 14" if "tool_response" in text else CALL % 7


def test_a_call_is_answered_and_the_response_goes_on(folder: Path) -> None:
    columns, metrics, engine = converse(folder, ask_once, rg.Tools([double], pool=POOL), [{"prompt": "2 x 7?"}])
    written, whole = columns["texts"][0]
    assert written == (CALL % 7) + "it is 14"
    assert columns["finish_reasons"].tolist() == [FINISH_REASONS.index("stop")]
    assert whole == (CALL % 7) + "\n<tool_response>\n14\n</tool_response>\nit is 14"
    assert metrics["tools/turns_mean"] == 2
    assert metrics["tools/calls"] == 1
    assert metrics["tools/tokens"] == len("\n<tool_response>\n14\n</tool_response>\n")
    assert [request.id.rsplit("/")[-1] for request in engine.asked] == ["0", "1"]


def test_no_token_is_encoded_again(folder: Path) -> None:
    columns, _, engine = converse(folder, ask_once, rg.Tools([double], pool=POOL), [{"prompt": "2 x 7?"}])
    first, second = engine.asked
    row = columns["responses"][0].tolist()
    told = len(second.prompt) - len(first.prompt)
    assert list(second.prompt) == [*first.prompt, *row[:told]]
    assert second.sampling.max_tokens == first.sampling.max_tokens - told


def test_what_the_model_was_told_has_no_log_probs_and_is_not_trained_on(folder: Path) -> None:
    columns, _, _ = converse(folder, ask_once, rg.Tools([double], pool=POOL), [{"prompt": "2 x 7?"}])
    mask = columns["response_mask"][0]
    assert (columns["rollout_log_probs"][0][mask] == -0.5).all()
    assert (columns["rollout_log_probs"][0][~mask] == 0).all()
    assert 0 < mask.sum() < len(mask)


def test_rows_stay_in_the_order_of_the_prompts_whoever_is_answered_first(folder: Path) -> None:
    async def slow(number: int) -> int:
        await asyncio.sleep(0.05 if number == 1 else 0)
        return number

    prompts = [{"prompt": f"say {i}"} for i in range(4)]
    script = lambda text: "done " + text[4] if "tool_response" in text else (CALL % int(text[4])).replace("double", "slow")  # noqa: E731
    columns, _, _ = converse(folder, script, rg.Tools([slow], pool=POOL), prompts, group_size=2)
    order = [text[4] for text in _texts(prompts)]
    assert [written.split("done ")[1] for written, _ in columns["texts"]] == [number for number in order for _ in range(2)]


def _texts(prompts: list[dict[str, str]]) -> list[str]:
    batch = rg.prompts(prompts, count=len(prompts)).node.operation.batch(0)  # type: ignore[attr-defined]
    texts: list[str] = batch["prompt_texts"]
    return texts


def test_turns_end_at_their_limit(folder: Path) -> None:
    columns, metrics, engine = converse(folder, lambda text: CALL % 1, rg.Tools([double], pool=POOL), [{"prompt": "go"}], 900, max_turns=3)
    assert metrics["tools/turns_max"] == 3
    assert len(engine.asked) == 3
    assert columns["finish_reasons"].tolist() == [FINISH_REASONS.index("turns")]


def test_an_answer_without_a_call_in_the_last_turn_is_cut_off_by_nothing(folder: Path) -> None:
    columns, _, engine = converse(folder, ask_once, rg.Tools([double], pool=POOL), [{"prompt": "2 x 7?"}], max_turns=2)
    assert len(engine.asked) == 2
    assert columns["finish_reasons"].tolist() == [FINISH_REASONS.index("stop")]


def test_a_response_ends_where_its_tokens_are_used_up(folder: Path) -> None:
    columns, _, _ = converse(folder, lambda text: CALL % 1, rg.Tools([double], pool=POOL), [{"prompt": "go"}], max_tokens=100)
    assert columns["responses"].shape[1] == 100
    assert columns["finish_reasons"].tolist() == [FINISH_REASONS.index("length")]


def test_a_tool_that_hangs_is_answered_for_and_the_conversation_goes_on(folder: Path) -> None:
    async def hang(number: int) -> int:
        await asyncio.Event().wait()
        return number

    script = lambda text: "gave up" if "error" in text else (CALL % 1).replace("double", "hang")  # noqa: E731
    columns, metrics, _ = converse(folder, script, rg.Tools([hang], pool=POOL, deadline_s=0.05), [{"prompt": "go"}])
    assert columns["texts"][0][0].endswith("gave up")
    assert metrics["tools/failures"] == 1


def test_an_environment_of_ones_own_gets_its_columns_and_keeps_its_state(folder: Path) -> None:
    class Guess:
        def __init__(self, answers: str) -> None:
            self.answer, self.tries = answers, 0

        async def reply(self, text: str) -> str | None:
            self.tries += 1
            return None if self.answer in text else f" no, try {self.tries + 1}: "

    script = lambda text: str(text.count("no,"))  # noqa: E731
    columns, metrics, _ = converse(folder, script, rg.Tools(environment=Guess, pool=POOL), [{"prompt": "guess: ", "answer": "2"}])
    assert columns["texts"] == [("012", "0 no, try 2: 1 no, try 3: 2")]
    assert metrics["tools/turns_max"] == 3


def test_an_environment_whose_columns_nobody_carries_is_refused() -> None:
    class Needs:
        def __init__(self, solutions: str) -> None: ...

        async def reply(self, text: str) -> str | None:
            return None

    generator = rg.Generator("model", pool=rg.Pool("rollout"))
    with pytest.raises(rg.RlgraphError, match="reads column 'solutions'"):
        generator.rollout(rg.prompts([{"prompt": "a"}], count=1), tools=rg.Tools(environment=Needs, pool=POOL))
