"""Identifies processes, also when pids are reused, and the process and user at the other end of a socket."""

from __future__ import annotations

import os
import socket
import struct


def process_start_time(pid: int) -> int:
    """Clock ticks between boot and the start of ``pid``, 0 if there is no such process (or it is a zombie).

    Together with the pid it identifies one process for ever: field 22 of /proc/<pid>/stat, see proc_pid_stat(5).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket and its user, as this process's namespaces number them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user


def peer_user(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    return peer(connection)[1]


def is_ours(user: int) -> bool:
    """Whether a user is trusted like this process's own: it is the same one, or root."""
    return user in (os.geteuid(), 0)
