"""What commands and variables were called before, and what each is called now: an old spelling is answered, not run.

Decides nothing about how a command line is read; `cli.py` asks once it knows the words of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COMMANDS: Mapping[str, str] = {
    "serve": "manager",
    "replica": "agent",  # with an option where an operation would stand
    "sleep": "replica sleep",
    "wake": "replica wake",
    "retry": "replica retry",
    "hold": "replica hold",
    "release": "replica release",
    "evict": "replica evict",
    "trainer": "lineage",
    "trainer list": "lineage list",
    "trainer evict": "lineage evict",
}

_HELP = ("-h", "--help")

VARIABLES = ("CKPT_ENGINE_SERVE_", "CKPT_ENGINE_MANAGER_")
"""How the manager's variables began, and begin."""


def command_now(words: Sequence[str], behind: Sequence[str]) -> tuple[str, str] | None:
    """How the command was spelled and is spelled now; None: it has not been renamed.

    words: that are read as the command, or as one; behind: what follows them.
    """
    if list(words) == ["replica"] and (not behind or not behind[0].startswith("-") or behind[0] in _HELP):
        return None
    for typed in (" ".join((*words, *behind[:1])), " ".join(words)):
        if typed in COMMANDS:
            return typed, COMMANDS[typed]
    return None


def variables_now(environment: Mapping[str, str]) -> dict[str, str]:
    """What variables that are set are called now, by what they were called."""
    before, now = VARIABLES
    return {name: now + name.removeprefix(before) for name in sorted(environment) if name.startswith(before)}
