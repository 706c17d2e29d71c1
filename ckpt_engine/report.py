"""A view of the manager's UpdateReport, for people and programs.

Pure: needs protobuf only, decides nothing, knows no trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from ckpt_engine.core.absent import absent_in_all
from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.message_json import as_dict
from ckpt_engine.core.names import CUT, NAMES_SHOWN, shortened, some
from ckpt_engine.core.probe import ProbeFinding, answer_words
from ckpt_engine.core.scrub import difference_words
from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.machines.manager.report import is_verified
from ckpt_engine.v1 import manager_pb2


@dataclass(frozen=True)
class TransportUse:
    """One transport between the sources and one replica."""

    transport: str
    reason: str  # why it was chosen
    nbytes: int
    edges: int  # pairs of source and worker that used it


@dataclass(frozen=True)
class CopiedTensors:
    """Tensors that trainer ranks copied at the seal, since their own memory cannot be offered to readers."""

    reason: str  # the end of a sentence that begins with the tensor: "is an inference tensor"
    tensors: int  # of all ranks together
    nbytes: int  # of all ranks together
    names: tuple[str, ...]  # at most 16, of the first rank that has such tensors
    rank: int  # the first that has such tensors
    ranks: int  # how many have

    def __str__(self) -> str:
        copier = f"rank {self.rank}" if self.ranks == 1 else f"{self.ranks} ranks, {self.rank} first,"
        names = ", ".join([*self.names[:NAMES_SHOWN], *["..."] * (self.tensors > NAMES_SHOWN)])
        size = human_bytes(self.nbytes)
        return f"copied by {copier}: {self.tensors} tensors, {size} ({names}); each {self.reason}"


@dataclass(frozen=True)
class AbsentTensors:
    """Tensors of the version that no worker of a replica takes, since all its models were made without their module."""

    prefix: str  # how their names begin; no other tensor's name does. The whole name, if it is one tensor
    tensors: int
    nbytes: int
    reason: str  # the end of a sentence that begins with the model: "was made without its vision tower"

    def __str__(self) -> str:
        names = f"{self.prefix}*" if self.prefix.endswith(".") else self.prefix
        count = "1 tensor" if self.tensors == 1 else f"{self.tensors} tensors"
        return f"takes nothing of {names} ({count}, {human_bytes(self.nbytes)}): its model {self.reason}"


@dataclass(frozen=True)
class PartUse:
    """What became of one part of a version in one replica."""

    name: str  # "draft"; empty: the target
    # "installed", "left" (it has no such model), or "kept" (its model is as it was: the version has none for it)
    handling: str
    nbytes: int  # that its workers read
    verified: int  # needs of all its workers that hash to what was sealed
    shared: tuple[str, ...]  # its tensors that are the target's too

    @classmethod
    def of(cls, name: str, reports: Sequence[manager_pb2.PartReport]) -> PartUse:
        """The sum of what workers say. Of several pipeline stages one has a draft, and the others leave it."""
        part = manager_pb2.PartReport
        order = (part.HANDLING_INSTALLED, part.HANDLING_KEPT, part.HANDLING_LEFT)
        handling = next((each for each in order if any(report.handling == each for report in reports)), 0)
        shared = dict.fromkeys(each for report in reports for each in report.shared)
        nbytes, verified = sum(each.bytes for each in reports), sum(each.verified for each in reports)
        return cls(name, enum_word(manager_pb2.PartReport.Handling, handling), nbytes, verified, tuple(shared))

    def __str__(self) -> str:
        if self.handling == "left":
            return f"left the {self.name}: it has no such model"
        if self.handling == "kept":
            return f"its {self.name} keeps its weights: the version has none for it"
        shared = f", {len(self.shared)} of them the target's own" if self.shared else ""
        return f"{self.name or 'target'}: {human_bytes(self.nbytes)}, {self.verified} verified{shared}"


@dataclass(frozen=True)
class ReplicaReport:
    """How the update ended for one replica."""

    message: manager_pb2.ReplicaOutcome

    @property
    def name(self) -> str:
        """The replica's name."""
        return self.message.replica

    @property
    def outcome(self) -> str:
        """ "new_serving", "old_serving", "quarantined", or "not_reached": its agent or engine was not there, so it may
        serve what it held last."""
        return enum_word(manager_pb2.Outcome, self.message.outcome)

    @property
    def ok(self) -> bool:
        """Whether it serves the new weights."""
        return self.message.outcome == manager_pb2.OUTCOME_NEW_SERVING

    @property
    def verified(self) -> bool:
        """Whether its workers read back every need and found the sealed values (or hashed them as handed to the
        loader), in this update, or in an earlier one if it held these very weights already."""
        return self.ok and all(is_verified(worker) for worker in self.message.workers)

    @property
    def problem(self) -> str:
        """Why it does not serve the new weights; empty if it does."""
        return self.message.problem.message

    @property
    def operator_hold(self) -> bool:
        """Whether it was left out because an operator holds it; then it does not count for `UpdateReport.ok`."""
        return self.message.operator_hold

    @property
    def cannot_load(self) -> bool:
        """Whether its engine can never load these weights, as an earlier update found. Then it was left out, and does
        not count for `UpdateReport.ok` unless the call named it."""
        return self.message.cannot_load

    @property
    def label_problem(self) -> str:
        """Why the version that the engine itself names with its tokens may be wrong; empty if it is right."""
        return self.message.label_problem

    @property
    def differences(self) -> tuple[str, ...]:
        """What scrubs had found changed in the weights that it held before, which had closed it: tensor, box, worker
        and when."""
        return tuple(map(difference_words, self.message.differences))

    @property
    def probe(self) -> manager_pb2.ProbeAnswer | None:
        """What its engine answered to the version's probe, with figures; None: it was not asked."""
        return self.message.probe if self.message.HasField("probe") else None

    @property
    def parts(self) -> tuple[PartUse, ...]:
        """What became of each part of the version in all its workers; none: there is only a target."""
        by_part: dict[str, list[manager_pb2.PartReport]] = {}
        for worker in self.message.workers:
            for each in worker.parts:
                by_part.setdefault(each.part, []).append(each)
        return tuple(PartUse.of(part, reports) for part, reports in by_part.items())

    @property
    def nbytes(self) -> int:
        """Bytes that all its workers read, from trainers, files or relays."""
        return self.message.bytes

    @property
    def early_nbytes(self) -> int:
        """The part of `nbytes` that lay verified in its workers' stage memory before the pause."""
        return sum(worker.early_bytes for worker in self.message.workers)

    @property
    def early_seconds(self) -> float:
        """Seconds that the slowest worker took to bring and verify those, while the engine generated."""
        return max((worker.early_seconds for worker in self.message.workers), default=0.0)

    @property
    def absent(self) -> tuple[AbsentTensors, ...]:
        """What no worker of it takes of the version, since its model has no module for that."""
        rows = absent_in_all([worker.absent for worker in self.message.workers])
        return tuple(AbsentTensors(row.prefix, row.tensors, row.bytes, row.reason) for row in rows)

    @property
    def pause_seconds(self) -> float:
        """Seconds in which it produced no token."""
        return self.message.pause_seconds

    @property
    def sync_seconds(self) -> float:
        """Seconds from the install command to the outcome, pause included."""
        return self.message.sync_seconds

    @property
    def transfer_seconds(self) -> float:
        """Seconds of the slowest worker, from the first byte read to the last one, without waiting, verifying,
        resuming."""
        return max((w.transfer_seconds for w in self.message.workers), default=0.0)

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes of all workers by the slowest worker's transfer seconds, in 10^9 bytes a second; 0 if nothing moved."""
        return self.nbytes / self.transfer_seconds / 1e9 if self.transfer_seconds > 0 else 0.0

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage ("ready", "quiesce", "transfer", "install", "verify", "resume"), in order."""
        return stage_seconds(self.message.stages)

    @property
    def transports(self) -> tuple[TransportUse, ...]:
        """Which transports carried its bytes and why, most bytes first."""
        uses: dict[tuple[str, str], list[int]] = {}
        for edge in self.message.edges:
            uses.setdefault((edge.transport, edge.reason), []).append(edge.bytes)
        found = [TransportUse(name, reason, sum(sizes), len(sizes)) for (name, reason), sizes in uses.items()]
        return tuple(sorted(found, key=lambda use: -use.nbytes))


@dataclass(frozen=True)
class RelayReport:
    """What one relay did before anything was paused."""

    message: manager_pb2.RelayReport

    @property
    def name(self) -> str:
        """The id of what it offers: "relay host-3"."""
        return self.message.relay

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that were to be installed from it; none: it was filled for other relays only."""
        return tuple(self.message.replicas)

    @property
    def relays(self) -> tuple[str, ...]:
        """Relays that were to be filled from it."""
        return tuple(self.message.relays)

    @property
    def upstream(self) -> tuple[str, ...]:
        """Relays that it was to be filled from; none: it reads the trainer's memory or files."""
        return tuple(self.message.upstream)

    @property
    def stage(self) -> int:
        """0 if it has no upstream, else one more than that of its upstream."""
        return self.message.stage

    @property
    def nbytes_from(self) -> dict[str, int]:
        """Bytes that it brought, by the source that they came from: "rank 0", "relay host-3"."""
        return {each.source: each.bytes for each in self.message.filled.brought}

    @property
    def nbytes(self) -> int:
        """Bytes of the version that it holds; 0 if it was not filled."""
        return self.message.filled.bytes

    @property
    def seconds(self) -> float:
        """Seconds of filling it, the wait for readers of its memory included."""
        return self.message.filled.wait_seconds + self.message.filled.fill_seconds

    @property
    def network_bytes(self) -> int:
        """Bytes that other relays sent for it."""
        return self.message.filled.network_bytes

    @property
    def delta_bytes(self) -> int:
        """Bytes of what came as what has changed since a version that it held, counted in full."""
        return self.message.filled.delta_bytes

    @property
    def density(self) -> float | None:
        """The share of these bytes that had changed; None if nothing came so."""
        filled = self.message.filled
        return filled.changed_bytes / filled.delta_bytes if filled.delta_bytes else None

    @property
    def densest(self) -> Mapping[str, float]:
        """The tensors of which the largest share had changed, and that share; at most 16."""
        return {each.tensor: each.changed / each.elements for each in self.message.filled.densest}

    @property
    def whole(self) -> Mapping[str, int]:
        """Bytes of what came in full although it was asked for as what had changed, by the reason; at most 16."""
        return {each.reason: each.bytes for each in self.message.filled.whole}

    @property
    def problem(self) -> str:
        """Why it does not hold the version, as it says itself; empty if it does."""
        return self.message.filled.problem.message if self.message.HasField("filled") else "it did not answer"

    def __str__(self) -> str:
        held = self.problem or f"{human_bytes(self.nbytes)} in {self.seconds:.2f} s"
        relays = [each for each in self.nbytes_from if each.startswith("relay ")]
        sources = sorted({*self.upstream, *relays})
        source = f" from {', '.join(sources)}" if sources else ""
        if self.density is not None:
            source += f" ({human_bytes(self.network_bytes)} on the network: {self.density:.2%} had changed)"
        if self.whole:
            reason, *_ = self.whole
            source += f" ({human_bytes(sum(self.whole.values()))} in full: {reason})"
        return f"{self.name}: {held}{source}, for {', '.join((*self.replicas, *self.relays))}"


