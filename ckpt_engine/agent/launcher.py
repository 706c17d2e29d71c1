"""A process between an agent and the engine that it launched, so that neither outlives the other.

Run by file name as a separate process, `python -I launcher.py GRACE STATUS_FD COMMAND...`. It uses only the standard
library, so that it starts in milliseconds and an engine's broken environment cannot stop it.

Why a process and not a flag on the child: PR_SET_PDEATHSIG kills only the direct child, but engines are trees (API
server, scheduler, one process a GPU), and it fires when the *thread* that forked ends, not the process. Setting it
between fork and exec would also run Python in the forked child of an agent full of gRPC threads, which may deadlock.
This process has one thread, so it may do that. As a subreaper (PR_SET_CHILD_SUBREAPER) it inherits every descendant
with a dead parent, so that nothing of an engine escapes by forking twice or by leaving its process group.

What ends, and when:
  the agent ends, in any way: the pipe at our standard input ends -> SIGTERM, a short grace, SIGKILL to the whole tree.
  the agent asks (SIGTERM to us): SIGTERM to the engine's group, GRACE seconds, SIGKILL to the whole tree.
  the engine exits: its remaining processes are ended in the same way, then we end as it did (same status or signal).
  we are killed with SIGKILL: the engine's first process gets SIGKILL from the kernel (PR_SET_PDEATHSIG), and the
    agent, which notices our end, kills the rest of our session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ABANDONED_GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL when the agent is dead: enough to remove files and shared memory."""
KILL_SECONDS = 10.0
"""How long a killed process may take to end (it may be in a system call that cannot be interrupted)."""
CANNOT_START = 127


def prctl(option: int, value: int) -> None:
    """Calls prctl(2). Raises OSError if the kernel refuses."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def parents() -> dict[int, int]:
    """pid -> parent pid of every visible process, without zombies."""
    result: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # The name in parentheses may hold anything, so fields are counted from the last parenthesis.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    result[int(entry)] = int(parent)
    return result


def descendants(root: int) -> list[int]:
    """Living descendants of `root`, nearest first. Complete only where `root` is a subreaper."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    result: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for pid in frontier for child in children.get(pid, ())]
        result += frontier
    return result


class Launcher:
    """One engine and everything that it starts. Single-threaded; all waiting is in `_sleep`."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace = grace_seconds
        self._wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._stop_asked = False
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_stop)
        self._engine: subprocess.Popen[bytes] | None = None
        self._status: int | None = None

    def _ask_stop(self, *_: object) -> None:
        self._stop_asked = True

    def run(self, command: list[str], status_descriptor: int) -> int:
        """Starts the engine, waits until its whole tree has ended, and returns its status as Popen.returncode does."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        launcher = os.getpid()

        def die_with_launcher() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before the line above took effect
                os._exit(CANNOT_START)

        try:
            # process_group=0: SIGTERM goes to the engine's group, not to us. The session stays ours, by which the agent
            # finds the remaining processes if we are killed.
            self._engine = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_launcher
            )
        except (OSError, subprocess.SubprocessError) as error:
            os.write(status_descriptor, f"!{error}".encode()[:4096])
            return CANNOT_START
        os.write(status_descriptor, f"{self._engine.pid}\n".encode())
        os.close(status_descriptor)

        abandoned = False
        while self._status is None and not self._stop_asked and not abandoned:
            abandoned = self._sleep(None, lifeline=True)
            self._reap()
        gracious = self._stop_asked and not abandoned and self._status is None
        self._end(self._grace if gracious else min(self._grace, ABANDONED_GRACE_SECONDS))
        return self._status if self._status is not None else -int(signal.SIGKILL)

    def _sleep(self, seconds: float | None, lifeline: bool = False) -> bool:
        """Sleeps until a signal arrives or `seconds` pass. True: the agent has ended."""
        watched = [self._wakeup, 0] if lifeline else [self._wakeup]
        readable, _, _ = select.select(watched, [], [], seconds)
        if self._wakeup in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 4096)
        return 0 in readable and not os.read(0, 4096)

    def _reap(self) -> None:
        """Reaps every child that ended: the engine's first process, and orphans that we inherited."""
        assert self._engine is not None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._engine.pid:
                self._status = os.waitstatus_to_exitcode(status)
                self._engine.returncode = self._status

    def _end(self, grace: float) -> None:
        """Sends SIGTERM to the group and descendants outside it; after `grace` seconds SIGKILL until all are dead."""
        assert self._engine is not None
        with contextlib.suppress(OSError):
            os.killpg(self._engine.pid, signal.SIGTERM)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                if os.getpgid(pid) != self._engine.pid:
                    os.kill(pid, signal.SIGTERM)
        self._wait_gone(grace)
        deadline = time.monotonic() + KILL_SECONDS
        while (survivors := descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in survivors:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._wait_gone(0.1)
        self._reap()
        if survivors := descendants(os.getpid()):
            print(f"ckpt-engine launcher: processes {survivors} do not die", file=sys.stderr, flush=True)

    def _wait_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self._reap()
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not descendants(os.getpid()):
                return
            self._sleep(min(remaining, 0.1))


def main(arguments: list[str]) -> int:
    """Runs the launcher, and ends as the engine ended: with its exit status, or by its signal."""
    status = Launcher(float(arguments[0])).run(arguments[2:], int(arguments[1]))
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the engine has dumped its own core; ours would be useless
        signal.set_wakeup_fd(-1)
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
        time.sleep(1)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
