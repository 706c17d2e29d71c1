"""Relays on real processes: each byte once a host, weights that the trainer has changed since, whoever dies in between,
and replicas that come after everybody has gone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Client, Trainer, UpdateReport
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.planning.question import PlanOptions, question_of
from ckpt_engine.planning.update import plan_update
from ckpt_engine.trace import ENVIRONMENT as TRACE
from tests.cluster import Cluster, Relay, Replica, eventually, generate, outcomes, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.faults import trainer_process
from tests.faults.listener import Listener
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

pytestmark = pytest.mark.slow

TOKENS = 16
MEMORY = ("--memory", "64MiB")
PAUSES = "agent.does.PauseEngine.begin"


class World:
    """A cluster, and directories that stand for hosts: a replica reads the relay of its directory only."""

    def __init__(self, cluster: Cluster, model: Path) -> None:
        self.cluster = cluster
        self._model = model
        self._relays: dict[str, Relay] = {}

    def directory(self, host: str) -> dict[str, str]:
        folder = self.cluster.path / f"relays-{host}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return {DIRECTORY: str(folder)}

    def replica(
        self, name: str, host: str, arguments: Sequence[str] = (), options: Sequence[str] = (), **environment: str
    ) -> Replica:
        told = {**self.directory(host), **environment}
        return self.cluster.replica(name, "reference", self._model, *arguments, options=options, environment=told)

    def take_out(self, replica: Replica) -> None:
        """Ends it, so that later tests neither update nor ask it."""
        replica.stop()
        self.cluster.replicas.remove(replica)

    def relay(self, name: str, host: str, *options: str, **environment: str) -> Relay:
        """In the place of the one that the host has."""
        if host in self._relays:
            self._relays[host].end()
        told = {**self.directory(host), **environment}
        self._relays[host] = self.cluster.relay(name, *(options or MEMORY), environment=told).registered()
        return self._relays[host]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[World]:
    """Two replicas on one host, and their relay: one more than one shows that a byte is brought once for all."""
    torch.set_num_threads(1)
    with running_cluster(tmp_path_factory.mktemp("relays")) as running:
        world = World(running, bare_model)
        for number in range(2):
            world.replica(f"r{number}", "a")
        world.relay("a", "a")
        for replica in running.replicas:
            replica.registered()
        yield world


def model_of(path: Path, seed: int) -> Any:
    return make_tiny_qwen3(path / str(seed), seed, vocabulary=PADDED_VOCABULARY, weights=False)


def expected(model: Any) -> tuple[list[int], list[int]]:
    """A prompt at which rounding cannot decide, and its greedy tokens."""
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    reference = reference_tokens(model, prompt, TOKENS)
    assert reference.gap > DECISIVE_GAP
    return prompt, reference.tokens


def bytes_of(model: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named_weights(model))


def transports(report: UpdateReport) -> dict[str, set[str]]:
    """By which ways each replica's bytes came."""
    return {each.name: {use.transport for use in each.transports} for each in report.replicas}


def connected(cluster: Cluster) -> set[str]:
    return {f"{each.kind} {each.name}" for each in cluster.status().holders if each.connected}


def read_from(replica: Replica) -> set[tuple[str, str]]:
    """Sources and transports of its last install."""
    status = replica.status
    assert status is not None
    return {(edge.source, edge.transport) for edge in status.last_outcome.edges}


def test_replicas_read_one_union_after_the_trainer_changed_its_weights(world: World, tmp_path: Path) -> None:
    model = model_of(tmp_path, 1)
    prompt, tokens = expected(model)
    with Trainer(world.cluster.address, lineage="run") as trainer:
        trainer.publish(model, move=True)
        held = trainer.update_weights(version=1, prefetch="always", until="held")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        assert held.held, held
        (relay,) = held.message.relays
        assert relay.filled.bytes == bytes_of(model), "each byte once, whoever needs it"
        assert {each.source: each.bytes for each in relay.filled.brought} == {"rank 0": bytes_of(model)}
        asked = PlanOptions(
            tmp_path / "1", replicas=2, engine="reference", cpu=True, trainer_memory="host", until="held"
        )
        (foretold,) = plan_update(question_of(asked)).relays.filled.values()
        assert {each.source: each.bytes for each in foretold.reads} == {"rank 0": relay.filled.bytes}
        for replica in world.cluster.replicas:
            replica.serving(1)
            assert generate(replica, prompt, TOKENS) == tokens
            assert read_from(replica) == {("relay a", "relay_memory")}
    assert not world.cluster.status().warnings


