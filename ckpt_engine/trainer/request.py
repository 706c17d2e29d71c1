"""What a caller asks of an update, checked before anything is dialled. Decides nothing about how it is carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_engine.core.deadlines import check_seconds
from ckpt_engine.core.names import check_pool
from ckpt_engine.trainer.arguments import checked_count, checked_flag, checked_names, checked_version, choice
from ckpt_engine.v1 import manager_pb2

PAUSE_MODES: Mapping[str, manager_pb2.PauseMode] = {
    "keep": manager_pb2.KEEP,
    "abort": manager_pb2.ABORT,
    "wait": manager_pb2.WAIT,
    "in_place": manager_pb2.IN_PLACE,
}
"""What becomes of requests that run during an update: they wait and go on with the new weights (caches recomputed),
end early with what they have, finish first with the old weights, or go on with the new weights over old caches."""

PREFETCH: Mapping[str, manager_pb2.Prefetch] = {
    "auto": manager_pb2.AUTO,
    "always": manager_pb2.ALWAYS,
    "never": manager_pb2.NEVER,
}
"""Whether weights go by way of relays, which are filled before anything is paused: where that is better, wherever a
relay is within reach, or not at all."""

UNTIL: Mapping[str, manager_pb2.Until] = {"installed": manager_pb2.INSTALLED, "held": manager_pb2.HELD}
"""What `update_weights` waits for: every replica's outcome, or only until relays hold the version."""


def update_request(
    version: int | None,
    pool: str,
    replicas: Sequence[str],
    *,
    pause_mode: str | None,
    timeout: float | None,
    min_replicas: int | None,
    prefetch: str,
    until: str,
    dry_run: bool = False,
) -> manager_pb2.UpdateWeightsRequest:
    """The request of an update: everything but who calls. Raises INVALID_ARGUMENT for what cannot be."""
    if version is not None:
        checked_version(version)
    check_pool(pool)
    mode = manager_pb2.PAUSE_MODE_UNSPECIFIED
    if pause_mode is not None:
        mode = choice("pause_mode", pause_mode, PAUSE_MODES)
    if timeout is not None:
        check_seconds("a timeout", timeout)
    if min_replicas is not None:
        checked_count("min_replicas", min_replicas, "replicas")
    checked_names("replicas", replicas)
    checked_flag("dry_run", dry_run)
    return manager_pb2.UpdateWeightsRequest(
        version=version,
        pause_mode=mode,
        timeout_seconds=timeout or 0.0,
        min_replicas=min_replicas,
        replicas=replicas,
        pool=pool,
        prefetch=choice("prefetch", prefetch, PREFETCH),
        until=choice("until", until, UNTIL),
        dry_run=dry_run,
    )
