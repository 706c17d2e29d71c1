"""One install in the agent's machine: what it does with the time it has, and with words that change under it."""

from __future__ import annotations

from typing import Any

import pytest
from test_agent_turns import CLUSTER, WORDS, Agent

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.ready import SILENCE_SECONDS
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

EPOCH = 2
DEADLINE = 20.0
KEPT = DEADLINE / 4
"""What an install of so many seconds keeps back for resuming."""

NEXT = weights_pb2.Identity(lineage="run", version=2, root=b"r" * 32)
BOOT = b"b" * 16
DIRTY = manager_pb2.WorkerStatus(boot_id=BOOT, pid=1, state=manager_pb2.WORKER_STATE_DIRTY, epoch=EPOCH)
CLEAN = manager_pb2.WorkerStatus(boot_id=BOOT, pid=1, state=manager_pb2.WORKER_STATE_CLEAN, epoch=EPOCH, identity=NEXT)
NEW = events.Words((CLEAN,), True, "", NEXT)
TORN = events.Words((DIRTY,), False, "worker 0 is being updated", None)


class Install:
    """An install that was told at 0 to the agent of an engine that serves. Steps end when `until` or `end` says so."""

    def __init__(
        self,
        deadline: float = DEADLINE,
        early_bytes: int = 0,
        waits: bool = False,
        scores: bytes | weights_pb2.Problem = b"",
    ) -> None:
        """early_bytes: what its worker says that it brings into stage memory. waits: for others, once it is ready.
        scores: of its version's probe, or why they cannot be fetched."""
        self.scores = scores
        self.early_bytes = early_bytes
        self.agent = Agent()
        self.agent.welcome()
        self._running: list[events.Run] = []
        self._take(self.agent.engine_ready(paused=False))
        while self._running:
            self.end(self._running[0], 0.0)
        plan, expected = (manager_pb2.BlobRef(digest=letter * 32) for letter in (b"p", b"e"))
        self.command = manager_pb2.Install(
            fence=weights_pb2.Fence(cluster=CLUSTER, epoch=EPOCH),
            identity=NEXT,
            pause_mode=manager_pb2.PAUSE_MODE_KEEP,
            deadline_seconds=deadline,
            waits=waits,
            workers=[manager_pb2.WorkerInstall(rank=0, plan=plan, expected=expected)],
            probe=manager_pb2.BlobRef(digest=b"s" * 32) if scores else None,
        )
        self._take(self.agent.tell(events.Message(self.agent.peer, self.command)))

    def _take(self, commands: list[events.AgentCommand]) -> None:
        self._running += [command for command in commands if isinstance(command, events.Run)]

    def end(self, run: events.Run, now: float, words: events.Words = WORDS) -> None:
        """The step ends well. words: what is read, if that is the step."""
        self._running.remove(run)
        if run.key[-1] == "fetch scores" and isinstance(self.scores, weights_pb2.Problem):
            self._take(self.agent.tell(events.Done(run.key, problem=self.scores), now))
            return
        fetched = (self.scores,) if run.key[-1] == "fetch scores" else (b"plan", b"expected")
        results = {events.ReadWords: words, events.FetchBlobs: fetched}
        if isinstance(run.task, events.PrepareEngine):
            self.asks(now, want_prepare=worker_pb2.WantOrder())
            fence = weights_pb2.Fence(cluster=CLUSTER, epoch=EPOCH)
            ready = worker_pb2.WorkerReady(fence=fence, plans=[b"p" * 32], early_bytes=self.early_bytes)
            self.asks(now, ready=ready)
        self._take(self.agent.tell(events.Done(run.key, results.get(type(run.task))), now))

    def until(self, kind: type, now: float, words: events.Words = WORDS) -> events.Run:
        """Ends steps until one of `kind` runs, and returns that."""
        for _ in range(20):
            (run,) = self._running
            if isinstance(run.task, kind):
                return run
            self.end(run, now, words)
        raise AssertionError(f"no {kind.__name__} came")

    def want(self, now: float) -> worker_pb2.AgentReply:
        """What a worker gets that asks for its order."""
        return self.asks(now, want_install=worker_pb2.WantOrder())

    def asks(self, now: float, **body: Any) -> worker_pb2.AgentReply:
        """What the worker gets for a request."""
        request = worker_pb2.WorkerRequest(rank=0, boot_id=BOOT, **body)
        given = self.agent.tell(events.WorkerAsked(1, request), now)
        self._take(given)
        (reply,) = [command.reply for command in given if isinstance(command, events.Reply)]
        assert reply is not None
        return reply

    def brings(self, now: float, done: int, **end: Any) -> worker_pb2.AgentReply:
        """What the worker gets that tells how far it is with what it brings early."""
        fence = weights_pb2.Fence(cluster=CLUSTER, epoch=EPOCH)
        early = worker_pb2.WorkerEarly(fence=fence, bytes_done=done, bytes_total=self.early_bytes, **end)
        return self.asks(now, early=early)

    def look(self, now: float) -> None:
        """Its timer for a look at what is brought fires."""
        operation = self.agent.machine.replica.operation
        assert operation is not None
        self._take(self.agent.tell(events.TimerFired(("operation", operation.number, "pending")), now))

    def go_on(self, now: float) -> None:
        """The command comes again, and says no more that it is to wait."""
        self.command.waits = False
        self._take(self.agent.tell(events.Message(self.agent.peer, self.command), now))

    @property
    def ready(self) -> bool:
        """Whether the manager was told last that it is ready, and waits."""
        sent = (command.body for command in self.agent.commands if isinstance(command, events.Send))
        return [body.ready for body in sent if isinstance(body, manager_pb2.Progress)][-1]

    @property
    def steps(self) -> list[type]:
        """What runs now."""
        return [type(run.task) for run in self._running]

    def outcome(self) -> manager_pb2.ReplicaOutcome:
        (outcome,) = [
            command.body
            for command in self.agent.commands
            if isinstance(command, events.Send) and isinstance(command.body, manager_pb2.ReplicaOutcome)
        ]
        return outcome


