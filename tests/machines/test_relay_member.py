"""A relay's machine as one member: its session, what it holds and what it brings, in the order in which it says so."""

from __future__ import annotations

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.rates import Rate
from ckpt_engine.machines import events
from ckpt_engine.machines.relay.member import RelayMachine
from ckpt_engine.machines.relay.tasks import (
    ChunksPassed,
    CountSlot,
    FillingProgress,
    FillSlot,
    LetGoOf,
    SlotFilled,
    StopFilling,
)
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.manager_pb2 import (
    BlobRef,
    Filling,
    FillRelay,
    Goodbye,
    HolderHello,
    LetGo,
    RelayFilled,
    RelayProgress,
    Seal,
    Sealed,
    Welcome,
)
from ckpt_engine.v1.weights_pb2 import Fence, Host, Identity, Problem

CLUSTER = "cluster"


def fence(epoch: int, cluster: str = CLUSTER) -> Fence:
    return Fence(cluster=cluster, epoch=epoch)


def identity(version: int) -> Identity:
    return Identity(lineage="run", version=version, root=version.to_bytes(32, "big"))


def fill(epoch: int, version: int, cluster: str = CLUSTER) -> FillRelay:
    return FillRelay(fence=fence(epoch, cluster), identity=identity(version), deadline_seconds=60.0)


def seal(epoch: int) -> Seal:
    return Seal(fence=fence(epoch), version=1, keep=True, deadline_seconds=60.0)


def _ref(data: bytes) -> BlobRef:
    return BlobRef(digest=data, size=len(data))


class Relay:
    """A relay whose manager stores every blob at once, unless told otherwise. said: sent messages, in their order."""

    def __init__(self) -> None:
        self.filling = Filling(memory_bytes=7)
        self.machine = RelayMachine("a", "session", Host(), self.filling)
        self.said: list[ProtobufMessage] = []
        self.commands: list[events.TrainerCommand] = []
        self.tasks: list[events.Run] = []
        self.away = False  # the manager takes no blobs
        self.peer = events.Peer("")
        self.feed(events.Start())

    def feed(self, event: events.TrainerEvent) -> None:
        for command in self.machine.handle(event, 0.0):
            self.commands.append(command)
            match command:
                case events.OpenStream(peer):
                    self.peer = peer
                case events.Send(_, body):
                    self.said.append(body)
                case events.Run(_, events.PutBlobs()) if not self.away:
                    self.store(command)
                case events.Run():
                    self.tasks.append(command)

    def store(self, run: events.Run) -> None:
        assert isinstance(run.task, events.PutBlobs)
        self.feed(events.Done(run.key, tuple(_ref(blob) for blob in run.task.blobs)))

    def tell(self, body: ProtobufMessage) -> None:
        self.feed(events.Message(self.peer, body))

    def welcome(self) -> Relay:
        self.tell(Welcome(digest_format=DIGEST_FORMAT, fence=fence(0), lease_seconds=8.0))
        return self

    def end(self, problem: Problem | None = None) -> None:
        """The first task that runs ends."""
        run = self.tasks.pop(0)
        result: object = None
        if problem is None and isinstance(run.task, FillSlot):
            table = b"table of %d" % run.task.command.identity.version
            result = SlotFilled(table, b"record", RelayFilled(bytes=7))
        elif isinstance(run.task, events.SealSource):
            result = events.SealResult(BlobRef(), 0.0, 0.0)
        self.feed(events.Done(run.key, result, problem))

    def bring(self, epoch: int, version: int) -> None:
        self.tell(fill(epoch, version))
        self.end()
        self.end()

    @property
    def story(self) -> list[tuple[str, list[int]] | tuple[str, int]]:
        """Hellos with the versions that they tell, and answers with their epochs."""
        found: list[tuple[str, list[int]] | tuple[str, int]] = []
        for body in self.said:
            match body:
                case HolderHello():
                    found.append(("holds", [each.identity.version for each in body.held]))
                case RelayFilled() | Sealed() | RelayProgress():
                    found.append((type(body).__name__, body.fence.epoch))
        return found

    def hello(self) -> HolderHello:
        return next(body for body in reversed(self.said) if isinstance(body, HolderHello))


def test_a_relay_comes_with_nothing_and_says_that_it_can_be_filled() -> None:
    relay = Relay()
    hello = relay.hello()
    assert (hello.kind, hello.name, len(hello.held), hello.filling.memory_bytes) == ("relay", "a", 0, 7)
    relay.filling.gpu_context_bytes = 5
    relay.welcome().feed(events.PeerLost(relay.peer, "reset"))
    relay.feed(events.TimerFired(("session", "reconnect")))
    assert relay.hello().filling.gpu_context_bytes == 5


def test_what_is_held_is_told_before_the_answer_also_if_storing_takes_long() -> None:
    relay = Relay().welcome()
    relay.away = True
    relay.bring(1, 5)
    assert relay.story == [("holds", [])], "whoever hears the answer could not plan with it"
    relay.tell(fill(1, 5))
    assert relay.story == [("holds", [])], "neither if it asks again"
    relay.store(relay.tasks.pop(0))
    assert relay.story == [("holds", []), ("holds", [5]), ("RelayFilled", 1)]
    relay.tell(fill(1, 5))
    assert relay.story[-1] == ("RelayFilled", 1)


def test_what_is_given_up_is_told_before_the_first_byte_changes() -> None:
    relay = Relay().welcome()
    relay.bring(1, 1)
    relay.bring(2, 2)
    relay.tell(fill(3, 3))
    assert isinstance(relay.tasks[0].task, CountSlot)
    assert relay.story[-2:] == [("holds", [2, 1]), ("RelayFilled", 2)]
    relay.commands.clear()
    relay.away = True  # what is left was stored before
    relay.end()
    kinds = [type(each.body if isinstance(each, events.Send) else each).__name__ for each in relay.commands]
    assert kinds.index("HolderHello") < kinds.index("Run")
    assert isinstance(relay.tasks[0].task, FillSlot)
    assert relay.story[-1] == ("holds", [2])


