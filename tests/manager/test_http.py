"""The HTTP side counts what the gRPC side did, and refuses in problem documents. What it answers: test_wire_json.py."""

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_members import ScriptedReplica, ScriptedTrainer, one_update, ranks, refused, some_weights

from ckpt_engine.channel import ManagerStub
from ckpt_engine.manager.service import ManagerServer


async def samples(client: httpx.AsyncClient) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every sample of /metrics by name and label values."""
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_an_idle_manager(client: httpx.AsyncClient, manager: ManagerServer) -> None:
    health = (await client.get("/healthz")).json()
    assert health["status"] == "ok"
    assert health["cluster"] == manager.ledger.cluster
    assert (await client.get("/v1/replicas")).json() == {"replicas": []}
    assert (await client.get("/v1/updates")).json() == {"updates": [], "refused": []}
    values = await samples(client)
    assert values["ckpt_engine_replicas", ("serving",)] == 0
    assert values["ckpt_engine_updates_total", ("ok",)] == 0


async def test_updates_and_replicas_are_counted(
    client: httpx.AsyncClient, manager: ManagerServer, stub: ManagerStub
) -> None:
    trainer, replica = ScriptedTrainer(stub), ScriptedReplica(stub, "rollout-0", workers=2)
    await trainer.join(some_weights())
    await refused(trainer.update(timeout_seconds=3.0))
    await replica.open()
    await one_update([trainer], [replica], prepares=True)
    for _ in range(2):
        last = await one_update([trainer], [replica], prepares=False)

    updates = (await client.get("/v1/updates")).json()["updates"]
    values = await samples(client)
    assert values["ckpt_engine_updates_total", ("ok",)] == 3
    assert values["ckpt_engine_updates_total", ("refused",)] == 1
    assert values["ckpt_engine_replica_outcomes_total", ("new_serving",)] == 3
    assert values["ckpt_engine_pause_seconds_count", ()] == 3
    assert values["ckpt_engine_transferred_bytes_total", ("shared_memory",)] == sum(
        int(update["report"]["bytes"]) for update in updates
    )
    assert values["ckpt_engine_replicas", ("serving",)] == 1
    assert values["ckpt_engine_sessions", ("trainer",)] == 1
    assert values["ckpt_engine_latest_version", ()] == last.identity.version
    assert values["ckpt_engine_epoch", ()] == last.fence.epoch


async def test_a_refused_update_counts_once_however_many_ranks_called(
    client: httpx.AsyncClient, stub: ManagerStub
) -> None:
    trainers = await ranks(stub, some_weights(), some_weights())
    calls = [trainer.update(timeout_seconds=5.0) for trainer in trainers]  # there is no replica
    for call in calls:
        await refused(call)
    values = await samples(client)
    assert values["ckpt_engine_updates_total", ("refused",)] == 1
    assert values["ckpt_engine_update_refusals_total", ("failed_precondition",)] == 1
    (shown,) = (await client.get("/v1/updates")).json()["refused"]
    assert (shown["lineage"], shown.get("version")) == ("run", None)
    assert "start some with `ckpt-engine agent`" in shown["problem"]["message"]
    assert (await client.get("/v1/updates", params={"before": 1})).json()["refused"] == []


async def test_the_lines_of_a_session_name_its_member(stub: ManagerStub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await ScriptedReplica(stub, "rollout-0").open()
    await ScriptedTrainer(stub, 1, 2).open()
    assert "session opened peer=replica-1 replica='rollout-0' address=" in caplog.text
    assert "session opened peer=trainer-2 lineage='run' rank=1 world_size=2 address=" in caplog.text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/replicas/nobody", 404),
        ("/v1/updates/99", 404),
        ("/v1/updates/-1", 422),
        ("/v1/updates/x", 422),
        ("/v1/updates?limit=0", 422),
        ("/nowhere", 404),
    ],
)
async def test_errors_are_problem_documents(client: httpx.AsyncClient, path: str, status: int) -> None:
    answer = await client.get(path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert answer.json()["detail"]


async def test_the_openapi_page_needs_no_other_host(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.status_code == 200
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) >= 2
    for link in links:
        assert link.startswith("/"), f"{link} is on another host"
        assert (await client.get(link)).status_code == 200, link
