"""Put what a chat template writes between two turns of a model: the tokens that the model reads after its own.

Sampled tokens stay as they are and are never encoded again. After them come the tokens that the template writes from the end of the
model's turn to the beginning of its next one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlgraph.engines.hf_models.chat_template import ChatPrompt
from rlgraph.errors import DataError, show_value

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
                f"the tokenizer of '{self.path}' has no chat template, and conversations of several turns are rendered by one: take the "
                "instruct model, or copy its chat_template.jinja into the folder"
            )
        chat = ChatPrompt([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": MARK}], closed=True)
        after = self._rendered(chat).rpartition(MARK)[2]
        first = self._encoded(after)[:1]
        if not first or first[0] not in self.tokenizer.added_tokens_decoder:
            raise DataError(
                f"the chat template of '{self.path}' writes {show_value(after[:AROUND])} after a turn of the model, which is no special "
                "token, so that the model cannot tell the end of its turn: use a model whose template ends turns with such a token"
            )
        return first[0]

    def prompt(self, chat: ChatPrompt) -> list[int]:
        """Encode a conversation up to where the model's turn begins. Raises what the template raises."""
        return self._encoded(self._rendered(chat))

    def between(self, chat: ChatPrompt, said: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], last: int) -> list[int]:
        """Encode what the model reads after its turn `said`, whose last token is `last`: the `answers`, up to where its next turn begins.

        `chat` is the conversation before that turn. Raises DataError where the template refuses it.
        """
        tokens = self._encoded(self._after(chat, said, answers))
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
        prompt = self._rendered(first)
        written = self._turn(first, prompt, said)
        assembled = prompt + written + self._close_text + self._after(first, said, [answer])
        pieces = [*self._encoded(prompt + written), self.close, *self.between(first, said, [answer], self.close)]
        second = replace(first, messages=[*first.messages, said, answer])
        self._compare(self._rendered(second), assembled, pieces, answer, keep_thinking)
        wrote = self._turn(second, self._rendered(second), said)
        assembled += wrote + self._close_text + self._after(second, said, [answer])
        pieces += [*self._encoded(wrote), self.close, *self.between(second, said, [answer], self.close)]
        third = replace(second, messages=[*second.messages, said, answer])
        self._compare(self._rendered(third), assembled, pieces, answer, keep_thinking)
        return written

    def _probe(self, chat: ChatPrompt, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Make a turn of the model, with thinking where the template writes it after the generation prompt."""
        said: dict[str, Any] = {"role": "assistant", "content": "Well."}
        if answer.get("role") == "tool":
            function = {"name": chat.tools[0]["function"]["name"] if chat.tools else "tool", "arguments": {"x": "1"}}
            said |= {"content": "", "tool_calls": [{"id": answer["tool_call_id"], "type": "function", "function": function}]}
        thinking = said | {"reasoning_content": "Hm."}
        begun, closed = self._rendered(chat), self._rendered(replace(chat, messages=[*chat.messages, thinking], closed=True))
        return thinking if closed.startswith(begun) and "Hm." in closed else said

    def _turn(self, chat: ChatPrompt, prompt: str, said: Mapping[str, Any]) -> str:
        """Render the model's turn alone, without its end. Raises DataError if its beginning is not the generation prompt."""
        closed = self._rendered(replace(chat, messages=[*chat.messages, said], closed=True))
        if not closed.startswith(prompt):
            raise self._difference(closed, prompt, "a turn of the model", "leave tools= and agent= out, or use another template")
        written, end, _ = closed[len(prompt) :].rpartition(self._close_text)
        return written if end else closed[len(prompt) :]

    def _compare(self, text: str, assembled: str, pieces: list[int], answer: Mapping[str, Any], keep_thinking: bool) -> None:
        if keep_thinking:
            return
        what = f"a message of role '{answer['role']}'"
        if text != assembled:
            fix = "use a template that keeps them, or give keep_thinking=True, which leaves earlier turns as the model has written them"
            raise self._difference(text, assembled, what, fix)
        whole = self._encoded(text)
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
                text = self._rendered(replace(chat, messages=[*chat.messages, turn, *answers], continue_final=False))
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

    def _rendered(self, chat: ChatPrompt) -> str:
        return chat.render(self.tokenizer)

    def _encoded(self, text: str) -> list[int]:
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
