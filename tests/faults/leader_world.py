"""The world of faults with two managers that share a ledger in PostgreSQL: one leads, the other stands by.

Each member has a proxy to each manager, and each manager one to the database, so that the one that leads can be cut off
from its members, from the database, or from both.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

import grpc

from ckpt_engine.channel import ManagerStub
from ckpt_engine.v1 import manager_pb2
from tests import postgresql
from tests.faults.members import Member
from tests.faults.prober import Expected
from tests.faults.proxy import Proxy
from tests.faults.world import QUICK, World
from tests.ports import free_address
from tests.shared_ledger import NOT_SERVING, SERVING, health_of

MANAGERS = range(2)

SECONDS = 120.0

QUICK_TERM = f"{QUICK} term=4"


class LeaderWorld(World):
    """Use as a context manager. Skips the test where PostgreSQL's server is not installed."""

    def __init__(self, path: Path, model: Path, weights: Path, expected: Expected) -> None:
        self.addresses = [free_address() for _ in MANAGERS]
        self._made = ExitStack()
        self._second_proxies: dict[Proxy, Proxy] = {}  # a member's proxy to the second manager, by that to the first
        with self._made:
            self.server = self._made.enter_context(postgresql.running())
            self.ledger_address = self.server.new_database()
            self.databases: list[Proxy] = []
            super().__init__(path, model, weights, expected, {"one": 1, "two": 1}, deadlines=QUICK_TERM)
            self._made.callback(super().__exit__)
            self._made = self._made.pop_all()

    def __exit__(self, *_: object) -> None:
        self._made.close()

    # -- processes

    @property
    def manager(self) -> Member:
        return self.managers[next(filter(self.leads, MANAGERS), 0)]

    def leader(self) -> int:
        """The number of the manager that leads. Waits for one."""
        (found,) = self.until("a manager leads", SECONDS, lambda: [*filter(self.leads, MANAGERS)][:1])
        return int(found)

    def leads(self, manager: int) -> bool:
        return health_of(self.addresses[manager]) == SERVING

    def stands_by(self, manager: int) -> bool:
        return health_of(self.addresses[manager]) == NOT_SERVING

    def members_of(self, manager: int) -> list[Proxy]:
        """The proxies between it and its members."""
        return [*(self._second_proxies.values() if manager else self._second_proxies)]

    def restart_manager(self, cluster: str = "") -> None:
        """Both of them."""
        for each in self.managers:
            each.end()
        self._supervise_managers()
        self.leader()

    def _supervise_managers(self) -> None:
        for number, member in enumerate(self.managers):
            if not member.alive:
                self.managers[number] = self._start_manager(number)

    def _start_managers(self, cluster: str = "") -> list[Member]:
        for _ in MANAGERS:
            self.databases.append(Proxy(self.loop, ("127.0.0.1", self.server.port)))
            self._made.callback(self.databases[-1].close)
        return [self._start_manager(number) for number in MANAGERS]

    def _start_manager(self, number: int) -> Member:
        command = ["-m", "ckpt_engine", "manager", "--listen", self.addresses[number], "--http", "127.0.0.1:0"]
        told = {**self._environment, "CKPT_ENGINE_MANAGER_LEDGER": self.ledger_of(number)}
        return Member(command, self.path / f"manager-{number}.log", told)

    def ledger_of(self, manager: int) -> str:
        """The database's address, as this manager is told it."""
        return self.ledger_address.replace(f":{self.server.port}/", f":{self.databases[manager].port}/")

    # -- what is seen

    def status(self) -> manager_pb2.GetStatusResponse | None:
        """Over a channel of its own: gRPC's threads behind one that stays open are in the way of those that start
        processes."""
        for number in filter(self.leads, MANAGERS):
            with grpc.insecure_channel(self.addresses[number]) as channel, suppress(grpc.RpcError):
                found: manager_pb2.GetStatusResponse = ManagerStub(channel).GetStatus(
                    manager_pb2.GetStatusRequest(), timeout=5
                )
                return found
        return None

    def _complete(self) -> bool:
        return all(self.leads(each) or self.stands_by(each) for each in MANAGERS) and super()._complete()

    # -- what differs from one manager

    def _proxy(self) -> Proxy:
        first, second = (Proxy(self.loop, _place(address)) for address in self.addresses)
        self._second_proxies[first] = second
        self._made.callback(second.close)
        return first

    def _dialled(self, proxy: Proxy) -> str:
        return f"{proxy.address},{self._second_proxies[proxy].address}"


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.partition(":")
    return host, int(port)
