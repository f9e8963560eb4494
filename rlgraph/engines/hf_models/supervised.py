"""Tokenise examples that a model learns from: text, or conversations by the model's own chat template, and the tokens to learn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlgraph.engines.hf_models.chat_template import ChatPrompt, check_read, prompt_tokens
from rlgraph.errors import DataError, show_value

Learns: TypeAlias = Literal["all", "last"]


@dataclass(frozen=True)
class Example:
    """A text or a conversation to learn from, and of which the model learns what follows `prompt`.

    Of text it learns `completion` and the end of the text. Of a conversation (`prompt` and `completion` are then messages) it learns
    what the assistant says: "all" of it, or the "last" of its messages.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    completion: str | Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] | None = None
    learns: Learns = "all"


@dataclass(frozen=True)
class Encoded:
    """The tokens of an example, and for each whether it is learnt. The first one never is, since nothing predicts it.

    `whole` is the number of its tokens before it was cut.
    """

    tokens: list[int]
    learnt: list[bool]
    whole: int = 0

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first that is learnt."""
        return self.tokens[: self._first]

    @property
    def response(self) -> list[int]:
        """The tokens from the first to the last that is learnt."""
        return self.tokens[self._first : self._end]

    @property
    def mask(self) -> list[bool]:
        """Which tokens of the response are learnt."""
        return self.learnt[self._first : self._end]

    def answered_by(self, other: "Encoded") -> "Encoded":
        """Put the response of another example behind this one's prompt."""
        tokens = [*self.prompt, *other.response]
        return Encoded(tokens, [False] * len(self.prompt) + other.mask, len(tokens))

    @property
    def _first(self) -> int:
        return self.learnt.index(True) if any(self.learnt) else len(self.tokens)

    @property
    def _end(self) -> int:
        return len(self.learnt) - self.learnt[::-1].index(True) if any(self.learnt) else len(self.tokens)


def encode_example(tokenizer: Any, example: Example, where: str, most: int | None = None) -> Encoded:
    """Tokenise an example; of one with more than `most` tokens the first ones stay. Raises DataError, which begins with `where`."""
    made = _text(tokenizer, example) if isinstance(example.prompt, str) else _conversation(tokenizer, example, where)
    tokens, learnt = made.tokens[:most], [*made.learnt[:most]]
    if learnt:
        learnt[0] = False
    if not any(learnt):
        cut = f" within its first {most} of {len(made.tokens)} tokens" if len(made.tokens) > len(tokens) else ""
        raise DataError(f"{where} has no token to learn{cut}; leave it out, or raise max_tokens")
    return Encoded(tokens, learnt, len(made.tokens))


def _text(tokenizer: Any, example: Example) -> Encoded:
    """Encode text as TRL does: prompt and completion together, and the token that ends a text."""
    assert isinstance(example.prompt, str)
    assert isinstance(example.completion, str)
    text = example.prompt + example.completion
    tokens = prompt_tokens(tokenizer, [text])[0]
    found = tokenizer(text, return_offsets_mapping=True)
    if found["input_ids"] != tokens:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if tokenizer.eos_token_id is not None and tokens[-1:] != [tokenizer.eos_token_id]:
        tokens = [*tokens, tokenizer.eos_token_id]
    held = _mark_tokens(found["offset_mapping"], [(len(example.prompt), len(text))])
    before = held.index(True) if any(held) else len(held)
    return Encoded(tokens, [place >= before for place in range(len(tokens))])


