"""What the trainer's tests share: a manager's configuration with short deadlines."""

from pathlib import Path

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.manager.service import ManagerConfig

DEADLINES = Deadlines(
    heartbeat=0.3, lease=2.0, resend=0.5, gather=15.0, prepare=15.0, seal=15.0, update=30.0, report=0.5
)


def manager_config(ledger: Path, listen: str = "127.0.0.1:0") -> ManagerConfig:
    return ManagerConfig(listen=listen, http="", ledger=ledger, deadlines=DEADLINES, stop_seconds=1.0)
