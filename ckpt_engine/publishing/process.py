"""The process that publishes directories of one lineage for the manager that started it.

    python -m ckpt_engine.publishing.process ADDRESS LINEAGE ROOT...

Requests come as frames on standard input, one at a time; events go to standard output. It ends when its input does:
then the manager has ended. All other output goes to standard error.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, internal
from ckpt_engine.publishing.frames import EVENT, PROBLEM, encode_frame, read_frame
from ckpt_engine.publishing.publisher import Publisher
from ckpt_engine.v1 import manager_pb2

log = logging.getLogger("ckpt_engine.publishing")


def main(arguments: Sequence[str]) -> None:
    """Serves until the input ends."""
    address, lineage, *roots = arguments
    deadlines = Deadlines.from_environment(os.environ)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO)
    threading.Thread(target=_end_with_the_manager, args=(deadlines.stop,), daemon=True).start()
    publisher = Publisher(address, lineage, [Path(root) for root in roots], deadlines)
    try:
        serve(publisher, sys.stdin.buffer, output)
    finally:
        publisher.close()


def serve(publisher: Publisher, requests: BinaryIO, output: BinaryIO) -> None:
    """Answers one request after the other."""

    def say(kind: bytes, body: bytes) -> None:
        output.write(encode_frame(kind, body))
        output.flush()

    def report_progress(progress: manager_pb2.UpdateProgress) -> None:
        say(EVENT, manager_pb2.UpdateEvent(progress=progress).SerializeToString())

    while (frame := read_frame(requests)) is not None:
        try:
            report = publisher.update(manager_pb2.UpdateFromDirectoryRequest.FromString(frame[1]), report_progress)
        except CkptEngineError as error:
            say(PROBLEM, error.problem.SerializeToString())
        except Exception as error:
            log.exception("publishing failed")
            problem = internal(f"publishing failed: {type(error).__name__}: {error}").problem
            say(PROBLEM, problem.SerializeToString())
        else:
            say(EVENT, manager_pb2.UpdateEvent(report=report).SerializeToString())


def _end_with_the_manager(seconds: float) -> None:
    """Ends this process when the manager has ended, also in the middle of an update. seconds: to end by itself."""
    manager_pipe = select.poll()
    manager_pipe.register(0, 0)  # reports only that the other end was closed
    manager_pipe.poll(None)
    time.sleep(seconds)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
