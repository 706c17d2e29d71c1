"""A directory digested by a reader: equal to what its publisher says, and refused when it is not what was published."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_engine.agent import reader_seal
from ckpt_engine.agent.reader_seal import digest_for_readers
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.host.facts import this_host
from ckpt_engine.source.directory import directory_source
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1 import weights_pb2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(8, 6).to(torch.bfloat16), "b.bias": torch.randn(5)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    return tmp_path


def halves(table: weights_pb2.SourceTable) -> weights_pb2.Atoms:
    """Every shard cut in two along its first axis, so that atoms begin inside a shard."""
    atoms = weights_pb2.Atoms(table_digest=blob_digest(canonical(table)))
    for index, shard in enumerate(table.shards):
        middle = shard.stop[0] // 2
        atoms.atoms.add(shard=index, start=shard.start, stop=[middle, *shard.stop[1:]])
        atoms.atoms.add(shard=index, start=[middle, *shard.start[1:]], stop=shard.stop)
    return atoms


def published(checkpoint: Path) -> tuple[bytes, bytes, list[int]]:
    """The directory's table, atoms, and what its own process says that they hash to."""
    source = directory_source(checkpoint, host=this_host())
    table = source.table()
    source.seal()
    digests = source.digest(halves(table))
    source.close()
    return canonical(table), canonical(halves(table)), digests


def test_a_reader_says_what_the_publisher_says(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, atoms, expected = published(checkpoint)
    assert list(digest_for_readers(table, atoms, all_transports(), 30).values) == expected
    monkeypatch.setattr(reader_seal, "ATOMS_AT_ONCE", 1)
    assert list(digest_for_readers(table, atoms, all_transports(), 30).values) == expected
    assert len(set(expected)) == 4


def test_a_file_that_was_changed_is_refused(checkpoint: Path) -> None:
    table, atoms, _ = published(checkpoint)
    file = checkpoint / "model.safetensors"
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(CkptEngineError) as caught:
        digest_for_readers(table, atoms, all_transports(), 30)
    assert caught.value.problem.code == weights_pb2.Problem.CODE_DATA_LOSS


def test_a_file_that_is_gone_is_told(checkpoint: Path) -> None:
    table, atoms, _ = published(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CkptEngineError) as caught:
        digest_for_readers(table, atoms, all_transports(), 30)
    assert caught.value.problem.code == weights_pb2.Problem.CODE_UNAVAILABLE


def test_atoms_of_another_table_are_refused(checkpoint: Path) -> None:
    table, atoms, _ = published(checkpoint)
    other = weights_pb2.Atoms.FromString(atoms)
    other.table_digest = bytes(32)
    with pytest.raises(CkptEngineError) as caught:
        digest_for_readers(table, canonical(other), all_transports(), 30)
    assert caught.value.problem.code == weights_pb2.Problem.CODE_FAILED_PRECONDITION


def test_a_source_that_does_not_stay_sealed_is_not_ours_to_seal(checkpoint: Path) -> None:
    table, atoms, _ = published(checkpoint)
    alive = weights_pb2.SourceTable.FromString(table)
    alive.stays_sealed = False
    with pytest.raises(CkptEngineError, match="does not stay sealed"):
        digest_for_readers(canonical(alive), atoms, all_transports(), 30)


def test_a_transport_that_is_off_is_named(checkpoint: Path) -> None:
    table, atoms, _ = published(checkpoint)
    with pytest.raises(CkptEngineError, match="needs transport 'file'"):
        digest_for_readers(table, atoms, {}, 30)


def test_it_has_a_deadline(checkpoint: Path) -> None:
    table, atoms, _ = published(checkpoint)
    with pytest.raises(CkptEngineError, match="digested 0 of 4 atoms"):
        digest_for_readers(table, atoms, all_transports(), -1)
