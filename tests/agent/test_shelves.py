"""What becomes of the agents of adapters beside an engine's own."""

from __future__ import annotations

import asyncio

import pytest

from ckpt_engine.agent.launched import LaunchSettings
from ckpt_engine.agent.session import AgentSettings, ReplicaAgent
from ckpt_engine.agent.shelves import run_with_shelves
from ckpt_engine.core.problems import precondition
from tests.waiting import until


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (precondition("it was evicted"), "FAILED_PRECONDITION: it was evicted"),
        (OSError(24, "Too many open files"), "OSError: [Errno 24] Too many open files"),
        (KeyError("epoch"), "KeyError: 'epoch'"),
    ],
)
async def test_a_shelf_that_ends_says_why_and_leaves_the_engine_alone(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it, also what nothing expects."""
    lines: list[str] = []
    launch = LaunchSettings("vllm", adapters={"policy": 2})
    agent = ReplicaAgent(AgentSettings("127.0.0.1:1", "vllm", launch, name="replica"), lines.append)

    async def run(self: ReplicaAgent, stop: asyncio.Event) -> None:
        if self is not agent:
            assert (self.settings.name, self.settings.pool) == ("replica.policy", "policy")
            raise error
        await stop.wait()

    monkeypatch.setattr(ReplicaAgent, "run", run)
    stop = asyncio.Event()
    running = asyncio.ensure_future(run_with_shelves(agent, stop))
    await until(lambda: lines)
    assert lines == [f"the adapter policy gets no versions any more: {words}"]
    assert not running.done()
    stop.set()
    await running
