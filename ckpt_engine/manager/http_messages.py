"""Messages of the wire as the bodies, answers and schemas of HTTP routes. A route names its messages, and the interface
at `/docs` has their schemas, made of the protobuf descriptors and of the comments in the .proto. It decides neither a
message's content nor its JSON form, which is core/message_json.py's part.
"""

from __future__ import annotations

import asyncio
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from ckpt_engine.core.message_json import as_json, read_json
from ckpt_engine.core.problems import invalid
from ckpt_engine.manager.http_access import says_json

Body = TypeVar("Body", bound=Message)

JSON = "application/json"
SCHEMAS = "#/components/schemas/"
PACKAGE = "ckpt_engine.v1."

_TYPES = {
    FieldDescriptor.CPPTYPE_INT64: {"type": "string", "format": "int64"},
    FieldDescriptor.CPPTYPE_UINT64: {"type": "string", "format": "uint64"},
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.CPPTYPE_UINT32: {"type": "integer", "format": "uint32"},
    FieldDescriptor.CPPTYPE_DOUBLE: {"type": "number", "format": "double"},
    FieldDescriptor.CPPTYPE_FLOAT: {"type": "number", "format": "float"},
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
}


async def answer(message: Message) -> Response:
    """Answers with a message. A thread makes the text: a report of hundreds of workers takes a while, and the manager
    must keep its sessions alive."""
    return Response(await asyncio.to_thread(as_json, message), media_type=JSON)


async def body(request: Request, kind: type[Body]) -> Body:
    """Parses a request's body as a message. Raises INVALID_ARGUMENT if it is malformed, or not sent as JSON."""
    if not says_json(request.headers):
        raise invalid("send the body as application/json")
    message = kind()
    read_json(await request.body(), message)
    return message


def describes(response: type[Message], request: type[Message] | None = None) -> dict[str, Any]:
    """Arguments for a route's decorator, by which the interface names the messages of its answer and its body."""
    content = {JSON: {"schema": {"$ref": SCHEMAS + _name(response.DESCRIPTOR.full_name)}}}
    description = _comment(response.DESCRIPTOR.full_name) or response.DESCRIPTOR.name
    described: dict[str, Any] = {
        "response_class": Response,
        "responses": {200: {"description": description, "content": content}},
    }
    if request is not None:
        schema = {"$ref": SCHEMAS + _name(request.DESCRIPTOR.full_name)}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}
    return described


def add_schemas(app: FastAPI) -> None:
    """Adds to the application's interface the schemas of all messages that its routes name, and of those within
    them."""
    plain = app.openapi

    def explained() -> dict[str, Any]:
        interface = plain()
        known = interface.setdefault("components", {}).setdefault("schemas", {})
        references = _message_names(interface["paths"])
        while missing := references - known.keys():
            for name in missing:
                known[name] = _schema(descriptor_pool.Default().FindMessageTypeByName(PACKAGE + name))
                references |= _message_names(known[name])
        return interface

    app.openapi = explained  # type: ignore[method-assign]


def _message_names(part: Any) -> set[str]:
    """The messages that a part of the interface refers to."""
    return set(re.findall(rf'"\$ref": "{SCHEMAS}([\w.]+)"', json.dumps(part)))


def _name(message: str) -> str:
    return message.removeprefix(PACKAGE)


def _schema(message: Descriptor) -> dict[str, Any]:
    return {
        "type": "object",
        "title": _name(message.full_name),
        "description": _comment(message.full_name),
        "properties": {field.name: _field(message, field) for field in message.fields},
        "additionalProperties": False,
    }


def _field(message: Descriptor, field: FieldDescriptor) -> dict[str, Any]:
    kind = field.message_type
    schema: dict[str, Any]
    if kind is not None and kind.GetOptions().map_entry:
        schema = {"type": "object", "additionalProperties": _type(kind.fields_by_name["value"])}
    elif field.is_repeated:
        schema = {"type": "array", "items": _type(field)}
    else:
        schema = _type(field)
    comment = _comment(f"{message.full_name}.{field.name}")
    return {**schema, "description": comment} if comment else schema


def _type(field: FieldDescriptor) -> dict[str, Any]:
    if field.message_type is not None:
        return {"$ref": SCHEMAS + _name(field.message_type.full_name)}
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    if field.type == FieldDescriptor.TYPE_BYTES:
        return {"type": "string", "format": "byte"}
    return dict(_TYPES.get(field.cpp_type, {"type": "string"}))


def _comment(name: str) -> str:
    return comments().get(name, "")


@cache
def comments() -> dict[str, str]:
    """The .proto's comment on each message, field, enum, value, service and call, by its full name
    (proto/generate.py)."""
    found: dict[str, str] = json.loads((files("ckpt_engine.v1") / "comments.json").read_text())
    return found
