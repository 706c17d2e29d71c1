"""Writes docs/engines/README.md: what each adapter declares of its engine, side by side.

It decides only the wording of the table. Importing adapters does not import engines, so it needs none.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_engine.core.pausing import mode_name
from ckpt_engine.engine.adapter import Capabilities, load_adapter
from ckpt_engine.engine.kinds import engine_names
from ckpt_engine.v1 import manager_pb2

COMMAND = "ckpt-engine engines --markdown"

_INTRODUCTION = f"""\
# Engines

What each adapter declares of its engine. The conformance suite (`tests/conformance`) holds each engine to its column:
what is declared must work, and what is not is refused in words before anything is paused.

`{COMMAND}` writes this page from `CAPABILITIES` in each driver, and a test fails when it is out of date. \
Do not edit it.
"""

_MODES = {
    manager_pb2.PAUSE_MODE_KEEP: "requests go on with new weights, caches recomputed",
    manager_pb2.PAUSE_MODE_ABORT: "requests end early with what they have",
    manager_pb2.PAUSE_MODE_WAIT: "requests finish with old weights first",
    manager_pb2.PAUSE_MODE_IN_PLACE: "requests go on with new weights over old caches",
}


def declared() -> dict[str, Capabilities]:
    """Each adapter's declaration, by kind of engine. Raises UnknownAdapterError if one cannot be imported."""
    return {kind: load_adapter(kind).CAPABILITIES for kind in engine_names()}


def markdown(engines: Mapping[str, Capabilities]) -> str:
    """The whole page: a table with a column for each engine, then each engine's notes and limits."""
    rows = [[(what, text) for what, text in facts(of)] for of in engines.values()]
    lines = [_row("", *engines), "|" + "---|" * (1 + len(engines))]
    lines += [_row(each[0][0], *(text for _, text in each)) for each in zip(*rows, strict=True)]
    sections = [_INTRODUCTION, "\n".join(lines) + "\n", *(_section(kind, of) for kind, of in engines.items())]
    return "\n".join(sections)


def facts(of: Capabilities) -> list[tuple[str, str]]:
    """Rows of the table for one engine: (property, value), with backquotes around what is typed."""
    rows = [("tested versions", "; ".join(of.versions))]
    rows += [(f"pause mode `{mode_name(mode)}`: {what}", _paused_in(of, mode)) for mode, what in _MODES.items()]
    rows += [
        ("sleep level 1: weights to the host", _sleeps(of, 1)),
        ("sleep level 2: weights discarded", _sleeps(of, 2)),
        ("memory that can be woken by itself", ", ".join(f"`{tag}`" for tag in sorted(of.wake_tags))),
        ("layouts of workers", ", ".join(of.layouts)),
    ]
    return [(what, text or "none") for what, text in rows]


def _paused_in(of: Capabilities, mode: manager_pb2.PauseMode) -> str:
    if mode not in of.pause_modes:
        return "refused"
    return "yes, the default" if mode == of.default_pause_mode else "yes"


def _sleeps(of: Capabilities, level: int) -> str:
    return "yes" if level in of.sleep_levels else "refused"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _section(kind: str, of: Capabilities) -> str:
    lines = [f"## {kind}", "", *(f"- {note}" for note in of.notes)]
    lines += ["", "Limits:", "", *(f"- {each}" for each in of.cannot)] if of.cannot else []
    return "\n".join(lines) + "\n"
