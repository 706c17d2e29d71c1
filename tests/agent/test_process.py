"""Engines as real processes that fork, fork twice, ignore SIGTERM, leave their group, or lose their agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.agent.launcher import descendants
from ckpt_engine.agent.process import (
    EngineProcess,
    EngineProcessError,
    describe_status,
    torchrun_variables,
)
from tests.waiting import assert_gone, eventually

PATIENCE = 60.0
"""Seconds that anything may take here on a busy machine."""

# Started with a folder: writes <role>.pid files there, so that a test knows every process of the tree.
TREE = """
    import os, signal, sys, time
    folder, manner = sys.argv[1:]
    def end(signum, frame):
        time.sleep(0.2)
        os._exit(7)
    if manner == "stubborn":    # before the first fork: whoever has noted its pid ignores the signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if manner == "slow":
        signal.signal(signal.SIGTERM, end)
    def note(role):
        with open(f"{folder}/{role}.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{folder}/{role}.tmp", f"{folder}/{role}.pid")
    def live():
        while True:
            time.sleep(60)
    if os.fork() == 0:          # a worker
        note("worker")
        live()
    if os.fork() == 0:          # forks twice and leaves group and session: the usual way to become a daemon
        os.setsid()
        if os.fork() == 0:
            note("daemon")
            live()
        os._exit(0)
    note("main")
    print("ready", flush=True)
    live()
"""


def wait_for_pids(folder: Path, roles: tuple[str, ...]) -> list[int]:
    eventually(f"{roles} came up", PATIENCE, lambda: all((folder / f"{role}.pid").exists() for role in roles))
    return [int((folder / f"{role}.pid").read_text()) for role in roles]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """The script of an engine with three processes. Whatever a failing test leaves behind is ended here."""
    script = tmp_path / "tree.py"
    script.write_text(textwrap.dedent(TREE))
    (tmp_path / "pids").mkdir()
    yield script
    for file in (tmp_path / "pids").glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def engine(tmp_path: Path, script: str | Path, *arguments: str, grace: float = 5.0) -> EngineProcess:
    code = ["-c", textwrap.dedent(script)] if isinstance(script, str) else [str(script)]
    return EngineProcess([sys.executable, *code, *arguments], {}, tmp_path / "engine.log", grace_seconds=grace)


ROLES = ("main", "worker", "daemon")


async def started(process: EngineProcess, tmp_path: Path) -> list[int]:
    """The pids of its tree."""
    await process.start()
    return await asyncio.to_thread(wait_for_pids, tmp_path / "pids", ROLES)


@pytest.mark.parametrize(("manner", "status"), [("polite", -signal.SIGTERM), ("slow", 7)])
async def test_stop_ends_the_whole_tree(tmp_path: Path, tree: Path, manner: str, status: int) -> None:
    """Who ends by himself is waited for as long as that takes, and no longer: the grace would outlast this test."""
    process = engine(tmp_path, tree, str(tmp_path / "pids"), manner, grace=600.0)
    pids = await started(process, tmp_path)
    assert process.pid == pids[0]
    assert await asyncio.wait_for(process.stop(), PATIENCE) == status
    assert_gone(*pids)
    assert not process.running


async def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path, tree: Path) -> None:
    process = engine(tmp_path, tree, str(tmp_path / "pids"), "stubborn", grace=0.5)
    pids = await started(process, tmp_path)
    assert await asyncio.wait_for(process.stop(), PATIENCE) == -signal.SIGKILL
    assert_gone(*pids)


async def test_what_an_engine_leaves_behind_goes_with_it(tmp_path: Path, tree: Path) -> None:
    process = engine(tmp_path, tree, str(tmp_path / "pids"), "stubborn", grace=0.2)
    pids = await started(process, tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), PATIENCE) == -signal.SIGKILL
    assert_gone(*pids)
    assert "was killed by SIGKILL" in process.describe_exit()


async def test_killing_the_launcher_ends_the_engine(tmp_path: Path, tree: Path) -> None:
    process = engine(tmp_path, tree, str(tmp_path / "pids"), "stubborn")
    pids = await started(process, tmp_path)
    launchers = [pid for pid in descendants(os.getpid()) if pids[0] in descendants(pid)]
    os.kill(launchers[0], signal.SIGKILL)
    await asyncio.wait_for(process.wait(), PATIENCE)
    assert_gone(*pids[:2])  # the daemon left the session, and the one who could have found it is gone


AGENT = """
    import asyncio, sys
    from pathlib import Path
    from ckpt_engine.agent.process import EngineProcess

    async def main():
        script, pids, folder = sys.argv[1:4]
        process = EngineProcess([sys.executable, script, pids, "stubborn"], {}, Path(folder) / "engine.log")
        await process.start()
        await asyncio.sleep(600)
    asyncio.run(main())
