"""Agent programs through the endpoint: what a client sends and gets, and the sequences that its calls become."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.scripted_conversations import Rolled, Scripted
from support.templates import model_with

import rlgraph as rg
from rlgraph.algorithms.advantages import ReinforcePlusPlus
from rlgraph.engines.api import Response
from rlgraph.nodes.endpoint import HOST, Endpoint

CALL = '<tool_call>{"name": "double", "arguments": {"number": %d}}</tool_call>'
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}}
DOUBLE: Any = {"type": "function", "function": {"name": "double", "parameters": NUMBER}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("models") / "qwen2_5", "qwen2_5")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def llm(client: rg.agents.AgentClient, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=client.base_url, api_key=client.key, **options)


def counting(text: str) -> str:
    """Say how many turns there were."""
    return f"answer {text.count('<|im_start|>assistant')}"


async def talk(client: rg.agents.AgentClient, prompt: str) -> float:
    async with llm(client) as model:
        messages = [user(prompt)]
        for _ in range(3):
            said = await model.chat.completions.create(model="gpt-4o", messages=messages)
            messages += [said.choices[0].message.model_dump(exclude_none=True), user("And?")]
    return float(said.choices[0].message.content == "answer 3")


def test_a_program_that_talks_is_one_sequence_with_its_sampled_tokens(folder: Path) -> None:
    rolled = Rolled(folder, counting, [{"prompt": "Hi."}], agent=talk)
    assert rolled.written() == [f"answer {n}<|im_end|>" for n in (1, 2, 3)]
    assert rolled.read() == ["\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"] * 2
    assert rolled.columns["rewards"].tolist() == [1.0]
    assert rolled.columns["outputs"] == ["1.0"]
    assert rolled.metrics["agent/sequences"] == 1
    assert rolled.metrics["agent/turns_mean"] == 3


def test_a_reward_node_reads_what_a_program_returned(folder: Path) -> None:
    async def solve(client: rg.agents.AgentClient, prompt: str) -> dict[str, int]:
        return {"found": len(prompt)}

    program = rg.Program(solve, rewarded=False)
    rolled = Rolled(folder, counting, [{"prompt": "Hi."}], agent=program)
    assert rolled.columns["outputs"] == ['{"found": 3}']
    assert "rewards" not in rolled.columns
    prompts = rg.prompts([{"prompt": "Hi."}], count=1)
    rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts, agent=program)
    assert "outputs" in rg.reward(lambda output: float("3" in output), prompts, rollout).node.reads


async def ask_tools(client: rg.agents.AgentClient) -> float:
    async with llm(client) as model:
        first = await model.chat.completions.create(model="policy", messages=[user("2 x 7?")], tools=[DOUBLE], tool_choice="required")
        [choice] = first.choices
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        assert (call.function.name, call.function.arguments) == ("double", '{"number": 7}')
        function = {"name": "double", "arguments": '{"number":7}'}  # as a client writes it that has parsed it meanwhile
        wrote = {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}]}
        wrote["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
        result = {"role": "tool", "tool_call_id": call.id, "content": "14"}
        last = await model.chat.completions.create(model="policy", messages=[user("2 x 7?"), wrote, result], tools=[DOUBLE])
    return float(last.choices[0].message.content == "It is 14.")


def test_calls_of_tools_are_parsed_and_answers_read_as_the_template_writes_them(folder: Path) -> None:
    script = lambda text: "It is 14." if "<tool_response>" in text else "Let me see.\n" + CALL % 7  # noqa: E731
    rolled = Rolled(folder, script, [{"prompt": ""}], agent=ask_tools)
    assert rolled.columns["rewards"].tolist() == [1.0]
    assert rolled.written() == ["Let me see.\n" + CALL % 7 + "<|im_end|>", "It is 14.<|im_end|>"]
    answer = "<tool_response>\n14\n</tool_response>"
    assert rolled.read() == [f"\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"]
    assert '"name": "double"' in rolled.tokenizer.decode(rolled.engine.asked[0].prompt)
    second = rolled.engine.asked[1].prompt
    row = rolled.columns["responses"][0].tolist()
    first = list(rolled.engine.asked[0].prompt)
    assert list(second) == first + row[: len(second) - len(first)], "no token was encoded again"
    assert rolled.engine.ended == [rolled.engine.asked[0].conversation] == [rolled.engine.asked[1].conversation]


async def edits(client: rg.agents.AgentClient) -> float:
    """Talk twice, then put other words in the place of the second question, then begin anew."""
    async with llm(client) as model:

        async def ask(*messages: Any) -> Any:
            return (await model.chat.completions.create(model="policy", messages=list(messages))).choices[0].message

        one = await ask(user("a"))
        two = await ask(user("a"), one, user("b"))
        await ask(user("a"), one, user("b"), two, user("c"))
        await ask(user("a"), one, user("other"))
        await ask(user("a"), {"role": "assistant", "content": "I never said this."}, user("b"))
    return 0.5


def test_an_edited_history_is_a_branch_and_no_token_is_trained_twice(folder: Path) -> None:
    rolled = Rolled(folder, counting, [{"prompt": ""}], agent=rg.Program(edits, sequences=4))
    columns = rolled.columns
    assert [rolled.written(row) for row in range(4)] == [
        ["answer 1<|im_end|>", "answer 2<|im_end|>", "answer 3<|im_end|>"],
        ["answer 2<|im_end|>"],
        ["answer 2<|im_end|>"],
        [],
    ]
    assert "answer 1<|im_end|>\n<|im_start|>user\nother" in rolled.read(1)[0], "it is read, with the tokens that were sampled"
    assert "I never said this." in rolled.tokenizer.decode(columns["prompts"][2])
    assert (columns["rollout_log_probs"][~columns["response_mask"]] == 0).all()
    assert columns["rewards"].tolist() == [0.5] * 4, "all rows of a session have its reward"
    assert rolled.metrics["agent/sequences"] == 3
    assert rolled.metrics["agent/dropped_sequences"] == 0


def test_rows_of_sessions_are_as_many_as_declared_whatever_their_branches(folder: Path) -> None:
    async def fork(client: rg.agents.AgentClient, prompt: str) -> float:
        async with llm(client) as model:
            for n in range(1 if prompt == "one" else 3):
                await model.chat.completions.create(model="policy", messages=[user(f"{prompt} {n}")])
        return float(prompt != "one")

    data = [{"prompt": "one"}, {"prompt": "three"}]
    rolled = Rolled(folder, counting, data, agent=rg.Program(fork, sequences=2), group_size=2, chunks=2)
    assert rolled.columns["group_ids"].tolist() == [0] * 4 + [1] * 4
    rewards = rolled.columns["rewards"].tolist()
    assert rewards[::4] in ([0.0, 1.0], [1.0, 0.0])
    assert rewards == [reward for reward in rewards[::4] for _ in range(4)]
    assert rolled.columns["response_mask"].any(-1).tolist() == [reward == 1.0 or row % 2 == 0 for row, reward in enumerate(rewards)]
    assert rolled.metrics["agent/dropped_sequences"] == 2
    assert rolled.metrics["agent/turns_mean"] == 2
    assert not rg.RLOO()(rolled.columns)["advantages"].any(), "the rewards of a group are equal"
    assert not ReinforcePlusPlus()(rolled.columns)["advantages"][~rolled.columns["response_mask"]].any()
    assert rolled.columns["token_rewards"].sum(-1).tolist() == rewards


def test_sessions_are_drawn_again_where_all_rewards_of_a_group_are_equal(folder: Path) -> None:
    async def fork(client: rg.agents.AgentClient, prompt: str) -> float:
        async with llm(client) as model:
            await model.chat.completions.create(model="policy", messages=[user(prompt)])
        return float(client.seed // 2 % 2) if prompt == "vary" else 1.0  # rows 0 and 2 of a group have seeds that differ by 2

    data = [{"prompt": "same"}, {"prompt": "vary"}] * 4
    kept = rg.options.Refill(reward=lambda reward: reward, writes="kept")
    rolled = Rolled(folder, counting, data, agent=rg.Program(fork, sequences=2), group_size=2, refill=kept)
    assert rolled.columns["prompt_texts"] == ["vary"] * 32
    assert rolled.columns["kept"].reshape(-1, 4).sum(-1).tolist() == [2.0] * 8


async def stream(client: rg.agents.AgentClient) -> float:
    async with llm(client) as model:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
        parts = [
            part
            async for part in await model.chat.completions.create(
                model="policy", messages=[user("2 x 7?")], tools=[DOUBLE], extra_body={"return_token_ids": True}, **options
            )
        ]
        choices = [part.choices[0] for part in parts if part.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == "Well."
        [call] = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert call.function.arguments == '{"number": 7}'
        assert choices[-1].finish_reason == "tool_calls"
        [probs] = [choice.logprobs.content for choice in choices if choice.logprobs]
        [ids] = [choice.token_ids for choice in choices if "token_ids" in (choice.model_extra or {})]
        assert parts[-1].usage.completion_tokens == len(ids) == len(probs)
        assert {one.logprob for one in probs} == {-0.5}
        assert parts[-1].usage.prompt_tokens == len(parts[0].prompt_token_ids)
        asked: Any = {"model": "policy", "messages": [user("2 x 7?")], "tools": [DOUBLE]}
        same = await model.chat.completions.create(**asked, extra_body={"return_token_ids": True})
        assert same.choices[0].token_ids == ids
        assert same.prompt_token_ids == parts[0].prompt_token_ids
        STREAMED.append(ids)
    return 1.0


STREAMED: list[list[int]] = []


def test_an_answer_is_streamed_with_its_token_ids_and_log_probs(folder: Path) -> None:
    rolled = Rolled(folder, lambda text: "Well. " + CALL % 7, [{"prompt": ""}], agent=stream)
    assert rolled.columns["outputs"] == ["1.0"], rolled.metrics
    assert rolled.columns["responses"][0].tolist() == STREAMED.pop()


def test_an_answer_ends_at_the_texts_that_a_program_gives(folder: Path) -> None:
    async def stops(client: rg.agents.AgentClient) -> float:
        async with llm(client) as model:
            said = (await model.chat.completions.create(model="policy", messages=[user("a")], stop=["Observation:", "never"])).choices[0]
            assert (said.message.content, said.finish_reason) == ("Think. ", "stop")
            await model.chat.completions.create(model="policy", messages=[user("a"), said.message, user("b")])
            short = (await model.chat.completions.create(model="policy", messages=[user("x")], max_tokens=3)).choices[0]
            assert short.finish_reason == "length"
        return 1.0

    rolled = Rolled(folder, lambda text: "Think. Observation: made up", [{"prompt": ""}], agent=rg.Program(stops, sequences=2))
    assert rolled.columns["rewards"].tolist() == [1.0, 1.0]
    assert rolled.written()[0] == "Think. Observation:", "the token at which it stopped is the last that is trained"
    assert rolled.read()[0].startswith("<|im_end|>\n<|im_start|>user\nb"), "the template closes the turn"
    assert rolled.columns["finish_reasons"].tolist() == [0, 0], "a limit of the program's own cuts nothing off"


REFUSED: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "several answers": ({"n": 2}, openai.BadRequestError, "n=2: this endpoint takes one answer a request"),
    "top log-probs": ({"logprobs": True, "top_logprobs": 3}, openai.BadRequestError, "log-probs of sampled tokens alone"),
    "a format": ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "text alone"),
    "no room": ({"max_tokens": 0}, openai.BadRequestError, "max_tokens=0: this endpoint takes at least 1"),
    "a type": ({"max_tokens": "many"}, openai.BadRequestError, "Expected `int | null`, got `str` - at `$.max_tokens`"),
    "no messages": ({"messages": []}, openai.BadRequestError, "messages=[]"),
    "a message": ({"messages": [{"content": "a"}]}, openai.BadRequestError, "a message names its role"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "content is text"),
    "a tool": ({"tools": [{"name": "x"}]}, openai.BadRequestError, "a tool is {'type': 'function'"),
    "a long prompt": ({"messages": [user("x " * 4000)]}, openai.BadRequestError, "and there is room for 2400"),
    "a huge request": ({"messages": [user("x" * 2_000_000)]}, openai.APIStatusError, "a request has at most"),
}

DEEP = "[" * 100_000 + "]" * 100_000
BODIES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{'messages'", "the request is not a chat completion"),
    "no text": (b'{"messages": [{"role": "user", "content": "\xff"}]}', "'utf-8' codec can't decode"),
    "a deep list": (b'{"messages": ' + DEEP.encode() + b"}", "the request is not a chat completion"),
    "a deep list in a text": (json.dumps({"messages": [user("a") | {"tool_calls": DEEP}]}).encode(), "which is not JSON"),
    "a list too deep for templates": (json.dumps({"messages": [user("a") | {"x": json.loads(DEEP[99_800:100_200])}]}).encode(), "flatten"),
    "a template": (json.dumps({"messages": [user("a")], "chat_template_kwargs": {"chat_template": "x"}}).encode(), "chat_template"),
}


def test_requests_that_cannot_be_answered_are_refused_in_openais_shape_and_the_session_goes_on(folder: Path) -> None:
    found: dict[str, openai.APIStatusError] = {}

    async def wrong(client: rg.agents.AgentClient) -> float:
        async with llm(client) as model, llm(rg.agents.AgentClient(client.base_url, "other")) as stranger:
            for name, (options, kind, _) in REFUSED.items():
                with pytest.raises(kind) as refused:
                    await model.chat.completions.create(**{"model": "policy", "messages": [user("a")], **options})
                found[name] = refused.value
            with pytest.raises(openai.AuthenticationError, match="not the key of an open session"):
                await stranger.chat.completions.create(model="policy", messages=[user("a")])
            with pytest.raises(openai.NotFoundError, match="this endpoint has POST /v1/chat/completions"):
                await model.embeddings.create(model="policy", input="a")
            assert [one.id async for one in model.models.list()] == ["policy"]
            await model.chat.completions.create(model="policy", messages=[user("a")], temperature=0.2)
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {client.key}"}) as plain:
            for name, (body, said) in BODIES.items():
                answer = await plain.post(f"{client.base_url}/chat/completions", content=body)
                assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), (name, answer.text)
            answer = await plain.post(f"{client.base_url}/chat/completions", content=b"garbage", headers={"Content-Encoding": "gzip"})
            assert (answer.status_code, "cannot be read" in answer.json()["error"]["message"]) == (400, True)
        assert client.base_url.startswith("http://127.0.0.1:")
        return 1.0

    rolled = Rolled(folder, counting, [{"prompt": ""}], agent=wrong)
    assert rolled.columns["rewards"].tolist() == [1.0]
    for name, (_, _, message) in REFUSED.items():
        assert message in str(found[name]), name
        assert found[name].body["type"] == "invalid_request_error"
    assert rolled.metrics["agent/overlong_prompts"] == 1
    assert rolled.metrics["agent/overridden_sampling"] == 1
    assert len(rolled.engine.asked) == 1


def test_connections_that_show_no_key_hold_a_part_of_the_descriptors_and_leave_those_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (20, 20))
    endpoint = Endpoint(lambda pending: None, 1000)
    with contextlib.closing(endpoint), contextlib.ExitStack() as held:
        head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.open(None)}\r\n\r\n".encode()
        known = held.enter_context(socket.create_connection((HOST, endpoint.port), timeout=10))
        known.sendall(head)
        assert b"200 OK" in known.recv(1000)
        strangers = [held.enter_context(socket.create_connection((HOST, endpoint.port), timeout=10)) for _ in range(9)]
        assert [one.recv(1) for one in strangers[:4]] == [b""] * 4, "the oldest are closed"
        for one in (known, strangers[-1]):
            one.sendall(head)
            assert b"200 OK" in one.recv(1000)


def test_limits_of_turns_and_tokens_refuse_further_calls_and_are_counted(folder: Path) -> None:
    codes: list[str] = []

    async def on_and_on(client: rg.agents.AgentClient, prompt: str) -> float:
        messages = [user("a")]
        async with llm(client) as model:
            try:
                while True:
                    said = await model.chat.completions.create(model="policy", messages=messages)
                    messages += [said.choices[0].message, user(prompt * 40)]
            except openai.BadRequestError as refused:
                codes.append(str(refused.code))
        return 1.0

    rolled = Rolled(folder, counting, [{"prompt": "x"}], agent=on_and_on, max_turns=3)
    assert (codes, rolled.metrics["agent/limit_turns"], rolled.columns["finish_reasons"].tolist()) == (["max_turns"], 1, [2])
    rolled = Rolled(folder, counting, [{"prompt": "x"}], agent=on_and_on, max_tokens=200)
    assert codes[1:] == ["context_length_exceeded"]
    assert (rolled.metrics["agent/limit_tokens"], rolled.columns["finish_reasons"].tolist()) == (1, [1])
    assert rolled.columns["rewards"].tolist() == [1.0]


def test_the_order_in_which_calls_come_changes_nothing(folder: Path) -> None:
    async def both(client: rg.agents.AgentClient, prompt: str) -> float:
        async def later(seconds: float, text: str) -> None:
            await asyncio.sleep(seconds)
            await model.chat.completions.create(model="policy", messages=[user(text)])

        async with llm(client) as model:
            delays = {"up": (0.0, 0.05, 0.1), "down": (0.1, 0.05, 0.0)}[prompt]
            await asyncio.gather(*(later(seconds, text) for seconds, text in zip(delays, "abc", strict=True)))
        return 1.0

    made = [Rolled(folder, counting, [{"prompt": prompt}], agent=rg.Program(both, sequences=2)) for prompt in ("up", "down")]
    seeds = [{tuple(one.prompt): one.seed for one in rolled.engine.asked} for rolled in made]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 3
    assert made[0].columns["prompts"].tolist() == made[1].columns["prompts"].tolist()


def test_an_answer_that_nobody_waits_for_is_not_trained(folder: Path) -> None:
    gone = threading.Event()
    asked: list[str] = []

    def slow(text: str) -> str:
        asked.append(text)
        if len(asked) == 1:
            assert gone.wait(60)
            time.sleep(1)  # until the server has heard of it
        return counting(text)

    async def gives_up(client: rg.agents.AgentClient) -> float:
        async with llm(client, max_retries=0) as model:
            with pytest.raises(openai.APITimeoutError):
                await model.chat.completions.create(model="policy", messages=[user("a")], timeout=0.2)
            gone.set()
            await model.chat.completions.create(model="policy", messages=[user("a")])
        return 1.0

    rolled = Rolled(folder, slow, [{"prompt": ""}], agent=rg.Program(gives_up, sequences=2))
    assert rolled.columns["rewards"].tolist() == [1.0, 1.0]
    assert (rolled.metrics["agent/sequences"], rolled.metrics["agent/turns_mean"]) == (1, len(asked))


def test_an_answer_that_was_complete_before_its_client_left_is_dropped(folder: Path) -> None:
    """Another node's step may complete a request; the engine holds it, and an abort of it does nothing."""
    left = threading.Event()

    async def leaves(client: rg.agents.AgentClient) -> float:
        async with llm(client, max_retries=0) as model:
            with pytest.raises(openai.APITimeoutError):
                await model.chat.completions.create(model="policy", messages=[user("a")], timeout=0.5)
            left.set()
            await model.chat.completions.create(model="policy", messages=[user("b")])
        return 1.0

    completed: list[str] = []

    class Shared(Scripted):
        def step(self, prefix: str = "") -> dict[str, Response]:
            if self.open and not completed:  # as an evaluation on this engine, during which the client leaves
                completed.extend(super().step("of another node"))
                while self.open:
                    self._finished |= self._tag_versions(self.decode())
                completed.append("all")
                assert left.wait(60)
                time.sleep(1)  # until the server has heard of it
                return {}
            return super().step(prefix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.scripted_conversations.Scripted", Shared)
        rolled = Rolled(folder, counting, [{"prompt": ""}], agent=leaves)
    assert rolled.columns["rewards"].tolist() == [1.0]
    assert completed == ["all"]
    assert (rolled.metrics["agent/abandoned_calls"], rolled.metrics["agent/sequences"]) == (1, 1)
    assert rolled.written() == ["answer 1<|im_end|>"]
