"""What a ledger asks of the database that its tables are in: to run statements in one transaction, reading or writing.

It decides nothing: `ledger.py` says which statements, and each store which manager may write and what a failure means.
Statements are those that SQLite and PostgreSQL share, with `?` for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class StatementResult(Protocol):
    """What a statement found or changed."""

    @property
    def rowcount(self) -> int:
        """The number of rows that an INSERT, UPDATE or DELETE has changed."""
        ...

    def fetchone(self) -> Any:
        """The next row as a tuple; None: there is none."""
        ...

    def fetchall(self) -> list[Any]:
        """The rows that are left, each a tuple."""
        ...


class Statements(Protocol):
    """An open transaction."""

    def execute(self, statement: str, values: Sequence[object] = (), /) -> StatementResult:
        """Runs one statement."""
        ...


class Store(Protocol):
    """The tables of one ledger. All of it runs on the ledger's thread.

    Each method raises FAILED_PRECONDITION, in words with a remedy, if the tables cannot be read or written.
    """

    @property
    def name(self) -> str:
        """Where the tables are, for people; without secrets."""
        ...

    @property
    def fresh(self) -> bool:
        """Whether the tables were just made."""
        ...

    def read(self, statements: Callable[[Statements], T]) -> T:
        """Runs statements that change nothing, and see one state of the tables."""
        ...

    def write(self, statements: Callable[[Statements], T]) -> T:
        """Runs statements that take effect together or not at all, durably before this returns. Also raises
        FAILED_PRECONDITION, running none of them, if another manager may write now and this one may not. Statements may
        be run again if the database was lost meanwhile."""
        ...

    def close(self) -> None:
        """Closes what is open."""
        ...
