"""``ckpt-engine update``: bring all replicas to the weights of a checkpoint directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.client import Client
from ckpt_engine.commands.asking import Manager, Pool
from ckpt_engine.commands.choices import Newer, PauseMode, Policy, Strategy, Until
from ckpt_engine.commands.options import KeepDraft, Timeout, configured_deadlines
from ckpt_engine.commands.progress import Verbose, interrupt_exit, progress_display, refusal_exit, report_exit
from ckpt_engine.connection import checked_address
from ckpt_engine.core.problems import CkptEngineError, not_found
from ckpt_engine.extras import require
from ckpt_engine.options import UpdateOptions

CONNECT_SECONDS = 10.0
"""The longest that a user at a terminal waits for a manager; a training run waits longer."""

LINEAGE = "checkpoint"
"""Default lineage of checkpoint directories: repeated calls count versions in one lineage."""


def update(
    checkpoint: Annotated[
        Path | None, typer.Option(help="Directory of safetensors files, or one such file, read on this host.")
    ] = None,
    from_directory: Annotated[
        Path | None,
        typer.Option(help="The same, read on the manager's host, which must allow it (manager --allow-directory)."),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="The same for the draft model (speculative decoding), which becomes a part of the version."),
    ] = None,
    keep_draft: KeepDraft = False,
    manager: Manager = MANAGER,
    version: Annotated[
        int | None,
        typer.Option(min=0, help="Number of the version; must rise. Default: the lineage's last plus one."),
    ] = None,
    lineage: Annotated[
        str | None,
        typer.Option(
            help="Lineage in which versions count; lower numbers need another one. Default: checkpoint, or directory "
            "with --from-directory."
        ),
    ] = None,
    pause_mode: Annotated[
        PauseMode | None, typer.Option(help="What becomes of running requests. Default: the engine's.")
    ] = None,
    timeout: Timeout = None,
    min_replicas: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Replicas that suffice: refuse to update fewer, exit with 0 if so many serve. Default: all.",
        ),
    ] = None,
    pool: Pool = "",
    replica: Annotated[
        list[str] | None, typer.Option(help="Only this replica; repeatable. Default: all of the pool.")
    ] = None,
    prefetch: Annotated[
        Policy, typer.Option(help="Whether relays bring the weights before anything is paused.")
    ] = Policy.AUTO,
    until: Annotated[
        Until,
        typer.Option(
            help="Return when all replicas have an outcome, when relays hold the weights, or after the first wave."
        ),
    ] = Until.INSTALLED,
    strategy: Annotated[
        Strategy, typer.Option(help="How it is deployed: to all replicas at once, or in waves (docs/deployments.md).")
    ] = Strategy.ALL,
    wave: Annotated[
        float | None,
        typer.Option(help="Replicas of a wave, or below 1 their share. Default: 1.", metavar="NUMBER"),
    ] = None,
    condition: Annotated[
        list[str] | None,
        typer.Option(help="Needed between waves: time=SECONDS, person, errors=SHARE; repeatable. Canary: person."),
    ] = None,
    newer: Annotated[
        Newer | None,
        typer.Option(help="If the lineage's next version comes before it is decided: undo it, or have that wait."),
    ] = None,
    check_finite: Annotated[
        bool, typer.Option("--check-finite", help="Refuse weights that hold NaN or infinity.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report what an update would do: pause and write nothing.")
    ] = False,
    verbose: Verbose = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Bring all replicas to the weights of a checkpoint directory: --checkpoint DIR, or --from-directory DIR.

    The files are read in place by every replica of this host; they must not change meanwhile. Repeated calls use one
    lineage, so versions rise from call to call, whichever directory they name.

    With --from-directory the manager publishes, and this command needs neither the files nor torch. Called again for
    files that are unchanged and served, it changes nothing.

    Exits with 0 only if every registered replica serves the new weights, verified, also those that are not connected;
    with --min-replicas if at least so many do, with --replica if those do, with --until held if relays hold them.
    Replicas that cannot take part are left out and named.

    With a --strategy it returns when the deployment is decided (`ckpt-engine deploy` shows and decides it), and exits
    with 0 only if the version was deployed.

    With --dry-run engines' loaders are recorded and plans are made, and no more. For each replica it prints the edges
    over which it would get the weights, or why not. It exits with 0 if the update would be ok.
    """
    if (checkpoint is None) == (from_directory is None):
        raise typer.BadParameter("name one of them", param_hint="--checkpoint or --from-directory")
    limits = configured_deadlines(None)
    limits = replace(limits, connect=min(limits.connect, CONNECT_SECONDS))
    try:
        checked_address(manager)
        wishes = {
            "pause_mode": pause_mode,
            "timeout": timeout,
            "min_replicas": min_replicas,
            "replicas": tuple(replica or ()),
            "pool": pool,
            "prefetch": prefetch,
            "until": until,
            "dry_run": dry_run,
            "strategy": strategy,
            "wave": int(wave) if wave is not None and wave.is_integer() else wave,
            "condition": tuple(condition or ()),
            "newer": newer,
            "draft": "keep" if keep_draft else "update",
        }
        options = cast(UpdateOptions, wishes)
        with progress_display(quiet=json_output) as display:
            if checkpoint is not None:
                for path in (checkpoint, draft):
                    if path is not None and not path.exists():
                        raise not_found(f"{path} is neither a directory nor a safetensors file")
                require("trainer", "torch", "numpy", what="this command")
                from ckpt_engine.trainer.trainer import Trainer  # takes seconds, for which no mistake above should wait

                with Trainer(manager, 0, 1, lineage or LINEAGE, deadlines=limits) as trainer:
                    trainer.publish(checkpoint, draft=draft, check_finite=check_finite)
                    report = trainer.update_weights(version, on_progress=display.progress, **options)
            else:
                assert from_directory is not None
                with Client(manager, deadlines=limits) as client:
                    report = client.update_from_directory(
                        from_directory.absolute(),
                        version,
                        lineage=lineage or "",
                        check_finite=check_finite,
                        draft_directory=None if draft is None else draft.absolute(),
                        on_progress=display.progress,
                        **options,
                    )
    except CkptEngineError as error:
        raise refusal_exit("update", error, json_output) from error
    except KeyboardInterrupt:
        raise interrupt_exit("update") from None
    raise report_exit(report, json_output, verbose)
