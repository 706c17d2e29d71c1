"""What a cluster on Ray is made of, checked before anything is started, and what there is of it. Decides the command of
each process. It does not decide where one runs, and imports nothing of Ray."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ckpt_engine.addresses import AUTHENTICATE, check_reach, join_address
from ckpt_engine.core.arguments import checked_count
from ckpt_engine.core.names import check_pool
from ckpt_engine.core.problems import invalid
from ckpt_engine.host.modules import module_command

ProcessKind: TypeAlias = Literal["manager", "relay", "replica", "gateway"]

ProcessState: TypeAlias = Literal["placing", "running", "restarting", "leaving", "refused", "evicted"]
"""placing: Ray has not found it a place yet. restarting: it ended, or its actor did, and is started again. refused: its
options cannot be, so it is not started again. evicted: by an operator, so it is not either."""

NAMESPACE = "ckpt_engine"
"""Ray's namespace of all our actors."""

LEAVE_SECONDS = 75.0
"""Seconds until an actor that was asked to leave is ended by Ray. Longer than its process may take."""

MEMORY = "memory"
"""Ray's resource of a node's memory, in bytes."""

MOST_RESOURCE, MOST_BYTES = 1e9, 1e15
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class ProcessStatus:
    """One of a cluster's processes, as its keeper tells it."""

    name: str  # "manager", "gateway", "replica-0", "relay-" and its node
    kind: ProcessKind
    state: ProcessState
    node: str = ""  # Ray's id of the node that it is on; empty: none yet
    pid: int = 0  # of the command; 0: it does not run
    starts: int = 0  # how often this actor has started it
    reason: str = ""  # what it asks Ray for; or how it ended, and what it printed last, also when it runs again


@dataclass(frozen=True)
class RayClusterStatus:
    """What a cluster is to have, and what there is."""

    manager_address: str
    gateway_url: str | None
    replicas: int  # how many there are to be
    pool: str  # of the replicas
    processes: tuple[ProcessStatus, ...]  # by name


@dataclass(frozen=True)
class ClusterPlan:
    """What a cluster is made of: the arguments of `RayCluster`, which says what they mean."""

    name: str
    identity: str  # random: two clusters of one name, one after another, share no files
    head: str  # node id
    host: str  # the head node's address
    engine: Sequence[str]
    replicas: int
    bundle: Mapping[str, float]  # of a replica, Ray's resource to its amount
    relays: bool
    gateway: bool
    ledger: str | None
    pool: str
    insecure: bool
    environment: Mapping[str, str]
    options: Mapping[ProcessKind, Sequence[str]]

    def check(self) -> None:
        """Raises INVALID_ARGUMENT, saying which argument cannot be."""
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise invalid(f"a cluster's name is 1 to 63 letters, digits, '.', '-' and '_', not {self.name!r}")
        checked_count("replicas", self.replicas, "replicas")
        check_pool(self.pool)
        _check_words("engine", self.engine)
        for kind, each in self.options.items():
            _check_words(f"{'agent' if kind == 'replica' else kind}_options", each)
        pairs = self.environment.items() if isinstance(self.environment, Mapping) else [(None,)]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise invalid(f"environment must be a dict of str to str, not {self.environment!r}")
        for resource, count in self.bundle.items():
            most = MOST_BYTES if resource == MEMORY else MOST_RESOURCE
            if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count < most:
                raise invalid(
                    f"{resource}: a replica cannot take {count!r} of it: give a number from 0, below {most:g}"
                )
        if (gpus := self.bundle["GPU"]) > 1 and gpus != int(gpus):
            raise invalid(f"num_gpus={gpus}: Ray gives whole GPUs, or a part of one")
        self.check_replicas(self.replicas)
        if self.ledger is not None and not Path(self.ledger).is_absolute():
            raise invalid(f"ledger {self.ledger!r} must be an absolute path: it lies on Ray's head node")
        words = {each.partition("=")[0] for each in self.options["manager"]}
        check_reach(
            self.host,
            authenticates=bool({"--tokens", "--client-authority"} & words),
            insecure=self.insecure or "--insecure" in words,
            remedy=f"manager_options with {AUTHENTICATE}, or insecure=True to let everybody",
        )

    def check_replicas(self, count: int) -> None:
        """Raises INVALID_ARGUMENT if there cannot be so many."""
        checked_count("replicas", count, "replicas")
        if count and not (self.engine or self.options["replica"]):
            raise invalid(
                f"replicas={count} and no engine: give the command of a server, as behind -- of `ckpt-engine agent`"
            )
        if count and not self.demand:
            raise invalid("a replica takes nothing of its node: give num_gpus, num_cpus or resources above 0")

    @property
    def demand(self) -> dict[str, float]:
        """What a replica takes of its node, without what is 0."""
        return {resource: count for resource, count in self.bundle.items() if count}

    @property
    def directory(self) -> Path:
        """The directory of what our processes keep on a node: logs, and on the head node ports, the wish and perhaps
        the ledger."""
        return Path(tempfile.gettempdir()) / f"ckpt-engine-ray-{self.name}-{self.identity}"

    def command(self, status: ProcessStatus, ports: Mapping[str, int], host: str) -> list[str]:
        """What runs one process. host: the address of the node that it is on. Options of the user come last, so they
        count where one of ours says the same."""
        manager = join_address(self.host, ports["manager"])
        insecure = ["--insecure"] if self.insecure else []
        match status.kind:
            case "manager":
                ledger = self.ledger or str(self.directory / "ledger.sqlite3")
                arguments = ["manager", "--listen", manager, "--http", "127.0.0.1:0", "--ledger", ledger, *insecure]
            case "relay":
                listen = join_address(host, 0)
                arguments = ["relay", "--manager", manager, "--name", status.name, "--listen", listen, *insecure]
            case "gateway":
                listen = join_address(self.host, ports["gateway"])
                arguments = ["gateway", "--manager", manager, "--listen", listen, "--pool", self.pool, *insecure]
            case "replica":
                arguments = [
                    "agent",
                    "--manager",
                    manager,
                    "--name",
                    status.name,
                    "--advertise",
                    host,
                    "--pool",
                    self.pool,
                ]
        behind = ["--", *self.engine] if status.kind == "replica" and self.engine else []
        return module_command("ckpt_engine", *arguments, *self.options[status.kind], *behind)


def _check_words(argument: str, words: object) -> None:
    """Raises INVALID_ARGUMENT unless it is a list of str."""
    if isinstance(words, str):
        raise invalid(f"{argument} is a list of words, such as {shlex.split(words)}, not a text")
    if not isinstance(words, Sequence) or not all(isinstance(each, str) for each in words):
        raise invalid(f"{argument} is a list of words, each a str, not {words!r}")
