"""Makes helper processes that have the relay's arena mapped. A process of its own, started before the arena is sealed.

Once the arena is sealed no process can map it writable, so a helper that writes must inherit such a mapping. A relay
cannot fork helpers itself: it has threads, and its own mapping is not for children. This process has one thread and
loads next to nothing; it maps the arena and then forks one helper for each request. It ends with its socket, and its
helpers end with it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import sys

from ckpt_engine.transport.ucx.channel import LENDER, READER
from ckpt_engine.transport.ucx.memory import die_with_parent, map_shared, unmap

ADDRESSES = struct.Struct("<QQ")
"""Its first message: addresses of the writable and the read-only mapping of the arena."""

REQUEST = struct.Struct("<B7x64s256s")
"""Role, name of the agent, UCX_NET_DEVICES or nothing; the helper's end of a channel comes with it. Answered with the
process id, that name, and a descriptor of the process (pidfd)."""

STARTED = struct.Struct("<Q64s")


def serve(channel: socket.socket, arena: int, size: int) -> None:
    """Forks helpers until the relay hangs up. arena: its descriptor."""
    writable, readable = map_shared(arena, size, True), map_shared(arena, size, False)
    os.close(arena)
    channel.send(ADDRESSES.pack(writable, readable))
    # The kernel reaps them; the relay knows each by its descriptor, which no later process gets.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    own = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, REQUEST.size, 1, socket.MSG_CMSG_CLOEXEC)
        if not request:
            return
        role, name, devices = REQUEST.unpack(request)
        # The helper waits for the relay's first word before it does anything, so it cannot have ended before the next
        # line is through.
        if (child := os.fork()) == 0:
            die_with_parent(signal.SIGKILL)
            if os.getppid() != own:
                os._exit(1)
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            base = readable if role == LENDER else writable
            unmap(writable if role == LENDER else readable, size)
            _help(descriptors[0], role, name.rstrip(b"\0").decode(), devices.rstrip(b"\0").decode(), base, size)
        for each in descriptors:
            os.close(each)
        handle = os.pidfd_open(child)
        socket.send_fds(channel, [STARTED.pack(child, name)], [handle])
        os.close(handle)


def _help(descriptor: int, role: int, name: str, devices: str, base: int, size: int) -> None:
    """Runs a helper. Does not return."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # all weights would be in it
        if devices:
            os.environ["UCX_NET_DEVICES"] = devices
        from ckpt_engine.transport.ucx.helper import help_relay

        with socket.socket(fileno=descriptor) as channel:
            help_relay(channel, name, base, size, role == READER)
    except BaseException as error:
        print(f"ckpt-engine: a UCX helper has ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


if __name__ == "__main__":
    _channel, _arena, _size = (int(each) for each in sys.argv[1:])
    with socket.socket(fileno=_channel) as _relay:
        serve(_relay, _arena, _size)
