"""gRPC reflection with the comments of the .proto, so that `grpcurl describe` reads as the .proto does.

It decides where each comment stands. It does not decide what is served, which gRPC's own servicer does, nor which
callers may ask: reflection is open to all (door.py). Generated code has no comments, so they come from comments.json.
"""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
    SourceCodeInfo,
)
from grpc_reflection.v1alpha import reflection

from ckpt_engine.manager.http_messages import comments

WIDTH = 110
"""Columns of a comment's lines."""

_PARTS: Mapping[type, Mapping[str, int]] = {
    FileDescriptorProto: {"message_type": 4, "enum_type": 5, "service": 6},
    DescriptorProto: {"field": 2, "nested_type": 3, "enum_type": 4},
    EnumDescriptorProto: {"value": 2},
    ServiceDescriptorProto: {"method": 2},
}
"""By kind of descriptor, the fields with its parts, and their numbers, of which a path in SourceCodeInfo consists."""


class CommentedReflection(reflection.aio.ReflectionServicer):  # type: ignore[misc, name-defined]
    """Answers as gRPC's servicer does, with comments."""

    async def ServerReflectionInfo(  # noqa: N802
        self, request_iterator: AsyncIterator[Any], unused_context: Any
    ) -> AsyncIterator[Any]:
        """Answers each question about files, symbols and services."""
        async for answer in super().ServerReflectionInfo(request_iterator, unused_context):
            if answer.HasField("file_descriptor_response"):
                found = answer.file_descriptor_response.file_descriptor_proto
                found[:] = [_commented(serialized) for serialized in found]
            yield answer


@cache
def _commented(serialized: bytes) -> bytes:
    """A file's descriptor with the comments of all that is in it."""
    described = FileDescriptorProto.FromString(serialized)
    described.source_code_info.location.extend(_locations(described))
    return described.SerializeToString()


def _locations(described: FileDescriptorProto) -> Iterator[SourceCodeInfo.Location]:
    """The places of all parts of a file, one a line in the order of the .proto: tools sort by lines."""
    for line, (name, path) in enumerate(_parts(described, described.package, ())):
        comment = comments().get(name, "")
        lines = textwrap.wrap(comment, WIDTH, break_long_words=False, break_on_hyphens=False)
        words = "".join(f" {each}\n" for each in lines)
        yield SourceCodeInfo.Location(path=path, span=(line, 0, 1), leading_comments=words or None)


def _parts(whole: Any, name: str, path: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The full name and the path of each part, and of what is within it."""
    for kind, number in _PARTS.get(type(whole), {}).items():
        for index, part in enumerate(getattr(whole, kind)):
            full, where = f"{name}.{part.name}", (*path, number, index)
            yield full, where
            yield from _parts(part, full, where)
