"""Safetensors directories: read in place, and nothing in a header is believed."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.source.directory import DirectorySource
from ckpt_engine.source.open import open_source
from ckpt_engine.v1.weights_pb2 import Problem
from tests.source.reading import assert_equal, read, readable, whole_atoms

TENSORS = {
    "a.weight": torch.arange(24).reshape(4, 6).to(torch.bfloat16),
    "b.weight": torch.arange(7, dtype=torch.float32),
    "c": torch.tensor(3, dtype=torch.int64),
    "d": torch.zeros(0, 5, dtype=torch.float16),
    "e": torch.tensor([True, False, True]),
    "f": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """torch cannot compare 8-bit floats."""
    return {
        name: tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in tensors.items()
    }


def problem_of(path: Path) -> Problem:
    with pytest.raises(CkptEngineError) as error:
        open_source(path)
    return error.value.problem


def test_one_file_is_read_in_place(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    for path in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        source = open_source(path)
        assert isinstance(source, DirectorySource)
        table = source.table()
        assert (table.stays_sealed, table.source_copies) == (True, 0)
        assert [region.transport for region in readable(table)] == ["file"]
        with pytest.raises(CkptEngineError, match="not sealed"):
            source.digest(whole_atoms(table))
        source.check()
        assert source.seal() == source.seal(keep=True) == 0.0
        assert_equal(bits(read(table)), bits(TENSORS))
        kept = open_source(TENSORS)
        kept.seal()
        assert source.digest(whole_atoms(table)) == kept.digest(whole_atoms(kept.table()))
        source.close()


def test_shards_named_by_the_index_are_read_and_others_are_not(tmp_path: Path) -> None:
    names = sorted(TENSORS)
    files = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, members in files.items():
        save_file({name: TENSORS[name] for name in members}, tmp_path / file)
    save_file({"a.weight": torch.zeros(1)}, tmp_path / "stray.safetensors")
    assert problem_of(tmp_path).tensors == ["a.weight"]
    index = tmp_path / "model.safetensors.index.json"
    placed = {name: file for file, members in files.items() for name in members}
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))
    source = open_source(tmp_path)
    source.seal()
    assert_equal(bits(read(source.table())), bits(TENSORS))

    for wrong, message in [
        ({**placed, "missing": "model-1.safetensors"}, "missing"),
        ({**placed, "a.weight": "model-2.safetensors"}, "a.weight"),
        ({**placed, "a.weight": "../model-1.safetensors"}, "not a file of this directory"),
        ({**placed, "a.weight": 3}, "not a file of this directory"),
        ({**placed, "a.weight": "gone.safetensors"}, "gone.safetensors"),
        ({}, "no weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": wrong}))
        assert message in problem_of(tmp_path).message


def test_all_files_are_read_when_nothing_says_which(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"y": torch.zeros(0)}, tmp_path / "two.safetensors")
    source = open_source(tmp_path)
    source.seal()
    assert_equal(read(source.table()), {"x": torch.ones(2), "y": torch.zeros(0)})


def test_a_served_dtype_or_a_snapshot_is_copied(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_source(tmp_path, dtype="bfloat16")
    source.seal()
    table = source.table()
    assert (table.stays_sealed, table.source_copies) == (True, 1)
    cast = {**TENSORS, "b.weight": TENSORS["b.weight"].bfloat16(), "d": TENSORS["d"].bfloat16()}
    assert_equal(bits(read(table)), bits(cast))
    for same in (open_source(tmp_path, snapshot=True), open_source(tmp_path / "model.safetensors", snapshot=True)):
        same.seal()
        assert same.table().source_copies == 1
        assert_equal(bits(read(same.table())), bits(TENSORS))
    with pytest.raises(CkptEngineError, match="snapshot=False"):
        open_source(tmp_path, dtype="bfloat16", snapshot=False)


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_a_file_that_changes_is_noticed(tmp_path: Path, dtype: str | None) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    source = open_source(tmp_path, dtype=dtype)
    source.seal()
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    for attempt in (source.check, source.seal):
        with pytest.raises(CkptEngineError) as error:
            attempt()
        assert error.value.problem.code == Problem.CODE_DATA_LOSS
    file.unlink()
    with pytest.raises(CkptEngineError) as gone:
        source.check()
    assert gone.value.problem.code == Problem.CODE_UNAVAILABLE


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (entry(), b"", None),
        (entry(), bytes(9), None),
        (entry(), bytes(8), 1 << 40),
        (entry(), bytes(8), 100_000_001),
        (entry(shape=[3]), bytes(8), None),
        (entry(shape=[-2]), bytes(8), None),
        (entry(shape=[2.0]), bytes(8), None),
        (entry(shape=[True, 2]), bytes(8), None),
        (entry(shape=[1 << 61, 8]), bytes(8), None),
        (entry(shape=[1 << 61] * 300_000), bytes(8), None),
        (entry(shape=[1] * 65 + [2]), bytes(8), None),
        (entry(shape=[1 << 61, 1 << 61, 0], data_offsets=[0, 0]), b"", None),
        (entry(shape=[10**400], data_offsets=[0, 10**400]), bytes(8), None),
        (entry(shape=[2] * 3_000_000), bytes(8), None),
        (b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(8), None),
        (b'{"": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(8), None),
        (b'{"x": {"dtype": "\\ud800", "shape": [2], "data_offsets": [0, 8]}}', bytes(8), None),
        (b'{"x":' * 100_000, b"", None),
        (entry(shape=None), bytes(8), None),
        (entry(dtype="F4"), bytes(8), None),
        (entry(dtype=["F32"]), bytes(8), None),
        (entry(data_offsets=[0]), bytes(8), None),
        (entry(data_offsets=[8, 0]), bytes(8), None),
        (entry(data_offsets=[4, 12]), bytes(12), None),
        ({**entry(), "y": entry()["x"]}, bytes(8), None),
        ({**entry(), "y": entry(data_offsets=[4, 12])["x"]}, bytes(12), None),
        ({**entry(), "y": entry(data_offsets=[12, 20])["x"]}, bytes(20), None),
        ({"x": 3}, b"", None),
        ([], b"", None),
        (b"{", b"", None),
        (b"\xff\xfe", b"", None),
        (b"[" * 100_000, b"", None),
        (b'{"x": 1, "x": 2}', b"", None),
        ({}, b"", None),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, header: Any, data: bytes, length: int | None) -> None:
    file = write(tmp_path / "model.safetensors", header, data, length)
    problem = problem_of(file)
    assert problem.code == Problem.CODE_INVALID_ARGUMENT
    assert str(file) in problem.message
    assert len(problem.message) < 1000


@pytest.mark.parametrize("placed", ["\ud800.safetensors", "a\0b.safetensors", "../x.safetensors", "", 3])
def test_an_index_that_names_no_file_of_its_directory_is_refused(tmp_path: Path, placed: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": placed}}))
    problem = problem_of(tmp_path)
    assert problem.code == Problem.CODE_INVALID_ARGUMENT
    assert "which is not a file of this directory" in problem.message


def test_a_file_of_no_length_and_a_sound_one(tmp_path: Path) -> None:
    empty = tmp_path / "empty.safetensors"
    empty.write_bytes(b"1234567")
    assert problem_of(empty).code == Problem.CODE_INVALID_ARGUMENT
    sound = open_source(write(tmp_path / "sound.safetensors", entry(), bytes(8)))
    assert_equal(read(sound.table()), {"x": torch.zeros(2)})


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    assert problem_of(tmp_path).code == Problem.CODE_NOT_FOUND
    assert problem_of(tmp_path / "nothing").code == Problem.CODE_NOT_FOUND
    assert problem_of(tmp_path / ("n" * 5000)).code == Problem.CODE_NOT_FOUND


def test_what_is_no_file_of_bytes_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Opening a pipe waits until something writes to it."""
    os.mkfifo(tmp_path / "model.safetensors")
    refused: list[Problem] = []
    asking = threading.Thread(target=lambda: refused.append(problem_of(tmp_path)), daemon=True)
    asking.start()
    asking.join(60)
    assert [each.code for each in refused] == [Problem.CODE_INVALID_ARGUMENT]
    assert "not a regular file" in refused[0].message


def test_a_file_that_ends_within_its_header_is_refused_with_both_lengths(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((100).to_bytes(8, "little") + b'{"x"')
    assert "12 bytes, of which the header would be 100" in problem_of(file).message


def test_a_header_beyond_the_limit_is_not_even_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as sparse:
        sparse.write((100_000_001).to_bytes(8, "little"))
        sparse.truncate(200_000_000)
    assert "the header would be 100000001" in problem_of(file).message