@pytest.mark.parametrize(("deadline", "fetched", "left"), [(20.0, 0.0, 15.0), (20.0, 14.0, 1.0), (200.0, 5.0, 180.0)])
def test_no_step_may_take_the_time_that_is_kept_for_resuming(deadline: float, fetched: float, left: float) -> None:
    """The plan was fetched so late; pausing and installing get what is left then, and pausing never more than it may.

    Kept is a quarter, or what resuming may take (15 s) if that is less.
    """
    install = Install(deadline)
    fetch = install.until(events.FetchBlobs, 0.0)
    install.end(fetch, fetched)
    pause = install.until(events.PauseEngine, fetched)
    assert isinstance(pause.task, events.PauseEngine)
    assert pause.task.seconds == min(Deadlines().quiesce, left)
    install.end(pause, fetched)
    run = install.until(events.InstallEngine, fetched)
    assert isinstance(run.task, events.InstallEngine)
    assert run.task.seconds == left


def test_a_worker_gets_no_order_in_the_time_that_is_kept_for_resuming() -> None:
    """It would write while the agent resumes."""
    install = Install()
    install.until(events.InstallEngine, 0.0)
    order = install.want(DEADLINE - KEPT - 1.0)
    assert order.install.identity == NEXT
    assert order.install.deadline_seconds == 1.0
    late = Install()
    late.until(events.InstallEngine, 0.0)
    assert "no such order now" in late.want(DEADLINE - KEPT).refused.message


@pytest.mark.parametrize(
    ("words", "outcome"), [(NEW, manager_pb2.OUTCOME_NEW_SERVING), (TORN, manager_pb2.OUTCOME_QUARANTINED)]
)
def test_the_words_after_resuming_decide(words: events.Words, outcome: manager_pb2.Outcome) -> None:
    """A worker that died or was restarted meanwhile has whole weights no more."""
    install = Install()
    run = install.until(events.InstallEngine, 0.0)
    install.want(0.0)
    install.end(run, 1.0)
    resume = install.until(events.ResumeEngine, 1.0, NEW)
    install.end(resume, 2.0)
    install.end(install.until(events.ReadWords, 2.0), 2.0, words)
    assert install.outcome().outcome == outcome


