"""What a rollout says of its conversations: the loop that samples them, and the checks of a launch."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlgraph.columns import Columns
from rlgraph.engines.hf_models.chat_template import ChatPrompt, reads
from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.engines.hf_models.turns import TurnTemplate
from rlgraph.errors import GraphError, shown
from rlgraph.nodes.base import Context
from rlgraph.nodes.environments.agent import Agent
from rlgraph.nodes.environments.program import Program
from rlgraph.nodes.environments.tools import Tools
from rlgraph.nodes.prompts import Prompts
from rlgraph.nodes.rollout.conversation import chats_of, check_turns, form_of
from rlgraph.nodes.rollout.session_loop import SessionLoop, SessionRules
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


# The options of a rollout: its agent, of whatever it was given as, and those that exclude each other.


def agent_of(tools: Tools | None, agent: Any) -> Agent | Program | None:
    """Make the agent of a rollout: of tools, of a class of environments, or of a program."""
    if tools is not None:
        return tools.agent()
    if isinstance(agent, Agent | Program | None):
        return agent
    return Program(agent) if isinstance(agent, str | Sequence) or inspect.iscoroutinefunction(agent) else Agent(agent)


def check_options(name: str, routes: bool, **options: Any) -> None:
    """Raise GraphError for options that no rollout can have, or none of a generator with `routes`."""
    refill = options["refill"]
    if options["tools"] is not None and options["agent"] is not None:
        raise GraphError(
            f"node '{name}' has tools= and agent=; choose one: an environment gets calls of tools parsed, with rg.Agent(…, calls=…)"
        )
    if routes and (options["tools"] is not None or options["agent"] is not None):
        raise GraphError(
            f"node '{name}' samples conversations, and its generator has routes=True: routes are those of one turn; leave out routes, or "
            "tools and agent"
        )
    for option in ("max_turns", "concurrency"):
        if options[option] is not None and options["tools"] is None and options["agent"] is None:
            raise GraphError(
                f"node '{name}' has {option}={options[option]} but no tools and no agent, so there is one turn; pass tools= or agent=, or "
                f"leave {option} out"
            )
    agent = options["agent"]
    if isinstance(agent, Agent) and agent.warm and options["concurrency"] is None:
        raise GraphError(
            f"node '{name}' has Agent(warm={agent.warm}) without concurrency=, so every conversation begins at once and none waits for its "
            "place; give concurrency=, or leave warm out"
        )
    if refill is not None and not hasattr(refill, "declare"):
        raise GraphError(f"node '{name}' has refill={shown(refill)}; pass what to refill by, as refill=rg.Refill(reward=right)")
