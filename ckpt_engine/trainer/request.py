"""What a caller asks of an update, checked before anything is dialled. Decides nothing about how it is carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TypeVar

from ckpt_engine.core.deadlines import check_seconds
from ckpt_engine.core.names import check_pool
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1 import manager_pb2

Choice = TypeVar("Choice")

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
) -> manager_pb2.UpdateWeightsRequest:
    """Everything but who calls. Raises INVALID_ARGUMENT for what cannot be."""
    if version is not None:
        check_version(version)
    check_pool(pool)
    mode = manager_pb2.PAUSE_MODE_UNSPECIFIED
    if pause_mode is not None:
        mode = _choice("pause_mode", pause_mode, PAUSE_MODES)
    if timeout is not None:
        check_seconds("a timeout", timeout)
    if min_replicas is not None and not (whole(min_replicas) and 0 <= min_replicas < 1 << 31):
        raise invalid(f"min_replicas {min_replicas!r} is not a number of replicas")
    if isinstance(replicas, str):
        raise invalid(f"replicas is a list of names: [{replicas!r}]")
    if not all(isinstance(name, str) for name in replicas):
        raise invalid(f"replicas is a list of names, not {list(replicas)!r}")
    return manager_pb2.UpdateWeightsRequest(
        version=version,
        pause_mode=mode,
        timeout_seconds=timeout or 0.0,
        min_replicas=min_replicas,
        replicas=replicas,
        pool=pool,
        prefetch=_choice("prefetch", prefetch, PREFETCH),
        until=_choice("until", until, UNTIL),
    )


def check_version(version: object) -> None:
    """Raises INVALID_ARGUMENT for what is no version's number."""
    if not (isinstance(version, Integral) and whole(version) and 0 <= int(version) < 1 << 63):
        raise invalid(f"version {version!r} is not a count of steps: give a whole number from 0")


def whole(number: object) -> bool:
    """Whether it is a whole number; numpy's count, too, and truth values do not."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _choice(what: str, word: str, choices: Mapping[str, Choice]) -> Choice:
    """Raises INVALID_ARGUMENT for a word that there is not."""
    if not isinstance(word, str) or word not in choices:
        raise invalid(f"{what} {word!r} is none of {', '.join(choices)}")
    return choices[word]
