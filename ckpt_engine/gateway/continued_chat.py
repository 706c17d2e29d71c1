"""Answers one streamed chat that goes on by text where it breaks off. On the gateway's loop.

It decides when a chat goes on: if only content has come, and its engine's tokenizer proves that the next leg's prompt
is the first one's with the caller's text behind it. What is asked is decided in chat_text.py, where in passing.py.

Templates may strip blanks, leave reasoning out, or refuse to continue a message, so without that proof the engine would
go on from something else. It also tells how many tokens the caller's text is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.chat_text import CHAT_ROUTE, ChatText
from ckpt_engine.gateway.dialect import MalformedError
from ckpt_engine.gateway.engine_tokenizer import EngineTokenizer
from ckpt_engine.gateway.fleet import FleetReplica, Visit
from ckpt_engine.gateway.journey import Wishes
from ckpt_engine.gateway.json_numbers import dump, finite_json, load_object
from ckpt_engine.gateway.passing import AbortedError, PassedRequest
from ckpt_engine.gateway.placing import Placing
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.rendering import TextQuestion
from ckpt_engine.gateway.samples import facts, has_ended, name_versions, says, stamp_versions, was_aborted
from ckpt_engine.gateway.stitching import LENGTH, WHOLE, Leg
from ckpt_engine.gateway.upstream import BrokenError, Stream
from ckpt_engine.gateway.versions import GatewayVersion, Span, joined, lineages, version_summary
from ckpt_engine.gateway.writing import Writer

BY_TEXT = "text"
"""`resumed_by` in the answer's `ckpt_engine`."""

_HEAD = ("id", "created", "model")
"""What all events of an answer have in common."""

_REASONING = ("reasoning", "reasoning_content")

_BROKEN_CHARACTER = "\ufffd"
"""What engines decode the first tokens of a character to, where they end in the middle of it."""


def passed_chat(
    placing: Placing, route: str, body: Mapping[str, Any], wishes: Wishes, writer: Writer, why: str
) -> PassedRequest:
    """A chat that is passed on as it came, and goes on by text if it can. why: it does not go by ids."""
    if route != CHAT_ROUTE or body.get("stream") is not True or not wishes.resume:
        return PassedRequest(placing, route, body, wishes, writer, why)
    kinds = {member.news.engine for member in placing.fleet.members.values()}
    able = {name: form for name, form in placing.engines.chat_texts.items() if name in kinds}
    reasons = {name: form.resists(body) for name, form in able.items()}
    if forms := {name: form for name, form in able.items() if not reasons[name]}:
        return ContinuedChat(placing, route, body, wishes, writer, why, forms)
    resistance = "; ".join(dict.fromkeys(reasons.values()))
    because = f"{why}; nor does it go on by text ({resistance})" if resistance and resistance != why else why
    return PassedRequest(placing, route, body, wishes, writer, because)


