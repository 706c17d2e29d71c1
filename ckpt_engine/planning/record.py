"""A plan for programs: every edge as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ckpt_engine.core.relay_layout import SLOTS
from ckpt_engine.planning.foresight import Forecast
from ckpt_engine.planning.update import Line, PlanAnswer, traffic


def as_json(answer: PlanAnswer, forecast: Forecast, setting: Mapping[str, str]) -> dict[str, Any]:
    """A whole plan as JSON, with bytes and seconds as numbers."""
    model, relays = answer.question.model, answer.relays
    edges = [_edge(line, "fill") for line in answer.fills]
    edges += [_edge(line, "install") for line in answer.installs]
    return {
        "ok": not answer.impossible,
        "model": {
            "name": model.name,
            "tensors": len(model.tensors),
            "bytes": model.bytes,
            "bytes_by_dtype": dict(model.by_dtype),
            "notes": list(model.notes),
        },
        "setting": dict(setting),
        "edges": edges,
        "hosts": {host: dict(ways) for host, ways in traffic(answer).items()},
        "relays": [
            {
                "relay": relay.name,
                "replicas": list(relay.replicas),
                "bytes": sum(read.bytes for read in relay.reads),
                "slot_bytes": relay.slot.size,
                "memory_bytes": SLOTS * relay.slot.size,
                "asks": dict(relays.asks.get(relay.name, {})),
            }
            for relay in relays.filled.values()
        ],
        "prefetch": dict(relays.why),
        "time": {
            "stages": {
                stage: {"seconds": expected.seconds, "because": expected.because}
                for stage, expected in forecast.stages.items()
            },
            "pause_seconds": forecast.pause,
            "call_seconds": forecast.call,
            "unknown": list(forecast.unknown),
            "unmeasured": forecast.unmeasured or None,
        },
        "impossible": list(answer.impossible),
    }


def _edge(line: Line, stage: Literal["fill", "install"]) -> dict[str, Any]:
    """An edge as JSON. stage: fill: a relay reads it, before any pause; install: a worker does, in the pause."""
    edge = line.edge
    return {
        "source": edge.source,
        "source_host": edge.source_host,
        "reader": edge.reader,
        "reader_host": edge.reader_host,
        "replica": line.replica or None,
        "worker": line.worker if line.replica else None,
        "stage": stage,
        "transport": edge.transport,
        "reason": line.choice.reason,
        "bytes": edge.bytes,
    }
