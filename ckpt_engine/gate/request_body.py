"""Reads a request's body before the engine does, for the field with which its caller asks for versions.

It decides which bodies are looked at, and takes the field out, since some engines refuse fields that they do not know.
What the field means is decided in core/version_bounds.py.

The field is looked for as bytes, also with its name written in JSON's escapes; only a body that has them is parsed.
Engines keep a whole body in memory too, so reading it here holds no more of it. Uploads (multipart) go to disk there,
and are not read here.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.version_bounds import FIELD
from ckpt_engine.gate.asgi import Message, Receive, Scope

_FIELD_BYTES = f'"{FIELD}"'.encode()
_ESCAPED_FIELD = re.compile(
    b'"' + b"".join(rb"(?:%c|\\u(?i:%04x))" % (letter, letter) for letter in FIELD.encode()) + b'"'
)
"""The same with any of its letters as JSON's escape of six characters."""


async def read_ahead(scope: Scope, receive: Receive) -> Message | None:
    """The body of a POST in one message; of an upload only its first part. None: the client has disconnected."""
    message = await receive()
    if message["type"] != "http.request":
        return None
    if not message.get("more_body", False) or _is_upload(scope):
        return message
    parts = [message.get("body", b"")]
    while message.get("more_body", False):
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
    return {"type": "http.request", "body": b"".join(parts), "more_body": False}


def _is_upload(scope: Scope) -> bool:
    return any(name == b"content-type" and value.lower().startswith(b"multipart/") for name, value in scope["headers"])


def replay(message: Message, after: Receive) -> Receive:
    """A `receive` that returns `message`, and then the client's further messages."""
    pending: Message | None = message

    async def receive() -> Message:
        nonlocal pending
        if pending is None:
            return await after()
        first, pending = pending, None
        return first

    return receive


def take_field(scope: Scope, message: Message) -> tuple[Any, Scope]:
    """Takes the field out of a body. Returns its value, and the scope for the shorter body. None: the body has none.

    A body that is no JSON is the engine's to refuse. A value of null counts as an empty object.
    """
    body = message.get("body", b"")
    if _FIELD_BYTES not in body and not (b"\\u" in body and _ESCAPED_FIELD.search(body)):
        return None, scope
    try:
        content = load_json(body)
    except ValueError:
        return None, scope
    if not isinstance(content, dict) or FIELD not in content:
        return None, scope
    field = content.pop(FIELD)
    message["body"] = json.dumps(content, separators=(",", ":")).encode()
    headers = [each for each in scope["headers"] if each[0] not in (b"content-length", b"transfer-encoding")]
    headers.append((b"content-length", str(len(message["body"])).encode()))
    return {} if field is None else field, {**scope, "headers": headers}