@dataclass(frozen=True)
class DeploymentReport:
    """A staged deployment: what has become of it, and what comes next."""

    message: manager_pb2.Deployment

    @property
    def number(self) -> int:
        """What names it: the epoch of its first commit."""
        return self.message.number

    @property
    def state(self) -> str:
        """ "undecided", "deployed" or "undone"."""
        return enum_word(manager_pb2.Deployment.State, self.message.state)

    @property
    def waves(self) -> tuple[tuple[str, ...], ...]:
        """The replicas of each wave so far; the last wave may go on."""
        return tuple(tuple(wave.replicas) for wave in self.message.waves)

    @property
    def reason(self) -> str:
        """Why it was undone; empty: it was not."""
        return self.message.reason

    @property
    def waits_for(self) -> str:
        """What the next step waits for, for people; empty once it is decided."""
        return self.message.waits_for

    def __str__(self) -> str:
        reached, count = sum(map(len, self.waves)), len(self.message.participants)
        target, base = self.message.target, self.message.base
        waves = f"{len(self.waves)} wave{'s' * (len(self.waves) != 1)}"
        line = (
            f"deployment {self.number}: version {target.version} of {target.lineage} over {base.version}, "
            f"{self.message.strategy}: {self.state}, {reached} of {count} replicas in {waves}"
        )
        if self.message.requests:
            line += f", {self.message.failed_requests} of {self.message.requests} requests failed"
        why = self.reason or (f"waits for {self.waits_for}" if self.waits_for else "")
        paused = ", paused" if self.message.paused and self.state == "undecided" else ""
        return f"{line}{paused}{f'; {why}' if why else ''}"