@pytest.mark.parametrize("step", [events.FetchBlobs, events.PauseEngine, events.InstallEngine])
def test_an_engine_that_ends_has_its_outcome_at_once_and_is_asked_for_nothing(step: type) -> None:
    install = Install()
    install.until(step, 0.0)
    given = install.agent.tell(events.EngineExited("it ran out of memory"), 1.0)
    assert not [command for command in given if isinstance(command, events.Run)]
    outcome = install.outcome()
    assert outcome.outcome == manager_pb2.OUTCOME_QUARANTINED
    assert "it ran out of memory" in outcome.problem.message


def test_an_engine_that_took_all_the_time_to_pause_is_not_installed_into() -> None:
    install = Install()
    pause = install.until(events.PauseEngine, 0.0)
    install.end(pause, DEADLINE - KEPT)
    install.end(install.until(events.ResumeEngine, DEADLINE - KEPT), DEADLINE - KEPT)
    install.end(install.until(events.HoldRequests, DEADLINE - KEPT), DEADLINE - KEPT)
    install.end(install.until(events.ReadWords, DEADLINE - KEPT), DEADLINE - KEPT)
    outcome = install.outcome()
    assert outcome.outcome == manager_pb2.OUTCOME_OLD_SERVING
    assert outcome.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED
    assert "pausing" in outcome.problem.message


@pytest.mark.parametrize("waits", [True, False])
def test_an_engine_that_lets_nobody_in_since_another_update_does_not_serve_the_old_version(waits: bool) -> None:
    """The engine had not resumed when this install began, and now it is not made ready."""
    install = Install()
    ready = install.until(events.PrepareEngine, 0.0)
    install.agent.machine.replica.holding = waits
    install._take(install.agent.tell(events.Done(ready.key, None, weights_pb2.Problem(message="too slow")), 1.0))
    install._running.remove(ready)
    install.end(install.until(events.ReadWords, 1.0), 1.0)
    outcome = install.outcome()
    assert outcome.outcome == (manager_pb2.OUTCOME_QUARANTINED if waits else manager_pb2.OUTCOME_OLD_SERVING)
    assert outcome.problem.message == "too slow"


def test_workers_are_looked_at_once_more_before_a_replica_is_said_to_serve_on() -> None:
    """One died while the plan was fetched, which took too long."""
    install = Install()
    fetch = install.until(events.FetchBlobs, 0.0)
    install.end(fetch, DEADLINE)
    look = install.until(events.ReadWords, DEADLINE)
    install.end(look, DEADLINE, events.Words((), False, "worker 0 is dead", None))
    outcome = install.agent.machine.replica.last_outcome
    assert outcome is not None
    assert outcome.outcome == manager_pb2.OUTCOME_QUARANTINED


def test_an_install_that_is_abandoned_while_workers_get_ready_waits_for_none_of_them() -> None:
    """One that is stopped answers after its SIGCONT: that is heard and changes nothing."""
    install = Install()
    asked = install.until(events.PrepareEngine, 0.0)
    fence = weights_pb2.Fence(cluster=CLUSTER, epoch=EPOCH)
    abandoned = events.Message(install.agent.peer, manager_pb2.Abandon(fence=fence, reason="an update came"))
    (look,) = (run for run in install.agent.tell(abandoned, 1.0) if isinstance(run, events.Run))
    install.agent.tell(events.Done(look.key, WORDS), 1.0)
    assert install.outcome().outcome == manager_pb2.OUTCOME_OLD_SERVING
    assert "an update came" in install.outcome().problem.message
    assert "no such order now" in install.asks(2.0, want_prepare=worker_pb2.WantOrder()).refused.message
    before = len(install.agent.commands)
    install.agent.tell(events.Done(asked.key, None), 3.0)
    later = install.agent.commands[before:]
    assert not [each for each in later if isinstance(each, events.Run)], later


