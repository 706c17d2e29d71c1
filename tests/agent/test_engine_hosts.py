"""Engines that an agent launches: ready, gone, restarted, refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from ckpt_engine.agent import ports
from ckpt_engine.agent.channel import AgentChannel
from ckpt_engine.agent.engine import EngineFailedError, advertised_url, checked_advertise
from ckpt_engine.agent.launched import LaunchedEngine, LaunchSettings, Restart
from ckpt_engine.agent.logs import MOST_FILES, new_log
from ckpt_engine.core.deadlines import ENVIRONMENT, Deadlines
from ckpt_engine.core.problems import CkptEngineError
from tests.agent.hosts import QUICK, SECONDS, Events, nobody_asks, running
from tests.agent.running_agent import Beside
from tests.waiting import alive

pytestmark = pytest.mark.usefixtures("quick")

Launch = Callable[..., LaunchedEngine]


@pytest.fixture
async def launch(root: Path, events: Events) -> AsyncIterator[Launch]:
    """Makes launched engines, and closes them whatever happens."""
    made: list[LaunchedEngine] = []

    def launch(
        *arguments: str,
        restart: Restart = Restart.ON_FAILURE,
        limit: int = 0,
        startup: float = SECONDS,
        advertise: str = "",
        port: int = 0,
    ) -> LaunchedEngine:
        settings = LaunchSettings(
            "small",
            arguments,
            restart=restart,
            restart_limit=limit,
            startup_seconds=startup,
            root=root,
            advertise=advertise,
            port=port,
        )
        made.append(LaunchedEngine(settings, events, nobody_asks, Deadlines.from_environment(os.environ)))
        return made[-1]

    yield launch
    for host in made:
        await host.close()


async def test_a_launched_engine_becomes_ready_and_goes_with_its_directory(
    launch: Launch, events: Events, root: Path
) -> None:
    host = launch()
    async with running(host):
        await events.until(lambda: bool(events.ready))
        ready = events.ready[0]
        assert (ready.engine.kind, ready.world_size, ready.paused) == ("small", 1, False)
        assert ready.engine.url.startswith("http://127.0.0.1:")
        assert host.agent_epoch == 1
        assert host.page is not None
        assert host.page.read()[0].alive
        pid = host.pid
        assert pid is not None
        await host.close()
    assert not alive(pid)
    assert sorted(os.listdir(root)) == ["logs", "ports"]


async def test_a_closing_that_raises_leaves_the_others_their_turn(
    launch: Launch, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is faked: a channel that closes, and then says that it could not."""
    real = AgentChannel.close

    async def refuses(channel: AgentChannel) -> None:
        await real(channel)
        raise OSError("not closed")

    host = launch()
    await host.open()
    with monkeypatch.context() as faked:
        faked.setattr(AgentChannel, "close", refuses)
        with pytest.raises(OSError, match="not closed"):
            await host.close()
    assert host.page is None
    assert set(os.listdir(root)) <= {"logs", "ports"}, "its directory is gone"


async def test_a_killed_engine_is_started_again_on_a_new_page(launch: Launch, events: Events, root: Path) -> None:
    host = launch()
    async with running(host):
        await events.until(lambda: len(events.ready) == 1)
        assert host.page is not None
        first = host.page.read()[0].boot_id
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        await events.until(lambda: len(events.exits) == 1)
        assert "was killed by SIGKILL" in events.exits[0]
        await events.until(lambda: len(events.ready) == 2)
        second = host.page.read()[0].boot_id
        assert second != first
    words = [path.read_text().split() for path in (root / "logs").iterdir()]
    assert sorted(line[-1] for line in words) == sorted(boot.hex() for boot in (first, second)), "a log for each launch"


async def test_an_engine_that_fails_on_its_first_start_is_not_tried_again(launch: Launch, events: Events) -> None:
    host = launch("--nonsense")
    async with running(host) as run:
        with pytest.raises(EngineFailedError, match=r"(?s)exited with status 2.*unrecognized arguments: --nonsense"):
            await asyncio.wait_for(run, SECONDS)
    assert events.exits == events.ready == []


