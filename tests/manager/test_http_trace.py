"""An update's timeline over HTTP, and saved by the page: the file is the one of `ckpt-engine trace`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from manager_keys import Keys, token
from playwright.async_api import Page
from scripted_members import ScriptedReplica, ScriptedTrainer, one_update, pair, stub_at

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.prediction import measured
from ckpt_engine.core.version import Version
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.timeline.asking import report_of
from ckpt_engine.timeline.perfetto import trace_text
from ckpt_engine.timeline.predicted import draw_with_prediction
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.browsing import chromium, looking, says
from tests.timeline.past_updates import write_past_updates
from tests.timeline.trace_format import read


async def updated(stub: ManagerStub, version: int = 0) -> tuple[ScriptedTrainer, ScriptedReplica]:
    """Members that have had an update, and stay."""
    trainer, member = await pair(stub, "rollout-0")
    await one_update([trainer], [member], prepares=True, version=version)
    return trainer, member


async def test_it_is_the_file_of_the_command(
    client: httpx.AsyncClient, manager: ManagerServer, stub: ManagerStub
) -> None:
    members = await updated(stub, version=7)
    report, places = await report_of(manager.address, 7)
    command = trace_text(draw_with_prediction(report, measured(), places)[0])
    answer = await client.get("/v1/versions/7/trace")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.text == command
    named = f'attachment; filename="update-{report.fence.epoch}-version-7.json"'
    assert answer.headers["content-disposition"] == named
    by_epoch = await client.get(f"/v1/updates/{report.fence.epoch}/trace")
    assert by_epoch.text == command
    assert by_epoch.json()["otherData"]["epoch"] == report.fence.epoch
    names = {each["name"] for each in by_epoch.json()["traceEvents"]}
    assert {"paused", "process_name", "bytes"} <= names
    assert members


async def test_an_older_update_to_the_same_version_is_had_by_its_epoch(config: ManagerConfig) -> None:
    assert config.ledger is not None
    await write_past_updates(config.ledger)
    async with ManagerServer(config) as server:
        again = weights_pb2.Identity(lineage="run-a", version=1, root=b"\1" * 32)
        await server.ledger.record_intent(9, Version.of(again), selection=["one"])
        fence = weights_pb2.Fence(cluster=server.ledger.cluster, epoch=9)
        report = manager_pb2.UpdateReport(fence=fence, identity=again, ok=True, seconds=1.0)
        await server.ledger.record_outcome(report)
        async with httpx.AsyncClient(base_url=f"http://{server.http_address}", trust_env=False) as client:
            last = read((await client.get("/v1/versions/1/trace?lineage=run-a")).text)
            first = read((await client.get("/v1/updates/1/trace")).text)
        assert (last.about["epoch"], first.about["epoch"]) == (9, 1)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v1/versions/1/trace", 400, "version 1 is one of several lineages: name one of run-a, run-b as lineage"),
        (
            "/v1/versions/9/trace",
            404,
            "no update to version 9 of lineage 'run-a' is known: its last ones were to 3, 2, 1",
        ),
        ("/v1/versions/9/trace?lineage=run-b", 404, "version 9 of lineage 'run-b' is known: its last ones were to 1"),
        ("/v1/versions/9/trace?lineage=run-c", 404, "none of this lineage is"),
        (f"/v1/versions/{(1 << 63) - 1}/trace", 404, "its last ones were to 3, 2, 1"),
        (f"/v1/versions/{1 << 70}/trace", 422, "path.version"),
        ("/v1/versions/-1/trace", 404, "no update to version -1 of lineage 'run-a' is known"),
        ("/v1/versions/x/trace", 422, "path.version"),
        ("/v1/versions/3/trace", 409, "the manager ended during epoch 4 (version 3 of lineage 'run-a')"),
        ("/v1/updates/4/trace", 409, "the manager ended during epoch 4 (version 3 of lineage 'run-a')"),
        ("/v1/updates/9/trace", 404, "the last ones are epoch 4 (version 3 of lineage 'run-a'); epoch 3 (version 2"),
        (f"/v1/updates/{(1 << 64) - 1}/trace", 404, "is kept: the last ones are epoch 4"),
        (f"/v1/updates/{1 << 70}/trace", 422, "path.epoch"),
        ("/v1/updates/-1/trace", 422, "path.epoch"),
    ],
)
async def test_what_has_no_timeline_is_told_with_what_has_one(
    config: ManagerConfig, path: str, status: int, says: str
) -> None:
    assert config.ledger is not None
    await write_past_updates(config.ledger)
    async with ManagerServer(config) as server:
        async with httpx.AsyncClient(base_url=f"http://{server.http_address}", trust_env=False) as client:
            answer = await client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    assert says in answer.json()["detail"]


async def test_a_manager_without_updates_says_so(client: httpx.AsyncClient) -> None:
    for path in ("/v1/versions/0/trace", "/v1/updates/0/trace"):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert "is kept" in answer.json()["detail"]


async def test_an_update_that_goes_on_has_no_timeline_yet(client: httpx.AsyncClient, stub: ManagerStub) -> None:
    trainer, member = await updated(stub)
    call = trainer.update()
    await trainer.seal()
    order = await member.stream.until(manager_pb2.Install)
    for path in (f"/v1/updates/{order.fence.epoch}/trace", "/v1/versions/1/trace"):
        answer = await client.get(path)
        assert (answer.status_code, "has no report yet" in answer.text) == (409, True), answer.text
    call.cancel()


async def save(page: Page, epoch: int) -> str:
    """What the button of an opened update saves."""
    await page.locator("button.update").first.click()
    async with page.expect_download() as saving:
        await page.get_by_role("button", name="Trace").click()
    download = await saving.value
    assert download.suggested_filename == f"update-{epoch}-version-0.json"
    return await asyncio.to_thread(Path(await download.path()).read_text)


@pytest.mark.slow
async def test_the_page_saves_it_and_says_why_not(
    client: httpx.AsyncClient, manager: ManagerServer, stub: ManagerStub
) -> None:
    members = await updated(stub)
    (line,) = (await client.get("/v1/history")).json()["updates"]
    route = f"/v1/updates/{line['epoch']}/trace"
    async with chromium() as browser:
        url = f"http://{manager.http_address}/"
        async with looking(browser, url) as page:
            text = await save(page, line["epoch"])
            assert text == (await client.get(route)).text
            assert json.loads(text)["otherData"]["version"] == 0
            assert page.url == url
        async with looking(browser, url, silent=False) as page:
            await page.route(f"**{route}", lambda way: way.fulfill(status=409, json={"detail": "<b>not</b> yet"}))
            await page.locator("button.update").first.click()
            button = page.get_by_role("button", name="Trace")
            await button.click()
            await says(page, ".inside .told", "there is no trace: <b>not</b> yet")
            assert await button.is_enabled()
    assert members


@pytest.mark.slow
async def test_with_tokens_the_page_shows_the_token_when_it_saves(config: ManagerConfig, keys: Keys) -> None:
    async with ManagerServer(config) as server, stub_at(server.address) as stub:
        await updated(stub)
    async with ManagerServer(replace(config, security=keys.asking)) as server, chromium() as browser:
        (record,) = await server.ledger.history()
        async with looking(browser, f"https://{server.http_address}/", False, ignore_https_errors=True) as page:
            await page.locator("#token").fill(token("viewer"))
            await page.keyboard.press("Enter")
            assert json.loads(await save(page, record.epoch))["otherData"]["epoch"] == record.epoch


async def test_with_tokens_it_wants_one_as_other_routes_that_read(asking: ManagerServer, keys: Keys) -> None:
    async with keys.browser(asking) as client:
        for path in ("/v1/versions/0/trace", "/v1/updates/1/trace"):
            assert (await client.get(path)).status_code == 401
            for role in ("viewer", "replica", "trainer", "operator"):
                answer = await client.get(path, headers={"Authorization": f"Bearer {token(role)}"})
                assert answer.status_code == 404, role
            assert (await client.get(path, headers={"Host": "evil.example"})).status_code in (401, 403)
