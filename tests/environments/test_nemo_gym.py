"""NeMo-Gym's resource server protocol: a real HTTP server with `/seed_session`, a path for each tool, and `/verify`; sessions by cookie."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.environment_turns import run_turns

import rlgraph as rg

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
ROW = {"responses_create_params": {"input": [{"role": "user", "content": "Reach 5."}], "tools": [TOOL]}, "goal": 5}


class Resources(BaseHTTPRequestHandler):
    """Counts to a goal by its tool, each session for itself, and verifies the response as the protocol's requests have it."""

    totals: ClassVar[dict[str, int]] = {}
    verified: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/seed_session":
            name = str(len(self.totals))
            self.totals[name] = 0
            return self.answer({}, cookie=f"session={name}; path=/")
        name = self.headers["Cookie"].partition("=")[2]
        if self.path == "/add":
            if "n" not in body:
                return self.answer({"detail": "n is missing"}, status=422)
            self.totals[name] += body["n"]
            return self.answer({"total": self.totals[name], "done": self.totals[name] >= 5})
        assert self.path == "/verify"
        self.verified.append(body)
        return self.answer({**body, "reward": float(self.totals[name] == body["goal"])})

    def answer(self, value: dict[str, Any], *, status: int = 200, cookie: str = "") -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def url() -> Any:
    Resources.totals.clear()
    Resources.verified.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Resources)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def calls(*numbers: int | None) -> rg.agents.Message:
    return rg.agents.Message("assistant", "", tool_calls=tuple(rg.agents.ToolCall("add", {} if n is None else {"n": n}) for n in numbers))


def test_rows_become_prompts_with_their_tools(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n\n")
    [row] = rg.environments.nemo_gym_rows(path)
    assert row["prompt"] == [{"role": "user", "content": "Reach 5."}]
    assert row["tools"][0]["function"]["name"] == "add"  # type: ignore[index]
    assert json.loads(str(row["task"])) == ROW
    assert "tasks" in rg.prompts([row], count=1).columns
    path.write_text('{"question": "?"}\n')
    with pytest.raises(rg.errors.DataError, match="line 1 has no responses_create_params"):
        rg.environments.nemo_gym_rows(path)


def test_tools_are_called_in_the_conversations_session_and_the_server_gives_the_reward(url: str) -> None:
    make, task = rg.environments.nemo_gym(url), {"task": json.dumps(ROW)}

    async def two() -> list[Any]:
        return list(
            await asyncio.gather(*(asyncio.to_thread(run_turns, make, task, said) for said in ([calls(2, 3), "5"], [calls(1), "1"])))
        )

    right, wrong = asyncio.run(two())
    assert right[0] is None
    assert [json.loads(message.content)["total"] for message in right[1].messages] == [2, 5]
    assert (right[2].reward, wrong[2].reward) == (1.0, 0.0)
    output = next(body["response"]["output"] for body in Resources.verified if len(body["response"]["output"]) == 5)
    assert [item["type"] for item in output] == ["function_call", "function_call_output"] * 2 + ["message"]
    assert output[0]["call_id"] == output[1]["call_id"] != output[2]["call_id"]


def test_an_answer_that_is_an_error_is_for_the_model_and_done_ends_the_conversation(url: str) -> None:
    make = rg.environments.nemo_gym(url, done_flag=True)
    _, refused, last = run_turns(make, {"task": json.dumps(ROW)}, [calls(None), calls(5)])
    assert "n is missing" in refused.messages[0].content
    assert (last.done, last.reward) == (True, 1.0)
