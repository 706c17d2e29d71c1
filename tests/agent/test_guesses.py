"""How many guesses of its draft a vLLM server has accepted, over a real connection: by its metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ckpt_engine.engine.adapter import AdapterSettings
from ckpt_engine.v1.manager_pb2 import Guesses
from ckpt_engine_adapters.vllm.driver import VllmAdapter

SECONDS = 60.0

METRICS = """\
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 56.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="tiny"} 1.2e+02
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="tiny"} 1.7957556003693058e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 3.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="tiny"} 100.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"} 3.0
"""
"""As vLLM 0.32 prints them, of two cores."""


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.metrics = METRICS
        self.status = 200
        self.asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked += 1
        content = self.server.metrics.encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def adapter(server: Server, tmp_path: Path) -> VllmAdapter:
    return VllmAdapter(AdapterSettings(f"http://127.0.0.1:{server.server_port}", tmp_path, "token"))


async def test_guesses_of_all_cores_are_added_up(adapter: VllmAdapter, server: Server) -> None:
    assert adapter.guesses is None
    await adapter.count_guesses(SECONDS)
    assert adapter.guesses == Guesses(guessed=176, accepted=103)
    server.status = 500
    await adapter.count_guesses(SECONDS)
    assert adapter.guesses == Guesses(guessed=176, accepted=103), "what was counted last stays"
    server.status, server.metrics = 200, METRICS.replace("56.0", "57.0")
    await adapter.count_guesses(SECONDS)
    assert adapter.guesses == Guesses(guessed=177, accepted=103)


async def test_a_server_without_a_draft_is_asked_once(adapter: VllmAdapter, server: Server) -> None:
    server.metrics = 'vllm:num_requests_running{engine="0"} 0.0\n'
    for _ in range(3):
        await adapter.count_guesses(SECONDS)
    assert (adapter.guesses, server.asked) == (None, 1)
