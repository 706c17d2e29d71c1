"""The page at `/` and what it asks for, as far as no browser is needed: who may read and change what, what is sent."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from manager_keys import Keys, token
from scripted_members import ScriptedReplica, ScriptedTrainer, one_update, refused, some_weights, stub_at

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.message_json import as_dict
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.machines.manager.status import Watched, replica_state
from ckpt_engine.manager import kept_views
from ckpt_engine.manager.blobs import BlobStore
from ckpt_engine.manager.http_page import FILES
from ckpt_engine.manager.kept_views import Lines
from ckpt_engine.manager.ledger import Ledger, Record
from ckpt_engine.manager.metrics import ManagerMetrics
from ckpt_engine.manager.page_views import percentile, replicas_of, update_line
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.manager.update_records import message
from ckpt_engine.security.grants import Caller
from ckpt_engine.security.server import ServerSecurity
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.waiting import until

EVIL = "<img src=x onerror=alert(1)>"


# -- what is sent


def test_the_page_has_no_script_of_its_own_and_asks_nobody_else() -> None:
    folder = files("ckpt_engine.manager") / "page"
    assert {each.name for each in folder.iterdir()} == {name for name, _ in FILES.values()}
    for each in folder.iterdir():
        text = each.read_text()
        assert len(text.splitlines()) <= 400, each.name
        outside = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert not outside, each.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", text), (
            each.name
        )
        assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie|EventSource", text), each.name
    page = (folder / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|javascript:", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]


async def test_every_answer_says_what_a_browser_may_not_do(client: httpx.AsyncClient) -> None:
    for route in (*FILES, "/v1/overview", "/v1/history", "/healthz", "/metrics", "/docs", "/nowhere", "/openapi.json"):
        answer = await client.get(route)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy, route
        assert "frame-ancestors 'none'" in policy, route
        scripts = re.search(r"script-src ([^;]*)", policy)
        assert scripts is None or "unsafe" not in scripts[1], route
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "set-cookie" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers
    page = await client.get("/", headers={"Host": "evil.example"})
    assert (page.status_code, page.headers["x-content-type-options"]) == (403, "nosniff")


async def test_the_interface_is_grouped_and_described(client: httpx.AsyncClient) -> None:
    told = (await client.get("/openapi.json")).json()
    groups = {tag["name"]: tag["description"] for tag in told["tags"]}
    assert set(groups) == {"look", "update", "operate", "watch"}
    assert all(groups.values())
    assert "bearer" in told["info"]["description"].lower()
    for path, methods in told["paths"].items():
        for method, route in methods.items():
            assert len(route["tags"]) == 1, path
            assert set(route["tags"]) <= set(groups), path
            assert route["summary"], path
            assert (method == "get") == (route["tags"][0] in ("look", "watch")), path


# -- who may ask


async def test_a_strangers_name_that_leads_here_neither_reads_nor_changes(
    client: httpx.AsyncClient, stub: ManagerStub, manager: ManagerServer
) -> None:
    """The attack as a browser makes it: to it, it is the page's own server, so the Origin agrees with the Host."""
    replica = ScriptedReplica(stub, "one")  # which is connected as long as there is this object
    await replica.open()
    rebound = {"Host": "evil.example:8080", "Origin": "http://evil.example:8080", "Sec-Fetch-Site": "same-origin"}
    for route in ("/", "/page/page.js", "/v1/overview", "/v1/replicas", "/v1/history", "/metrics", "/healthz", "/docs"):
        answer = await client.get(route, headers=rebound)
        assert answer.status_code == 403, route
        assert "one" not in answer.text.replace("none", ""), route
    assert (await client.post("/v1/replicas/one/evict", json={}, headers=rebound)).status_code == 403
    forged = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    for headers in (forged, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await client.post("/v1/replicas/one/evict", json={}, headers=headers)).status_code == 403
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in (form, {"content-type": "text/plain"}, {}):
        assert (await client.post("/v1/replicas/one/evict", content=b"{}", headers=headers)).status_code in (400, 422)
    assert [each.name for each in manager.status().replicas] == ["one"]
    ours = {"Origin": f"http://{manager.http_address}", "Sec-Fetch-Site": "same-origin"}
    assert (await client.post("/v1/replicas/one/evict", json={}, headers=ours)).json() == {"was_connected": True}
    assert not manager.status().replicas


