"""The label that engines put on tokens, and answers on a conversation: a weight version in one short string. Pure."""

from __future__ import annotations

from ckpt_engine.v1 import weights_pb2

ROOT_DIGITS = 8


def version_label(identity: weights_pb2.Identity) -> str:
    """`VERSION:ROOT:LINEAGE`, as in "7:1f9c02ab:run-5": the root's first eight hexadecimal digits, the lineage whole.

    Only the lineage may have a colon. Numbers alone would be equal across runs.
    """
    return label_of(identity.version, identity.root.hex(), identity.lineage)


def label_of(version: int, root: str, lineage: str) -> str:
    """A label. root: hexadecimal; empty, like the lineage: not known."""
    return f"{version}:{root[:ROOT_DIGITS]}:{lineage}"


def parsed_label(label: str) -> tuple[int, str, str] | None:
    """Version, first digits of the root and lineage of a label; a number alone has neither. None: it is no label."""
    version, *rest = label.split(":", 2)
    if not (version.isascii() and version.isdecimal()) or len(rest) not in (0, 2):
        return None
    root, lineage = rest or ("", "")
    return int(version), root, lineage
