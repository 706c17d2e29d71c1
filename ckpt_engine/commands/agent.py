"""``ckpt-engine agent``: the agent of one inference server, in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
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
from ckpt_engine.core import scrub
from ckpt_engine.core import stage_memory as stage
from ckpt_engine.core.adapters import adapter_versions
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


_VERSIONS = 3
"""Versions that an engine keeps of an adapter: two in use while the next one is brought."""


class RelayPolicy(StrEnum):
    """Whether a relay is started beside the agent."""

    AUTO = "auto"
    NEVER = "never"


EVICTED = 3
"""Exit status after an operator took the replica out. Service managers are told not to start such an agent again."""


def _check_transports(transports: list[str] | None) -> list[str] | None:
    for name in transports or ():
        if name not in worker_kinds():
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(worker_kinds())}")
    return transports


def _check_stage_memory(text: str) -> str:
    try:
        stage.stage_bytes(text)
    except CkptEngineError as error:
        raise typer.BadParameter(f"{error.problem.message}; or auto, or 0") from error
    return text


def _check_scrub(text: str) -> str:
    try:
        scrub.scrub_seconds(text)
    except CkptEngineError as error:
        raise typer.BadParameter(error.problem.message) from error
    return text


def _adapters(words: list[str] | None) -> dict[str, int]:
    return adapter_versions(",".join(word if "=" in word else f"{word}={_VERSIONS}" for word in words or ()))


def _check_adapters(words: list[str] | None) -> list[str] | None:
    try:
        _adapters(words)
    except CkptEngineError as error:
        raise typer.BadParameter(error.problem.message) from error
    return words


def _engine(option: Engine | None, command: Sequence[str]) -> Engine:
    """The kind that --engine names, or that the command behind -- starts. Raises typer.BadParameter if there is none,
    or if the two differ."""
    found = kind_of(command, engine_names())
    if option is None and not found:
        raise typer.BadParameter(
            f"name one of {', '.join(engine_names())}, or start the engine behind --, as with -- vllm serve MODEL",
            param_hint="--engine",
        )
    if option is not None and found not in ("", option):
        raise typer.BadParameter(f"{option}, but what stands behind -- starts {found}", param_hint="--engine")
    return option or Engine(found)


def agent(
    manager: Annotated[str, typer.Option(envvar="CKPT_ENGINE_MANAGER", help="HOST:PORT of the manager.")],
    engine: Annotated[
        Engine | None, typer.Option(help="Kind of the engine. Default: that of the command behind --.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model directory for the engine; or name it in the arguments.")] = "",
    name: Annotated[str, typer.Option(help="Name of this replica. Default: host, engine and port.")] = "",
    pool: Annotated[
        str,
        typer.Option(
            envvar="CKPT_ENGINE_POOL", help="Pool of this replica. Updates of different pools run independently."
        ),
    ] = "",
    mode: Annotated[Mode, typer.Option(help="How it shares its GPUs with a trainer: docs/modes.md.")] = Mode.STANDALONE,
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
            callback=_check_transports,
            autocompletion=lambda: list(worker_kinds()),
            help="Read weights over this transport only; repeatable. "
            "Default: the nearest that works. An update that another one would have to carry is refused.",
        ),
    ] = None,
    restart: Annotated[
        Restart,
        typer.Option(help="Restart an engine that ends: on-failure: if it has worked once; always: also if never."),
    ] = Restart.ON_FAILURE,
    restart_limit: Annotated[int, typer.Option(help="Restarts in a row before giving up; 0: no limit.", min=0)] = 0,
    nodes: Annotated[
        int | None,
        typer.Option(
            help="Nodes that the launched engine spans; each has an agent. Default: 1, or LWS_GROUP_SIZE.",
            min=1,
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            envvar="CKPT_ENGINE_NODE_RANK",
            help="Number of this node; node 0 leads and has the HTTP server. Default: 0, or LWS_WORKER_INDEX.",
        ),
    ] = None,
    leader: Annotated[
        str,
        typer.Option(
            help="HOST:PORT where the agent of node 0 listens for the others; equal on all nodes. "
            "Default: LWS_LEADER_ADDRESS, port 7100."
        ),
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
        float, typer.Option(help="Most seconds that the gate keeps a request during an update; 0: none.", min=0)
    ] = _HOLD.seconds,
    hold_requests: Annotated[int, typer.Option(help="Most requests that wait at a time.", min=0)] = _HOLD.requests,
    hold_bytes: Annotated[
        int, typer.Option(help="Most bytes of the bodies of waiting requests together.", min=0)
    ] = _HOLD.bytes,
    check_engine: Annotated[
        Policy,
        typer.Option(
            envvar="CKPT_ENGINE_CHECK_ENGINE",
            help="Check an engine with its own loader before its first update; auto: only an untested version.",
        ),
    ] = Policy.AUTO,
    startup_timeout: Annotated[float, typer.Option(help="Seconds for the engine to answer.", min=1)] = 600.0,
    deadline: Deadline = None,
    engine_output: Annotated[bool, typer.Option(help="Show the engine's own output as well.")] = False,
    stage_memory: Annotated[
        str,
        typer.Option(
            envvar=stage.ENVIRONMENT,
            metavar="SIZE|auto|0",
            callback=_check_stage_memory,
            help="Memory of each worker, on its device, into which it brings a version before the pause; auto: at most "
            "half of what is free (docs/staging.md).",
        ),
    ] = stage.NONE,
    scrub_seconds: Annotated[
        str,
        typer.Option(
            envvar=scrub.ENVIRONMENT,
            metavar="SECONDS",
            callback=_check_scrub,
            help="Each worker hashes its weights again within so many seconds, between updates, and closes the replica "
            "if they have changed; 0: never (docs/scrub.md).",
        ),
    ] = f"{scrub.DEFAULT_SECONDS:g}",
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VERSIONS]",
            callback=_check_adapters,
            help="Serve the adapter (LoRA) of this name, in its own pool, and keep so many versions of it (default 3); "
            "repeatable (docs/adapters.md).",
        ),
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            envvar="CKPT_ENGINE_METRICS",
            help="Where Prometheus finds this replica's metrics, host:port. Empty: nowhere.",
        ),
    ] = "",
    relay: Annotated[
        RelayPolicy, typer.Option(help="auto: start a relay beside this agent if this host has none (docs/relays.md).")
    ] = RelayPolicy.NEVER,
    log_level: LogLevel = Level.WARNING,
    log_format: LogFormat = LogForm.TEXT,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="Command of the engine, or only its options; passed on unchanged."),
    ] = None,
) -> None:
    """Run the agent of one inference server, and launch the server unless --url names one that runs.

    Runs until SIGTERM or Ctrl-C; a manager that does not answer is dialled again and again. Exits with 0 after SIGTERM
    or Ctrl-C, 3 after an eviction, 2 for invalid options, 1 for anything else.

    \b
    Behind -- comes the command of the engine, or only its options:
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
        kind = engine_kind(engine)
    except UnknownAdapterError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error
    if kind.requires is not None and not url:
        require(kind.requires.extra, *kind.requires.modules, what=kind.title)
    if url and not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{url!r} is not the URL of an HTTP server: try 'http://{url}'", param_hint="--url")
    if url and (arguments or model or port):
        raise typer.BadParameter(
            "--url attaches to an engine that runs; --model, --port and what stands behind -- are for launching one",
            param_hint="--url",
        )
    if url and stage_memory not in (stage.NONE, os.environ.get(stage.ENVIRONMENT)):
        raise typer.BadParameter(
            f"an engine that runs has its stage memory by its own environment: start it with {stage.ENVIRONMENT}="
            f"{stage_memory}",
            param_hint=stage.OPTION,
        )
    if url and scrub_seconds not in (f"{scrub.DEFAULT_SECONDS:g}", os.environ.get(scrub.ENVIRONMENT)):
        raise typer.BadParameter(
            f"an engine that runs is scrubbed by its own environment: start it with {scrub.ENVIRONMENT}="
            f"{scrub_seconds}",
            param_hint=scrub.OPTION,
        )
    if adapter and (url or (nodes or 1) > 1):
        raise typer.BadParameter(
            "adapters are served by an engine on one node that this agent launches (no --url, no --nodes)",
            param_hint="--adapter",
        )
    modes = {
        Mode.STANDALONE: manager_pb2.MODE_STANDALONE,
        Mode.HYBRID: manager_pb2.MODE_HYBRID,
        Mode.COLOCATED: manager_pb2.MODE_COLOCATED,
    }
    fields = {"replica": name} if name else {}  # of each JSON line
    say = partial(_say_json, fields) if log_format is LogForm.JSON else _say

    def take_name(found: str) -> None:
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
        stage_memory=stage_memory,
        scrub_seconds=scrub_seconds,
        adapters=_adapters(adapter),
    )
    deadlines = configured_deadlines(deadline)
    log_to_stderr(log_level, log_format, **fields)
    agent: ReplicaAgent | FollowingAgent
    own_relay = None
    if relay is RelayPolicy.AUTO:
        options = ["--manager", manager, "--log-level", log_level, "--log-format", log_format]
        own_relay = OwnRelay([*options, *(["--advertise", advertise] if advertise else [])], deadlines, say)
    try:
        node = NodeSettings.found(nodes, node_rank, leader, node_token, os.environ)
        if url and node.nodes > 1:
            alone = (
                "; LWS_GROUP_SIZE says so, and `--nodes 1` is for an engine in this pod alone" if nodes is None else ""
            )
            raise ValueError(f"--url: an engine on {node.nodes} nodes is launched by its agents{alone}")
        if node.rank > 0:
            if metrics:
                raise ValueError("--metrics: the agent of node 0 has those of the whole replica")
            agent = FollowingAgent(
                node,
                engine,
                launch.arguments,
                model,
                worker_transports(tuple(transport or ())),
                deadlines,
                say,
                _pass_on if engine_output else None,
                sleeps=launch.sleeps,
                stage_memory=stage_memory,
                scrub_seconds=scrub_seconds,
            )
            _run_to_the_end(agent, own_relay)
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
            nodes=node,
            close_when_alone=close_when_alone,
            hold=HoldLimits(hold_seconds, hold_requests, hold_bytes),
            metrics=metrics,
            check_engine=check_engine.value,
        )
        agent = ReplicaAgent(settings, say, _pass_on if engine_output else None, take_name)
    except (ValueError, UnknownAdapterError) as error:
        raise typer.BadParameter(str(error)) from error
    _run_to_the_end(agent, own_relay)


