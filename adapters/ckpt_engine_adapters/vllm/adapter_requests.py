"""Which version of an adapter a request gets, in each of vLLM's API processes.

It decides at admission: `model: "policy"` is the newest version that all workers hold for the base that they hold,
"policy@7" exactly that one. From then on the request is pinned to it, and the version is kept until its answer has
ended. It does not decide what the workers hold (adapter_shelf.py), nor when the base may be asked (the gate).

vLLM looks an adapter up by the request's `model` in one mapping of each API process (`lora_requests`); ours takes its
place, so every process knows the same versions by the same names and numbers, from the shelves' pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, ValuesView
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_engine.core.adapters import NOT_HERE, ROOT_HEADER, VERSION_HEADER, asked_version, served_name
from ckpt_engine.core.json_text import load_json
from ckpt_engine.gate.asgi import Message, Send, refuse, with_headers
from ckpt_engine.gate.shelf import Shelf, ShelfPlace
from ckpt_engine.v1 import weights_pb2
from ckpt_engine_adapters.vllm.adapter_names import vllm_request


class AdapterNotHereError(Exception):
    """The adapter cannot be used now; the message says why."""


@dataclass
class PinnedRequest:
    """One request's version, kept until `close`."""

    model: str  # as the request names it
    identity: weights_pb2.Identity
    place: ShelfPlace
    refusal: str = ""  # why vLLM's core did not get it, for people

    @property
    def base_root(self) -> bytes:
        """The root of the base that its version is for."""
        return self.place.base_of(self.identity)

    def naming(self, send: Send) -> Send:
        """A `send` that adds the headers that name the version. vLLM's answer (500) to a request that was refused on
        its way to the core becomes a 503 like the gate's own; a stream that has begun ends with vLLM's event of an
        error."""
        headers = [
            (VERSION_HEADER.encode(), served_name(self.identity).encode()),
            (ROOT_HEADER.encode(), self.identity.root.hex().encode()),
        ]
        replaced = False

        async def send_with_adapter(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start":
                if self.refusal:
                    replaced = True
                    await refuse("http", send, 503, self.refusal, NOT_HERE, 1)
                else:
                    message = with_headers(message, headers)
            if not replaced:
                await send(message)

        return send_with_adapter


_PINNED: ContextVar[PinnedRequest | None] = ContextVar("ckpt_engine_adapter", default=None)


class AdapterDoor:
    """The adapters of one engine, in one API process. Used on its event loop."""

    def __init__(self, engine: Path, versions: Mapping[str, int]) -> None:
        """engine: path of its runtime directory. versions: how many it keeps of each adapter."""
        self._shelves = {name: Shelf(engine, name, number) for name, number in versions.items()}
        self._words = [f'"{name}'.encode() for name in versions]  # one of them is in a body that asks for an adapter

    @contextmanager
    def pinned(self, body: bytes, base: weights_pb2.Identity | None) -> Iterator[PinnedRequest | None]:
        """Pins the request with this body to a version for as long as it is inside; None: it asks for no adapter. base:
        the version that the workers hold. Raises AdapterNotHereError."""
        pin = self._pin(body, base)
        if pin is None:
            yield None
            return
        token = _PINNED.set(pin)
        try:
            yield pin
        finally:
            _PINNED.reset(token)
            pin.place.leave()

    def _pin(self, body: bytes, base: weights_pb2.Identity | None) -> PinnedRequest | None:
        if not any(word in body for word in self._words) and b"\\u" not in body:
            return None
        model: Any = None
        with suppress(ValueError, AttributeError):
            model = load_json(body).get("model")
        if not isinstance(model, str):
            return None
        name, version = asked_version(model)
        shelf = self._shelves.get(name)
        if shelf is None:
            return None
        for _ in range(len(shelf.places) + 1):  # a version may go in between; a newer one is there then
            for place, identity in self._usable(shelf, base):
                if version in (None, identity.version) and place.use(identity):
                    return PinnedRequest(model, identity, place)
        raise AdapterNotHereError(self._why(shelf, version, base))

    def _usable(
        self, shelf: Shelf, base: weights_pb2.Identity | None
    ) -> Iterator[tuple[ShelfPlace, weights_pb2.Identity]]:
        for place, identity in shelf.held():
            if base is not None and place.base_of(identity) == base.root:
                yield place, identity

    def _why(self, shelf: Shelf, version: int | None, base: weights_pb2.Identity | None) -> str:
        wish = shelf.adapter if version is None else f"{shelf.adapter}@{version}"
        usable = [served_name(identity) for _, identity in self._usable(shelf, base)]
        others = [served_name(identity) for _, identity in shelf.held() if served_name(identity) not in usable]
        words = "it is not here" if version is not None else "no version of it is here"
        if usable:
            words += f" ({', '.join(usable)} {'is' if len(usable) == 1 else 'are'})"
        if others:
            words += f"; {', '.join(others)} {'is' if len(others) == 1 else 'are'} for another base than is served now"
        return f"adapter {wish}: {words}"

    def usable(self, base: weights_pb2.Identity | None) -> dict[str, weights_pb2.Identity]:
        """What can be asked for now, by exact names, sorted."""
        found = {
            served_name(identity): identity
            for shelf in self._shelves.values()
            for _, identity in self._usable(shelf, base)
        }
        return dict(sorted(found.items()))

    def owns(self, lora: Any) -> bool:
        """Whether a LoRARequest of vLLM's is one of these."""
        return lora is not None and asked_version(lora.lora_name)[0] in self._shelves


class AdapterModels(Mapping[str, Any]):
    """vLLM's `lora_requests`. A request finds the version that it is pinned to, and nothing else; what is listed is all
    that can be asked for now."""

    def __init__(self, door: AdapterDoor, gate: Any) -> None:
        """gate: with `base()`, the version that the workers hold."""
        self._door = door
        self._gate = gate

    def __getitem__(self, model: str) -> Any:
        pin = _PINNED.get()
        if pin is None or model != pin.model:
            raise KeyError(model)
        return _request(pin.identity)

    def __contains__(self, model: object) -> bool:
        pin = _PINNED.get()
        return pin is not None and model == pin.model

    def values(self) -> ValuesView[Any]:
        """All that can be asked for now; `/v1/models` lists it."""
        found = self._door.usable(self._gate.base())
        return {name: _request(identity) for name, identity in found.items()}.values()

    def __iter__(self) -> Iterator[str]:
        """Their exact names."""
        return iter(self._door.usable(self._gate.base()))

    def __len__(self) -> int:
        return len(self._door.usable(self._gate.base()))


def _request(identity: weights_pb2.Identity) -> Any:
    from vllm.lora.request import LoRARequest

    return vllm_request(LoRARequest, identity)


async def end_running(engine: Any, door: AdapterDoor) -> int:
    """Ends the requests of this API process that use an adapter, with what they have. Returns how many they were."""
    states = engine.output_processor.request_states
    ids = [key for key, state in list(states.items()) if door.owns(getattr(state, "lora_request", None))]
    if ids:
        await engine.abort(ids, internal=True)
    return len(ids)


def guard_sends(engine: Any, door: AdapterDoor, admitted_base: Callable[[], weights_pb2.Identity | None]) -> None:
    """Has the last step before vLLM's core refuse a request with an adapter if the base is not the one any more for
    which the request was pinned to a version: it would be computed with another base. admitted_base: the version that
    the workers hold, if the gate lets requests in now; else None. To be called once."""
    core = engine.engine_core
    send = core.add_request_async

    async def send_if_base_stays(request: Any) -> None:
        if door.owns(request.lora_request):
            base, pin = admitted_base(), _PINNED.get()
            if base is None or pin is None or pin.base_root != base.root:
                refusal = f"adapter {request.lora_request.lora_name}: its base is being updated, or was: ask again"
                if pin is not None:
                    pin.refusal = refusal
                engine.output_processor.abort_requests([request.request_id], internal=True)
                raise ValueError(refusal)
        await send(request)

    core.add_request_async = send_if_base_stays
