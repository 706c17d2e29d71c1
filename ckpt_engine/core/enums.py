"""Words for the numbers of an enum of the wire."""

from __future__ import annotations

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

UNKNOWN = "unknown"


def enum_word(kind: EnumTypeWrapper, number: int) -> str:
    """The lower-case name of a value; "unknown_99" for one that only a newer version of ours has."""
    return kind.Name(number).lower() if _known(kind, number) else f"{UNKNOWN}_{number}"


def enum_label(kind: EnumTypeWrapper, number: int) -> str:
    """The same for the label of a metric: of a fixed list, with one word for all values that are not known."""
    return kind.Name(number).lower() if _known(kind, number) else UNKNOWN


def _known(kind: EnumTypeWrapper, number: int) -> bool:
    return number in kind.values()
