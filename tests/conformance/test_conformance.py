"""What every engine must do as a replica, asked of each in the same words. One server an engine, shared by all tests.

What an engine cannot do, its adapter declares; then the suite asks that it is refused. Nothing is left out silently.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from ckpt_engine import CkptEngineError, Trainer, UpdateReport
from ckpt_engine.core.deadlines import ENVIRONMENT as DEADLINES
from ckpt_engine.core.pausing import mode_name
from ckpt_engine.core.stage_memory import ENVIRONMENT as STAGE_MEMORY
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.trace import ENVIRONMENT as TRACE
from ckpt_engine.v1 import manager_pb2
from tests.cluster import corrupt_after_sealing, eventually, outcomes, running_cluster
from tests.conformance.crashes import CRASHES, Crash, Watcher, kill, update_and_kill, victim_of
from tests.conformance.engines import ENGINES, Answer, Engine
from tests.conformance.server import RELAY, Server
from tests.conformance.streams import BEGUN, COUNT, Stream, Updates, breaks, shows
from tests.conformance.weights import BAD, O_PROJ, TOKENS, Models, load, of_one_version, weights_of
from tests.engines.serving import check_routes
from tests.faults.listener import Listener

NONE, CLEAN = manager_pb2.WORKER_STATE_NONE, manager_pb2.WORKER_STATE_CLEAN
MODES = [mode for mode in manager_pb2.PauseMode.values() if mode != manager_pb2.PAUSE_MODE_UNSPECIFIED]
STREAMS = 3
RESTART_AT_ONCE = "engine_restart_first=0.1 engine_restart_most=0.1"

pytestmark = pytest.mark.timeout(1200)  # engines start slowly on a busy machine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)  # more threads only wait for each other at this size, and engines run beside
    return Models(tmp_path_factory.mktemp("models"))


BY_RELAY, EARLY = "by relay", "early"


def servers() -> Iterator[Any]:
    """Each engine, reading the trainer, reading a relay, and reading that before the pause, into stage memory."""
    for engine in ENGINES:
        real = () if engine.kind == "reference" else (pytest.mark.engine,)
        for way, marks in (("", ()), (BY_RELAY, (pytest.mark.slow,)), (EARLY, (pytest.mark.slow,))):
            name = f"{engine.kind}-{way}" if way else engine.kind
            yield pytest.param((engine, way), id=name, marks=(*real, *marks))


@pytest.fixture(scope="module", params=servers())
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Models
) -> Iterator[Server]:
    engine: Engine
    engine, way = request.param
    if reason := engine.why_not_here():
        pytest.skip(reason)
    short = Path(tempfile.mkdtemp(prefix="ckpt-engine-"))  # a socket's path has at most 107 bytes
    relays = short / "relays"
    relays.mkdir(mode=0o700)
    try:
        with Listener(short / "trace") as listener, running_cluster(tmp_path_factory.mktemp(engine.kind)) as cluster:
            environment = {TRACE: str(listener.path), DEADLINES: RESTART_AT_ONCE, DIRECTORY: str(relays)}
            options = ["--mode", "hybrid", *(["--stage-memory", "auto"] if way == EARLY else [])]
            replica = engine.start(cluster, engine.kind, models.bare, options, environment)
            if way:
                cluster.relay(RELAY, "--memory", "64MiB", environment={DIRECTORY: str(relays)}).registered()
            replica.registered(engine.start_seconds)
            yield Server(engine, cluster, replica, models, listener, relays, bool(way), way == EARLY)
    finally:
        shutil.rmtree(short)


def test_a_replica_registers_and_serves_nothing_before_its_first_update(server: Server) -> None:
    """Its random weights would answer; the gate does not let them, and nobody but the agent gets past it."""
    status = server.replica.status
    assert status is not None
    assert status.engine.kind == server.engine.kind
    assert status.engine.version
    assert set(status.engine.pause_modes) == server.engine.capabilities.pause_modes
    assert (status.mode, len(status.workers), status.serving) == (manager_pb2.MODE_HYBRID, 1, False)
    assert "holds no weights yet" in server.why_closed()
    check_routes(server.replica, server.engine.gate)


def test_an_update_from_a_checkpoint_is_served_under_its_version(server: Server) -> None:
    """The version is seen by who asks, by who looks at the gate, and by the manager, and all mean the same root."""
    with server.trainer("checkpoint") as trainer:
        trainer.publish(server.models.checkpoint(1))
        report = trainer.update_weights(version=7)
    assert report.ok, f"{report}\n{server.replica.tail()}"
    assert report.verified
    (worker,) = report.replicas[0].message.workers
    assert worker.verified + worker.verified_as_loaded == worker.tensors == len(weights_of(server.models[1]))
    server.assert_serves(1, 7)
    status = server.replica.status
    assert status is not None
    root = status.identity.root.hex()
    assert (status.serving, status.identity.version) == (True, 7)
    assert server.engine.complete(server.replica, [1, 2, 3], 2).root == root
    gate = httpx.get(f"{server.replica.url}/ckpt_engine/info", timeout=60).json()
    assert (gate["open"], gate["version"]) == (True, 7)


def test_ten_different_updates_in_a_row(server: Server) -> None:
    live = server.models.live(0)
    with server.trainer("ten") as trainer:
        trainer.publish(live, move=True)
        for version in range(10):
            load(live, server.models[version])
            report = trainer.update_weights(version=version)
            assert report.ok, f"{report}\n{server.replica.tail()}"
            assert report.verified
            server.assert_serves(version, version)


def update_to(trainer: Trainer, weights: Mapping[str, torch.Tensor], version: int) -> UpdateReport:
    """Some weights are refused when they are published."""
    trainer.publish(weights)
    return trainer.update_weights(version=version)


def test_weights_that_do_not_fit_are_refused_and_the_old_version_serves(server: Server) -> None:
    with server.trainer("bad") as trainer:
        assert update_to(trainer, weights_of(server.models[1]), 1).ok
        epochs = server.epochs()
        for kind, (change, named) in BAD.items():
            with pytest.raises(CkptEngineError) as refused:
                update_to(trainer, change(weights_of(server.models[2])), 2)
            assert refused.value.code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"), kind
            assert named in refused.value.problem.message, kind
            assert server.epochs() == epochs, "no replica was touched"
            server.assert_serves(1, 1)
        assert update_to(trainer, weights_of(server.models[2]), 2).ok
        server.assert_serves(2, 2)


def test_a_torn_update_is_never_served_and_the_next_one_recovers(server: Server) -> None:
    """One bit flips after sealing, in tensors that engines treat differently: repacked, plain, with padding. In stage
    memory it is found before the pause, and what was served before goes on."""
    live = server.models.live(3)
    with server.trainer("torn") as trainer:
        trainer.publish(live, move=True)
        for number, name in enumerate((O_PROJ, "model.norm.weight", "lm_head.weight")):
            restore = corrupt_after_sealing(trainer, dict(live.named_parameters())[name], 7)
            report = trainer.update_weights(version=2 * number)
            restore()
            assert outcomes(report) == {server.replica.name: "old_serving" if server.early else "quarantined"}, report
            assert name in report.replicas[0].problem
            assert server.early or server.why_closed()
            load(live, server.models[3])
            assert trainer.update_weights(version=2 * number + 1).ok
            server.assert_serves(3, 2 * number + 1)


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
def test_requests_in_flight_during_updates(server: Server, mode: manager_pb2.PauseMode) -> None:
    """Each is answered as the mode says, and at least one has lived through an update to prove it."""
    if mode not in server.engine.capabilities.pause_modes:
        refuses_the_mode(server, mode)
        return
    models, live, updates = [server.models[4], server.models[5]], server.models.live(4), Updates()
    with server.trainer(f"streams-{mode_name(mode)}") as trainer:
        trainer.publish(live, move=True)
        assert trainer.update_weights(version=0).ok
        streams = [Stream(server.engine, server.replica, updates) for _ in range(STREAMS)]
        version, proved, looked = 0, False, [0] * STREAMS
        try:
            while version < 2 or not proved:
                assert version < 60, f"no request shows what {mode_name(mode)} does"
                eventually("a request runs", 120, lambda: any(each.running or each.error for each in streams))
                version += 1
                load(live, models[version % 2])
                updates.asked += 1
                before = [len(each.seen) for each in streams]
                report = trainer.update_weights(version=version, pause_mode=mode_name(mode))
                assert report.ok, f"{report}\n{server.replica.tail()}"
                until_one_ends(streams, before)
                fresh = [seen for each, count in zip(streams, looked, strict=True) for seen in each.seen[count:]]
                looked = [len(each.seen) for each in streams]
                proved = proved or any(shows(mode, models, seen) for seen in fresh)
        finally:
            answered = [seen for each in streams for seen in each.end()]
        assert [wrong for seen in answered if (wrong := breaks(mode, models, seen))] == []
        server.assert_serves(4 + version % 2, version)


def test_no_later_request_finds_caches_of_an_update_in_place(server: Server) -> None:
    """It answers as a server with empty caches does, over 256 tokens that others have asked for before, and after going
    back too. Within one version caches are found as ever, and what a caller keeps apart stays apart."""
    engine, replica, finds = server.engine, server.replica, bool(server.engine.salt_field)
    if manager_pb2.PAUSE_MODE_IN_PLACE not in engine.capabilities.pause_modes:
        refuses_the_mode(server, manager_pb2.PAUSE_MODE_IN_PLACE)
        return
    models, live = [server.models[4], server.models[5]], server.models.live(4)
    shared = [1 + number % 500 for number in range(1000, 1256)]

    def ask(more: Sequence[int], salt: str = "") -> Answer:
        answer = engine.complete(replica, [*shared, *more], TOKENS if finds else 4, salt)
        assert answer.status == 200, f"{answer}\n{replica.tail()}"
        return answer

    def long(tail: int, runs: threading.Event) -> tuple[int, ...]:
        """A request's last token, and its answer, in the turn that comes after it."""

        def told(count: int) -> None:
            if count >= BEGUN:
                runs.set()

        try:
            answer = engine.stream(replica, [*shared, tail], COUNT, told)
        finally:
            runs.set()
        assert answer.status == 200, f"{answer}\n{replica.tail()}"
        return tail, *answer.tokens

    with server.trainer("prefixes") as trainer, ThreadPoolExecutor(1) as pool:
        trainer.publish(live, move=True)
        assert trainer.update_weights(version=0).ok
        ask([1])
        before = ask([2])
        assert (before.cached > 0) is finds
        kept = server.caches_kept()
        for version in (1, 2) if finds else (1,):  # 2 has the weights of 0 again
            runs = threading.Event()
            request = pool.submit(long, 10 + version, runs)
            assert runs.wait(120)
            load(live, models[version % 2])
            report = trainer.update_weights(version=version, pause_mode="in_place")
            assert report.ok, f"{report}\n{replica.tail()}"
            turn = request.result(120)
            first, apart = ask([2]), ask([2], f"nothing is cached {version}")
            assert (first.cached, apart.cached, first.tokens) == (0, 0, apart.tokens)
            assert (ask([2]).cached > 0) is finds
            for more in ((2,), (3, 2), turn):
                assert of_one_version([models[version % 2]], [*shared, *more], ask(more).tokens)
            assert (ask([2], "mine").cached, ask([2], "mine").cached > 0) == (0, finds)
            assert server.caches_kept() == kept + version
        load(live, models[1])
        assert trainer.update_weights(version=version + 1, pause_mode="keep").ok
        assert (ask([2]).cached, ask([2]).cached > 0) == (0, finds)
        assert server.caches_kept() == kept + version, "caches were emptied: no other salt is needed"