def _mark_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Find the tokens that hold a character of one of the spans; a token may hold characters on both sides of a boundary."""
    return [any(begin < max(last, first + 1) and first < end for begin, end in spans) for first, last in offsets]


def _conversation(tokenizer: Any, example: Example, where: str) -> Encoded:
    messages = [*example.prompt, *example.completion]
    text = _render_messages(tokenizer, example, messages, where)
    check_read(where, "the chat template", tokenizer.chat_template, ChatPrompt(messages, example.tools, example.template_kwargs))
    spans = _spans(tokenizer, example, messages, text, where)
    _check_written(messages, text, spans, where)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return Encoded(list(found["input_ids"]), _mark_tokens(found["offset_mapping"], list(spans.values())))


def _spans(tokenizer: Any, example: Example, messages: Sequence[Any], whole: str, where: str) -> dict[int, tuple[int, int]]:
    """Find where in the rendered text each learnt message is: from the end of the generation prompt to the end of its turn.

    Messages with `weight` 0 are not learnt. Blanks that a template writes after the end of a turn are left out: a model stops before them.
    """
    ours = range(len(example.prompt), len(messages)) if example.completion else range(len(messages))
    turns = [number for number in ours if messages[number]["role"] == "assistant"]
    turns = [number for number in (turns if example.learns == "all" else turns[-1:]) if _weight(messages[number], number, where)]
    if not turns:
        raise DataError(f"{where} has no message of the assistant to learn; leave it out")
    spans = {}
    for number in turns:
        before = _render_messages(tokenizer, example, messages[:number], where, answer=True)
        after = _render_messages(tokenizer, example, messages[: number + 1], where)
        if not (whole.startswith(before) and whole.startswith(after) and after.startswith(before)):
            raise DataError(
                f"{where}: the chat template renders message {number} in another way once more follow, as templates do that drop earlier "
                'thinking, so what the model would have said there is not in the text: give learns="last", or a template that keeps each '
                "message as it was"
            )
        spans[number] = len(before), len(after.rstrip())
    return spans


def _weight(message: Mapping[str, Any], number: int, where: str) -> bool:
    """Whether a message is learnt, by its `weight`, as OpenAI names it."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{where}, message {number} has weight={show_value(weight)}; a weight is 1, or 0 for a message that is not learnt")
    return bool(weight)


def _check_written(messages: Sequence[Mapping[str, Any]], text: str, spans: Mapping[int, tuple[int, int]], where: str) -> None:
    """Raise DataError unless the text has what the learnt messages, the user's and the system's say; blanks are not compared."""
    whole = "".join(text.split())
    for number, message in enumerate(messages):
        if number not in spans and message["role"] in ("assistant", "tool"):
            continue  # templates drop earlier thinking, and write results as JSON
        begin, end = spans.get(number, (0, 0))
        own = "".join(text[begin:end].split()) if end else whole
        calls = [("the name of a call", call["function"]["name"]) for call in message.get("tool_calls", ())]
        for what, said in (("content", message.get("content")), ("reasoning_content", message.get("reasoning_content")), *calls):
            if isinstance(said, str) and "".join(said.split()) not in own:
                raise DataError(
                    f"{where}: the chat template does not write {what} of message {number}, {show_value(said)}, so the model would "
                    "not learn "
                    "from it; change the row to what the template writes, or use another template"
                )


def _render_messages(tokenizer: Any, example: Example, messages: Sequence[Any], where: str, *, answer: bool = False) -> str:
    if not tokenizer.chat_template:
        raise DataError(f"{where} is a conversation, but the model has no chat template: take the instruct model, or give text")
    chat = ChatPrompt(messages, example.tools, example.template_kwargs)
    try:
        return chat.render(tokenizer) if answer else _render_chat(tokenizer, chat)
    except Exception as error:
        roles = [message.get("role") for message in messages]
        raise DataError(
            f"{where}: the chat template refuses its messages of {show_value(roles)} ({type(error).__name__}: {error!s:.200}); "
            "change them to "
            "roles and an order that the template takes, or leave it out"
        ) from error


def _render_chat(tokenizer: Any, chat: ChatPrompt) -> str:
    text: str = tokenizer.apply_chat_template(
        list(chat.messages), tools=list(chat.tools) or None, tokenize=False, **(chat.template_kwargs or {})
    )
    return text
