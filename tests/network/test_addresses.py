"""Where servers listen and members dial: names with several addresses, IPv6, and what a host sees of its callers."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckpt_engine.addresses import bound_socket, listen_on
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.command import completed
from tests.cluster import eventually
from tests.line_process import ROOT
from tests.network.hosts import hosts
from tests.network.names import Names, first_process, readdress

PORT = 50051


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError:
        return False
    return True


def test_every_address_means_those_of_both_families() -> None:
    with listen_on("[::]:0") as listener:
        port = listener.getsockname()[1]
        assert [answers(host, port) for host in ("127.0.0.1", "::1")] == [True, True]
    with listen_on("0.0.0.0:0") as listener:
        port = listener.getsockname()[1]
        assert [answers(host, port) for host in ("127.0.0.1", "::1")] == [True, False]


def test_a_caller_over_ipv4_is_local_where_a_server_listens_everywhere() -> None:
    """The gate tells its directory to local callers only, and an agent that attaches is one."""
    with listen_on("[::]:0") as listener:
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=10):
            connection, peer = listener.accept()
            connection.close()
    assert peer[0] == "::ffff:127.0.0.1"
    assert is_loopback(peer[0])
    assert not is_loopback("::ffff:10.0.0.1")
    assert not is_loopback("::")


def test_an_engine_that_listens_at_ipv6_is_driven_over_it() -> None:
    for host, url in (("::", "http://[::1]:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")):
        assert completed({"--host": (host,)}, "--model", "", 8000)[1] == url


def test_an_address_that_is_not_here_is_refused() -> None:
    for address, words in (
        ("192.0.2.7:0", "Cannot assign"),
        ("[2001:db8::7]:0", "Cannot assign"),
        ("no-such.invalid:0", ""),
    ):
        with pytest.raises(CkptEngineError, match=f"cannot listen on {re.escape(address)}: {words}"):
            listen_on(address)


def test_a_port_that_is_taken_is_taken_for_both_families() -> None:
    with listen_on("[::]:0") as listener:
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", listener.getsockname()[1])


DIALLER = """
import asyncio, sys, grpc
from ckpt_engine.channel import ManagerStub, open_channel
from ckpt_engine.v1 import manager_pb2

async def main():
    stub = ManagerStub(open_channel(sys.argv[1]))
    while True:
        try:
            await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=5)
            print("answered", flush=True)
        except grpc.RpcError as error:
            print(error.code().name, flush=True)
        await asyncio.sleep(0.5)

asyncio.run(main())
"""


LEADER = """
import asyncio, sys
from pathlib import Path
from ckpt_engine.agent.leading import Followers
from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.core.deadlines import Deadlines

async def main():
    settings = NodeSettings(2, 0, sys.argv[1], Path(sys.argv[2]))
    say = lambda line: print(line, flush=True)
    followers = Followers(settings, "small", ["file"], None, say, Deadlines().changed("heartbeat=0.2"))
    await followers.open(300.0)
    print("listening", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""

FOLLOWER = """
import asyncio, os, sys
from pathlib import Path
from ckpt_engine.agent.link import FollowerLink
from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.v1 import worker_pb2

async def main():
    settings, session, sequence = NodeSettings(2, 1, sys.argv[1], Path(sys.argv[2])), os.urandom(16), 0
    say = lambda command: print("session", command.session_id.hex(), flush=True)
    link = FollowerLink(settings.endpoint, settings.keys(), say, 2.0)
    link.open()
    while True:
        sequence += 1
        told = {"node_rank": 1, "nodes": 2, "kind": "small", "transports": ["file"], "digest_format": DIGEST_FORMAT}
        link.send(worker_pb2.NodeMessage(session_id=session, sequence=sequence, **told))
        await asyncio.sleep(0.3)

asyncio.run(main())
"""


class Named:
    """Hosts with IPv6 addresses only, a DNS server on the first, and programs on them."""

    def __init__(self, path: Path, count: int, stack: ExitStack) -> None:
        self.path, self._stack = path, stack
        self.hosts = stack.enter_context(hosts(count))
        for number, host in enumerate(self.hosts, 1):
            readdress(host, [f"fd77::{number}"])
        self.names = Names(path, self.hosts[0], "fd77::1", stack)
        self.inside = [first_process(host, self.names, stack) for host in self.hosts]

    def start(self, name: str, host: int, *words: str) -> None:
        """A program of Python; it ends with the test."""
        with (self.path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.inside[host], "env", "-C", str(ROOT), sys.executable, *words], stdout=log, stderr=log
            )
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.kill)

    def said(self, name: str) -> str:
        return (self.path / f"{name}.log").read_text()

    def until(self, name: str, word: str) -> None:
        """Waits until a program has said it."""
        try:
            eventually(f"{name} says {word!r}", 100.0, lambda: word in self.said(name))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said(name)[-2000:]}") from None


@pytest.mark.slow
def test_a_name_is_looked_up_again_while_its_manager_is_away(tmp_path: Path) -> None:
    """By one channel, as a member has it; a manager that listens at a name is found there."""
    with ExitStack() as stack:
        world = Named(tmp_path, 2, stack)
        world.names.means("manager.test", "fd77::dead")
        world.names.means("second.test", "fd77::2")
        world.start("member", 0, "-c", DIALLER, f"manager.test:{PORT}")
        # gRPC alone would ask every 30 s.
        asked = "[AAAA] manager.test"
        eventually("the name is looked up again", 100.0, lambda: world.said("dnsmasq").count(asked) > 6)
        ledger = str(tmp_path / "ledger.sqlite3")
        options = ("--listen", f"second.test:{PORT}", "--http", "second.test:8080", "--insecure", "--ledger", ledger)
        world.start("manager", 1, "-m", "ckpt_engine", "manager", *options)
        world.names.means("manager.test", "fd77::2")
        world.until("member", "answered")
        get = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).status)"
        world.start("http", 0, "-c", get, "http://second.test:8080/healthz")
        world.until("http", "200\n")


@pytest.mark.slow
def test_the_agents_of_a_server_find_a_leader_that_moves(tmp_path: Path) -> None:
    """Its name is unknown at first, then another host's; later its host is gone without a word."""
    (tmp_path / "token").write_text("t" * 64)
    arguments = ("lead.test:7100", str(tmp_path / "token"))
    with ExitStack() as stack:
        world = Named(tmp_path, 3, stack)
        world.start("follower", 0, "-c", FOLLOWER, *arguments)
        world.start("first", 1, "-c", LEADER, *arguments)
        world.until("first", "cannot be resolved on node 0")
        world.names.means("lead.test", "fd77::3")
        world.until("first", "means fd77::3, which is not an address of this host")
        assert "listening" not in world.said("first")
        world.names.means("lead.test", "fd77::2")
        world.until("first", "listening")
        world.until("follower", "session")
        before = set(world.said("follower").split("session "))
        world.hosts[1].cut()
        world.names.means("lead.test", "fd77::3")
        world.start("second", 2, "-c", LEADER, *arguments)
        world.until("second", "listening")
        # TCP alone would hold on to the first for a quarter of an hour.
        eventually("the second is heard", 100.0, lambda: set(world.said("follower").split("session ")) - before)
