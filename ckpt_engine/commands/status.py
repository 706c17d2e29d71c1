"""``ckpt-engine status``: which members are connected, what every replica serves, what the manager is doing."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from ckpt_engine.addresses import MANAGER
from ckpt_engine.client import AsyncClient
from ckpt_engine.commands.asking import Manager, failure_exit, refusal_of
from ckpt_engine.commands.lineage import table as lineage_table
from ckpt_engine.commands.lines import PIPE_COLUMNS, Text, table_console
from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.message_json import as_json
from ckpt_engine.core.probe import answer_words, is_bad
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.scrub import scrub_words
from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.machines.ledger_tasks import OperatorHold
from ckpt_engine.machines.manager.status import replica_state
from ckpt_engine.report import DeploymentReport, ReplicaReport, gpu_uuid
from ckpt_engine.v1 import manager_pb2, weights_pb2

WATCH_SECONDS = 0.5
"""Seconds between two questions of --watch."""

_STATE_STYLES = {"serving": "green", "asleep": "cyan", "closed": "red", "disconnected": "yellow"}


def status(
    manager: Manager = MANAGER,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing until interrupted.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object, or with --watch one a line.")
    ] = False,
) -> None:
    """Show lineages, trainers, relays, replicas and what they serve.

    Exits with 1 if the manager does not answer.
    """
    try:
        asyncio.run(_show(manager, watch, json_output))
    except CkptEngineError as error:
        raise failure_exit(manager, error) from error
    except KeyboardInterrupt:
        raise typer.Exit(0 if watch else 130) from None


async def _show(manager: str, watch: bool, json_output: bool) -> None:
    async with AsyncClient(manager) as client:
        first = await client.status()
        if json_output:
            typer.echo(as_json(first, None if watch else 2))
            while watch:
                await asyncio.sleep(WATCH_SECONDS)
                typer.echo(as_json(await client.status()))
        elif not watch:
            table_console().print(as_tables(manager, first, table_console().width >= WIDE))
        else:
            await _watch(client, as_tables(manager, first, table_console().width >= WIDE))


async def _watch(client: AsyncClient, first: RenderableType) -> None:
    """Shows the status for ever: in place on a terminal; elsewhere prints it again whenever it has changed."""
    console = table_console()
    last_text = ""
    with Live(first, console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        tables = first
        while True:
            if live is not None:
                live.update(tables, refresh=True)
            elif (text := _plain(tables)) != last_text:
                console.print(time.strftime("%H:%M:%S"), text, sep="\n", markup=False, highlight=False)
                last_text = text
            await asyncio.sleep(WATCH_SECONDS)
            try:
                tables = as_tables(client.address, await client.status(), console.width >= WIDE)
            except CkptEngineError as error:
                # Managers are restarted: go on, so that the user sees it come back.
                tables = Text(refusal_of(client.address, error), style="red")


WIDE = 120
"""Columns that a terminal needs for everything; in a narrower one tables leave out what is least needed."""


def _plain(tables: RenderableType) -> str:
    text = io.StringIO()
    Console(file=text, width=PIPE_COLUMNS).print(tables)
    return text.getvalue()


def as_tables(manager: str, answer: manager_pb2.GetStatusResponse, wide: bool = True) -> Group:
    """The status as tables. wide: the terminal has `WIDE` columns; else 80 are assumed."""
    latest = _version(answer.latest, wide) if answer.HasField("latest") else "none yet"
    about = f"ckpt-engine {answer.software_version}   cluster {answer.fence.cluster[:8]}   epoch {answer.fence.epoch}"
    head = Text.assemble(
        ("manager ", "bold"),
        f"{manager}   {about}   latest version: {latest}   ",
        (answer.phase, "green" if answer.phase == "idle" else "yellow"),
    )
    warnings = [Text(f"warning: {warning}", style="yellow") for warning in answer.warnings]
    relays = [_relays(answer, wide)] if answer.holders else []
    return Group(
        head,
        *warnings,
        lineage_table(answer.lineages),
        _trainers(answer, wide),
        *relays,
        _replicas(answer.replicas, wide),
        *_troubles(answer),
        *(Text(str(DeploymentReport(each))) for each in answer.deployments),
    )


def show_replicas(replicas: Sequence[manager_pb2.ReplicaStatus]) -> None:
    """Prints the table of these replicas, and their problems."""
    console = table_console()
    troubles = _troubles(manager_pb2.GetStatusResponse(replicas=replicas))
    console.print(_replicas(replicas, console.width >= WIDE), *troubles, sep="\n")


def _version(identity: weights_pb2.Identity, wide: bool) -> str:
    return version_of(identity) if wide else f"{identity.version} of {identity.lineage}"


def version_of(identity: weights_pb2.Identity) -> str:
    """A weight version in a few characters: number, lineage, the start of its root."""
    return f"{identity.version} of {identity.lineage} ({identity.root.hex()[:12]})"


def _troubles(answer: manager_pb2.GetStatusResponse) -> list[Text]:
    """Lines below the table: why replicas do not serve, or could not take the last version; engines with wrong version
    labels; probes; scrubs; stage memory; accepted guesses of drafts; slow relays. Yellow: it serves."""
    lines = []
    for replica in answer.replicas:
        unfit = f"left out of updates: {replica.unfit.message}" if replica.HasField("unfit") else ""
        trouble = "; ".join(reason for reason in (unfit, replica.closed_reason, _drift(replica)) if reason)
        if trouble and replica.HasField("hold"):
            lines.append(Text(f"{replica.name}: {trouble}; it is {_hold(replica)}", style="red"))
        elif trouble:
            lines.append(Text(f"{replica.name}: {trouble}", style="red"))
        elif replica.HasField("hold"):
            lines.append(Text(f"{replica.name}: it is {_hold(replica)}", style="yellow"))
        elif replica.label_problem:
            lines.append(Text(f"{replica.name}: {replica.label_problem}", style="yellow"))
        if replica.engine_check:
            lines.append(Text(f"{replica.name}: {replica.engine_check}", style="yellow"))
        if (probed := ReplicaReport(replica.last_outcome).probe) is not None:
            style = "yellow" if is_bad(probed) else "dim"
            lines.append(Text(f"{replica.name}: probe: {answer_words(probed)}", style=style))
        absent = ReplicaReport(replica.last_outcome).absent
        lines += [Text(f"{replica.name}: {row}", style="dim") for row in absent]
        if scrub := scrub_words(replica.scrubs, time.time()):
            torn = any(each.differences for each in replica.scrubs)
            lines.append(Text(f"{replica.name}: scrub: {scrub}", style="yellow" if torn else "dim"))
        if replica.stage_memory:
            lines.append(Text(f"{replica.name}: stage memory: {replica.stage_memory}", style="dim"))
        if (guesses := replica.guesses).guessed:
            share = f"{guesses.accepted / guesses.guessed:.0%} of {guesses.guessed} guessed tokens accepted"
            lines.append(Text(f"{replica.name}: draft: {share} since version {replica.identity.version}", style="dim"))
        for each in replica.unopened:
            words = f"worker {each.worker_rank} could not open {each.source} over {each.transport}: {each.reason}"
            lines.append(Text(f"{replica.name}: {words}", style="yellow"))
    for holder in answer.holders:
        if holder.slow:
            words = f"{holder.kind} {holder.name} passes nothing on to others: it {holder.slow}"
            lines.append(Text(words, style="yellow"))
    return lines


def _drift(replica: manager_pb2.ReplicaStatus) -> str:
    """What the replica is to serve and does not hold, and why. Empty: it holds it, or another line says why not."""
    if not replica.HasField("drift") or not replica.connected or replica.HasField("unfit") or replica.HasField("hold"):
        return ""
    target = f"it is to serve version {replica.desired.version} of {replica.desired.lineage}"
    retry = f"; next attempt in {replica.drift.next_attempt_seconds:.0f} s"
    return f"{target}: {replica.drift.reason}{retry if replica.drift.HasField('next_attempt_seconds') else ''}"


def _hold(replica: manager_pb2.ReplicaStatus) -> str:
    """Says that an operator holds the replica, and what waits for its release."""
    hold = OperatorHold(replica.hold.since, replica.hold.reason).describe(replica.name)
    waits = f"; it is to serve version {replica.desired.version} of {replica.desired.lineage}"
    return hold + (waits if replica.HasField("drift") else "")


def _gpus(gpus: Sequence[weights_pb2.Gpu]) -> str:
    """The start of each GPU's UUID, and each name once: "GPU-3fa91c02 (NVIDIA H200)"."""
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus if gpu.name))
    uuids = ", ".join(gpu_uuid(gpu.uuid)[:12] for gpu in gpus)
    return f"{uuids} ({names})" if names else uuids


