"""A version's probe in the agent's machine: it follows the install, takes its own time and changes no outcome."""

from __future__ import annotations

import pytest
from test_agent_install import DEADLINE, EPOCH, NEW, NEXT, TORN, Install
from test_agent_turns import CLUSTER

from ckpt_engine.core.check_verdict import Score
from ckpt_engine.core.probe import CONTINUED, why_bad
from ckpt_engine.machines import events
from ckpt_engine.machines.manager import deploy
from ckpt_engine.v1 import manager_pb2, weights_pb2

SECONDS = 8.0
SCORES = manager_pb2.ProbeScores(
    sequences=[
        manager_pb2.ProbeSequence(tokens=[1, 2, 3], log_probabilities=[-1.0, -2.0]),
        manager_pb2.ProbeSequence(tokens=[4, 5], log_probabilities=[-3.0]),
    ],
    bounds=manager_pb2.ProbeBounds(mean=0.1),
    clip=0.2,
    seconds=SECONDS,
)
BLOB = SCORES.SerializeToString()
CHOSEN = (-0.5,) * CONTINUED


class Probed(Install):
    """An install of a version with a probe, which has come to the probe at 2."""

    def __init__(self, scores: bytes | weights_pb2.Problem = BLOB) -> None:
        super().__init__(scores=scores)
        run = self.until(events.InstallEngine, 0.0)
        self.want(0.0)
        self.end(run, 1.0)
        self.end(self.until(events.ResumeEngine, 1.0, NEW), 2.0)
        self.end(self.until(events.HoldRequests, 2.0), 2.0)
        self.end(self.until(events.ReadWords, 2.0), 2.0, NEW)

    def answer(self, now: float, result: object, problem: weights_pb2.Problem | None = None) -> None:
        """Ends the only step that runs, with this."""
        (run,) = self._running
        self._running.remove(run)
        self._take(self.agent.tell(events.Done(run.key, result, problem), now))

    def scored(self, now: float, offset: float = 0.0, cached: float = 0.0) -> None:
        """The engine answers both questions about each sequence. offset: from the trainer's. cached: of what it
        computes over caches, from what it computes without."""
        for each in SCORES.sequences:
            tokens = tuple(range(CONTINUED))
            values = tuple(value + offset for value in each.log_probabilities)
            for is_cached in (True, False):
                (run,) = self._running
                assert isinstance(run.task, events.ScoreEngine)
                assert (run.task.tokens, run.task.cached) == (tuple(each.tokens), is_cached)
                prompt, shift = ((), cached) if is_cached else (values, 0.0)
                self.answer(now, Score(prompt, tokens, tuple(value + shift for value in CHOSEN)))
        self.answer(now, NEW)


def test_the_outcome_has_figures_and_its_numbers_are_those_of_the_install() -> None:
    install = Probed()
    install.scored(5.0, offset=0.3)
    outcome = install.outcome()
    assert outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert not outcome.HasField("problem"), "a probe changes no outcome"
    assert outcome.sync_seconds == 2.0
    assert outcome.pause_seconds <= 2.0
    assert outcome.probe.seconds == 3.0
    assert outcome.probe.engine.mean == pytest.approx(0.3)
    assert list(outcome.probe.broken) == ["mean 0.3 above 0.1"]
    assert outcome.probe.cached.mean == 0
    assert not outcome.probe.HasField("before")


def test_what_was_answered_before_is_compared_with_the_new_scores() -> None:
    first = Probed()
    first.scored(5.0, offset=0.05)
    later = Probed()
    later.agent.machine.replica.probed = first.agent.machine.replica.probed
    later.scored(5.0)
    answer = later.outcome().probe
    assert answer.before.mean == pytest.approx(0.05)
    assert answer.engine.mean == pytest.approx(0.0)


def test_a_stale_cache_shows_beside_what_is_computed_without() -> None:
    install = Probed()
    install.scored(5.0, cached=-2.0)
    answer = install.outcome().probe
    assert answer.engine.mean == pytest.approx(0.0)
    assert answer.cached.mean == pytest.approx(2.0)
    assert list(answer.broken_cached) == ["mean 2 above 0.1"]


def test_an_engine_that_answers_too_late_has_served_all_the_same() -> None:
    install = Probed()
    install.answer(2.0 + SECONDS, Score((), (1,) * CONTINUED, CHOSEN))
    outcome = install.outcome()
    assert outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert outcome.probe.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED
    assert "only 0 of 2 sequences" in outcome.probe.problem.message


