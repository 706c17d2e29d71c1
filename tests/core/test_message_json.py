"""Messages as JSON: the protobuf's own form, and what is said of a text that is no message."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from google.protobuf.json_format import Parse

from ckpt_engine import CkptEngineError
from ckpt_engine.core.message_json import as_dict, as_json, as_json_array, read_json
from ckpt_engine.v1 import manager_pb2, weights_pb2

Request = manager_pb2.UpdateFromDirectoryRequest

RECORD = manager_pb2.UpdateRecord(
    epoch=(1 << 53) + 1,
    identity=weights_pb2.Identity(lineage="run", version=3, root=b"\xff\xfe"),
    report=manager_pb2.UpdateReport(seconds=0.5, replicas=[{"replica": "a", "outcome": cast(Any, 77)}]),
)


def test_names_are_those_of_the_proto_and_what_has_a_default_is_there() -> None:
    told = as_dict(RECORD)
    assert told["epoch"] == "9007199254740993", "no reader rounds it"
    assert told["identity"] == {"lineage": "run", "version": "3", "root": "//4="}
    assert (told["report"]["source_copies"], told["report"]["warnings"]) == (0, [])
    assert told["report"]["replicas"][0]["outcome"] == 77, "a value that only a newer release has"
    assert "problem" not in told["report"]["replicas"][0]
    assert "next_attempt_seconds" not in as_dict(manager_pb2.Drift())


def test_it_reads_back_as_the_same_message() -> None:
    for text in (as_json(RECORD), as_json(RECORD, 2)):
        assert Parse(text, manager_pb2.UpdateRecord()) == RECORD
        read = manager_pb2.UpdateRecord()
        read_json(text.encode(), read)
        assert read == RECORD
    assert "\n" not in as_json(RECORD)
    assert json.loads(as_json_array([RECORD, RECORD])) == [as_dict(RECORD)] * 2


def test_what_is_read_may_be_as_grpcurl_prints_it() -> None:
    asked = Request()
    read_json(b'{"directory": "/x", "version": 7, "checkFinite": true, "options": {"minReplicas": "2"}}', asked)
    assert (asked.version, asked.check_finite, asked.options.min_replicas) == (7, True, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "the body must be a JSON object, a UpdateFromDirectoryRequest"),
        (b"[]", "the body must be a JSON object"),
        (b"3", "the body must be a JSON object"),
        (b'{"nope": 1}', "it has no field 'nope'; UpdateFromDirectoryRequest has directory, lineage, version, options"),
        (b'{"options": {"timeout": 3}}', "it has no field 'timeout'; UpdateOptions has pause_mode, timeout_seconds"),
        (b'{"options": {"pause_mode": "keep"}}', "'keep' is none of PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_KEEP"),
        (b'{"options": {"min_replicas": -1}}', "min_replicas field: Value out of range: -1"),
        (b'{"version": "seven"}', "version field: must be a whole number, got 'seven'"),
        (b'{"version": 1.5}', "Couldn't parse integer: 1.5"),
        (b'{"directory": 1}', "directory field: expected string"),
        (b'{"directory": "a", "directory": "b"}', "duplicate key directory"),
        (b'{"directory": "\xff"}', "can't decode byte"),
        (b'{"a":' * 20_000, "recursion"),
        (b"{", "Expecting property name"),
    ],
)
def test_a_text_that_is_no_message_is_refused_by_what_is_wrong_with_it(text: bytes, says: str) -> None:
    with pytest.raises(CkptEngineError) as caught:
        read_json(text, Request())
    assert caught.value.code == "INVALID_ARGUMENT"
    assert says in caught.value.problem.message
