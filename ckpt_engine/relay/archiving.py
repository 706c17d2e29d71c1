"""An archive's session with the manager, and its thread: what is written when, and what is told of it.

It decides that versions are written one after the other, the newest of those that wait, and that a version is looked at
again when the relay could not read it as it was sealed. What lies where, and what is kept, the archive decides. To the
manager it is a holder of its own: a version that only the archive has is read like any other, by the relay beside it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sizes import in_words
from ckpt_engine.machines.events import HoldVersions, PublicationDecided, SealSource
from ckpt_engine.machines.holder.machine import HolderMachine
from ckpt_engine.relay.archive import KIND, Archive
from ckpt_engine.relay.slots import SlotVersion
from ckpt_engine.trainer.session import Notice, OfferingSession, SealFigures
from ckpt_engine.v1 import weights_pb2

log = logging.getLogger("ckpt_engine.relay")


class Archiving:
    """One relay's archive at work. Made on the loop, and used there."""

    def __init__(self, archive: Archive, manager: str, name: str, host: weights_pb2.Host, deadlines: Deadlines) -> None:
        """manager: host:port. name: the relay's."""
        self._archive = archive
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "ckpt-engine archive")
        self._waiting: SlotVersion | None = None  # the newest version that is to be written
        self._writes = False
        machine = HolderMachine(KIND, name, uuid.uuid4().hex, host, deadlines)
        self._session = OfferingSession(manager, machine, self._seal, self._notify, deadlines.goodbye, role=KIND)

    def start(self) -> None:
        """Connects, and tells what the archive has."""
        log.info("the archive has %d versions, %s", len(self._archive.versions), in_words(self._archive.bytes))
        self._session.feed(HoldVersions(self._archive.versions))
        self._session.start()

    def take(self, held: SlotVersion) -> None:
        """Has a version written that lies verified in a slot, unless something is missing of it. One that waits for the
        same is passed over."""
        if held.filled.missing:
            return
        if self._waiting is not None:
            name = f"version {self._waiting.identity.version} of {self._waiting.identity.lineage}"
            log.warning("%s is not archived: the next one came before it was written", name)
        self._waiting = held
        self._begin()

    def _begin(self) -> None:
        """Has what waits written, unless that is going on."""
        if self._waiting is not None and not self._writes:
            self._writes = True
            self._loop.run_in_executor(self._thread, self._write_all)

    def doubt(self, identity: weights_pb2.Identity) -> None:
        """Has a version hashed where it lies, since the relay could not bring all of it; it is set aside if the archive
        is to blame."""
        if self._archive.holds(identity):
            self._loop.run_in_executor(self._thread, self._verify, identity)

    async def close(self, reason: str) -> None:
        """Says goodbye, and ends what is being written."""
        await self._session.stop(reason)
        self._waiting = None
        await asyncio.to_thread(self._archive.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- on the archive's thread

    def _write_all(self) -> None:
        while (held := self._waiting) is not None:
            self._waiting = None
            began = time.monotonic()
            try:
                changed = self._archive.write(held)
            except Exception as error:  # one version costs nothing of the next ones
                words = error.problem.message if isinstance(error, CkptEngineError) else f"not archived: {error!r}"
                log.warning("%s", words)
                changed = True  # older ones may have been removed for it
            else:
                if changed:
                    log.info(
                        "version %d of %s is archived in %.2f s",
                        held.identity.version,
                        held.identity.lineage,
                        time.monotonic() - began,
                    )
            if changed:
                self._loop.call_soon_threadsafe(self._tell)
        self._loop.call_soon_threadsafe(self._rest)

    def _verify(self, identity: weights_pb2.Identity) -> None:
        if self._archive.verify(identity):
            self._loop.call_soon_threadsafe(self._tell)

    # -- on the loop

    def _rest(self) -> None:
        self._writes = False
        self._begin()  # one may have come between the thread's last look and now

    def _tell(self) -> None:
        self._session.feed(HoldVersions(self._archive.versions))

    async def _seal(self, task: SealSource, atoms: weights_pb2.Atoms) -> SealFigures:
        began = time.monotonic()
        values = await self._loop.run_in_executor(self._thread, self._archive.digest, atoms, task.version)
        return SealFigures(weights_pb2.Digests(values=values), 0.0, time.monotonic() - began)

    def _notify(self, notice: Notice) -> None:
        if isinstance(notice, PublicationDecided) and notice.problem is not None:
            log.warning("the manager did not accept what the archive has: %s", notice.problem.message)
