"""Shows the demo on a terminal, or as plain lines elsewhere."""

from __future__ import annotations

import math
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.demo import task
from ckpt_engine.demo.play import Act, Outcome
from ckpt_engine.demo.recital import Recital
from ckpt_engine.demo.stage import DemoSettings, Stage


class ConsoleShow:
    """Prints what happens. A context manager: a spinner says what is going on meanwhile, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status = console.status("starting", refresh_per_second=4)
        self._last_state = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def introduce(self, settings: DemoSettings) -> None:
        """Prints what the demo will show."""
        workers = f", each with {settings.tensor_parallel} tensor-parallel workers," * (settings.tensor_parallel > 1)
        self._console.print(
            Text(
                f"{settings.trainers} trainer ranks (FSDP2) teach a Qwen3 of 3.3 million parameters, byte by byte, the "
                f"opening of Moby-Dick.\n{settings.replicas} {settings.engine} replicas{workers} get its weights "
                f"{settings.updates} times and go on from the opening words; what is right is green.\n"
            )
        )
        if settings.standby:
            self._console.print(
                Text(
                    "Two managers share a ledger in PostgreSQL; the one that leads is killed in the middle of update "
                    f"{settings.updates // 2 + 1}.\n"
                )
            )
        if settings.hosts > 1:
            self._console.print(
                Text(
                    f"{settings.hosts} hosts, each with a network of its own: trainer and manager are on host-1, a "
                    "replica is on each of the others. Weights go from the relay of host-1 to theirs, over TCP.\n"
                )
            )

    def state(self, words: str) -> None:
        if self._console.is_terminal:
            self._status.update(Text(words))
        elif words.startswith(("starting", "stopping")) and words != self._last_state:
            self._console.print(Text(words, style="dim"))
        self._last_state = words

    def started(self, stage: Stage, seconds: float) -> None:
        where = ", ".join(f"{name} {url}" for name, url in stage.replicas.items())
        self._console.print(
            Text(f"up in {seconds:.1f} s: manager {stage.manager}, gateway {stage.gateway}, {where}\n", style="dim")
        )
        if stage.page:
            self._console.print(Text.assemble("the manager's page, from now on: ", (stage.page, "bold"), "\n"))

    def leader_lost(self, address: str, phase: str, version: int) -> None:
        step = phase.partition(": ")[2] or phase
        self._console.print(
            Text.assemble(
                ("killed ", "bold red"),
                f"the manager at {address}, which led and was at: {step}. The other one leads now, and version "
                f"{version} is the same one:",
            )
        )

    def stay_open(self, stage: Stage) -> None:
        self.state("kept open for the page")
        self._console.print(Text.assemble("the manager's page: ", (stage.page, "bold"), "  (Ctrl-C ends the demo)\n"))

    def act(self, act: Act) -> None:
        report = act.report
        trained = "untrained" if math.isnan(act.loss) else f"loss {act.loss:.3f}"
        pause = max(replica.pause_seconds for replica in report.replicas)
        self._console.print(
            Text.assemble(
                (f"version {report.version}", "bold"),
                f"  {trained}; {human_bytes(report.nbytes)} to {len(report.replicas)} replicas in "
                f"{report.seconds:.2f} s, paused for {pause:.3f} s, ",
                ("verified", "green") if act.verified else ("NOT VERIFIED", "bold red"),
            )
        )
        for recital in act.recitals:
            self._console.print(_recital_line(recital))
        if act.wire.counts:
            self._console.print(Text(f"  {_on_the_wire(act)}", style="dim"))
        self._console.print()

    def end(self, outcome: Outcome) -> None:
        """The table of all updates, and the verdict."""
        self._status.stop()
        if outcome.acts:
            self._console.print(_table(outcome))
        if outcome.problem:
            self._console.print(Text(outcome.problem, style="red"))
        if not outcome.acts:
            return  # no update, no verdict
        recited = "yes" if outcome.final_text_matches else "NO"
        timing = f"{outcome.start_seconds:.0f} s to start, {outcome.play_seconds:.0f} s to train and update"
        self._console.print(
            Text.assemble(
                "every update verified: ",
                ("yes", "green") if outcome.verified else ("NO", "bold red"),
                f"; the next {task.CONTINUATION_BYTES} bytes of the text are recited by every replica: ",
                (recited, "green" if outcome.final_text_matches else "bold red"),
                f"; {timing}",
            )
        )


def _on_the_wire(act: Act) -> str:
    model = act.report.nbytes // len(act.report.replicas)
    counts = (
        f"{name} sent {human_bytes(sent)}, received {human_bytes(received)}"
        for name, (sent, received) in act.wire.counts.items()
    )
    return f"by the kernel's counters, for {human_bytes(model)} a replica: {'; '.join(counts)}"


def _recital_line(recital: Recital) -> Text:
    opening = task.text()[: task.PROMPT_BYTES]
    right, wrong = recital.continuation[: recital.matching], recital.continuation[recital.matching :]
    return Text.assemble(
        (f"  {recital.replica}  ", "dim"), (_readable(opening), "bold"), (_readable(right), "green"), _readable(wrong)
    )


def _readable(continuation: bytes) -> str:
    """Printable ASCII as it is, everything else as a dot: one character a byte."""
    return "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in continuation)


def _table(outcome: Outcome) -> Table:
    titles = ("version", "loss", "replica", "bytes", "sync", "pause", "GB/s", "transport", "verified", "recited")
    table = Table(*titles, box=None, pad_edge=False)
    for act in outcome.acts:
        recited = {recital.replica: recital.matching for recital in act.recitals}
        for number, replica in enumerate(act.report.replicas):
            table.add_row(
                str(act.report.version) if number == 0 else "",
                ("-" if math.isnan(act.loss) else f"{act.loss:.3f}") if number == 0 else "",
                replica.name,
                human_bytes(replica.nbytes),
                f"{replica.sync_seconds:.3f} s",
                f"{replica.pause_seconds:.3f} s",
                f"{replica.gigabytes_per_second:.2f}",
                ", ".join(dict.fromkeys(use.transport for use in replica.transports)),
                Text("yes", style="green") if replica.verified else Text("NO", style="bold red"),
                f"{recited.get(replica.name, 0)} of {task.CONTINUATION_BYTES}",
            )
    return table
