"""vLLM's parsers of tool calls, by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlgraph.errors import GraphError


def vllm_calls(name: str, tokenizer: Any) -> Callable[[str, Mapping[str, Any]], Sequence[tuple[str, str]]]:
    """Make the parser `name` of vLLM: a function of a text and the tools' schemas that returns the name and the JSON of each call.

    Raises GraphError where vLLM is missing, has no such parser, or the parser does not take the model's tokenizer.
    """
    where = f"calls='vllm:{name}'"
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise GraphError(f"{where} needs vLLM, which cannot be imported ({error!s:.200}): use a format of rlgraph's own") from None
    try:
        kind = ToolParserManager.get_tool_parser(name)
        parser = kind(tokenizer)
    except Exception as error:  # noqa: BLE001 (whatever a parser of vLLM raises for another tokenizer)
        raise GraphError(f"{where}: vLLM's parser cannot be used with this model ({type(error).__name__}: {error!s:.200})") from None

    def parsed(text: str, schemas: Mapping[str, Any]) -> list[tuple[str, str]]:
        tools = [{"type": "function", "function": {"name": tool, "parameters": dict(schema)}} for tool, schema in schemas.items()]
        request = ChatCompletionRequest(model="policy", messages=[], tools=tools or None)
        found = parser.extract_tool_calls(text, request)
        return [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parsed