@dataclass(frozen=True)
class UpdateReport:
    """How one `update_weights` ended. str() is two lines, `details` a table."""

    message: manager_pb2.UpdateReport  # the manager's report, with everything in it

    @property
    def ok(self) -> bool:
        """Whether every replica serves the new weights, except those that an operator holds; with `min_replicas`,
        whether at least so many do."""
        return self.message.ok

    @property
    def verified(self) -> bool:
        """Whether `ok`, and all workers of replicas that serve the new weights hold what was sealed, bit for bit."""
        return self.message.verified

    @property
    def lineage(self) -> str:
        """The lineage: the name of the training run."""
        return self.message.identity.lineage

    @property
    def version(self) -> int:
        """The weights' version within the lineage."""
        return self.message.identity.version

    @property
    def root(self) -> str:
        """The digest of all the weights, 64 hexadecimal digits."""
        return self.message.identity.root.hex()

    @property
    def epoch(self) -> int:
        """The epoch of the update's install fence: it rises from update to update, and some numbers are left out."""
        return self.message.fence.epoch

    @property
    def seconds(self) -> float:
        """Seconds from the last rank's call to the report."""
        return self.message.seconds

    @property
    def nbytes(self) -> int:
        """Bytes that all workers of all replicas read together."""
        return self.message.bytes

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage: the manager's planning, then the slowest replica's stages."""
        return stage_seconds(self.message.stages)

    @property
    def replicas(self) -> tuple[ReplicaReport, ...]:
        """One report a replica, sorted by name: all that were registered when the update began, also those that were
        not reached; or those that the caller named."""
        return tuple(ReplicaReport(outcome) for outcome in sorted(self.message.replicas, key=lambda r: r.replica))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about possible mistakes in an update that worked, such as a version without a change."""
        return tuple(self.message.warnings)

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Tensors that hold NaN or infinity, 16 at most; `check_finite` refuses such an update."""
        return tuple(self.message.not_finite)

    @property
    def copied(self) -> tuple[CopiedTensors, ...]:
        """What ranks copied to seal it, one entry a reason, most bytes first."""
        return tuple(
            CopiedTensors(e.reason, e.tensors, e.bytes, tuple(e.names), e.rank, e.ranks) for e in self.message.copied
        )

    @property
    def held(self) -> bool:
        """Whether the report came early, when relays held the version or its first wave served it, as `until` asked
        for: installs go on, and `ok` says nothing."""
        return self.message.held

    @property
    def probe(self) -> tuple[ProbeFinding, ...]:
        """What the version's probe has found, by cause; none: the replicas that were asked are within its bounds."""
        return tuple(map(ProbeFinding.of, self.message.probe))

    @property
    def deployment(self) -> DeploymentReport | None:
        """How it was deployed in waves; None: it was brought to all replicas at once."""
        return DeploymentReport(self.message.deployment) if self.message.HasField("deployment") else None

    @property
    def dry_run(self) -> bool:
        """Whether nothing was done: replicas with the outcome "planned" would be updated; `ok` says whether that is
        enough."""
        return self.message.dry_run

    @property
    def prefetch(self) -> str:
        """Whether relays were filled, and why; and why some do not count."""
        return self.message.prefetch

    @property
    def relays(self) -> tuple[RelayReport, ...]:
        """One report for each relay that was to be filled."""
        return tuple(RelayReport(relay) for relay in self.message.relays)

    @property
    def collective(self) -> str:
        """Which replicas a collective updated and why, and how it ended; or why there was none."""
        return self.message.collective

    def to_dict(self) -> dict[str, Any]:
        """The message as a dictionary for JSON, as `--json` and HTTP have it (docs/protocol.md, "JSON")."""
        return as_dict(self.message)

    @property
    def details(self) -> str:
        """The whole report as text: a line about the update, a row a replica, problems, warnings, relays, copies."""
        return _dry_run_text(self) if self.dry_run else _table(self)

    def __str__(self) -> str:
        """Two lines: the result; and each replica that does not serve the version, why, and what to do. Of many it
        gives the count and names the first three; `details` has all."""
        if self.dry_run:
            return f"{_whole(self)}\n{_exceptions(self) or 'all of them can take it; report.details (-v) has edges'}"
        if self.deployment is not None:
            return f"{_whole(self)}\n{self.deployment}"
        if self.held:
            relays = some([relay.name for relay in self.relays if not relay.problem], _SHOWN) or "no relay"
            return f"{_whole(self)}\nheld by {relays}; `ckpt-engine status` shows how the installs go on"
        return f"{_whole(self)}\n{_exceptions(self) or _slowest(self)}"


