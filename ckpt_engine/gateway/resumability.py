"""Which fields of a request let it be resumed, one table a dialect. Pure.

A resumed leg sends the prompt and the tokens so far. That is the same request only if no token's choice depends on
where the output began. A table says for each known field how later legs treat it. An unknown field goes on every leg
and makes the request not resumable, since its effect is unknown. `docs/gateway.md` has the same table for people, and a
test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class FieldKind(Enum):
    """How later legs treat a field."""

    TRAVELS = "goes on every leg as it came"
    COUNTED = "reduced by the tokens so far"
    FIRST = "goes on the first leg only"
    RENDERED = "an engine turns it into the prompt's ids, once, or into the answer's form"
    OURS = "the gateway sets it on each leg, and answers it itself"
    NEVER = "makes the request not resumable, unless it has a neutral value"
    WHOLE = "makes the request one that is passed on as it came: engines do not stream what it asks for"


NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True)
class FieldRule:
    """How later legs treat one field of a request."""

    kind: FieldKind
    neutral: tuple[Any, ...] = NOTHING  # values with which a field of NEVER or WHOLE changes nothing
    why: str = ""  # for people


Table = Mapping[str, FieldRule]


def rules(kind: FieldKind, names: str, neutral: tuple[Any, ...] = NOTHING, why: str = "") -> dict[str, FieldRule]:
    """One rule for several fields. names: separated by blanks."""
    return dict.fromkeys(names.split(), FieldRule(kind, neutral, why))


# Why a field is NEVER, for people.
PENALTY = "it counts the tokens of the output, and those so far would count as prompt"
TEXT = "it depends on the text so far, which each leg begins again"
GRAMMAR = "its grammar follows the output, and each leg would begin it again"
STATE = "its state from token to token begins again with each leg"
EXPERTS = "what engines return of experts cannot be joined"
BEAM = "beams have no tokens so far until all of them end"
NOT_IDS = "the prompt is not token ids alone"
PARSER = "a parser's state is not known to the gateway"
ELSEWHERE = "it ties the request to memory of one engine"


def judge(fields: Mapping[str, Any], table: Table, where: str = "") -> str:
    """Why a request with these fields is not resumable; empty: it is. where: path of the fields, with a final dot."""
    reasons = []
    for name, value in fields.items():
        rule = table.get(name)
        if rule is None:
            reasons.append(f"{where}{name}: the gateway does not know it")
        elif rule.kind is FieldKind.NEVER and not is_neutral(value, rule.neutral):
            reasons.append(f"{where}{name}: {rule.why}")
    return "; ".join(sorted(reasons))


def not_streamed(fields: Mapping[str, Any], table: Table) -> bool:
    """Whether engines answer such a request only as a whole."""
    rules = ((value, table.get(name)) for name, value in fields.items())
    return any(rule and rule.kind is FieldKind.WHOLE and not is_neutral(value, rule.neutral) for value, rule in rules)


def travelling(fields: Mapping[str, Any], table: Table, first: bool) -> dict[str, Any]:
    """The fields that go on a leg unchanged. first: no token has come yet."""
    kinds = {FieldKind.TRAVELS, FieldKind.NEVER, FieldKind.WHOLE} | ({FieldKind.FIRST} if first else set())
    return {name: value for name, value in fields.items() if name not in table or table[name].kind in kinds}


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Whether the value is one of these; booleans and numbers are distinct."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
