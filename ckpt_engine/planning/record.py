"""A plan for programs: every edge as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_engine.core.relay_layout import SLOTS
from ckpt_engine.planning.foresight import Forecast
from ckpt_engine.planning.update import Line, PlanAnswer, traffic


def as_json(answer: PlanAnswer, forecast: Forecast, setting: Mapping[str, str]) -> dict[str, Any]:
    """A whole plan as JSON, with bytes and seconds as numbers."""
    model, relays = answer.question.model, answer.relays
    edges = [_edge(line, wave) for wave, lines in enumerate(answer.fills) for line in lines]
    edges += [_edge(line, None) for line in answer.installs]
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
                "wave": relay.wave,
                "bytes": sum(read.bytes for read in relay.reads),
                "slot_bytes": relay.slot.size,
                "memory_bytes": SLOTS * relay.slot.size,
                "trees": [{"asks": peer, "share": share} for peer, share in relays.trees.get(relay.name, ())],
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


def _edge(line: Line, wave: int | None) -> dict[str, Any]:
    """An edge as JSON. wave: in which a relay reads it; None: a worker reads it in the pause."""
    edge = line.edge
    return {
        "source": edge.source,
        "source_host": edge.source_host,
        "reader": edge.reader,
        "reader_host": edge.reader_host,
        "replica": line.replica or None,
        "worker": line.worker if line.replica else None,
        "wave": wave,
        "transport": edge.transport,
        "reason": line.choice.reason,
        "bytes": edge.bytes,
    }