_SHOWN = 3
"""Replicas that the two lines name at most."""

_CHARACTERS = 500
"""Of one problem or warning that the two lines show."""

_OUTCOMES = {
    "old_serving": "serves what it did before",
    "quarantined": "quarantined",
    "not_reached": "not reached",
    "planned": "planned",
}
"""Words for the outcome of a replica that does not serve the version."""


def _whole(report: UpdateReport) -> str:
    """The first of two lines."""
    name = f"version {report.version} of {report.lineage}"
    count = len(report.replicas)
    if report.dry_run:
        planned = sum(replica.outcome == "planned" for replica in report.replicas)
        would = f"an update would bring {human_bytes(report.nbytes)} to {planned} of {count} replicas"
        return f"dry run of {name}: {would}{'' if report.ok else ', NOT OK'}"
    if report.held and report.deployment is None:
        return f"{name}: {_held(report)}"
    return f"{name}: {_serving(report)} of {count} replicas serve it after {report.seconds:.2f} s, {_state(report)}"


def _serving(report: UpdateReport) -> int:
    return sum(replica.ok for replica in report.replicas)


def _held(report: UpdateReport) -> str:
    return f"held by relays after {report.seconds:.2f} s, installs go on"


def _state(report: UpdateReport) -> str:
    """Whether the update is ok, and which replicas do not count."""
    state = ("verified" if report.verified else "not verified") if report.ok else "NOT OK"
    held = sum(replica.operator_hold for replica in report.replicas)
    misfits = sum(replica.cannot_load for replica in report.replicas)
    if report.ok and _serving(report) + held + misfits < len(report.replicas):
        state += ", as many as were asked for"
    if held:
        state += f", {held} held by an operator"
    if misfits:
        state += f", {misfits} with another model"
    return state


