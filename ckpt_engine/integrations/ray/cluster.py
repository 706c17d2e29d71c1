"""RayCluster: what a program calls to have a cluster, to change it and to end it. Decides what a call waits for, and
how long; what a call asks for, the supervisor does."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import httpx
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ckpt_engine.client import Client
from ckpt_engine.core.arguments import checked_flag
from ckpt_engine.core.deadlines import check_seconds
from ckpt_engine.core.problems import CkptEngineError, deadline, invalid, not_found, precondition, unavailable
from ckpt_engine.integrations.ray.plan import LEAVE_SECONDS, NAMESPACE, ClusterPlan, ProcessStatus, RayClusterStatus
from ckpt_engine.integrations.ray.supervisor import Supervisor, first_line
from ckpt_engine.replica_wait import ReplicaWait

HEAD = "node:__internal_head__"
"""The resource that Ray gives to its head node."""

POLL_SECONDS = 0.25  # between two looks of a call that waits
MOST_STARTS = 3  # of a process in a new cluster, if it ends each time; later it is started again for ever
MOST_SHOWN = 4  # processes in a message
CALL_SECONDS = 30.0  # that the supervisor may take to answer

logger = logging.getLogger("ckpt_engine.ray")


class RayCluster:
    """Our processes on a Ray cluster: a manager, a relay on each node, replicas, and a gateway if asked for.

    Keep the object: the cluster ends with `close`, at the end of a `with`, and with the process that made it, unless it
    is detached. Needs `ray.init()` before. May be handed to tasks and actors, or found by `connect`. Every method
    raises CkptEngineError: UNAVAILABLE if the cluster is gone or Ray does not answer.
    """

    def __init__(
        self,
        name: str = "ckpt-engine",
        *,
        engine: Sequence[str] = (),
        replicas: int = 0,
        num_gpus: float = 1,
        num_cpus: float = 1,
        resources: Mapping[str, float] | None = None,
        relays: bool = True,
        gateway: bool = False,
        ledger: str | os.PathLike[str] | None = None,
        pool: str = "",
        insecure: bool = False,
        environment: Mapping[str, str] | None = None,
        manager_options: Sequence[str] = (),
        relay_options: Sequence[str] = (),
        agent_options: Sequence[str] = (),
        gateway_options: Sequence[str] = (),
        lifetime: Literal["detached"] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Starts the cluster. Returns when the manager answers, the gateway listens, and every replica has its place
        and its agent runs; engines may still load (`wait_for_replicas`).

        name: one of it at a time on a Ray cluster. engine: the command of a replica's server, such as ("vllm", "serve",
        DIR), or its options alone: what stands behind `--` of `ckpt-engine agent`. replicas: how many, see `scale`.
        num_gpus, num_cpus, resources: what each replica takes of one node. relays: one on each node.
        gateway: one address over all replicas, on the head node. ledger: the manager's file on the head node; none: a
        temporary one, which goes with the cluster. pool: of the replicas and the gateway. insecure: serve other
        machines without asking who calls; without it, where the head node's address is not loopback, manager_options
        must say who may (docs/security.md). environment: added to that of every process. *_options: of the commands.
        lifetime: "detached": goes on without this process, until `close`. timeout: seconds.

        Raises, with nothing left running: INVALID_ARGUMENT for arguments that cannot be, and for options that a command
        refuses; FAILED_PRECONDITION without ray.init(), for a name that is taken, or if a process ends each time that
        it is started; DEADLINE_EXCEEDED, naming each replica that has no place and what it asked for.
        """
        check_seconds("a timeout", timeout)
        checked_flag("relays", relays)
        checked_flag("gateway", gateway)
        checked_flag("insecure", insecure)
        if not isinstance(resources, Mapping | None):
            raise invalid(f"resources must be a dict of Ray's resources to amounts, not {resources!r}")
        if twice := {"CPU", "GPU"} & {*(resources or {})}:
            raise invalid(f"resources with {', '.join(sorted(twice))}: say num_cpus and num_gpus instead")
        head, host = _head()
        plan = ClusterPlan(
            name=name,
            identity=secrets.token_hex(4),
            head=head,
            host=host,
            engine=engine,
            replicas=replicas,
            bundle={"CPU": num_cpus, "GPU": num_gpus, **(resources or {})},
            relays=relays,
            gateway=gateway,
            ledger=None if ledger is None else os.fspath(ledger),
            pool=pool,
            insecure=insecure,
            environment=environment or {},
            options={
                "manager": manager_options,
                "relay": relay_options,
                "replica": agent_options,
                "gateway": gateway_options,
            },
        )
        plan.check()
        if lifetime not in (None, "detached"):
            raise invalid(f"lifetime {lifetime!r} is neither None nor 'detached'")
        actor = ray.remote(Supervisor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime=lifetime or "non_detached",  # whatever the job's default is
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(plan.head, soft=False),
        )
        try:
            supervisor = actor.remote(plan)
        except ValueError as error:  # ActorAlreadyExistsError; older Rays raise it plain
            raise precondition(
                f"there is a cluster {name!r} on this Ray already: RayCluster.connect({name!r}), or give another name"
            ) from error
        try:
            self._connect(name, supervisor, timeout)
            self._wait(timeout, answering=True)
        except BaseException:
            with contextlib.suppress(Exception):
                self._end(LEAVE_SECONDS)
            raise

    @classmethod
    def connect(cls, name: str = "ckpt-engine", *, timeout: float = 60.0) -> Self:
        """The cluster of this name, from another program or actor on the same Ray. Raises NOT_FOUND."""
        _head()
        check_seconds("a timeout", timeout)
        try:
            supervisor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            names = [each["name"] for each in ray.util.list_named_actors(True) if each["namespace"] == NAMESPACE]
            clusters = ", ".join(sorted(each for each in names if ":" not in each)) or "none"
            raise not_found(f"there is no cluster {name!r} on this Ray; there are: {clusters}") from None
        found = cls.__new__(cls)
        found._connect(name, supervisor, timeout)
        return found

    def _connect(self, name: str, supervisor: Any, timeout: float) -> None:
        self.name = name
        self._supervisor = supervisor
        status = self._ask("status", timeout=timeout)
        self.manager_address: str = status.manager_address
        """host:port, for `Trainer`, `Client` and commands. Stays the same as long as the cluster is there."""
        self.gateway_url: str | None = status.gateway_url
        """http://host:port; None: there is no gateway."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def client(self) -> Client:
        """A new client of the manager, to be closed by the caller."""
        return Client(self.manager_address)

    def status(self) -> RayClusterStatus:
        """Which processes there are, on which nodes, and why one does not run, a second old at most. What they serve
        `client().status()` says."""
        found: RayClusterStatus = self._ask("status")
        return found

    def wait_for_replicas(self, *, timeout: float = 600.0) -> list[str]:
        """Returns the names of all replicas once their engines answer.

        Raises INVALID_ARGUMENT at once for a replica whose options cannot be; DEADLINE_EXCEEDED after `timeout`
        seconds, with what replicas that ended printed last.
        """
        first = self.status()
        wait = ReplicaWait(first.replicas, first.pool, timeout, logger)
        with self.client() as client:
            while True:
                processes = [each for each in self.status().processes if each.kind == "replica"]
                _check_options(processes)
                ended = "; ".join(
                    f"{each.name} ({'running again' if each.state == 'running' else each.state}) {each.reason}"
                    for each in processes
                    if each.reason
                )
                try:
                    found = wait.look(client.status(), ended)
                except CkptEngineError as error:
                    wait.take_error(error)
                else:
                    if found is not None:
                        return found
                time.sleep(wait.pause(POLL_SECONDS))

    def scale(self, replicas: int, *, timeout: float = 600.0) -> None:
        """Has so many replicas from now on, "replica-0" and so on. Returns when new ones have their places and their
        agents run, and when those with the highest numbers have left: their agents have said goodbye, and their
        placement groups are gone.

        Raises INVALID_ARGUMENT without an `engine`; DEADLINE_EXCEEDED after `timeout` seconds, naming each replica that
        has no place and what it asked for. These go on waiting (Ray's autoscaler may start a node); another `scale`
        takes them back.
        """
        check_seconds("a timeout", timeout)
        self._ask("scale", replicas)
        self._wait(timeout)

    def close(self, timeout: float = 180.0) -> None:
        """Ends every process: replicas say goodbye, then relays and the manager end. Nothing of it is left after
        `timeout` seconds, then by force. May be repeated."""
        check_seconds("a timeout", timeout)
        self._end(timeout)

    def _end(self, timeout: float) -> None:
        try:
            self._ask("end", timeout, timeout=timeout + CALL_SECONDS)
        except CkptEngineError as error:
            logger.info("cluster %s is ended by force: %s", self.name, error.problem.message)
        if ray.is_initialized():
            ray.kill(self._supervisor, no_restart=True)

    def _ask(self, method: str, *arguments: Any, timeout: float = CALL_SECONDS) -> Any:
        if not ray.is_initialized():
            raise unavailable(f"cluster {self.name!r}: this process is not connected to Ray any more")
        try:
            return ray.get(getattr(self._supervisor, method).remote(*arguments), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise unavailable(f"the supervisor of cluster {self.name!r} did not answer within {timeout:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, CkptEngineError) else error) from None
        except ray.exceptions.RayActorError as error:
            raise unavailable(
                f"cluster {self.name!r} was closed or ended with its program, or starts again: {first_line(error)}"
            ) from None

    def _wait(self, timeout: float, answering: bool = False) -> None:
        """Waits until all that is to be there runs, and all else has left. answering: also until manager and gateway
        answer."""
        end = time.monotonic() + timeout
        while True:
            processes = self.status().processes
            _check_options(processes)
            for each in processes:
                if answering and each.kind != "relay" and each.starts >= MOST_STARTS and each.state == "restarting":
                    why = f"{each.name} was started {each.starts} times, and {each.reason}"
                    raise precondition(why, replica=_replica(each))
            absent = [each for each in processes if _is_awaited(each)]
            if not absent and not (answering and (silent := self._silent())):
                return
            if time.monotonic() >= end:
                words = [f"{each.name} ({each.state}) {each.reason}" for each in absent[:MOST_SHOWN]]
                more = [f"{len(absent) - MOST_SHOWN} more"] if len(absent) > MOST_SHOWN else []
                why = "; ".join(words + more) or silent
                if any(each.state == "placing" for each in absent):
                    free = {name: count for name, count in ray.available_resources().items() if ":" not in name}
                    why += f". Ray has left, on all nodes: {free}. Start nodes, ask for less, or scale down"
                raise deadline(
                    f"cluster {self.name!r} is not complete after {timeout:g} s: {why}",
                    replica=next((each.name for each in absent if _replica(each)), ""),
                )
            time.sleep(POLL_SECONDS)

    def _silent(self) -> str:
        """Which server does not answer yet; empty: all do."""
        try:
            with self.client() as client:
                client.status()
        except CkptEngineError as error:
            if error.code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                raise
            return error.problem.message
        if self.gateway_url is not None:
            try:
                httpx.get(f"{self.gateway_url}/livez", timeout=CALL_SECONDS, verify=False)  # nothing secret is sent
            except httpx.TransportError as failed:
                return f"the gateway at {self.gateway_url} does not answer: {failed}"
        return ""


def _check_options(processes: Sequence[ProcessStatus]) -> None:
    """Raises INVALID_ARGUMENT for a process whose command refused its options."""
    for each in processes:
        if each.state == "refused":
            raise invalid(f"{each.name} {each.reason}", replica=_replica(each))


def _replica(process: ProcessStatus) -> str:
    """Its name, for an error; empty: it is not a replica."""
    return process.name if process.kind == "replica" else ""


def _is_awaited(process: ProcessStatus) -> bool:
    """Whether a call waits for it to run, or to leave. Relays are not waited for: nodes come and go."""
    return process.kind != "relay" and process.state not in ("running", "evicted")


def _head() -> tuple[str, str]:
    """Id and address of Ray's head node. Raises FAILED_PRECONDITION without a Ray."""
    if not ray.is_initialized():
        raise precondition("this process is not connected to Ray: call ray.init() first")
    for node in ray.nodes():
        if node["Alive"] and HEAD in node["Resources"]:
            return node["NodeID"], node["NodeManagerAddress"]
    raise precondition("Ray names no head node that is alive: see `ray status`")
