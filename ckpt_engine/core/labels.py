"""The label that engines put on tokens: a weight version in one short string."""

from __future__ import annotations

from ckpt_engine.v1 import weights_pb2

ROOT_DIGITS = 8


def version_label(identity: weights_pb2.Identity) -> str:
    """`VERSION:ROOT:LINEAGE`, as in "7:1f9c02ab:run-5": the root's first eight hexadecimal digits, the lineage whole.

    `label.split(":", 2)` parses it: only the lineage may have a colon. Numbers alone would be equal across runs.
    """
    return f"{identity.version}:{identity.root.hex()[:ROOT_DIGITS]}:{identity.lineage}"