def _exceptions(report: UpdateReport) -> str:
    """Replicas that do not serve the version (or would not), why, and what to do; then warnings. Empty: there are
    none."""
    unserved = [replica for replica in report.replicas if not (replica.ok or (report.dry_run and not replica.problem))]
    lines = [f"{each.name}: {_outcome_text(each)}" for each in unserved[:_SHOWN]]
    hidden = len(unserved) - len(lines)
    parts = ["; ".join([f"{len(unserved)} do not: {lines[0]}" if hidden else lines[0], *lines[1:]])] if lines else []
    if hidden:
        parts.append(f"and {hidden} more")
    if unserved and not report.dry_run:
        parts.append(_remedy(unserved))
    labels = [f"{each.name}: {each.label_problem}" for each in report.replicas if each.label_problem]
    remarks = [f"warning: {_short(str(each))}" for each in (*report.probe, *report.warnings, *labels)]
    parts += remarks[:1]
    hidden += len(remarks) - 1 if remarks else 0
    if hidden or any(CUT in part for part in parts):
        parts.append("all of it: -v, or report.details")
    return "; ".join(parts)


def _outcome_text(replica: ReplicaReport) -> str:
    kind = "left alone, held by an operator" if replica.operator_hold else _OUTCOMES.get(replica.outcome, "unknown")
    return f"{kind} ({_short(replica.problem)})" if replica.problem else kind


def _remedy(unserved: Sequence[ReplicaReport]) -> str:
    """What to do about replicas that do not serve the version: each kind of remedy once."""
    held = [each.name for each in unserved if each.operator_hold]
    misfits = [each.name for each in unserved if each.cannot_load and not each.operator_hold]
    absent = [each.name for each in unserved if each.outcome == "not_reached" and each.name not in (*held, *misfits)]
    others = [each.name for each in unserved if each.name not in (*held, *misfits, *absent)]
    remedies = []
    if others:
        remedies.append(f"mend that, then `ckpt-engine replica retry {others[0]}`")
    if absent:
        remedies.append(f"start {absent[0]} again: it is brought to the version then")
    if misfits:
        remedies.append(f"start {misfits[0]} with the model that is published, or in another pool")
    if held:
        remedies.append(f"`ckpt-engine replica release {held[0]}` ends the hold")
    return "; ".join(remedies)


