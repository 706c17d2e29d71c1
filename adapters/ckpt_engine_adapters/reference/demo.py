"""The reference engine in `ckpt-engine demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ckpt_engine.demo.servers import GenerateServer


class ReferenceServer(GenerateServer):
    """Starts the reference engine for the demo, and asks it for tokens."""

    start_seconds: ClassVar[float] = 150.0

    def arguments(self, tensor_parallel: int) -> Sequence[str]:
        return ("--dtype", "float32", "--load-format", "dummy", "--tensor-parallel", str(tensor_parallel))


SERVER = ReferenceServer()
