"""What the trainer's tests share: a manager's configuration with short deadlines."""

from pathlib import Path

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.manager.service import ManagerConfig

DEADLINES = Deadlines(
    heartbeat=0.3, lease=10.0, resend=0.5, gather=60.0, prepare=60.0, seal=60.0, update=60.0, report=0.5, goodbye=20.0
)


def manager_config(ledger: Path, listen: str = "127.0.0.1:0") -> ManagerConfig:
    return ManagerConfig(listen=listen, http="", ledger=ledger, deadlines=DEADLINES, stop_seconds=1.0)