def test_sealing_and_filling_obey_one_count_of_fences() -> None:
    relay = Relay().welcome()
    relay.bring(5, 1)
    relay.tell(seal(4))
    assert not relay.tasks, "a late order to digest what may have been overwritten since"
    relay.tell(seal(6))
    relay.end()
    relay.tell(fill(5, 9))
    relay.tell(fill(4, 9))
    assert not relay.tasks, "late orders to fill"
    assert relay.story[-1] == ("Sealed", 6)
    relay.tell(fill(6, 2))  # the same update's: it has not been asked for this
    relay.end()
    relay.end()
    assert relay.story[-1] == ("RelayFilled", 6)
    relay.tell(seal(6))
    assert relay.story[-1] == ("Sealed", 6), "a repetition"
    relay.feed(events.PeerLost(relay.peer, "reset"))
    relay.feed(events.TimerFired(("session", "reconnect")))
    assert relay.hello().epoch == 6


def test_another_clusters_orders_are_not_obeyed() -> None:
    relay = Relay().welcome()
    relay.tell(fill(1, 1, "another"))
    assert not relay.tasks
    assert relay.hello().epoch == 0


def test_filling_goes_on_without_a_manager_and_whoever_asks_again_is_answered() -> None:
    relay = Relay().welcome()
    relay.tell(fill(1, 1))
    relay.end()
    relay.feed(events.PeerLost(relay.peer, "reset"))
    relay.end()
    relay.feed(events.TimerFired(("session", "reconnect")))
    assert relay.story[-1] == ("holds", [1])
    relay.welcome().tell(fill(1, 1))
    assert relay.story[-1] == ("RelayFilled", 1)


def test_a_manager_that_lost_its_blobs_is_given_them_before_the_answer() -> None:
    relay = Relay().welcome()
    relay.bring(1, 1)
    relay.feed(events.PeerLost(relay.peer, "reset"))
    relay.away = True
    relay.feed(events.TimerFired(("session", "reconnect")))
    (run,) = relay.tasks
    assert isinstance(run.task, events.PutBlobs)
    assert run.task.blobs == (b"table of 1", b"record")


def test_progress_is_told_of_the_filling_that_goes_on() -> None:
    relay = Relay().welcome()
    relay.tell(fill(1, 1))
    relay.end()
    relay.feed(FillingProgress(fence(1), 3, 7))
    assert relay.story[-1] == ("RelayProgress", 1)
    relay.tell(fill(2, 2))
    told = list(relay.story)
    relay.feed(FillingProgress(fence(1), 4, 7))
    assert relay.story == told, "it was overtaken"
    assert any(isinstance(each, StopFilling) for each in relay.commands)


def test_how_fast_something_was_passed_on_is_told_also_once_another_filling_goes_on() -> None:
    relay = Relay().welcome()
    relay.bring(1, 1)
    relay.tell(fill(2, 2))
    relay.feed(ChunksPassed(fence(1), 3, Rate(5.0, 2.0)))
    sent = manager_pb2.Rate(bytes_per_second=5.0, seconds=2.0)
    assert relay.said[-1] == manager_pb2.RelayPassedOn(fence=fence(1), attempt=3, sent=sent)
    relay.feed(events.PeerLost(relay.peer, "reset"))
    told = list(relay.said)
    relay.feed(ChunksPassed(fence(1), 3, Rate(5.0, 2.0)))
    assert relay.said == told, "nobody would hear it"


def test_stopping_ends_the_filling_and_says_goodbye() -> None:
    relay = Relay().welcome()
    relay.tell(fill(1, 1))
    relay.feed(events.Stop("asked to"))
    assert any(isinstance(each, StopFilling) for each in relay.commands)
    assert isinstance(relay.said[-1], Goodbye)


def test_memory_that_is_taken_back_is_let_go_of_beside_a_filling_and_what_was_brought_stays() -> None:
    relay = Relay().welcome()
    relay.bring(1, 1)
    relay.tell(fill(2, 2))
    relay.commands.clear()
    relay.tell(LetGo(tables=[b"a", b"b"]))
    (run,) = (each for each in relay.commands if isinstance(each, events.Run))
    assert isinstance(run.task, LetGoOf)
    assert run.task.tables == (b"a", b"b")
    assert StopFilling() not in relay.commands
    relay.feed(events.Done(run.key, None, Problem(code=Problem.CODE_DEADLINE_EXCEEDED)))
    relay.tasks.remove(run)
    relay.end()
    relay.end()
    assert relay.story[-1] == ("RelayFilled", 2)
    assert [each.identity.version for each in relay.hello().held] == [2, 1]


def test_other_digests_under_one_fence_are_a_new_order_and_the_former_ones_answer_is_nobodys() -> None:
    relay = Relay().welcome()
    relay.bring(1, 1)
    for atoms in (b"first", b"second"):
        command = seal(1)
        command.atoms.digest = atoms
        relay.tell(command)
        relay.tell(command)
    first, second = relay.tasks
    said = len(relay.said)
    relay.feed(events.Done(first.key, events.SealResult(BlobRef(), 0.0, 0.0)))
    assert len(relay.said) == said
    relay.feed(events.Done(second.key, events.SealResult(BlobRef(), 0.0, 0.0)))
    answer = relay.said[-1]
    assert isinstance(answer, Sealed)
    assert answer.atoms.digest == b"second"
