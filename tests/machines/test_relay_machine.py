"""What a relay decides, rule by rule: each story goes wrong without the rule that it is named after."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.manifest import blob_digest
from ckpt_engine.machines.clock import ManagersClock
from ckpt_engine.machines.events import Done, Run
from ckpt_engine.machines.relay.machine import HeldNotice, RelayCommand, RelayFilling, StopFilling
from ckpt_engine.machines.relay.tasks import CountSlot, FillSlot, SlotFilled
from ckpt_engine.v1.manager_pb2 import BlobRef, FillRelay, RelayFilled
from ckpt_engine.v1.weights_pb2 import Fence, Identity, Problem

CLUSTER = "cluster"


def identity(version: int) -> Identity:
    return Identity(lineage="run", version=version, root=version.to_bytes(32, "big"))


def fill(
    epoch: int, version: int, keep: int = 0, needs: Sequence[bytes] = (), seconds: float = 60.0, attempt: int = 0
) -> FillRelay:
    command = FillRelay(
        fence=Fence(cluster=CLUSTER, epoch=epoch),
        identity=identity(version),
        needs=[BlobRef(digest=each) for each in needs],
        deadline_seconds=seconds,
        attempt=attempt,
    )
    if keep:
        command.keep.CopyFrom(identity(keep))
    return command


class Relay:
    """A relay whose tasks a test ends. said: everything, in its order: commands, answers, versions held."""

    def __init__(self) -> None:
        self.said: list[RelayCommand | ProtobufMessage | tuple[int, ...]] = []
        self.running: dict[tuple[str | int, ...], Run] = {}
        self.machine = RelayFilling(self._emit, self.said.append, self._hold, ManagersClock())

    def _emit(self, command: RelayCommand) -> None:
        self.said.append(command)
        if isinstance(command, Run):
            assert not self.running, "one task at a time: two would write to one memory"
            self.running[command.key] = command

    def _hold(self, versions: tuple[HeldNotice, ...]) -> None:
        self.said.append(tuple(each.identity.number for each in versions))

    def tell(self, command: FillRelay, now: float = 0.0) -> None:
        self.machine.message(command, CLUSTER, now)

    @property
    def task(self) -> CountSlot | FillSlot | None:
        for run in self.running.values():
            assert isinstance(run.task, CountSlot | FillSlot)
            return run.task
        return None

    def end(self, problem: Problem | None = None, now: float = 0.0, answered: bool = True, missing: int = 0) -> None:
        """The task that runs ends, well unless there is a problem."""
        ((key, run),) = self.running.items()
        self.running.clear()
        result: object = None
        if problem is None and isinstance(run.task, FillSlot):
            result = SlotFilled(
                b"table of slot %d" % run.task.slot, b"record", RelayFilled(bytes=7, missing_cells=missing)
            )
        assert self.machine.done(Done(key, result, problem, answered), now)

    def bring(self, command: FillRelay) -> None:
        self.tell(command)
        self.end()
        self.end()

    @property
    def held(self) -> list[int]:
        return [each.identity.number for each in self.machine.held]

    @property
    def answers(self) -> list[tuple[int, str]]:
        """Epoch and what is wrong."""
        return [(each.fence.epoch, each.problem.message) for each in self.said if isinstance(each, RelayFilled)]


FULL = Problem(code=Problem.CODE_FAILED_PRECONDITION, message="takes 9 bytes, and a slot has 8")


def test_a_version_is_held_only_when_it_was_compared_and_answered_then() -> None:
    relay = Relay()
    relay.tell(fill(1, 5))
    assert isinstance(relay.task, CountSlot)
    relay.end()
    assert isinstance(relay.task, FillSlot)
    assert (relay.held, relay.answers) == ([], [])
    relay.end()
    assert (relay.held, relay.answers) == ([5], [(1, "")])
    assert relay.said[-2] == (5,), "what is held is told before the answer"


def test_a_later_attempt_is_a_newer_command_and_an_earlier_one_is_late() -> None:
    """Whom it was to read has failed, so the manager names others under the same fence."""
    relay = Relay()
    relay.tell(fill(1, 5, attempt=1))
    relay.end(FULL)
    relay.tell(fill(1, 5))
    assert relay.task is None, "that came late"
    relay.tell(fill(1, 5, attempt=1))
    assert relay.task is None
    assert relay.answers == [(1, FULL.message)] * 2
    relay.tell(fill(1, 5, attempt=2))
    assert isinstance(relay.task, CountSlot)
    relay.end()
    relay.end()
    answers = [each for each in relay.said if isinstance(each, RelayFilled)]
    assert [each.attempt for each in answers] == [1, 1, 2]
    assert relay.held == [5]


def test_who_holds_a_part_by_order_does_not_take_it_for_the_whole_nor_for_another_part() -> None:
    def within(epoch: int, *tables: bytes) -> FillRelay:
        command = fill(epoch, 5, needs=(b"n",))
        command.within.extend(BlobRef(digest=each) for each in tables)
        return command

    relay = Relay()
    relay.bring(within(1, b"a", b"b"))
    relay.tell(within(2, b"b"))
    assert relay.task is None, "that is there"
    for epoch, tables in ((3, (b"a", b"c")), (4, ())):
        relay.tell(within(epoch, *tables))
        assert isinstance(relay.task, CountSlot)
        assert not relay.task.more, "it is laid out in another way"
        relay.end(FULL)
    relay.bring(within(5))
    relay.tell(within(6, b"c"))
    assert relay.task is None, "all of it is there"


def test_what_a_part_by_order_lacks_is_brought_beside_it_for_that_part_only() -> None:
    relay = Relay()
    command = fill(1, 5, needs=(b"n",))
    command.within.add(digest=b"a")
    relay.tell(command)
    relay.end()
    relay.end(missing=2)
    command.attempt = 1
    relay.tell(command)
    assert isinstance(relay.task, CountSlot)
    assert relay.task.more
    relay.end(FULL)
    command.attempt = 2
    command.within.add(digest=b"b")
    relay.tell(command)
    assert isinstance(relay.task, CountSlot)
    assert not relay.task.more


def test_the_rest_of_a_version_is_brought_beside_what_is_there() -> None:
    """Others may be reading that: it is neither given up nor overwritten, also if the rest cannot be had."""
    relay = Relay()
    relay.tell(fill(1, 5, needs=(b"n",)))
    relay.end()
    relay.end(missing=2)
    relay.tell(fill(1, 5, needs=(b"n",), attempt=1))
    relay.end()
    assert isinstance(relay.task, FillSlot)
    assert (relay.task.slot, relay.task.more, relay.held) == (0, True, [5])
    relay.end(FULL)
    assert relay.held == [5]
    relay.tell(fill(1, 5, needs=(b"n",), attempt=2))
    relay.end()
    relay.end()
    assert relay.held == [5]
    relay.tell(fill(2, 6))
    relay.end()
    assert isinstance(relay.task, FillSlot)
    assert not relay.task.more
    relay.end()
    relay.tell(fill(3, 6, needs=(b"other",)))
    relay.end()
    assert isinstance(relay.task, FillSlot)
    assert not relay.task.more, "it is laid out otherwise"


def test_what_is_to_be_served_is_never_overwritten() -> None:
    relay = Relay()
    slots = []
    for epoch, version, keep in ((1, 1, 0), (2, 2, 1), (3, 3, 2), (4, 4, 2), (5, 5, 4)):
        relay.tell(fill(epoch, version, keep))
        relay.end()
        assert keep == 0 or keep in relay.held
        assert isinstance(relay.task, FillSlot)
        slots.append(relay.task.slot)
        relay.end()
        assert keep == 0 or keep in relay.held
    assert slots == [0, 1, 0, 0, 1]
    assert relay.held == [5, 4]


def test_memory_is_counted_before_anything_is_given_up() -> None:
    relay = Relay()
    relay.bring(fill(1, 1))
    relay.bring(fill(2, 2, 1))
    relay.tell(fill(3, 3, 2))
    relay.end(FULL)
    assert (relay.held, relay.answers[-1]) == ([2, 1], (3, FULL.message))
    assert relay.task is None


def test_what_is_given_up_is_said_before_the_first_byte_changes() -> None:
    relay = Relay()
    relay.bring(fill(1, 1))
    relay.bring(fill(2, 2, 1))
    relay.tell(fill(3, 3, 2))
    relay.end()
    told, run = relay.said[-2:]
    assert told == (2,)
    assert isinstance(run, Run)
    assert isinstance(run.task, FillSlot)
    relay.end(Problem(message="gone"))
    assert (relay.held, relay.answers[-1]) == ([2], (3, "gone"))


def test_a_lower_fence_is_not_obeyed_and_an_equal_one_is_answered_as_before() -> None:
    relay = Relay()
    relay.tell(fill(5, 1))
    relay.tell(fill(5, 1))
    relay.tell(fill(4, 9))
    other = fill(9, 9)
    other.fence.cluster = "other"
    relay.tell(other)
    relay.end()
    relay.end()
    assert (relay.held, relay.answers, relay.machine.epoch) == ([1], [(5, "")], 5)
    relay.tell(fill(5, 1))
    assert relay.answers == [(5, ""), (5, "")], "whatever became of the first answer"
    assert relay.task is None


def test_a_newer_command_ends_the_filling_and_waits_until_it_has_ended() -> None:
    relay = Relay()
    relay.tell(fill(1, 1))
    relay.end()
    relay.tell(fill(2, 2))
    relay.tell(fill(3, 3))
    assert relay.said.count(StopFilling()) == 1
    assert isinstance(relay.task, FillSlot)
    relay.end(Problem(code=Problem.CODE_ABORTED, message="overtaken"))
    assert isinstance(relay.task, CountSlot)
    assert relay.task.command.identity.version == 3, "the one between was overtaken before it began"
    relay.end()
    relay.end()
    assert (relay.held, relay.answers) == ([3], [(3, "")]), "the manager has forgotten the other fences"


def test_a_newer_command_that_wants_the_same_goes_on_with_what_has_come() -> None:
    """An origin was lost, and the command names another one."""
    relay = Relay()
    relay.tell(fill(1, 1, needs=[b"a"]))
    relay.end()
    relay.tell(fill(1, 1, needs=[b"a"], attempt=1))
    relay.tell(fill(1, 1, needs=[b"a"], attempt=2))
    assert [each for each in relay.said if isinstance(each, StopFilling)] == [StopFilling(keep=True)]
    relay.end(missing=3)
    assert isinstance(relay.task, CountSlot)
    assert (relay.task.slot, relay.task.more, relay.task.command.attempt) == (0, True, 2)
    assert relay.held == [1], "what has come can be read"
    relay.end()
    relay.end()
    assert (relay.held, relay.answers) == ([1], [(1, "")])


@pytest.mark.parametrize("other", ["version", "needs", "everything"])
def test_what_has_come_does_not_stay_for_a_command_that_wants_something_else(other: str) -> None:
    relay = Relay()
    relay.tell(fill(1, 1, needs=[b"a"]))
    relay.end()
    relay.tell(fill(2, 1, needs=[b"a"]))
    newest = fill(3, 2 if other == "version" else 1, needs=[b"b"] if other == "needs" else [b"a"])
    newest.everything = other == "everything"
    relay.tell(newest)
    stops = [each for each in relay.said if isinstance(each, StopFilling)]
    assert stops == [StopFilling(keep=True), StopFilling(keep=False)]
    relay.end(Problem(code=Problem.CODE_ABORTED, message="overtaken"))
    assert isinstance(relay.task, CountSlot)
    assert not relay.task.more


def test_what_is_overtaken_while_it_is_counted_gives_nothing_up() -> None:
    relay = Relay()
    relay.bring(fill(1, 1))
    relay.bring(fill(2, 2, keep=1))
    relay.tell(fill(3, 3, keep=2))
    relay.tell(fill(4, 4, keep=2))
    relay.end()
    assert isinstance(relay.task, CountSlot)
    assert relay.task.command.identity.version == 4
    assert relay.held == [2, 1]


def test_what_was_whole_in_the_moment_when_it_was_overtaken_is_held() -> None:
    relay = Relay()
    relay.tell(fill(1, 1))
    relay.end()
    relay.tell(fill(2, 2, keep=1))
    relay.end()
    assert isinstance(relay.task, CountSlot)
    assert relay.task.slot == 1
    assert (relay.held, relay.answers) == ([1], [])


def test_a_version_that_is_there_already_is_not_brought_again() -> None:
    relay = Relay()
    relay.bring(fill(1, 1, needs=[b"a", b"b"]))
    relay.tell(fill(2, 1, needs=[b"a"]))
    assert (relay.task, relay.answers) == (None, [(1, ""), (2, "")])
    relay.tell(fill(3, 1, keep=1, needs=[b"a", b"c"]))
    assert isinstance(relay.task, CountSlot)
    assert relay.task.slot == 1, "a worker came that needs more of what is served"
    relay.end()
    relay.end()
    assert relay.held == [1], "each version once"
    relay.tell(fill(4, 1, keep=1, needs=[b"c"]))
    assert relay.task is None


@pytest.mark.parametrize("read", [0, 1, None])
def test_of_two_slots_with_the_version_to_keep_the_one_that_is_read_stays(read: int | None) -> None:
    """It holds the version twice, for needs that came later."""
    relay = Relay()
    relay.bring(fill(1, 1, needs=[b"a"]))
    relay.bring(fill(2, 1, keep=1, needs=[b"b"]))
    tables = [each.table for each in relay.said if isinstance(each, RelayFilled)]
    assert tables == [blob_digest(b"table of slot %d" % slot) for slot in range(2)]
    command = fill(3, 2, keep=1)
    command.keep_table = b"" if read is None else tables[read]
    relay.tell(command)
    assert isinstance(relay.task, CountSlot)
    assert relay.task.slot == {0: 1, 1: 0, None: 0}[read]


def test_a_version_of_which_something_is_missing_is_brought_again() -> None:
    relay = Relay()
    relay.tell(fill(1, 1))
    relay.end()
    relay.end(missing=2)
    assert relay.held == [1]
    relay.tell(fill(2, 1))
    assert isinstance(relay.task, CountSlot)


def test_everything_serves_whoever_needs_something_and_not_the_other_way_round() -> None:
    relay = Relay()
    relay.bring(fill(1, 1, needs=[b"a"]))
    whole = fill(2, 1)
    whole.everything = True
    relay.bring(whole)
    relay.tell(fill(3, 1, needs=[b"z"]))
    assert relay.task is None
    assert relay.answers[-1] == (3, "")


def test_counting_takes_its_time_from_the_filling() -> None:
    relay = Relay()
    relay.tell(fill(1, 1, seconds=60.0), now=100.0)
    relay.end(now=130.0)
    assert isinstance(relay.task, FillSlot)
    assert relay.task.seconds == 30.0
    relay.end(Problem(code=Problem.CODE_DEADLINE_EXCEEDED, message="late"), now=160.0, answered=False)
    assert relay.answers == [(1, "late")]


def test_a_process_that_ends_ends_its_filling_and_begins_nothing() -> None:
    relay = Relay()
    relay.tell(fill(1, 1))
    relay.tell(fill(2, 2))
    relay.machine.stop()
    relay.end(Problem(code=Problem.CODE_ABORTED, message="stopped"))
    assert (relay.task, relay.answers) == (None, [])
    relay.machine.stop()


def test_a_task_of_somebody_else_and_one_of_before_change_nothing() -> None:
    relay = Relay()
    assert not relay.machine.done(Done(("put", 1)), 0.0)
    relay.tell(fill(1, 1))
    assert relay.machine.done(Done(("relay", "count", 77)), 0.0)
    assert isinstance(relay.task, CountSlot)
