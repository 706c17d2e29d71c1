"""How engines of one kind go on with a chat by text: what its caller has becomes a message that they continue. Pure.

It says which chats can go on so, what the engine's tokenizer is asked to prove it, and what the next leg asks for. It
decides neither when a chat goes on nor at which replica (`continued_chat.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_engine.gateway.dialect import MalformedError, output_tokens
from ckpt_engine.gateway.rendering import TextQuestion
from ckpt_engine.gateway.resumability import NOT_IDS, Table, judge, not_streamed
from ckpt_engine.gateway.single import leg_seed
from ckpt_engine.gateway.stops import StopSearch

CHAT_ROUTE = "/v1/chat/completions"
TOKENIZE_ROUTE, DETOKENIZE_ROUTE = "/tokenize", "/detokenize"

IDS_ONLY = "only the text of its tokens is known where a chat goes on by text"
"""Why a field is NEVER, for people."""

_MOST = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True)
class ChatText:
    """How chats of one kind of engine go on by text."""

    fields: Table
    template: tuple[str, ...]
    """The fields of a chat that its prompt is made of, beside `messages`. /tokenize takes them too."""
    continues: Mapping[str, Any]
    """The fields with which an engine goes on with the last message."""
    text_name: str
    """The field with the text in the answer of /detokenize."""
    detokenize: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the question."""
    drops: tuple[str, ...] = ()
    """Fields that name the request to the engine, and stay off later legs."""

    def resists(self, body: Mapping[str, Any]) -> str:
        """Why a chat cannot go on by text; empty: it can, if its answer allows it."""
        if not_streamed(body, self.fields):
            return "engines do not stream what it asks for"
        if why := judge(body, self.fields):
            return why
        messages = body.get("messages")
        if not is_text(messages) or not messages:
            return f"messages: {NOT_IDS}"
        if body.get("continue_final_message") and not isinstance(messages[-1].get("content"), str):
            return "messages: the last one, which is to be continued, must be a string"
        return ""

    def prompt(self, body: Mapping[str, Any], text: str) -> TextQuestion:
        """Asks for the ids of a leg's prompt. text: what the caller has of the answer."""
        names = (name for name in self.template if name in body)
        return TextQuestion(TOKENIZE_ROUTE, {**{name: body[name] for name in names}, **self._messages(body, text)})

    def ids_of(self, answer: Mapping[str, Any]) -> list[int]:
        """Reads the answer to `prompt`. Raises MalformedError."""
        return output_tokens(answer.get("tokens"))

    def text_of_ids(self, body: Mapping[str, Any], ids: Sequence[int]) -> TextQuestion:
        """Asks for the text of ids, special tokens and all."""
        model = {"model": body["model"]} if body.get("model") else {}
        return TextQuestion(DETOKENIZE_ROUTE, {**model, "tokens": list(ids), **self.detokenize})

    def text_of(self, answer: Mapping[str, Any]) -> str:
        """Reads the answer to `text_of_ids`. Raises MalformedError."""
        text = answer.get(self.text_name)
        if not isinstance(text, str):
            raise MalformedError(f"it has no {self.text_name}")
        return text

    def ends_within_a_stop(self, body: Mapping[str, Any], text: str) -> bool:
        """Whether a stop string may have begun in what the caller has: the next leg would not see its beginning."""
        stops = body.get("stop") or ()
        strings = [stops] if isinstance(stops, str) else [each for each in stops if each]
        if not strings:
            return False
        search = StopSearch(strings)
        search.feed(text, may_end=False)
        return search.safe < len(text)

    def remaining(self, body: Mapping[str, Any], count: int) -> int | None:
        """Tokens that may still come after `count`; None: as many as the model has room for."""
        most = next((body[name] for name in _MOST if isinstance(body.get(name), int)), None)
        return None if most is None else max(0, most - count)

    def leg_body(self, body: Mapping[str, Any], text: str, count: int) -> dict[str, Any]:
        """The body of a leg that goes on. text: not empty. count: its tokens."""
        leg = {name: value for name, value in body.items() if name not in self.drops} | self._messages(body, text)
        leg |= {name: self.remaining(body, count) for name in _MOST if isinstance(body.get(name), int)}
        if isinstance(body.get("min_tokens"), int):
            leg["min_tokens"] = max(0, body["min_tokens"] - count)
        if isinstance(body.get("seed"), int):
            leg["seed"] = leg_seed(body["seed"], count)
        return leg

    def _messages(self, body: Mapping[str, Any], text: str) -> dict[str, Any]:
        messages = list(body["messages"])
        if not text:
            return {"messages": messages}
        if body.get("continue_final_message"):
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + text}
        else:
            messages.append({"role": "assistant", "content": text})
        return {"messages": messages, **self.continues}


def is_text(messages: Any) -> bool:
    """Whether all content is text. What is not messages at all is the engine's to refuse."""
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return False
    contents = [each.get("content") for each in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