async def test_beyond_loopback_a_strangers_name_reads_nothing_unless_callers_are_asked(config: ManagerConfig) -> None:
    open_to_all = replace(
        config,
        http="0.0.0.0:0",
        security=ServerSecurity(insecure=True),
        advertise="manager.example.com",
        http_names=("Node7.hpc.uni.edu",),
    )
    async with ManagerServer(open_to_all) as server:
        port = server.http_address.rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            answer = await client.get("/v1/overview", headers={"Host": "evil.example"})
            assert answer.status_code == 403
            assert "start it with --http-name evil.example" in answer.json()["detail"]
            for host in ("127.0.0.1", "manager", "manager.example.com:1", "node7.hpc.uni.edu:8080"):
                answer = await client.get("/v1/overview", headers={"Host": host})
                assert answer.status_code == 200, host
            assert answer.json()["manager"] == f"manager.example.com:{server.address.rpartition(':')[2]}"
            for route in ("/healthz", "/metrics"):
                assert (await client.get(route, headers={"Host": "evil.example"})).status_code == 200, route
                assert (await client.post(route, headers={"Host": "evil.example"})).status_code == 403, route
            through = {"Host": "127.0.0.1", "Origin": "https://node7.hpc.uni.edu", "Sec-Fetch-Site": "same-origin"}
            for origin, status in ((through["Origin"], 404), ("https://evil.example", 403)):
                headers = {**through, "Origin": origin}
                assert (await client.post("/v1/replicas/no/evict", json={}, headers=headers)).status_code == status


async def test_the_page_is_open_and_its_facts_want_a_token(asking: ManagerServer, keys: Keys) -> None:
    async with keys.browser(asking) as client:

        async def sent(method: str, route: str, role: str, **more: Any) -> httpx.Response:
            shown = {"Authorization": f"Bearer {token(role)}"}
            return await client.request(method, route, headers=shown, **more)

        for route in FILES:
            assert (await client.get(route)).status_code == 200, route
        for route in ("/v1/overview", "/v1/history", "/page/", "/page/../v1/overview", "/page/other.js"):
            assert (await client.get(route)).status_code == 401, route
        for role, may in (("viewer", False), ("replica", False), ("trainer", False), ("operator", True)):
            told = (await sent("GET", "/v1/overview", role)).json()
            assert told["asker"]["operates"] is may, role
            assert token(role) not in str(told)
            for what in ("retry", "hold", "release", "evict"):
                answer = await sent("POST", f"/v1/replicas/one/{what}", role, json={})
                assert answer.status_code == (404 if may else 403), (role, what)
        assert (await client.post("/v1/replicas/one/evict", json={})).status_code == 401


# -- what it is told


async def test_operators_retry_and_evict(client: httpx.AsyncClient, stub: ManagerStub, manager: ManagerServer) -> None:
    for name in ("a/b", EVIL):
        replica = ScriptedReplica(stub, name)
        await replica.open()
        path = f"/v1/replicas/{name.replace('/', '%2F')}"
        assert (await client.get(path)).json()["name"] == name
        answer = await client.post(f"{path}/retry", json={})
        assert answer.status_code in (200, 409), answer.text
        assert answer.json().get("message") or answer.json()["detail"]
        unknown = await client.post(f"{path}/retry", json={"reason": "x"})
        assert (unknown.status_code, "has no field 'reason'" in unknown.json()["detail"]) == (400, True)
        other = await client.post(f"{path}/evict", json={"name": "other"})
        assert (other.status_code, "leave name out" in other.json()["detail"]) == (400, True)
        assert (await client.post(f"{path}/evict", json={"reason": "x" * 501})).status_code == 400
        answer = await client.post(f"{path}/evict", json={"reason": f"because of {EVIL}"})
        assert answer.json() == {"was_connected": True}
        told = await replica.stream.until(manager_pb2.Refused)
        assert f"was evicted by an operator: because of {EVIL}" in told.problem.message
    assert not manager.status().replicas


