"""``ckpt-engine wake``: has replicas take their memory back."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_engine.commands.sleep import Manager, Names, Timeout, ask, show
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.v1 import manager_pb2


def wake(
    replicas: Names = None,
    manager: Manager = "127.0.0.1:50051",
    tag: Annotated[
        list[str] | None, typer.Option(help="weights or kv_cache, weights first; repeatable. Default: both.")
    ] = None,
    timeout: Timeout = Deadlines.sleep_wake,
) -> None:
    """Take the memory of replicas back. One whose weights were discarded serves again after its next update.

    Exits with 1 if one of them does not wake, and says why.
    """
    request = manager_pb2.WakeRequest(replicas=replicas or (), tags=tag or (), timeout_seconds=timeout)
    show(ask(manager, lambda stub: stub.Wake(request, timeout=timeout + Deadlines.call_grace)), "awake")