def _slowest(report: UpdateReport) -> str:
    """The second line of an update without problems: the longest pause, and the bytes moved."""
    if not report.replicas:
        return "there was no replica to bring it to"
    slowest = max(report.replicas, key=lambda replica: replica.pause_seconds)
    uses = dict.fromkeys(use.transport for replica in report.replicas for use in replica.transports)
    traffic = f"{human_bytes(report.nbytes)} by {', '.join(uses)}" if uses else "nothing had to be moved"
    uneven = [f"{each.name} {part}" for each in report.replicas for part in each.parts if part.handling != "installed"]
    hidden = f"; and {len(uneven) - _SHOWN} more" if len(uneven) > _SHOWN else ""
    apart = "".join(f"; {each}" for each in uneven[:_SHOWN]) + hidden
    return f"longest pause {slowest.pause_seconds:.3f} s ({slowest.name}); {traffic}{apart}"


def _short(problem: str) -> str:
    """Its beginning, on one line; the whole of it is in `details`."""
    return shortened(" ".join(problem.split()), _CHARACTERS)


def _dry_run_text(report: UpdateReport) -> str:
    """The result of a dry run as text."""
    lines = [_whole(report)]
    for replica in report.replicas:
        lines.append(f"{replica.name}: {replica.problem or human_bytes(replica.nbytes)}")
        lines += [
            f"  worker {each.worker_rank} from {each.source}: {human_bytes(each.bytes)} by {each.transport}, "
            f"{each.reason}"
            for each in replica.message.edges
        ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in report.warnings), report.prefetch])


def _table(report: UpdateReport) -> str:
    """The result of an update as text, with a row a replica."""
    count = f"{_serving(report)} of {len(report.replicas)} replicas"
    what = f"{human_bytes(report.nbytes)} to {count} in {report.seconds:.2f} s, {_state(report)}"
    if report.held:
        what = _held(report)
    deployed = [] if report.deployment is None else [str(report.deployment)]
    head = (
        f"version {report.version} of {report.lineage} (root {report.root[:12]}, epoch {report.epoch}): "
        f"{report.message.tensors} tensors, {what}"
    )
    titles = ("replica", "outcome", "bytes", "sync", "pause", "GB/s", "transport")
    rows = [
        (
            replica.name,
            replica.outcome,
            human_bytes(replica.nbytes),
            f"{replica.sync_seconds:.3f} s",
            f"{replica.pause_seconds:.3f} s",
            f"{replica.gigabytes_per_second:.2f}",
            ", ".join(dict.fromkeys(use.transport for use in replica.transports)) or "-",
        )
        for replica in report.replicas
    ]
    problems_by_name = (
        (each.name, problem) for each in report.replicas for problem in (each.problem, each.label_problem)
    )
    problems = [f"{name}: {problem}" for name, problem in problems_by_name if problem]
    problems += [f"{each.name}: had been closed: {words}" for each in report.replicas for words in each.differences]
    warnings = [f"warning: {warning}" for warning in report.warnings]
    relays = [*map(str, report.relays), *([report.prefetch] if report.relays else [])]
    collective = [] if report.collective.startswith("no collective") else [report.collective]
    copied = map(str, report.copied)
    early = [
        f"{each.name}: {human_bytes(each.early_nbytes)} lay in stage memory before the pause, brought in "
        f"{each.early_seconds:.3f} s"
        for each in report.replicas
        if each.early_nbytes
    ]
    parts = [f"{each.name}: {part}" for each in report.replicas for part in each.parts]
    absent = [f"{each.name}: {row}" for each in report.replicas for row in each.absent]
    probes = [f"{each.name}: probe: {answer_words(each.probe)}" for each in report.replicas if each.probe is not None]
    probes += map(str, report.probe)
    table = _columns([titles, *rows]) if rows or not report.held else []
    remarks = [*parts, *problems, *warnings, *probes, *relays, *early, *absent]
    return "\n".join([head, *deployed, *table, *remarks, *filter(None, collective), *copied])


def stage_seconds(stages: Sequence[manager_pb2.StageSeconds]) -> dict[str, float]:
    """Seconds by lower-case stage name, in the order given; equal stages add up."""
    seconds: dict[str, float] = {}
    for stage in stages:
        name = enum_word(manager_pb2.Stage, stage.stage)
        seconds[name] = seconds.get(name, 0.0) + stage.seconds
    return seconds


def gpu_uuid(uuid: bytes) -> str:
    """A GPU's 16 bytes as nvidia-smi writes them: "GPU-3fa91c02-...". Others as they are, in hexadecimal."""
    return f"GPU-{UUID(bytes=uuid)}" if len(uuid) == 16 else uuid.hex()


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
