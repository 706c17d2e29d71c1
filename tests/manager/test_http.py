"""The HTTP side shows what the gRPC side did."""

import base64
import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_members import ScriptedReplica, ScriptedTrainer, one_update, pair, ranks, refused, some_weights, stub_at

from ckpt_engine.channel import ManagerStub
from ckpt_engine.manager.service import ManagerConfig, ManagerServer


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


async def test_updates_and_replicas_are_shown(
    client: httpx.AsyncClient, manager: ManagerServer, stub: ManagerStub
) -> None:
    trainer, replica = ScriptedTrainer(stub), ScriptedReplica(stub, "rollout-0", workers=2)
    await trainer.join(some_weights())
    await refused(trainer.update(timeout_seconds=3.0))
    await replica.open()
    first = await one_update([trainer], [replica], prepares=True)
    for _ in range(2):
        last = await one_update([trainer], [replica], prepares=False)

    shown = (await client.get("/v1/replicas/rollout-0")).json()
    assert shown["serving"] is True
    assert base64.b64decode(shown["identity"]["root"]) == last.identity.root
    assert [worker["state"] for worker in shown["workers"]] == ["WORKER_STATE_CLEAN", "WORKER_STATE_CLEAN"]
    assert shown["last_outcome"]["outcome"] == "OUTCOME_NEW_SERVING"
    assert (await client.get("/v1/replicas")).json()["replicas"] == [shown]

    page = (await client.get("/v1/updates", params={"limit": 2})).json()
    assert page["updates"][0]["epoch"] == str(last.fence.epoch)
    rest = (await client.get("/v1/updates", params={"before": page["next_before"]})).json()
    assert [update["epoch"] for update in rest["updates"]] == [str(first.fence.epoch)]
    assert "next_before" not in rest
    one = (await client.get(f"/v1/updates/{first.fence.epoch}")).json()
    assert one == rest["updates"][0]
    assert one["report"]["ok"]
    assert one["report"]["replicas"][0]["workers"][1]["rank"] == 1

    values = await samples(client)
    assert values["ckpt_engine_updates_total", ("ok",)] == 3
    assert values["ckpt_engine_updates_total", ("refused",)] == 1
    assert values["ckpt_engine_replica_outcomes_total", ("new_serving",)] == 3
    assert values["ckpt_engine_pause_seconds_count", ()] == 3
    assert values["ckpt_engine_transferred_bytes_total", ("shared_memory",)] == sum(
        int(update["report"]["bytes"]) for update in [*page["updates"], one]
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


async def test_the_interface_describes_itself(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/healthz", "/v1/replicas", "/v1/replicas/{name}", "/v1/updates", "/v1/updates/{epoch}"} <= set(paths)
    assert (await client.get("/docs")).status_code == 200


async def test_history_survives_a_restart(config: ManagerConfig) -> None:
    async with ManagerServer(config) as server, stub_at(server.address) as stub:
        trainer, replica = await pair(stub)
        report = await one_update([trainer], [replica], prepares=True)
    async with ManagerServer(config) as server:
        async with httpx.AsyncClient(base_url=f"http://{server.http_address}", trust_env=False) as client:
            (update,) = (await client.get("/v1/updates")).json()["updates"]
        assert update["epoch"] == str(report.fence.epoch)
        assert server.ledger.epoch >= report.fence.epoch


async def test_the_openapi_page_needs_no_other_host(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.status_code == 200
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) >= 2
    for link in links:
        assert link.startswith("/"), f"{link} is on another host"
        assert (await client.get(link)).status_code == 200, link