def test_questions_have_no_more_time_than_the_probe_and_the_install() -> None:
    install = Probed()
    (run,) = install._running
    assert isinstance(run.task, events.ScoreEngine)
    assert run.task.seconds == SECONDS
    scores = manager_pb2.ProbeScores()
    scores.CopyFrom(SCORES)
    scores.seconds = 10 * DEADLINE
    (run,) = Probed(scores.SerializeToString())._running
    assert isinstance(run.task, events.ScoreEngine)
    assert run.task.seconds == DEADLINE - 2.0


@pytest.mark.parametrize(
    ("blob", "words"),
    [(b"\xff", "cannot be used"), (manager_pb2.ProbeScores(clip=0.2).SerializeToString(), "1 to 256 sequences")],
)
def test_scores_that_cannot_be_used_are_told(blob: bytes, words: str) -> None:
    outcome = Probed(blob).outcome()
    assert outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert words in outcome.probe.problem.message


def test_scores_that_cannot_be_fetched_are_no_fault_of_the_engine() -> None:
    lost = weights_pb2.Problem(code=weights_pb2.Problem.CODE_NOT_FOUND, message="no such blob")
    outcome = Probed(lost).outcome()
    assert outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert outcome.probe.problem.code == weights_pb2.Problem.CODE_ABORTED
    assert outcome.probe.problem.message == "the scores could not be fetched: no such blob"
    assert "did not answer" not in why_bad(outcome.probe)
    judge = deploy.CONDITIONS["probe"]
    assert judge(0.0, deploy.Facts(1.0, False, {"a": outcome.probe})).verdict is deploy.Verdict.OPEN


def test_an_engine_that_refuses_a_question_has_served_all_the_same() -> None:
    install = Probed()
    install.answer(
        3.0, None, weights_pb2.Problem(code=weights_pb2.Problem.CODE_INTERNAL, message="answered 400: too long")
    )
    outcome = install.outcome()
    assert outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert "too long" in outcome.probe.problem.message
    assert outcome.probe.problem.replica == outcome.replica


def test_a_later_install_cuts_the_probe_short() -> None:
    install = Probed()
    fence = weights_pb2.Fence(cluster=CLUSTER, epoch=EPOCH + 1)
    abandon = manager_pb2.Abandon(fence=weights_pb2.Fence(cluster=CLUSTER, epoch=EPOCH), reason="something newer")
    later = manager_pb2.Install(fence=fence, identity=NEXT, deadline_seconds=DEADLINE)
    for command in (abandon, later):
        install.agent.tell(events.Message(install.agent.peer, command), 4.0)
    outcome = install.outcome()
    assert outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert outcome.probe.problem.code == weights_pb2.Problem.CODE_ABORTED
    assert "something newer" in outcome.probe.problem.message


def test_what_cut_the_probe_short_overtakes_older_installs() -> None:
    install = Probed()
    later = manager_pb2.Install(
        fence=weights_pb2.Fence(cluster=CLUSTER, epoch=EPOCH + 2), identity=NEXT, deadline_seconds=DEADLINE
    )
    install.agent.tell(events.Message(install.agent.peer, later), 4.0)
    assert install.outcome().probe.problem.code == weights_pb2.Problem.CODE_ABORTED
    sent = [each.body for each in install.agent.engine_ready(paused=False) if isinstance(each, events.Send)]
    assert [each.epoch for each in sent if isinstance(each, manager_pb2.ReplicaHello)] == [EPOCH + 2]


def test_an_engine_that_ends_in_the_probe_is_quarantined() -> None:
    install = Probed()
    install.agent.tell(events.EngineExited("killed"), 4.0)
    assert install.outcome().outcome == manager_pb2.OUTCOME_QUARANTINED


def test_the_words_after_the_probe_decide() -> None:
    install = Probed()
    for each in SCORES.sequences:
        install.answer(4.0, Score((), (1,) * CONTINUED, CHOSEN))
        install.answer(4.0, Score(tuple(each.log_probabilities), (1,) * CONTINUED, CHOSEN))
    install.answer(4.0, TORN)
    assert install.outcome().outcome == manager_pb2.OUTCOME_QUARANTINED


def test_each_answer_is_told_so_that_nothing_seems_to_stall() -> None:
    install = Probed()
    before = progress(install)
    install.answer(3.0, Score((), (1,) * CONTINUED, CHOSEN))
    assert progress(install) > before


def progress(install: Install) -> int:
    """The steps that it told last."""
    told = [each.body for each in install.agent.commands if isinstance(each, events.Send)]
    return [each.steps for each in told if isinstance(each, manager_pb2.Progress)][-1]