def test_the_trace_shows_that_a_held_call_returns_before_any_replica_pauses(tmp_path: Path, bare_model: Path) -> None:
    """The agent stands where it is about to ask its engine to pause, until the call has returned and the weights have
    changed; nothing has been paused or installed by then. In a cluster of its own: one that had served a version would
    bring it to the new replica, and pause it for that."""
    torch.set_num_threads(1)
    model = model_of(tmp_path, 7)
    prompt, tokens = expected(model)
    with (
        running_cluster(tmp_path / "cluster") as running,
        Listener(Path(tempfile.mkdtemp(dir=tmp_path)) / "trace") as listener,
        Trainer(running.address, lineage="traced") as trainer,
    ):
        world = World(running, bare_model)
        replica = world.replica("traced", "c", **{TRACE: str(listener.path)})
        world.relay("traced", "c")
        replica.registered()
        with listener.holding(PAUSES, lambda pid: pid == replica.process.pid) as about_to_pause:
            trainer.publish(model, move=True)
            held = trainer.update_weights(version=1, prefetch="always", until="held")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            assert held.held, held
            assert about_to_pause.wait(60)
            paused = PAUSES.replace(".begin", ".end")
            assert (listener.seen[PAUSES], listener.seen[paused]) == (1, 0)
            assert listener.seen["agent.does.InstallEngine.begin"] == 0
        report = trainer.wait(1)
        assert report.ok, report
        assert (listener.seen[PAUSES], listener.seen[paused]) == (1, 1)
        assert generate(replica, prompt, TOKENS) == tokens
        assert read_from(replica) == {("relay traced", "relay_memory")}


def test_a_relay_that_is_killed_while_it_is_filled_costs_no_update(world: World, tmp_path: Path) -> None:
    model = model_of(tmp_path, 2)
    prompt, tokens = expected(model)
    with Listener(tmp_path / "trace") as listener, Trainer(world.cluster.address, lineage="run") as trainer:
        doomed = world.relay("doomed", "a", **{TRACE: str(listener.path)})
        trainer.publish(model, move=True)
        with listener.holding("relay.does.FillSlot.begin") as held:

            def kill() -> None:
                assert held.wait(60)
                doomed.process.send_signal(signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            report = trainer.update_weights(version=2, prefetch="always")
            killer.join(60)
        assert doomed.end() == -signal.SIGKILL
    assert set(outcomes(report).values()) == {"new_serving"}, report
    assert transports(report) == {replica.name: {"shared_memory"} for replica in world.cluster.replicas}
    assert "doomed" in report.prefetch
    for replica in world.cluster.replicas:
        assert generate(replica, prompt, TOKENS) == tokens


@pytest.mark.parametrize(("wanted", "version"), [("held", 21), pytest.param("installed", 22, marks=pytest.mark.hours)])
def test_a_trainer_that_is_killed_once_its_relay_is_filled_is_not_needed(
    world: World, tmp_path: Path, wanted: str, version: int
) -> None:
    """The relay has filled itself, and has not said so yet."""
    model = make_tiny_qwen3(tmp_path / "weights" / "0", 8, vocabulary=PADDED_VOCABULARY)
    prompt, tokens = expected(model)
    script = Path(trainer_process.__file__)
    command = [sys.executable, str(script), world.cluster.address, f"gone-{wanted}", str(tmp_path / "weights")]
    asked = {"version": version, "seed": 0, "timeout": 120.0, "prefetch": "always", "until": wanted}
    with Listener(tmp_path / "trace") as listener:
        world.relay(f"survivor-{wanted}", "a", **{TRACE: str(listener.path)})
        with (
            listener.holding("relay.does.FillSlot.end") as filled,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer,
        ):
            assert trainer.stdin is not None
            assert trainer.stdout is not None
            assert json.loads(trainer.stdout.readline()) == {"published": True}
            print(json.dumps(asked), file=trainer.stdin, flush=True)
            assert filled.wait(60)
            trainer.kill()
            trainer.wait(60)
            filled.let_go()
        for replica in world.cluster.replicas:
            replica.serving(version)
            assert generate(replica, prompt, TOKENS) == tokens
            assert read_from(replica) == {(f"relay survivor-{wanted}", "relay_memory")}


def test_a_late_replica_is_brought_up_by_a_relay_after_everybody_else_has_gone(world: World, tmp_path: Path) -> None:
    model = model_of(tmp_path, 3)
    prompt, tokens = expected(model)
    relay = world.relay("kept", "a")
    with Trainer(world.cluster.address, lineage="run") as trainer:
        trainer.publish(model, move=True)
        report = trainer.update_weights(version=3, prefetch="always")
        assert report.ok, report
    world.cluster.restart_manager()
    late = world.replica("late", "a", ("--tensor-parallel", "2")).registered().serving(3)
    assert generate(late, prompt, TOKENS) == tokens
    assert read_from(late) == {("relay kept", "relay_memory")}
    assert relay.held[0] == 3
    world.take_out(late)


def test_what_a_rollback_of_one_replica_does_not_select_is_brought_back_to_what_it_served(
    tmp_path: Path, bare_model: Path
) -> None:
    """After all processes but the relay were killed: the ledger knows two versions of one run that are to be served."""
    with running_cluster(tmp_path) as cluster:
        world = World(cluster, bare_model)
        world.relay("both", "a")
        names = ("back", "stays")
        replicas = {name: world.replica(name, "a") for name in names}
        for replica in replicas.values():
            replica.registered()
        with Trainer(cluster.address, lineage="run") as trainer:
            model = model_of(tmp_path, 3)
            trainer.publish(model, snapshot=True)
            assert trainer.update_weights(version=1, prefetch="always").ok
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)
            assert trainer.update_weights(version=2, prefetch="always").ok
        assert Client(cluster.address).rollback(1, lineage="run", replicas=["back"]).ok
        for replica in replicas.values():
            replica.process.kill()
            replica.process.wait(60)
        cluster.restart_manager()
        for name, version in (("stays", 2), ("back", 1)):
            world.replica(name, "a").registered().serving(version)


