"""Updates from a directory below the manager's roots: its own process publishes, real replicas read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from plain_replica import PlainReplica
from safetensors.torch import save_file
from trainer_world import DEADLINES, manager_config

from ckpt_engine import Client
from ckpt_engine.channel import ManagerStub, problem_of
from ckpt_engine.core.problems import CkptEngineError, code_of
from ckpt_engine.manager.service import running_manager
from ckpt_engine.publishing.publisher import Publisher, still_served
from ckpt_engine.trainer import Trainer
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.cluster import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "any_language" / "update_from_directory.py"

Code = weights_pb2.Problem.Code
Request = manager_pb2.UpdateFromDirectoryRequest


@pytest.fixture
def manager(root: Path, tmp_path: Path) -> Iterator[str]:
    """Its address; it may publish what lies below `root`."""
    config = replace(manager_config(tmp_path / "ledger.sqlite3"), directories=(root,))
    with running_manager(config) as address:
        yield address
    assert publishers() == [], "they end with their manager"


def publishers() -> list[psutil.Process]:
    """Processes that this one's manager has started to publish."""
    return [child for child in psutil.Process().children(recursive=True) if _publishes(child)]


def _publishes(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "ckpt_engine.publishing.process" in process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return False


def checkpoint(path: Path, value: float) -> Path:
    path.mkdir()
    half = {"a.weight": torch.full((300, 7), value), "a.bias": torch.arange(11) + int(value)}
    save_file(half, path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.full((5,), value, dtype=torch.bfloat16)}, path / "model-00002-of-00002.safetensors")
    return path


def indexed(path: Path) -> Path:
    """A checkpoint whose index places its only tensor in a file that is not called as safetensors files are."""
    path.mkdir()
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "data.bin"}}')
    return path


def asked(directory: Path | str, **fields: Any) -> Request:
    """A request; what is no field of it is one of its options."""
    own = {name: fields.pop(name) for name in ("version", "lineage", "check_finite") if name in fields}
    return Request(directory=str(directory), **own, options=manager_pb2.UpdateOptions(**fields))


def bring(manager: str, directory: Path | str, **fields: object) -> manager_pb2.UpdateReport:
    with grpc.insecure_channel(manager) as channel:
        *_, last = ManagerStub(channel).UpdateFromDirectory(asked(directory, **fields), timeout=120)
    assert last.HasField("report")
    return last.report


def refusal(manager: str, directory: Path | str, **fields: object) -> weights_pb2.Problem:
    with pytest.raises(grpc.RpcError) as caught:
        bring(manager, directory, **fields)
    return problem_of(caught.value)


@pytest.mark.slow
def test_replicas_get_what_lies_there_and_repeating_the_call_is_the_same_update(
    manager: str, root: Path, replica: Callable[..., PlainReplica]
) -> None:
    one = replica("one")
    first = checkpoint(root / "step_1", 1.0)
    report = bring(manager, first, version=1, lineage="prime")
    assert report.ok
    assert report.verified
    assert (report.identity.lineage, report.identity.version) == ("prime", 1)
    assert torch.equal(one.weights["a.weight"], torch.full((300, 7), 1.0))
    assert one.weights["b"].dtype is torch.bfloat16
    assert bring(manager, first, version=1, lineage="prime") == report
    (root / "latest").symlink_to(first)
    assert bring(manager, root / "latest", lineage="prime").identity == report.identity
    command = [sys.executable, str(EXAMPLE), "--manager", manager, "--lineage", "prime", str(root / "latest")]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    assert said.stdout == "version 1: one\n"
    assert len(one.installs) == 1
    with Client(manager) as client:
        (listed,) = client.versions("prime")
    assert (listed.identity, list(listed.holders), list(listed.replicas)) == (report.identity, ["files"], ["one"])


