"""``ckpt-engine relay``: one relay in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_engine.commands.choices import Level, LogForm
from ckpt_engine.commands.loading import end_loading
from ckpt_engine.commands.logs import LogFormat, LogLevel, log_to_stderr
from ckpt_engine.commands.options import Deadline, configured_deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sizes import bytes_of
from ckpt_engine.extras import require

if TYPE_CHECKING:
    from ckpt_engine.relay.settings import RelaySettings

TAKEN = 4
"""Exit status of a relay if another relay has its directory."""


class RelayScope(StrEnum):
    """Which part of a version a relay holds."""

    NEEDS = "needs"
    EVERYTHING = "everything"


class RelayDeltas(StrEnum):
    """When a version travels between relays as what has changed since the one before."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def relay(
    manager: Annotated[str, typer.Option(envvar="CKPT_ENGINE_MANAGER", help="HOST:PORT of the manager.")],
    memory: Annotated[
        str,
        typer.Option(
            envvar="CKPT_ENGINE_RELAY_MEMORY",
            help="Memory for two versions, such as 200GiB. Default: half of what this host has left.",
        ),
    ] = "",
    hold: Annotated[
        RelayScope, typer.Option(help="Hold what this host's workers need of a version, or the whole model.")
    ] = RelayScope.NEEDS,
    directory: Annotated[
        Path | None,
        typer.Option(
            envvar="CKPT_ENGINE_RELAY_DIRECTORY",
            help="Directory of its socket; replicas need the same. Default: docs/relays.md.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this relay. Default: this host's.")] = "",
    user: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Id of a user with replicas that may read, beside this user and root; repeatable."),
    ] = None,
    slot_grace: Annotated[
        float, typer.Option(help="Seconds that a reader may keep a version that is to be overwritten.", min=0)
    ] = 30.0,
    listen: Annotated[
        str,
        typer.Option(
            envvar="CKPT_ENGINE_RELAY_LISTEN",
            help="HOST:PORT for relays of other hosts; port 0: a free one. Default: not reachable from other hosts.",
        ),
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str,
        typer.Option(
            envvar="CKPT_ENGINE_ADVERTISE",
            help="Name or IP at which they reach it. Default: that of --listen; if that is all: towards the manager.",
        ),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="CKPT_ENGINE_RELAY_INSECURE",
            help="Send weights to other hosts without encryption.",
        ),
    ] = False,
    ucx_devices: Annotated[
        str,
        typer.Option(
            envvar="CKPT_ENGINE_RELAY_UCX_DEVICES",
            help="Read other relays, and be read, over UCX as well: its devices, such as mlx5_0:1,mlx5_1:1, each a "
            "lane with helper processes of its own, or all. Nothing is encrypted. Default: no UCX.",
        ),
    ] = "",
    archive: Annotated[
        Path | None,
        typer.Option(
            envvar="CKPT_ENGINE_RELAY_ARCHIVE",
            metavar="DIR",
            help="Keep the versions that it was filled with on disk too, so that they can be served again after "
            "everything was restarted. Default: none is kept.",
        ),
    ] = None,
    keep: Annotated[
        int, typer.Option(metavar="N", help="Versions that --archive keeps, 1 to 60; fewer if the disk is full.")
    ] = 50,
    deltas: Annotated[
        RelayDeltas,
        typer.Option(
            envvar="CKPT_ENGINE_RELAY_DELTAS",
            help="Send other relays, and ask them for, what has changed since the version before: where that is there "
            "sooner (auto), wherever it has fewer bytes (always), or never. Workers of this host install what has "
            "changed, unless it is never.",
        ),
    ] = RelayDeltas.AUTO,
    metrics: Annotated[
        str,
        typer.Option(
            envvar="CKPT_ENGINE_RELAY_METRICS",
            help="Where Prometheus finds this relay's metrics, host:port. Empty: nowhere.",
        ),
    ] = "",
    until_stdin_ends: Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)] = False,
    deadline: Deadline = None,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = LogForm.TEXT,
) -> None:
    """Run this host's relay: weights wait in its memory while engines generate.

    One a host (a directory). Runs until SIGTERM or Ctrl-C; a manager that does not answer is dialled again and again.
    Exits with 0 after SIGTERM or Ctrl-C, 4 if another relay has the directory, 2 for invalid options, 1 for anything
    else. How much memory it needs: docs/relays.md.
    """
    require("trainer", "torch", "numpy", what="this command")
    from ckpt_engine.host.relay_directory import DIRECTORY
    from ckpt_engine.relay.alone import TakenError
    from ckpt_engine.relay.settings import RelaySettings, half_of_the_room
    from ckpt_engine.transport.ucx.packages import availability
    from ckpt_engine.transport.ucx.settings import DEVICES

    deadlines = configured_deadlines(deadline)
    log_to_stderr(log_level, log_format, **({"relay": name} if name else {}))
    log = logging.getLogger("ckpt_engine.relay")
    if directory is not None:
        os.environ[DIRECTORY] = str(directory.absolute())
    if ucx_devices:
        os.environ[DEVICES] = ucx_devices
        if not (found := availability()).ok:
            raise typer.BadParameter(found.reason, param_hint="--ucx-devices")
    try:
        size = bytes_of(memory) if memory else half_of_the_room()
        settings = RelaySettings(
            manager=manager,
            memory=size,
            name=name,
            everything=hold is RelayScope.EVERYTHING,
            users=tuple(user or ()),
            slot_grace=slot_grace,
            listen=listen,
            advertise=advertise,
            insecure=insecure,
            deltas=deltas.value,
            metrics=metrics,
            archive=None if archive is None else archive.absolute(),
            keep=keep,
            deadlines=deadlines,
        )
    except CkptEngineError as error:
        raise typer.BadParameter(error.problem.message, param_hint="an option") from error
    if not memory:
        log.info("no --memory was given: half of what this host has left")
    try:
        asyncio.run(_run(settings, until_stdin_ends))
    except CkptEngineError as error:
        log.error("%s", error.problem.message)
        raise typer.Exit(TAKEN if isinstance(error, TakenError) else 1) from error


async def _run(settings: RelaySettings, until_stdin_ends: bool) -> None:
    """until_stdin_ends: stop also when the process that started this one ends, which closes its standard input."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if until_stdin_ends:
        asyncio.get_running_loop().add_reader(0, _read, stop)
    from ckpt_engine.relay.process import run_relay

    end_loading()
    await run_relay(settings, stop)


def _read(stop: asyncio.Event) -> None:
    if not os.read(0, 1):
        asyncio.get_running_loop().remove_reader(0)
        stop.set()
