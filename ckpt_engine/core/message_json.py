"""Messages of the wire as JSON. It decides the one form that the manager's HTTP side, its page and the commands'
`--json` share. It does not decide which message is sent where. Pure.

The form is protobuf's own (https://protobuf.dev/programming-guides/json). So a program in any language reads and writes
it with the message classes generated from the .proto, and no field is declared twice:

- Names are as in the .proto (`pause_seconds`), as Python and `grpcurl describe` have them. Input may have
  `pauseSeconds` as well, which is what grpcurl prints.
- A 64-bit integer is a string of digits ("41"), since JavaScript and some readers round numbers above 2^53. Input may
  have a number as well. 32-bit integers and floats are numbers.
- Bytes are base64, as in `identity.root`; people and logs have roots in hexadecimal.
- A value of an enum is its name (`OUTCOME_NEW_SERVING`), or its number if only a newer release has it.
- A field with its default value is present (`""`, 0, `false`, `[]`), so a program need not check for it. A message, or
  a field marked `optional`, that is not set is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.json_format import MessageToDict, Parse, ParseError
from google.protobuf.message import Message

from ckpt_engine.core.problems import invalid


def as_dict(message: Message) -> dict[str, Any]:
    """A message as a dict for json.dumps."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def as_json(message: Message, indent: int | None = None) -> str:
    """A message as a JSON object, on one line unless it is indented."""
    separators = (",", ":") if indent is None else None
    return json.dumps(as_dict(message), indent=indent, separators=separators)


def as_json_array(messages: Iterable[Message]) -> str:
    """Messages as a JSON array, indented."""
    return json.dumps([as_dict(each) for each in messages], indent=2)


def read_json(text: bytes, message: Message) -> None:
    """Fills a message from a JSON object. Raises INVALID_ARGUMENT, which names an unknown field and the known ones."""
    if not text.lstrip().startswith(b"{"):
        raise invalid(f"the body must be a JSON object, a {message.DESCRIPTOR.name}: {{...}}")
    try:
        Parse(text, message)
    except (ParseError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not a valid {message.DESCRIPTOR.name}: {_readable(str(error), message)}") from error


def _readable(error_text: str, message: Message) -> str:
    """Rewrites an error of json_format with this form's names, and with the values of an enum."""
    unknown = re.search(r'Message type "([\w.]+)" has no field named "(.*?)" at "(.*?)"', error_text, re.DOTALL)
    if unknown:
        kind, name, _ = unknown.groups()
        fields = descriptor_pool.Default().FindMessageTypeByName(kind).fields
        return f"it has no field {name!r}; {kind.rpartition('.')[2]} has {', '.join(each.name for each in fields)}"
    value = re.search(r"Invalid enum value (.*?) for enum type ([\w.]+)", error_text, re.DOTALL)
    if value:
        names = [each.name for each in descriptor_pool.Default().FindEnumTypeByName(value[2]).values]
        return f"{value[1]!r} is none of {', '.join(names)}"
    error_text = re.sub(r"invalid literal for int\(\) with base 10: ", "must be a whole number, got ", error_text)
    return error_text.removeprefix("Failed to load JSON: ").replace("\n", " ").rstrip(".")
