"""Agents of published frameworks, unchanged, in environments of their own: `make test-environments` makes them."""

from pathlib import Path

import pytest
from support.paths import PROGRAMS, ROOT
from support.scripted_conversations import Rolled
from support.templates import model_with

import rlgraph as rg

CALL = '<tool_call>{"name": "%s", "arguments": {%s}}</tool_call>'


@pytest.mark.smolagents
def test_an_agent_of_smolagents_calls_its_tool_and_every_turn_is_trained(tmp_path: Path) -> None:
    def script(text: str) -> str:
        said = text.rpartition("<|im_start|>user")[2]
        return CALL % ("final_answer", '"answer": "42"') if "42" in said else CALL % ("add", '"a": 40, "b": 2')

    folder = model_with(tmp_path / "qwen2_5", "qwen2_5", context=32768)
    command = [str(ROOT / ".venv-smolagents" / "bin" / "python"), str(PROGRAMS / "smolagents_program.py"), "{prompt}", "{answer}"]
    data = [{"prompt": "40 + 2 = ?", "answer": "42"}]
    rolled = Rolled(folder, script, data, agent=rg.Program(command, sequences=3), max_context=30000)
    assert rolled.columns["rewards"].tolist() == [1.0] * 3
    assert sorted(rolled.written(row) for row in range(3)) == [
        [],
        [CALL % ("add", '"a": 40, "b": 2') + "<|im_end|>"],
        [CALL % ("final_answer", '"answer": "42"') + "<|im_end|>"],
    ]
    assert rolled.metrics["agent/refused_calls"] == rolled.metrics["agent/errors"] == 0


@pytest.mark.langgraph
def test_a_graph_of_langgraph_goes_on_in_one_sequence(tmp_path: Path) -> None:
    """It sends back what the model has written as the endpoint answered it, so its turns are one conversation."""
    asks, answers = CALL % ("add", '"a": 40, "b": 2'), "It is 42."

    def script(text: str) -> str:
        return answers if "<tool_response>" in text else asks

    folder = model_with(tmp_path / "qwen2_5", "qwen2_5", context=8192)
    command = [str(ROOT / ".venv-langgraph" / "bin" / "python"), str(PROGRAMS / "langgraph_program.py"), "{prompt}", "{answer}"]
    data = [{"prompt": "40 + 2 = ?", "answer": "42"}]
    rolled = Rolled(folder, script, data, agent=rg.Program(command, sequences=2), max_context=6000)
    assert rolled.columns["rewards"].tolist() == [1.0] * 2
    assert sorted(rolled.written(row) for row in range(2)) == [[], [asks + "<|im_end|>", answers + "<|im_end|>"]]
    assert rolled.metrics["agent/refused_calls"] == rolled.metrics["agent/errors"] == 0