async def test_an_engine_that_cannot_be_driven_is_told_so(launch: Launch) -> None:
    async with running(launch("--unsupported", "too old: 0.1")) as run:
        with pytest.raises(EngineFailedError, match=r"small 1 at .* cannot be driven: too old: 0.1"):
            await asyncio.wait_for(run, SECONDS)


async def test_an_engine_that_does_not_become_healthy_in_time_is_ended(launch: Launch) -> None:
    host = launch("--healthy-after", "60", startup=1.0)
    async with running(host) as run:
        with pytest.raises(EngineFailedError, match="not healthy within 1 s"):
            await asyncio.wait_for(run, SECONDS)
        assert host.pid is None


async def killed_once_ready(host: LaunchedEngine, events: Events, time: int) -> None:
    """Kills the engine when it has become ready for the `time`-th time."""
    await events.until(lambda: len(events.ready) == time)
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)


async def test_never_means_never(launch: Launch, events: Events) -> None:
    host = launch(restart=Restart.NO)
    async with running(host) as run:
        await killed_once_ready(host, events, 1)
        with pytest.raises(EngineFailedError, match="was killed by SIGKILL"):
            await asyncio.wait_for(run, SECONDS)
    assert len(events.ready) == len(events.exits) == 1


async def test_always_is_also_for_an_engine_that_never_came_up_until_the_limit(launch: Launch, events: Events) -> None:
    async with running(launch("--nonsense", restart=Restart.ALWAYS, limit=2)) as run:
        with pytest.raises(EngineFailedError, match=r"(?s)unrecognized arguments.*2 restarts in a row did not help"):
            await asyncio.wait_for(run, SECONDS)
    assert len([line for line in events.lines if "restart" in line]) == 2
    assert events.ready == []


async def test_a_limit_ends_what_keeps_failing(launch: Launch, events: Events) -> None:
    host = launch(limit=1)
    async with running(host) as run:
        await killed_once_ready(host, events, 1)
        await killed_once_ready(host, events, 2)
        with pytest.raises(EngineFailedError, match=r"(?s)was killed by SIGKILL.*1 restarts in a row did not help"):
            await asyncio.wait_for(run, SECONDS)
    assert len(events.ready) == len(events.exits) == 2


async def test_a_port_that_another_program_takes_first_is_given_up(launch: Launch, events: Events) -> None:
    host = launch()
    await host.open()
    port = int(host.default_name.rpartition("-")[2])
    with socket.create_server(("127.0.0.1", port)):
        run = asyncio.ensure_future(host.run())
        try:
            await events.until(lambda: bool(events.ready))
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
    assert any(line.startswith(f"port {port} was taken by another program") for line in events.lines)
    assert events.exits == [], "the engine was never there, so nothing of it has gone"
    assert not events.ready[0].engine.url.endswith(f":{port}")


async def test_engines_that_start_at_once_get_ports_of_their_own(launch: Launch, events: Events) -> None:
    hosts = [launch() for _ in range(8)]
    await asyncio.gather(*(host.open() for host in hosts))
    assert len({host.default_name for host in hosts}) == 8, "reserved before any of them listens"
    runs = [asyncio.ensure_future(host.run()) for host in hosts]
    try:
        await events.until(lambda: len(events.ready) == 8)
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    assert not any("was taken" in line for line in events.lines)


@pytest.mark.parametrize(
    ("host", "told"),
    [("0.0.0.0", "http://node-7.cluster:"), ("127.0.0.1", "http://127.0.0.1:")],
    ids=["listens everywhere", "listens on loopback"],
)
async def test_others_are_told_an_address_that_they_reach(launch: Launch, events: Events, host: str, told: str) -> None:
    async with running(launch("--host", host, advertise="node-7.cluster")):
        await events.until(lambda: bool(events.ready))
    assert events.ready[0].engine.url.startswith(told)
    assert any("listens on this host only" in line for line in events.lines) == (host == "127.0.0.1")


