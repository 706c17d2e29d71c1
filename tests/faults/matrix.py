"""`python -m tests.faults.matrix`: plays every cell of the fault matrix and writes the tables into docs/reliability.md.

--only PART: cells whose name (victim-fault-stage) contains PART, written nowhere unless --write. Exit status 1 if a
cell ended in a state that the promises do not allow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.cells import (
    FAULTS,
    LEADER,
    LEADER_FAULTS,
    LEFT_OUT,
    RELAY,
    RELAY_STAGES,
    STAGES,
    VICTIMS,
    Cell,
    all_cells,
)
from tests.faults.conductor import Result, play
from tests.faults.leader_conductor import play_leader
from tests.faults.leader_world import LeaderWorld
from tests.faults.prober import Expected, make_weights
from tests.faults.world import World
from tests.tiny_model import make_tiny_qwen3

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
MATRIX, LEADERS = "fault matrix", "lost leaders"
"""Marks of the page between which tables are written."""
SHORT = {"new_serving": "new", "old_serving": "old", "quarantined": "closed"}


def make_models(path: Path) -> tuple[Path, Path, Expected]:
    """A model directory without weights, weights of each seed, and what those answer."""
    expected = make_weights(path / "weights")
    make_tiny_qwen3(path / "bare", 0, layers=1, hidden=64, vocabulary=256, weights=False)
    return path / "bare", path / "weights", expected


def place_of(cell: Cell) -> str:
    """The victim that a cell's world is made for: a relay, or one of two managers; empty: neither."""
    return cell.victim if cell.victim in (RELAY, LEADER) else ""


def restarts_an_engine(cell: Cell) -> bool:
    """Those cells take ten times as long as the others, so they come last."""
    victims = {"kill": ("api", "worker", "agent"), "stop": ("api", "worker")}
    return cell.stage == "join" or cell.victim in victims.get(cell.fault, ())


def run(cells: Sequence[Cell], path: Path) -> list[Result]:
    """Plays cells one after the other in one world, which is made anew after one that went wrong; those with a relay,
    and those with two managers, in others."""
    model, weights, expected = make_models(path)
    results: list[Result] = []
    todo = sorted(cells, key=lambda cell: (place_of(cell), restarts_an_engine(cell)))
    worlds = 0
    while todo:
        worlds += 1
        place = path / f"world-{worlds}"
        place.mkdir()
        made_for = place_of(todo[0])
        with new_world(made_for, place, (model, weights, expected)) as world:
            while todo and place_of(todo[0]) == made_for:
                cell = todo.pop(0)
                result = play_leader(world, cell) if isinstance(world, LeaderWorld) else play(world, cell)
                results.append(result)
                show(result)
                keep(path, results)
                if result.wrong:
                    break
    return results


def new_world(made_for: str, path: Path, models: tuple[Path, Path, Expected]) -> World:
    """A world for the cells of a place."""
    if made_for == LEADER:
        return LeaderWorld(path, *models)
    by_relay = made_for == RELAY
    return World(path, *models, {"one": 1 if by_relay else 2, "two": 1}, relayed=by_relay)


def keep(path: Path, results: Sequence[Result]) -> None:
    """All results so far, as JSON, so that a run that is cut short has not been for nothing."""
    record = [{**vars(result), "cell": vars(result.cell)} for result in results]
    (path / "results.json").write_text(json.dumps(record, indent=1))


def read(path: Path) -> list[Result]:
    """What `keep` wrote."""
    return [Result(**{**each, "cell": Cell(**each["cell"])}) for each in json.loads(path.read_text())]


def show(result: Result) -> None:
    ends = ", ".join(f"{name}: {end}" for name, end in result.ends.items())
    ends += f", another led after {result.led_after:.1f} s" if result.led_after else ""
    print(
        f"{time.strftime('%H:%M:%S')} {result.cell} {result.seconds:.1f} s  {ends}  [{result.report[:200]}]", flush=True
    )
    for wrong in result.wrong:
        print(f"    WRONG {wrong}", flush=True)


