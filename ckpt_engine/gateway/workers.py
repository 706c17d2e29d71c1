"""Several gateway processes behind one port. They share the socket and nothing else.

Each worker runs the command `gateway` again, which finds its settings in the environment as JSON.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

from ckpt_engine.gateway.metrics import TOGETHER
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.host.modules import module_command, module_environment

SETTINGS = "CKPT_ENGINE_GATEWAY_SETTINGS"
SOCKET = "CKPT_ENGINE_GATEWAY_SOCKET"

AGAIN_SECONDS = 1.0
"""How long a worker must have run before it is restarted."""

LOOK_SECONDS = 0.1

log = logging.getLogger("ckpt_engine.gateway")


def run_workers(settings: GatewaySettings, bound: socket.socket, number: int) -> int:
    """Runs `number` workers until SIGTERM or SIGINT; restarts those that die. Returns the exit status. Main thread."""
    stop = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stop.set())
    with tempfile.TemporaryDirectory(prefix="ckpt-engine-gateway-") as directory:
        variables = {SETTINGS: settings.to_json(), SOCKET: str(bound.fileno()), TOGETHER: directory}
        environment = module_environment(os.environ) | variables
        workers = [_start(environment, bound) for _ in range(number)]
        started = [time.monotonic()] * number
        while not stop.wait(LOOK_SECONDS):
            for place, worker in enumerate(workers):
                now = time.monotonic()
                if worker.poll() is not None and now - started[place] >= AGAIN_SECONDS:
                    log.error(
                        "worker %d ended with status %s: its streams are lost; it is restarted",
                        place,
                        worker.returncode,
                    )
                    workers[place], started[place] = _start(environment, bound), now
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)
        end = time.monotonic() + settings.drain + 15
        for worker in workers:
            try:
                worker.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(10)
    return 0


def _start(environment: dict[str, str], bound: socket.socket) -> subprocess.Popen[bytes]:
    command = module_command("ckpt_engine.commands.gateway")
    return subprocess.Popen(command, env=environment, pass_fds=[bound.fileno()], start_new_session=True)


def end_with(parent: int) -> None:
    """Ends this process as SIGTERM does once its parent has ended, since nothing would stop it then. On a thread."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
