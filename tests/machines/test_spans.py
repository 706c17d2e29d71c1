"""What members tell of when they did something, and how their clock stands to the manager's."""

from __future__ import annotations

import pytest
from test_agent_install import NEW, Install
from test_agent_turns import CLUSTER

from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.plan_pipeline import TIMELINE_SOURCES, note_sealed
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

AHEAD = 100.0
"""The member's clock, of the manager's."""


class Rank:
    """A trainer rank that publishes nothing; every moment is of its own clock."""

    def __init__(self) -> None:
        self.machine = TrainerMachine("run", 0, 1, "session", weights_pb2.Host())
        self.commands: list[events.TrainerCommand] = []
        self.feed(events.Start(), AHEAD)
        (self.peer,) = [command.peer for command in self.commands if isinstance(command, events.OpenStream)]

    def feed(self, event: events.TrainerEvent, now: float) -> None:
        self.commands += self.machine.handle(event, now)

    def told(self, now: float, body: object) -> None:
        self.feed(events.Message(self.peer, body), now)

    def welcome(self, now: float, clock: float) -> None:
        fence = weights_pb2.Fence(cluster=CLUSTER)
        self.told(
            now,
            manager_pb2.Welcome(
                digest_format=DIGEST_FORMAT, fence=fence, lease_seconds=8, heartbeat_seconds=1, clock=clock
            ),
        )

    def sealed(self, came: float, ended: float) -> manager_pb2.Sealed:
        self.told(came, manager_pb2.Seal(fence=weights_pb2.Fence(cluster=CLUSTER, epoch=2)))
        run = next(each for each in self.commands if isinstance(each, events.Run))
        result = events.SealResult(manager_pb2.BlobRef(), 1.0, 2.0, digested=ended - 0.5)
        self.feed(events.Done(run.key, result), ended)
        return next(
            each.body
            for each in self.commands
            if isinstance(each, events.Send) and isinstance(each.body, manager_pb2.Sealed)
        )


def test_the_welcome_tells_how_the_clocks_stand() -> None:
    rank = Rank()
    rank.welcome(AHEAD + 0.4, clock=0.1)
    sealed = rank.sealed(AHEAD + 0.4, AHEAD + 5.0)
    assert (sealed.span.begin, sealed.span.seconds) == (AHEAD + 0.4, pytest.approx(4.6))
    assert sealed.digested == AHEAD + 4.5
    assert sealed.span.ahead == pytest.approx(AHEAD + 0.1)
    assert abs(sealed.span.ahead - AHEAD) <= sealed.span.error


def test_a_heartbeat_that_is_answered_sooner_tells_it_better() -> None:
    rank = Rank()
    rank.welcome(AHEAD + 0.4, clock=0.1)
    beat = next(each.key for each in reversed(rank.commands) if isinstance(each, events.SetTimer))
    rank.feed(events.TimerFired(beat), AHEAD + 1.0)
    rank.told(AHEAD + 1.001, manager_pb2.Heartbeat(sequence=0, clock=0.5))  # of a heartbeat before this one
    rank.told(AHEAD + 1.002, manager_pb2.Heartbeat(sequence=1, clock=1.001))
    span = rank.sealed(AHEAD + 2.0, AHEAD + 3.0).span
    assert span.ahead == pytest.approx(AHEAD)
    assert span.error < 0.0013


def test_an_older_manager_tells_nothing_of_its_clock() -> None:
    rank = Rank()
    rank.welcome(AHEAD + 0.4, clock=0.0)
    span = rank.sealed(AHEAD + 1.0, AHEAD + 2.0).span
    assert span.seconds == 1.0
    assert not span.HasField("ahead")


def test_an_agent_tells_its_steps_and_places_its_workers_between_order_and_report() -> None:
    install = Install()
    run = install.until(events.InstallEngine, 1.0)
    install.want(2.0)
    install.want(2.5)  # the answer was lost: the order may have come by the first one
    fence = run.task.epoch if isinstance(run.task, events.InstallEngine) else 0
    installed = worker_pb2.WorkerInstalled(fence=weights_pb2.Fence(cluster=CLUSTER, epoch=fence), seconds=3.0)
    install.asks(6.0, installed=installed)
    install.end(run, 7.0)
    install.end(install.until(events.ResumeEngine, 7.0, NEW), 8.0)
    install.end(install.until(events.ReadWords, 9.0), 9.0, NEW)
    outcome = install.outcome()
    assert (outcome.span.begin, outcome.span.seconds) == (0.0, 9.0)
    stages = [(enum_word(manager_pb2.Stage, each.stage), each.after) for each in outcome.entered]
    assert stages == [
        ("plan", 0.0),
        ("ready", 1.0),
        ("quiesce", 1.0),
        ("transfer", 1.0),
        ("verify", 7.0),
        ("resume", 7.0),
    ]
    assert outcome.pause_after == 1.0
    (worker,) = outcome.workers
    assert (worker.span.begin, worker.span.seconds, worker.span.error) == (2.5, 3.0, 0.5)


def test_a_worker_of_an_older_version_is_not_placed() -> None:
    install = Install()
    run = install.until(events.InstallEngine, 1.0)
    install.want(2.0)
    fence = weights_pb2.Fence(cluster=CLUSTER, epoch=2)
    install.asks(6.0, installed=worker_pb2.WorkerInstalled(fence=fence))
    install.end(run, 7.0)
    install.end(install.until(events.ResumeEngine, 7.0, NEW), 8.0)
    install.end(install.until(events.ReadWords, 9.0), 9.0, NEW)
    assert not install.outcome().workers[0].HasField("span")


def test_the_slowest_ranks_are_told_of_however_many_there_are() -> None:
    """Each with a digest of its own length, in an order in which the slow ones come first, last and in between."""
    timeline = manager_pb2.Timeline()
    ranks = 3 * TIMELINE_SOURCES
    seconds = {f"rank {rank}": float((rank * 7 + 8) % ranks) for rank in range(ranks)}
    for source, taken in seconds.items():
        offer = events.SourceOffer(source, 0, manager_pb2.BlobRef(), False, 0, False)
        note_sealed(timeline, manager_pb2.Sealed(digest_seconds=taken), [offer])
    told = sorted(source.digest_seconds for source in timeline.sources)
    assert told == [float(each) for each in range(ranks - TIMELINE_SOURCES, ranks)]


@pytest.mark.parametrize(
    ("ways", "on_gpus"),
    [
        ([{"cuda_ipc"}, {"cuda_ipc", "nccl"}], True),
        ([{"shared_memory"}], False),
        ([{"cuda_ipc"}, {"shared_memory"}], False),
        ([{"file"}], False),
    ],
)
def test_weights_are_on_gpus_if_they_are_offered_as_gpu_memory(ways: list[set[str]], on_gpus: bool) -> None:
    """Of a process that uses a GPU: it may have offloaded its weights to the host."""
    host = weights_pb2.Host(gpus=[weights_pb2.Gpu(uuid=b"g" * 16)])
    offered = tuple(frozenset(way) for way in ways)
    offer = events.SourceOffer("rank 0", 0, manager_pb2.BlobRef(), False, 0, False, host=host, ways=offered)
    timeline = manager_pb2.Timeline()
    note_sealed(timeline, manager_pb2.Sealed(), [offer])
    assert timeline.sources[0].gpu is on_gpus
