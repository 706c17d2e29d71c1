"""One `wait_for_replicas`: which replicas of a pool are up by now, and when and how the wait ends.

Decides what is ready, what is said meanwhile, and what ends it. Does not ask, and does not sleep: that is done by its
caller, on its thread or loop.
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
    """Until `count` replicas of a pool are up, for `timeout` seconds at most. logger: of the caller.

    Raises INVALID_ARGUMENT for what is no count or time.
    """

    def __init__(self, count: int, pool: str, timeout: float, logger: logging.Logger) -> None:
        checked_count("count", count, "replicas")
        check_seconds("a timeout", timeout)
        self._count, self._pool, self._timeout, self._logger = count, pool, timeout, logger
        self._end = time.monotonic() + timeout
        self._notice = time.monotonic() + NOTICE_SECONDS
        self._last_state = "the manager was not asked yet"

    def look(self, status: manager_pb2.GetStatusResponse, hindrance: str = "") -> list[str] | None:
        """The names, if there are enough by now. hindrance: why the status is empty. Raises DEADLINE_EXCEEDED if the
        time is over."""
        found, elsewhere = ready_replicas(status, self._pool)
        if len(found) >= self._count:
            return found
        names = f" ({', '.join(found)})" if found else ""
        why = f": {hindrance}" if hindrance else elsewhere
        if time.monotonic() >= self._end:
            raise deadline(f"{len(found)} of {self._count} replicas{names} were up after {self._timeout:g} s{why}")
        self._last_state = f"{len(found)} of {self._count} replicas{names} are up{why}"
        return None

    def failed(self, error: CkptEngineError) -> None:
        """The manager did not answer: it may not run yet. Raises what is no matter of time, and all at the end."""
        if error.code not in NO_ANSWER or time.monotonic() >= self._end:
            raise error
        self._last_state = error.problem.message

    def pause(self, seconds: float) -> float:
        """Seconds until the next look: so many, or what is left. Says after a while what is waited for, once."""
        remaining = max(0.0, self._end - time.monotonic())
        if time.monotonic() >= self._notice:
            self._logger.warning("%s; waiting up to %.0f s more", self._last_state, remaining)
            self._notice = self._end + 1.0
        return min(seconds, remaining)


def ready_replicas(status: manager_pb2.GetStatusResponse, pool: str) -> tuple[list[str], str]:
    """The replicas of a pool that updates bring weights to and whose engines are up, by name; and which other pools
    have some, as words to append to a message."""
    # Agents connect before their engine runs, and name it once it answers.
    running = [each for each in status.replicas if each.connected and each.HasField("engine")]
    up = [each for each in running if each.mode != manager_pb2.MODE_COLOCATED]
    others = sorted({in_pool(each.pool) for each in up if each.pool != pool})
    elsewhere = f" (there are others {', '.join(others)})" if others else ""
    why = f" {in_pool(pool)}{elsewhere}" if pool or others else ""
    return [each.name for each in up if each.pool == pool], why
