"""Every wait has a deadline from one documented configuration, or is listed here with what ends it."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from ckpt_engine.core.deadlines import ENVIRONMENT, Deadlines

ROOT = Path(__file__).parent.parent

ENDED_OTHERWISE = {
    ("ckpt_engine/agent/blobs.py", "done.result()"): "it is done",
    ("ckpt_engine/agent/following.py", "self._process.wait()"): "it has ended: only its log is drained",
    ("ckpt_engine/agent/following.py", "stop.wait()"): "an agent serves until it is stopped",
    ("ckpt_engine/agent/following.py", "task.result()"): "it is done",
    ("ckpt_engine/agent/launched.py", "self._process.wait()"): "watched beside it, and cancelled",
    ("ckpt_engine/agent/link.py", "socket.recv()"): "a link waits for messages; whoever uses it counts the lease",
    ("ckpt_engine/agent/process.py", "end.result()"): "it is done",
    ("ckpt_engine/agent/process.py", "self._process.wait()"): "the launcher, which always ends: see launcher.py",
    ("ckpt_engine/agent/process.py", "self.wait()"): "bounded by whoever calls, or the launcher was killed",
    ("ckpt_engine/agent/own_relay.py", "process.wait()"): "a relay serves until it is stopped, as it is at the end",
    (
        "ckpt_engine/agent/session.py",
        "self._launch.wait()",
    ): "the manager's answer, its silence for a lease, or the end",
    ("ckpt_engine/agent/reports.py", "self._complete.wait()"): "inside wait_for",
    ("ckpt_engine/agent/session.py", "stop.wait()"): "an agent serves until it is stopped",
    ("ckpt_engine/gateway/app.py", "self._empty.wait()"): "inside wait_for",
    ("ckpt_engine/gateway/app.py", "self.ending.wait()"): "cancelled with its request",
    ("ckpt_engine/gateway/placing.py", "self._news.wait()"): "inside wait_for",
    ("ckpt_engine/gateway/workers.py", "worker.poll()"): "it asks, and waits for nothing",
    ("ckpt_engine/gateway/server.py", "stop.wait()"): "a gateway serves until it is stopped",
    ("ckpt_engine/digest/host.py", "each.result()"): "it digests, and waits for nothing",
    ("ckpt_engine/delta/table.py", "waiting.popleft().result()"): "it compares, and waits for nothing",
    ("ckpt_engine/integrations/ray/keeper.py", "process.wait()"): "a command serves until it is stopped",
    ("ckpt_engine/integrations/ray/keeper.py", "self._leave.wait()"): "inside wait_for",
    ("ckpt_engine/integrations/verl/asking.py", "cut.wait()"): "cancelled once the answer is there, which has a limit",
    ("ckpt_engine/integrations/verl/asking.py", "reading.result()"): "it is done",
    ("ckpt_engine/integrations/verl/asking.py", "self._changed.wait()"): "inside timeout",
    ("ckpt_engine/relay/pipeline.py", "found.result()"): "it digests, once the batch was brought",
    (
        "ckpt_engine/relay/pipeline.py",
        "brought_first.result()",
    ): "bringing looks at the filling's deadline while it waits for a network; else it copies",
    ("ckpt_engine/relay/process.py", "self._final_problem.result()"): "it is done",
    ("ckpt_engine/relay/process.py", "stop.wait()"): "a relay serves until it is stopped",
    ("ckpt_engine/gate/waiting.py", "self.reading.result()"): "it is done",
    ("ckpt_engine/manager/publishers.py", "process.wait()"): "inside wait_for",
    ("ckpt_engine/manager/publishers.py", "self._turn.acquire()"): "inside wait_for",
    ("ckpt_engine/manager/publishers.py", "events.get()"): "what runs has a deadline, and says how it ended",
    ("ckpt_engine/publishing/process.py", "select.poll()"): "it makes an object, and waits for nothing",
    ("ckpt_engine/manager/sessions.py", "reading.result()"): "it is done",
    ("ckpt_engine/manager/sessions.py", "writing.result()"): "it is done",
    ("ckpt_engine/manager/service.py", "event.wait()"): "a manager serves until it is stopped, or its machine failed",
    ("ckpt_engine/manager/shell.py", "self._idle.wait()"): "inside wait_for",
    ("ckpt_engine/shell/outbox.py", "self._changed.wait()"): "a stream waits for messages; whoever has it closes it",
    ("ckpt_engine/copy/host_copy.py", "helper.join()"): "it copies, and waits for nothing",
    ("ckpt_engine/transport/tcp/asker.py", "reading.poll()"): "a look, which waits for nothing",
    ("ckpt_engine/transport/ucx/helpers.py", "select.poll()"): "it makes an object, and waits for nothing",
    ("ckpt_engine/relay/asking.py", "thread.join()"): "its connection was shut before",
    ("ckpt_engine/transport/tcp/sockets.py", "select.poll()"): "it makes what looks, and waits for nothing",
    (
        "ckpt_engine/install/early_copy.py",
        "self.join()",
    ): "it brings in pieces, looks between them whether it was stopped, and asks its agent with a deadline",
    ("ckpt_engine/copy/staging.py", "fills[number].result()"): "it copies, and waits for nothing",
    ("ckpt_engine/demo/play.py", "asyncio.Event().wait()"): "it shows the page until it is interrupted, and says so",
    ("ckpt_engine/manager/standby.py", "stop.wait()"): "waited for with a timeout around it",
    ("ckpt_engine/demo/stage.py", "self._lines.get()"): "waited for with a timeout beside the process",
    ("ckpt_engine/demo/stage.py", "reading.result()"): "it is done",
}
WAITS = {"wait", "join", "result", "get", "acquire", "poll", "recv", "communicate"}


def test_every_deadline_is_documented_with_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    documented = {name: float(value) for name, value in re.findall(r"^\| `(\w+)` \| ([0-9.]+) \|", page, re.M)}
    assert documented == {field.name: field.default for field in fields(Deadlines)}


def test_no_wait_is_without_an_end() -> None:
    found = set()
    for path in sorted((ROOT / "ckpt_engine").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("ckpt_engine/v1/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or node.args or node.keywords:
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
                found.add((name, ast.unparse(node)))
    assert found == set(ENDED_OTHERWISE), "a wait without a timeout came or went: give it one, or say here what ends it"


def test_settings_come_from_the_environment() -> None:
    assert Deadlines.from_environment({}) == Deadlines()
    assert Deadlines.from_environment({ENVIRONMENT: "lease=20, quiesce=90"}) == Deadlines(lease=20.0, quiesce=90.0)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("leese=20", "'leese=20' sets no deadline"),
        ("lease", "must be NAME=SECONDS"),
        ("lease=long", "deadline lease is a number of seconds, not 'long'"),
        ("lease=0", "must be positive"),
        ("lease=nan", "must be positive"),
        ("update=inf", "must be positive and at most 1000000 s"),
        ("lease=1 heartbeat=1", "ends before a second heartbeat"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        Deadlines.from_environment({ENVIRONMENT: settings})
    assert ENVIRONMENT in str(caught.value)
