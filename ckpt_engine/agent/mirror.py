"""Words of workers on other nodes, in the page of the node that leads, where the gate reads them.

It decides when a word that a follower told may stand there: never when it could be better than the truth. A far worker
writes only after an order that went through here, so from that order on its word is DIRTY until the worker, or what was
read after it had answered, says otherwise. No I/O but the page; used on the leading agent's loop.

The mirrored words belong to this process: when it ends they are those of a dead worker, and the gate is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine.words.state import CLEAN, DIRTY, LINEAGE_BYTES, MAX_WORKERS, EnginePage, WorkerSlot, WorkerWord

BOOT_ID_BYTES = 16
ROOT_BYTES = 32


class MirrorError(Exception):
    """What a node tells does not fit this engine."""


@dataclass
class _Far:
    """A worker on another node. pid: there. ordered: the epoch of an order that it has not accounted for; 0: none."""

    node: int
    pid: int
    slot: WorkerSlot
    ordered: int = 0


class Mirror:
    """The far workers of one start of an engine."""

    def __init__(self, page: EnginePage) -> None:
        self._page = page
        self._far: dict[int, _Far] = {}

    def take(self, node: int, statuses: Sequence[manager_pb2.WorkerStatus]) -> None:
        """What node `node` read in its page, after everything that `settled` was told before.

        Raises MirrorError, before anything is taken, for a worker that another node has or that cannot be.
        """
        here = {word.rank: word.boot_id for word in self._page.read()}
        theirs = [status for status in statuses if status.boot_id]  # a page has a slot for every node's workers
        for status in theirs:
            self._check(node, status, here)
        for status in theirs:
            self._take(node, status)

    def has(self, node: int, rank: int, boot_id: bytes) -> bool:
        """Whether this is a worker of which that node has told."""
        far = self._far.get(rank)
        return far is not None and far.node == node and far.slot.boot_id == boot_id

    def ordered(self, rank: int, boot_id: bytes, epoch: int) -> None:
        """Before an install order leaves for a far worker: from now on it may write at any time.

        Raises MirrorError for a worker of which no node has told.
        """
        far = self._far.get(rank)
        if far is None or far.slot.boot_id != boot_id:
            raise MirrorError(f"worker {rank} asks for an order, and no node has told of it")
        far.ordered = epoch
        far.slot.dirty(epoch)

    def settled(self, rank: int, boot_id: bytes, epoch: int) -> None:
        """A far worker has told what became of its order: what its node reads after this is the truth."""
        far = self._far.get(rank)
        if far is not None and far.slot.boot_id == boot_id and far.ordered <= epoch:
            far.ordered = 0

    def lose(self, node: int) -> None:
        """Nobody knows what the workers of this node hold: they read as dead until the node is heard again."""
        for far in self._far.values():
            if far.node == node:
                far.slot.gone()

    def status(self, word: WorkerWord) -> manager_pb2.WorkerStatus:
        """A word of the page as the manager is told it: with node and process where the worker runs."""
        status = word.status()
        far = self._far.get(word.rank)
        if far is not None:
            status.node, status.pid = far.node, far.pid
        return status

    def _check(self, node: int, status: manager_pb2.WorkerStatus, here: dict[int, bytes]) -> None:
        known = self._far.get(status.rank)
        if status.rank >= (len(here) or MAX_WORKERS) or len(status.boot_id) != BOOT_ID_BYTES:
            raise MirrorError(f"node {node} tells of worker {status.rank}, and there are {len(here)} workers")
        if status.HasField("identity") and not _fits(status.identity):
            raise MirrorError(f"node {node} tells that worker {status.rank} holds what no state word can hold")
        if known is not None and known.node != node:
            raise MirrorError(f"nodes {known.node} and {node} both have a worker {status.rank}")
        if here.get(status.rank) not in (None, b"", None if known is None else known.slot.boot_id):
            raise MirrorError(f"nodes 0 and {node} both have a worker {status.rank}")

    def _take(self, node: int, status: manager_pb2.WorkerStatus) -> None:
        far = self._far.get(status.rank)
        if far is None or far.slot.boot_id != status.boot_id:
            far = _Far(
                node, status.pid, WorkerSlot(self._page, status.rank, status.boot_id)
            )  # a new process has no order
            self._far[status.rank] = far
        whole = status.state == CLEAN and status.HasField("identity")
        if far.ordered and not (whole and status.epoch == far.ordered):
            far.slot.dirty(far.ordered)
        elif whole:
            far.ordered = 0
            far.slot.clean(status.epoch, status.identity)
        elif status.state in (CLEAN, DIRTY):
            far.slot.dirty(status.epoch)
        else:
            far.slot.none()


def _fits(identity: weights_pb2.Identity) -> bool:
    return len(identity.root) == ROOT_BYTES and len(identity.lineage.encode()) <= LINEAGE_BYTES
