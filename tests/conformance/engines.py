"""The seam of the conformance suite: what it must know of an engine to ask it anything.

One small class an engine. It starts a server as a replica, with random weights of its own, and speaks the engine's HTTP
API for whoever generates. What the engine can do is not said here: its adapter declares it, and the suite asks that.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx
import psutil

from ckpt_engine.engine.adapter import Capabilities, load_adapter
from ckpt_engine.gate.gate import Gate
from ckpt_engine_adapters.reference.gate import ReferenceGate
from ckpt_engine_adapters.sglang.gate import SglangGate
from ckpt_engine_adapters.transformers_serve.gate import TransformersGate
from ckpt_engine_adapters.vllm.gate import VllmGate
from tests.cluster import Cluster, Replica
from tests.engines import sglang_server, transformers_server, vllm_server

OTHER_VERSION = Path(__file__).parent / "other_version"
"""On PYTHONPATH it makes an engine say that it is 99.1.0."""

CALL_SECONDS = 120.0


class Span(NamedTuple):
    """Output tokens [start, end) and the version that made them, as the answer's body says."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Answer:
    """What a request came to. status: of HTTP, 0 if the server was not there. tokens: ids that were generated.

    ended: the engine's own word, "length" or "abort". spans: what the body says of versions, empty if it says nothing.
    admitted, root: of the gate's headers. cached: how many tokens of the prompt were not computed, of a whole answer.
    detail: of a refusal.
    """

    status: int
    tokens: tuple[int, ...] = ()
    ended: str = ""
    spans: tuple[Span, ...] = ()
    admitted: str = ""
    root: str = ""
    cached: int = 0
    detail: str = ""


