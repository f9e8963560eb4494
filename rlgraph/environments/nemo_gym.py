"""Resource servers of NeMo-Gym: tools by HTTP, and the reward of the server's `verify`."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph import settings
from rlgraph.errors import DataError, GraphError, show_value
from rlgraph.nodes.environments.messages import Message, ToolCall, Turn, call_id
from rlgraph.settings import Name, Seconds

PARAMS = "responses_create_params"


@dataclass(frozen=True, eq=False)
class NemoGym:
    """Makes sessions with a resource server: see `nemo_gym`."""

    url: Name
    done_flag: bool = False
    deadline_s: Seconds = 60.0

    def __post_init__(self) -> None:
        settings.check(self)
        if self.url.partition("://")[0] not in ("http", "https"):
            raise GraphError(f"nemo_gym({show_value(self.url)}): pass the resource server's address, e.g. 'http://127.0.0.1:8000'")

    def __call__(self, task: str) -> "NemoGymSession":
        return NemoGymSession(self, json.loads(task))


def nemo_gym(url: str, *, done_flag: bool = False, deadline_s: float = 60.0) -> NemoGym:
    """Play against a resource server of NeMo-Gym: `agent=rg.Agent(rg.environments.nemo_gym(url), calls="hermes")`.

    The prompts are `rg.environments.nemo_gym_rows(path)`. The environment begins a session (`/seed_session`), posts each call of a tool
    to the tool's own path, and when a turn has none, posts the conversation as a response of OpenAI's Responses API to `/verify`, whose
    `reward` is the reward. Sessions are told apart by cookies. With `done_flag`, a tool's answer `{"done": true}` ends the conversation.

    A conversation that a limit of the rollout ends is not verified, and has no reward.
    """
    return NemoGym(url, done_flag, deadline_s)


def nemo_gym_rows(path: str | Path) -> list[dict[str, str | list[dict[str, Any]]]]:
    """Read a JSONL file of NeMo-Gym as rows for `rg.prompts`: `prompt`, `tools`, and `task`, the whole row for the server.

    >>> import pathlib, tempfile, rlgraph as rg
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.jsonl"
    >>> _ = path.write_text('{"responses_create_params": {"input": [{"role": "user", "content": "1 + 1 ="}]}}')
    >>> rg.environments.nemo_gym_rows(path)[0]["prompt"]
    [{'role': 'user', 'content': '1 + 1 ='}]

    Raises DataError for a row without `responses_create_params`.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line) if line.strip() else None
        if row is None:
            continue
        if not isinstance(row, dict) or not isinstance(row.get(PARAMS), dict) or "input" not in row[PARAMS]:
            raise DataError(f"{path}, line {number} has no {PARAMS} with `input`; it is not a row of NeMo-Gym")
        given = row[PARAMS]
        tools = [
            {"type": "function", "function": {k: t[k] for k in ("name", "description", "parameters") if k in t}}
            for t in given.get("tools") or ()
        ]
        rows.append({"prompt": _messages(given["input"]), "tools": tools, "task": line})
    return rows


class NemoGymSession:
    """A session with a resource server."""

    def __init__(self, of: NemoGym, row: Mapping[str, Any]) -> None:
        self.of, self.row = of, row
        self.output: list[dict[str, Any]] = []
        self.client: Any = None

    async def reset(self) -> None:
        from httpx2 import AsyncClient

        self.client = AsyncClient(base_url=self.of.url, timeout=self.of.deadline_s, trust_env=False)
        (await self.client.post("/seed_session", json=self.row)).raise_for_status()

    async def step(self, said: Message) -> Turn:
        if said.reasoning:
            summary = {"type": "summary_text", "text": said.reasoning}
            self.output.append({"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [summary]})
        if not said.tool_calls:
            self.output.append(_output_message(said.content))
            return Turn(reward=await self._verify(), done=True)
        answers, done = [], False
        for place, call in enumerate(said.tool_calls):
            text = call.error or await self._call_tool(call)
            done = done or (self.of.done_flag and _is_done(text))
            answers.append(Message("tool", text, name=call.name, tool_call_id=call_id(place)))
            number = f"call_{len(self.output)}"
            arguments = json.dumps(dict(call.arguments))
            self.output.append({"type": "function_call", "call_id": number, "name": call.name, "arguments": arguments, "id": number})
            self.output.append({"type": "function_call_output", "call_id": number, "output": text})
        return Turn(answers, reward=await self._verify() if done else 0.0, done=done, info={"calls": float(len(answers))})

    async def close(self) -> None:
        if self.client is not None:
            await self.client.aclose()

    async def _call_tool(self, call: ToolCall) -> str:
        """Call a tool. An answer that is an error is for the model to read."""
        return str((await self.client.post(f"/{call.name}", json=dict(call.arguments))).text)

    async def _verify(self) -> float:
        response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": 0.0,
            "model": "policy",
            "object": "response",
            "output": self.output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self.row[PARAMS].get("tools") or [],
        }
        found = await self.client.post("/verify", json={**self.row, "response": response})
        return float(found.raise_for_status().json()["reward"])


def _output_message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def _is_done(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and bool(found.get("done"))


def _messages(given: Any) -> Any:
    """The input of a row as messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [{"role": m["role"], "content": _text(m["content"])} for m in given]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(str(part.get("text", "")) for part in content)