def tables(results: Sequence[Result]) -> str:
    """One table a fault: rows are stages, columns victims, cells what became of the victim's replica and the other."""
    by_cell = {result.cell: result for result in results}
    lines = [_count(results, [cell for cell in all_cells() if place_of(cell) != LEADER]), ""]
    for fault, meaning in FAULTS.items():
        lines += [f"**{fault}**: {meaning}.", "", f"| stage | {' | '.join(VICTIMS[fault])} |"]
        lines.append("|---" * (1 + len(VICTIMS[fault])) + "|")
        for stage in STAGES:
            row = [text(by_cell.get(Cell(victim, fault, stage))) for victim in VICTIMS[fault]]
            lines.append(f"| {stage} | {' | '.join(row)} |")
        lines.append("")
    lines += ["**A relay**, with two replicas of one worker each: the same faults.", ""]
    lines += [f"| stage | {' | '.join(FAULTS)} |", "|---" * (1 + len(FAULTS)) + "|"]
    for stage in RELAY_STAGES:
        row = [text(by_cell.get(Cell(RELAY, fault, stage))) for fault in FAULTS]
        lines.append(f"| {stage} | {' | '.join(row)} |")
    lines.append("")
    lines.append("Cells that there are not:")
    lines.append("")
    lines += [f"- {fault} of {victim}: {why}." for (fault, victim), why in LEFT_OUT.items()]
    return "\n".join(lines)


def leader_table(results: Sequence[Result]) -> str:
    """Of lost leaders: rows are stages, columns faults. A field says what became of both replicas, and after how long
    another manager led."""
    by_cell = {result.cell: result for result in results}
    lines = [_count(results, [cell for cell in all_cells() if place_of(cell) == LEADER]), ""]
    lines += [*(f"- {fault}: {meaning}." for fault, meaning in LEADER_FAULTS.items()), ""]
    lines += [f"| stage | {' | '.join(LEADER_FAULTS)} |", "|---" * (1 + len(LEADER_FAULTS)) + "|"]
    for stage in STAGES:
        row = [text(by_cell.get(Cell(LEADER, fault, stage))) for fault in LEADER_FAULTS]
        lines.append(f"| {stage} | {' | '.join(row)} |")
    return "\n".join(lines)


def _count(results: Sequence[Result], cells: Sequence[Cell]) -> str:
    right = sum(not result.wrong for result in results)
    minutes = sum(result.seconds for result in results) / 60
    return f"{len(results)} of {len(cells)} cells were run, {right} of them right, {minutes:.0f} minutes."


def text(result: Result | None) -> str:
    if result is None:
        return "not run"
    ends = " / ".join(SHORT.get(end, end) for end in result.ends.values()) or "none"
    ends += f", {result.led_after:.0f} s" if result.led_after else ""
    return f"**WRONG** {ends}" if result.wrong else ends


def write(page: Path, results: Sequence[Result]) -> None:
    """Puts the tables of what was run between their marks."""
    of_leaders = [result for result in results if place_of(result.cell) == LEADER]
    others = [result for result in results if place_of(result.cell) != LEADER]
    for name, found, made in ((MATRIX, others, tables), (LEADERS, of_leaders, leader_table)):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.read_text().partition(begin)
        _, _, after = rest.partition(end)
        if found:
            page.write_text(f"{before}{begin}\n{made(found)}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="part of a cell's name; may be repeated")
    parser.add_argument(
        "--merge", type=Path, help="results.json of an earlier run: what was right there is not run again"
    )
    parser.add_argument("--write", action="store_true", help="also after --only")
    parser.add_argument("--keep", type=Path, help="directory for logs and results.json; default: a temporary one")
    options = parser.parse_args()
    cells = [cell for cell in all_cells() if not options.only or any(part in str(cell) for part in options.only)]
    path = options.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    path.mkdir(parents=True, exist_ok=True)
    earlier = read(options.merge) if options.merge is not None else []
    done = {each.cell for each in earlier if not each.wrong}
    results = run([cell for cell in cells if cell not in done], path)
    results = list({each.cell: each for each in [*earlier, *results]}.values())
    keep(path, results)
    if options.write or not options.only:
        write(PAGE, results)
    wrong = [result for result in results if result.wrong]
    print(f"{len(results)} cells, {len(wrong)} wrong; logs in {path}")
    sys.stdout.flush()
    os._exit(1 if wrong else 0)  # threads of the harness may still stand in calls to what was killed


if __name__ == "__main__":
    main()
