"""verl's checkpoint engine, its two decisions: when an update is made from the tensors that verl gathers, and which
rank publishes which of them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine

from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.integrations.updates import RankUpdates
from ckpt_engine.integrations.verl.options import NAME, REMEDY, Options


class GatheredUpdates(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """Updates from what verl gathers. One object a trainer rank, in its process; verl calls it there.

    verl yields every tensor on every rank. Each rank publishes a share of about equal bytes, in memory of its own, and
    skips the others. At the first update a rank's share is held twice: its names become known only in the walk, which
    cannot be repeated.
    """

    def __init__(self, bucket_size: int = 0, is_master: bool | None = None, **options: Any) -> None:
        self._options = Options(**options)
        self._trains = is_master is not None
        """verl says it to trainer ranks only."""
        self._world: tuple[int, int, str] | None = None
        self._updates: RankUpdates | None = None
        self._count = 0
        self._own_names: set[str] = set()
        self._pairs: Iterable[tuple[str, torch.Tensor]] = ()

    def prepare(self) -> dict[str, Any]:
        """This process's metadata for `build_topology`."""
        return {"lineage": self._options.lineage or f"verl-{uuid.uuid4().hex[:12]}"} if self._trains else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group`: ranks, and rank 0's name for the run. Raises INVALID_ARGUMENT for rollouts
        that are not ours, before anything is changed."""
        world = actor_wg_world_size
        if any("replica" not in each for each in metadata[world:]):
            raise invalid(f"verl's own rollouts cannot be given weights by ckpt-engine: {REMEDY}")
        lineage = metadata[0]["lineage"]
        return {"rank": list(range(world)), "world_size": [world] * world, "lineage": [lineage] * world}, {}

    def init_process_group(self, rank: int, world_size: int, lineage: str) -> None:
        """Stores this rank's number; dials nothing. verl calls it before each update; the first lineage stays. Raises
        FAILED_PRECONDITION if the world differs from that of the first update."""
        if self._world is None:
            self._world = (rank, world_size, lineage)
        elif self._world[:2] != (rank, world_size):
            raise precondition(
                f"this was rank {self._world[0]} of {self._world[1]} and is {rank} of {world_size} now: start again",
                ranks=[rank],
            )

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Walks `weights` to its end and brings the replicas to them, on the calling thread, as `global_steps`; None:
        the last version plus one.

        Returns figures for verl's metrics. Raises CkptEngineError as `RankUpdates` does, after the walk has ended,
        since other ranks gather with this one.
        """
        if self._world is None:
            raise precondition("verl calls init_process_group before send_weights")
        rank, world, lineage = self._world
        version = self._count if global_steps is None else int(global_steps)
        walk = iter(weights)
        try:
            if self._updates is None or not self._updates.opened:
                self._pairs = self._first_share(walk, rank, world)
                self._updates = self._make_updates(lineage)
                self._updates.open(lambda: self._pairs, rank=rank, world_size=world)
            else:
                self._pairs = self._share(walk)
            report = self._updates.bring(version)
        finally:
            self._pairs = ()
            for _ in walk:
                continue
        self._count = version + 1
        return {
            f"{NAME}/update_seconds": report.seconds,
            f"{NAME}/pause_seconds": max((each.pause_seconds or 0.0 for each in report.replicas), default=0.0),
            f"{NAME}/bytes": float(report.nbytes),
        }

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Raises INVALID_ARGUMENT: agents bring the weights into engines, and nothing of them passes through verl."""
        raise invalid(f"verl's own rollouts cannot be given weights by ckpt-engine: {REMEDY}")

    def finalize(self) -> None:
        """Does nothing: the session and its sealed weights stay, for replicas that start late."""

    def close(self) -> None:
        """Ends the session. verl does not call it; the end of the process has the same effect."""
        if self._updates is not None:
            self._updates.close()

    def _make_updates(self, lineage: str) -> RankUpdates:
        options = self._options
        return RankUpdates(
            options.manager,
            replicas=len(options.replicas) if options.min_replicas is None else options.min_replicas,
            wait=options.wait,
            dtype=options.dtype,
            lineage=lineage,
            pool=options.pool,
            pause_mode=options.pause_mode,
            min_replicas=options.min_replicas,
            timeout=options.timeout,
        )

    def _first_share(
        self, walk: Iterator[tuple[str, torch.Tensor]], rank: int, world: int
    ) -> list[tuple[str, torch.Tensor]]:
        """This rank's share, copied: the next step of the walk may overwrite a yielded tensor."""
        loads = [0] * world
        share = []
        for name, tensor in walk:
            owner = loads.index(min(loads))
            loads[owner] += tensor.nbytes
            if owner == rank:
                share.append((name, tensor.detach().clone()))
        self._own_names = {name for name, _ in share}
        return share

    def _share(self, walk: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in walk if name in self._own_names)
