"""What a process is told about the transports that it has and has not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from ckpt_engine.cuda.driver import library_problem
from ckpt_engine.host.facts import this_host
from ckpt_engine.transport.on_host import worker_transports
from ckpt_engine.transport.registry import all_transports, transport_rows


def test_what_works_here_can_be_had_and_collectives_by_nobody_alone() -> None:
    rows = {row.name: row for row in transport_rows()}
    assert set(rows) == {"archive", "shared_memory", "file", "relay_memory", "cuda_ipc", "tcp", "nccl", "ucx"}
    assert {name for name, row in rows.items() if row.ok} == {*all_transports(), "archive", "tcp", "nccl"}
    assert "not switched on" in rows["ucx"].reason or "NIXL is not installed" in rows["ucx"].reason
    assert set(all_transports()) - {"cuda_ipc", "relay_memory"} == {"shared_memory", "file"}
    assert all(row.reason for row in rows.values())


def test_looking_for_gpus_starts_cuda_in_no_process() -> None:
    """Context and descriptors of a GPU would come with it, and a process that forks later could not use one."""
    looked = (
        "import torch; from ckpt_engine.transport.registry import all_transports, transport_rows\n"
        "all_transports(), transport_rows()\n"
        "import os; print([each for each in os.listdir('/proc/self/fd') if 'nvidia' in (os.readlink('/proc/self/fd/' "
        "+ each) if os.path.lexists('/proc/self/fd/' + each) else '')], torch.cuda.is_initialized())"
    )
    found = subprocess.run([sys.executable, "-c", looked], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["[]", "False"]


def test_every_call_gives_instances_of_its_own() -> None:
    assert all_transports()["shared_memory"] is not all_transports()["shared_memory"]


def test_the_host_is_told_by_the_kernel() -> None:
    host = this_host("10.0.0.7")
    assert host == this_host("10.0.0.7")
    assert len(host.boot_id) == 36
    assert host.pid_namespace == os.readlink("/proc/self/ns/pid")
    assert (host.name, host.address) == (socket.gethostname(), "10.0.0.7")
    assert this_host().address == ""


def test_a_user_may_allow_some_transports_only() -> None:
    assert {"shared_memory", "file"} <= set(worker_transports())
    assert ("cuda_ipc" in worker_transports()) == (library_problem() == "")
    assert worker_transports(["file"]) == ("file",)
    with pytest.raises(ValueError, match="no transport 'pigeon'; there are cuda_ipc, relay_memory, shared_memory, f"):
        worker_transports(["file", "pigeon"])


@pytest.mark.skipif(not library_problem(), reason="an NVIDIA driver is installed here")
def test_a_transport_that_cannot_work_is_not_allowed_alone() -> None:
    with pytest.raises(ValueError, match="cuda_ipc does not work on this host: no NVIDIA driver can be used"):
        worker_transports(["cuda_ipc"])
