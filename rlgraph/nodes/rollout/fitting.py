"""Check at the launch that a rollout has room for its prompts; drop or cut off long ones if their data set says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rlgraph import notices
from rlgraph.columns import Columns
from rlgraph.data.rows import Overlong, place_of
from rlgraph.engines.hf.chat_template import check_conversations, encoded_prompts
from rlgraph.engines.hf.images import expand_images, open_images
from rlgraph.engines.registry import EngineSpec
from rlgraph.errors import DataError, GraphError, show_value
from rlgraph.graph.nodes import Node
from rlgraph.nodes.base import Context
from rlgraph.nodes.prompts import Prompts, Room, StreamedPrompts
from rlgraph.values.sampling import Sampling


class Sampler(Protocol):
    """The part of a generator that the checks of prompts read."""

    @property
    def path(self) -> str: ...
    @property
    def max_context(self) -> int | None: ...
    @property
    def images(self) -> int | None: ...
    @property
    def spec(self) -> EngineSpec: ...


def check_prompts(
    node: Node, generator: Sampler, sampling: Sampling, source: object, chats: Callable[[Columns], list[str]] | None = None
) -> Any:
    """Check model and prompts, and return the tokenizer. `chats` makes conversations of the prompts' columns; None: none.

    Raises DataError for a folder without a model, or a prompt that leaves no room for a response.
    """
    from rlgraph.engines.hf.model_files import check_tokenizer
    from rlgraph.engines.hf.pretrained import check_model

    model = check_model(generator.path, loadable=True)
    unknown = [token for token in sampling.stop_token_ids if token >= model.vocab_size]
    if unknown:
        raise DataError(
            f"node '{node.name}' stops at the tokens {show_value(unknown)}, which the vocabulary of '{generator.path}' does not "
            "have: its ids "
            f"are 0 to {model.vocab_size - 1}; take them from the model's own tokenizer"
        )
    context = generator.max_context or model.context_length
    if not generator.spec.fixed_rotation:
        check_rotation(f"node '{node.name}' samples with engine={show_value(generator.spec.name)}", generator.path, context)
    tokenizer = check_tokenizer(generator.path)
    room = context - sampling.max_tokens
    if room < 1:
        raise DataError(f"node '{node.name}' samples {sampling.max_tokens} tokens in a context of {context}: lower max_tokens")
    if isinstance(source, StreamedPrompts):
        expect_prompts(Room(node.name, generator.path, context, sampling.max_tokens), tokenizer, source)
    if isinstance(source, Prompts):
        fit_prompts(node.name, generator.path, tokenizer, source, context, sampling.max_tokens, chats, generator.images)
    return tokenizer


def check_rotation(where: str, path: str, most: int, room: str = "Generator(max_context=)") -> None:
    """Raise GraphError if rows of `most` tokens are so long that a model's rotary factors depend on the other rows of a batch."""
    from rlgraph.engines.hf.model_files import rotary_limit, text_config

    limit = rotary_limit(text_config(path))
    if limit is not None and most > limit:
        raise GraphError(
            f"{where} rows of up to {most} tokens of '{path}', whose rotary factors change beyond {limit}: vLLM then changes them for all "
            f"rows, and transformers for rows packed with a longer one, so log-probs would differ; set {room} to at most {limit}"
        )


def fit_prompts(
    node: str,
    path: str,
    tokenizer: Any,
    source: Prompts,
    context: int,
    response: int,
    chats: Callable[[Columns], list[str]] | None = None,
    images: int | None = None,
) -> None:
    """Count the tokens of every prompt, and drop or count prompts that are too long. `chats` makes conversations of their columns.

    Raises DataError for an empty prompt, for a long one if the data set neither drops nor cuts it off, if no prompt is short enough, and
    for one of more than `images`.
    """
    lengths = _lengths(node, path, tokenizer, source, chats, images)
    room = context - response
    most = source.overlong.limit(room)
    long = []
    for index, tokens in enumerate(lengths):
        if 0 < tokens <= most:
            continue
        if not tokens or source.overlong.policy == "error":
            drop = "drop such prompts, e.g. rg.data.rows(data, overlong='drop')"
            raised = "max_context, lower max_tokens" if most == room else "max_prompt_tokens"
            fix = f"raise {raised}, or {drop}" if tokens else "leave it out, by rows.filter(lambda row: row['prompt'])"
            limit = f"a context of {context} less {response} for the response" if most == room else "max_prompt_tokens of the data set"
            raise DataError(
                f"the prompt of {place_of(source.data, index)} has {tokens} tokens, but node '{node}' has room for 1 to {most}: "
                f"{limit}; {fix}"
            )
        long.append(index)
    _keep(node, source, long, most)