def test_an_engine_pauses_once_what_its_worker_brings_is_there_and_verified() -> None:
    install = Install(early_bytes=100)
    install.end(install.until(events.PrepareEngine, 0.0), 0.0)
    assert install.steps == []
    assert install.brings(1.0, 50).HasField("acknowledged")
    install.look(1.0)
    assert install.steps == []
    assert install.brings(2.0, 100, verified=True).HasField("acknowledged")
    assert install.steps == [events.HoldRequests]
    install.until(events.PauseEngine, 2.0)


@pytest.mark.parametrize("how", ["a problem", "silence", "no time", "another command"])
def test_what_cannot_be_brought_leaves_the_replica_as_it_was(how: str) -> None:
    install = Install(deadline=200.0, early_bytes=100)
    install.end(install.until(events.PrepareEngine, 0.0), 0.0)
    problem = weights_pb2.Problem(
        code=weights_pb2.Problem.CODE_DATA_LOSS, message="it does not hash to what was sealed"
    )
    now = {"a problem": 1.0, "silence": SILENCE_SECONDS + 1.5, "no time": 186.0, "another command": 1.0}[how]
    if how == "a problem":
        install.brings(now, 50, problem=problem)
    elif how == "another command":
        abandon = manager_pb2.Abandon(fence=weights_pb2.Fence(cluster=CLUSTER, epoch=EPOCH), reason="no more")
        install._take(install.agent.tell(events.Message(install.agent.peer, abandon), now))
    else:
        if how == "no time":
            install.brings(180.0, 50)
        install.look(now)
    assert install.steps == [events.ReadWords]
    assert install.brings(now, 60).HasField("refused"), "nobody waits for it"
    install.end(install._running[0], now)
    outcome = install.outcome()
    assert outcome.outcome == manager_pb2.OUTCOME_OLD_SERVING
    said = {
        "a problem": "does not hash to what was sealed",
        "silence": "worker 0 has told nothing for 30 s of what it brings into stage memory",
        "no time": "getting the workers ready took all the time there was",
        "another command": "abandoned: no more",
    }
    assert said[how] in outcome.problem.message
    assert not outcome.pause_seconds


@pytest.mark.parametrize("early_bytes", [0, 100])
def test_an_install_that_waits_for_others_pauses_its_engine_when_it_is_told_so(early_bytes: int) -> None:
    install = Install(early_bytes=early_bytes, waits=True)
    install.end(install.until(events.PrepareEngine, 0.0), 0.0)
    if early_bytes:
        assert not install.ready
        install.brings(2.0, early_bytes, verified=True)
    assert install.ready
    install.look(3.0)
    assert install.steps == [], "it waits"
    install.go_on(4.0)
    assert install.steps == [events.HoldRequests]
    install.until(events.PauseEngine, 4.0)


def test_an_install_that_is_told_early_not_to_wait_goes_on_once_it_is_ready() -> None:
    install = Install(waits=True)
    asked = install.until(events.PrepareEngine, 0.0)
    install.go_on(1.0)
    install.end(asked, 2.0)
    install.until(events.PauseEngine, 2.0)


@pytest.mark.parametrize("how", ["time", "another command"])
def test_an_install_that_waits_for_others_in_vain_has_paused_nothing(how: str) -> None:
    install = Install(waits=True)
    install.end(install.until(events.PrepareEngine, 0.0), 0.0)
    if how == "time":
        install.look(DEADLINE - KEPT)
    else:
        abandon = manager_pb2.Abandon(fence=weights_pb2.Fence(cluster=CLUSTER, epoch=EPOCH), reason="it is undone")
        install._take(install.agent.tell(events.Message(install.agent.peer, abandon), 1.0))
    assert install.steps == [events.ReadWords]
    install.end(install._running[0], DEADLINE - KEPT)
    outcome = install.outcome()
    assert (outcome.outcome, outcome.pause_seconds) == (manager_pb2.OUTCOME_OLD_SERVING, 0.0)
    assert {"time": "were not in time", "another command": "it is undone"}[how] in outcome.problem.message
