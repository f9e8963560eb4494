"""vLLM's own parsers of tool calls, by name: those that load with a plain tokenizer find what ours find, and nothing makes them fatal."""

import pytest
from support.templates import model_with

import rlgraph as rg
from rlgraph.nodes.environments.messages import FORMATS, calls_of
from rlgraph.nodes.rollout.conversation import form_of

pytestmark = [pytest.mark.stage("jobs"), pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SCHEMAS = {"add": {"properties": {"a": {"type": "integer"}}}}
RIGHT = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1}}',
    "pythonic": "[add(a=1)]",
}
WRONG = {"hermes": '<tool_call>{"name": </tool_call>', "llama3_json": '{"name": "add", "parameters": {', "pythonic": "[add(a="}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(model_with(tmp_path_factory.mktemp("models") / "qwen2_5", "qwen2_5"))
    found.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_a_parser_of_vllm_finds_the_call_that_ours_finds_and_a_malformed_one_is_not_fatal(tokenizer: object, name: str) -> None:
    form = form_of(rg.Agent(lambda: None, calls=f"vllm:{name}"), tokenizer)  # type: ignore[arg-type, return-value]
    assert form is not None
    assert calls_of(RIGHT[name], form, SCHEMAS) == calls_of(RIGHT[name], FORMATS[name], SCHEMAS) != ()
    assert calls_of(WRONG[name], form, SCHEMAS) == ()  # vLLM's parsers take it for text


def test_a_parser_that_does_not_load_is_refused_by_name(tokenizer: object) -> None:
    with pytest.raises(rg.errors.GraphError, match="vllm:no_such"):
        form_of(rg.Agent(lambda: None, calls="vllm:no_such"), tokenizer)  # type: ignore[arg-type, return-value]
