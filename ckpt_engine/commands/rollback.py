"""``ckpt-engine rollback``: bring replicas back to a version that is still held."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.client import Client
from ckpt_engine.commands.asking import Manager, Pool
from ckpt_engine.commands.choices import PauseMode
from ckpt_engine.commands.options import KeepDraft, Timeout
from ckpt_engine.commands.progress import Verbose, interrupt_exit, progress_display, refusal_exit, report_exit
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.options import RollbackOptions


def rollback(
    version: Annotated[int, typer.Option(min=0, help="The version to go back to, by its number.")],
    manager: Manager = MANAGER,
    lineage: Annotated[
        str | None,
        typer.Option(help="Lineage of the version. Default: the only one in which it is held."),
    ] = None,
    pool: Pool = "",
    replica: Annotated[
        list[str] | None, typer.Option(help="Only this replica; repeatable. Default: all of the pool.")
    ] = None,
    pause_mode: Annotated[
        PauseMode | None, typer.Option(help="What becomes of running requests. Default: the engine's.")
    ] = None,
    timeout: Timeout = None,
    keep_draft: KeepDraft = False,
    verbose: Verbose = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Bring replicas back to a version that relays still hold. No trainer is needed.

    The next update's number goes on above the highest ever used. Until then replicas that start are brought to the
    version of the rollback.

    Exits with 0 only if all of them serve that version, verified. A version without a holder is refused, with a list of
    those that are held.
    """
    wishes = {
        "pause_mode": pause_mode,
        "timeout": timeout,
        "pool": pool,
        "replicas": tuple(replica or ()),
        "draft": "keep" if keep_draft else "update",
    }
    try:
        with progress_display(quiet=json_output) as display:
            with Client(manager) as client:
                report = client.rollback(
                    version,
                    lineage=lineage,
                    on_progress=display.progress,
                    **cast(RollbackOptions, wishes),
                )
    except CkptEngineError as error:
        raise refusal_exit("rollback", error, json_output) from error
    except KeyboardInterrupt:
        raise interrupt_exit("rollback") from None
    raise report_exit(report, json_output, verbose)
