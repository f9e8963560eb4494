"""What a model reads between its turns is what its chat template writes there, token for token; else the launch is refused."""

from pathlib import Path
from typing import Any

import pytest
from support.templates import SPECIAL, model_with, tokenizer_of

import rlgraph as rg
from rlgraph.engines.hf.chat_template import ChatPrompt, TurnTemplate
from rlgraph.errors import DataError, GraphError

# In the manner of Llama 3.1, which leaves out the text of a turn that calls a tool and takes one call, and of Qwen 3 Coder.
END = "{% endfor %}{% if add_generation_prompt %}"
OWN = {
    "one_call": "{% if tools %}{% endif %}{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}{% if m.tool_calls|length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    """{{ '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}' }}"""
    "{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}"
    f"{END}{{{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}}}{{% endif %}}",
    "coder": "{% if tools %}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    f"{END}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}",
    "no_end": f"{{% for m in messages %}}{{{{ m.role + ': ' + m.content + '\n' }}}}{END}{{{{ 'assistant: ' }}}}{{% endif %}}",
}
TOOLS = rg.Tools([rg.tools.calculator], pool=rg.Pool("tools", cpus=1)).schemas
ANSWERS: dict[str, dict[str, Any]] = {
    "user": {"role": "user", "content": "No."},
    "tool": {"role": "tool", "content": "4", "name": "calculator", "tool_call_id": "call00000"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: model_with(folder / name, name) for name in SPECIAL}
    for name, text in OWN.items():
        made[name] = model_with(folder / name, "llama3" if name == "one_call" else "qwen2_5")
        (made[name] / "chat_template.jinja").write_text(text)
    return made


def template(models: dict[str, Path], name: str) -> TurnTemplate:
    return TurnTemplate(name, tokenizer_of(models[name]))


BETWEEN = {  # by hand, of the templates' text
    ("llama3", "user"): "<|start_header_id|>user<|end_header_id|>\n\nNo.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ("llama3", "tool"): "<|start_header_id|>tool<|end_header_id|>\n\n4<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ("one_call", "tool"): "<|start_header_id|>tool<|end_header_id|>\n\n4<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ("gemma", "user"): "\n<start_of_turn>user\nNo.<end_of_turn>\n<start_of_turn>model\n",
    ("mistral", "user"): "[INST] No. [/INST]",
    ("qwen2_5", "user"): "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n",
    ("qwen2_5", "tool"): "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ("qwen3", "tool"): "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ("coder", "tool"): "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n",
    ("smollm2", "tool"): "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize(("name", "role"), BETWEEN)
def test_what_the_model_reads_after_its_turn_is_the_templates_own(models: dict[str, Path], name: str, role: str) -> None:
    turns = template(models, name)
    chat = ChatPrompt([{"role": "user", "content": "Hi."}], TOOLS if role == "tool" else [])
    call = {"id": "call00000", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+2"}}}
    said = {"role": "assistant", "content": "Let me see."} | ({"tool_calls": [call]} if role == "tool" else {})
    tokens = turns.between(chat, said, [ANSWERS[role]], turns.close)
    assert turns.tokenizer.decode(tokens) == BETWEEN[name, role]
    assert turns.between(chat, said, [ANSWERS[role]], 70) == [turns.close, *tokens], "a turn that did not end as the template ends it"
    turns.check(chat, ANSWERS[role])


REFUSED = {
    ("gemma", "tool", ""): "cannot render messages of roles .'tool'.*refuses it .*alternate",
    ("mistral", "tool", ""): "cannot render messages of roles .'tool'.",
    ("qwen3", "user", ""): r"changes earlier turns when a message of role 'user' follows: .*it writes 'Well.*has '<think>\\nHm\.",
    ("qwen3", "tool", "off"): r"role 'tool' follows: .*it writes 'ool_call>.*has 'hink>",
    ("no_end", "user", ""): r"writes '\\n' after a turn of the model, which is not a special token",
}


@pytest.mark.parametrize(("name", "role", "thinking"), REFUSED)
def test_a_template_that_cannot_be_followed_is_refused_with_the_first_difference(
    models: dict[str, Path], name: str, role: str, thinking: str
) -> None:
    chat = ChatPrompt([], TOOLS if role == "tool" else [], {"enable_thinking": False} if thinking else {})
    with pytest.raises(DataError, match=REFUSED[name, role, thinking]):
        template(models, name).check(chat, ANSWERS[role])


@pytest.mark.parametrize(("role", "thinking"), [("user", ""), ("tool", "off")])
def test_thinking_is_kept_where_that_is_asked_for(models: dict[str, Path], role: str, thinking: str) -> None:
    chat = ChatPrompt([], TOOLS if role == "tool" else [], {"enable_thinking": False} if thinking else {})
    template(models, "qwen3").check(chat, ANSWERS[role], keep_thinking=True)


def test_thinking_is_told_apart_from_what_is_said(models: dict[str, Path]) -> None:
    assert template(models, "qwen3").thinking("<think>\nHm.\n</think>\n\nWell.") == ("Hm.", "Well.")
    assert template(models, "qwen2_5").thinking("<think>Hm.</think>Well.") == ("", "<think>Hm.</think>Well.")


def launched(folder: Path, **options: Any) -> None:
    prompts = rg.prompts([{"prompt": "2 + 2?"}], count=1)
    node = (
        rg.Generator(str(folder), pool=rg.Pool("rollout"), max_context=4000, sampling=rg.Sampling(max_tokens=4))
        .rollout(prompts, **options)
        .node
    )
    prompts.node.operation.check(prompts.node)
    node.operation.check(node)


def calculator(**options: Any) -> rg.Tools:
    return rg.Tools([rg.tools.calculator], pool=rg.Pool("tools", cpus=1), **options)


def test_the_launch_refuses_a_format_in_which_the_template_writes_no_calls(models: dict[str, Path]) -> None:
    for name, form in (("qwen3", "hermes"), ("one_call", "llama3_json"), ("coder", "qwen3_coder"), ("smollm2", "pythonic")):
        launched(models[name], tools=calculator(calls=form))
    for name, form in (("qwen3", "llama3_json"), ("one_call", "hermes"), ("coder", "hermes")):
        with pytest.raises(GraphError, match=f"in which Tools.calls='{form}'. finds no calls"):
            launched(models[name], tools=calculator(calls=form))


class Says:
    async def reset(self) -> None: ...

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        return rg.agents.Turn(done=True)

    async def close(self) -> None: ...


def test_the_launch_checks_the_turns_of_agents_and_tools(models: dict[str, Path], tmp_path: Path) -> None:
    launched(models["gemma"], agent=Says)
    with pytest.raises(DataError, match="cannot render messages of roles"):
        launched(models["gemma"], tools=calculator())
    with pytest.raises(DataError, match="keep_thinking=True"):
        launched(models["qwen3"], agent=Says)
    launched(models["qwen3"], agent=rg.Agent(Says, keep_thinking=True))
    bare = model_with(tmp_path / "bare", "qwen2_5")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="has no chat template, and conversations"):
        launched(bare, tools=calculator())
