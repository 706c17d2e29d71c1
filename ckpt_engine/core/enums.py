"""Words for the numbers of the wire's enums."""

from __future__ import annotations

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

UNKNOWN = "unknown"


def enum_word(kind: EnumTypeWrapper, number: int) -> str:
    """The lower-case name of a value, without the enum's; "unknown_99" for a value that only a newer release has."""
    return _word(kind, number) if _known(kind, number) else f"{UNKNOWN}_{number}"


def enum_label(kind: EnumTypeWrapper, number: int) -> str:
    """The same for the label of a metric: a fixed list, with one word for all unknown values."""
    return _word(kind, number) if _known(kind, number) else UNKNOWN


def _word(kind: EnumTypeWrapper, number: int) -> str:
    """The name of a value without the enum's prefix. Value 0 shows the prefix (PAUSE_MODE_UNSPECIFIED)."""
    return kind.Name(number).removeprefix(kind.Name(0).removesuffix("UNSPECIFIED")).lower()


def _known(kind: EnumTypeWrapper, number: int) -> bool:
    return number in kind.values()
