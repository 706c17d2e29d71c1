"""How fast a worker's scrub goes, and what it says in words. It hashes nothing (install/scrub.py does). Pure.

A scrub hashes the parameters of a worker again between installs, all of them within an interval. Its pace follows from
the bytes and the interval; it never works for more than a quarter of the time, however short the interval is.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ckpt_engine.core.problems import invalid
from ckpt_engine.core.sizes import in_words
from ckpt_engine.v1 import manager_pb2

ENVIRONMENT = "CKPT_ENGINE_SCRUB_SECONDS"
"""The variable in which workers find the interval: an agent sets it for the engine that it launches."""

OPTION = "--scrub-seconds"

DEFAULT_SECONDS = 60.0

MOST_WORK = 0.25
"""The largest share of the time in which a scrub works: the rest of memory's bandwidth is the engine's."""

_AIM = 0.8  # of the interval, for one pass: the rest is for installs, which hold it up


def scrub_seconds(text: str) -> float:
    """The interval in seconds; 0: no scrub. Raises INVALID_ARGUMENT, saying what to write."""
    try:
        seconds = float(text or DEFAULT_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise invalid(f"{OPTION} {text!r} is not a number of seconds: write one such as 60, or 0 for no scrub")
    return seconds


def rest_seconds(interval: float, done: int, total: int, elapsed: float, worked: float) -> float:
    """Seconds to rest after a piece.

    interval: within which all is to be hashed. done, total: bytes of this pass. elapsed: seconds since it began.
    worked: seconds that the piece took. A pass that installs have held up catches up, within MOST_WORK.
    """
    due = interval * _AIM * done / max(total, 1)
    return max(due - elapsed, worked * (1 / MOST_WORK - 1))


def share(scrubs: Collection[manager_pb2.WorkerScrub]) -> float:
    """The share of the model's bytes that these scrubs compare, 0 to 1; 1 if there are no bytes."""
    hashed = sum(scrub.bytes for scrub in scrubs)
    rest = sum(each.bytes for scrub in scrubs for each in scrub.unscrubbed)
    return hashed / (hashed + rest) if hashed + rest else 1.0


def oldest_pass(scrubs: Collection[manager_pb2.WorkerScrub]) -> float | None:
    """When the last pass of that worker ended whose last pass is the oldest, Unix seconds; None: one has none yet, or
    there is no worker."""
    ends = [scrub.passed_at for scrub in scrubs]
    return min(ends) if ends and all(ends) else None


def last_difference(scrubs: Collection[manager_pb2.WorkerScrub]) -> manager_pb2.ScrubDifference | None:
    """The last difference that any of these scrubs has found; None: they have found none."""
    found = [scrub.last for scrub in scrubs if scrub.HasField("last")]
    return max(found, key=lambda each: each.at, default=None)


def present_differences(
    scrubs: Collection[manager_pb2.WorkerScrub], workers: Collection[manager_pb2.WorkerStatus]
) -> list[manager_pb2.ScrubDifference]:
    """The differences for which workers are DIRTY now, by rank."""
    dirty = {
        (worker.rank, worker.boot_id, worker.epoch)
        for worker in workers
        if worker.state == manager_pb2.WORKER_STATE_DIRTY
    }
    found = [scrub for scrub in scrubs if scrub.HasField("last")]
    return [
        scrub.last
        for scrub in sorted(found, key=lambda scrub: scrub.rank)
        if (scrub.rank, scrub.boot_id, scrub.last.epoch) in dirty
    ]


def difference_words(found: manager_pb2.ScrubDifference) -> str:
    """A difference in one sentence without an end."""
    box = ", ".join(f"{start}:{stop}" for start, stop in zip(found.start, found.stop, strict=True))
    return (
        f"what lies in {found.tensor}[{box}] of worker {found.rank} does not hash to what was sealed as version "
        f"{found.identity.version} of {found.identity.lineage} any more (found by its scrub at {_utc(found.at)})"
    )


def scrub_words(scrubs: Sequence[manager_pb2.WorkerScrub], now: float | None = None) -> str:
    """What the scrubs of one replica have done, in one line; empty: there is none. now: Unix seconds, for the age of
    the last pass; None: its time is said instead."""
    if not scrubs:
        return ""
    size = sum(scrub.bytes for scrub in scrubs)
    parts = [f"{in_words(size)} of parameters every {max(scrub.interval_seconds for scrub in scrubs):g} s"]
    at = oldest_pass(scrubs)
    if at is None:
        parts.append("no whole pass yet")
    else:
        took = max(scrub.pass_seconds for scrub in scrubs)
        when = f"at {_utc(at)}" if now is None else f"{max(0.0, now - at):.0f} s ago"
        parts.append(f"last whole pass {when}, in {took:.3g} s")
    if idle := sorted({scrub.idle for scrub in scrubs if scrub.idle}):
        parts.append("; ".join(idle))
    if reasons := _reasons(scrubs):
        parts.append(f"{100 * share(scrubs):.3g} % of the model; not compared: {reasons}")
    if count := sum(scrub.differences for scrub in scrubs):
        last = last_difference(scrubs)
        words = "" if last is None else f", the last: {difference_words(last)}"
        parts.append(f"{count} {'difference' if count == 1 else 'differences'}{words}")
    return ", ".join(parts)


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _reasons(scrubs: Collection[manager_pb2.WorkerScrub]) -> str:
    """The bytes that are not compared, by reason, most first."""
    sizes: dict[str, int] = {}
    for scrub in scrubs:
        for each in scrub.unscrubbed:
            sizes[each.reason] = sizes.get(each.reason, 0) + each.bytes
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{in_words(size)} {reason}" for reason, size in ordered)
