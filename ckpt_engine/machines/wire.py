"""Session messages in and out of their envelopes: TrainerMessage, TrainerCommand, ReplicaMessage, ReplicaCommand.

Machines see only what is inside. No two messages inside one envelope have the same type, so the type says the field.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

EnvelopeT = TypeVar("EnvelopeT", bound=Message)


def pack(envelope: type[EnvelopeT], body: Message) -> EnvelopeT:
    """A new envelope that carries `body`. Raises TypeError if this envelope carries no such message."""
    packed = envelope()
    for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields:
        inside: Message = getattr(packed, field.name)
        if type(inside) is type(body):
            inside.CopyFrom(body)
            inside.SetInParent()  # an empty message counts too
            return packed
    raise TypeError(f"a {envelope.DESCRIPTOR.name} carries no {body.DESCRIPTOR.name}")


def unpack(envelope: Message) -> Message | None:
    """The message inside, or None for one that this software does not know (the sender is newer)."""
    field = envelope.WhichOneof("body")
    if field is None:
        return None
    body: Message = getattr(envelope, field)
    return body
