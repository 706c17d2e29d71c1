"""A trainer that brings replicas an update by a collective and kills itself in the middle of the next one.

python -m tests.end_to_end.killed_lead MANAGER DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ckpt_engine import Trainer
from ckpt_engine.transport.collective.door import _doors
from tests.cluster import eventually
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.test_collective_updates import after_go
from tests.tiny_model import make_tiny_qwen3


def die() -> None:
    """Once all workers run their part: one that has not heard by then that all begin goes back instead, and rightly.
    They miss this one after five seconds."""
    (meeting,) = [each._meeting[2] for each in _doors.values() if each._meeting is not None]
    eventually("all workers run", 60.0, lambda: len(meeting._running) == len(meeting._attendees) - 1)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    address, directory = sys.argv[1:]
    model = make_tiny_qwen3(Path(directory), 6, vocabulary=PADDED_VOCABULARY)
    trainer = Trainer(address, lineage="killed in the middle")
    trainer.publish(model, transport="nccl", move=True)
    assert trainer.update_weights().ok
    after_go(trainer, die)
    trainer.update_weights(timeout=60.0)


if __name__ == "__main__":
    main()