async def test_operators_hold_and_release(
    client: httpx.AsyncClient, stub: ManagerStub, config: ManagerConfig, manager: ManagerServer
) -> None:
    """What is answered is on the disk, and everything that shows a replica says so."""
    for name in ("a/b", EVIL):
        replica = ScriptedReplica(stub, name)
        await replica.open()
        path = f"/v1/replicas/{name.replace('/', '%2F')}"
        assert "hold" not in (await client.get(path)).json()
        assert (await client.post(f"{path}/hold", json={"reason": "x" * 501})).status_code == 400
        assert (await client.post(f"{path}/release", json={"reason": "x"})).status_code == 400
        held = (await client.post(f"{path}/hold", json={"reason": f"because of {EVIL}"})).json()["hold"]
        assert held["reason"] == f"because of {EVIL}"
        assert (await client.get(path)).json()["hold"] == held
        assert (await manager.ledger.holds())[name].reason == held["reason"]
        told = ""
        while not told:  # an overview may be half a second old
            overview = (await client.get("/v1/overview")).json()
            told = next((each["hold"] for each in overview["replicas"] if each["watched"]["name"] == name), "")
            await asyncio.sleep(0.05)
        assert told.startswith("held by an operator since 20")
        assert told.endswith(f"(because of {EVIL}): release it with `ckpt-engine replica release {name}`")
        answer = await client.post(f"{path}/retry", json={})
        assert answer.status_code == 409
        metrics = (await client.get("/metrics")).text
        assert metrics.count("ckpt_engine_replica_held{") == metrics.count("ckpt_engine_replica_drift_seconds{")
        assert sum(line.endswith(" 1.0") for line in metrics.splitlines() if "replica_held{" in line) == 1
        answer = await client.post(f"{path}/release", json={})
        assert answer.json() == {"message": "released; nothing is meant for it yet"}
        assert "hold" not in (await client.get(path)).json()
        assert await manager.ledger.holds() == {}


async def test_an_overview_says_who_lags_and_who_is_waited_for(
    client: httpx.AsyncClient,
    stub: ManagerStub,
    manager: ManagerServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_views, "OVERVIEW_SECONDS", 0.0)

    async def lines() -> dict[str, Any]:
        return {each["watched"]["name"]: each for each in (await client.get("/v1/overview")).json()["replicas"]}

    empty = (await client.get("/v1/overview")).json()
    assert (empty["phase"], empty["replicas"], empty["lineages"], empty["refused"]) == ("idle", [], [], 0)
    assert empty["manager"] == manager.address
    trainer = ScriptedTrainer(stub, lineage=EVIL)
    replicas = [ScriptedReplica(stub, name) for name in (EVIL, "b")]
    await trainer.join(some_weights())
    await refused(trainer.update(timeout_seconds=3.0))  # there is no replica
    for replica in replicas:
        await replica.open()
    await one_update([trainer], replicas, prepares=True)
    assert {name: (each["watched"]["state"], each["lag"]) for name, each in (await lines()).items()} == {
        EVIL: ("REPLICA_STATE_SERVING", "0"),
        "b": ("REPLICA_STATE_SERVING", "0"),
    }

    call = trainer.update()
    await until(lambda: list(manager.status().waiting_for) == ["rank 0"], "the rank is waited for")
    await trainer.seal()
    await replicas[0].install()
    await until(lambda: list(manager.status().waiting_for) == ["replica b"], "one replica is waited for")
    told = (await client.get("/v1/overview")).json()
    assert told["phase"].endswith("installing")
    assert told["waiting_for"] == ["replica b"]
    assert (await lines())["b"]["watched"]["state"] == "REPLICA_STATE_DRAINING"
    assert ((await lines())["b"]["lag"], (await lines())[EVIL]["lag"]) == ("1", "0")
    replicas[1].workers[0].state = manager_pb2.WORKER_STATE_DIRTY
    reason = f"worker 0 is dirty: {EVIL}"
    order = await replicas[1].stream.until(manager_pb2.Install)
    outcome = manager_pb2.ReplicaOutcome(replica="b", fence=order.fence, outcome=manager_pb2.OUTCOME_QUARANTINED)
    outcome.problem.message = reason
    await replicas[1].stream.send(outcome=outcome)
    await call
    closed = manager_pb2.ReplicaHeartbeat(sequence=2, workers=replicas[1].workers, closed_reason=reason)
    await replicas[1].stream.send(heartbeat=closed)
    await until(lambda: not manager.status().replicas[1].serving, "it is closed")
    shown = (await lines())["b"]
    assert (shown["quarantined"], shown["watched"]["reason"], "lag" in shown) == (True, reason, False)
    assert "identity" not in shown["watched"]

    history = (await client.get("/v1/history")).json()
    newest = history["updates"][0]
    assert newest["identity"]["lineage"] == EVIL
    outcomes = {each["outcome"]: each["replicas"] for each in newest["outcomes"]}
    assert outcomes == {"OUTCOME_NEW_SERVING": 1, "OUTCOME_QUARANTINED": 1}
    assert newest["pauses"] == {"replicas": 1, "p50": 0.01, "p99": 0.01, "longest": 0.01}
    assert [(each["replica"], each["message"]) for each in newest["problems"]] == [("b", reason)]
    assert "start some with `ckpt-engine agent`" in history["refused"][0]["problem"]["message"]
    whole = (await client.get(f"/v1/updates/{newest['epoch']}")).json()["report"]
    assert whole["replicas"][0]["edges"][0]["transport"] == "shared_memory"
    assert whole["prefetch"] == "no relay has a session with this manager"
    assert (await client.get("/v1/overview")).json()["refused"] == 1


