"""What the demo's verdict rests on: what is asked of replicas, how answers are judged, what counts as success."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt_engine.demo import task
from ckpt_engine.demo.play import Act, Outcome
from ckpt_engine.demo.recital import Recital, recite, session_of
from ckpt_engine.demo.stage import DemoSettings
from ckpt_engine.gateway.choice import key_of, ranked
from ckpt_engine.report import UpdateReport
from ckpt_engine.v1 import manager_pb2, weights_pb2

EXPECTED = task.text()[task.PROMPT_BYTES : task.PROMPT_BYTES + task.CONTINUATION_BYTES]


def test_the_text_is_long_enough_and_plain() -> None:
    assert task.text()[: task.PROMPT_BYTES] == b"Call me Ishmael."
    assert len(EXPECTED) == task.CONTINUATION_BYTES >= 64
    assert task.text().isascii()


def test_weights_are_sent_from_the_first_step_to_the_last() -> None:
    assert task.milestones(6) == [0, 16, 32, 48, 64, 80]
    assert task.milestones(1) == [task.STEPS]
    assert task.milestones(task.STEPS + 1) == list(range(task.STEPS + 1))
    for wrong in (0, task.STEPS + 2):
        with pytest.raises(ValueError, match="updates"):
            task.milestones(wrong)


def test_the_model_is_one_that_transformers_builds(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(task.write_model(tmp_path / "model"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert config.dtype == torch.float32
    assert 3.2e6 < sum(parameter.numel() for parameter in model.parameters()) < 3.4e6


class _Engine(BaseHTTPRequestHandler):
    """Answers as the gateway does, with the text up to some byte and nonsense after it; the session stands for the
    replica."""

    right = len(EXPECTED)
    status = 200
    asked: dict[str, Any] = {}  # noqa: RUF012

    def do_POST(self) -> None:
        type(self).asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        spoken = [*EXPECTED[: self.right], *[0] * (len(EXPECTED) - self.right)]
        said = {"max_version": 48, "legs": [{"replica": self.headers["x-session-id"]}]}
        body = json.dumps({"output_ids": spoken, "meta_info": {"ckpt_engine": said}}).encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quietly."""


@pytest.fixture
def engine() -> Iterator[tuple[str, type[_Engine]]]:
    handler = type("Handler", (_Engine,), {})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join(60)
    server.server_close()


@pytest.mark.parametrize("right", [0, 1, 95, 96])
async def test_bytes_are_right_up_to_the_first_wrong_one(engine: tuple[str, type[_Engine]], right: int) -> None:
    url, handler = engine
    handler.right = right
    (recital,) = await recite("reference", url, ["one"])
    sampling = {"max_new_tokens": 96, "temperature": 0, "ignore_eos": True}
    assert handler.asked == {"input_ids": list(b"Call me Ishmael."), "sampling_params": sampling}
    assert (recital.replica, recital.version, recital.matching) == ("recital-0", 48, right)
    assert recital.matches == (right == 96)


async def test_a_closed_replica_is_an_error(engine: tuple[str, type[_Engine]]) -> None:
    url, handler = engine
    handler.status = 503
    with pytest.raises(httpx.HTTPStatusError):
        await recite("reference", url, ["one"])


def test_each_replica_has_a_session_of_its_own() -> None:
    names = ["replica-0", "replica-1", "replica-2"]
    assert [ranked(key_of(session_of(name, names), ()), names)[0] for name in names] == names


def act(version: int = 80) -> Act:
    identity = weights_pb2.Identity(version=version)
    report = manager_pb2.UpdateReport(ok=True, verified=True, identity=identity, bytes=1, seconds=0.1)
    return Act(
        UpdateReport(report), math.nan, [Recital(name, version, EXPECTED, len(EXPECTED), 0.1) for name in ("a", "b")]
    )


def changed(what: Act, **fields: object) -> Act:
    message = manager_pb2.UpdateReport()
    message.CopyFrom(what.report.message)
    for name, value in fields.items():
        setattr(message, name, value)
    return replace(what, report=UpdateReport(message))


def test_the_demo_succeeds_only_if_everything_did() -> None:
    settings = DemoSettings(updates=2)
    good = Outcome(settings, [act(0), act()])
    assert good.ok
    assert good.to_dict()["ok"] is True
    silent = replace(act(), recitals=[])
    stuttering = replace(act(), recitals=[act().recitals[0], replace(act().recitals[1], matching=95)])
    stale = replace(act(), recitals=[act().recitals[0], replace(act().recitals[1], version=0)])
    for acts in (
        [],
        [act()],
        [act(0), silent],
        [act(0), stuttering],
        [act(0), stale],
        [changed(act(0), verified=False), act()],
        [act(0), changed(act(), ok=False)],
    ):
        assert not Outcome(settings, acts).ok, acts
    assert not Outcome(settings, [act(0), act()], problem="a process ended").ok
    assert Outcome(settings, [stuttering, act()]).ok