async def test_an_address_where_the_agent_could_not_drive_its_engine_is_refused(launch: Launch) -> None:
    with pytest.raises(ValueError, match=r"--host 10.1.2.3: the agent drives its engine over loopback"):
        await launch("--host", "10.1.2.3").open()


def test_addresses_become_part_of_urls() -> None:
    assert advertised_url("http://127.0.0.1:8000", "") == "http://127.0.0.1:8000"
    assert advertised_url("http://127.0.0.1:8000", "10.0.0.5") == "http://10.0.0.5:8000"
    assert advertised_url("http://127.0.0.1:8000", "fd00::5") == "http://[fd00::5]:8000"
    for wrong in ("10.0.0.5:8000", "http://a", "a b", "-a", "[fd00::5]"):
        with pytest.raises(ValueError, match="without scheme and port"):
            checked_advertise(wrong)


def test_a_reserved_port_is_nobody_elses_until_it_is_released(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "FIRST", 23450)
    monkeypatch.setattr(ports, "LAST", 23450)
    first = ports.ReservedPort(root)
    with pytest.raises(CkptEngineError, match="none is free: name one"):
        ports.ReservedPort(root)
    first.release()
    ports.ReservedPort(root).release()
    with socket.create_server(("127.0.0.1", 23450)), pytest.raises(CkptEngineError, match="none is free"):
        ports.ReservedPort(root)


async def test_an_engine_that_ends_by_itself_is_started_again_also_with_status_0(
    launch: Launch, events: Events
) -> None:
    async with running(launch("--exit-status", "0")):
        await events.until(lambda: len(events.ready) == 1)
        async with httpx.AsyncClient(base_url=events.ready[0].engine.url) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/end")
        await events.until(lambda: len(events.ready) == 2)
    assert "exited with status 0" in events.exits[0]


async def test_an_engine_that_is_there_but_deaf_is_replaced(
    launch: Launch, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, f"{QUICK} engine_health=0.5 engine_unhealthy=2")
    host = launch()
    async with running(host):
        await events.until(lambda: len(events.ready) == 1)
        deaf = host.pid
        async with httpx.AsyncClient(base_url=events.ready[0].engine.url) as client:
            await client.post("/deaf")
        await events.until(lambda: len(events.ready) == 2)
        assert events.exits == ["the engine has not answered its health route for 2 s"]
        assert host.pid != deaf


async def test_whoever_else_holds_the_port_is_not_taken_for_ours(
    launch: Launch, beside: Beside, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, f"{QUICK} engine_grace=2")
    url, other = await beside()
    port = int(url.rpartition(":")[2])
    host = launch(port=port)
    async with running(host) as run:
        with pytest.raises(EngineFailedError, match=rf"port {port} is taken by .*small_engine.py .*pid {other.pid}"):
            await asyncio.wait_for(run, SECONDS)
    assert any(f"port {port} is taken by" in line and "waiting up to 2 s" in line for line in events.lines)
    assert not any("launched" in line for line in events.lines), "it would load for minutes, and not get it"


async def test_arguments_that_the_adapter_refuses_are_refused_before_anything_starts(
    launch: Launch, root: Path
) -> None:
    with pytest.raises(ValueError, match="the port is the agent's to choose"):
        await launch("--port", "1").open()
    assert os.listdir(root) == ["ports"]


def test_the_logs_that_were_written_to_last_stay(root: Path) -> None:
    paths = [new_log(root, f"engine/{number}") for number in range(MOST_FILES)]
    for age, path in enumerate(paths):
        os.utime(path, (1e9 - age, 1e9 - age))
    newest = [new_log(root, "engine/0"), new_log(root, "engine/0")]
    assert set((root / "logs").iterdir()) == {*newest, *paths[: MOST_FILES - 2]}
    assert newest[0] != newest[1]
