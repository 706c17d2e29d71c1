"""A process that has loaded torch and what reads and lends memory, and forks one that is driven by lines when asked.

For test processes of our own only (`line_process.py`), which start by the dozen: a fork takes milliseconds, and loading
torch two seconds of a processor. What users start is started as they start it.

One datagram a process, on the socket whose descriptor is the argument: {"module", "arguments", "environment"}, and
three descriptors: its standard input, its standard output, and where its exit code goes. The answer is its pid. It ends
when the socket does.
"""

from __future__ import annotations

import json
import os
import runpy
import selectors
import socket
import sys
import traceback
from typing import Any, NoReturn

import ckpt_engine.relay.slots
import ckpt_engine.transport.registry  # noqa: F401  # loaded for those that are forked


def _become(request: dict[str, Any], stdin: int, stdout: int) -> NoReturn:
    code = 1
    try:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _main(descriptor: int) -> None:
    ours = socket.socket(fileno=descriptor)
    selector = selectors.DefaultSelector()
    selector.register(ours, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:  # a child has ended
                selector.unregister(key.fileobj)
                pid, status = key.data
                os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status)
                os.close(key.fd)
                continue
            message, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, 3)
            if not message:
                return
            stdin, stdout, status = descriptors
            pid = os.fork()
            if pid == 0:
                ours.close()
                os.close(status)
                _become(json.loads(message), stdin, stdout)
            os.close(stdin)
            os.close(stdout)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
            ours.send(str(pid).encode())


if __name__ == "__main__":
    _main(int(sys.argv[1]))