def test_percentiles_are_of_what_was_measured() -> None:
    assert [percentile([1.0], part) for part in (0.5, 0.99)] == [1.0, 1.0]
    assert [percentile([1.0, 2.0, 3.0, 4.0], part) for part in (0.5, 0.99)] == [2.0, 4.0]
    hundred = [float(each) for each in range(1, 101)]
    assert (percentile(hundred, 0.5), percentile(hundred, 0.99), percentile([*hundred, 200.0], 0.99)) == (50, 99, 100)


async def test_a_manager_that_stops_operates_no_more(config: ManagerConfig) -> None:
    async with ManagerServer(config) as server, stub_at(server.address) as stub:
        replica = ScriptedReplica(stub, "one")
        await replica.open()
        await server.stop()
        with pytest.raises(CkptEngineError, match="the manager is stopping"):
            await server.operate(manager_pb2.EvictReplicaRequest(name="one"))


def test_values_that_only_a_newer_agent_has_are_named_by_their_number() -> None:
    report = manager_pb2.UpdateReport()
    report.stages.add(stage=cast(Any, 99), seconds=1.0)
    report.replicas.add(replica="newer", outcome=cast(Any, 77))
    report.replicas[0].problem.code = cast(Any, 88)
    report.replicas[0].stages.add(stage=cast(Any, 99), seconds=1.0)
    record = Record(1, Version("run", 0, b""), 0.0, report)
    for told in (as_dict(update_line(record)), as_dict(message(record))["report"]):
        assert told["stages"] == [{"stage": 99, "seconds": 1.0}]
    assert as_dict(update_line(record))["outcomes"] == [{"outcome": 77, "replicas": 1}]
    assert as_dict(update_line(record))["problems"][0]["code"] == 88
    metrics = ManagerMetrics(manager_pb2.GetStatusResponse, BlobStore(1, 1))
    metrics.report(report)
    assert 'ckpt_engine_replica_outcomes_total{outcome="unknown"} 1.0' in metrics.exposition().decode()