def _trainers(answer: manager_pb2.GetStatusResponse, wide: bool) -> Table:
    gpus = ("GPUs",) if wide and any(trainer.gpus for trainer in answer.trainers) else ()
    table = Table("trainer", "rank", "state", "host", *gpus, title="Trainers", title_justify="left", box=None)
    for trainer in answer.trainers:
        state = "disconnected" if not trainer.connected else "published" if trainer.published else "connected"
        table.add_row(
            Text(trainer.lineage),
            f"{trainer.rank} of {trainer.world_size}",
            Text(state, style="green" if state == "published" else "yellow"),
            Text(trainer.description),
            *(Text(_gpus(trainer.gpus)) for _ in gpus),
        )
    if not answer.trainers:
        table.add_row(Text("none", style="dim"))
    return table


def _relays(answer: manager_pb2.GetStatusResponse, wide: bool) -> Table:
    """Relays and other holders of sealed versions."""
    titles = ("relay", "state", "holds", "memory", "host", "last filling") if wide else ("relay", "state", "holds")
    table = Table(title="Relays", title_justify="left", box=None)
    for title in titles:
        table.add_column(title, overflow="fold")
    for holder in answer.holders:
        state = _holder_state(holder)
        cells: dict[str, str | Text] = {
            "relay": Text(holder.name if holder.kind == "relay" else f"{holder.name} ({holder.kind})"),
            "state": Text(state, style="yellow" if state == "disconnected" else "green"),
            "holds": Text(", ".join(_share(each, wide) for each in holder.shares) or "nothing"),
            "memory": human_bytes(holder.filling.memory_bytes) if holder.HasField("filling") else "",
            "host": Text(holder.description),
            "last filling": Text(_last_filling(holder)),
        }
        table.add_row(*(cells[title] for title in titles))
    return table


