"""Regenerates ckpt_engine/v1 from proto/: `python proto/generate.py [OUTPUT_ROOT]` (default: the repository)."""

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent

PARTS = {
    FileDescriptorProto: {"message_type": 4, "enum_type": 5, "service": 6},
    DescriptorProto: {"field": 2, "nested_type": 3, "enum_type": 4},
    EnumDescriptorProto: {"value": 2},
    ServiceDescriptorProto: {"method": 2},
}
"""What a file, a message, an enum and a service consist of, and by which number a source location names that."""


def generate(output_root: Path) -> None:
    """Writes messages, their type stubs, the manager's service stubs and all comments below ``output_root``."""
    import grpc_tools

    well_known = str(Path(grpc_tools.__file__).parent / "_proto")
    include = [f"-I{PROTO}", f"-I{well_known}"]
    sources = sorted(str(path) for path in (PROTO / "ckpt_engine" / "v1").glob("*.proto"))
    service = [source for source in sources if source.endswith("manager.proto")]
    with tempfile.NamedTemporaryFile() as described:
        for command in (
            ["protoc", *include, f"--python_out={output_root}", f"--pyi_out={output_root}", *sources],
            ["protoc", *include, f"--grpc_python_out={output_root}", *service],
            ["protoc", *include, f"--descriptor_set_out={described.name}", "--include_source_info", *sources],
        ):
            if protoc.main(command) != 0:
                raise SystemExit(f"protoc failed: {' '.join(command)}")
        found = FileDescriptorSet.FromString(described.read())
    comments = json.dumps(dict(sorted(comments_of(found.file))), indent=0, ensure_ascii=False)
    (output_root / "ckpt_engine" / "v1" / "comments.json").write_text(comments + "\n")


def comments_of(sources: Iterable[FileDescriptorProto]) -> Iterable[tuple[str, str]]:
    """What is said of each message, field, enum, value, service and call, by its full name: the manager's HTTP
    interface shows it."""
    for source in sources:
        said = {tuple(each.path): each for each in source.source_code_info.location}
        yield from _within(source, source.package, (), said)


def _within(
    whole: Any, name: str, path: tuple[int, ...], said: dict[tuple[int, ...], Any]
) -> Iterable[tuple[str, str]]:
    for kind, number in PARTS.get(type(whole), {}).items():
        for index, part in enumerate(getattr(whole, kind)):
            full, where = f"{name}.{part.name}", (*path, number, index)
            place = said.get(where)
            words = "" if place is None else f"{place.leading_comments} {place.trailing_comments}"
            if words.split():
                yield full, " ".join(words.split())
            yield from _within(part, full, where, said)


if __name__ == "__main__":
    generate(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else PROTO.parent)
