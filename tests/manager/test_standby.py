"""Several managers on one ledger: real processes and a real PostgreSQL, of which any is killed, stopped or cut off."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from scripted_members import ScriptedReplica, stub_at

from ckpt_engine.client import Client
from ckpt_engine.core.problems import CkptEngineError, ErrorCode
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.manager.standby import run_manager
from ckpt_engine.manager.term import Term
from ckpt_engine.security.server import ServerSecurity
from tests.postgresql import PASSWORD, Server
from tests.shared_ledger import Manager, roles, two_managers
from tests.waiting import PATIENCE, eventually


@pytest.fixture
def pair(postgresql: Server, tmp_path: Path) -> Iterator[list[Manager]]:
    with two_managers(postgresql.new_database(), tmp_path) as made:
        yield made


def test_one_leads_until_it_is_stopped_killed_or_ended(pair: list[Manager]) -> None:
    """All of it with two processes, since each takes seconds to start."""
    eventually("both say what they are", PATIENCE, lambda: check_answers(*roles(pair)))

    leader, standby = roles(pair)
    leader.send(signal.SIGSTOP)
    begun = time.monotonic()
    try:
        eventually("the other one leads", PATIENCE, standby.leads)
        print(f"another manager led {time.monotonic() - begun:.1f} s after a stop")
    finally:
        leader.send(signal.SIGCONT)
    eventually("both say what they are", PATIENCE, lambda: check_answers(*roles(pair)))
    assert "standing by" in leader.log

    leader, standby = roles(pair)
    leader.send(signal.SIGKILL)
    begun = time.monotonic()
    eventually("the other one leads", PATIENCE, standby.leads)
    print(f"another manager led {time.monotonic() - begun:.1f} s after a kill")

    standby.send(signal.SIGTERM)
    assert standby.process.wait(PATIENCE) == 0
    for each in pair:
        assert "Traceback" not in each.log
        assert PASSWORD not in each.log


async def test_a_leader_that_no_member_reaches_any_more_ends(postgresql: Server, config: ManagerConfig) -> None:
    """Its term, which is long, goes on."""
    address = postgresql.new_database()
    term = Term(address, 20.0, 10.0)
    await term.prepare("")
    assert await term.take("a:1") is None
    config = replace(config, ledger=address, deadlines=replace(config.deadlines, lease=1.0, heartbeat=0.5, term=1.0))
    async with ManagerServer(config, term) as server, stub_at(server.address) as stub:
        serving = asyncio.create_task(server.serve(asyncio.Event()))
        replica = ScriptedReplica(stub)
        await replica.open()
        await asyncio.wait_for(serving, PATIENCE)  # no heartbeat comes, and no goodbye
        assert server.deserted
    await term.release()
    await term.close()


@pytest.mark.parametrize(("listen", "advertise"), [("0.0.0.0:50051", ""), ("[::]:50051", ""), ("a:50051", "0.0.0.0")])
async def test_an_address_that_names_no_manager_is_refused(listen: str, advertise: str) -> None:
    """Callers would be sent there."""
    config = ManagerConfig(
        listen, ledger="postgresql://db/ledger", advertise=advertise, security=ServerSecurity(insecure=True)
    )
    with pytest.raises(CkptEngineError, match=r"Say with --advertise at which name or IP .* --advertise NAME:50051"):
        await run_manager(config, asyncio.Event())


def check_answers(leader: Manager, standby: Manager) -> bool:
    """Whether both answer as what they are."""
    with Client(leader.address) as client, Client(standby.address) as other:
        try:
            cluster = client.status().fence.cluster
            other.status()
        except CkptEngineError as error:
            refusal = error
        else:
            return False
    url = f"http://{standby.http}"
    health = httpx.get(f"{url}/healthz", timeout=PATIENCE)
    refused = [httpx.get(f"{url}{path}", timeout=PATIENCE) for path in ("/readyz", "/v1/status")]
    ready = httpx.get(f"http://{leader.http}/readyz", timeout=PATIENCE)
    return (
        refusal.code == ErrorCode.UNAVAILABLE
        and f"this manager stands by: the one at {leader.address} leads" in refusal.problem.message
        and health.json()["status"] == "standby"
        and all(each.status_code == 503 and leader.address in each.json()["detail"] for each in refused)
        and ready.json().get("cluster") == cluster
    )
