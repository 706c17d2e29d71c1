"""The actor that owns all other actors of a cluster. Decides from the plan, the wish for replicas and Ray's nodes which
keepers there are to be, and asks Ray for them. It does not decide how a keeper's process runs."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ckpt_engine.addresses import join_address, listen_on
from ckpt_engine.integrations.ray.keeper import ProcessKeeper
from ckpt_engine.integrations.ray.plan import (
    LEAVE_SECONDS,
    MEMORY,
    NAMESPACE,
    ClusterPlan,
    ProcessStatus,
    RayClusterStatus,
)

LOOK_SECONDS = 1.0  # between two looks
DEAD_SECONDS = 15.0  # that Ray calls an actor dead which it could start again, until another one is made

logger = logging.getLogger("ckpt_engine.ray")


@dataclass
class _KeeperSeat:
    """One keeper, as the supervisor knows it. Touched by looks only."""

    status: ProcessStatus
    keeper: Any
    group: Any = None  # the placement group of a replica
    answer: Any = None  # the keeper's status, on its way
    leaving: Any = None  # its answer to `leave`, on its way
    leave_by: float = 0.0  # when it is ended by Ray instead
    dead_since: float = 0.0  # that Ray has called its actor dead; 0: it does not


class Supervisor:
    """An actor: has the keepers that a plan, the wish for replicas and Ray's nodes ask for, and owns them.

    One look does all of that, once a second and after each wish; calls read what the last one saw.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._seats: dict[str, _KeeperSeat] = {}
        self._ending = False
        self._ended, self._looking = threading.Event(), threading.Lock()
        plan.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = plan.directory / "supervisor.json"
        record = json.loads(self._file.read_text()) if self._file.exists() else {}  # this actor was started again
        self._ports: dict[str, int] = record.get("ports") or {
            each: _free_port(plan.host) for each in ("manager", "gateway")
        }
        self._replicas: int = record.get("replicas", plan.replicas)
        self._processes: tuple[ProcessStatus, ...] = ()
        self._keep_wish()
        self._look_now()
        threading.Thread(target=self._run, name="reconcile", daemon=True).start()

    def status(self) -> RayClusterStatus:
        """What the last look saw."""
        url = f"http://{join_address(self._plan.host, self._ports['gateway'])}" if self._plan.gateway else None
        if url is not None and "--certificate" in self._plan.options["gateway"]:
            url = url.replace("http:", "https:")
        manager = join_address(self._plan.host, self._ports["manager"])
        return RayClusterStatus(manager, url, self._replicas, self._plan.pool, self._processes)

    def scale(self, replicas: int) -> None:
        """See RayCluster.scale; returns when the wish was looked at once."""
        self._plan.check_replicas(replicas)
        self._replicas = replicas
        self._keep_wish()
        self._look_now()

    def end(self, timeout: float) -> None:
        """Has everything leave, and returns when all has, or after `timeout` seconds."""
        self._ending = True
        self._look_now()
        self._ended.wait(timeout)
        shutil.rmtree(self._plan.directory, ignore_errors=True)

    def _keep_wish(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps({"ports": self._ports, "replicas": self._replicas}))
        fresh.replace(self._file)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look_now()

    def _look_now(self) -> None:
        """One look. Any thread. What Ray does not answer now it may answer next time."""
        with self._looking:
            try:
                self._look()
            except Exception as error:  # of Ray, whichever: without looks nothing would start or end any more
                logger.warning("a look failed, another one in %g s: %s: %s", LOOK_SECONDS, type(error).__name__, error)

    def _look(self) -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        desired = self._desired(alive)
        for seat in list(self._seats.values()):
            self._observe(seat)
            if seat.status.name not in desired:
                self._have_leave(seat, seat.status.kind == "relay" and seat.status.node not in alive)
        unplaced = {}
        for name, first in desired.items():
            if name not in self._seats:
                try:
                    self._seats[name] = self._place(first)
                except Exception as error:  # of Ray: amounts that cannot be, a name that is taken for a moment
                    unplaced[name] = replace(first, reason=f"{first.reason}, which Ray does not take: {error}")
        statuses = {**unplaced, **{name: seat.status for name, seat in self._seats.items()}}
        self._processes = tuple(statuses[name] for name in sorted(statuses))
        if self._ending and not self._seats:
            self._ended.set()

    def _desired(self, alive: set[str]) -> dict[str, ProcessStatus]:
        """The processes that there are to be, by name, as they begin. At the end they go in turns: a replica says
        goodbye to a manager that is there, and leaves no relay that it reads."""
        manager = [ProcessStatus("manager", "manager", "placing", self._plan.head)]
        relays = [ProcessStatus(f"relay-{node[:12]}", "relay", "placing", node) for node in sorted(alive)]
        served = [
            ProcessStatus(f"replica-{number}", "replica", "placing", reason=f"asks for {self._plan.demand} of a node")
            for number in range(self._replicas)
        ]
        if self._plan.gateway:
            served.append(ProcessStatus("gateway", "gateway", "placing", self._plan.head))
        kinds = {seat.status.kind for seat in self._seats.values()}
        if self._ending:
            served = []
            relays = relays if kinds & {"replica", "gateway"} else []
            manager = manager if kinds - {"manager"} else []
        return {each.name: each for each in (*manager, *(relays if self._plan.relays else ()), *served)}

    def _place(self, first: ProcessStatus) -> _KeeperSeat:
        """A keeper that Ray is asked to place: on its node, or in a placement group of its own."""
        plan = self._plan
        group, place, takes = None, None, {}
        if first.kind == "replica":
            name = f"{plan.name}:{plan.identity}:{first.name}"
            group = ray.util.placement_group([plan.demand], name=name)
            place = PlacementGroupSchedulingStrategy(group, 0)
            more = {each: count for each, count in plan.demand.items() if each not in ("CPU", "GPU", MEMORY)}
            takes = {"num_gpus": plan.bundle["GPU"], "memory": plan.bundle.get(MEMORY), "resources": more}
        else:
            place = NodeAffinitySchedulingStrategy(first.node, soft=False)
        actor = ray.remote(ProcessKeeper).options(
            name=f"{plan.name}:{first.name}",
            namespace=NAMESPACE,
            lifetime="non_detached",
            max_restarts=-1,
            scheduling_strategy=place,
            **{"num_cpus": plan.bundle["CPU"] if group else 0, **takes},
        )
        try:
            return _KeeperSeat(first, actor.remote(plan, first, self._ports), group)
        except BaseException:
            if group is not None:
                ray.util.remove_placement_group(group)
            raise

    def _observe(self, seat: _KeeperSeat) -> None:
        """Takes the keeper's answer, if there is one, and asks again. Does not wait."""
        if seat.answer is None:
            seat.answer = seat.keeper.status.remote()
        if not ray.wait([seat.answer], timeout=0)[0]:
            return
        try:
            seat.status, seat.dead_since = ray.get(seat.answer), 0.0
        except ray.exceptions.RayError as error:
            # Not known from its kind: whether Ray starts the actor again, as it does unless it cannot be placed at all.
            seat.dead_since = seat.dead_since or time.monotonic()
            asks = f"its actor is to be placed again: {first_line(error)}"
            seat.status = replace(seat.status, state="restarting", pid=0, reason=asks)
            if time.monotonic() - seat.dead_since > DEAD_SECONDS:
                self._take_away(seat)
        seat.answer = None
        if seat.leaving is not None:
            seat.status = replace(seat.status, state="leaving")

    def _have_leave(self, seat: _KeeperSeat, at_once: bool) -> None:
        """Asks the keeper to end its process, and has Ray end the keeper when it has, or in the end."""
        if seat.leaving is None and seat.status.state != "placing" and not at_once:
            seat.leaving, seat.leave_by = seat.keeper.leave.remote(), time.monotonic() + LEAVE_SECONDS
            seat.status = replace(seat.status, state="leaving")
        complete = seat.leaving is None or bool(ray.wait([seat.leaving], timeout=0)[0])
        if complete or time.monotonic() >= seat.leave_by:
            self._take_away(seat)

    def _take_away(self, seat: _KeeperSeat) -> None:
        ray.kill(seat.keeper, no_restart=True)
        if seat.group is not None:
            ray.util.remove_placement_group(seat.group)
        self._seats.pop(seat.status.name, None)


def _free_port(host: str) -> int:
    """A port that is free now, on this node's address."""
    with listen_on(join_address(host, 0)) as listener:
        return int(listener.getsockname()[1])


def first_line(error: Exception) -> str:
    """The first line of an error's words, for a message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
