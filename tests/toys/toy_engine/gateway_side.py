"""What the gateway knows of the toy engine: one of the reference engine's dialects, and how it counts its requests."""

from __future__ import annotations

from ckpt_engine.gateway.engines import GatewaySide
from ckpt_engine_adapters.reference import gateway_side as reference
from ckpt_engine_adapters.sglang.generate import Generate

SIDE = GatewaySide(dialects=(Generate,), load=reference.SIDE.load)