def until_one_ends(streams: list[Stream], before: list[int]) -> None:
    """One more request than `before`."""

    def look() -> bool:
        return any(len(each.seen) > count or each.error for each, count in zip(streams, before, strict=True))

    eventually("a request ends", 120, look)


def refuses_the_mode(server: Server, mode: manager_pb2.PauseMode) -> None:
    """In words, and no request notices."""
    pauses, models, live = "agent.does.PauseEngine.begin", [server.models[4]], server.models.live(4)
    with server.trainer(f"streams-{mode_name(mode)}") as trainer:
        trainer.publish(live, move=True)
        assert trainer.update_weights(version=0).ok
        before = server.listener.seen[pauses]
        stream = Stream(server.engine, server.replica, Updates())
        try:
            eventually("a request runs", 120, lambda: stream.running or stream.error)
            load(live, server.models[5])
            with pytest.raises(CkptEngineError, match=f"cannot be paused in mode '{mode_name(mode)}'; it can in: "):
                trainer.update_weights(version=1, pause_mode=mode_name(mode))
            assert server.listener.seen[pauses] == before
        finally:
            answered = stream.end()
        assert [wrong for seen in answered if (wrong := breaks(manager_pb2.PAUSE_MODE_WAIT, models, seen))] == []
        server.assert_serves(4, 0)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_an_update_wakes_what_sleeps_and_serves_nothing_old(server: Server, level: int) -> None:
    """The same prompt before and after: a prefix cache that survived would answer with the old weights' tokens."""
    if level not in server.engine.capabilities.sleep_levels:
        assert f"cannot sleep at level {level}" in server.sleep(level)
        return
    with server.trainer(f"sleep-{level}") as trainer:
        trainer.publish(weights_of(server.models[1]))
        assert trainer.update_weights(version=0).ok
        prompt, _ = server.models.expected(2)
        before = server.engine.complete(server.replica, prompt, 32).tokens
        assert server.sleep(level) == ""
        assert ("discarded" if level == 2 else "kept on the host") in server.why_closed()
        assert server.states() == [NONE if level == 2 else CLEAN]
        trainer.publish(weights_of(server.models[2]))
        report = trainer.update_weights(version=1)
        assert report.ok, f"{report}\n{server.replica.tail()}"
        server.assert_serves(2, 1)
        assert before != tuple(server.models.expected(2)[1])


