"""The options of updates and rollbacks, checked before anything is dialled. Decides nothing about how these run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

from ckpt_engine.core.arguments import MOST_COUNT, checked_count, checked_flag, checked_names, choice, whole
from ckpt_engine.core.deadlines import check_seconds
from ckpt_engine.core.names import check_pool
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1 import manager_pb2

Word = TypeVar("Word")

PauseMode: TypeAlias = Literal["keep", "abort", "wait", "in_place"]
"""What becomes of requests that run during an update: they wait and go on with the new weights (caches recomputed),
end early with what they have, finish first with the old weights, or go on with the new weights over old caches."""

Prefetch: TypeAlias = Literal["auto", "always", "never"]
"""Whether weights go by way of relays, which are filled before anything is paused: where that is better (auto),
wherever a relay is within reach (always), or not at all (never). `report.prefetch` says what was done, and why."""

Strategy: TypeAlias = Literal["all", "rolling", "canary", "all_or_none"]
"""How a version is deployed: to all replicas at once, to some at a time while the rest serve, to a few and after a
condition to the rest, or to all once every one can take it, and if one fails, to none."""

Newer: TypeAlias = Literal["supersede", "wait"]
"""What becomes of a deployment that is undecided when its lineage's next version comes: it is undone first, or the next
version waits, within its own time."""

Until: TypeAlias = Literal["installed", "held", "first_wave"]
"""What an update waits for: every replica's outcome, or only until relays hold the version, verified, and the weights
may change. Then installs go on, `report.held` is true and `report.ok` says nothing; replicas without such a relay keep
what they serve, and count against `min_replicas`. "first_wave": of a staged deployment, until its first wave serves the
version; then `report.deployment` says that it is undecided."""

DeployAction: TypeAlias = Literal["approve", "pause", "resume", "undo"]
"""What a person does with an undecided deployment: have its next wave begin, have none begin, end that pause, or bring
its replicas back."""

Draft: TypeAlias = Literal["update", "keep"]
"""What becomes of a server's draft model (speculative decoding) if the version has no weights for it: the server is
left out, since its draft would guess by old weights (update), or the draft keeps its weights (keep)."""

MemoryTag: TypeAlias = Literal["weights", "kv_cache"]
"""Memory of an engine that is given up in sleep and taken back, weights first."""

PAUSE_MODES: Mapping[PauseMode, manager_pb2.PauseMode] = {
    "keep": manager_pb2.PAUSE_MODE_KEEP,
    "abort": manager_pb2.PAUSE_MODE_ABORT,
    "wait": manager_pb2.PAUSE_MODE_WAIT,
    "in_place": manager_pb2.PAUSE_MODE_IN_PLACE,
}

PREFETCH: Mapping[Prefetch, manager_pb2.Prefetch] = {
    "auto": manager_pb2.PREFETCH_AUTO,
    "always": manager_pb2.PREFETCH_ALWAYS,
    "never": manager_pb2.PREFETCH_NEVER,
}

DRAFT: Mapping[Draft, manager_pb2.Draft] = {"update": manager_pb2.DRAFT_UPDATE, "keep": manager_pb2.DRAFT_KEEP}

UNTIL: Mapping[Until, manager_pb2.Until] = {
    "installed": manager_pb2.UNTIL_INSTALLED,
    "held": manager_pb2.UNTIL_HELD,
    "first_wave": manager_pb2.UNTIL_FIRST_WAVE,
}

STRATEGIES: Mapping[Strategy, Strategy] = {each: each for each in get_args(Strategy)}

DEPLOY_ACTIONS: Mapping[DeployAction, manager_pb2.SteerDeploymentRequest.Action] = {
    "approve": manager_pb2.SteerDeploymentRequest.ACTION_APPROVE,
    "pause": manager_pb2.SteerDeploymentRequest.ACTION_PAUSE,
    "resume": manager_pb2.SteerDeploymentRequest.ACTION_RESUME,
    "undo": manager_pb2.SteerDeploymentRequest.ACTION_UNDO,
}

NEWER: Mapping[Newer, manager_pb2.Newer] = {
    "supersede": manager_pb2.NEWER_SUPERSEDE,
    "wait": manager_pb2.NEWER_WAIT,
}

Progress: TypeAlias = Callable[[manager_pb2.UpdateProgress], object]
"""A caller's `on_progress`, called as an update proceeds; its result is ignored."""


class RollbackOptions(TypedDict, total=False):
    """Options of a rollback, as keyword arguments. What is not given, or None, is the default."""

    pause_mode: PauseMode | None  # default: the engine's own, "keep"
    timeout: float | None  # of the whole, seconds; default: the manager's
    replicas: Sequence[str]  # only these; default: all of the pool that are registered and receive weights
    pool: str | None  # of the replicas; default: the trainer's own, or the pool without a name
    draft: Draft  # of servers with a draft model, if the version has no draft; default: "update"


class UpdateOptions(RollbackOptions, total=False):
    """Options of an update, as keyword arguments; all ranks of a call give the same. What is not given, or None, is the
    default."""

    min_replicas: int | None
    """How many replicas suffice: fewer are refused, and with so many `report.ok` is true. Default: as many as can be
    updated are (at least one), and `report.ok` is true only if all are, also those that are not connected. What an
    operator holds (`ckpt-engine replica hold`), and what is known to have another model, does not count."""
    prefetch: Prefetch  # default: "auto"
    until: Until  # default: "installed"
    dry_run: bool
    """Only prepare and plan: nothing is sealed, paused or written, and no number is used. The report says of each
    replica over which edges an update would bring it the weights (`outcome` "planned"), or why it would be left out;
    `report.ok` says whether the update would be. Default: False."""
    strategy: Strategy  # default: "all"; the others are staged deployments (docs/deployments.md)
    wave: int | float | None
    """Of a staged deployment: how many replicas a wave has; above 0 and below 1: which share of them. Default: 1."""
    condition: str | Sequence[str]
    """Of a staged deployment: what must be so before the next wave; of several, all. "time=300": so many seconds after
    the wave; "probe": all answers to the trainer's probe are within its bounds (docs/probe.md); "person": `ckpt-engine
    deploy approve`; "errors=0.01", beside another one: no more than this share of the requests to the waves' replicas
    failed meanwhile. Default: "person" for a canary, else none."""
    newer: Newer | None  # of a staged deployment; default: "supersede"


