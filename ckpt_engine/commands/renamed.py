"""Old names of commands and variables, and their new ones: an old spelling is answered with the new one, not run.

Decides nothing about how a command line is read: `cli.py` asks once it knows the words of one.
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
"""Old and new prefix of the manager's variables."""


def command_now(words: Sequence[str], behind: Sequence[str]) -> tuple[str, str] | None:
    """Old and new spelling of a command; None: it has not been renamed.

    words: read as the command. behind: the arguments after them.
    """
    if list(words) == ["replica"] and (not behind or not behind[0].startswith("-") or behind[0] in _HELP):
        return None
    for typed in (" ".join((*words, *behind[:1])), " ".join(words)):
        if typed in COMMANDS:
            return typed, COMMANDS[typed]
    return None


def variables_now(environment: Mapping[str, str]) -> dict[str, str]:
    """New names of variables that are set under their old ones, by the old name."""
    before, now = VARIABLES
    return {name: now + name.removeprefix(before) for name in sorted(environment) if name.startswith(before)}
