"""Texts as token ids: the tokenizer of a folder, prompts, and conversations by the model's own chat template.

`encode_example` encodes what a model learns from, and marks the tokens to learn. `TurnTemplate` encodes what a template writes between two
turns of a model. Sampled tokens stay as they are and are never encoded again: after them come the tokens that the template writes from the
end of the model's turn to the beginning of its next one.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rlgraph import notices
from rlgraph.columns import Columns
from rlgraph.engines.api import Images
from rlgraph.engines.hf.images import expand_images, mark_of
from rlgraph.errors import DataError, show_value

# Render conversations by a model's own chat template, and encode them with the special tokens that the template writes.

BLOCK = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)


@dataclass(frozen=True)
class ChatPrompt:
    """The messages of a prompt, and what else its template reads. It travels in the column `prompt_messages` as JSON.

    >>> ChatPrompt.from_json(ChatPrompt([{"role": "user", "content": "Hi"}]).to_json()).messages
    [{'role': 'user', 'content': 'Hi'}]

    `continue_final`: the model continues the last message, instead of answering it. `closed`: it writes nothing after the last message.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] | None = None
    continue_final: bool = False
    closed: bool = False

    def to_json(self) -> str:
        """Write it as JSON; keys keep their order, which templates print."""
        return json.dumps({name: value for name, value in vars(self).items() if name != "closed"}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "ChatPrompt":
        return cls(**json.loads(text))

    def render(self, tokenizer: Any) -> str:
        """Render the text that the model reads, up to where its answer begins. Raises what the template raises."""
        text: str = tokenizer.apply_chat_template(
            list(self.messages),
            tools=list(self.tools) or None,
            add_generation_prompt=not self.continue_final and not self.closed,
            continue_final_message=self.continue_final,
            tokenize=False,
            chat_template=None,  # the model's own, whatever the arguments of the conversation say
            **(self.template_kwargs or {}),
        )
        return text


def render_with_response(tokenizer: Any, conversation: str, response: str) -> str:
    """Render a conversation, given as JSON, with the response as its last message, by the template of another model that judges it.

    The template gets the tools of the conversation, and none of the arguments that were meant for the model that answered.
    """
    asked = ChatPrompt.from_json(conversation)
    messages = [dict(message) for message in asked.messages]
    begun = str(messages.pop()["content"] or "") if asked.continue_final else ""
    messages.append({"role": "assistant", "content": begun + response})
    text: str = tokenizer.apply_chat_template(messages, tools=list(asked.tools) or None, tokenize=False)
    return text


def check_answered(path: str | Path, tokenizer: Any, conversations: Sequence[str]) -> None:
    """Raise DataError naming the item whose conversation, with an answer, the template of a reward model refuses."""
    for index, conversation in enumerate(conversations if tokenizer.chat_template else ()):
        try:
            render_with_response(tokenizer, conversation, "answer")
        except Exception as error:
            roles = [message.get("role") for message in ChatPrompt.from_json(conversation).messages]
            raise DataError(
                f"item {index} of the data set: the chat template of the reward model '{path}' refuses it ({type(error).__name__}: "
                f"{error!s:.200}); its messages have the roles {show_value(roles)}: change them, or give the reward model a template that "
                "accepts them"
            ) from error


def chat_tokens(tokenizer: Any, conversations: Sequence[str]) -> list[list[int]]:
    """Encode conversations, given as JSON: token by token as `apply_chat_template(tokenize=True)`, which adds no special tokens."""
    if not conversations:
        return []
    texts = [ChatPrompt.from_json(text).render(tokenizer) for text in conversations]
    tokens: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return tokens


def check_conversations(path: str | Path, tokenizer: Any, conversations: Sequence[str], first: int = 0) -> list[list[int]]:
    """Encode the conversations of a data set, in its order, from item `first` on.

    Raises DataError naming the item for a model without a chat template, for a template that does not read what a conversation gives
    it, and for a conversation that the template refuses.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"item {first} of the data set is a conversation, but the tokenizer of '{path}' has no chat template: use the instruct "
            "model, copy its chat_template.jinja into the folder, or pass prompts as text without chat="
        )
    template = tokenizer.chat_template
    texts = []
    for index, text in enumerate(conversations, first):
        conversation = ChatPrompt.from_json(text)
        if reads(template, "strftime_now") and "date_string" not in (conversation.template_kwargs or {}):
            notices.here.say(
                f"the chat template of '{path}' writes today's date, so a run on another day has other prompts: pass a fixed one, e.g. "
                "rg.options.Chat(template_kwargs={'date_string': '1 Jan 2025'}), if it reads that name"
            )
        check_read(f"item {index} of the data set", f"the chat template of '{path}'", template, conversation)
        try:
            texts.append(conversation.render(tokenizer))
        except Exception as error:
            roles = [message.get("role") for message in conversation.messages]
            raise DataError(
                f"item {index} of the data set: the chat template of '{path}' refuses it ({type(error).__name__}: {error!s:.200}); its "
                f"messages are of {show_value(roles)}: change them to roles and an order that the template accepts, or leave the item out"
            ) from error
    tokens: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return tokens


def check_read(where: str, what: str, template: str | Mapping[str, str], chat: ChatPrompt) -> None:
    """Raise DataError for what a conversation gives to a template that does not read it."""
    given = [*(chat.template_kwargs or {}), *(("tools",) if chat.tools else ())]
    given += [name for name in ("tool_calls", "reasoning_content") if any(message.get(name) for message in chat.messages)]
    unread = [name for name in given if not reads(template, name)]
    if unread:
        raise DataError(f"{where} gives '{unread[0]}' to {what}, which does not read it: leave it out, or use a template that uses it")


def reads(template: str | Mapping[str, str] | None, name: str) -> bool:
    """Whether a template, or one of those of a model that has several, reads an argument of this name."""
    texts = [template] if isinstance(template, str) else list((template or {}).values())
    return any(name in _words_read(text) for text in texts)


@lru_cache(maxsize=8)
def _words_read(template: str) -> frozenset[str]:
    """Collect the words inside the statements and expressions of a template."""
    return frozenset(word for block in BLOCK.findall(template) for word in re.findall(r"\w+", block))


# Encode the texts of prompts as token ids.


def encode_with_images(
    path: str | Path, tokenizer: Any, columns: Columns, most: int | None = None
) -> tuple[list[list[int]], list[Images | None]]:
    """Encode the prompts of a batch: by the model's chat template where they are conversations, in `prompt_messages`; else as text.

    Of a prompt with more than `most` tokens the last ones stay. With `prompt_images` the processor of the model at `path` writes the tokens
    of each image, and the second list has the images; None for a prompt without.
    """
    if "prompt_messages" in columns:
        whole = chat_tokens(tokenizer, [str(text) for text in columns["prompt_messages"]])
    else:
        whole = prompt_tokens(tokenizer, [str(text) for text in columns["prompt_texts"]])
    if "prompt_images" in columns:
        rows = [(*expand_images(path, tokens, urls), urls) for tokens, urls in zip(whole, map(str, columns["prompt_images"]), strict=True)]
        return [tokens for tokens, *_ in rows], [Images(urls, places) if places else None for _, places, urls in rows]
    return whole if most is None else [tokens[-most:] for tokens in whole], [None] * len(whole)


def encoded_prompts(path: str | Path, tokenizer: Any, columns: Columns, most: int | None = None) -> list[list[int]]:
    """Encode the prompts of a batch as `encode_with_images` does, and leave the images out."""
    return encode_with_images(path, tokenizer, columns, most)[0]


def prompt_tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encode prompts. A text that already begins with the special tokens that the tokenizer adds in front does not get them twice.

    A chat template writes such tokens itself: Llama 3's begins with `<|begin_of_text|>`, which its tokenizer adds to any text.
    With it, "Hi" and "<|begin_of_text|>Hi" are both `[128000, 13347]`.
    """
    whole: list[list[int]] = tokenizer(list(texts))["input_ids"]
    added: list[int] = tokenizer([""])["input_ids"][0]
    if not added:
        return whole
    plain: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [own if _repeats(ids, own) else ids for ids, own in zip(whole, plain, strict=True)]


def _repeats(ids: list[int], own: list[int]) -> bool:
    """Whether the text already begins with the tokens that the tokenizer adds in front."""
    front = next((n for n in range(1, len(ids) - len(own) + 1) if ids[n : n + len(own)] == own), 0)
    return front > 0 and own[:front] == ids[:front]


# Put what a chat template writes between two turns of a model: the tokens that the model reads after its own.

MARK = "7bfd1c93e5"  # stands for a turn of the model in a rendered conversation
AROUND = 60  # characters of each text in an error


@dataclass(frozen=True)
class TurnTemplate:
    """A model's chat template, and `ends`, the tokens at which the model ends a turn. `path` names the model in errors.

    With Qwen 2.5's template, a turn of the model and the user's "No." are joined by the tokens of
    `\\n<|im_start|>user\\nNo.<|im_end|>\\n<|im_start|>assistant\\n`; `<|im_end|>` was sampled.
    """

    path: str | Path
    tokenizer: Any
    ends: Collection[int] = ()

    @cached_property
    def close(self) -> int:
        """The token that the template writes at the end of a model's turn.

        Raises DataError for a model without a template, and for a template that ends turns with no special token.
        """
        if not self.tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of '{self.path}' has no chat template, and conversations of several turns are rendered by one: use the "
                "instruct model, or copy its chat_template.jinja into the folder"
            )
        chat = ChatPrompt([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": MARK}], closed=True)
        after = self._render(chat).rpartition(MARK)[2]
        first = self._encode(after)[:1]
        if not first or first[0] not in self.tokenizer.added_tokens_decoder:
            raise DataError(
                f"the chat template of '{self.path}' writes {show_value(after[:AROUND])} after a turn of the model, which is not a special "
                "token, so the model cannot recognise the end of its turn: use a model whose template ends turns with such a token"
            )
        return first[0]

    def prompt(self, chat: ChatPrompt) -> list[int]:
        """Encode a conversation up to where the model's turn begins. Raises what the template raises."""
        return self._encode(self._render(chat))

    def between(self, chat: ChatPrompt, said: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], last: int) -> list[int]:
        """Encode what the model reads after its turn `said`, whose last token is `last`: the `answers`, up to where its next turn begins.

        `chat` is the conversation before that turn. Raises DataError where the template refuses it.
        """
        tokens = self._encode(self._after(chat, said, answers))
        return tokens if last == self.close or last in self.ends else [self.close, *tokens]

    def content(self, tokens: Sequence[int]) -> str:
        """Decode a turn without the token that ends it."""
        ended = bool(tokens) and (tokens[-1] == self.close or tokens[-1] in self.ends)
        text: str = self.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)
        return text

    def thinking(self, text: str) -> tuple[str, str]:
        """Split a turn into its thinking and the rest, if the model's template knows thinking."""
        if "</think>" not in text or "</think>" not in str(self.tokenizer.chat_template):
            return "", text
        thought, _, rest = text.partition("</think>")
        return thought.replace("<think>", "", 1).strip("\n"), rest.lstrip("\n")

    def check(self, chat: ChatPrompt, answer: Mapping[str, Any], keep_thinking: bool = False) -> str:
        """Compare the assembled tokens of a short conversation with the template's own, over two turns, each followed by `answer`.

        `chat` gives tools and arguments of the template. Returns the first turn of the model as the template writes it. With
        `keep_thinking`, earlier turns may differ from the template's. Raises DataError with the first difference.
        """
        first = replace(chat, messages=[{"role": "user", "content": "Hi."}], continue_final=False)
        said = self._probe(first, answer)
        prompt = self._render(first)
        written = self._turn(first, prompt, said)
        assembled = prompt + written + self._close_text + self._after(first, said, [answer])
        pieces = [*self._encode(prompt + written), self.close, *self.between(first, said, [answer], self.close)]
        second = replace(first, messages=[*first.messages, said, answer])
        self._compare(self._render(second), assembled, pieces, answer, keep_thinking)
        wrote = self._turn(second, self._render(second), said)
        assembled += wrote + self._close_text + self._after(second, said, [answer])
        pieces += [*self._encode(wrote), self.close, *self.between(second, said, [answer], self.close)]
        third = replace(second, messages=[*second.messages, said, answer])
        self._compare(self._render(third), assembled, pieces, answer, keep_thinking)
        return written

    def _probe(self, chat: ChatPrompt, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Make a turn of the model, with thinking where the template writes it after the generation prompt."""
        said: dict[str, Any] = {"role": "assistant", "content": "Well."}
        if answer.get("role") == "tool":
            function = {"name": chat.tools[0]["function"]["name"] if chat.tools else "tool", "arguments": {"x": "1"}}
            said |= {"content": "", "tool_calls": [{"id": answer["tool_call_id"], "type": "function", "function": function}]}
        thinking = said | {"reasoning_content": "Hm."}
        begun, closed = self._render(chat), self._render(replace(chat, messages=[*chat.messages, thinking], closed=True))
        return thinking if closed.startswith(begun) and "Hm." in closed else said

    def _turn(self, chat: ChatPrompt, prompt: str, said: Mapping[str, Any]) -> str:
        """Render the model's turn alone, without its end. Raises DataError if its beginning is not the generation prompt."""
        closed = self._render(replace(chat, messages=[*chat.messages, said], closed=True))
        if not closed.startswith(prompt):
            raise self._difference(closed, prompt, "a turn of the model", "leave tools= and agent= out, or use another template")
        written, end, _ = closed[len(prompt) :].rpartition(self._close_text)
        return written if end else closed[len(prompt) :]

    def _compare(self, text: str, assembled: str, pieces: list[int], answer: Mapping[str, Any], keep_thinking: bool) -> None:
        if keep_thinking:
            return
        what = f"a message of role '{answer['role']}'"
        if text != assembled:
            fix = "use a template that keeps them, or pass keep_thinking=True, which leaves earlier turns as the model has written them"
            raise self._difference(text, assembled, what, fix)
        whole = self._encode(text)
        if whole != pieces:
            place = next((i for i, (a, b) in enumerate(zip(whole, pieces, strict=False)) if a != b), min(len(whole), len(pieces)))
            ours, theirs = (self.tokenizer.convert_ids_to_tokens(ids[place : place + 4]) for ids in (pieces, whole))
            raise DataError(
                f"the chat template of '{self.path}' cannot be followed token by token: after {what}, token {place} of the conversation is "
                f"{show_value(theirs)} when the text is encoded at once and {show_value(ours)} when its turns are; use a template "
                "whose turns begin "
                "and end with special tokens"
            )

    def _difference(self, text: str, assembled: str, what: str, fix: str) -> DataError:
        place = next((i for i, (a, b) in enumerate(zip(text, assembled, strict=False)) if a != b), min(len(text), len(assembled)))
        before = assembled[max(place - 20, 0) : place]
        return DataError(
            f"the chat template of '{self.path}' changes earlier turns when {what} follows: after {before!r} it writes "
            f"{text[place : place + AROUND]!r}, and the conversation so far has {assembled[place : place + AROUND]!r}; {fix}"
        )

    def _after(self, chat: ChatPrompt, said: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> str:
        """Render what follows the end of a turn. The turn itself is replaced by a mark, to be found in the text."""
        error: Exception | None = None
        for turn in _mark_turn(said):
            try:
                text = self._render(replace(chat, messages=[*chat.messages, turn, *answers], continue_final=False))
            except Exception as refused:  # noqa: BLE001 (whatever the template raises; the next way to write the turn may do)
                error = refused
                continue
            _, found, after = text.partition(MARK)
            _, end, rest = after.partition(self._close_text)
            if found and end:
                return rest
        reason = f"refuses it ({type(error).__name__}: {error!s:.200})" if error else "leaves out the turn before it"
        roles = [answer.get("role") for answer in answers]
        raise DataError(
            f"the chat template of '{self.path}' cannot render messages of roles {show_value(roles)} after a turn of the model: it {reason}"
        )

    @cached_property
    def _close_text(self) -> str:
        text: str = self.tokenizer.decode([self.close], skip_special_tokens=False)
        return text

    def _render(self, chat: ChatPrompt) -> str:
        return chat.render(self.tokenizer)

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return tokens


def _mark_turn(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List ways to write a turn of the model with a mark in it: some templates leave out the text of a turn that calls tools."""
    calls = [{**call, "function": {**call["function"], "arguments": {}}} for call in said.get("tool_calls", ())]
    plain = {"role": "assistant", "content": MARK}
    if not calls:
        return [plain]
    last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {"x": MARK}}}
    return [plain | {"tool_calls": calls}, {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}, plain]


# Tokenise examples that a model learns from: text, or conversations by the model's own chat template, and the tokens to learn.

Learns: TypeAlias = Literal["all", "last"]


@dataclass(frozen=True)
class Example:
    """A text or a conversation to learn from, and of which the model learns what follows `prompt`.

    Of text it learns `completion` and the end of the text. Of a conversation (`prompt` and `completion` are then messages) it learns
    what the assistant says: "all" of it, or the "last" of its messages. `images`: a JSON list of data URLs.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    completion: str | Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] | None = None
    learns: Learns = "all"
    images: str = "[]"


@dataclass(frozen=True)
class Encoded:
    """The tokens of an example, and for each whether it is learnt. The first one never is, since nothing predicts it.

    `whole` is the number of its tokens before it was cut. `images` belong to the example.
    """

    tokens: list[int]
    learnt: list[bool]
    whole: int = 0
    images: str = "[]"

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
        return Encoded(tokens, [False] * len(self.prompt) + other.mask, len(tokens), self.images)

    @property
    def _first(self) -> int:
        return self.learnt.index(True) if any(self.learnt) else len(self.tokens)

    @property
    def _end(self) -> int:
        return len(self.learnt) - self.learnt[::-1].index(True) if any(self.learnt) else len(self.tokens)


def encode_example(path: str | Path, tokenizer: Any, example: Example, where: str, most: int | None = None) -> Encoded:
    """Tokenise an example as the model at `path` does; of one with more than `most` tokens the first ones stay.

    Raises DataError, which begins with `where`.
    """
    made = _text(tokenizer, example) if isinstance(example.prompt, str) else _conversation(tokenizer, example, where)
    if example.images != "[]":
        made = _with_images(path, made, example.images, where)
    tokens, learnt = made.tokens[:most], [*made.learnt[:most]]
    if learnt:
        learnt[0] = False
    if not any(learnt):
        cut = f" within its first {most} of {len(made.tokens)} tokens" if len(made.tokens) > len(tokens) else ""
        raise DataError(f"{where} has no token to learn{cut}; leave it out, or raise max_tokens")
    return Encoded(tokens, learnt, len(made.tokens), example.images)


def _with_images(path: str | Path, made: Encoded, urls: str, where: str) -> Encoded:
    """Write the tokens of the images, all of which are in the prompt. Raises DataError for one that follows what is learnt."""
    tokens, _ = expand_images(path, made.tokens, urls)
    if mark_of(path) in made.tokens[len(made.prompt) :]:
        raise DataError(f"{where} has an image behind a turn that is learnt; pass learns='last', or make an example of each turn")
    return Encoded(tokens, [False] * (len(tokens) - len(made.tokens)) + made.learnt)


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
        raise DataError(f"{where} has no assistant message to learn; leave it out")
    spans = {}
    for number in turns:
        before = _render_messages(tokenizer, example, messages[:number], where, answer=True)
        after = _render_messages(tokenizer, example, messages[: number + 1], where)
        if not (whole.startswith(before) and whole.startswith(after) and after.startswith(before)):
            raise DataError(
                f"{where}: the chat template renders message {number} differently once more messages follow, e.g. without its thinking, so "
                'the text lacks what the model would have written there: pass learns="last", or use a template that keeps each message'
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
                    "from it; change the row so that the template writes it, or use another template"
                )


def _render_messages(tokenizer: Any, example: Example, messages: Sequence[Any], where: str, *, answer: bool = False) -> str:
    if not tokenizer.chat_template:
        raise DataError(f"{where} is a conversation, but the model has no chat template: use the instruct model, or pass text")
    chat = ChatPrompt(messages, example.tools, example.template_kwargs)
    try:
        return chat.render(tokenizer) if answer else _render_chat(tokenizer, chat)
    except Exception as error:
        roles = [message.get("role") for message in messages]
        raise DataError(
            f"{where}: the chat template refuses its messages of {show_value(roles)} ({type(error).__name__}: {error!s:.200}); "
            "change them to "
            "roles and an order that the template accepts, or leave it out"
        ) from error


def _render_chat(tokenizer: Any, chat: ChatPrompt) -> str:
    text: str = tokenizer.apply_chat_template(
        list(chat.messages), tools=list(chat.tools) or None, tokenize=False, **(chat.template_kwargs or {})
    )
    return text
