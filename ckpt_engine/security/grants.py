"""Grants: which caller may act in which role, and under which names. Pure.

A grant is a role, and for the first three a pattern of names (`*` stands for any characters):

    trainer/PATTERN   publish and update lineages of such names; put replicas to sleep and wake them
    replica/PATTERN   be a replica of such a name
    holder/PATTERN    hold versions for others under such a name, whatever kind of holder
    operator          put replicas to sleep, wake, retry, roll back and evict them, evict runs
    viewer            look, watch what replicas serve (a gateway needs it of its manager), and wait for updates' ends
    client            ask a gateway for tokens

A caller with any grant may look. A caller's grants come with its token (the manager knows a digest of it) or from the
common name of its certificate, which then reads like a grant.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckpt_engine.core.problems import CkptEngineError, forbidden, invalid

NAMED = ("trainer", "replica", "holder")
UNNAMED = ("client", "operator", "viewer")
TOKEN_CHARACTERS = 24
"""Least characters of a token: its digest is not salted, so it must be random and long."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A right to act in one role."""

    role: str
    pattern: str = ""  # of the names that it may be used under; empty for roles without names

    @classmethod
    def parse(cls, text: str) -> Grant:
        """A grant from "replica/rollout-*" or "operator". Raises INVALID_ARGUMENT."""
        role, separator, pattern = text.partition("/")
        if (role in NAMED and pattern) or (role in UNNAMED and not separator):
            return cls(role, pattern)
        raise invalid(
            f"{text!r} is not a grant: write trainer/PATTERN, replica/PATTERN, holder/PATTERN, operator, viewer or "
            "client (docs/security.md)"
        )

    def covers(self, role: str, name: str) -> bool:
        """Whether its holder may act in this role under this name."""
        return self.role == role and (not self.pattern or fnmatchcase(name, self.pattern))

    def __str__(self) -> str:
        return f"{self.role}/{self.pattern}" if self.pattern else self.role


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller that was let in."""

    name: str  # for messages and logs, never a secret
    grants: tuple[Grant, ...] = ()
    everything: bool = False  # nothing is checked

    def require(self, role: str, name: str) -> None:
        """Raises PERMISSION_DENIED unless it may act as `role` under `name`."""
        if not self.everything and not any(grant.covers(role, name) for grant in self.grants):
            raise forbidden(f"{self.name} may not act as {role} {name!r}: {self._may(f'{role}/{name}')}")

    def require_any(self, *roles: str) -> None:
        """Raises PERMISSION_DENIED unless it has a grant of one of these roles, under whatever name."""
        if not self.may_any(*roles):
            needed_grants = " or ".join(f"{role}/PATTERN" if role in NAMED else role for role in roles)
            raise forbidden(f"{self.name} may not act as {' or '.join(roles)}: {self._may(needed_grants)}")

    def may_any(self, *roles: str) -> bool:
        """Whether it has a grant of one of these roles, under whatever name."""
        return self.everything or any(grant.role in roles for grant in self.grants)

    def _may(self, needed: str) -> str:
        """The caller's grants, and how to add the needed one."""
        granted = ", ".join(str(grant) for grant in self.grants) or "nothing"
        return (
            f"it is granted {granted}; add {needed} to its line in the manager's tokens file (--tokens), or to the "
            "common name of its certificate, or call with another one"
        )


EVERYBODY = Caller("everybody", everything=True)
"""The caller of a manager that does not authenticate."""


def digest_of(token: str) -> bytes:
    """The digest of a token, which a manager stores in its place."""
    return hashlib.sha256(token.encode()).digest()


class Tokens:
    """Digests of tokens, and what each grants."""

    def __init__(self, entries: Iterable[tuple[int, bytes, tuple[Grant, ...]]]) -> None:
        """entries: the line in its file, digest and grants of each."""
        self._entries = tuple(entries)

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """Grants from lines of grants (with commas between them) and the SHA-256 of the token in hexadecimal:

            replica/rollout-*,viewer   9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

        Empty lines and what follows a # are left out. Raises INVALID_ARGUMENT naming the line, never its content: it
        may hold a token where its digest belongs.
        """
        entries: list[tuple[int, bytes, tuple[Grant, ...]]] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                grants, digest = words
                entry = (number, bytes.fromhex(digest), tuple(Grant.parse(grant) for grant in grants.split(",")))
            except (ValueError, CkptEngineError) as error:
                why = f": {error}" if isinstance(error, CkptEngineError) else ""
                if len(words) != 2:
                    why = f": it has {len(words)} words, not two (no spaces between grants)"
                raise invalid(f"line {number} of the tokens file is not GRANT[,GRANT] SHA256{why}") from None
            if len(entry[1]) != hashlib.sha256().digest_size:
                raise invalid(f"line {number} of the tokens file: the digest has {len(entry[1])} bytes, SHA-256 has 32")
            entries.append(entry)
        if not entries:
            raise invalid("the tokens file names no token, so no caller would be let in")
        return cls(entries)

    def caller(self, token: str) -> Caller | None:
        """The caller with this token; None: it is unknown, or too short to be a secret. Takes constant time."""
        sought, found = digest_of(token), None
        for line, digest, grants in self._entries:
            if hmac.compare_digest(digest, sought):
                found = Caller(f"the holder of the token on line {line} of the tokens file", grants)
        return found if len(token) >= TOKEN_CHARACTERS else None
