"""Every limit of a gateway, in one place. Seconds unless a name says otherwise. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ckpt_engine.security.server import ServerSecurity


@dataclass(frozen=True)
class GatewaySettings:
    """How a gateway runs. listen: host:port. manager: its address, and pool: of the replicas that are taken from it; or
    no manager, and replicas: base URLs of engines.

    queue_seconds: how long a request waits until somebody can serve it, unless its caller says. unready_after: so long
    nobody could serve, and /readyz says so. idle: a leg that brings nothing for so long is given up; a whole request
    may take as long as it likes. comment: between comments in a caller's stream that waits. drain: of running requests
    after SIGTERM. connect: to an engine.
    requests: at most so many at once, of this process. body_bytes, body_values: of one request, its
    token ids above all. resumes: of one sample. dry: legs in
    a row that bring nothing. deaths: engines that died, or fell silent, with the request inside, after which it is
    given up. dying: how long an engine that broke it off is watched where its death would decide that. prefills:
    resumed legs at one replica that have no token yet, of this process. jitter: at most, before a leg after a break.
    """

    listen: str = "127.0.0.1:8081"
    manager: str = ""
    pool: str = ""
    replicas: tuple[str, ...] = ()
    queue_seconds: float = 60.0
    most_queue_seconds: float = 3600.0
    unready_after: float = 30.0
    idle: float = 300.0
    comment: float = 15.0
    drain: float = 30.0
    connect: float = 5.0
    probe: float = 1.0
    requests: int = 4096
    body_bytes: int = 16 << 20
    body_values: int = 1 << 20
    resumes: int = 256
    dry: int = 8
    deaths: int = 2
    dying: float = 1.0
    prefills: int = 32
    jitter: float = 0.1
    security: ServerSecurity = field(default_factory=ServerSecurity)

    def to_json(self) -> str:
        """The settings as text, for a worker process."""
        security = {name: None if value is None else str(value) for name, value in asdict(self.security).items()}
        security["insecure"] = "1" if self.security.insecure else ""
        return json.dumps({**asdict(self), "security": security})

    @classmethod
    def from_json(cls, text: str) -> GatewaySettings:
        """The settings that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        security_values = values.pop("security")
        insecure = bool(security_values.pop("insecure"))
        paths = {name: Path(path) if path else None for name, path in security_values.items()}
        known = {each.name for each in fields(cls)}
        values["replicas"] = tuple(values["replicas"])
        security = ServerSecurity(**paths, insecure=insecure)
        return cls(**{name: value for name, value in values.items() if name in known}, security=security)
