"""What an adapter declares for the demo: how a small server of its engine is started by the agent, and how it is asked
to go on from the opening words. The demo decides what is trained and asked; adapters decide the engine's arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar

from ckpt_engine.demo import task
from ckpt_engine.engine.kinds import UnknownAdapterError, engine_kind

DEFAULT = "reference"
"""The engine that is installed with the demo."""


class DemoServer(ABC):
    """One kind of engine in the demo."""

    package: ClassVar[str] = ""
    """The engine's Python package, and the extra of ckpt-engine that brings it; empty: it comes with the demo."""
    python: ClassVar[str] = ""
    """The environment variable that names the Python of another environment, which has that engine. `engines/run` sets
    it."""
    module: ClassVar[str] = ""
    """The server that such a Python runs."""
    start_seconds: ClassVar[float] = 600.0
    """Seconds for all processes of the demo to be up: engines import for long on a small machine."""

    address_variables: ClassVar[tuple[str, ...]] = ()
    """Variables that name the address at which parts of the engine talk to each other. With --hosts that is loopback,
    since the name of such a host leads elsewhere."""

    @abstractmethod
    def arguments(self, tensor_parallel: int) -> Sequence[str]:
        """Arguments of a server of `task.MODEL` with random weights, beside those that its adapter adds. The model is
        called `task.MODEL_NAME` where servers name theirs."""

    def environment(self, directory: str, tensor_parallel: int) -> Mapping[str, str]:
        """Variables of the server. directory: where it may leave files."""
        return {}

    @abstractmethod
    def question(self, prompt: Sequence[int]) -> tuple[str, Mapping[str, Any]]:
        """Route and body of a greedy request for `task.CONTINUATION_BYTES` tokens through the gateway. A token is a
        byte, so there is no tokenizer: token ids in, token ids out."""

    @abstractmethod
    def answer(self, content: Any) -> tuple[Sequence[int], Mapping[str, Any]]:
        """The token ids of an answer, and the gateway's report in it on versions and legs."""


class GenerateServer(DemoServer):
    """An engine that is asked at `/generate`, in token ids and `sampling_params`."""

    def question(self, prompt: Sequence[int]) -> tuple[str, Mapping[str, Any]]:
        sampling = {"max_new_tokens": task.CONTINUATION_BYTES, "temperature": 0, "ignore_eos": True}
        return "/generate", {"input_ids": list(prompt), "sampling_params": sampling}

    def answer(self, content: Any) -> tuple[Sequence[int], Mapping[str, Any]]:
        return content["output_ids"], content["meta_info"]["ckpt_engine"]


def server_of(engine: str) -> DemoServer:
    """How the demo starts an engine of this kind. Raises UnknownAdapterError if its adapter does not say."""
    kind = engine_kind(engine)
    if not kind.demo:
        raise UnknownAdapterError(f"the adapter of engine {kind.name!r} does not say how the demo would start one")
    server: DemoServer = resolve_name(kind.demo)
    return server