class Engine(ABC):
    """How to start one kind of engine and how to ask it."""

    kind: ClassVar[str]
    gate: ClassVar[type[Gate]]
    start_seconds: ClassVar[float] = 600.0
    """The longest that a server takes to be there on a busy machine of two cores."""
    leaves_out: ClassVar[str] = ""
    """A tensor of checkpoints that its loader leaves out; empty: none is known."""
    tells_versions: ClassVar[bool] = False
    """Whether a whole answer says in its body which version made which token; then `spans` reads it."""
    salt_field: ClassVar[str] = ""
    """The field of a request that keeps the caches of its beginning apart; empty: the engine shares no caches."""

    @property
    def capabilities(self) -> Capabilities:
        """What its adapter declares."""
        return load_adapter(self.kind).CAPABILITIES

    def why_not_here(self) -> str:
        """Why no server can be started on this machine; empty: one can."""
        return ""

    @abstractmethod
    def start(
        self, cluster: Cluster, name: str, model: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> Replica:
        """A server of one worker with random weights, for the model whose config.json is in `model`; not waited for.

        options: to `ckpt-engine agent`. environment: of the agent and the server.
        """

    @abstractmethod
    def start_other_version(self, cluster: Cluster, name: str, model: Path, environment: Mapping[str, str]) -> Replica:
        """The same, of a server that says that it is version 99.1.0."""

    @abstractmethod
    def request(self, prompt: Sequence[int], count: int, stream: bool) -> tuple[str, dict[str, Any]]:
        """Route and body: greedy, exactly `count` tokens, no stop tokens."""

    @abstractmethod
    def read(self, body: Any) -> tuple[Sequence[int], str]:
        """Token ids, and why it ended, of a whole answer."""

    @abstractmethod
    def read_event(self, event: Any, before: int) -> tuple[Sequence[int], str]:
        """The new token ids and why it ended (empty: it has not), of an event of a stream that had `before` tokens."""

    def spans(self, body: Any) -> Sequence[Span]:
        """Of a whole answer, or of the last event of a stream."""
        return ()

    def cached(self, body: Any) -> int:
        """Tokens of the prompt that a whole answer's request found in caches."""
        return 0

    def complete(self, replica: Replica, prompt: Sequence[int], count: int, salt: str = "") -> Answer:
        """One request, answered whole. salt: for `salt_field`; empty: none is given."""
        route, body = self.request(prompt, count, stream=False)
        if salt and self.salt_field:
            body[self.salt_field] = salt
        try:
            response = httpx.post(replica.url + route, json=body, timeout=CALL_SECONDS)
        except httpx.HTTPError as error:
            return Answer(0, detail=str(error))
        if response.status_code != 200:
            return _refused(response)
        body = response.json()
        tokens, ended = self.read(body)
        return replace(_answer(response, tokens, ended, self.spans(body)), cached=self.cached(body))

    def stream(self, replica: Replica, prompt: Sequence[int], count: int, told: Callable[[int], None]) -> Answer:
        """One request, answered token by token. told: called with how many there are, after each event."""
        route, body = self.request(prompt, count, stream=True)
        tokens: list[int] = []
        ended = ""
        spans: Sequence[Span] = ()
        try:
            with httpx.stream("POST", replica.url + route, json=body, timeout=CALL_SECONDS) as response:
                if response.status_code != 200:
                    response.read()
                    return _refused(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not data or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    fresh, why = self.read_event(event, len(tokens))
                    tokens += fresh
                    spans = self.spans(event) if why else spans
                    ended = why or ended
                    told(len(tokens))
                return _answer(response, tokens, ended, spans)
        except httpx.HTTPError as error:
            return Answer(0, tuple(tokens), detail=str(error))

    def server(self, replica: Replica) -> psutil.Process:
        """The process that answers HTTP."""
        port = int(replica.url.rsplit(":", 1)[1])
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return psutil.Process(connection.pid)
        raise AssertionError(f"nobody listens at {replica.url}")

    def processes(self, replica: Replica) -> list[psutil.Process]:
        """All that the replica's agent has started, and the workers."""
        return [*psutil.Process(replica.process.pid).children(recursive=True), *replica.workers()]


class Reference(Engine):
    """Always here. Its version is that of our package, which its metadata tells."""

    kind = "reference"
    gate = ReferenceGate
    tells_versions = True

    def start(
        self, cluster: Cluster, name: str, model: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> Replica:
        return cluster.replica(name, self.kind, model, options=options, environment=environment)

    def start_other_version(self, cluster: Cluster, name: str, model: Path, environment: Mapping[str, str]) -> Replica:
        """Other metadata come first where the server starts, and not where the agent does: its Python is a wrapper."""
        folder = metadata_of(cluster.path, "ckpt-engine")
        wrapper = cluster.path / "python"
        wrapper.write_text(f'#!/bin/sh\ncd "{folder}" && exec "{sys.executable}" "$@"\n')
        wrapper.chmod(0o755)
        start = "import sys; from ckpt_engine.cli import main; sys.executable, *sys.argv[1:] = sys.argv[1:]; main()"
        command = [sys.executable, "-c", start, str(wrapper), "agent", "--manager", cluster.address]
        command += ["--engine", self.kind, "--model", str(model), "--name", name, "--engine-output", "--"]
        replica = Replica(cluster, name, command, {"OMP_NUM_THREADS": "1"})
        cluster.replicas.append(replica)
        return replica

    def request(self, prompt: Sequence[int], count: int, stream: bool) -> tuple[str, dict[str, Any]]:
        body = {"input_ids": list(prompt), "max_tokens": count, "temperature": 0, "stream": stream}
        return "/generate", body

    def read(self, body: Any) -> tuple[Sequence[int], str]:
        return body["output_ids"], body["finish_reason"]

    def read_event(self, event: Any, before: int) -> tuple[Sequence[int], str]:
        """The last event repeats the whole answer."""
        return ([event["token"]], "") if "token" in event else ([], event["finish_reason"])

    def spans(self, body: Any) -> Sequence[Span]:
        return [Span(**each) for each in body["weight_versions"]]


class Vllm(Engine):
    """vLLM's own server in an environment of its own."""

    kind = "vllm"
    gate = VllmGate
    salt_field = "cache_salt"

    def why_not_here(self) -> str:
        return "" if vllm_server.PYTHON else "CKPT_ENGINE_VLLM_PYTHON is not set; `make test-engines` sets it"

    def start(
        self, cluster: Cluster, name: str, model: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> Replica:
        return vllm_server.start_vllm(cluster, name, model, options=options, environment=environment)

    def start_other_version(self, cluster: Cluster, name: str, model: Path, environment: Mapping[str, str]) -> Replica:
        return self.start(
            cluster, name, model, (), {**environment, **other_version("vllm._version", vllm_server.OVERLAY)}
        )

    def request(self, prompt: Sequence[int], count: int, stream: bool) -> tuple[str, dict[str, Any]]:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": count, "temperature": 0, "stream": stream}
        return "/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True, "detokenize": False}

    def read(self, body: Any) -> tuple[Sequence[int], str]:
        choice = body["choices"][0]
        return choice["token_ids"] or [], choice["finish_reason"]

    def cached(self, body: Any) -> int:
        return int((body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def read_event(self, event: Any, before: int) -> tuple[Sequence[int], str]:
        if not event.get("choices"):
            return [], ""
        choice = event["choices"][0]
        return choice.get("token_ids") or [], choice.get("finish_reason") or ""


class Sglang(Engine):
    """SGLang's own server in an environment of its own, its kernels stubbed."""

    kind = "sglang"
    gate = SglangGate
    leaves_out = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tells_versions = True
    salt_field = "extra_key"

    def why_not_here(self) -> str:
        return "" if sglang_server.PYTHON else "CKPT_ENGINE_SGLANG_PYTHON is not set; `make test-engines` sets it"

    def start(
        self, cluster: Cluster, name: str, model: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> Replica:
        return sglang_server.start_sglang(cluster, name, model, options=options, environment=environment)

    def start_other_version(self, cluster: Cluster, name: str, model: Path, environment: Mapping[str, str]) -> Replica:
        return self.start(cluster, name, model, (), {**environment, **other_version("sglang.version", "")})

    def request(self, prompt: Sequence[int], count: int, stream: bool) -> tuple[str, dict[str, Any]]:
        return "/generate", {**sglang_server.body_of(prompt, count), "stream": stream}

    def read(self, body: Any) -> tuple[Sequence[int], str]:
        return body["output_ids"], body["meta_info"]["finish_reason"]["type"]

    def cached(self, body: Any) -> int:
        return int(body["meta_info"]["cached_tokens"])

    def read_event(self, event: Any, before: int) -> tuple[Sequence[int], str]:
        """Each event repeats all tokens so far."""
        reason = event["meta_info"]["finish_reason"]
        return event["output_ids"][before:], reason["type"] if reason else ""

    def spans(self, body: Any) -> Sequence[Span]:
        told = body["meta_info"].get("weight_versions") or ()
        return [Span(int(each["version"].split(":")[0]), each["start"], each["end"]) for each in told]


class Transformers(Engine):
    """transformers' own server, in the environment of the tests. Its version is that of its package's metadata."""

    kind = "transformers"
    gate = TransformersGate
    leaves_out = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tells_versions = True

    def why_not_here(self) -> str:
        return transformers_server.why_not_here()

    def start(
        self, cluster: Cluster, name: str, model: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> Replica:
        return transformers_server.start_transformers(cluster, name, model, options=options, environment=environment)

    def start_other_version(self, cluster: Cluster, name: str, model: Path, environment: Mapping[str, str]) -> Replica:
        path = os.pathsep.join((str(OTHER_VERSION), str(metadata_of(cluster.path, "transformers"))))
        return self.start(cluster, name, model, (), {**environment, "PYTHONPATH": path})

    def request(self, prompt: Sequence[int], count: int, stream: bool) -> tuple[str, dict[str, Any]]:
        body = {"prompt": transformers_server.text_of(prompt), "max_tokens": count, "temperature": 0, "stream": stream}
        return "/v1/completions", body

    def read(self, body: Any) -> tuple[Sequence[int], str]:
        choice = body["choices"][0]
        return transformers_server.tokens_of(choice["text"]), choice["finish_reason"]

    def read_event(self, event: Any, before: int) -> tuple[Sequence[int], str]:
        """An event with an error is the last one of a request that was ended early."""
        if "error" in event:
            return [], "abort"
        choice = event["choices"][0]
        return transformers_server.tokens_of(choice["text"]), choice.get("finish_reason") or ""

    def spans(self, body: Any) -> Sequence[Span]:
        return [Span(**each) for each in body.get("weight_versions", ())]


def metadata_of(path: Path, package: str) -> Path:
    """A folder with metadata that say that `package` is 99.1.0, for the front of PYTHONPATH."""
    folder = path / "other-metadata"
    metadata = folder / f"{package.replace('-', '_')}-99.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.1.0\n")
    return folder


def other_version(module: str, path: str) -> dict[str, str]:
    """The environment in which an engine that keeps its version in `module` says 99.1.0. path: its PYTHONPATH."""
    return {
        "PYTHONPATH": os.pathsep.join(each for each in (str(OTHER_VERSION), path) if each),
        "CKPT_ENGINE_TEST_VERSION_MODULE": module,
    }


def _refused(response: httpx.Response) -> Answer:
    try:
        detail = str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = response.text
    return Answer(response.status_code, detail=detail, **_headers(response))


def _answer(response: httpx.Response, tokens: Sequence[int], ended: str, spans: Sequence[Span]) -> Answer:
    return Answer(200, tuple(tokens), ended, tuple(spans), **_headers(response))


def _headers(response: httpx.Response) -> dict[str, str]:
    headers = response.headers
    named = {"admitted": "x-ckpt-engine-admitted-version", "root": "x-ckpt-engine-admitted-root"}
    return {field: headers.get(header, "") for field, header in named.items()}


ENGINES: tuple[Engine, ...] = (Reference(), Vllm(), Sglang(), Transformers())