@pytest.mark.parametrize(("drifts", "quarantined"), [(True, True), (False, False)])
def test_a_closed_replica_is_quarantined_only_as_long_as_it_lacks_what_it_is_to_serve(
    drifts: bool, quarantined: bool
) -> None:
    host = weights_pb2.Host(name="h")
    replica = Replica("a", "session", 1, manager_pb2.MODE_STANDALONE, host, None, 0.0)
    replica.last_outcome = manager_pb2.ReplicaOutcome(replica="a", outcome=manager_pb2.OUTCOME_QUARANTINED)
    seen = manager_pb2.WatchedReplica(name="a", state=manager_pb2.REPLICA_STATE_CLOSED, reason="its worker is dead")
    drift = Drift(Version("run", 0, b""), "it is tried again", 1.0, 5.0) if drifts else None
    now = Watched(Fence("c", 1), {"a": seen}, {}, False)
    (line,) = replicas_of({"a": replica}, now, {} if drift is None else {"a": drift}, {})
    assert (line.quarantined, line.watched.reason) == (quarantined, "its worker is dead")
    assert line.drift == ("it is tried again" if drifts else "")


async def answered(replica: ScriptedReplica, beat: int) -> None:
    """Waits until the manager has taken this heartbeat."""
    while (await replica.stream.call.read()).heartbeat.sequence != beat:
        pass


async def noted(manager: ManagerServer, stub: ManagerStub) -> ScriptedReplica:
    """A replica whose hello and first heartbeat the manager has, and its ledger."""
    replica = ScriptedReplica(stub, "a")
    await replica.open()
    await answered(replica, 1)
    await until(lambda: manager.changes >= 3, "the manager has noted it")
    return replica