"""


def agent_of(tree: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process that has started this engine."""
    command = [sys.executable, "-c", textwrap.dedent(AGENT), str(tree), str(tmp_path / "pids"), str(tmp_path)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


def test_the_engine_dies_with_its_agent(tmp_path: Path, tree: Path) -> None:
    agent = agent_of(tree, tmp_path)
    try:
        pids = wait_for_pids(tmp_path / "pids", ROLES)
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    assert_gone(*pids)


def test_the_kernel_ends_the_engine_when_agent_and_launcher_are_killed_together(tmp_path: Path, tree: Path) -> None:
    agent = agent_of(tree, tmp_path)
    try:
        pids = wait_for_pids(tmp_path / "pids", ROLES)
        (launcher,) = (pid for pid in descendants(agent.pid) if pids[0] in descendants(pid))
    finally:
        agent.send_signal(signal.SIGSTOP)  # so that it cannot sweep up when it sees its launcher go
    os.kill(launcher, signal.SIGKILL)
    agent.kill()
    agent.wait()
    assert_gone(*pids[:1])  # children of its own are the engine's to watch: this is more than one process can do


async def test_health_comes_late(tmp_path: Path) -> None:
    process = engine(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    await process.start()
    asked = 0

    async def check(seconds: float) -> bool:
        nonlocal asked
        assert 0 < seconds <= PATIENCE
        asked += 1
        return asked == 3

    await process.wait_healthy(check, PATIENCE)
    await process.kill()


async def never(seconds: float) -> bool:
    return False


async def test_an_engine_that_dies_while_starting_shows_its_last_lines(tmp_path: Path) -> None:
    process = engine(
        tmp_path, "import sys; print('no such model: /nowhere'); print('on stderr', file=sys.stderr); sys.exit(3)"
    )
    await process.start()
    with pytest.raises(EngineProcessError, match=r"(?s)exited with status 3; log: .*no such model: /nowhere"):
        await process.wait_healthy(never, PATIENCE)
    assert "on stderr" in process.describe_exit()
    assert "no such model" in (tmp_path / "engine.log").read_text()


async def test_an_engine_that_never_becomes_healthy_has_a_deadline(tmp_path: Path) -> None:
    process = engine(tmp_path, "import time; print('still loading', flush=True); time.sleep(60)")
    await process.start()
    with pytest.raises(EngineProcessError, match=r"(?s)not healthy within 0.5 s.*still loading"):
        await process.wait_healthy(never, 0.5)
    assert process.running
    await process.kill()
    assert not process.running


async def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    process = EngineProcess(["/nowhere/engine"], {}, tmp_path / "engine.log")
    with pytest.raises(EngineProcessError, match=r"cannot start /nowhere/engine: .*No such file"):
        await process.start()
    assert not process.running


async def test_environment_is_inherited_and_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "one")
    monkeypatch.delenv("HOME", raising=False)
    command = [sys.executable, "-c", "import os; print(os.environ['INHERITED'], os.environ['ADDED'])"]
    process = EngineProcess(command, {"ADDED": "two"}, tmp_path / "engine.log")
    await process.start()
    assert await process.wait() == 0
    assert process.last_lines() == ["one two"]


async def test_output_is_passed_on_and_long_lines_are_cut(tmp_path: Path) -> None:
    seen: list[str] = []
    script = (
        "import sys; print('first'); sys.stdout.write('x' * 200_000); print(); print('a\\rb\\r\\nc'); print('é\\xff')"
    )
    process = EngineProcess(
        [sys.executable, "-c", script], {"PYTHONIOENCODING": "utf-8"}, tmp_path / "engine.log", on_line=seen.append
    )
    await process.start()
    await process.wait()
    assert seen[0] == "first"
    assert sum(line.count("x") for line in seen) == 200_000
    assert max(len(line) for line in seen) <= 64 << 10
    assert seen[-4:] == ["a", "b", "c", "éÿ"]


async def test_nobody_listening_stops_no_engine(tmp_path: Path) -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    command = [sys.executable, "-c", "for i in range(50_000): print('line', i)"]
    process = EngineProcess(command, {}, tmp_path / "engine.log", on_line=closed)
    await process.start()
    assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
    assert process.last_lines(1) == ["line 49999"]


async def test_much_output_blocks_nobody_and_the_log_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_engine.agent.process.LOG_LIMIT_BYTES", 100_000)
    process = engine(tmp_path, "for i in range(50_000): print('line', i)")
    await process.start()
    assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
    assert process.last_lines(1) == ["line 49999"]
    sizes = [(tmp_path / name).stat().st_size for name in ("engine.log", "engine.log.1")]
    assert all(size < 100_000 + (64 << 10) + 1 for size in sizes)
    assert oct((tmp_path / "engine.log").stat().st_mode & 0o777) == "0o600"


def test_statuses_are_told_in_words() -> None:
    assert describe_status(0) == "exited with status 0"
    assert describe_status(-9) == "was killed by SIGKILL"
    assert describe_status(-64) == "was killed by SIGRTMAX"


async def test_an_engine_is_no_rank_of_the_training_run_that_started_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch in an engine would join torchrun's store instead of opening its own, and wait for ever."""
    for name in (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "RANK",
        "LOCAL_RANK",
        "MASTER_PORT",
        "NODE_RANK",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when it compiles something
    show = "import os; print(' '.join(sorted(name for name in os.environ if 'RANK' in name or 'TORCH' in name)))"
    process = EngineProcess([sys.executable, "-c", show], {}, tmp_path / "log", without=torchrun_variables(os.environ))
    await process.start()
    assert await process.wait() == 0
    assert process.last_lines() == ["NODE_RANK"]
    assert torchrun_variables({"RANK": "0", "MASTER_PORT": "1"}) == frozenset(), "a name alone says nothing"
