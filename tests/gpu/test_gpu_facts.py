"""What processes tell of their GPUs, what the doctor finds, and what the rule makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from ckpt_engine.core.reach import Distance
from ckpt_engine.core.topology import choose_transport
from ckpt_engine.cuda.driver import driver
from ckpt_engine.host import nvml
from ckpt_engine.host.facts import this_host
from ckpt_engine.host.gpus import used_gpus
from ckpt_engine.v1.weights_pb2 import GpuReach, Host

TELL = """
import sys, torch
torch.zeros(1, device="cuda")
from ckpt_engine.host.facts import this_host
sys.stdout.buffer.write(this_host().SerializeToString())
"""


def host_of_a_process(repository: Path, visible: str) -> Host:
    done = subprocess.run(
        [sys.executable, "-c", TELL],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
        cwd=repository,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return Host.FromString(done.stdout)


def test_the_current_gpu_is_told_by_its_uuid() -> None:
    torch.zeros(1, device="cuda:0")
    gpus = used_gpus()
    assert driver().uuid(torch.cuda.current_device()) in [gpu.uuid for gpu in gpus]
    for gpu in gpus:
        assert len(gpu.uuid) == 16
        assert gpu.name == torch.cuda.get_device_name()
        assert gpu.pci, "the management library tells the bus"
    assert [gpu.uuid for gpu in this_host().gpus] == [gpu.uuid for gpu in gpus]


def test_processes_on_one_gpu_find_each_other(repository: Path) -> None:
    # Not this process: tests before may have left it memory on other GPUs, which it then tells of, too.
    one, other = (host_of_a_process(repository, "0") for _ in range(2))
    choice = choose_transport(one, "cuda_ipc", other, ("cuda_ipc",))
    assert choice.distance == Distance.SAME_GPU
    assert "share GPU" in choice.reason


def test_gpus_that_do_not_see_each_other_know_their_link(
    repository: Path, two_gpus: tuple[torch.device, torch.device]
) -> None:
    one, two = (host_of_a_process(repository, visible) for visible in "01")
    assert [len(host.gpus) for host in (one, two)] == [1, 1]
    assert one.gpus[0].uuid != two.gpus[0].uuid
    link = nvml.link(one.gpus[0].uuid, two.gpus[0].uuid)
    assert (link != GpuReach.LINK_NONE) == torch.cuda.can_device_access_peer(0, 1)
    choice = choose_transport(one, "cuda_ipc", two, ("cuda_ipc",))
    assert choice.distance in (Distance.NVLINK, Distance.PCIE)
    print("\n" + choice.reason)


def test_the_doctor_lends_and_digests_gpu_memory(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_engine", "doctor", "--json"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    rows = {row["name"]: row for row in json.loads(done.stdout)["checks"] if row["group"] in ("GPU", "transports")}
    for row in rows.values():
        print(row["name"], row["result"], row["detail"])
    for name in ("cuda:0", "cuda:0, live parameters lent", "cuda:0, copies lent", "cuda:0, digests", "cuda_ipc"):
        assert rows[name]["result"] == "ok", rows[name]
