"""Which process is which, also when pids are used again."""

from __future__ import annotations


def process_start_time(pid: int) -> int:
    """Clock ticks between boot and the start of ``pid``, 0 if there is no such process (or it is a zombie).

    Together with the pid it names one process for ever: field 22 of /proc/<pid>/stat, see proc_pid_stat(5).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
