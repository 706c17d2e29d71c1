"""One `wait_for_replicas`: which replicas of a pool are up by now, and when and how the wait ends.

Decides which replicas are ready, what is logged meanwhile, and what ends the wait. The caller asks the manager and
sleeps, on its thread or loop.
"""

from __future__ import annotations

import logging
import time

from ckpt_engine.core.arguments import checked_count
from ckpt_engine.core.deadlines import NOTICE_SECONDS, check_seconds
from ckpt_engine.core.names import in_pool
from ckpt_engine.core.problems import CkptEngineError, ErrorCode, deadline
from ckpt_engine.v1 import manager_pb2

NO_ANSWER = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED})


class ReplicaWait:
    """A wait until `count` replicas of a pool are up, for `timeout` seconds at most. logger: of the caller.

    Raises INVALID_ARGUMENT for an invalid count or time.
    """

    def __init__(self, count: int, pool: str, timeout: float, logger: logging.Logger) -> None:
        checked_count("count", count, "replicas")
        check_seconds("a timeout", timeout)
        self._count, self._pool, self._timeout, self._logger = count, pool, timeout, logger
        self._end = time.monotonic() + timeout
        self._notice = time.monotonic() + NOTICE_SECONDS
        self._last_state = "the manager was not asked yet"

    def look(self, status: manager_pb2.GetStatusResponse, hindrance: str = "") -> list[str] | None:
        """Takes a status; returns the names if there are enough by now. hindrance: why the status is empty. Raises
        DEADLINE_EXCEEDED after the end."""
        found, other_pools = ready_replicas(status, self._pool)
        if len(found) >= self._count:
            return found
        names = f" ({', '.join(found)})" if found else ""
        why = f": {hindrance}" if hindrance else other_pools
        if time.monotonic() >= self._end:
            raise deadline(f"{len(found)} of {self._count} replicas{names} were up after {self._timeout:g} s{why}")
        self._last_state = f"{len(found)} of {self._count} replicas{names} are up{why}"
        return None

    def take_error(self, error: CkptEngineError) -> None:
        """Takes a failed status call: the manager may not run yet. Raises other errors at once, and all at the end."""
        if error.code not in NO_ANSWER or time.monotonic() >= self._end:
            raise error
        self._last_state = error.problem.message

    def pause(self, seconds: float) -> float:
        """Seconds until the next status call: `seconds`, or the rest. After a while it logs once what it waits for."""
        remaining = max(0.0, self._end - time.monotonic())
        if time.monotonic() >= self._notice:
            self._logger.warning("%s; waiting up to %.0f s more", self._last_state, remaining)
            self._notice = self._end + 1.0
        return min(seconds, remaining)


def ready_replicas(status: manager_pb2.GetStatusResponse, pool: str) -> tuple[list[str], str]:
    """Names of a pool's replicas that have an engine up and get weights by updates; and the other pools that have such
    replicas, as words to append to a message."""
    # Agents connect before their engine runs, and name it once it answers.
    running = [each for each in status.replicas if each.connected and each.HasField("engine")]
    up = [each for each in running if each.mode != manager_pb2.MODE_COLOCATED]
    others = sorted({in_pool(each.pool) for each in up if each.pool != pool})
    other_pools = f" (there are others {', '.join(others)})" if others else ""
    why = f" {in_pool(pool)}{other_pools}" if pool or others else ""
    return [each.name for each in up if each.pool == pool], why
