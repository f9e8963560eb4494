"""Answers of chat completions in OpenAI's shape: one object, or the chunks of a stream."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlgraph.nodes.endpoint.requests import ChatRequest


@dataclass(frozen=True)
class Reply:
    """The answer of the model to one request. `texts` are its tokens one by one; `prompt` is what it read."""

    id: str
    request: ChatRequest
    content: str
    reasoning: str
    tool_calls: Sequence[dict[str, Any]]
    finish: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]
    texts: Sequence[str]

    def completion(self) -> dict[str, Any]:
        """Make the answer as one object."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [_on_the_wire(call) for call in self.tool_calls]
        choice = {"index": 0, "message": message, "finish_reason": self.finish, "logprobs": self._log_probs()}
        ids: dict[str, Any] = {}
        if self.request.return_token_ids:
            choice["token_ids"], ids = list(self.tokens), {"prompt_token_ids": list(self.prompt)}
        return self._head("chat.completion") | {"choices": [choice], "usage": self._usage()} | ids

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Make the answer as the chunks of a stream: the role, the text, the calls of tools, why it ended."""
        first: dict[str, Any] = {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": list(self.prompt)} if self.request.return_token_ids else {}
        yield self._chunk(first) | ids
        if self.reasoning:
            yield self._chunk({"reasoning_content": self.reasoning})
        if self.content or self.request.logprobs or self.request.return_token_ids:
            text = self._chunk({"content": self.content})
            text["choices"][0]["logprobs"] = self._log_probs()
            if self.request.return_token_ids:
                text["choices"][0]["token_ids"] = list(self.tokens)
            yield text
        for place, call in enumerate(self.tool_calls):
            yield self._chunk({"tool_calls": [{"index": place, **_on_the_wire(call)}]})
        yield self._chunk({}, self.finish)
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage()}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return self._head("chat.completion.chunk") | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.request.model}

    def _usage(self) -> dict[str, int]:
        read, wrote = len(self.prompt), len(self.tokens)
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}

    def _log_probs(self) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        pairs = zip(self.texts, self.log_probs, strict=True)
        return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]}


def _on_the_wire(call: dict[str, Any]) -> dict[str, Any]:
    """Write a call's arguments as JSON text: templates read a mapping, clients a text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