def _share(share: manager_pb2.VersionShare, wide: bool) -> str:
    """A version, and how much of it there is unless that is all."""
    version = _version(share.identity, wide)
    if not share.wanted_bytes or (share.bytes >= share.wanted_bytes and not share.coming):
        return version
    return f"{version} ({100 * share.bytes // share.wanted_bytes} %{', coming' * share.coming})"


def _holder_state(holder: manager_pb2.HolderStatus) -> str:
    if not holder.connected:
        return "disconnected"
    if holder.HasField("progress") and holder.progress.bytes_total:
        return f"filling, {100 * holder.progress.bytes_done // holder.progress.bytes_total} %"
    return "connected"


def _last_filling(holder: manager_pb2.HolderStatus) -> str:
    """Bytes of the last filling by source, and its seconds; or why it failed."""
    if not holder.HasField("last_filled"):
        return ""
    last = holder.last_filled
    if last.HasField("problem"):
        return f"version {last.identity.version}: {last.problem.message}"
    amounts = ", ".join(f"{human_bytes(each.bytes)} from {each.source}" for each in last.brought)
    return f"version {last.identity.version}: {amounts or 'nothing'} in {last.fill_seconds:.3f} s"


def _replicas(replicas: Sequence[manager_pb2.ReplicaStatus], wide: bool) -> Table:
    pools = ("pool",) if any(replica.pool for replica in replicas) else ()
    titles: tuple[str, ...] = ("replica", *pools, "state", "version", "last pause")
    if wide:
        gpus = ("GPUs",) if any(replica.gpus for replica in replicas) else ()
        titles = ("replica", *pools, "engine", "mode", "state", "version", "workers", *gpus, "last sync", "last pause")
    table = Table(title="Replicas", title_justify="left", box=None)
    for title in titles:
        table.add_column(title, overflow="fold")
    for replica in replicas:
        state = replica_state(replica)
        outcome = replica.last_outcome if replica.HasField("last_outcome") else None
        cells: dict[str, str | Text] = {
            "replica": Text(replica.name),
            "pool": Text(replica.pool),
            "engine": Text(f"{replica.engine.kind} {replica.engine.version}".strip()),
            "mode": enum_word(manager_pb2.Mode, replica.mode),
            "state": Text(state, style=_STATE_STYLES.get(state, "")),
            "version": Text(_version(replica.identity, wide) if replica.HasField("identity") else "none"),
            "workers": str(len(replica.workers)),
            "GPUs": Text(_gpus([gpu for worker in replica.gpus for gpu in worker.gpus])),
            "last sync": f"{outcome.sync_seconds:.3f} s" if outcome else "",
            "last pause": f"{outcome.pause_seconds:.3f} s" if outcome else "",
        }
        table.add_row(*(cells[title] for title in titles))
    if not replicas:
        table.add_row(Text("none", style="dim"))
    return table
