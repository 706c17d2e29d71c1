"""Files: mapped from any offset, and refused when they are not what was published."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.base import Move
from ckpt_engine.transport.file.files import FileTransport, file_region
from ckpt_engine.v1.weights_pb2 import Problem, Region


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "weights"
    file.write_bytes(bytes(index % 251 for index in range(20000)))
    return file


@pytest.mark.parametrize("offset", [0, 1, 8, 4095, 4096, 9001])
def test_bytes_arrive_from_any_offset(path: Path, offset: int) -> None:
    region = file_region(0, str(path), offset, 10000)
    opened = FileTransport().open([region])
    destination = torch.zeros(4999, dtype=torch.bfloat16)
    opened.prepare([Move(region, 2, (4999,), (1,), "bfloat16", destination)]).run()
    assert bytes(destination.view(torch.uint8).tolist()) == path.read_bytes()[offset + 2 : offset + 10000]


def test_a_changed_file_is_refused_before_the_next_update(path: Path) -> None:
    region = file_region(0, str(path), 0, 100)
    transport = FileTransport()
    opened = transport.open([region])
    opened.check()
    status = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    for attempt in (opened.check, lambda: transport.open([region]), lambda: FileTransport().open([region])):
        with pytest.raises(CkptEngineError, match="changed since it was published") as refused:
            attempt()
        assert refused.value.problem.code == Problem.CODE_DATA_LOSS


def test_a_replaced_file_is_refused_and_the_old_one_stays_mapped(path: Path) -> None:
    region = file_region(0, str(path), 0, 100)
    opened = FileTransport().open([region])
    other = path.with_suffix(".new")
    other.write_bytes(bytes(20001))
    other.rename(path)
    with pytest.raises(CkptEngineError) as refused:
        opened.check()
    assert refused.value.problem.code == Problem.CODE_DATA_LOSS
    assert opened.view(region, 99, (1,), (1,), "uint8").item() == 99


def test_a_file_that_is_gone_or_short_is_refused(path: Path) -> None:
    region = file_region(0, str(path), 0, 100)
    beyond = Region(id=1, transport="file", size=20001, locator=region.locator)
    with pytest.raises(CkptEngineError) as short:
        FileTransport().open([beyond])
    assert short.value.problem.code == Problem.CODE_DATA_LOSS
    path.unlink()
    with pytest.raises(CkptEngineError) as gone:
        FileTransport().open([region])
    assert gone.value.problem.code == Problem.CODE_UNAVAILABLE
    with pytest.raises(CkptEngineError):
        file_region(0, str(path), 0, 100)
    with pytest.raises(CkptEngineError) as foreign:
        FileTransport().open([Region(id=1, transport="shared_memory", size=1)])
    assert foreign.value.problem.code == Problem.CODE_INVALID_ARGUMENT


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CkptEngineError):
        FileTransport().open([file_region(0, str(pipe), 0, 100)])


@pytest.mark.parametrize(("other", "is_it"), [(0, True), (999, False), (10**9, False)])
def test_a_host_that_is_told_whole_seconds_finds_the_same_file(path: Path, other: int, is_it: bool) -> None:
    """As a network file system may tell it: what is less than a second is lost on the way."""
    os.utime(path, ns=(5 * 10**9, 5 * 10**9 + 123_456_789))
    region = file_region(0, str(path), 0, 100)
    os.utime(path, ns=(5 * 10**9, 5 * 10**9 + other))
    if is_it:
        FileTransport().open([region]).check()
        return
    with pytest.raises(CkptEngineError, match="is another file") as refused:
        FileTransport().open([region])
    assert refused.value.problem.code == Problem.CODE_DATA_LOSS


def test_who_does_not_have_the_directory_is_told_which_and_where(path: Path) -> None:
    region = file_region(0, str(path), 0, 100)
    path.rename(path.with_suffix(".elsewhere"))
    words = f"cannot read {path} on host {socket.gethostname()}: No such file.* under the same path"
    with pytest.raises(CkptEngineError, match=words) as refused:
        FileTransport().open([region])
    assert refused.value.problem.code == Problem.CODE_UNAVAILABLE
