"""Words of workers on other nodes, in the page of the node that leads, where the gate reads them.

It decides when a word from a follower may stand there. The page may show a far worker as worse than it is, never as
better. A far worker writes only after an order that went through the leader. So from that order on its word is DIRTY,
until the worker has reported on the order, or its node has read the order's result since.

The words belong to the leading agent's process: when it ends they read as those of dead workers, and the gate closes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_engine.core.names import LINEAGE_BYTES
from ckpt_engine.machines.nodes.events import ShowWord
from ckpt_engine.v1 import manager_pb2, weights_pb2

CLEAN, DIRTY, NONE = manager_pb2.WORKER_STATE_CLEAN, manager_pb2.WORKER_STATE_DIRTY, manager_pb2.WORKER_STATE_NONE
BOOT_ID_BYTES = 16
ROOT_BYTES = 32


@dataclass
class _Far:
    """A worker on another node."""

    node: int
    pid: int  # on that node
    word: ShowWord  # as it stands in the page
    ordered: int = 0  # the epoch of an order that it has not accounted for; 0: none


class FarWorkers:
    """The far workers of one start of an engine. show: gets each word that changes."""

    def __init__(self, show: Callable[[ShowWord], None]) -> None:
        self._write = show
        self._far: dict[int, _Far] = {}

    def take(self, node: int, statuses: Sequence[manager_pb2.WorkerStatus], boot_ids: Sequence[bytes]) -> str:
        """Takes what node `node` read in its page, after everything that `accounted` was told before.

        boot_ids: as in FollowerMessage. Returns why nothing of it is taken: a worker that another node has, or that
        cannot be; empty: it is taken.
        """
        started = [status for status in statuses if status.boot_id]  # a page has a slot for every node's workers
        for status in started:
            if wrong := self._wrong(node, status, boot_ids):
                return wrong
        for status in started:
            self._take(node, status)
        return ""

    def has(self, node: int, rank: int, boot_id: bytes) -> bool:
        """Whether that node has reported this worker."""
        far = self._known(rank, boot_id)
        return far is not None and far.node == node

    def ordered(self, rank: int, boot_id: bytes, epoch: int) -> bool:
        """Notes, before an install order leaves for a far worker, that it may write at any time from now on.

        False: there is no such worker, and the order must not leave.
        """
        far = self._known(rank, boot_id)
        if far is None:
            return False
        far.ordered = epoch
        self._show(far, DIRTY, epoch)
        return True

    def accounted(self, rank: int, boot_id: bytes, epoch: int) -> None:
        """Notes that a far worker has reported on its order: what its node reads from now on is the truth."""
        far = self._known(rank, boot_id)
        if far is not None and far.ordered <= epoch:
            far.ordered = 0

    def lose(self, node: int) -> None:
        """Marks the workers of this node as dead until the node is heard again: what they hold is unknown."""
        for far in self._far.values():
            if far.node == node:
                self._show(far, NONE, far.word.epoch, alive=False)

    def place(self, rank: int) -> tuple[int, int] | None:
        """The node of a far worker and its pid there; None: the worker is not on another node."""
        far = self._far.get(rank)
        return None if far is None else (far.node, far.pid)

    def _known(self, rank: int, boot_id: bytes) -> _Far | None:
        far = self._far.get(rank)
        return far if far is not None and far.word.boot_id == boot_id else None

    def _wrong(self, node: int, status: manager_pb2.WorkerStatus, boot_ids: Sequence[bytes]) -> str:
        rank, far = status.rank, self._far.get(status.rank)
        if rank >= len(boot_ids) or len(status.boot_id) != BOOT_ID_BYTES:
            return f"node {node} tells of worker {rank}, and there are {len(boot_ids)} workers"
        if status.HasField("identity") and not _fits(status.identity):
            return f"node {node} tells that worker {rank} holds what no state word can hold"
        if far is not None and far.node != node:
            return f"nodes {far.node} and {node} both have a worker {rank}"
        if boot_ids[rank] not in (b"", None if far is None else far.word.boot_id):
            return f"nodes 0 and {node} both have a worker {rank}"
        return ""

    def _take(self, node: int, status: manager_pb2.WorkerStatus) -> None:
        far = self._known(status.rank, status.boot_id)
        if far is None:  # a new process has no order
            unknown = ShowWord(status.rank, status.boot_id, False, NONE, 0)
            far = self._far[status.rank] = _Far(node, status.pid, unknown)
        whole = status.state == CLEAN and status.HasField("identity")
        if far.ordered and not (whole and status.epoch == far.ordered):
            self._show(far, DIRTY, far.ordered)
        elif whole:
            far.ordered = 0
            self._show(far, CLEAN, status.epoch, status.identity)
        elif status.state in (CLEAN, DIRTY):
            self._show(far, DIRTY, status.epoch)
        else:
            self._show(far, NONE, far.word.epoch)

    def _show(
        self,
        far: _Far,
        state: manager_pb2.WorkerState,
        epoch: int,
        identity: weights_pb2.Identity | None = None,
        alive: bool = True,
    ) -> None:
        word = ShowWord(far.word.rank, far.word.boot_id, alive, state, epoch, identity)
        if word != far.word:
            far.word = word
            self._write(word)


def _fits(identity: weights_pb2.Identity) -> bool:
    return len(identity.root) == ROOT_BYTES and len(identity.lineage.encode()) <= LINEAGE_BYTES
