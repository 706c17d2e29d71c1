"""Ckpt-engine: each training step's weights, in every inference server, exactly.

Importing the package is free: what a trainer needs (grpc, torch) is loaded with `ckpt_engine.Trainer`, since engines
import parts of this package too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_engine.client import AsyncClient, Client
    from ckpt_engine.core.deadlines import Deadlines
    from ckpt_engine.core.problems import CkptEngineError, ErrorCode
    from ckpt_engine.options import RollbackOptions, UpdateOptions
    from ckpt_engine.reading.pulling import pull
    from ckpt_engine.reading.reader import Reader
    from ckpt_engine.report import UpdateReport
    from ckpt_engine.trainer import Probe, TokenScores, Trainer

    __version__: str

__all__ = [
    "AsyncClient",
    "Client",
    "CkptEngineError",
    "Deadlines",
    "ErrorCode",
    "Probe",
    "Reader",
    "RollbackOptions",
    "TokenScores",
    "Trainer",
    "UpdateOptions",
    "UpdateReport",
    "__version__",
    "pull",
]

_HOMES = {
    "AsyncClient": "ckpt_engine.client",
    "Client": "ckpt_engine.client",
    "RollbackOptions": "ckpt_engine.options",
    "UpdateOptions": "ckpt_engine.options",
    "CkptEngineError": "ckpt_engine.core.problems",
    "Deadlines": "ckpt_engine.core.deadlines",
    "ErrorCode": "ckpt_engine.core.problems",
    "Probe": "ckpt_engine.trainer",
    "Reader": "ckpt_engine.reading.reader",
    "TokenScores": "ckpt_engine.trainer",
    "Trainer": "ckpt_engine.trainer",
    "UpdateReport": "ckpt_engine.report",
    "pull": "ckpt_engine.reading.pulling",
}


def __getattr__(name: str) -> Any:
    import os
    from importlib import import_module

    if name == "__version__":
        return import_module("ckpt_engine.manager.about").software_version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # gRPC writes lines of its own to standard error, beside what our errors say; it reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if name in ("Probe", "Reader", "TokenScores", "Trainer", "pull"):
        import_module("ckpt_engine.extras").require("trainer", "torch", "numpy", what=f"ckpt_engine.{name}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
