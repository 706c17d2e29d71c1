"""What a process is told about the transports that it has and has not."""

from __future__ import annotations

import os
import socket

from ckpt_engine.transport.host import this_host
from ckpt_engine.transport.registry import all_transports, transport_rows


def test_what_is_built_works_here_and_what_is_not_says_so() -> None:
    rows = {row.name: row for row in transport_rows()}
    assert set(rows) == {"shared_memory", "file", "cuda_ipc", "nccl", "ucx"}
    assert {name for name, row in rows.items() if row.built} == set(all_transports()) == {"shared_memory", "file"}
    for row in rows.values():
        assert row.reason
        assert row.ok == row.built
        assert row.built or row.reason.startswith("not built yet; ")


def test_every_call_gives_instances_of_its_own() -> None:
    assert all_transports()["shared_memory"] is not all_transports()["shared_memory"]


def test_the_host_is_told_by_the_kernel() -> None:
    host = this_host("10.0.0.7")
    assert host == this_host("10.0.0.7")
    assert len(host.boot_id) == 36
    assert host.pid_namespace == os.readlink("/proc/self/ns/pid")
    assert (host.name, host.address) == (socket.gethostname(), "10.0.0.7")
    assert this_host().address == ""