def options_message(options: UpdateOptions | RollbackOptions, pool: str = "") -> manager_pb2.UpdateOptions:
    """The options as a message. pool: the default one. Raises INVALID_ARGUMENT, naming the invalid value."""
    names = UpdateOptions.__annotations__
    for name in options:
        if name not in names:
            suggestions = get_close_matches(name, names, n=1)
            raise invalid(f"there is no option {name!r}{f': did you mean {suggestions[0]!r}?' if suggestions else ''}")
    values: UpdateOptions = {**options}
    mode, seconds, least = values.get("pause_mode"), values.get("timeout"), values.get("min_replicas")
    own_pool = values.get("pool")
    chosen_pool = pool if own_pool is None else own_pool
    check_pool(chosen_pool)
    if seconds is not None:
        check_seconds("a timeout", seconds)
    if least is not None:
        checked_count("min_replicas", least, "replicas")
    dry_run = values.get("dry_run", False)
    checked_flag("dry_run", dry_run)
    wave_replicas, wave_share = _wave(values.get("wave"))
    conditions = values.get("condition", ())
    conditions = [conditions] if isinstance(conditions, str) else checked_names("condition", conditions)
    newer = values.get("newer")
    return manager_pb2.UpdateOptions(
        pause_mode=manager_pb2.PAUSE_MODE_UNSPECIFIED if mode is None else choice("pause_mode", mode, PAUSE_MODES),
        timeout_seconds=seconds or 0.0,
        min_replicas=least,
        replicas=checked_names("replicas", values.get("replicas", ())),
        pool=chosen_pool,
        prefetch=choice("prefetch", values.get("prefetch", "auto"), PREFETCH),
        until=choice("until", values.get("until", "installed"), UNTIL),
        dry_run=dry_run,
        strategy=choice("strategy", values.get("strategy", "all"), STRATEGIES),
        wave_replicas=wave_replicas,
        wave_share=wave_share,
        conditions=[_condition(each) for each in conditions],
        newer=manager_pb2.NEWER_UNSPECIFIED if newer is None else choice("newer", newer, NEWER),
        draft=choice("draft", values.get("draft", "update"), DRAFT),
    )


def _wave(wave: Any) -> tuple[int, float]:
    """The number of replicas of a wave and their share, of which one is 0. Raises INVALID_ARGUMENT."""
    if wave is None:
        return 0, 0.0
    if whole(wave) and 1 <= int(wave) < MOST_COUNT:
        return int(wave), 0.0
    if isinstance(wave, float) and 0 < wave < 1:
        return 0, wave
    raise invalid(f"wave {wave!r} is neither a number of replicas from 1 on, nor a share of them between 0 and 1")


def _condition(text: str) -> manager_pb2.DeployCondition:
    """A condition from "NAME" or "NAME=VALUE". Raises INVALID_ARGUMENT. Which there are, the manager knows."""
    name, sign, number = text.partition("=")
    try:
        value = float(number) if sign else 0.0
    except ValueError:
        raise invalid(f"condition {text!r}: {number!r} is not a number; give one such as 'time=300'") from None
    if name == "time" and not sign:
        raise invalid("condition 'time' needs its seconds: give one such as 'time=300'")
    if name == "errors" and not (sign and 0 <= value < 1):
        raise invalid(f"condition {text!r} needs the share of requests that may fail, below 1: as in 'errors=0.01'")
    return manager_pb2.DeployCondition(name=name, value=value)


def options_of(message: manager_pb2.UpdateOptions) -> UpdateOptions:
    """The options of a message. Raises INVALID_ARGUMENT for an unknown enum number."""
    options: UpdateOptions = {
        "replicas": list(message.replicas),
        "pool": message.pool,
        "timeout": message.timeout_seconds or None,
        "min_replicas": message.min_replicas if message.HasField("min_replicas") else None,
        "dry_run": message.dry_run,
    }
    if message.pause_mode:
        mode: PauseMode = _word("pause_mode", message.pause_mode, PAUSE_MODES)
        options["pause_mode"] = mode
    if message.prefetch:
        options["prefetch"] = _word("prefetch", message.prefetch, PREFETCH)
    if message.until:
        options["until"] = _word("until", message.until, UNTIL)
    if message.strategy:
        options["strategy"] = choice("strategy", message.strategy, STRATEGIES)
    if message.wave_replicas or message.wave_share:
        options["wave"] = message.wave_replicas or message.wave_share
    if message.conditions:
        conditions = message.conditions
        options["condition"] = [
            f"{each.name}={each.value!r}" if each.value or each.name in ("time", "errors") else each.name
            for each in conditions
        ]
    if message.newer:
        newer: Newer = _word("newer", message.newer, NEWER)
        options["newer"] = newer
    if message.draft:
        options["draft"] = _word("draft", message.draft, DRAFT)
    return options


def _word(what: str, number: int, words: Mapping[Word, Any]) -> Word:
    for word, value in words.items():
        if value == number:
            return word
    raise invalid(f"{what} {number} means nothing here: bring caller and manager to one version")
