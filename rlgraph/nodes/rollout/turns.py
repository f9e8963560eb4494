"""What a rollout says of its conversations: the loop that samples them, and the checks of a launch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlgraph.columns import Columns
from rlgraph.engines.hf_models.chat_template import ChatPrompt, reads
from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.engines.hf_models.turns import TurnTemplate
from rlgraph.nodes.base import Context
from rlgraph.nodes.environments.agent import Agent
from rlgraph.nodes.environments.program import Program
from rlgraph.nodes.prompts import Prompts
from rlgraph.nodes.rollout.session_loop import SessionLoop, SessionRules
from rlgraph.nodes.rollout.turn_checks import chats_of, check_turns, form_of
from rlgraph.nodes.rollout.turn_loop import TurnLoop, TurnRules

if TYPE_CHECKING:
    from rlgraph.nodes.rollout.rollout import Rollout


def template_of(path: str, tokenizer: Any) -> TurnTemplate:
    """The chat template of a model, with the tokens at which the model ends a response."""
    return TurnTemplate(path, tokenizer, check_model(path).eos_token_ids)


def turn_loop(rollout: "Rollout", agent: Agent, context: Context) -> TurnLoop:
    """Make the loop that samples the conversations of a rollout."""
    path = rollout.generator.path
    tokenizer = context.tokenizer(path)
    described = rollout.tools.schemas if rollout.tools is not None else []
    room = (rollout.generator.max_context or context.engine.context_length()) - rollout.sampling.max_tokens

    def chat(item: Mapping[str, Any]) -> ChatPrompt:
        one = {name: [value] for name, value in item.items() if name in ("prompt_texts", "prompt_messages")}
        return ChatPrompt.from_json(chats_of(one, tokenizer, described)[0])

    rules = TurnRules(
        agent=agent,
        reads=agent.reads(rollout.carried),
        chat=chat,
        form=form_of(agent, tokenizer),
        prefix=rollout.prefix,
        group_size=rollout.group_size,
        max_turns=rollout.max_turns,
        concurrency=rollout.concurrency,
        most_prompt=rollout.overlong.limit(room),
        cut_prompts=rollout.overlong.policy == "truncate_left",
        rewarded=rollout.rewarded,
    )
    return TurnLoop(rules, template_of(path, tokenizer), context)


def session_loop(rollout: "Rollout", program: Program, context: Context) -> SessionLoop:
    """Make the loop that samples the sessions of a program."""
    path = rollout.generator.path
    tokenizer = context.tokenizer(path)
    room = (rollout.generator.max_context or context.engine.context_length()) - rollout.sampling.max_tokens
    rules = SessionRules(
        program=program,
        reads=program.reads(rollout.carried),
        form=form_of(program, tokenizer),
        describes=reads(tokenizer.chat_template, "tools"),
        prefix=rollout.prefix,
        sampling=rollout.sampling,
        max_turns=rollout.max_turns,
        concurrency=rollout.concurrency,
        most_prompt=rollout.overlong.limit(room),
    )
    return SessionLoop(rules, template_of(path, tokenizer), context)


def check_conversations_of(rollout: "Rollout", tokenizer: Any, source: object) -> None:
    """Check at a launch that the model's template renders the turns of a rollout. Raises DataError or GraphError."""
    assert rollout.agent is not None
    first: Columns = source.columns([source.data[0]]) if isinstance(source, Prompts) else {"prompt_texts": ["Hi."]}
    described = rollout.tools.schemas if rollout.tools is not None else []
    template = template_of(rollout.generator.path, tokenizer)
    template.close  # noqa: B018 (a model without a chat template is refused before its prompts are rendered)
    if isinstance(rollout.agent, Program):  # what its conversations are is known when they are there
        rollout.agent.check()
        return
    check_turns(template, ChatPrompt.from_json(chats_of(first, tokenizer, described)[0]), rollout.agent, rollout.tools)


def item_of(columns: Columns, row: int) -> Mapping[str, Any]:
    """Collect the prompt columns of a row, all but its place in the data order."""
    return {name: column[row] for name, column in columns.items() if name != "prompt_ids"}