class ContinuedChat(PassedRequest):
    """See PassedRequest."""

    def __init__(
        self,
        placing: Placing,
        route: str,
        body: Mapping[str, Any],
        wishes: Wishes,
        writer: Writer,
        why: str,
        forms: Mapping[str, ChatText],
    ) -> None:
        """forms: by kind of engine, those that the body suits."""
        super().__init__(placing, route, body, wishes, writer, why)
        self._forms = forms
        self._first_wishes = wishes
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        self._wishes = self._first_wishes
        self._legs: list[Leg] = []  # that brought content
        self._engine = ""  # the kind that answers
        self._lineage = ""
        self._adapter = ""  # the version of an adapter that the answer began with, as a `model`
        self._text = ""  # the content that the caller has
        self._count = 0  # tokens of it, of the legs that have ended
        self._other = ""  # what came beside content
        self._ended = False  # whether the sample's end has come
        self._head: dict[str, Any] = {}
        self._first_prompt: tuple[list[int], str] | None = None  # the first leg's, in ids and as text

    # -- one leg

    def _let_in(self, admitted: GatewayVersion | None) -> None:
        if admitted is not None:
            self._lineage = self._lineage or admitted.lineage

    async def _relay_events(self, stream: Stream, member: FleetReplica, visit: Visit, leg: Leg) -> None:
        self._engine, leg.offset = member.news.engine, self._count
        later, early = bool(self._legs), list[bytes]()  # events without content, held back
        if not self._started:
            self._adapter = stream.adapter
        if later:
            self._placing.metrics.resumes.labels(member.name).inc()
        async for batch in self._batches(stream):
            events: list[bytes] = []
            for data in map(finite_json, batch):
                self._remember(data)
                content = load_object(data)
                self._head = self._head or {name: content[name] for name in _HEAD if name in content}
                choice = _choice(content)
                if choice is None:
                    data = dump(self._of_the_answer(content)) if later and content else data
                elif was_aborted(choice):
                    if ending := self._before_abort(content, choice, later):
                        self._bring(leg)
                        events += [*early, ending]
                    await self._tell(events)
                    raise AbortedError
                else:
                    self._note(choice, later)
                    if later and not says(content) and not has_ended(choice):
                        continue  # the role, once more
                    if has_ended(choice):
                        self._bring(leg)
                        self._name_versions(content, choice, leg, member)
                        self._ended = True
                    if later or has_ended(choice):
                        data = dump(self._of_the_answer(content) if later else content)
                events += self._released(data, choice is None or says(content), early, visit, leg)
            await self._tell(events)
        self._started = True
        await self._tell(early)
        await self._writer.events([], done=True)

    async def _batches(self, stream: Stream) -> AsyncGenerator[list[bytes], None]:
        """The events of a leg, also of one that breaks off behind the end of the sample."""
        try:
            async for batch in stream.events():
                yield batch
        except BrokenError:
            if not self._ended:
                raise

    def _bring(self, leg: Leg) -> None:
        """Notes that a leg brings something for the caller."""
        super()._bring(leg)
        if not self._legs or self._legs[-1] is not leg:
            self._legs.append(leg)

    def _before_abort(self, content: dict[str, Any], choice: dict[str, Any], later: bool) -> bytes | None:
        """The content in the event with which an update interrupts an answer; None: it has none."""
        delta = choice.get("delta")
        if isinstance(delta, dict) and isinstance(delta.get("content"), str):
            delta["content"] = delta["content"].rstrip(_BROKEN_CHARACTER)
        choice["finish_reason"] = None
        if not says(content):
            return None
        self._note(choice, later)
        return dump(self._of_the_answer(content) if later else content)

    def _note(self, choice: Mapping[str, Any], later: bool) -> None:
        """Remembers what a piece brings. Raises RefusedError for one that the engine would not have made in one go."""
        delta = choice.get("delta")
        for name, value in delta.items() if isinstance(delta, dict) else ():
            if name == "content" and isinstance(value, str):
                self._text += value
            elif name != "role" and value:
                if later and name in _REASONING:
                    why = f"its engine took what it was to continue for reasoning (`{name}`)"
                    raise RefusedError(502, refusals.NOT_RESUMABLE, f"a chat went on by text, and {why}")
                self._other = name

    def _of_the_answer(self, content: dict[str, Any]) -> dict[str, Any]:
        """An event of a later leg as one of the whole answer: without the role, with the first leg's head, and with the
        tokens of the caller's text counted as output."""
        usage = content.get("usage")
        if isinstance(usage, dict) and self._count:
            sign = {"prompt_tokens": -self._count, "completion_tokens": self._count}
            counted = {name: usage[name] + more for name, more in sign.items() if isinstance(usage.get(name), int)}
            usage = {name: value for name, value in usage.items() if not name.endswith("_details")} | counted
            content = {**content, "usage": usage}
        if isinstance(delta := (_choice(content) or {}).get("delta"), dict):
            delta.pop("role", None)
        return {**content, **self._head}

    def _name_versions(self, content: dict[str, Any], choice: dict[str, Any], leg: Leg, member: FleetReplica) -> None:
        """Adds `ckpt_engine` to the end of the sample. Raises RefusedError for a version that is not accepted."""
        believed = not member.news.mislabels
        if len(self._legs) == 1:
            counts = {number: len(ids) for number, ids in self._ids.items()}
            self._check(name_versions(content, leg, believed, counts, self._why_not()), leg)
        else:
            labels, count = facts(content, choice, True, {})
            leg.count, leg.labels, leg.outcome = count or 0, labels if believed else None, WHOLE
            spans = self._spans()
            for span in spans:
                if refusal := self._wishes.want.against(span):
                    raise refusal
            choice["ckpt_engine"] = self._about(spans, count is not None)
        if self._writer.stamps:
            stamp_versions(content)

    def _spans(self) -> list[Span]:
        last = self._legs[-1]
        return joined([span for leg in self._legs for span in leg.spans()] + ([] if last.count else [last.span(0, 0)]))

    def _about(self, spans: list[Span], counted: bool) -> dict[str, Any]:
        """counted: whether the engine told how many tokens the last leg has."""
        summary = version_summary(spans)
        legs = [leg.to_dict() for leg in self._legs]
        if not counted:
            summary["spans"][-1]["count"] = legs[-1]["count"] = None
        return {**summary, "resumes": len(legs) - 1, "legs": legs, "resumed_by": BY_TEXT}

    # -- going on

    def _why_not(self) -> str:
        """Why the answer could not go on by text from here; empty: it could."""
        if self._engine not in self._forms:
            return self._why
        return f"`{self._other}` has come, and only content goes on by text" if self._other else ""

    def _impediment(self) -> str:
        why = self._why_not()
        if not why and self._forms[self._engine].ends_within_a_stop(self._body, self._text):
            why = "what has come ends with what may be the beginning of a stop string"
        return f"it does not go on by text: {why}" if why else ""

    async def _next(self, cause: str) -> bytes | None:
        if not self._started:
            return await super()._next(cause)
        form = self._forms[self._engine]
        want = replace(
            self._wishes.want,
            engines=frozenset({self._engine}),
            lineage=self._lineage or self._first_wishes.want.lineage,
        )
        self._wishes = replace(self._wishes, want=want)
        if not self._text:
            return await self._writer.dump(self._of_the_adapter(self._body))
        try:
            count = await self._prove(form)
        except RefusedError as error:
            if error.reason != refusals.ENGINE_REFUSED:
                raise
            detail = f"{cause}, and its engine does not render what was to go on by text ({error})"
            raise RefusedError(502, refusals.NOT_RESUMABLE, detail) from error
        if count is None:
            why = "its prompt, as the engine renders it, is not the first one with what was sent behind it"
            raise RefusedError(502, refusals.NOT_RESUMABLE, f"{cause}, and it does not go on by text: {why}")
        last = self._legs[-1]
        last.count, self._count = max(0, count - last.offset), count
        prompt, _ = self._first_prompt or ([], "")
        self._placing.metrics.prefilled_again.labels(last.replica).inc(len(prompt) + count)
        if form.remaining(self._body, count) == 0:
            await self._end(len(prompt), count)
            return None
        return await self._writer.dump(self._of_the_adapter(form.leg_body(self._body, self._text, count)))

    def _of_the_adapter(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A later leg's body, which asks for the version of an adapter that the answer began with."""
        return {**body, "model": self._adapter} if self._adapter else body

    async def _prove(self, form: ChatText) -> int | None:
        """Has the next leg's prompt rendered. Returns how many tokens of it are the caller's text; None: it is not the
        first leg's prompt with that text behind it. Raises RefusedError."""
        tokenizer = EngineTokenizer(self._placing, self._wishes)
        last = self._legs[-1]
        lineage = next(iter(lineages(last.spans())), "")

        async def ask(question: TextQuestion, read: Any) -> Any:
            answer = await tokenizer.ask(question, last.replica, lineage)
            try:
                return read(answer)
            except MalformedError as error:
                raise RefusedError(502, refusals.ENGINE_REFUSED, f"{question.route}: {error}") from error

        async def rendered(text: str) -> tuple[list[int], str]:
            ids = await ask(form.prompt(self._body, text), form.ids_of)
            return ids, await ask(form.text_of_ids(self._body, ids), form.text_of)

        if self._first_prompt is None:
            self._first_prompt = await rendered("")
        ids, prompt = await rendered(self._text)
        first_ids, first_prompt = self._first_prompt
        return len(ids) - len(first_ids) if prompt == first_prompt + self._text else None

    async def _end(self, prompt: int, count: int) -> None:
        """Ends an answer that broke off behind the last token that was asked for."""
        choice = {"index": 0, "delta": {}, "finish_reason": LENGTH, "ckpt_engine": self._about(self._spans(), True)}
        chunk = {**self._head, "object": "chat.completion.chunk"}
        events: list[dict[str, Any]] = [{**chunk, "choices": [choice]}]
        if (self._body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
            events.append({**chunk, "choices": [], "usage": usage})
        await self._writer.events(events, done=True)


def _choice(content: Mapping[str, Any]) -> dict[str, Any] | None:
    choices = content.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
