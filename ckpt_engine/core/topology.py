"""Which transport an edge takes: from what two processes know of where they run. Pure.

A region says which transport can open it; the rules here say whether a given worker can. Another transport is another
row in `RULES`. Runs in the manager; nothing is tried out here, that is the doctor's and the transport's own job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ckpt_engine.core.problems import precondition, unavailable
from ckpt_engine.v1.weights_pb2 import Host


class Choice(NamedTuple):
    """A transport, and why it was taken, as a sentence for people."""

    transport: str
    reason: str


class Verdict(NamedTuple):
    """Whether a transport reaches from a source to a worker; if not, `reason` says why not and what to do."""

    ok: bool
    reason: str


Rule = Callable[[Host, Host], Verdict]
"""(source, worker) to verdict."""


def same_host(a: Host, b: Host) -> bool:
    """Whether two processes run on one machine. A fact that is not known never counts as shared."""
    return bool(a.boot_id) and a.boot_id == b.boot_id


def _shared_memory(source: Host, worker: Host) -> Verdict:
    if not same_host(source, worker):
        return Verdict(
            False,
            f"the source's memory is on host {_name(source)}, and the worker runs on host {_name(worker)}; start a "
            "replica on the trainer's host, or publish from a checkpoint directory that both can read",
        )
    if not source.pid_namespace or source.pid_namespace != worker.pid_namespace:
        return Verdict(
            False,
            f"source and worker share host {_name(source)} but not its process ids ({_namespace(source)} and "
            f"{_namespace(worker)}), so the worker cannot open the source's memory; run both in one container, or "
            "their containers with a common PID namespace (docker run --pid=host, Kubernetes shareProcessNamespace)",
        )
    return Verdict(True, f"trainer and worker share host {_name(source)}, so it reads the trainer's memory directly")


def _file(source: Host, worker: Host) -> Verdict:
    if not same_host(source, worker):
        return Verdict(
            False,
            f"the checkpoint's files were opened on host {_name(source)}, and the worker runs on host "
            f"{_name(worker)}; start a source or a replica on the other's host",
        )
    return Verdict(True, f"source and worker share host {_name(source)}, so it maps the checkpoint's files")


RULES: Mapping[str, Rule] = MappingProxyType({"shared_memory": _shared_memory, "file": _file})
"""How to tell whether a transport reaches, by its name."""


def choose_transport(source: Host, transport: str, worker: Host, available: Sequence[str]) -> Choice:
    """How a worker reads regions of a source that offers them over `transport`.

    available: the transports that the worker's host can use. Raises FAILED_PRECONDITION if the worker cannot use this
    transport at all, UNAVAILABLE if it does not reach from there; both say why and what to do.
    """
    rule = RULES.get(transport)
    if rule is None:
        raise precondition(
            f"the source on host {_name(source)} offers its weights over {transport or 'no transport'!r}, which this "
            f"manager does not know (it knows {', '.join(RULES)}); bring manager, trainer and replicas to one version"
        )
    if transport not in available:
        raise precondition(
            f"the source on host {_name(source)} offers its weights over {transport}, which the worker on host "
            f"{_name(worker)} cannot use (it can use {', '.join(available) or 'none'}); run `ckpt-engine doctor` there "
            "to see why"
        )
    verdict = rule(source, worker)
    if not verdict.ok:
        raise unavailable(verdict.reason)
    return Choice(transport, verdict.reason)


def _name(host: Host) -> str:
    return host.name or host.address or (host.boot_id[:8] if host.boot_id else "(unnamed)")


def _namespace(host: Host) -> str:
    return host.pid_namespace or "unknown"