def test_waking_goes_from_weights_to_caches(server: Server) -> None:
    """Level 1 brings the old version back; level 2 does not, until an update."""
    levels = server.engine.capabilities.sleep_levels
    with server.trainer("order") as trainer:
        trainer.publish(
            server.models.live(3), move=True
        )  # read where it lies: nothing stays sealed to come back by itself
        assert trainer.update_weights(version=1).ok
        assert "no memory tag" in server.wake("cuda_graph")
        if 1 in levels:
            assert server.sleep(1) == ""
            assert "before kv_cache" in server.wake("kv_cache")
            assert server.wake("weights") == ""
            assert "not woken yet" in server.why_closed()
            assert server.wake("kv_cache") == ""
            server.assert_serves(3, 1)
        if 2 in levels:
            assert server.sleep(2) == ""
            assert server.wake() == ""
            if server.by_relay:  # it still holds the version
                server.replica.serving(1)
                server.assert_serves(3, 1)
            else:
                assert server.states() == [NONE]
                assert server.why_closed()
            assert trainer.update_weights(version=2).ok
            server.assert_serves(3, 2)


@pytest.mark.parametrize(
    "crash",
    # Each costs a start of the engine, half a minute of a real one: at first once of each part (conftest.py).
    [
        crash if crash.stage in ("transfer", "install") else pytest.param(crash, marks=pytest.mark.slow)
        for crash in CRASHES
    ],
    ids=lambda crash: f"{crash.stage}-{crash.part}",
)
def test_a_killed_server_comes_back_with_whole_weights(server: Server, crash: Crash) -> None:
    """What the trainer sealed stays sealed, so it catches up by itself; in between nothing else is answered."""
    old, new = (1, 2) if CRASHES.index(crash) % 2 else (2, 1)
    with server.trainer(f"crash-{crash.stage}") as trainer:
        trainer.publish(weights_of(server.models[old]))
        assert trainer.update_weights(version=0).ok
        models = [server.models[old], server.models[new]]
        with Watcher(server.engine, server.replica, models) as watcher:
            seed, version = (new, 1) if crash.holder else (old, 0)
            before = server.replica.workers()[0].pid
            if crash.holder:
                trainer.publish(weights_of(server.models[new]))
                report = update_and_kill(server, trainer, version, crash)
                assert outcomes(report) == {server.replica.name: "quarantined"}, report
            else:
                kill(victim_of(server, crash))
            eventually("another worker has started", 300, lambda: new_worker(server, before))
            server.replica.serving(version, 300)
        assert watcher.violations == []
        server.assert_serves(seed, version)


