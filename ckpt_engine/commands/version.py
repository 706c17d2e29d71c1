"""``ckpt-engine version``: lists the versions that can be read or gone back to, and finds the first bad one of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from ckpt_engine.addresses import MANAGER
from ckpt_engine.client import Client
from ckpt_engine.commands.asking import Manager, ask_manager, failure_exit
from ckpt_engine.commands.lines import Text, table_console
from ckpt_engine.core.halving import first_bad
from ckpt_engine.core.message_json import as_json_array
from ckpt_engine.core.problems import CkptEngineError, invalid, not_found, precondition
from ckpt_engine.v1 import manager_pb2

LEAST_ABORT = 126
"""The lowest exit status of a command that says nothing about a version: it could not be run, or was ended."""


def list_versions(
    manager: Manager = MANAGER,
    lineage: Annotated[str | None, typer.Option(help="Only this lineage. Default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Show each version that something holds as it was sealed, or a replica serves: the newest of a run first.

    What a relay, a trainer's ranks ("rank 0") or files hold can be gone back to (`ckpt-engine rollback`) and read
    (`ckpt-engine pull`).
    """
    found = ask_manager(manager, lambda client: client.versions(lineage), "its status")
    if json_output:
        typer.echo(as_json_array(found))
    else:
        table_console().print(table(found))


def table(versions: Sequence[manager_pb2.VersionStatus]) -> Table:
    """One row a version."""
    rows = Table("lineage", "version", "root", "held by", "in replicas", box=None)
    for each in versions:
        held, inside = ", ".join(each.holders), ", ".join(each.replicas)
        name, root = each.identity, each.identity.root.hex()
        rows.add_row(Text(name.lineage), str(name.version), root[:12], Text(held or "-"), Text(inside or "-"))
    if not versions:
        rows.add_row(Text("none", style="dim"), "", "", "", "")
    return rows


def bisect(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND", help="Judges the version that is served: exits with 0 if it is good."),
    ],
    good: Annotated[int, typer.Option(min=0, help="A version that is known to be good.")],
    bad: Annotated[int, typer.Option(min=0, help="A later version that is known to be bad.")],
    manager: Manager = MANAGER,
    lineage: Annotated[str | None, typer.Option(help="Lineage of the versions. Default: the only one held.")] = None,
    replica: Annotated[str, typer.Option(help="The replica that serves them. Default: the only one.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Find the first bad version between two: one replica serves what is held of them, and a command judges each.

    The command finds CKPT_ENGINE_VERSION, CKPT_ENGINE_URL (the engine's address) and CKPT_ENGINE_REPLICA in its
    environment. Exit status 0: the version is good; 1 to 125: it is bad; anything else ends the search. It is asked at
    most log2 times. The other replicas serve what they do; the named one is brought back at the end.

    \b
      ckpt-engine version bisect --good 3 --bad 40 --replica eval -- ./judge.sh
    """
    try:
        with Client(manager) as client:
            search = _Search(client, command, lineage, replica, quiet=json_output)
            found = search.run(good, bad)
    except CkptEngineError as error:
        raise failure_exit(manager, error) from error
    if json_output:
        result = {"lineage": search.lineage, "good": search.good, "bad": found, "asked": search.questions}
        typer.echo(json.dumps({**result, "not_held": search.gaps}))
        return
    typer.echo(f"version {found} of {search.lineage} is the first bad one; {search.good} is the last good one")
    if search.gaps:
        typer.echo(f"not held, so not asked about: {', '.join(map(str, search.gaps))}")


class _Search:
    """One search. good: the last version that is known to be good. gaps: versions between it and the first bad one that
    nothing holds."""

    def __init__(self, client: Client, command: Sequence[str], lineage: str | None, replica: str, quiet: bool) -> None:
        self._client = client
        self._command = list(command)
        self._quiet = quiet
        self._replica = _chosen(client, replica)
        held = [each.identity for each in client.versions(lineage) if each.holders]
        lineages = sorted({identity.lineage for identity in held})
        if len(lineages) != 1:
            hint = f"versions of {', '.join(map(repr, lineages))} are held: name one with --lineage"
            raise invalid(hint if lineages else "nothing holds any version, so none can be served again")
        self.lineage = lineages[0]
        self._held = sorted({identity.version for identity in held})
        self.good = -1
        self.questions: list[int] = []
        self.gaps: list[int] = []

    def run(self, good: int, bad: int) -> int:
        """The first bad version. Brings the replica back to what it was to serve, also if the search ends early."""
        if good >= bad:
            raise invalid(f"--good {good} is not before --bad {bad}")
        self.good = good
        candidates = [version for version in self._held if good < version < bad]
        before = self._replica.desired
        try:
            found = first_bad(candidates, self._is_bad)
        finally:
            if self.questions and self._replica.HasField("desired"):
                self._bring_back(before.version, before.lineage)
        first = bad if found is None else found
        self.gaps = [version for version in range(self.good + 1, first) if version not in self._held]
        return first

    def _is_bad(self, version: int) -> bool:
        self._serve(version, self.lineage)
        self.questions.append(version)
        url = self._status().engine.url
        variables = {
            "CKPT_ENGINE_VERSION": str(version),
            "CKPT_ENGINE_URL": url,
            "CKPT_ENGINE_REPLICA": self._replica.name,
        }
        try:
            status = subprocess.run(self._command, env={**os.environ, **variables}, check=False).returncode
        except OSError as error:
            raise invalid(f"{self._command[0]} cannot be run: {error.strerror}") from error
        if not 0 <= status < LEAST_ABORT:
            raise precondition(f"the command ended with {status} at version {version}, which says nothing about it")
        if self._status().identity.version != version:
            raise precondition(
                f"replica {self._replica.name} was brought to another version while the command judged {version}: "
                "search again when no update is made"
            )
        self.good = self.good if status else version
        if not self._quiet:
            typer.echo(f"version {version}: {'bad' if status else 'good'}")
        return bool(status)

    def _bring_back(self, version: int, lineage: str) -> None:
        try:
            self._serve(version, lineage)
        except CkptEngineError as error:
            words = f"replica {self._replica.name} is not brought back to version {version}: {error.problem.message}"
            typer.echo(words, err=True)

    def _serve(self, version: int, lineage: str) -> None:
        report = self._client.rollback(version, lineage=lineage, replicas=(self._replica.name,))
        if not report.ok:
            raise precondition(f"version {version} is not served: {report}", replica=self._replica.name)

    def _status(self) -> manager_pb2.ReplicaStatus:
        return next(each for each in self._client.replicas() if each.name == self._replica.name)


def _chosen(client: Client, name: str) -> manager_pb2.ReplicaStatus:
    """The replica of this name; without a name the only one. Raises NOT_FOUND and INVALID_ARGUMENT, naming those that
    there are."""
    replicas = client.replicas()
    names = ", ".join(each.name for each in replicas)
    if not name and len(replicas) != 1:
        raise invalid(f"there are several replicas ({names}): name one with --replica" if replicas else "there is none")
    found = [each for each in replicas if name in ("", each.name)]
    if not found:
        raise not_found(f"there is no replica {name!r} (known are: {names})", replica=name)
    return found[0]
