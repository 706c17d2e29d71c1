"""A version is read, verified, by who is no member: from a trainer that keeps it sealed, and from a relay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_replica import PlainReplica
from safetensors.torch import load_file

from ckpt_engine import Reader, Trainer, pull
from ckpt_engine.core.problems import CkptEngineError, code_of
from ckpt_engine.reading import pulling, reader
from tests.cluster import eventually


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {
        "layers.0.up": torch.randn(37, 24, generator=made),
        "layers.0.norm": torch.randn(24, generator=made).to(torch.bfloat16),
        "empty": torch.zeros(0, 5),
        "scale": torch.tensor(0.5),
        "bytes": torch.arange(99, dtype=torch.uint8),
    }


def equal(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> bool:
    return sorted(found) == sorted(weights) and all(
        found[name].dtype is weights[name].dtype and torch.equal(found[name], weights[name]) for name in weights
    )


def refusal(error: pytest.ExceptionInfo[CkptEngineError]) -> tuple[str, str]:
    problem = error.value.problem
    return code_of(problem), problem.message


def test_all_tensors_of_the_latest_version_are_read_and_written(
    manager: str, weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups that are smaller than the model, and into several files."""
    monkeypatch.setattr(reader, "GROUP_BYTES", 1000)
    monkeypatch.setattr(pulling, "FILE_BYTES", 3000)
    with pytest.raises(CkptEngineError) as nothing:
        Reader(manager)
    assert refusal(nothing)[0] == "NOT_FOUND"
    with Trainer(manager, lineage="run") as trainer:
        trainer.publish(weights, snapshot=True)
        report = trainer.update_weights(version=4, min_replicas=0)
        with Reader(manager) as found:
            assert (found.lineage, found.version, found.root) == ("run", 4, report.root)
            assert found.names == sorted(weights)
            assert found.nbytes == sum(each.nbytes for each in weights.values())
            assert (found.shape("layers.0.up"), found.dtype("layers.0.norm")) == ((37, 24), torch.bfloat16)
            assert equal(dict(found.tensors()), weights)
            pairs = list(found.tensors(["scale", "layers.0.norm"]))
            assert [name for name, _ in pairs] == ["scale", "layers.0.norm"]
            with pytest.raises(CkptEngineError, match=r"has no tensor 'layers\.1'"):
                next(found.tensors(["layers.1"]))
            given = found.tensors(["layers.0.up", "bytes"])
            next(given)
            found.close()
            with pytest.raises(CkptEngineError, match="FAILED_PRECONDITION: the reader was closed"):
                next(given)
        (tmp_path / "there").mkdir()
        for name in ("new", "there"):
            assert pull(manager, tmp_path / name, "run", 4) == ("run", 4)
            files = sorted((tmp_path / name).glob("*.safetensors"))
            assert len(files) == 3
            assert equal({tensor: each for file in files for tensor, each in load_file(file).items()}, weights)
        trainer.publish(tmp_path / "new")
        assert trainer.update_weights(version=5, min_replicas=0).root == report.root, "it can be published again"
        with pytest.raises(CkptEngineError) as old:
            Reader(manager, "run", 4)
        code, words = refusal(old)
        assert (code, "version 5 of lineage 'run'" in words) == ("NOT_FOUND", True), words


