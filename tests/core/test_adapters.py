"""Names and sealed facts of adapters."""

from __future__ import annotations

import pytest

from ckpt_engine import CkptEngineError
from ckpt_engine.core.adapters import (
    AdapterFacts,
    adapter_versions,
    asked_version,
    factor_name,
    factor_of,
    integer_id,
    served_name,
)
from ckpt_engine.v1 import weights_pb2


def identity(version: int, lineage: str = "policy", root: bytes = b"r" * 32) -> weights_pb2.Identity:
    return weights_pb2.Identity(lineage=lineage, version=version, root=root)


def test_facts_survive_exactly_and_keep_their_length() -> None:
    facts = AdapterFacts(b"\x01" * 32, {"b": 2 / 3, "a": 1e-7})
    assert AdapterFacts.from_bytes(facts.to_bytes()) == facts
    other = AdapterFacts(b"\xff" * 32, facts.scaling)
    assert len(other.to_bytes()) == len(facts.to_bytes()), "a new base needs no new publication"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"format":2,"base_root":"' + b"ab" * 32 + b'","scaling":{}}',
        b'{"format":1,"base_root":"abab","scaling":{}}',
        b'{"format":1,"base_root":"' + b"ab" * 32 + b'","scaling":{"q":NaN}}',
        b'{"format":1,"base_root":"' + b"ab" * 32 + b'","scaling":[1]}',
    ],
)
def test_facts_that_are_none_are_refused(content: bytes) -> None:
    with pytest.raises(CkptEngineError, match=r"adapter\.json"):
        AdapterFacts.from_bytes(content)


def test_a_model_names_an_adapter_and_perhaps_a_version() -> None:
    assert asked_version("policy") == ("policy", None)
    assert asked_version("policy@7") == ("policy", 7)
    assert asked_version(served_name(identity(12))) == ("policy", 12)
    for odd in ("policy@", "policy@x", "policy@-1", "a@b"):
        assert asked_version(odd) == (odd, None)


def test_factors_are_found_by_their_names() -> None:
    assert factor_of(factor_name("model.layers.0.q_proj", "A")) == ("model.layers.0.q_proj", "A")
    with pytest.raises(CkptEngineError, match=r"lora_magnitude"):
        factor_of("model.layers.0.q_proj.lora_magnitude_vector.weight")


def test_numbers_are_positive_and_differ_by_lineage_version_and_root() -> None:
    versions = [identity(version) for version in range(2000)]
    versions += [identity(7, "critic"), identity(7, root=b"s" * 32)]
    numbers = {integer_id(each) for each in versions}
    assert len(numbers) == len(versions)
    assert all(0 < number < 1 << 31 for number in numbers)


def test_what_an_engine_keeps_is_checked() -> None:
    assert adapter_versions("policy=3,critic=2") == {"policy": 3, "critic": 2}
    assert adapter_versions("") == {}
    for words in ("policy", "policy=1", "policy=x", "a b=3", "p@1=3", "../p=3", "p=3,p=3"):
        with pytest.raises(CkptEngineError):
            adapter_versions(words)
