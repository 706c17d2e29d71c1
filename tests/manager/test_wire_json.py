"""What HTTP answers is the protobuf's JSON of what gRPC answers; updates are found by epoch and by version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from google.protobuf.json_format import Parse
from google.protobuf.message import Message
from scripted_members import ScriptedReplica, ScriptedTrainer, one_update, refused, some_weights

from ckpt_engine import CkptEngineError
from ckpt_engine.channel import ManagerStub
from ckpt_engine.client import AsyncClient
from ckpt_engine.core.version import Version
from ckpt_engine.manager import update_records
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.v1 import manager_pb2, page_pb2, weights_pb2
from tests.timeline.past_updates import write_past_updates


async def test_every_route_answers_a_message_and_the_one_that_grpc_answers(
    client: httpx.AsyncClient, stub: ManagerStub
) -> None:
    trainer, replica = ScriptedTrainer(stub), ScriptedReplica(stub, "rollout-0", workers=2)
    await trainer.join(some_weights())
    await refused(trainer.update(timeout_seconds=3.0))
    await replica.open()
    report = await one_update([trainer], [replica], prepares=True)

    async def told(path: str, message: Message) -> Any:
        answer = await client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
        return Parse(answer.text, message)

    record = await stub.GetUpdate(manager_pb2.GetUpdateRequest(epoch=report.fence.epoch), timeout=60)
    assert record.report == report
    assert await told(f"/v1/updates/{record.epoch}", manager_pb2.UpdateRecord()) == record
    assert await told("/v1/versions/0/update?lineage=run", manager_pb2.UpdateRecord()) == record
    listed = await stub.ListUpdates(manager_pb2.ListUpdatesRequest(), timeout=60)
    assert list(listed.updates) == [record]
    assert listed.refused[0].problem.message
    assert await told("/v1/updates", manager_pb2.ListUpdatesResponse()) == listed
    status = await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
    assert await told("/v1/status", manager_pb2.GetStatusResponse()) == status
    assert await told("/v1/replicas/rollout-0", manager_pb2.ReplicaStatus()) == status.replicas[0]
    assert list((await told("/v1/replicas", manager_pb2.ListReplicasResponse())).replicas) == list(status.replicas)
    (version,) = (await told("/v1/versions", manager_pb2.ListVersionsResponse())).versions
    assert (version.identity, list(version.replicas)) == (report.identity, ["rollout-0"])
    assert not (await told("/v1/versions?lineage=other", manager_pb2.ListVersionsResponse())).versions
    assert (await told("/healthz", manager_pb2.Health())).cluster == status.fence.cluster
    overview = await told("/v1/overview", page_pb2.PageOverview())
    assert [each.watched.name for each in overview.replicas] == ["rollout-0"]
    assert overview.now > record.time
    (line,) = (await told("/v1/history", page_pb2.PageHistory())).updates
    assert (line.epoch, line.bytes, line.ok) == (record.epoch, report.bytes, True)


async def test_the_interface_explains_each_message_with_the_words_of_the_proto(client: httpx.AsyncClient) -> None:
    told = (await client.get("/openapi.json")).json()
    schemas = told["components"]["schemas"]
    route = told["paths"]["/v1/updates/from-directory"]["post"]
    asked = route["requestBody"]["content"]["application/json"]["schema"]
    assert asked == {"$ref": "#/components/schemas/UpdateFromDirectoryRequest"}
    properties = schemas["UpdateFromDirectoryRequest"]["properties"]
    assert properties["version"]["type"] == "string"
    assert properties["version"]["description"]
    assert properties["options"]["$ref"] == "#/components/schemas/UpdateOptions"
    assert "PAUSE_MODE_KEEP" in schemas["UpdateOptions"]["properties"]["pause_mode"]["enum"]
    assert schemas["RelayFilled"]["properties"]["brought"]["items"]["$ref"].endswith("/RelayFilled.Brought")
    assert schemas["RelayFilled.Brought"]["properties"]["bytes"]["format"] == "uint64"
    for path, methods in told["paths"].items():
        for method, each in methods.items():
            answer = each["responses"]["200"]
            assert answer["description"] not in ("", "Successful Response") or path == "/metrics", (path, method)


# -- updates, by epoch and by version


@pytest.fixture
async def past(config: ManagerConfig) -> AsyncIterator[ManagerServer]:
    """A manager that knows of updates of long ago; version 1 of run-a was brought twice, with epochs 1 and 9."""
    assert config.ledger is not None
    await write_past_updates(config.ledger)
    async with ManagerServer(config) as server:
        again = weights_pb2.Identity(lineage="run-a", version=1, root=bytes([1]) * 32)
        await server.ledger.record_intent(9, Version.of(again), selection=["one"])
        fence = weights_pb2.Fence(cluster=server.ledger.cluster, epoch=9)
        await server.ledger.record_outcome(manager_pb2.UpdateReport(fence=fence, identity=again, ok=True))
        yield server


async def test_of_several_updates_to_a_version_the_newest_is_meant_and_says_its_epoch(past: ManagerServer) -> None:
    async with AsyncClient(past.address) as client:
        assert [each.epoch for each in await client.updates()] == [9, 4, 3, 2, 1]
        assert [each.epoch for each in await client.updates(2, before=4)] == [3, 2]
        newest = await client.find_update(1, lineage="run-a")
        assert (newest.epoch, newest.report.fence.epoch) == (9, 9)
        first = await client.find_update(epoch=1)
        assert (first.epoch, first.identity) == (1, newest.identity)
        assert (await client.find_update(2)).epoch == 3, "only one lineage has it"
        running = await client.find_update(3, lineage="run-a")
        assert (running.epoch, running.HasField("report")) == (4, False)


async def test_large_reports_come_in_more_pages(past: ManagerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_records, "PAGE_BYTES", 300)
    epochs, pages = list[int](), 0
    async with httpx.AsyncClient(base_url=f"http://{past.http_address}", trust_env=False) as client:
        asked: dict[str, str] = {}
        while pages == 0 or "before" in asked:
            answer = (await client.get("/v1/updates", params=asked)).json()
            epochs += [int(each["epoch"]) for each in answer["updates"]]
            pages += 1
            asked = {"before": answer["next_before"]} if "next_before" in answer else {}
    assert epochs == [9, 4, 3, 2, 1]
    assert pages > 1


@pytest.mark.parametrize(
    ("ask", "code", "says"),
    [
        (lambda client: client.find_update(1), "INVALID_ARGUMENT", "name one of run-a, run-b as lineage"),
        (lambda client: client.find_update(8, lineage="run-b"), "NOT_FOUND", "its last ones were to 1"),
        (lambda client: client.find_update(epoch=5), "NOT_FOUND", "the last ones are epoch 9 (version 1 of lineage"),
        (lambda client: client.find_update(epoch=(1 << 64) - 1), "NOT_FOUND", "the last ones are epoch 9"),
        (lambda client: client.find_update(), "INVALID_ARGUMENT", "one of the two"),
        (lambda client: client.find_update(1, epoch=1), "INVALID_ARGUMENT", "one of the two"),
        (lambda client: client.find_update(epoch=-1), "INVALID_ARGUMENT", "epoch -1 is not an epoch"),
        (lambda client: client.find_update("1"), "INVALID_ARGUMENT", "'1'"),
        (lambda client: client.updates(201), "INVALID_ARGUMENT", "at most 200 updates, not 201"),
    ],
)
async def test_an_update_that_cannot_be_found_is_refused_with_what_there_is(
    past: ManagerServer, ask: Callable[[AsyncClient], Any], code: str, says: str
) -> None:
    async with AsyncClient(past.address) as client:
        with pytest.raises(CkptEngineError) as caught:
            await ask(client)
    assert caught.value.code == code
    assert says in caught.value.problem.message


async def test_over_http_it_is_refused_with_the_same_words(past: ManagerServer) -> None:
    async with httpx.AsyncClient(base_url=f"http://{past.http_address}", trust_env=False) as client:
        for path, status, says in (
            ("/v1/versions/1/update", 400, "name one of run-a, run-b as lineage"),
            ("/v1/versions/8/update?lineage=run-b", 404, "its last ones were to 1"),
            ("/v1/updates/5", 404, "the last ones are epoch 9 (version 1 of lineage"),
        ):
            answer = await client.get(path)
            assert (answer.status_code, says in answer.json()["detail"]) == (status, True), answer.text
        assert (await client.get("/v1/versions/1/update?lineage=run-a")).json()["epoch"] == "9"
