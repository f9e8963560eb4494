"""A judge behind a real HTTP server that also misbehaves: busy, broken, garbage, silent, endless."""

import http.server
import json
import pickle
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError, RlgraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.rewards.reward import Reward

KEY = "sk-0123456789-secret"
COLUMNS: Columns = {
    "responses": ["a", "bb", "ccc", "dddd"],
    "answers": ["a", "b", "ccc", "d"],
    "group_ids": torch.tensor([7, 7, 8, 8]),
    "prompt_texts": ["seven", "seven", "eight", "eight"],
}
PROMPT = "Q {{x}} R={response} A={answer}. Score?"


class Server(http.server.ThreadingHTTPServer):
    """Scores a response by its length, and misbehaves for "ccc" as often as it is told."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, how: str = "", times: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.how, self.left, self.lock, self.over = how, times, threading.Lock(), threading.Event()
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.calls, self.now, self.most = Counter[str](), 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = body["messages"][0]["content"]
        response = said.split("R=")[1].split(" ")[0] if "R=" in said else said
        with self.server.lock:
            self.server.asked.append({"path": self.path, **body})
            self.server.keys.add(self.headers.get("authorization"))
            self.server.calls[response] += 1
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            bad = self.server.how and response == "ccc" and self.server.calls[response] <= self.server.left
        try:
            if bad:
                self.misbehave(self.server.how)
            else:
                self.server.over.wait(0.02 if self.server.how == "" else 0)
                self.say(200, {"choices": [{"message": {"role": "assistant", "content": f"Fine.\nScore: {len(response) / 10}"}}]})
        finally:
            with self.server.lock:
                self.server.now -= 1

    def say(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def misbehave(self, how: str) -> None:
        if how == "hang":
            self.server.over.wait(60)
        elif how == "drip":
            self.send_response(200)
            self.send_header("content-length", "100000")
            self.end_headers()
            while not self.server.over.wait(0.02):
                self.wfile.write(b" ")
        elif how == "endless":
            self.send_response(200)
            self.send_header("content-length", str(1 << 40))
            self.end_headers()
            while not self.server.over.is_set():
                self.wfile.write(b"x" * 65536)
        elif how == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif how.isdigit():
            self.say(int(how), {"error": f"no, {self.headers.get('authorization')}"}, retry_after="0")
        else:
            self.say(200, GARBAGE[how])

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


GARBAGE: dict[str, Any] = {
    "no json": b"<html>\xff\xfe",
    "a list": [1],
    "no choices": {"choices": []},
    "no text": {"choices": [{"message": {"content": None}}]},
    "no score": {"choices": [{"message": {"content": "I would rather not."}}]},
}


@pytest.fixture(name="serve")
def _serve() -> Iterator[Any]:
    servers: list[Server] = []

    def serve(how: str = "", times: int = 99) -> Server:
        servers.append(Server(how, times))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    yield serve
    for server in servers:
        server.over.set()
        server.shutdown()
        server.server_close()


def operation(judge: Any, **settings: Any) -> Reward:
    @rg.node(reads="prompt_texts", writes="responses group_ids")
    def rollout(batch: Columns) -> Columns:
        raise AssertionError("never run")

    prompts = rg.prompts([{"prompt": "?", "answer": "!"}], count=2)
    found = rg.reward(judge, prompts, rollout(prompts), **settings).node.operation
    assert isinstance(found, Reward)
    return found


def scored(judge: Any, **settings: Any) -> tuple[list[float], dict[str, float]]:
    sent = pickle.loads(pickle.dumps(operation(judge, **settings)))  # as a worker gets it
    columns, metrics = sent.start(Context())(0, COLUMNS)
    return [round(reward, 4) for reward in columns["rewards"].tolist()], metrics


def made(server: Server, **settings: Any) -> Any:
    settings = {"retries": rg.options.Retry(times=1, backoff_s=0.0), "prompt": PROMPT, **settings}
    return rg.scorers.judge(server.url, "grader", **settings)


def test_it_asks_for_each_response_and_reads_the_score(serve: Any) -> None:
    server = serve()
    rewards, metrics = scored(made(server, body={"top_p": 0.5}, max_tokens=7))
    assert rewards == [0.1, 0.2, 0.3, 0.4]
    assert (metrics["critic/rewards/retries"], metrics["critic/rewards/defaults"]) == (0.0, 0.0)
    assert {ask["messages"][0]["content"] for ask in server.asked} == {
        f"Q {{x}} R={r} A={a}. Score?" for r, a in zip(COLUMNS["responses"], COLUMNS["answers"], strict=True)
    }
    for ask in server.asked:
        assert (ask["path"], ask["model"], ask["max_tokens"], ask["top_p"], ask["temperature"]) == (
            *("/v1/chat/completions", "grader", 7, 0.5),
            0.0,
        )
    assert server.keys == {None}


@pytest.mark.parametrize("how", ["429", "500", "503", "400", "drop", "hang", "drip", "endless", *GARBAGE])
def test_what_goes_wrong_once_is_asked_again_and_what_stays_wrong_gets_the_default(serve: Any, how: str) -> None:
    limit = {"limit_s": 1.0} if how in ("hang", "drip") else {}
    once = serve(how, 1)
    assert scored(made(once, **limit))[0] == [0.1, 0.2, 0.3, 0.4]
    assert once.calls["ccc"] == 2
    always = serve(how)
    rewards, metrics = scored(made(always, retries=rg.options.Retry(times=1, backoff_s=0.0, default=-1.0), **limit))
    assert rewards == [0.1, 0.2, -1.0, 0.4]
    assert (metrics["critic/rewards/retries"], metrics["critic/rewards/defaults"]) == (0.25, 0.25)


@pytest.mark.parametrize("how", ["401", "403", "404", "302"])
def test_a_wrong_key_address_or_model_ends_the_run_whatever_the_default(serve: Any, how: str) -> None:
    server = serve(how)
    with pytest.raises(
        RlgraphError, match=f"answered with status {how}: .*check url, model and the variable OPENAI_API_KEY.* for response 2"
    ):
        scored(made(server, retries=rg.options.Retry(times=5, backoff_s=0.0, default=0.0)))
    assert server.calls["ccc"] == 1


def test_without_a_default_the_error_names_the_response_and_its_prompt(serve: Any) -> None:
    with pytest.raises(
        RlgraphError, match=r"judge of grader raised Busy: the judge answered 500: .* \(2 calls failed\), for response 2 .*'eight'"
    ):
        scored(made(serve("500")))


def test_a_server_that_is_not_there_is_named() -> None:
    server = Server()
    server.server_close()
    with pytest.raises(RlgraphError, match="the judge cannot be reached: ConnectError"):
        scored(made(server))


def test_the_key_is_sent_and_nowhere_else(serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = serve("500")
    judge = made(server, key="JUDGE_KEY", retries=rg.options.Retry(times=0, default=0.0))
    assert KEY.encode() not in pickle.dumps(operation(judge))
    assert KEY not in repr(judge)
    scored(judge)
    assert server.keys == {f"Bearer {KEY}"}
    assert "no, Bearer …" in caplog.text
    with pytest.raises(RlgraphError) as error:
        scored(made(serve("401"), key="JUDGE_KEY"))
    assert "no, Bearer …" in str(error.value)
    for text in (caplog.text, str(error.value), repr(error.value.__cause__)):
        assert KEY not in text


def test_a_key_that_is_named_and_not_set_is_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch, serve: Any) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(DataError, match="the environment variable JUDGE_KEY is not set"):
        operation(made(serve(), key="JUDGE_KEY")).check(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "most"), [({}, 2), ({"concurrency": 1}, 1)])
def test_it_brings_its_own_concurrency_unless_the_node_has_one(serve: Any, settings: dict[str, Any], most: int) -> None:
    server = serve()
    scored(made(server, concurrency=2), **settings)
    assert server.most <= most


def test_many_calls_run_together(serve: Any) -> None:
    server = serve()
    columns = {name: [values[0]] * 64 if isinstance(values, list) else torch.zeros(64) for name, values in COLUMNS.items()}
    operation(made(server, concurrency=64)).start(Context())(0, columns)
    assert server.most > 8


def test_a_parse_of_ones_own_may_tell_an_answer_too(serve: Any) -> None:
    judge = made(serve(), parse=lambda text: {"score": 1.0, "pred": text.split()[-1]})
    graded = operation(judge).scoring.grade(Context(), COLUMNS)
    assert [score.pred for score in graded.scores] == ["0.1", "0.2", "0.3", "0.4"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no url": ({"url": "localhost:8000"}, "url is the address of an OpenAI-compatible server"),
    "a key in the url": ({"url": f"http://me:{KEY}@host/v1"}, "put the key into the environment variable"),
    "no response": ({"prompt": "Is {prompt} nice?"}, r"its fields are \['prompt'\]; name columns, {response} among them"),
    "an open brace": ({"prompt": "{response} {"}, "write a brace of the text as two"),
    "a field of no name": ({"prompt": "{response} {}"}, "its fields are"),
    "two defaults": ({"retries": rg.options.Retry(), "default": 0.0}, "set the default in the Retry"),
    "no concurrency": ({"concurrency": 0}, "concurrency is a whole number of at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_cannot_be_are_named(name: str) -> None:
    settings, words = WRONG[name]
    with pytest.raises(GraphError, match=words) as error:
        rg.scorers.judge(**{"url": "http://127.0.0.1/v1", "model": "m", **settings})
    assert KEY not in str(error.value)


def test_a_field_that_no_column_has_is_named_when_the_graph_is_declared() -> None:
    with pytest.raises(GraphError, match="'rubrics'"):
        operation(rg.scorers.judge("http://127.0.0.1/v1", "m", prompt="{response} by {rubric}"))


def test_retries_are_given_once() -> None:
    with pytest.raises(GraphError, match="has its own; set them there"):
        operation(rg.scorers.judge("http://127.0.0.1/v1", "m", prompt="{response}"), retries=rg.options.Retry())


def test_a_score_beyond_a_float_is_no_score() -> None:
    with pytest.raises(ValueError, match="wrote a score of 400 characters, 999"):
        rg.scorers.score_in("Score: " + "9" * 400)
