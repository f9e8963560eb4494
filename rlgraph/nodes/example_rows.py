"""What a row of a data set gives to learn from: one example, or two of which one is better."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlgraph.engines.hf_models.supervised import Example, Learns
from rlgraph.errors import DataError, shown
from rlgraph.nodes.conversations import TEMPLATE_KWARGS, TOOLS, Chat, check_prompt, checked_messages, is_conversation

SAYS = ("completion", "answer")  # the fields of a row whose text follows its prompt
Row = Mapping[str, Any]


def example_of(where: str, row: Any, chat: Chat, learns: Learns) -> Example:
    """Make the example of a row in one of TRL's formats: `messages`, `prompt` with `completion` or `answer`, or `text`.

    Raises DataError, which begins with `where`, for any other row.
    """
    row = _mapping(where, row)
    says = next((name for name in SAYS if name in row), None)
    if "messages" in row:
        return _conversation(where, row, "messages", row["messages"], (), chat, learns)
    if "prompt" in row and says is not None:
        return _answered(where, row, row["prompt"], says, chat, learns)
    if isinstance(row.get("text"), str):
        return _text(where, row, chat, Example("", row["text"]))
    raise DataError(
        f"{where} has the fields {shown(list(row))}; an example has 'messages', 'prompt' and 'completion' (or 'answer'), or 'text'"
    )


def pair_of(where: str, row: Any, chat: Chat, learns: Learns) -> tuple[Example, Example]:
    """Make the chosen and the rejected example of a row with `prompt`, `chosen` and `rejected`, or whose two conversations begin alike.

    Raises DataError, which begins with `where`, for any other row.
    """
    row = _mapping(where, row)
    if not {"chosen", "rejected"} <= set(row):
        raise DataError(f"{where} has the fields {shown(list(row))}; a pair has 'chosen' and 'rejected', and usually 'prompt'")
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{where} has chosen and rejected {shown(row['chosen'])}; nothing tells equal ones apart: leave the pair out")
    if "prompt" in row:
        first, second = (_answered(where, row, row["prompt"], name, chat, learns) for name in ("chosen", "rejected"))
        return first, second
    if not is_conversation(row["chosen"]) or not is_conversation(row["rejected"]):
        raise DataError(f"{where} has no 'prompt', and 'chosen' and 'rejected' that are no conversations; give the prompt")
    both = [checked_messages(where, name, row[name]) for name in ("chosen", "rejected")]
    alike = next((n for n, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    if any(len(messages) == alike for messages in both):
        raise DataError(f"{where}: one of 'chosen' and 'rejected' begins the other, so nothing tells them apart; leave it out")
    first, second = (
        _conversation(where, row, name, messages[:alike], messages[alike:], chat, learns)
        for name, messages in zip(("chosen", "rejected"), both, strict=True)
    )
    return first, second


def _answered(where: str, row: Row, prompt: Any, says: str, chat: Chat, learns: Learns) -> Example:
    said = row[says]
    if isinstance(prompt, str) and isinstance(said, str) and chat == Chat():
        return _text(where, row, chat, Example(prompt, said))
    completion = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
    return _conversation(where, row, says, prompt, checked_messages(where, says, completion), chat, learns)


def _text(where: str, row: Row, chat: Chat, example: Example) -> Example:
    """Refuse what only a conversation has, in a row that is text: no template renders it."""
    given = [name for name in (TOOLS, TEMPLATE_KWARGS) if row.get(name)] or ([] if chat == Chat() else ["chat"])
    if given:
        raise DataError(f"{where} is text, which no chat template renders, and has {given[0]}=; leave that out, or give messages")
    for name, text in (("its prompt", example.prompt), ("its text to learn", example.completion)):
        check_prompt(where, name, str(text))
    return example


def _conversation(where: str, row: Row, name: str, prompt: Any, completion: Sequence[Any], chat: Chat, learns: Learns) -> Example:
    continued = Chat(**{**vars(chat), "continue_final": True})  # what the assistant has said is in it
    made = continued.conversation(where, {**row, name: prompt}, name)
    return Example(made.messages, completion, made.tools, made.template_kwargs, learns)


def number_of(where: str, row: Any, name: str) -> float:
    """Read a number of a row, or a truth as 1 or 0. Raises DataError for anything else."""
    value = _mapping(where, row).get(name)
    if not isinstance(value, int | float):
        raise DataError(f"{where} has {name}={shown(value)}; it is a number, or True or False, in each row")
    if not math.isfinite(value):
        raise DataError(f"{where} has {name}={value}; it is a finite number in each row: leave the row out")
    return float(value)


def _mapping(where: str, row: Any) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is {shown(row)}; each item is a mapping of fields")
    return row
