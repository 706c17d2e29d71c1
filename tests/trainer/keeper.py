"""A made-up third kind of member: it keeps a copy of weights in a directory, and lends it to late replicas.

What makes it a member is the package's own: HolderMachine and the shell of all members that offer weights. What is its
own is data (kind, name) and how it digests. Its session runs on a thread with a loop.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors.torch import save_file
from trainer_world import DEADLINES

from ckpt_engine.core.manifest import blob_digest, canonical, manifest_of
from ckpt_engine.core.offers import holder_id
from ckpt_engine.core.plan import compile_plans
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.publication import join_sources
from ckpt_engine.core.sealed import check_replicas
from ckpt_engine.host.facts import this_host
from ckpt_engine.machines.events import (
    HoldVersions,
    OfferedVersion,
    PublicationDecided,
    SealSource,
    SessionOpened,
)
from ckpt_engine.machines.holder.machine import HolderMachine
from ckpt_engine.source.directory import directory_source
from ckpt_engine.trainer.session import Notice, OfferingSession, SealFigures
from ckpt_engine.v1 import weights_pb2
from tests.sealing import record_of

KIND = "keeper"


class Keeper:
    """Keeps `weights` in `path`, from `start` to `stop`. told: what the manager decided. sealed: what it digested."""

    def __init__(self, address: str, name: str, path: Path, weights: dict[str, torch.Tensor]) -> None:
        self.told: list[PublicationDecided] = []
        self.sealed: list[weights_pb2.Atoms] = []
        self.opened = threading.Event()
        path.mkdir()
        save_file({key: tensor.detach().clone() for key, tensor in weights.items()}, str(path / "model.safetensors"))
        self._source = directory_source(path, host=this_host())
        self._source.seal()
        self._table = weights_pb2.SourceTable()
        self._table.CopyFrom(self._source.table())
        self._table.ClearField("rank")
        self._table.id = holder_id(KIND, name)
        self._address = address
        self._machine = HolderMachine(KIND, name, uuid.uuid4().hex, this_host(), DEADLINES)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name=name, daemon=True)
        self._running: Future[tuple[asyncio.AbstractEventLoop, OfferingSession, asyncio.Event]] = Future()

    def start(self, identity: weights_pb2.Identity) -> Keeper:
        """Says that it holds this version."""
        self._thread.start()
        loop, session, _ = self._running.result(60)
        version = OfferedVersion(canonical(self._table), canonical(self.record()), identity)
        loop.call_soon_threadsafe(session.feed, HoldVersions((version,)))
        assert self.opened.wait(60)
        return self

    def stop(self) -> None:
        """Says goodbye."""
        loop, _, ending = self._running.result(60)
        loop.call_soon_threadsafe(ending.set)
        self._thread.join(60)
        self._source.close()

    def record(self) -> weights_pb2.SealedRecord:
        """Of what it keeps; every tensor is one cell."""
        joined = join_sources(manifest_of(self._table.tensors), [self._table])
        plans = compile_plans(joined, joined.table_digests, [])
        values = self._digest(plans.atoms[0])
        return record_of(check_replicas(plans, {0: weights_pb2.Digests(values=values)}))

    def _digest(self, atoms: weights_pb2.Atoms) -> list[int]:
        if atoms.table_digest != blob_digest(canonical(self._table)):
            raise invalid("these atoms are of another table")
        own = blob_digest(canonical(self._source.table()))  # of the same shards, as a rank's
        return self._source.digest(weights_pb2.Atoms(table_digest=own, atoms=atoms.atoms))

    async def _seal(self, task: SealSource, atoms: weights_pb2.Atoms) -> SealFigures:
        self.sealed.append(atoms)
        return SealFigures(weights_pb2.Digests(values=self._digest(atoms)), 0.0, 0.0)

    def _notified(self, said: Notice) -> None:
        if isinstance(said, SessionOpened):
            self.opened.set()
        elif isinstance(said, PublicationDecided):
            self.told.append(said)

    async def _run(self) -> None:
        ending = asyncio.Event()
        session = OfferingSession(self._address, self._machine, self._seal, self._notified, 1.0)
        session.start()
        self._running.set_result((asyncio.get_running_loop(), session, ending))
        await ending.wait()
        await session.stop("the test is over")