async def test_an_overview_is_built_once_for_all_who_ask_and_says_who_asks(
    manager: ManagerServer, stub: ManagerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, built = [100.0], []
    look = manager.watched
    monkeypatch.setattr(manager, "watched", lambda: built.append(1) or look())
    overviews = kept_views.Overviews(manager, lambda: now[0])

    def told(caller: Caller) -> dict[str, Any]:
        overview: dict[str, Any] = json.loads(overviews.text(caller))
        asker = overview.pop("asker")
        assert (asker["name"], asker["operates"]) == (caller.name, caller.may_any("operator"))
        return overview

    one, other = Caller("one", ()), Caller("other", everything=True)
    first = told(one)
    replica = await noted(manager, stub)
    now[0] += 0.4
    second = told(other)
    assert second["now"] > first["now"]
    assert ({**second, "now": 0}, len(built)) == ({**first, "now": 0}, 1)
    now[0] += 0.2
    assert [each["watched"]["state"] for each in told(one)["replicas"]] == ["REPLICA_STATE_SERVING"]
    assert len(built) == 2
    for number, (serving, expected) in enumerate([(True, 2), (True, 2), (False, 3), (False, 3)], 10):
        beat = manager_pb2.ReplicaHeartbeat(sequence=number, workers=replica.workers, serving=serving)
        await replica.stream.send(heartbeat=beat)
        await answered(replica, number)
        now[0] += 0.6
        for caller in (one, other):
            assert told(caller)["replicas"][0]["watched"]["state"] == (
                "REPLICA_STATE_SERVING" if serving else "REPLICA_STATE_CLOSED"
            )
        assert len(built) == expected, "what changes nothing is not looked at"


async def test_replicas_are_copied_once_for_all_who_look_while_nothing_changes(
    client: httpx.AsyncClient,
    manager: ManagerServer,
    stub: ManagerStub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = []
    original = ManagerMachine.status

    def status(machine: ManagerMachine, *, replicas: bool = True) -> manager_pb2.GetStatusResponse:
        copied.append(replicas)
        return original(machine, replicas=replicas)

    monkeypatch.setattr(ManagerMachine, "status", status)
    replica = await noted(manager, stub)

    async def looked_at() -> set[str]:
        """Its state, as each of those who look sees it."""
        (listed,) = (await client.get("/v1/replicas")).json()["replicas"]
        alone = (await client.get("/v1/replicas/a")).json()
        assert alone == listed
        found = (await client.get("/metrics")).text.splitlines()
        (counted,) = (line.split('"')[3] for line in found if "replica_state{" in line and line.endswith(" 1.0"))
        (told,) = (await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)).replicas
        return {"serving" if listed["serving"] else "closed", counted, replica_state(told)}

    copied.clear()
    for number, (serving, copies) in enumerate([(True, 1), (True, 1), (False, 2), (False, 2)], 10):
        beat = manager_pb2.ReplicaHeartbeat(sequence=number, workers=replica.workers, serving=serving)
        await replica.stream.send(heartbeat=beat)
        await answered(replica, number)
        assert await looked_at() == {"serving" if serving else "closed"}
        assert copied.count(True) == copies, "what changes nothing is not copied"


async def test_what_each_replica_says_in_each_update_costs_no_look_at_what_all_need(
    manager: ManagerServer, stub: ManagerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    original = ManagerMachine.blobs_in_use
    monkeypatch.setattr(ManagerMachine, "blobs_in_use", lambda machine: looks.append(1) or original(machine))
    replica = await noted(manager, stub)
    assert looks
    fence = manager.status().fence
    looks.clear()
    await replica.stream.send(progress=manager_pb2.Progress(fence=fence, stage=manager_pb2.STAGE_TRANSFER))
    await replica.stream.send(outcome=manager_pb2.ReplicaOutcome(replica="a", fence=fence))
    closed = manager_pb2.ReplicaHeartbeat(sequence=10, workers=replica.workers, closed_reason="it is closed")
    await replica.stream.send(heartbeat=closed)
    await answered(replica, 10)
    assert not looks


async def test_the_times_of_drifts_go_on_while_nothing_changes(
    manager: ManagerServer, stub: ManagerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drift is made up: a real one comes from an update, whose traces are changes."""
    now = [100.0]
    version = Version("run", 0, b"")
    monkeypatch.setattr(
        ManagerMachine, "drifts", lambda machine: {"a": Drift(version, f"since {now[0]:g}", now[0], 200 - now[0])}
    )
    _replica = await noted(manager, stub)  # it is connected as long as there is this object
    lists = kept_views.ReplicaLists(manager, lambda: now[0])
    for passed, expected in ((0.0, 100.0), (0.4, 100.0), (0.2, 100.6)):
        now[0] += passed
        (listed,) = json.loads(await lists.text())["replicas"]
        assert listed["drift"]["seconds"] == pytest.approx(expected)
        (told,) = manager.status().replicas
        assert (told.drift.seconds, told.drift.next_attempt_seconds) == pytest.approx((now[0], 200 - now[0]))
    assert told.drift.reason == "since 100.6"


async def test_lines_of_reports_are_kept_until_they_are_corrected(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path / "ledger")
    try:
        lines = Lines(ledger)
        identity = weights_pb2.Identity(lineage="run", root=b"r")
        await ledger.record_intent(1, Version.of(identity))
        assert [each.HasField("ok") for each in await lines.newest(9)] == [False]
        report = manager_pb2.UpdateReport(identity=identity)
        report.fence.epoch = 1
        await ledger.record_outcome(report)
        (first,) = await lines.newest(9)
        assert (first.HasField("ok"), first.ok) == (True, False)
        (again,) = await lines.newest(9)
        assert again is first
        assert [each.report for each in await ledger.history(None, 9, [1])] == [None]
        report.ok = True
        await ledger.record_outcome(report)
        assert [each.ok for each in await lines.newest(9)] == [True]
    finally:
        await ledger.close()


async def test_operators_decide_about_deployments(client: httpx.AsyncClient) -> None:
    for action in ("approve", "pause", "resume", "undo"):
        answer = await client.post(f"/v1/deployments/{action}", json={})
        assert (answer.status_code, "undecided are: none" in answer.json()["detail"]) == (404, True)
    other = await client.post("/v1/deployments/undo", json={"action": "ACTION_APPROVE"})
    assert (other.status_code, "leave the action out" in other.json()["detail"]) == (400, True)
    assert (await client.post("/v1/deployments/finish", json={})).status_code in (400, 404, 422)


async def test_deciding_about_deployments_wants_a_token(asking: ManagerServer, keys: Keys) -> None:
    async with keys.browser(asking) as stranger:
        assert (await stranger.post("/v1/deployments/undo", json={})).status_code == 401
