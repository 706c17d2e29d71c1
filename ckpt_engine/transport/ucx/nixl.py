"""The part of NIXL that a helper needs: one agent with UCX. Loaded in helper processes only."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from ckpt_engine.transport.ucx.packages import installed

PROGRESS_MICROSECONDS = 10_000
"""The longest sleep of NIXL's own thread between two polls of the network. With 0, which NIXL's Python interface always
takes, that thread never sleeps and takes a whole core."""

Area = tuple[int, int]
"""Address and length."""


class Agent:
    """A NIXL agent. name: unique everywhere. progress: whether NIXL runs a thread that answers peers while this one
    does something else.

    Raises ImportError, RuntimeError and what NIXL raises, which are subclasses of Exception without a common one.
    """

    def __init__(self, name: str, progress: bool) -> None:
        api, bindings = _load()
        config = bindings.nixlAgentConfig()
        config.useProgThread = progress
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        config.pthrDelay = PROGRESS_MICROSECONDS
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.agent = bindings.nixlAgent(name, config)
        self._agent.create_backend("UCX", {})

    def register(self, areas: list[Area]) -> Any:
        """Registers memory; returns what `deregister` takes."""
        return self._agent.register_memory([(*area, 0, "") for area in areas], "DRAM", ["UCX"])

    def deregister(self, registered: Any) -> None:
        """Takes a registration back: its keys are invalid from now on."""
        self._agent.deregister_memory(registered, ["UCX"])

    def metadata(self) -> bytes:
        """Metadata with which another agent reads the registered memory."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def connect(self, metadata: bytes) -> str:
        """Makes another agent known; returns its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def prepare(self, peer: str, local: list[Area], remote: list[Area]) -> Any:
        """Prepares a read, which may be begun many times, one at a time."""
        return self._agent.initialize_xfer("READ", self._areas(local), self._areas(remote), peer)

    def begin(self, read: Any) -> bool:
        """Begins a read; returns whether it has ended already."""
        return self._is_done(self._agent.transfer(read))

    def finished(self, read: Any) -> bool:
        """Whether a read has ended. Raises if it has failed."""
        return self._is_done(self._agent.check_xfer_state(read))

    def _areas(self, areas: list[Area]) -> Any:
        return self._agent.get_xfer_descs([(*area, 0) for area in areas], "DRAM")

    def _is_done(self, state: str) -> bool:
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"NIXL says {state}")
        return state == "DONE"


def _load() -> tuple[ModuleType, ModuleType]:
    package = installed()
    if package is None:
        raise ImportError("NIXL is not installed")
    return importlib.import_module(f"{package}._api"), importlib.import_module(f"{package}._bindings")