def test_what_a_trainer_takes_back_is_let_go_of_and_late_replicas_read_the_relay(world: World, tmp_path: Path) -> None:
    model = model_of(tmp_path, 6)
    prompt, tokens = expected(model)
    relay = world.relay("keeps", "a")
    maps = Path(f"/proc/{relay.process.pid}/maps")
    with Trainer(world.cluster.address, lineage="taken") as trainer:
        trainer.publish(model, snapshot=True)
        report = trainer.update_weights(version=31, prefetch="always")
        assert report.ok, report
        mapped = maps.read_text().count("memfd")
        trainer.withdraw()
        eventually("the relay unmaps it", 60.0, lambda: maps.read_text().count("memfd") < mapped)
        late = world.replica("later", "a").registered().serving(31)
        assert generate(late, prompt, TOKENS) == tokens
        assert read_from(late) == {("relay keeps", "relay_memory")}
        world.take_out(late)
        trainer.publish(model, move=True)
        assert trainer.update_weights(version=31, prefetch="always").ok


def test_two_relays_on_one_host_of_which_one_has_too_little_memory(world: World, tmp_path: Path) -> None:
    """Directories stand for what pods share: each replica reads the relay of its own. When that one ends, an agent that
    was told to have one starts the next."""
    models = [model_of(tmp_path, seed) for seed in (4, 5)]
    world.relay("near", "a")
    small = world.relay("small", "b", "--memory", "4MiB")
    wide, auto = ("--tensor-parallel", "2"), ("--relay", "auto")
    other = world.replica("other", "b", wide, auto, CKPT_ENGINE_RELAY_MEMORY="64MiB").registered()
    assert "this host has a relay already" in other.tail()
    with Trainer(world.cluster.address, lineage="run") as trainer:
        trainer.publish(models[0], move=True)
        report = trainer.update_weights(version=4, prefetch="always")
        assert set(outcomes(report).values()) == {"new_serving"}, report
        assert transports(report)["other"] == {"shared_memory"}
        assert transports(report)["r0"] == {"relay_memory"}
        assert "relay small is left out: version 4 of run takes 6291456 bytes" in report.prefetch
        assert "a slot has 2097152" in report.prefetch
        assert small.end() == 0

        follower = f"relay {socket.gethostname()}"
        eventually("the agent's own relay registers", 120.0, lambda: follower in connected(world.cluster))
        trainer.publish(models[1], move=True)
        report = trainer.update_weights(version=5, prefetch="always")
    assert set(outcomes(report).values()) == {"new_serving"}, report
    assert set().union(*transports(report).values()) == {"relay_memory"}
    assert {each.relay: set(each.replicas) for each in report.message.relays}[follower] == {"other"}
    prompt, tokens = expected(models[1])
    for replica in world.cluster.replicas:
        assert generate(replica, prompt, TOKENS) == tokens
    other.stop()
    eventually("its relay ends with the agent", 60.0, lambda: follower not in connected(world.cluster))
