"""Words for the numbers of an enum of the wire."""

from __future__ import annotations

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

UNKNOWN = "unknown"


def enum_word(kind: EnumTypeWrapper, number: int) -> str:
    """The lower-case name of a value, without that of its enum; "unknown_99" for one that only a newer version of ours
    has."""
    return _word(kind, number) if _known(kind, number) else f"{UNKNOWN}_{number}"


def enum_label(kind: EnumTypeWrapper, number: int) -> str:
    """The same for the label of a metric: of a fixed list, with one word for all values that are not known."""
    return _word(kind, number) if _known(kind, number) else UNKNOWN


def _word(kind: EnumTypeWrapper, number: int) -> str:
    """Value 0 is called after the enum, PAUSE_MODE_UNSPECIFIED, and so are the others; those of an enum within a
    message are not (`Problem.Code`)."""
    return kind.Name(number).removeprefix(kind.Name(0).removesuffix("UNSPECIFIED")).lower()


def _known(kind: EnumTypeWrapper, number: int) -> bool:
    return number in kind.values()
