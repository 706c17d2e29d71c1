"""The generated code in the repository is what the wire contract generates, and its codes are those that are told."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto

from ckpt_engine import ErrorCode
from ckpt_engine.commands.asking import failure_exit
from ckpt_engine.commands.progress import refusal_exit
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.manager.errors import grpc_status, http_status
from ckpt_engine.v1 import manager_pb2, page_pb2, weights_pb2, worker_pb2

REPOSITORY = Path(__file__).resolve().parents[2]


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "proto" / "generate.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    made = {path.name: path.read_text() for path in (tmp_path / "ckpt_engine" / "v1").iterdir()}
    files = [*(REPOSITORY / "ckpt_engine" / "v1").glob("*_pb2*.py*"), REPOSITORY / "ckpt_engine" / "v1/comments.json"]
    kept = {path.name: path.read_text() for path in files}
    assert sorted(made) == sorted(kept), "run proto/generate.py"
    assert [name for name in made if made[name] != kept[name]] == [], "run proto/generate.py"


def test_whatever_anybody_may_call_is_explained() -> None:
    """Each call of the public service, each message, field, enum and value that it leads to, and those of the page."""
    said = json.loads((REPOSITORY / "ckpt_engine" / "v1" / "comments.json").read_text())
    service = manager_pb2.DESCRIPTOR.services_by_name["CheckpointEngineManager"]
    parts: list[Any] = [service, *service.methods]
    met: dict[str, Any] = {}
    left: list[Any] = [each for call in service.methods for each in (call.input_type, call.output_type)]
    left += page_pb2.DESCRIPTOR.message_types_by_name.values()
    while left:
        message = left.pop()
        if message.full_name in met or message.GetOptions().map_entry:
            continue
        met[message.full_name] = message
        parts += [message, *message.fields]
        left += [field.message_type for field in message.fields if field.message_type]
        parts += [field.enum_type for field in message.fields if field.enum_type]
    names = [each.full_name for each in parts]
    names += [
        f"{enum.full_name}.{value}"
        for enum in parts
        if isinstance(enum, EnumDescriptor)
        for value in enum.values_by_name
    ]
    assert len(met) > 50
    assert [name for name in names if name not in said] == []


def test_what_members_speak_is_explained() -> None:
    """Each message and each enum of the contract, beside those that anybody meets, says what it is."""
    said = json.loads((REPOSITORY / "ckpt_engine" / "v1" / "comments.json").read_text())
    named = [
        each for file in FILES for each in (*file.message_types_by_name.values(), *file.enum_types_by_name.values())
    ]
    assert len(named) > 150
    assert [each.full_name for each in named if each.full_name not in said] == []


def test_no_comment_goes_on_below_what_it_stands_beside() -> None:
    """protoc, and so every tool that shows comments, takes the next line for what is said of the next field."""
    for path in (REPOSITORY / "proto").rglob("*.proto"):
        lines = path.read_text().splitlines()
        for line, following in pairwise(lines):
            beside = line.partition("//")[0].strip() != "" and "//" in line
            own = len(following) - len(following.lstrip())
            goes_on = following.lstrip().startswith("//") and own > len(line) - len(line.lstrip())
            assert not (beside and goes_on and not line.split("//")[0].rstrip().endswith("{")), (
                f"{path.name}: {following}"
            )


def test_the_table_of_codes_is_the_one_that_is_used() -> None:
    """docs/protocol.md, "Errors": code, gRPC status, HTTP status and exit status of each."""
    page = (REPOSITORY / "docs" / "protocol.md").read_text().split("\n## Errors\n")[1].split("\n## ")[0]
    told = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and cells[0] in ErrorCode.__members__:
            told[cells[0]] = (cells[1].split(";")[0], int(cells[2]), int(cells[3]))
    found = {}
    for code in ErrorCode:
        problem = weights_pb2.Problem(code=f"CODE_{code}")
        same = "the same" if grpc_status(problem).name == code.value else ""
        found[code.value] = (same, http_status(problem), failure_exit("m:1", CkptEngineError(problem)).exit_code)
        assert refusal_exit("update", CkptEngineError(problem), False).exit_code == found[code.value][2]
    assert told == found
    names = {value.name.removeprefix("CODE_") for value in weights_pb2.Problem.Code.DESCRIPTOR.values}
    assert {*ErrorCode.__members__} == names - {"UNSPECIFIED"}


def messages(within: Iterable[Descriptor]) -> Iterator[Descriptor]:
    for message in within:
        yield message
        yield from messages(message.nested_types)


FILES = (manager_pb2.DESCRIPTOR, page_pb2.DESCRIPTOR, weights_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR)


def test_values_of_an_enum_carry_its_name() -> None:
    """Two enums of one package cannot have a value of one name, in most languages."""
    enums = [enum for file in FILES for enum in file.enum_types_by_name.values()]
    enums += [
        enum
        for file in FILES
        for each in messages(file.message_types_by_name.values())
        for enum in each.enum_types_by_name.values()
    ]
    assert len(enums) > 15
    for enum in enums:
        prefix = re.sub("(?<=[a-z])(?=[A-Z])", "_", enum.name).upper()
        assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
        assert [value.name for value in enum.values if not value.name.startswith(f"{prefix}_")] == []
        assert sorted(value.number for value in enum.values) == list(range(len(enum.values)))


def test_numbers_of_fields_that_are_not_used_are_reserved() -> None:
    """So that none is used again for another thing."""
    skipped = {}
    for message in messages(each for file in FILES for each in file.message_types_by_name.values()):
        proto = DescriptorProto()
        message.CopyToProto(proto)
        used = {field.number for field in proto.field}
        used |= {number for each in proto.reserved_range for number in range(each.start, each.end)}
        if missing := set(range(1, max(used, default=0) + 1)) - used:
            skipped[message.full_name] = sorted(missing)
    assert skipped == {}