def test_a_draft_is_written_into_a_folder_of_its_own_and_can_be_published_again(
    manager: str, weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target in several files with an index, the draft in one."""
    monkeypatch.setattr(pulling, "FILE_BYTES", 3000)
    draft = {"scale": torch.tensor(0.25), "layers.0.norm": torch.randn(6)}
    with Trainer(manager, lineage="run") as trainer:
        trainer.publish(weights, draft=draft, snapshot=True)
        report = trainer.update_weights(version=1, min_replicas=0)
        with Reader(manager) as found:
            assert sorted(found.names) == sorted([*weights, "draft::layers.0.norm", "draft::scale"])
        pull(manager, tmp_path / "model")
        files = sorted((tmp_path / "model").glob("*.safetensors"))
        assert equal({tensor: each for file in files for tensor, each in load_file(file).items()}, weights)
        assert equal(load_file(tmp_path / "model" / "draft" / "model.safetensors"), draft)
        trainer.publish(tmp_path / "model", draft=tmp_path / "model" / "draft")
        assert trainer.update_weights(version=2, min_replicas=0).root == report.root
        draft["scale"] += 1
        trainer.publish(tmp_path / "model", draft=draft)
        assert trainer.update_weights(version=3, min_replicas=0).root != report.root, "the root is of both"


def test_damaged_weights_are_named_and_leave_no_directory(
    manager: str, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with Trainer(manager, lineage="run") as trainer:
        trainer.publish(weights, snapshot=True)
        trainer.update_weights(version=1, min_replicas=0)
        source = trainer._sealer._source
        index = [spec.name for spec in source.table().tensors].index("layers.0.up")  # type: ignore[union-attr]
        source._sealed[index].view(torch.uint8).view(-1)[5] ^= 1  # type: ignore[union-attr]
        with Reader(manager) as found:
            assert torch.equal(dict(found.tensors(["bytes"]))["bytes"], weights["bytes"])
            with pytest.raises(CkptEngineError) as damaged:
                list(found.tensors(["layers.0.up"]))
            code, words = refusal(damaged)
            assert (code, "layers.0.up" in words) == ("DATA_LOSS", True), words
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(CkptEngineError, match="DATA_LOSS"):
            pull(manager, tmp_path / "model")
        assert sorted(os.listdir(tmp_path)) == before


def test_where_it_cannot_be_written_is_refused_before(
    manager: str, weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path, "is not empty"),
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "a" / "b", "is not a directory"),
    ):
        with pytest.raises(CkptEngineError, match=words):
            pull(manager, path)
    with Trainer(manager, lineage="run") as trainer:
        trainer.publish(weights, snapshot=True)
        trainer.update_weights(min_replicas=0)
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(CkptEngineError, match="has 1000 left"):
            pull(manager, tmp_path / "model")


@pytest.mark.slow
def test_a_relay_is_read_when_the_trainer_is_gone(
    manager: str,
    replica: Callable[..., PlainReplica],
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both versions that it keeps, by another process."""
    monkeypatch.setenv("CKPT_ENGINE_RELAY_DIRECTORY", str(tmp_path))
    command = [sys.executable, "-m", "ckpt_engine"]
    options = ["--manager", manager, "--memory", "64MiB", "--name", "one", "--hold", "everything"]
    relay = subprocess.Popen([*command, "relay", *options])
    try:
        with Trainer(manager, lineage="run") as trainer:
            trainer.publish(weights)
            eventually(
                "the relay is there", 60, lambda: any(each.connected for each in trainer._background.status().holders)
            )
            replica("one")
            assert trainer.wait_for_replicas(1, 60) == ["one"]
            for version in (1, 2):
                weights["bytes"] += 1
                report = trainer.update_weights(version=version, prefetch="always")
                assert report.ok, report
        written = subprocess.run(
            [*command, "pull", "--manager", manager, str(tmp_path / "model"), "--lineage", "run", "--json"],
            timeout=120,
            check=False,
            capture_output=True,
            text=True,
        )
        assert written.returncode == 0, written.stdout + written.stderr
        assert '"version": 2' in written.stdout
        assert equal(load_file(tmp_path / "model" / "model.safetensors"), weights)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.setenv("CKPT_ENGINE_RELAY_DIRECTORY", str(elsewhere))  # out of reach: over the network
        with Reader(manager, "run", 1) as found:
            assert torch.equal(dict(found.tensors(["bytes"]))["bytes"], weights["bytes"] - 1)
            assert found._sources is not None
            assert not found._sources._opened, "it asks the relay for chunks"
    finally:
        relay.terminate()
        relay.wait(60)