def _lengths(
    node: str, path: str, tokenizer: Any, source: Prompts, chats: Callable[[Columns], list[str]] | None, images: int | None
) -> list[int]:
    """Count the tokens of every prompt."""
    if source.images_in is not None:
        return [_length_with_images(node, path, tokenizer, source, index, chats, images or 0) for index in range(len(source.data))]
    columns = source.columns([source.data[index] for index in range(len(source.data))])
    if chats is not None:
        encoded = check_conversations(path, tokenizer, chats(columns))
    elif source.chat is not None:
        encoded = check_conversations(path, tokenizer, [str(text) for text in columns["prompt_messages"]])
    else:
        encoded = encoded_prompts(path, tokenizer, columns)
    return [len(tokens) for tokens in encoded]


def _length_with_images(
    node: str, path: str, tokenizer: Any, source: Prompts, index: int, chats: Callable[[Columns], list[str]] | None, most: int
) -> int:
    """Count the tokens of a prompt and its images, by their sizes. One row at a time: all images at once would not fit in memory."""
    columns = source.columns([source.data[index]])
    messages, urls = chats(columns) if chats else [str(columns["prompt_messages"][0])], str(columns["prompt_images"][0])
    [tokens] = check_conversations(path, tokenizer, messages, first=index)
    count = len(open_images(urls))
    if count > most:
        raise DataError(
            f"{place_of(source.data, index)} has {count} images, but node '{node}' reads at most {most}: raise Generator(images=), or "
            "leave the item out"
        )
    return len(expand_images(path, tokens, urls)[0])


def expect_prompts(room: Room, tokenizer: Any, source: StreamedPrompts) -> None:
    """Pass a rollout's room to a stream, which checks its rows as they arrive. Raises DataError if its first row fails."""
    source.rooms.append(room)
    if source.chat is not None:
        check_conversations(room.path, tokenizer, [str(text) for text in source.columns([source.first])["prompt_messages"]])


def _keep(node: str, source: Prompts, long: list[int], most: int) -> None:
    """Drop the rows `long` from the source, or only count them if they are cut off."""
    source.kept.overlong = max(source.kept.overlong, len(long))
    if not long:
        return
    drop = source.overlong.policy == "drop"
    if drop:
        gone = set(long)
        left = range(len(source.data)) if source.kept.rows is None else source.kept.rows
        kept = [index for index in left if index not in gone]
        source.kept.keep(kept, len(source.data) - len(kept))
        if not kept:
            raise DataError(
                f"all {len(source.data)} prompts of the data set have more than {most} tokens, the room that node '{node}' has for them: "
                "raise max_prompt_tokens or max_context, or lower max_tokens"
            )
        _ = source.order  # raises for a mixture if one of its data sets has no row left
    what = "are left out" if drop else "lose their beginning"
    notices.here.say(f"{len(long)} of {len(source.data)} prompts of node '{node}' have more than {most} tokens and {what}")


def most_tokens(overlong: Overlong, context: Context, max_context: int | None, sampling: Sampling) -> int | None:
    """Compute the number of tokens to which longer prompts are cut off; None if none is cut off."""
    if overlong.policy != "truncate_left":
        return None
    return overlong.limit((max_context or context.engine.context_length()) - sampling.max_tokens)


def declared_context(path: str) -> int | None:
    """Read the context length of a model from its config.json; None if the file or the entry is missing."""
    text = text_config(path)
    found = text.get("max_position_embeddings")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
    factor = scaling.get("factor", 1) if kind in ("linear", "dynamic", "yarn") else 1  # they extend the trained context by their factor
    return int(found * factor) if isinstance(found, int) and isinstance(factor, int | float) else None


def text_config(path: str) -> dict[str, Any]:
    """Read the text model's part of a config.json; empty if the file is missing."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    return text if isinstance(text, dict) else {}
