"""``ckpt-engine wake``: has replicas take their memory back."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.asking import Manager, Names, Pool, ask_manager
from ckpt_engine.commands.choices import Tag
from ckpt_engine.commands.sleep import Timeout, show
from ckpt_engine.core.deadlines import Deadlines


def wake(
    replicas: Names = None,
    manager: Manager = MANAGER,
    pool: Pool = "",
    tag: Annotated[list[Tag] | None, typer.Option(help="Weights first; repeatable. Default: both.")] = None,
    timeout: Timeout = Deadlines.sleep_wake,
) -> None:
    """Take the memory of replicas back. One whose weights were discarded serves again after its next update.

    Exits with 1 if one of them does not wake, and says why.
    """
    what = f"wake, up to {timeout:g} s"
    names, tags = tuple(replicas or ()), tuple(tag or ())
    show(
        ask_manager(manager, lambda client: client.wake(tags, replicas=names, pool=pool, timeout=timeout), what),
        "awake",
    )
