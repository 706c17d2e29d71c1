"""A worker whose driver does not map the GPU memory that it is offered takes another way, and says why.

The driver's library is a fake: that a driver refuses memory which a probe in another process could map cannot be
provoked, and there need be no GPU here. It answers one call with an error code, as the driver would, and every other
one with success; and torch says that it uses a GPU while the worker opens its plan. All else is real: the lease, the
descriptors, the shared memory that the worker then reads, the report.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine.commands.status import _plain as plain
from ckpt_engine.commands.status import as_tables
from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.cuda.driver import IPC_HANDLE_BYTES, Driver
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.host.processes import process_start_time
from ckpt_engine.install.installer import Installer
from ckpt_engine.transport.cuda_ipc import reader
from ckpt_engine.transport.cuda_ipc.lease import LeaseOffice
from ckpt_engine.transport.cuda_ipc.memory import LEGACY, PIECES, Imported, UnmappableError
from ckpt_engine.transport.cuda_ipc.reader import CudaIpcTransport
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from ckpt_engine.v1.weights_pb2 import CudaIpcLocator
from tests.install.install_models import TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint, OneWorker

WORDS = b"peer access is not supported between these two devices"


class RefusingLibrary:
    """libcuda.so.1 as far as a reader calls it. refuses: the call that it answers with CUresult 217."""

    def __init__(self, refuses: str) -> None:
        self.refuses = refuses
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls[name] += 1
            if name == "cuGetErrorString":
                arguments[1]._obj.value = WORDS  # type: ignore[attr-defined]
            return 217 if name == self.refuses else 0

        return call


@pytest.fixture
def office() -> Iterator[LeaseOffice]:
    """Of an owner whose memory is in two pieces; their descriptors are of /dev/null."""
    made = LeaseOffice(lambda _, first: [os.open("/dev/null", os.O_RDONLY) for _ in range(2 - first)])
    yield made
    made.withdraw(10.0)


def gpu_region(office: LeaseOffice, kind: CudaIpcLocator.Kind, id: int, size: int) -> weights_pb2.Region:
    """What an owner, this process, offers of GPU memory."""
    locator = CudaIpcLocator(
        kind=kind,
        pointer=1 << 40,
        gpu_uuid=bytes(range(16)),
        pid=os.getpid(),
        started=process_start_time(os.getpid()),
        lease=office.name,
    )
    for number in range(1 if kind == LEGACY else 2):
        part = size if kind == LEGACY else (64, size - 64)[number]
        locator.parts.add(size=part, handle=bytes([id]) * IPC_HANDLE_BYTES, generation=7)
    serialized = locator.SerializeToString(deterministic=True)
    return weights_pb2.Region(id=id, transport="cuda_ipc", size=size, locator=serialized)


REFUSALS = [
    (LEGACY, "cuIpcOpenMemHandle_v2"),
    (PIECES, "cuMemImportFromShareableHandle"),
    (PIECES, "cuMemMap"),
    (PIECES, "cuMemSetAccess"),
]


@pytest.mark.parametrize(("kind", "refuses"), REFUSALS, ids=[name for _, name in REFUSALS])
def test_memory_that_the_driver_does_not_map_is_read_another_way(
    kind: CudaIpcLocator.Kind, refuses: str, office: LeaseOffice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = RefusingLibrary(refuses)
    driver = Driver(library)
    checkpoint, model = Checkpoint(TensorParallel().checkpoint(1)), TensorParallel()
    worker = OneWorker(ModuleTarget(model), tmp_path)
    transports = {"cuda_ipc": CudaIpcTransport(), "shared_memory": SharedMemoryTransport()}
    worker.installer = Installer(worker.target, worker.slot, transports)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    plan = weights_pb2.WorkerPlan.FromString(order.plan)
    source = plan.sources[0]
    source.others.add(transport="shared_memory", reason=source.reason, regions=source.regions)
    source.transport, source.reason = "cuda_ipc", "GPU memory of this host"
    source.regions[0].CopyFrom(gpu_region(office, kind, source.regions[0].id, source.regions[0].size))
    order.plan = canonical(plan)

    with monkeypatch.context() as patched:
        patched.setattr(reader, "driver", lambda: driver)
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "current_device", lambda: 0)
        ready = worker.installer.ready(worker_pb2.ReadyOrder(fence=order.fence, plan=order.plan, deadline_seconds=60.0))
    assert not ready.HasField("problem"), ready.problem.message
    (told,) = ready.unopened
    assert (told.worker_rank, told.transport, told.source) == (0, "cuda_ipc", "rank 0")
    assert f"{refuses}: {WORDS.decode()} (CUresult 217)" in told.reason
    assert "its GPU may be out of reach of this worker's" in told.reason
    assert not transports["cuda_ipc"].mappings
    calls = library.calls
    assert calls["cuCtxPushCurrent_v2"] == calls["cuCtxPopCurrent_v2"]
    assert calls["cuMemAddressReserve"] == calls["cuMemAddressFree"]
    assert (
        calls["cuMemImportFromShareableHandle"] - (refuses == "cuMemImportFromShareableHandle")
        == (calls["cuMemRelease"])
    ), "no handle is kept"
    assert calls["cuMemMap"] - (refuses == "cuMemMap") == calls["cuMemUnmap"]

    installed = worker.installer.install(order)
    assert not installed.report.HasField("problem"), installed.report.problem.message
    assert {edge.transport for edge in installed.edges} == {"shared_memory"}
    assert any("it could not open cuda_ipc: GPU memory region" in edge.reason for edge in installed.edges)
    like = TensorParallel()
    like.load_weights(checkpoint.weights.items())
    assert_same(state(model), state(like))

    replica = manager_pb2.ReplicaStatus(name="one", connected=True, serving=True, unopened=[told])
    shown = plain(as_tables("", manager_pb2.GetStatusResponse(replicas=[replica])))
    assert "one: worker 0 could not open rank 0 over cuda_ipc: GPU memory region" in " ".join(shown.split())
    worker.installer.close()
    checkpoint.close()


@pytest.mark.parametrize("gone", [False, True], ids=["its owner is there", "its owner is gone"])
def test_an_owner_that_is_gone_is_not_a_driver_that_refuses(gone: bool, office: LeaseOffice) -> None:
    region = gpu_region(office, LEGACY, 1, 128)
    if gone:
        locator = CudaIpcLocator.FromString(region.locator)
        locator.started += 1  # another process has its number by now
        region.locator = locator.SerializeToString()
    with pytest.raises(CkptEngineError) as raised:
        Imported(Driver(RefusingLibrary("cuIpcOpenMemHandle_v2")), 0, region)
    assert raised.value.problem.code == weights_pb2.Problem.CODE_UNAVAILABLE
    assert isinstance(raised.value, UnmappableError) == (not gone)
