"""``ckpt-engine agent``: the agent of one inference server, in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_engine.agent.launched import LaunchSettings, Restart
from ckpt_engine.commands.choices import Level, LogForm, Mode, Policy
from ckpt_engine.commands.engine_choice import Engine
from ckpt_engine.commands.loading import end_loading
from ckpt_engine.commands.logs import LogFormat, LogLevel, log_to_stderr, utc
from ckpt_engine.commands.options import Deadline, configured_deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.transports import worker_kinds
from ckpt_engine.engine.kinds import engine_names
from ckpt_engine.engine.programs import kind_of
from ckpt_engine.extras import require
from ckpt_engine.gate.page import HoldLimits

if TYPE_CHECKING:
    from ckpt_engine.agent.following import FollowingAgent
    from ckpt_engine.agent.own_relay import OwnRelay
    from ckpt_engine.agent.session import ReplicaAgent

_HOLD = HoldLimits()


class Beside(StrEnum):
    """Whether a relay is started beside the agent."""

    AUTO = "auto"
    NEVER = "never"


EVICTED = 3
"""The exit status of an agent whose replica an operator took out. Service managers are told not to start it again."""


def _known(transports: list[str] | None) -> list[str] | None:
    for name in transports or ():
        if name not in worker_kinds():
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(worker_kinds())}")
    return transports


def _engine(given: Engine | None, command: Sequence[str]) -> Engine:
    """The kind that was given, or that the command behind -- starts. Raises typer.BadParameter if there is none, or
    these are two."""
    found = kind_of(command, engine_names())
    if given is None and not found:
        raise typer.BadParameter(
            f"name one of {', '.join(engine_names())}, or start the engine behind --, as with -- vllm serve MODEL",
            param_hint="--engine",
        )
    if given is not None and found not in ("", given):
        raise typer.BadParameter(f"{given}, but what stands behind -- starts {found}", param_hint="--engine")
    return given or Engine(found)


def agent(
    manager: Annotated[str, typer.Option(envvar="CKPT_ENGINE_MANAGER", help="HOST:PORT of the manager.")],
    engine: Annotated[Engine | None, typer.Option(help="Kind of the engine. Default: what stands behind --.")] = None,
    model: Annotated[str, typer.Option(help="Model directory for the engine; or name it in the arguments.")] = "",
    name: Annotated[str, typer.Option(help="Name of this replica. Default: host, engine and port.")] = "",
    pool: Annotated[
        str,
        typer.Option(envvar="CKPT_ENGINE_POOL", help="Replicas of one name are updated together, apart from others."),
    ] = "",
    mode: Annotated[Mode, typer.Option(help="Whose the GPUs are: docs/modes.md.")] = Mode.STANDALONE,
    port: Annotated[int, typer.Option(help="Port for the launched engine; 0: a free one.", min=0, max=65535)] = 0,
    url: Annotated[str, typer.Option(help="Attach to the engine that runs at this URL instead of launching one.")] = "",
    advertise: Annotated[
        str,
        typer.Option(
            envvar="CKPT_ENGINE_ADVERTISE",
            help="Name or IP at which other hosts reach this one; also in the engine's URL, if it listens there.",
        ),
    ] = "",
    transport: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"[{'|'.join(worker_kinds())}]",
            callback=_known,
            autocompletion=lambda: list(worker_kinds()),
            help="Read weights over this transport only; repeatable. "
            "Default: the nearest that works. An update that another one would have to carry is refused.",
        ),
    ] = None,
    restart: Annotated[
        Restart,
        typer.Option(help="When a launched engine ends: on-failure: if it has worked once; always: also if never."),
    ] = Restart.ON_FAILURE,
    restart_limit: Annotated[int, typer.Option(help="Restarts in a row before giving up; 0: no limit.", min=0)] = 0,
    nodes: Annotated[int, typer.Option(help="Nodes that the launched engine spans; each has an agent.", min=1)] = 1,
    node_rank: Annotated[
        int,
        typer.Option(envvar="CKPT_ENGINE_NODE_RANK", help="Of this node, from 0, which leads and has the HTTP server."),
    ] = 0,
    leader: Annotated[
        str, typer.Option(help="HOST:PORT where the agent of node 0 listens for the others; equal on all nodes.")
    ] = "",
    node_token: Annotated[
        Path | None, typer.Option(help="File with a secret (32 bytes or more) that the agents of all nodes share.")
    ] = None,
    close_when_alone: Annotated[
        bool,
        typer.Option(
            "--close-when-alone", help="Have the engine answer 503 once this agent has been gone for a lease (8 s)."
        ),
    ] = False,
    hold_seconds: Annotated[
        float, typer.Option(help="Longest that the gate keeps a request during an update; 0: it refuses.", min=0)
    ] = _HOLD.seconds,
    hold_requests: Annotated[int, typer.Option(help="Requests that may wait at a time.", min=0)] = _HOLD.requests,
    hold_bytes: Annotated[
        int, typer.Option(help="Bytes that the bodies of waiting requests may have together.", min=0)
    ] = _HOLD.bytes,
    check_engine: Annotated[
        Policy,
        typer.Option(
            envvar="CKPT_ENGINE_CHECK_ENGINE",
            help="Check an engine before its first update, by its own loader: auto: if no test has run its version.",
        ),
    ] = Policy.AUTO,
    startup_timeout: Annotated[float, typer.Option(help="Seconds for the engine to answer.", min=1)] = 600.0,
    deadline: Deadline = None,
    engine_output: Annotated[bool, typer.Option(help="Show the engine's own output as well.")] = False,
    metrics: Annotated[
        str,
        typer.Option(
            envvar="CKPT_ENGINE_METRICS",
            help="Where Prometheus finds this replica's metrics, host:port. Empty: nowhere.",
        ),
    ] = "",
    relay: Annotated[
        Beside, typer.Option(help="auto: start a relay beside this agent if this host has none (docs/relays.md).")
    ] = Beside.NEVER,
    log_level: LogLevel = Level.WARNING,
    log_format: LogFormat = LogForm.TEXT,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="That starts the engine, or its options alone; passed on untouched."),
    ] = None,
) -> None:
    """Runs the agent of one inference server, and launches the server unless --url names one that runs.

    Stays until SIGTERM or Ctrl-C; a manager that is away is dialled again and again. Exits with 0 when it was asked to
    stop, 3 when it was evicted, 2 for options that cannot be, 1 for anything else.

    \b
    Behind -- stands what would start the engine by itself, or only its options:
      ckpt-engine agent --manager 127.0.0.1:50051 -- vllm serve ./model
      ckpt-engine agent --manager 127.0.0.1:50051 --engine vllm \\
        --model ./model -- --max-model-len 4096
    """
    from ckpt_engine.agent.following import FollowingAgent
    from ckpt_engine.agent.nodes import NodeSettings
    from ckpt_engine.agent.own_relay import OwnRelay
    from ckpt_engine.agent.session import AgentSettings, ReplicaAgent
    from ckpt_engine.engine.kinds import UnknownAdapterError, engine_kind
    from ckpt_engine.transport.on_host import worker_transports
    from ckpt_engine.v1 import manager_pb2

    engine = _engine(engine, arguments or ())
    try:
        known = engine_kind(engine)
    except UnknownAdapterError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error
    if known.requires is not None and not url:
        require(known.requires.extra, *known.requires.modules, what=known.title)
    if url and not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{url!r} is not the URL of an HTTP server: try 'http://{url}'", param_hint="--url")
    if url and (arguments or model or port):
        raise typer.BadParameter(
            "--url attaches to an engine that runs; --model, --port and what stands behind -- are for launching one",
            param_hint="--url",
        )
    modes = {
        Mode.STANDALONE: manager_pb2.MODE_STANDALONE,
        Mode.HYBRID: manager_pb2.MODE_HYBRID,
        Mode.COLOCATED: manager_pb2.MODE_COLOCATED,
    }
    fields = {"replica": name} if name else {}  # of each JSON line
    say = partial(_say_json, fields) if log_format is LogForm.JSON else _say

    def named(found: str) -> None:
        fields["replica"] = found
        log_to_stderr(log_level, log_format, **fields)

    launch = LaunchSettings(
        engine,
        tuple(arguments or ()),
        model,
        port,
        restart,
        restart_limit,
        startup_timeout,
        sleeps=mode is not Mode.STANDALONE,
        advertise=advertise,
    )
    deadlines = configured_deadlines(deadline)
    log_to_stderr(log_level, log_format, **fields)
    agent: ReplicaAgent | FollowingAgent
    beside = None
    if relay is Beside.AUTO:
        options = ["--manager", manager, "--log-level", log_level, "--log-format", log_format]
        beside = OwnRelay([*options, *(["--advertise", advertise] if advertise else [])], deadlines, say)
    try:
        placed = NodeSettings(nodes, node_rank, leader, node_token)
        if placed.rank > 0:
            if url:
                raise ValueError("--url: an engine on several --nodes is launched by its agents")
            if metrics:
                raise ValueError("--metrics: the agent of node 0 has those of the whole replica")
            agent = FollowingAgent(
                placed,
                engine,
                launch.arguments,
                model,
                worker_transports(tuple(transport or ())),
                deadlines,
                say,
                _pass_on if engine_output else None,
                sleeps=launch.sleeps,
            )
            _run_to_the_end(agent, beside)
            return
        settings = AgentSettings(
            manager=manager,
            kind=engine,
            launch=None if url else launch,
            url=url,
            name=name,
            pool=pool,
            mode=modes[mode],
            advertise=advertise,
            transports=tuple(transport or ()),
            startup_seconds=startup_timeout,
            deadlines=deadlines,
            nodes=placed,
            close_when_alone=close_when_alone,
            hold=HoldLimits(hold_seconds, hold_requests, hold_bytes),
            metrics=metrics,
            check_engine=check_engine.value,
        )
        agent = ReplicaAgent(settings, say, _pass_on if engine_output else None, named)
    except (ValueError, UnknownAdapterError) as error:
        raise typer.BadParameter(str(error)) from error
    _run_to_the_end(agent, beside)


def _run_to_the_end(agent: ReplicaAgent | FollowingAgent, beside: OwnRelay | None) -> None:
    from ckpt_engine.agent.engine import EngineFailedError
    from ckpt_engine.agent.session import EvictedError

    end_loading()
    try:
        asyncio.run(_run(agent, beside))
    except (EngineFailedError, CkptEngineError, ValueError) as error:
        words = error.problem.message if isinstance(error, CkptEngineError) else str(error)
        print(f"ckpt-engine agent: {words}", file=sys.stderr, flush=True)
        raise typer.Exit(EVICTED if isinstance(error, EvictedError) else 1) from error


async def _run(agent: ReplicaAgent | FollowingAgent, beside: OwnRelay | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    lending = None if beside is None else asyncio.ensure_future(beside.run())
    try:
        await agent.run(stop)
    finally:
        if lending is not None:
            lending.cancel()
            await asyncio.gather(lending, return_exceptions=True)


def _say(line: str) -> None:
    # A terminal that was closed is no reason to stop a replica.
    with contextlib.suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _say_json(fields: dict[str, str], line: str) -> None:
    said = {"time": utc(time.time()), "level": "info", "message": line, **fields}
    with contextlib.suppress(OSError, ValueError):
        print(json.dumps(said), flush=True)


def _pass_on(line: str) -> None:
    print(f"engine | {line}", flush=True)
