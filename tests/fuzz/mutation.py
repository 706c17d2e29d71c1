"""Damaged messages: what a wire could bring if the other side were broken, older, newer or hostile.

A protobuf of random bytes is nearly always refused by the parser, so a message is changed field by field as well.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    63,
    64,
    255,
    1 << 15,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 61,
    (1 << 63) - 1,
    -1,
    -8,
)
FLOATS = (0.0, -1.0, 1e-9, 1.0, 1e9, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "bfloat16",
    "shared_memory",
    "cuda_ipc",
    "file",
    "../../etc/passwd",
    "/dev/zero",
    "run",
    "ü",
    "a" * 300,
    "__metadata__",
)
JSON = (
    b"[" * 3000,
    b'{"a":' * 3000,
    b"2305843009213693952",
    b"9" * 5000,
    b'"\\ud800"',
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
)
LONG = 3000
"""So many equal values of one field: each is looked at, and some are multiplied."""

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def mutated(data: bytes, kind: type[Message] | None, rng: random.Random) -> bytes:
    """`data` with one to four changes, as bytes or, if it is a message of `kind`, in its fields."""
    for _ in range(rng.randint(1, 4)):
        if kind is not None and rng.random() < 0.75:
            message = kind()
            try:
                message.ParseFromString(data)
            except DecodeError:
                pass
            else:
                change(message, rng)
                data = message.SerializeToString()
                continue
        data = _json(data, rng) if kind is None and b'{"' in data and rng.random() < 0.3 else _bytes(data, rng)
    return data


def change(message: Message, rng: random.Random) -> None:
    """Changes one field of the message or of one inside it."""
    field = rng.choice(message.DESCRIPTOR.fields) if message.DESCRIPTOR.fields else None
    if field is None:
        return
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _mapped(getattr(message, field.name), field.message_type.fields_by_name, rng)
    elif field.is_repeated:
        _repeated(getattr(message, field.name), field, rng)
    elif field.message_type is not None:
        inside = getattr(message, field.name)
        if message.HasField(field.name) and rng.random() < 0.15:
            message.ClearField(field.name)
        else:
            inside.SetInParent()
            change(inside, rng)
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), rng))


def _mapped(values: Any, fields: Mapping[str, FieldDescriptor], rng: random.Random) -> None:
    """Of scalars: entries go, come, and get other values."""
    keys = sorted(values)
    if keys and rng.random() < 0.3:
        del values[rng.choice(keys)]
    else:
        key = rng.choice(keys) if keys and rng.random() < 0.5 else _value(fields["key"], "", rng)
        values[key] = _value(fields["value"], values.get(key, ""), rng)


def _repeated(values: Any, field: FieldDescriptor, rng: random.Random) -> None:
    choice = rng.random()
    if values and choice < 0.2:
        del values[rng.randrange(len(values))]
    elif values and choice < 0.6 and field.message_type is not None:
        change(rng.choice(values), rng)
    elif values and choice < 0.6:
        place = rng.randrange(len(values))
        values[place] = _value(field, values[place], rng)
    elif field.message_type is not None:
        copied = values.add()
        if len(values) > 1 and rng.random() < 0.7:
            copied.CopyFrom(values[rng.randrange(len(values) - 1)])
        else:
            change(copied, rng)
    else:
        value = _value(field, values[-1] if values else None, rng)
        values.extend([value] * (LONG if rng.random() < 0.05 else 1))


def _value(field: FieldDescriptor, old: Any, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _INTEGERS:
        lowest, highest = _INTEGERS[kind]
        number = (
            old + rng.choice((-1, 1, -8, 8)) if isinstance(old, int) and rng.random() < 0.4 else rng.choice(NUMBERS)
        )
        return min(max(number, lowest), highest)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([value.number for value in field.enum_type.values] + [99])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not old
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes(old or b"", rng)
    return rng.choice(TEXTS) if rng.random() < 0.7 else (old or "") + rng.choice("x/*\n\x00")


def _json(data: bytes, rng: random.Random) -> bytes:
    """One value of the JSON in it is another one; a safetensors file's length says so."""
    values = [found.span() for found in re.finditer(rb'"[^"]*"|[0-9]+|\[[^][{}]*\]', data)]
    if not values:
        return _bytes(data, rng)
    first, last = rng.choice(values)
    made = data[:first] + rng.choice(JSON) + data[last:]
    if int.from_bytes(data[:8], "little") == data.rfind(b"}") - 7:
        made = (len(made) - len(data) + int.from_bytes(data[:8], "little")).to_bytes(8, "little") + made[8:]
    return made


def _bytes(data: bytes, rng: random.Random) -> bytes:
    choice = rng.randrange(5)
    if not data or choice == 0:
        place = rng.randint(0, len(data))
        return data[:place] + rng.randbytes(rng.randint(1, 8)) + data[place:]
    place = rng.randrange(len(data))
    if choice == 1:
        return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
    if choice == 2:
        return data[:place]
    if choice == 3:
        return data[:place] + data[place + rng.randint(1, 8) :]
    return data[:place] + data[place : place + 16] + data[place:]