def new_worker(server: Server, before: int) -> bool:
    status = server.replica.status
    return bool(status and status.workers and status.workers[0].pid not in (0, before))


def test_a_killed_agent_leaves_no_engine_and_an_unknown_version_is_checked(server: Server, tmp_path: Path) -> None:
    """Last, since both end the server. Another one claims a version that no test has run: it takes no update while an
    install of ours does not lead where its own loader leads, and serves once it does. The reference engine has no
    versions but ours, and is refused."""
    processes = server.engine.processes(server.replica)
    assert len(processes) > 1
    server.replica.process.kill()
    _, left = psutil.wait_procs(processes, 60)
    assert not left, left
    broken = tmp_path / "broken"
    environment = {"CKPT_ENGINE_TEST_BROKEN_INSTALL": str(broken), "XDG_CACHE_HOME": str(tmp_path)}
    environment |= {DIRECTORY: str(server.relays), STAGE_MEMORY: "auto" if server.early else "0"}
    other = server.engine.start_other_version(server.cluster, "other-version", server.models.bare, environment)
    seconds = server.engine.start_seconds
    if server.engine.kind == "reference":
        eventually("it ends", seconds, lambda: other.process.poll() is not None or "engine ready at" in other.tail())
        assert "engine ready at" not in other.tail(), "it is driven"
        assert other.process.wait(60) != 0
        assert "reference 99.1.0" in other.tail()
        assert "cannot be driven" in other.tail()
        return
    other.registered(seconds)
    with server.trainer("unknown-version") as trainer:
        if name := server.engine.leaves_out:
            # What is refused for good is asked again with another manifest: with a tensor that the engine leaves out.
            broken.touch()
            trainer.publish({**weights_of(server.models[0]), name: torch.ones(8)})
            with pytest.raises(CkptEngineError, match=r"99\.1\.0 is not among the tested versions.*differ by up to"):
                trainer.update_weights(replicas=["other-version"])
            assert server.engine.complete(other, [1, 2, 3], 2).status == 503
            broken.unlink()
        trainer.publish(weights_of(server.models[1]))
        report = trainer.update_weights(replicas=["other-version"])
    assert outcomes(report) == {"other-version": "new_serving"}, report
    status = other.status
    assert status is not None
    assert "99.1.0 is not among the tested versions" in status.engine_check
    assert "; checked here in " in status.engine_check
    prompt, tokens = server.models.expected(1)
    assert list(server.engine.complete(other, prompt, len(tokens)).tokens) == tokens
