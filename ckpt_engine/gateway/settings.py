"""Every limit of a gateway, in one place. Seconds unless a name says otherwise. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ckpt_engine.security.server import ServerSecurity


@dataclass(frozen=True)
class GatewaySettings:
    """How a gateway runs. It has a manager or a list of replicas, not both."""

    listen: str = "127.0.0.1:8081"  # host:port
    manager: str = ""  # host:port
    pool: str = ""  # of the manager's replicas
    replicas: tuple[str, ...] = ()  # base URLs of engines
    queue_seconds: float = 60.0  # how long a request waits for a replica, unless its caller says
    most_queue_seconds: float = 3600.0  # that a caller may ask for
    unready_after: float = 30.0  # /readyz fails once no replica could serve for so long
    idle: float = 300.0  # a leg that brings nothing for so long is given up; a whole request has no limit
    comment: float = 15.0  # between comments in a stream that waits
    drain: float = 30.0  # for running requests, after SIGTERM
    connect: float = 5.0  # to an engine
    probe: float = 1.0  # between probes, and for one
    requests: int = 4096  # most at once, of this process
    body_bytes: int = 16 << 20  # of one request
    body_values: int = 1 << 20  # of one request, above all token ids
    resumes: int = 256  # of one sample
    dry: int = 8  # legs in a row without a token
    deaths: int = 2  # engines that died or fell silent with the request inside, after which it is given up
    dying: float = 1.0  # how long to watch an engine that broke a request off, where its death would decide that
    prefills: int = 32  # resumed legs at one replica without a token yet, of this process
    jitter: float = 0.1  # most, before a leg after a break
    security: ServerSecurity = field(default_factory=ServerSecurity)

    def to_json(self) -> str:
        """Encodes the settings for a worker process."""
        security = {name: None if value is None else str(value) for name, value in asdict(self.security).items()}
        security["insecure"] = "1" if self.security.insecure else ""
        return json.dumps({**asdict(self), "security": security})

    @classmethod
    def from_json(cls, text: str) -> GatewaySettings:
        """Decodes settings that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        security_values = values.pop("security")
        insecure = bool(security_values.pop("insecure"))
        paths = {name: Path(path) if path else None for name, path in security_values.items()}
        names = {each.name for each in fields(cls)}
        values["replicas"] = tuple(values["replicas"])
        security = ServerSecurity(**paths, insecure=insecure)
        return cls(**{name: value for name, value in values.items() if name in names}, security=security)
