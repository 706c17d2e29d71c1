"""The agent of one rollout replica: the shell around AgentMachine.

The machine decides everything about updates; this module carries out its commands and feeds it events. All of it runs
on one event loop, which never waits for a file, a digest or an engine: these run as tasks, threads and processes. The
agent does not stop when the manager dies, nor when an engine dies that may be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.agent import narration
from ckpt_engine.agent.attached import AttachedEngine
from ckpt_engine.agent.engine import EngineHost
from ckpt_engine.agent.launched import LaunchedEngine
from ckpt_engine.agent.leading import Followers
from ckpt_engine.agent.metrics import AgentState, of_agent
from ckpt_engine.agent.process import LineSink
from ckpt_engine.agent.questions import Questions
from ckpt_engine.agent.reports import Reports
from ckpt_engine.agent.settings import AgentSettings as AgentSettings
from ckpt_engine.agent.shelf_host import ShelfHost
from ckpt_engine.agent.tasks import TaskRunner
from ckpt_engine.channel import ManagerStub, open_channel
from ckpt_engine.core.deadlines import NOTICE_SECONDS
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.host.facts import this_host
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.scraping import scraped_at
from ckpt_engine.shell.loop import Loop
from ckpt_engine.shell.stream import MemberStream
from ckpt_engine.trace import trace
from ckpt_engine.transport.on_host import worker_transports
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
"""How long to wait for workers' reports after their engine's answer. They are sent before it."""


class EvictedError(CkptEngineError):
    """An operator removed the replica: the agent must not be restarted."""


class ReplicaAgent:
    """One engine's agent, for the lifetime of this process."""

    def __init__(
        self,
        settings: AgentSettings,
        say: Callable[[str], None],
        on_output: LineSink | None = None,
        on_name: Callable[[str], None] | None = None,
        shelf_of: tuple[ReplicaAgent, str] | None = None,
    ) -> None:
        """say: gets a plain line for each event, on the loop. on_output: gets the engine's output lines, on another
        thread. on_name: gets the replica's name once it is known, before the manager is dialled. shelf_of: the agent
        of the engine and an adapter of it, if this one is for that adapter's shelf."""
        self.settings = settings
        self._on_name = on_name
        self.name = settings.name
        self._say = say
        self._deadlines = settings.deadlines
        self._ready: events.EngineReady | None = None  # what the engine said of its present start
        self._host: EngineHost
        if shelf_of is not None:
            base, adapter = shelf_of
            assert isinstance(base._host, LaunchedEngine)
            self._host = ShelfHost(
                *(settings.kind, adapter, base._host, lambda: base._ready, self, self._answer_worker),
                settings.deadlines,
            )
        elif settings.launch is not None:
            self._host = LaunchedEngine(
                settings.launch, self, self._answer_worker, settings.deadlines, on_output, self._followers()
            )
        else:
            self._host = AttachedEngine(
                settings.kind,
                settings.url,
                self,
                self._answer_worker,
                settings.startup_seconds,
                settings.deadlines,
                settings.advertise,
            )
        self._machine: AgentMachine | None = None
        self._runner: TaskRunner | None = None
        self._loop: Loop | None = None
        self._streams: dict[events.Peer, MemberStream] = {}
        self._stopping = False
        self._manager_lost: weights_pb2.Problem.Code | None = None
        self._wait_reason = self._printed_reason = ""  # why no weights come, by the manager, and as printed last
        self._printed: dict[type, tuple[events.Peer, str]] = {}  # by message of the manager: session and last line
        self._launch = asyncio.Event()
        self._unanswered: asyncio.TimerHandle | None = None
        self._questions = Questions(self._feed, self._deadlines.worker_reply)
        self._reports = Reports()
        self._fault: asyncio.Future[None] | None = None
        self._stub: ManagerStub | None = None
        self._state = AgentState()

    def _followers(self) -> Followers | None:
        settings = self.settings
        if settings.nodes.nodes == 1:
            return None
        transports = worker_transports(settings.transports)
        return Followers(settings.nodes, settings.kind, transports, self._answer_worker, self.say, settings.deadlines)

    def shelf(self, settings: AgentSettings, adapter: str) -> ReplicaAgent:
        """Makes the agent of an adapter's shelf in this agent's engine."""
        return ReplicaAgent(settings, lambda line: self.say(f"{adapter}: {line}"), shelf_of=(self, adapter))

    @property
    def host(self) -> EngineHost:
        """The engine, for tests and for programs that embed an agent."""
        return self._host

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set. Always ends a launched engine.

        Raises EvictedError, CkptEngineError (the engine has another agent, or cannot be found; INTERNAL: the machine
        has failed), EngineFailedError (it cannot be launched, or not again).
        """
        channel = open_channel(self.settings.manager)
        stub = ManagerStub(channel)
        self._fault = asyncio.get_running_loop().create_future()
        scraping = contextlib.ExitStack()
        try:
            if where := scraping.enter_context(scraped_at(self.settings.metrics, lambda: of_agent(self._state))):
                self.say(f"metrics at http://{where}/metrics")
            if not await self._opened(stop):
                return
            self.name = self.name or f"{socket.gethostname()}-{self._host.default_name}"
            self._state.replica = self.name
            if self._on_name is not None:
                self._on_name(self.name)
            self._runner = TaskRunner(stub, self._host, self._deadlines.blobs, self.settings.hold)
            self._stub = stub
            self._machine = AgentMachine(
                self.name,
                uuid.uuid4().hex,
                self._host.agent_epoch,
                self.settings.mode,
                this_host(self.settings.advertise),
                worker_transports(self.settings.transports),
                self.settings.deadlines,
                self.settings.pool,
                self.settings.check_engine,
            )
            self._loop = Loop("agent", self._machine, self._perform, self._run, self._failed)
            self.say(f"replica {self.name}, manager {self.settings.manager}")
            self._feed(events.Start())
            await self._until(stop)
        finally:
            await asyncio.to_thread(scraping.close)
            await self._shut_down()
            await channel.close(grace=None)

    async def _opened(self, stop: asyncio.Event) -> bool:
        """Takes the engine's directory; False: `stop` was set before that."""
        opening = asyncio.ensure_future(self._host.open())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                await opening
            return not stop.is_set()
        finally:
            opening.cancel()
            stopping.cancel()
            await asyncio.gather(opening, stopping, return_exceptions=True)

    async def _until(self, stop: asyncio.Event) -> None:
        """Runs the engine until it ends for good, `stop` is set, or the machine fails."""
        assert self._fault is not None
        engine = asyncio.ensure_future(self._run_engine())
        stopping = asyncio.ensure_future(stop.wait())
        keeping = asyncio.ensure_future(self._keep_lease())
        try:
            await asyncio.wait((engine, stopping, self._fault), return_when=asyncio.FIRST_COMPLETED)
            if engine.done() or self._fault.done():
                await (engine if engine.done() else self._fault)
            elif self.settings.launch is None:
                await self._until_idle()
        finally:
            reason = "the engine has ended" if engine.done() else "the agent was asked to stop"
            for task in (engine, stopping, keeping):
                task.cancel()
            await asyncio.gather(engine, stopping, keeping, return_exceptions=True)
            self._stopping = True
            self._feed(events.Stop(reason))

    async def _run_engine(self) -> None:
        """Runs the engine. A launch waits until the manager has accepted the replica's name or cannot be reached."""
        if self.settings.launch is not None:
            await self._launch.wait()
        await self._host.run()

    async def _keep_lease(self) -> None:
        """Renews the agent's lease in the page at each heartbeat, if the gate is to close without the agent."""
        while True:
            if self._host.page is not None:
                lease = time.monotonic() + self._deadlines.lease
                self._host.page.lease(lease if self.settings.close_when_alone else 0.0)
            await asyncio.sleep(self._deadlines.heartbeat)

    async def _until_idle(self) -> None:
        """Waits for the end of a running install: an attached engine would stay paused without its agent."""
        until = time.monotonic() + self._deadlines.stop_idle
        while self._machine is not None and self._machine.busy and time.monotonic() < until:  # noqa: ASYNC110 - bounded, and only while stopping
            await asyncio.sleep(0.05)

    async def _shut_down(self) -> None:
        self._forget_unanswered()
        streams = list(self._streams.values())
        self._streams.clear()
        await asyncio.gather(*(stream.close() for stream in streams), return_exceptions=True)
        if self._loop is not None:
            # Tasks of the last commands (a stream that says goodbye) get this long.
            await self._loop.stop(self._deadlines.stop_tasks)
        await self._host.close()
        if self._runner is not None:
            self._runner.close()

    # ---------------------------------------------------------------- events for the machine

    def engine_ready(self, ready: events.EngineReady) -> None:
        self._forget_unanswered()  # that call was to an engine that has ended
        if self._host.page is not None:
            hold, _ = self._host.page.held()
            self._host.page.hold(hold, self.settings.hold)
            ready = replace(ready, marked=self._host.page.marked().sleeping, holding=hold.epoch != 0)
            self._state.directory = self._host.page.path.parent
        self._state.up, self._state.starts = True, self._state.starts + 1
        self._ready = ready
        self._feed(ready)

    def engine_exited(self, reason: str) -> None:
        self._state.up, self._state.scrubs = False, {}
        self._ready = None
        self._forget_unanswered()
        self._feed(events.EngineExited(reason))

    def say(self, line: str) -> None:
        self._say(line)

    def _receive(self, peer: events.Peer, body: ProtobufMessage) -> None:
        if isinstance(body, manager_pb2.NotBrought):
            self._wait_reason = narration.not_brought_line(body)
            asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._say_wait_reason, self._wait_reason)
            return
        if isinstance(body, manager_pb2.Install):
            self._wait_reason = self._printed_reason = ""
        line = narration.received_line(body)
        # Commands come again until they are answered, and a Welcome also answers a fuller hello of the same session.
        if line and self._printed.get(type(body)) != (peer, line):
            self._printed[type(body)] = peer, line
            self.say(line)
        self._feed(events.Message(peer, body))

    def _say_wait_reason(self, reason: str) -> None:
        """Prints what the replica waits for, if that has not changed and was not printed yet."""
        if reason == self._wait_reason != self._printed_reason:
            self._printed_reason = reason
            self.say(reason)

    def _lost(self, peer: events.Peer, problem: weights_pb2.Problem) -> None:
        self._streams.pop(peer, None)
        self._feed(events.PeerLost(peer, problem.message, problem.code))

    async def _answer_worker(self, request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply | None:
        if self._loop is not None and self._loop.problem is not None:
            return None
        if request.HasField("scrub"):
            self._state.scrubs[request.rank] = request.scrub
        reply = await self._questions.ask(request)
        if reply is not None and reply.HasField("install"):
            self._reports.expect(request.rank, request.boot_id)
        elif request.HasField("installed"):
            self._reports.arrived(request.rank, request.boot_id)
        return reply

    def _feed(self, event: events.AgentEvent) -> None:
        if self._loop is not None:
            self._loop.feed(event)

    def _failed(self, _event: object, problem: weights_pb2.Problem) -> None:
        """Ends `run`, and all workers' waits for answers."""
        self._questions.close()
        self._end(CkptEngineError(problem))

    def _end(self, error: Exception) -> None:
        assert self._fault is not None
        if not self._fault.done():
            self._fault.set_exception(error)

    # ---------------------------------------------------------------- the machine's commands

    def _perform(self, command: events.AgentCommand) -> None:
        match command:
            case events.Send(peer, body):
                trace("agent.sends", type(body).__name__)
                if line := narration.sent_line(body):
                    self.say(line)
                if (stream := self._streams.get(peer)) is not None:
                    stream.send(body)
            case events.OpenStream(peer):
                assert self._stub is not None
                self._streams[peer] = MemberStream(
                    self._stub.ReplicaSession,
                    manager_pb2.ReplicaMessage,
                    lambda body: self._receive(peer, body),
                    lambda problem: self._lost(peer, problem),
                    self._deadlines.goodbye,
                )
            case events.ClosePeer(peer):
                if (stream := self._streams.pop(peer, None)) is not None and self._loop is not None:
                    self._loop.start(stream.close())
            case events.Say(line):
                self.say(line)
            case events.Reply(request, reply):
                self._questions.answer(request, reply)
            case events.SessionOpened():
                self._manager_lost, self._state.connected = None, True
                self._launch.set()
            case events.SessionEnded():
                self._session_ended(command)

    def _session_ended(self, end: events.SessionEnded) -> None:
        problem = end.problem
        self._state.connected = False
        if self._stopping:
            return
        if end.final:
            # The manager refuses this agent: another one has its place or its name, or an operator evicted it.
            self._end(EvictedError(problem) if end.evicted else CkptEngineError(problem))
            return
        if problem.code != weights_pb2.Problem.CODE_ABORTED:
            self._launch.set()
        if self._manager_lost != problem.code:
            self._manager_lost = problem.code  # printed once for each code, not at each attempt
            self.say(narration.lost_session_line(self.settings.manager, end))

    async def _run(self, key: events.Key, task: events.Task) -> events.Done:
        assert self._runner is not None
        done = await self._runner.run(key, task)
        if isinstance(task, events.InstallEngine) and done.problem is None:
            await self._reports.wait_all(REPORT_SECONDS)
        if isinstance(task, events.PauseEngine | events.InstallEngine | events.WakeEngine | events.ResumeEngine):
            self._mind_answer(done)
        return done

    def _mind_answer(self, done: events.Done) -> None:
        """Starts a timer for the outcome of a call without an answer; stops it at an answer."""
        if done.answered:
            self._forget_unanswered()
        elif self._unanswered is None:
            what = done.problem.message if done.problem is not None else "a call had no answer"
            loop = asyncio.get_running_loop()
            self._unanswered = loop.call_later(self._deadlines.unanswered, self._still_closed, what)

    def _forget_unanswered(self) -> None:
        if self._unanswered is not None:
            self._unanswered.cancel()
            self._unanswered = None

    def _still_closed(self, what: str) -> None:
        self._unanswered = None
        closed = self._machine.closed_reason if self._machine is not None else ""
        if closed:
            replaced = self._host.replace(what)
            remedy = "it is replaced" if replaced else "end it, or wait for it: it was not started by us"
            self.say(f"{what}, and the engine is closed since ({closed}): {remedy}")