def test_what_cannot_be_published_is_refused_before_anybody_is_asked(
    manager: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logging.py").write_text("raise SystemExit('taken from the working directory')")
    monkeypatch.chdir(tmp_path)
    outside = checkpoint(tmp_path / "outside", 1.0)
    (root / "link").symlink_to(outside)
    aside = checkpoint(root / "aside", 1.0)
    (aside / "model-00002-of-00002.safetensors").unlink()
    (aside / "model-00002-of-00002.safetensors").symlink_to(outside / "model-00002-of-00002.safetensors")
    torn = checkpoint(root / "torn", 1.0)
    os.truncate(torn / "model-00001-of-00002.safetensors", 700)
    piped = checkpoint(root / "piped", 1.0)
    os.mkfifo(piped / "model-00003-of-00003.safetensors")
    (root / "empty").mkdir()
    named = {name: indexed(root / f"named_{name}") for name in ("outside", "hidden", "gone", "pipe")}
    secret = tmp_path / "secret"
    secret.write_bytes(b"root:x:0:0:")
    (named["outside"] / "data.bin").symlink_to(secret)
    (named["hidden"] / "data.bin").symlink_to(tmp_path / "nothing")
    os.mkfifo(named["pipe"] / "data.bin")
    for directory, code, words in (
        (outside, "PERMISSION_DENIED", "lies outside the directories that this manager may publish"),
        (tmp_path / "nowhere", "PERMISSION_DENIED", "lies outside"),
        (root / ".." / "outside", "PERMISSION_DENIED", f"it leads to {outside}"),
        (root / "link", "PERMISSION_DENIED", f"it leads to {outside}"),
        (aside, "PERMISSION_DENIED", "model-00002-of-00002.safetensors (it leads to"),
        (root / "missing", "NOT_FOUND", "is not there"),
        (root / "empty", "NOT_FOUND", "holds no safetensors files"),
        (torn, "INVALID_ARGUMENT", "is it cut short?"),
        (piped, "INVALID_ARGUMENT", "is not a regular file"),
        (named["outside"], "PERMISSION_DENIED", f"data.bin (it leads to {secret})"),
        (named["hidden"], "PERMISSION_DENIED", "data.bin (it leads to"),
        (named["gone"], "NOT_FOUND", "data.bin is not there"),
        (named["pipe"], "INVALID_ARGUMENT", "data.bin is not a regular file"),
        ("checkpoints/step_1", "INVALID_ARGUMENT", "absolute path"),
    ):
        problem = refusal(manager, directory)
        assert (code_of(problem), words in problem.message) == (code, True), problem
    assert "the manager's host" in problem.message
    with grpc.insecure_channel(manager) as channel:
        assert ManagerStub(channel).GetStatus(manager_pb2.GetStatusRequest(), timeout=60).trainers == []


def test_a_file_that_is_exchanged_after_it_was_looked_at_is_not_published(
    manager: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, path = checkpoint(tmp_path / "outside", 2.0), checkpoint(root / "step_1", 1.0)
    publish = Trainer.publish

    def exchanged(trainer: Trainer, *arguments: Any, **options: Any) -> None:
        for file in path.iterdir():
            file.unlink()
            file.symlink_to(outside / file.name)
        publish(trainer, *arguments, **options)

    monkeypatch.setattr(Trainer, "publish", exchanged)
    publisher = Publisher(manager, "run", [root], DEADLINES)
    with pytest.raises(CkptEngineError, match="PERMISSION_DENIED"):
        publisher.update(asked(path, min_replicas=0), lambda told: None)
    with grpc.insecure_channel(manager) as channel:
        assert not ManagerStub(channel).GetStatus(manager_pb2.GetStatusRequest(), timeout=60).HasField("latest")


def test_a_manager_without_roots_publishes_nothing(tmp_path: Path) -> None:
    with running_manager(manager_config(tmp_path / "other.sqlite3")) as address:
        problem = refusal(address, tmp_path)
    assert code_of(problem) == "FAILED_PRECONDITION"
    assert "--allow-directory ROOT" in problem.message


@pytest.mark.slow
def test_the_next_directory_follows_and_a_late_replica_gets_it(
    manager: str, root: Path, replica: Callable[..., PlainReplica]
) -> None:
    one = replica("one")
    first = checkpoint(root / "first", 1.0)
    one.prepare_problem = weights_pb2.Problem(code=Code.CODE_INVALID_ARGUMENT, message="b has another shape")
    assert "b has another shape" in refusal(manager, first).message
    assert one.installs == []
    one.prepare_problem = None
    assert bring(manager, first).ok
    second = checkpoint(root / "second", 2.0)
    report = bring(manager, second)
    assert (report.identity.lineage, report.identity.version) == ("directory", 1)
    assert torch.equal(one.weights["b"], torch.full((5,), 2.0, dtype=torch.bfloat16))
    late = replica("late")
    eventually("the late replica has it", 60, lambda: late.identity == report.identity)
    file = second / "model-00002-of-00002.safetensors"
    before = file.stat()
    save_file({"b": torch.full((5,), 9.0, dtype=torch.bfloat16)}, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = bring(manager, second)
    assert changed.identity.version == 2, "files that changed are another update"
    assert late.weights["b"].tolist() == [9.0] * 5
    refused = refusal(manager, first, version=1)
    assert code_of(refused) == "FAILED_PRECONDITION"
    assert "version 1 goes backwards" in refused.message
    assert one.identity == late.identity == changed.identity
    assert bring(manager, first, lineage="other").ok
    assert bring(manager, second).identity.version == 3, "somebody else was served since"
    assert one.weights["b"].tolist() == [9.0] * 5


@pytest.mark.slow
def test_after_a_dry_run_late_replicas_get_what_was_published_before(
    manager: str, root: Path, replica: Callable[..., PlainReplica]
) -> None:
    one = replica("one")
    served = checkpoint(root / "served", 1.0)
    report = bring(manager, served)
    foreseen = bring(manager, checkpoint(root / "other", 2.0), dry_run=True)
    assert (foreseen.dry_run, foreseen.ok) == (True, True)
    assert (foreseen.identity.version, foreseen.identity.root) == (report.identity.version + 1, b"")
    assert sum(edge.bytes for edge in foreseen.replicas[0].edges) == foreseen.bytes == report.bytes
    assert len(one.installs) == 1
    late = replica("late")
    eventually("the late replica has it", 60, lambda: late.identity == report.identity)
    assert late.weights["b"].tolist() == [1.0] * 5
    assert bring(manager, served).identity == report.identity, "it is served still"
    assert len(one.installs) == 1


def test_calls_at_the_same_time_are_one_update(manager: str, root: Path, replica: Callable[..., PlainReplica]) -> None:
    one = replica("one")
    path = checkpoint(root / "step_3", 3.0)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: bring(manager, path, version=3), range(4)))
    assert all(report == reports[0] for report in reports)
    assert len(one.installs) == 1


@pytest.mark.slow
def test_a_publisher_that_dies_is_said_and_the_next_call_starts_another(
    manager: str, root: Path, replica: Callable[..., PlainReplica]
) -> None:
    one = replica("one")
    path = checkpoint(root / "step_3", 3.0)

    def kill() -> None:
        one.before_preparing = lambda: None
        killed = publishers()
        for process in killed:
            process.send_signal(signal.SIGKILL)
        # To wait for them is the manager's, in this process. The next call's publisher may be there already.
        eventually("they ended", 60, lambda: not any(_publishes(process) for process in killed))

    one.before_preparing = kill
    problem = refusal(manager, path, version=3)
    assert code_of(problem) == "UNAVAILABLE"
    assert "was ended by SIGKILL" in problem.message
    assert bring(manager, path, version=3).ok
    assert one.weights["b"].tolist() == [3.0] * 5


def test_only_an_update_that_is_still_served_is_not_done_again() -> None:
    identity = weights_pb2.Identity(lineage="run", version=3, root=b"r" * 32)
    fence = weights_pb2.Fence(cluster="c", epoch=7)
    outcome = manager_pb2.ReplicaOutcome(replica="one", fence=fence, outcome=manager_pb2.OUTCOME_NEW_SERVING)
    report = manager_pb2.UpdateReport(identity=identity, ok=True, replicas=[outcome])
    worker = manager_pb2.WorkerStatus(epoch=7)
    serves = manager_pb2.ReplicaStatus(
        name="one", connected=True, serving=True, workers=[worker], identity=identity, last_outcome=outcome
    )
    for served, change in (
        (True, {}),
        (True, {"identity": None, "serving": False, "closed_reason": "its workers have no weights yet"}),
        (True, {"identity": weights_pb2.Identity(lineage="run", version=2)}),
        (False, {"identity": None, "last_outcome": manager_pb2.ReplicaOutcome(fence=weights_pb2.Fence(epoch=8))}),
        (False, {"serving": False, "closed_reason": "paused"}),
        (False, {"connected": False, "serving": False}),
        (False, {"asleep": True, "serving": False, "identity": None}),
        (False, {"workers": [], "identity": None, "serving": False, "closed_reason": "it exited with status 1"}),
        (False, {"identity": None, "unfit": weights_pb2.Problem(message="b has another shape")}),
    ):
        fields = {field.name: value for field, value in serves.ListFields()} | change
        status = manager_pb2.GetStatusResponse(replicas=[manager_pb2.ReplicaStatus(**fields)])
        assert still_served(report, status) == served, change
    assert not still_served(report, manager_pb2.GetStatusResponse()), "it was taken out"