def _run_to_the_end(agent: ReplicaAgent | FollowingAgent, own_relay: OwnRelay | None) -> None:
    from ckpt_engine.agent.engine import EngineFailedError
    from ckpt_engine.agent.session import EvictedError

    end_loading()
    try:
        asyncio.run(_run(agent, own_relay))
    except (EngineFailedError, CkptEngineError, ValueError) as error:
        words = error.problem.message if isinstance(error, CkptEngineError) else str(error)
        print(f"ckpt-engine agent: {words}", file=sys.stderr, flush=True)
        raise typer.Exit(EVICTED if isinstance(error, EvictedError) else 1) from error


async def _run(agent: ReplicaAgent | FollowingAgent, own_relay: OwnRelay | None) -> None:
    from ckpt_engine.agent.session import ReplicaAgent
    from ckpt_engine.agent.shelves import run_with_shelves

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    relay_task = None if own_relay is None else asyncio.ensure_future(own_relay.run())
    try:
        if isinstance(agent, ReplicaAgent):
            await run_with_shelves(agent, stop)
        else:
            await agent.run(stop)
    finally:
        if relay_task is not None:
            relay_task.cancel()
            await asyncio.gather(relay_task, return_exceptions=True)


def _say(line: str) -> None:
    # A closed terminal must not stop a replica.
    with contextlib.suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _say_json(fields: dict[str, str], line: str) -> None:
    entry = {"time": utc(time.time()), "level": "info", "message": line, **fields}
    with contextlib.suppress(OSError, ValueError):
        print(json.dumps(entry), flush=True)


def _pass_on(line: str) -> None:
    print(f"engine | {line}", flush=True)
