"""`ckpt-engine update` and `ckpt-engine status` against a real manager."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_replica import PlainReplica
from safetensors.torch import save_file

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.trainer.trainer import Trainer
from tests.cluster import eventually
from tests.command_line import run

StartReplica = Callable[..., PlainReplica]


def write(directory: Path, value: float) -> str:
    directory.mkdir(exist_ok=True)
    save_file({"a": torch.full((4, 2), value)}, directory / "model.safetensors")
    return str(directory)


@pytest.fixture
def reader(manager: str, replica: StartReplica) -> PlainReplica:
    """A replica that the manager knows."""
    started = replica()
    with Trainer(manager, lineage="waits") as trainer:
        trainer.wait_for_replicas(timeout=60)
    return started


def test_checkpoints_are_sent_one_after_the_other(manager: str, reader: PlainReplica, tmp_path: Path) -> None:
    first = run("update", "--manager", manager, "--checkpoint", write(tmp_path / "one", 1.0))
    assert first.exit_code == 0, first.output
    assert "version 0 of checkpoint: 1 of 1 replicas serve it" in first.stdout
    assert next(line for line in first.stderr.splitlines() if line.startswith("update: ")) == "update: preparing"
    assert "plain: transfer" in first.stderr.splitlines()
    assert torch.equal(reader.weights["a"], torch.full((4, 2), 1.0))
    arguments = ("update", "--manager", manager, "--checkpoint", write(tmp_path / "two", 2.0), "--json")
    second = json.loads(run(*arguments).stdout)
    assert second["ok"] is second["verified"] is True
    following = str(reader.installs[0].identity.version + 1)
    assert (second["identity"]["lineage"], second["identity"]["version"]) == ("checkpoint", following)
    assert torch.equal(reader.weights["a"], torch.full((4, 2), 2.0))
    named = run(*arguments, "--lineage", "other", "--version", "7", "--pause-mode", "abort", "--replica", "plain")
    identity = json.loads(named.stdout)["identity"]
    assert (identity["lineage"], identity["version"]) == ("other", "7")


def test_a_refused_update_says_why(manager: str, reader: PlainReplica, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "one", 1.0)
    refused = run("update", "--manager", manager, "--checkpoint", checkpoint, "--min-replicas", "2")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].startswith("ckpt-engine update: 1 replicas that receive weights"), "no code"
    assert not refused.stdout
    missing = run("update", "--manager", manager, "--checkpoint", str(tmp_path / "none"), "--json")
    assert missing.exit_code == 1
    assert json.loads(missing.stdout)["problem"]["code"] == "CODE_NOT_FOUND"
    assert json.loads(missing.stdout)["ok"] is False
    assert reader.installs == []


def test_weights_that_are_no_numbers_reach_no_replica(manager: str, reader: PlainReplica, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "diverged", float("nan"))
    refused = run("update", "--manager", manager, "--checkpoint", checkpoint, "--check-finite")
    assert refused.exit_code == 1
    assert "weights of rank 0 hold NaN or infinity: a; has training diverged?" in refused.stderr
    assert reader.installs == []


def test_weights_that_are_no_numbers_are_named_where_they_are_served(
    manager: str, reader: PlainReplica, tmp_path: Path
) -> None:
    """Verified says that they are what the trainer sealed, not that they are good."""
    checkpoint = write(tmp_path / "diverged", float("-inf"))
    done = run("update", "--manager", manager, "--checkpoint", checkpoint, "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["verified"], report["not_finite"]) == (True, True, ["a"])
    (warning,) = report["warnings"]
    assert "holds NaN or infinity in a (sealed by rank 0)" in warning
    assert "check_finite" in warning
    update = ("update", "--manager", manager, "--checkpoint", write(tmp_path / "good", 1.0), "--json")
    good = json.loads(run(*update).stdout)
    assert (good["not_finite"], good["warnings"]) == ([], [])


def test_an_update_that_is_not_whole_fails(manager: str, reader: PlainReplica, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "one", 1.0)
    path = tmp_path / "one" / "model.safetensors"

    def damage() -> None:
        # In place, with the time of before: only digests can tell.
        status = path.stat()
        with open(path, "r+b") as file:
            file.seek(-4, 2)
            file.write(b"\0\0\0\1")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    reader.before_reading = damage
    failed = run("update", "--manager", manager, "--checkpoint", checkpoint)
    assert failed.exit_code == 1
    assert "quarantined" in failed.stdout
    assert "NOT OK" in failed.stdout


def test_status_shows_who_is_there_and_what_they_hold(manager: str, reader: PlainReplica, tmp_path: Path) -> None:
    before = json.loads(run("status", "--manager", manager, "--json").stdout)
    assert before["phase"] == "idle"
    assert "latest" not in before
    assert [(each["name"], each.get("identity")) for each in before["replicas"]] == [("plain", None)]
    with Trainer(manager, lineage="run") as trainer:
        trainer.publish({"a": torch.ones(2)})
        version = trainer.update_weights(3).version
        after = json.loads(run("status", "--manager", manager, "--json").stdout)
        shown = run("status", "--manager", manager).stdout
    (held,) = after["replicas"]
    assert (held["identity"]["lineage"], held["identity"]["version"]) == ("run", str(version))
    assert held["last_outcome"]["outcome"] == "OUTCOME_NEW_SERVING"
    assert after["latest"] == held["identity"]
    assert ("run", 0, True) in [(each["lineage"], each["rank"], each["published"]) for each in after["trainers"]]
    assert "3 of run" in shown
    assert "plain" in shown
    assert "idle" in shown


def test_status_watched_through_a_pipe_shows_each_change_once(manager: str, replica: StartReplica) -> None:
    command = [sys.executable, "-m", "ckpt_engine", "status", "--watch", "--manager", manager]
    watching = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        # A job that a shell runs in the background ignores it, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert watching.stdout is not None
        lines: list[str] = []
        while "Replicas" not in lines or lines[-1].strip() != "none":  # what there is is shown at once
            lines.append(watching.stdout.readline().strip())
            assert lines[-1] or watching.poll() is None, lines
        replica()
        while not lines[-1].startswith("plain "):
            lines.append(watching.stdout.readline().strip())
            assert lines[-1] or watching.poll() is None, lines
        assert sum(line.startswith(f"manager {manager}") for line in lines) <= 4, "what has not changed is not repeated"
    finally:
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0


def test_status_of_no_manager_fails() -> None:
    result = run("status", "--manager", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr


def test_an_operator_lists_lineages_and_evicts_one(manager: str) -> None:
    with Trainer(manager, lineage="in the way") as trainer:
        trainer.publish({"a": torch.ones(3)})
        with pytest.raises(CkptEngineError, match="replicas"):
            trainer.update_weights(timeout=60)
        listed = run("lineage", "list", "--manager", manager)
        assert listed.exit_code == 0, listed.output
        assert "in the way" in listed.stdout
        assert "lineage 'in the way'" in listed.stdout
        evicted = run("lineage", "evict", "in the way", "--manager", manager, "--reason", "it blocks us")
        assert evicted.stdout == "lineage in the way: evicted, 1 rank, 1 of them connected\n"

        def refused() -> str:
            with pytest.raises(CkptEngineError) as caught:
                trainer.update_weights(timeout=60)
            return caught.value.problem.message

        # Until its session's end has reached it, the manager only says that it has no session.
        eventually("it is told why", 60, lambda: "evicted by an operator: it blocks us" in refused())
        assert "none" in run("lineage", "list", "--manager", manager).stdout
        again = run("lineage", "evict", "in the way", "--manager", manager)
        assert again.exit_code == 1
        assert "there is no lineage 'in the way'" in again.stderr


def test_an_operator_forgets_a_lineage_once_nothing_uses_it(manager: str, reader: PlainReplica) -> None:
    with Trainer(manager, lineage="done") as trainer:
        trainer.publish({"a": torch.ones(3)})
        assert trainer.update_weights(timeout=60).ok
        used = run("lineage", "forget", "done", "--manager", manager)
        assert used.exit_code == 1
        assert "has 1 rank, 1 of them connected: end its run" in used.stderr
    served = run("lineage", "forget", "done", "--manager", manager)
    assert served.exit_code == 1
    assert "lineage 'done' or are to serve one: plain. Bring them another" in served.stderr
    reader.stop()
    assert run("replica", "evict", "plain", "--manager", manager).exit_code == 0

    def listed() -> str:
        return run("lineage", "list", "--manager", manager).stdout

    assert "done" in listed()
    assert "done" in run("status", "--manager", manager).stdout
    (told,) = json.loads(run("lineage", "list", "--manager", manager, "--json").stdout)
    assert (told["lineage"], told["latest"]["version"], told["world_size"], told["replicas"]) == ("done", "0", 0, 0)
    asked = run("lineage", "forget", "done", "--manager", manager)
    assert asked.exit_code == 1
    effect = "lineage done: a replica that comes to the pool without a name is not brought to version 0 any more"
    assert effect in asked.stderr
    assert "--yes says that this is wanted" in asked.stderr
    assert "done" in listed()
    assert run("lineage", "forget", "done", "--yes", "--manager", manager).stdout == "lineage done: forgotten\n"
    assert "done" not in listed()
    shown = json.loads(run("--json", "status", "--manager", manager).stdout)
    assert shown["lineages"] == json.loads(run("--json", "lineage", "list", "--manager", manager).stdout) == []


def test_an_operator_waits_until_a_replica_holds_what_it_is_to_serve(manager: str, reader: PlainReplica) -> None:
    with Trainer(manager, lineage="run") as trainer:
        weights = {"a": torch.ones(3)}
        trainer.publish(weights, snapshot=True)
        assert trainer.update_weights(timeout=60).ok
        there = run("replica", "retry", "plain", "--wait", "--manager", manager)
        assert there.stdout.splitlines()[-1] == "replica plain: it holds version 0 of run"
        assert run("replica", "hold", "plain", "--manager", manager).exit_code == 0
        weights["a"].fill_(2.0)
        with pytest.raises(CkptEngineError):
            trainer.update_weights(timeout=60)
        assert trainer.update_weights(min_replicas=0, timeout=60).version == 1
        released = run("replica", "release", "plain", "--wait", "--timeout", "60", "--manager", manager)
        assert released.exit_code == 0, released.output
        assert released.stdout.splitlines()[-1] == "replica plain: it holds version 1 of run"
        assert torch.equal(reader.weights["a"], torch.full((3,), 2.0))
        never = run("replica", "retry", "plain", "--timeout", "3", "--manager", manager)
        assert (never.exit_code, "only with --wait" in never.stderr) == (2, True)
