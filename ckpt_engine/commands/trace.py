"""``ckpt-engine trace``: writes one update as a timeline for Perfetto, with a prediction beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.asking import Manager, failure_exit
from ckpt_engine.commands.options import Timeout, Wait, configured_deadlines, seconds_to_wait
from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.prediction import Rates, measured
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.timeline.asking import report_of
from ckpt_engine.timeline.perfetto import trace_text
from ckpt_engine.timeline.predicted import StageComparison, draw_with_prediction
from ckpt_engine.timeline.tracks import Timeline
from ckpt_engine.v1 import manager_pb2

STDOUT = "-"
ODD_SHOWN = 5


def trace(
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="File to write; - is standard output.")],
    version: Annotated[
        int | None,
        typer.Argument(min=0, help="Version of the update; if there were several, the newest is shown."),
    ] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help="The update by its epoch, instead of a version.")] = None,
    manager: Manager = MANAGER,
    lineage: Annotated[
        str | None, typer.Option(help="Lineage of the version. Default: the only one that has it.")
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file with rates of links, copies and digests. Default: measured ones."),
    ] = None,
    wait: Wait = False,
    timeout: Timeout = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write an update as a trace: what each process did when, and which bytes went where.

    FILE is JSON for Perfetto. It shows the manager, trainers, relays, agents and workers on one clock; the error of
    each clock is in FILE and printed here. Beside the time of each stage it shows a prediction by bytes and rates: see
    docs/timeline.md.

    Exits with 1 and the reason if there is no such update, or FILE cannot be written.
    """
    if (version is None) == (epoch is None):
        raise typer.BadParameter("name the update by its version, or by its epoch with --epoch: one of the two")
    limit = seconds_to_wait(wait, timeout, configured_deadlines(None).update)
    link_rates = _rates(rates)
    _check(output, force)
    try:
        report, places = asyncio.run(report_of(manager, version, lineage, limit, epoch))
    except CkptEngineError as error:
        raise failure_exit(manager, error) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    timeline, stages = draw_with_prediction(report, link_rates, places)
    _write(output, trace_text(timeline), force)
    typer.echo("\n".join(_summary(report, timeline, stages, output)), err=output == STDOUT)


def _rates(path: Path | None) -> Rates:
    """Reads --rates. Raises typer.BadParameter."""
    if path is None:
        return measured()
    try:
        return Rates.of(load_json(path.read_text()), measured())
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
    except ValueError as error:
        problem = f"{path} is not JSON: {error}"
    except CkptEngineError as error:
        problem = f"{path}: {error.problem.message}"
    raise typer.BadParameter(problem, param_hint="--rates")


def _check(output: str, force: bool) -> None:
    """Checks --output before the manager is asked. Raises typer.BadParameter for a path that cannot be written."""
    path, problem = Path(output), ""
    if output == STDOUT:
        return
    if path.is_dir():
        problem = f"{path} is a directory: name a file in it"
    elif path.exists() and not force:
        problem = f"{path} is there already: --force overwrites it"
    elif not path.parent.is_dir():
        problem = f"there is no directory {path.parent}"
    if problem:
        raise typer.BadParameter(problem, param_hint="--output")


def _write(output: str, text: str, force: bool) -> None:
    """Writes the whole file or none."""
    if output == STDOUT:
        typer.echo(text)
        return
    path = Path(output)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        if force:
            part.replace(path)
        else:
            path.hardlink_to(part)  # fails if a file was created there meanwhile
    except OSError as error:
        typer.echo(f"ckpt-engine trace: {path} cannot be written: {error.strerror or error}", err=True)
        raise typer.Exit(1) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _summary(
    report: manager_pb2.UpdateReport, timeline: Timeline, stages: Sequence[StageComparison], output: str
) -> list[str]:
    """What was written, how wrong its times are, and how the stages compare."""
    identity, edges = report.identity, len(timeline.arrows)
    where = "standard output" if output == STDOUT else output
    lines = [
        f"version {identity.version} of {identity.lineage} (epoch {report.fence.epoch}): "
        f"{human_bytes(report.bytes)} to replicas, {edges} edge{'s' * (edges != 1)}, {report.seconds:.3f} s; "
        f"written to {where}"
    ]
    if not report.timeline.phases:
        lines.append("the manager that made this update told no times: all of it is drawn from durations")
    lines += timeline.odd[:ODD_SHOWN]
    if len(timeline.odd) > ODD_SHOWN:
        lines.append(f"and {len(timeline.odd) - ODD_SHOWN} numbers more, which the file names (not_believed)")
    errors: dict[str, list[tuple[float, str]]] = {}
    for process, (error, by) in timeline.clocks.items():
        errors.setdefault(by, []).append((error, process))
    for by, found in errors.items():
        worst, process = max(found)
        clocks = f"{len(found)} clock{'s' * (len(found) != 1)}"
        lines.append(f"{clocks} aligned, each by {by}: ± {worst * 1e3:.2f} ms at most ({process})")
    lines.append(f"{'stage':<10}{'took':>10}{'predicted':>11}  because")
    for each in stages:
        took = "-" if each.fact is None else f"{each.fact * 1e3:.1f} ms"
        predicted, because = "-", "nothing that was measured predicts it"
        if each.expected is not None:
            predicted, because = f"{each.expected.seconds * 1e3:.1f} ms", each.expected.because or "as was measured"
        lines.append(f"{each.stage:<10}{took:>10}{predicted:>11}  {because}")
    return lines
