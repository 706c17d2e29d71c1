"""`ckpt-engine trace` and the mistakes that are made with it: each says what is wrong and what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import Result

from ckpt_engine.core.version import Version
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.service import ManagerConfig, running_manager
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.ports import free_address
from tests.timeline.past_updates import write_past_updates
from tests.timeline.trace_format import read

Run = Callable[..., Result]


@pytest.fixture
def known(config: ManagerConfig) -> Iterator[str]:
    """The address of a manager that knows these updates and nobody else."""
    asyncio.run(write_past_updates(config.ledger))
    with running_manager(config) as address:
        yield address


def test_an_update_of_long_ago_is_written(run: Run, known: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    result = run("trace", "1", "-o", str(file), "--lineage", "run-b", "--manager", known)
    assert result.exit_code == 0, result.output
    found = read(file.read_text())
    assert (found.about["lineage"], found.about["version"], found.about["epoch"]) == ("run-b", 1, 2)
    assert f"version 1 of run-b (epoch 2): 0 B to replicas, 0 edges, 2.000 s; written to {file}" in result.output
    assert "told no times: all of it is drawn from durations" in result.output
    assert "± 500.00 ms at most (replica one)" in result.output
    assert [path.name for path in tmp_path.glob("*.json*")] == ["a.json"]


def test_an_update_is_named_by_its_epoch_too(run: Run, known: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    result = run("trace", "--epoch", "2", "-o", str(file), "--manager", known)
    assert result.exit_code == 0, result.output
    about = read(file.read_text()).about
    assert (about["lineage"], about["version"], about["epoch"]) == ("run-b", 1, 2)
    assert "version 1 of run-b (epoch 2)" in result.output


@pytest.mark.parametrize("wish", [(), ("1", "--epoch", "1")])
def test_an_update_is_named_in_one_way(run: Run, wish: tuple[str, ...]) -> None:
    result = run("trace", *wish, "-o", "a.json", "--manager", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "by its version, or by its epoch with --epoch: one of the two" in flat(result)


def test_an_epoch_without_a_report_is_not_mistaken_for_the_next_try(run: Run, config: ManagerConfig) -> None:
    """Version 3 was tried twice: the manager ended during epoch 4."""
    assert config.ledger is not None
    asyncio.run(write_past_updates(config.ledger))

    async def try_again() -> None:
        ledger = await Ledger.open(config.ledger)
        identity = weights_pb2.Identity(lineage="run-a", version=3, root=bytes([4]) * 32)
        await ledger.record_intent(7, Version.of(identity), selection=["one"])
        fence = weights_pb2.Fence(cluster=ledger.cluster, epoch=7)
        await ledger.record_outcome(manager_pb2.UpdateReport(fence=fence, identity=identity, ok=True))
        await ledger.close()

    asyncio.run(try_again())
    with running_manager(config) as address:
        ended = run("trace", "--epoch", "4", "-o", "-", "--manager", address)
        newest = run("trace", "3", "--lineage", "run-a", "-o", "-", "--manager", address)
    assert ended.exit_code == 1
    assert "update 4 has no report; the newest to its version 3 is epoch 7" in ended.output
    assert "version 3 of run-a (epoch 7)" in newest.stderr


def test_standard_output_gets_the_trace_alone(run: Run, known: str) -> None:
    result = run("trace", "2", "-o", "-", "--lineage", "run-a", "--manager", known)
    assert result.exit_code == 0, result.output
    assert read(result.stdout).about["version"] == 2
    assert "written to standard output" in result.stderr


def test_a_file_that_is_there_stays(run: Run, known: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("mine")
    wish = ("trace", "1", "-o", str(file), "--lineage", "run-a", "--manager", known)
    result = run(*wish)
    assert result.exit_code == 2
    assert f"{file} is there already: --force overwrites it" in flat(result)
    assert file.read_text() == "mine"
    assert run(*wish, "--force").exit_code == 0
    assert read(file.read_text()).about["lineage"] == "run-a"


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (
            ("9", "--lineage", "run-a"),
            "no update to version 9 of lineage 'run-a' is known: its last ones were to 3, 2",
        ),
        (("1", "--lineage", "run-c"), "no update to version 1 of lineage 'run-c' is known: none of this lineage is"),
        (("3", "--lineage", "run-a"), "the manager ended during update 4 (version 3 of lineage 'run-a')"),
        (("7",), "no update to version 7 of lineage 'run-a' is known"),
        (("--epoch", "4"), "the manager ended during update 4 (version 3 of lineage 'run-a')"),
        (("--epoch", "9"), "no update with epoch 9 is kept: the last ones are epoch 4 (version 3 of lineage 'run-a')"),
        (("--epoch", "1", "--lineage", "run-a"), "leave out the lineage, 'run-a'"),
    ],
)
def test_versions_that_nobody_can_tell_of(
    run: Run, known: str, tmp_path: Path, wish: tuple[str, ...], says: str
) -> None:
    file = tmp_path / "a.json"
    result = run("trace", *wish, "-o", str(file), "--manager", known)
    assert result.exit_code == 1
    assert says in result.output
    assert result.output.startswith(f"manager {known}: ")
    assert not file.exists()


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("there/is/none.json", "there is no directory there/is"),
        (".", "is a directory: name a file in it"),
    ],
)
def test_files_that_cannot_be(run: Run, output: str, says: str) -> None:
    """Before anybody is asked: there is no manager at this address."""
    result = run("trace", "1", "-o", output, "--manager", "127.0.0.1:1")
    assert result.exit_code == 2
    assert says in flat(result)


def test_a_disk_that_takes_nothing(run: Run, known: str, tmp_path: Path) -> None:
    """Root may write anywhere, but not where the kernel makes the files."""
    result = run("trace", "1", "-o", "/proc/a.json", "--lineage", "run-a", "--manager", known)
    assert result.exit_code == 1
    assert "ckpt-engine trace: /proc/a.json cannot be written: " in result.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "rates.json cannot be read: No such file or directory"),
        ("{", "rates.json is not JSON"),
        ("[]", "rates: [] is not a JSON object"),
        ('{"links": {"tcp": {"host": -1}}}', "links, tcp, host: -1 is not a number above 0"),
        ('{"digest": {"cpu": 1}}', "digest: 'cpu' is none of host, gpu"),
    ],
)
def test_rates_that_are_none(run: Run, tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "rates.json"
    if text is not None:
        file.write_text(text)
    result = run("trace", "1", "-o", str(tmp_path / "a.json"), "--rates", str(file), "--manager", "127.0.0.1:1")
    assert result.exit_code == 2
    assert says in flat(result)


def test_rates_of_ones_own_are_taken(run: Run, known: str, tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(json.dumps({"seconds": {"quiesce": 0.25}}))
    rates = ("--rates", str(tmp_path / "rates.json"))
    result = run("trace", "1", "-o", str(tmp_path / "a.json"), "--lineage", "run-a", *rates, "--manager", known)
    assert result.exit_code == 0, result.output
    predicted = read((tmp_path / "a.json").read_text()).named("quiesce", "prediction")
    assert [(each.thread, each.end - each.begin) for each in predicted] == [("quiesce: predicted", 250_000_000)]


@pytest.mark.parametrize("wish", [("-1",), ("three",), (), ("1", "2")])
def test_versions_that_are_no_numbers(run: Run, wish: tuple[str, ...]) -> None:
    assert run("trace", "-o", "a.json", "--manager", "127.0.0.1:1", "--", *wish).exit_code == 2


def test_a_manager_that_is_not_there(run: Run, tmp_path: Path) -> None:
    address = free_address()
    result = run("trace", "1", "-o", str(tmp_path / "a.json"), "--manager", address)
    assert result.exit_code == 1
    assert result.output.startswith(f"manager {address}: ")


class _Old(grpc.GenericRpcHandler):
    """A manager of before calls could wait for updates. Fake: none can be installed here."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if not handler_call_details.method.endswith("/GetStatus"):
            return None
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: manager_pb2.GetStatusResponse(),
            manager_pb2.GetStatusRequest.FromString,
            manager_pb2.GetStatusResponse.SerializeToString,
        )


def test_a_manager_that_is_too_old(run: Run, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, handlers=[_Old()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            asked = ("-o", str(tmp_path / "a.json"), "--manager", f"127.0.0.1:{port}")
            nobody = run("trace", "1", *asked)
            old = run("trace", "1", "--lineage", "run-a", *asked)
        finally:
            server.stop(0).wait(10)
    assert "knows no lineage now: name the one that you mean with --lineage" in nobody.output
    assert "does not know this call" in old.output
    assert (nobody.exit_code, old.exit_code) == (1, 1)


def flat(result: Result) -> str:
    """What was printed, without the frame around it and as one line."""
    return " ".join(result.output.replace("│", " ").split())
