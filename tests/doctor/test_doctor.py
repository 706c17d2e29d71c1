"""`ckpt-engine doctor` on this host, and the same probes where they must fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckpt_engine.cli import app_for
from ckpt_engine.digest import host as digest_host
from ckpt_engine.doctor import host_checks, relay_checks
from ckpt_engine.doctor.host_checks import SHARED_MEMORY_CHECK, HostCheck, Result, as_json, works
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.relay.alone import alone

ROOT = Path(__file__).parents[2]


def test_this_host_can_share_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_engine", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")])},
        check=False,
    )
    told = json.loads(done.stdout)
    rows = {(row["group"], row["name"]): row for row in told["checks"]}
    assert rows["shared memory", SHARED_MEMORY_CHECK]["result"] == "ok"
    assert rows["transports", "shared_memory"]["result"] == "ok"
    assert rows["agent", "engine directory"]["result"] == "ok"
    assert rows["software", "protobuf"]["result"] == "ok"
    assert rows["relay", "memory that only a relay writes"]["result"] == "ok"
    assert " left, of which " in rows["relay", "relay's memory"]["detail"]
    assert {name for group, name in rows if group == "engines"} == {"reference", "sglang", "transformers", "vllm"}
    assert not [row for row in told["checks"] if row["group"] == "doctor"], "a check failed to run"
    assert told["ok"] is True
    assert done.returncode == 0


def test_people_get_a_table_with_whole_rows_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app_for(["doctor"]), ["doctor"])
    assert done.exit_code == 0, done.output
    assert "Updates over shared memory work here." in done.output
    (row,) = [line for line in done.output.splitlines() if SHARED_MEMORY_CHECK in line]
    assert "a child process read it through /proc/" in row, "neither cell is folded"
    assert len(row) > 80


def test_a_child_that_reads_other_bytes_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: 0)  # the memory stays zero
    (check,) = host_checks.shared_memory_between_processes()
    assert check.result is Result.NO
    assert "other bytes" in check.detail


def test_a_host_without_memory_files_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    (check,) = host_checks.shared_memory_between_processes()
    assert check.result is Result.NO


def test_only_what_an_update_needs_decides() -> None:
    names = ("torch", "grpcio", "protobuf", "pyzmq")
    checks = [HostCheck("software", name, Result.OK, "") for name in names]
    checks.append(HostCheck("agent", "engine directory", Result.OK, ""))
    memory = HostCheck("shared memory", SHARED_MEMORY_CHECK, Result.OK, "")
    gpu = HostCheck("GPU", "CUDA", Result.NO, "none")
    assert works([*checks, memory, gpu])
    assert not works([*checks, HostCheck(memory.group, memory.name, Result.NO, "no"), gpu])
    assert not works([*checks[1:], memory])
    assert json.loads(as_json(checks))["ok"] is False


def test_numba_is_tried_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = host_checks.host_digests()
    assert check.result is Result.OK, check.detail
    monkeypatch.setitem(sys.modules, "ckpt_engine.digest.host_kernel", None)  # as if it were not installed
    digest_host._loaded.cache_clear()
    try:
        (check,) = host_checks.host_digests()
    finally:
        digest_host._loaded.cache_clear()
    assert check.result is Result.NOTE
    assert "pip install numba" in check.detail


def test_a_check_that_breaks_does_not_take_the_others_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[HostCheck]:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(host_checks, "limits", broken)
    rows = list(host_checks.all_checks())
    (row,) = (check for check in rows if check.name == "broken")
    assert "unforeseen" in row.detail
    assert any(check.name == SHARED_MEMORY_CHECK for check in rows)


def test_whether_a_relay_could_run_and_nothing_is_left_of_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "relays"
    monkeypatch.setenv(DIRECTORY, str(folder))
    assert relay("relay's directory").result is Result.OK
    assert not folder.exists()
    folder.mkdir()
    with alone(folder):
        assert "has a relay already" in relay("relay's directory").detail
    folder.chmod(0o777)
    found = relay("relay's directory")
    assert (found.result, "others could put their sockets" in found.detail) == (Result.NO, True)
    monkeypatch.setattr(relay_checks, "SHARED_PAGES", tmp_path / "shmem_enabled")
    monkeypatch.setattr(relay_checks, "PAGES", tmp_path)
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    assert "pages of 4 KiB" in relay("huge pages").detail
    (tmp_path / "free_hugepages").write_text("512\n")
    (tmp_path / "resv_hugepages").write_text("0\n")
    assert "a relay of 1 GiB or less uses them" in relay("huge pages").detail


def test_whether_relays_of_other_hosts_would_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert relay("relays of other hosts").result is Result.NOTE
    monkeypatch.setenv("CKPT_ENGINE_RELAY_LISTEN", "127.0.0.1:0")
    assert relay("relays of other hosts").result is Result.OK
    monkeypatch.setenv("CKPT_ENGINE_RELAY_LISTEN", "0.0.0.0:0")
    found = relay("relays of other hosts")
    assert (found.result, "not encrypted" in found.detail) == (Result.NO, True)
    monkeypatch.setenv("CKPT_ENGINE_RELAY_INSECURE", "1")
    assert relay("relays of other hosts").result is Result.OK


def relay(name: str) -> HostCheck:
    return next(check for check in host_checks.relays() if check.name == name)
