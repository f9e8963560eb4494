"""Texts as token ids: the tokenizer of a folder, prompts, and conversations by the model's own chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlgraph import notices
from rlgraph.columns import Columns
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
                f"{error!s:.200}); its messages are of {show_value(roles)}: change them, or give the reward model a template that "
                "takes them"
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
            f"item {first} of the data set is a conversation, but the tokenizer of '{path}' has no chat template: take the instruct "
            "model, copy its chat_template.jinja into the folder, or give prompts as text without chat="
        )
    template = tokenizer.chat_template
    texts = []
    for index, text in enumerate(conversations, first):
        conversation = ChatPrompt.from_json(text)
        if reads(template, "strftime_now") and "date_string" not in (conversation.template_kwargs or {}):
            notices.here.say(
                f"the chat template of '{path}' writes today's date, so that a run of another day has other prompts: give a fixed one, as "
                "rg.options.Chat(template_kwargs={'date_string': '1 Jan 2025'}), if it reads that name"
            )
        check_read(f"item {index} of the data set", f"the chat template of '{path}'", template, conversation)
        try:
            texts.append(conversation.render(tokenizer))
        except Exception as error:
            roles = [message.get("role") for message in conversation.messages]
            raise DataError(
                f"item {index} of the data set: the chat template of '{path}' refuses it ({type(error).__name__}: {error!s:.200}); its "
                f"messages are of {show_value(roles)}: change them to roles and an order that the template takes, or leave the item out"
            ) from error
    tokens: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return tokens


def check_read(where: str, what: str, template: str | Mapping[str, str], chat: ChatPrompt) -> None:
    """Raise DataError for what a conversation gives to a template that does not read it."""
    given = [*(chat.template_kwargs or {}), *(("tools",) if chat.tools else ())]
    given += [name for name in ("tool_calls", "reasoning_content") if any(message.get(name) for message in chat.messages)]
    unread = [name for name in given if not reads(template, name)]
    if unread:
        raise DataError(f"{where} gives '{unread[0]}' to {what}, which does not read it: leave it out, or use a template that writes it")


def reads(template: str | Mapping[str, str] | None, name: str) -> bool:
    """Whether a template, or one of those of a model that has several, reads an argument of this name."""
    texts = [template] if isinstance(template, str) else list((template or {}).values())
    return any(name in _words_read(text) for text in texts)


@lru_cache(maxsize=8)
def _words_read(template: str) -> frozenset[str]:
    """Collect the words inside the statements and expressions of a template."""
    return frozenset(word for block in BLOCK.findall(template) for word in re.findall(r"\w+", block))


# Encode the texts of prompts as token ids.


def encoded_prompts(tokenizer: Any, columns: Columns, most: int | None = None) -> list[list[int]]:
    """Encode the prompts of a batch: by the model's chat template where they are conversations, in `prompt_messages`; else as text.

    Of a prompt with more than `most` tokens the last ones stay.
    """
    if "prompt_messages" in columns:
        whole = chat_tokens(tokenizer, [str(text) for text in columns["prompt_messages"]])
    else:
        whole = prompt_tokens(tokenizer, [str(text) for text in columns["prompt_texts"]])
    return whole if most is None else [tokens[-most:] for tokens in whole]


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
