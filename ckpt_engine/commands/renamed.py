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


def command_now(words: Sequence[str], rest: Sequence[str]) -> tuple[str, str] | None:
    """Old and new spelling of a command; None: it has not been renamed.

    words: read as the command. rest: the arguments after them.
    """
    if list(words) == ["replica"] and (not rest or not rest[0].startswith("-") or rest[0] in _HELP):
        return None
    for spelling in (" ".join((*words, *rest[:1])), " ".join(words)):
        if spelling in COMMANDS:
            return spelling, COMMANDS[spelling]
    return None


def variables_now(environment: Mapping[str, str]) -> dict[str, str]:
    """New names of variables that are set under their old ones, by the old name."""
    old, new = VARIABLES
    return {name: new + name.removeprefix(old) for name in sorted(environment) if name.startswith(old)}
