"""`status` says which GPUs trainer ranks and workers are on, as their hellos told them to the manager."""

from __future__ import annotations

import base64
import io

from rich.console import Console

from ckpt_engine.commands import status as status_command
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.message_json import as_dict
from ckpt_engine.machines.events import Message, Peer
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.report import gpu_uuid
from ckpt_engine.v1 import manager_pb2, weights_pb2

TRAINERS, WORKERS, OTHERS = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
NAMED = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def host(*uuids: bytes) -> weights_pb2.Host:
    reach = [weights_pb2.GpuReach(uuid=OTHERS, link=weights_pb2.GpuReach.LINK_NVLINK)]
    gpus = [weights_pb2.Gpu(uuid=uuid, name="NVIDIA H200", pci="0000:19:00.0", reach=reach) for uuid in uuids]
    return weights_pb2.Host(boot_id="b", name="node-a", gpus=gpus)


def told() -> manager_pb2.GetStatusResponse:
    """Of a rank with a GPU, and a replica of which one worker was started anew since it told its GPU."""
    machine = ManagerMachine("cluster", 0)
    rank = manager_pb2.TrainerHello(
        digest_format=DIGEST_FORMAT, lineage="run", rank=0, world_size=1, session_id="t", host=host(TRAINERS)
    )
    replica = manager_pb2.ReplicaHello(
        digest_format=DIGEST_FORMAT,
        name="rollout",
        session_id="r",
        agent_epoch=1,
        mode=manager_pb2.MODE_STANDALONE,
        host=host(),
        engine=manager_pb2.Engine(kind="reference"),
        workers=[manager_pb2.WorkerStatus(rank=number, boot_id=b"%d" % number) for number in range(2)],
        prepared=[
            manager_pb2.PreparedWorker(rank=0, boot_id=b"0", host=host(WORKERS)),
            manager_pb2.PreparedWorker(rank=1, boot_id=b"before", host=host(OTHERS)),
        ],
    )
    machine.handle(Message(Peer("1"), rank), 0.0)
    machine.handle(Message(Peer("2"), replica), 0.0)
    return machine.status()


def test_the_status_names_the_gpus_of_ranks_and_workers() -> None:
    found = as_dict(told())
    (gpu,) = found["trainers"][0]["gpus"]
    assert (gpu["name"], gpu["pci"], gpu["reach"]) == ("NVIDIA H200", "0000:19:00.0", [])
    assert gpu_uuid(base64.b64decode(gpu["uuid"])) == NAMED
    (worker,) = found["replicas"][0]["gpus"]  # the other one is another process by now
    assert worker["rank"] == 0
    assert [base64.b64decode(gpu["uuid"]) for gpu in worker["gpus"]] == [WORKERS]


def test_a_wide_terminal_shows_them_and_a_narrow_one_has_no_room() -> None:
    for wide in (True, False):
        console = Console(width=300 if wide else 80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(status_command.as_tables("127.0.0.1:50051", told(), wide))
        text = console.export_text()
        assert ("GPU-00010203 (NVIDIA H200)" in text) == wide
        assert ("GPU-10111213 (NVIDIA H200)" in text) == wide
        assert "GPU-20212223" not in text


def test_what_a_member_says_of_itself_does_not_reach_the_terminal_as_it_is() -> None:
    """A terminal obeys escape sequences: they would write over other rows."""
    answer = told()
    answer.replicas[0].engine.version = "1\x1b[2J\x07"
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(status_command.as_tables("127.0.0.1:50051", answer))
    shown = console.export_text()
    assert "\x1b" not in shown
    assert "1\\x1b[2J\\x07" in shown
