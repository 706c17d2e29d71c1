"""A transport that ckpt-engine has never heard of, and updates over it: a file is all that it takes (tests/toys)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_replica import PlainReplica

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.core import transports
from ckpt_engine.core.problems import unavailable
from ckpt_engine.core.reach import by_network
from ckpt_engine.core.topology import choose_transport
from ckpt_engine.core.transports import (
    HOST_MEMORY,
    TransportKind,
    chunk_kinds,
    register_transport,
    unregister_transport,
)
from ckpt_engine.source.open import open_source
from ckpt_engine.transport.base import Availability, Memory
from ckpt_engine.transport.on_host import worker_transports
from ckpt_engine.transport.registry import all_transports, transport_rows
from ckpt_engine.v1.weights_pb2 import Host, Region
from tests.cluster import eventually
from tests.distributions import distribution
from tests.toys.borrowed import BORROWED, Borrowed, BorrowedLender, near

# ------------------------------------------------------------------------------------------------------------ updates


@pytest.fixture(autouse=True)
def kinds() -> Iterator[None]:
    register_transport(BORROWED)
    yield
    unregister_transport("borrowed")


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(64, 48).to(torch.bfloat16), "b.bias": torch.randn(5), "c": torch.randn(7, 3, 2)}


def test_an_update_over_a_transport_that_only_this_file_knows(
    manager: str, replica: Callable[..., PlainReplica]
) -> None:
    reader = replica()
    held = weights()
    with Trainer(manager, lineage="made up") as trainer:
        trainer.publish(held, transport="borrowed")
        there = trainer._background.status
        eventually("the replica is there", 60, lambda: any(each.connected for each in there().replicas))
        for _ in range(2):
            for tensor in held.values():
                tensor.mul_(2)
            report = trainer.update_weights()
            assert report.ok
            assert [edge.transport for edge in report.replicas[0].message.edges] == ["borrowed"]
            assert "both are made up" in report.replicas[0].message.edges[0].reason
            assert all(torch.equal(reader.weights[key], tensor) for key, tensor in held.items())


def test_what_lends_unasked_is_offered_beside_the_others_and_the_nearest_is_taken(
    manager: str, replica: Callable[..., PlainReplica]
) -> None:
    unregister_transport("borrowed")
    register_transport(TransportKind("borrowed", near, Borrowed, BorrowedLender, frozenset({HOST_MEMORY})))
    replica()
    with Trainer(manager, lineage="made up") as trainer:
        trainer.publish(weights())
        source = trainer._sealer._source
        assert source is not None
        (region,) = source.table().regions
        assert [offer.transport for offer in region.offers] == ["shared_memory", "borrowed"]
        report = trainer.update_weights()
        assert [edge.transport for edge in report.replicas[0].message.edges] == ["borrowed"]


def test_a_model_whose_memory_cannot_be_lent_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: BorrowedLender, id: int, memory: Memory) -> Region:
        raise unavailable("nobody borrows today")

    monkeypatch.setattr(BorrowedLender, "offer", refuse)
    model = torch.nn.Linear(3, 3)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(CkptEngineError, match=r"host memory cannot be lent over transport='borrowed': nobody borrows"):
        open_source(model, transport="borrowed", move=True)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_everybody_who_lists_transports_lists_them() -> None:
    assert "borrowed" in {row.name for row in transport_rows() if row.ok}
    assert "borrowed" in worker_transports()
    assert worker_transports(["borrowed"]) == ("borrowed",)
    assert isinstance(all_transports()["borrowed"], Borrowed)
    with pytest.raises(ValueError, match="already"):
        register_transport(BORROWED)


def test_what_is_between_relays_is_loaded_by_relays_only() -> None:
    found = Availability(True, "there are sockets")
    kind = TransportKind("between", by_network, on_host=lambda: found, chunks="no:such", asker="no:such")
    register_transport(kind)
    try:
        assert "between" not in all_transports()
        assert "between" not in worker_transports()
        with pytest.raises(ValueError, match="between relays; workers of a host read its relay"):
            worker_transports(["between"])
        assert "between" in [kind.name for kind in chunk_kinds()]
        (row,) = [row for row in transport_rows() if row.name == "between"]
        assert (row.ok, row.reason) == (True, "between relays: there are sockets")
        with pytest.raises(CkptEngineError, match="none that tensors can be published over"):
            open_source(weights(), transport="between")
        source = open_source(weights())
        (region,) = source.table().regions
        assert "between" not in [offer.transport for offer in region.offers]
        source.close()
        near, far = Host(name="h1", address="10.0.0.1"), Host(name="h2")
        with pytest.raises(CkptEngineError, match="over between, which no worker reads; start a relay on host h2"):
            choose_transport(near, "between", far, worker_transports())
    finally:
        unregister_transport("between")


def test_a_transport_that_cannot_be_loaded_stops_nobody() -> None:
    register_transport(TransportKind("broken", near, "ckpt_engine.no_such_module:Nothing"))
    try:
        assert "broken" not in all_transports()
        (row,) = [row for row in transport_rows() if row.name == "broken"]
        assert not row.ok
        assert "no_such_module" in row.reason
    finally:
        unregister_transport("broken")


# --------------------------------------------------------------------------------------------- as a package brings it

HERE = Path(__file__)


def installed(path: Path) -> dict[str, str]:
    """It, and something that is not a transport, as a distribution below `path`; the environment to find them in."""
    points = {"borrowed": "borrowed:BORROWED", "nonsense": f"{HERE.stem}:HERE"}
    distribution(path, "made-up", {transports.ENTRY_POINTS: points})
    folders = (path, HERE.parent, HERE.parents[1] / "toys", os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def test_entry_points_are_found_by_every_process_and_nonsense_is_left_out(tmp_path: Path) -> None:
    command = "from ckpt_engine.core.transports import transport_kinds; print(*transport_kinds())"
    found = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, **installed(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    ours = ["cuda_ipc", "relay_memory", "shared_memory", "file", "archive", "ucx", "tcp", "nccl"]
    assert found.stdout.split() == [*ours, "borrowed"]
    assert "nonsense" in found.stderr


@pytest.mark.slow
def test_real_processes_update_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cluster import outcomes, running_cluster
    from tests.tiny_model import make_tiny_qwen3

    for name, value in installed(tmp_path / "installed").items():
        monkeypatch.setenv(name, value)
    bare = make_model(make_tiny_qwen3, tmp_path)
    model = make_tiny_qwen3(tmp_path / "model", 3, weights=False)
    with running_cluster(tmp_path / "cluster") as cluster:
        cluster.replica("two", "reference", bare, "--tensor-parallel", "2").registered()
        with Trainer(cluster.address, lineage="borrowed") as trainer:
            trainer.publish(model, transport="borrowed")
            for _ in range(2):
                report = trainer.update_weights()
                assert outcomes(report) == {"two": "new_serving"}
                assert report.verified
                assert {use.transport for use in report.replicas[0].transports} == {"borrowed"}


def make_model(make: Any, path: Path) -> Path:
    """A model's directory without weights."""
    make(path / "bare", weights=False)
    return path / "bare"
