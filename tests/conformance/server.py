"""One server as a replica, shared by the tests of the suite, with what they ask of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ckpt_engine import Trainer, UpdateReport
from ckpt_engine.channel import ManagerStub
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica
from tests.conformance.engines import Engine, Span
from tests.conformance.weights import TOKENS, Models
from tests.faults.listener import Listener

SLEEP_SECONDS = 120.0
RELAY = "near"


class RelaysTrainer(Trainer):
    """Has each version brought to the relay first, and wants what is served to come from there."""

    def update_weights(self, version: int | None = None, **wishes: Any) -> UpdateReport:
        report = super().update_weights(version, **{"prefetch": "always", **wishes})
        for replica in report.replicas:
            if replica.outcome == "new_serving":
                read = {(edge.source, edge.transport) for edge in replica.message.edges}
                assert read == {(f"relay {RELAY}", "relay_memory")}, report
        return report


class EarlyTrainer(RelaysTrainer):
    """Wants a worker that is awake to have the version in its stage memory before the pause. is_asleep: of the replica
    now."""

    is_asleep: Callable[[], bool]

    def update_weights(self, version: int | None = None, **wishes: Any) -> UpdateReport:
        asleep = self.is_asleep()
        report = super().update_weights(version, **wishes)
        for replica in report.replicas:
            for worker in replica.message.workers:
                if replica.outcome == "new_serving" and not worker.by_loader:
                    assert worker.early_bytes == (0 if asleep else worker.bytes), report
        return report


@dataclass
class Server:
    """replica: a hybrid one of one worker, so that sleep and wake can be asked of it too. by_relay: it reads a relay of
    its host, and whoever serves a new version has read nothing else. early: and it has brought that before the pause,
    into stage memory."""

    engine: Engine
    cluster: Cluster
    replica: Replica
    models: Models
    listener: Listener
    relays: Path  # where engines of this host find the relay, if there is one
    by_relay: bool = False
    early: bool = False

    def trainer(self, lineage: str) -> Trainer:
        kind = EarlyTrainer if self.early else RelaysTrainer if self.by_relay else Trainer
        trainer = kind(self.cluster.address, lineage=f"{lineage}-{self.engine.kind}")
        if isinstance(trainer, EarlyTrainer):
            trainer.is_asleep = lambda: bool(self.replica.status and self.replica.status.asleep)
        return trainer

    def assert_serves(self, seed: int, version: int) -> None:
        """See check_serves."""
        check_serves(self.engine, self.replica, self.models, seed, version)

    def why_closed(self) -> str:
        """The server lives, and answers no request, for this reason."""
        assert httpx.get(f"{self.replica.url}/health", timeout=60).status_code == 200
        answer = self.engine.complete(self.replica, [1, 2, 3], 2)
        assert answer.status == 503, answer
        return answer.detail

    def states(self) -> list[manager_pb2.WorkerState]:
        """Of its workers, as the agent told last; it tells changes at once."""
        status = self.replica.status
        assert status is not None
        return [worker.state for worker in status.workers]

    def epochs(self) -> list[int]:
        """Of the last order that each worker had."""
        status = self.replica.status
        assert status is not None
        return [worker.epoch for worker in status.workers]

    def caches_kept(self) -> int:
        """How many updates of its engine kept caches, as its page says."""
        body = httpx.get(f"{self.replica.url}/ckpt_engine/info", timeout=60).json()
        page = EnginePage(EngineDirectory(Path(body["directory"])).page)
        try:
            return page.caches_kept()
        finally:
            page.close()

    def sleep(self, level: int) -> str:
        """What is wrong; empty if it sleeps."""
        request = manager_pb2.SleepRequest(level=level, timeout_seconds=SLEEP_SECONDS)
        return _problem(self._stub.Sleep(request, timeout=SLEEP_SECONDS + 10).results)

    def wake(self, *tags: str) -> str:
        """What is wrong; empty if they are awake."""
        request = manager_pb2.WakeRequest(tags=tags, timeout_seconds=SLEEP_SECONDS)
        return _problem(self._stub.Wake(request, timeout=SLEEP_SECONDS + 10).results)

    @property
    def _stub(self) -> ManagerStub:
        return ManagerStub(self.cluster.channel)


def check_serves(engine: Engine, replica: Replica, models: Models, seed: int, version: int) -> None:
    """A new request gets transformers' tokens, under the right version, says the gate, and the body if it tells."""
    prompt, tokens = models.expected(seed)
    answer = engine.complete(replica, prompt, TOKENS)
    assert answer.status == 200, f"{answer}\n{replica.tail()}"
    assert list(answer.tokens) == tokens, f"{answer}\n{replica.tail()}"
    assert answer.admitted == str(version)
    if engine.tells_versions:
        assert answer.spans == (Span(version, 0, TOKENS),)


def _problem(results: Sequence[manager_pb2.SleepWakeResult]) -> str:
    (result,) = results
    return result.problem.message if result.HasField("problem") else ""
