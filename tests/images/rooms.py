"""Roots of a file system in fresh directories, and commands inside them: namespaces, overlays and chroot. Needs root.

The programs below /usr are this machine's, mounted read-only; Python is the one that runs the tests, at /usr/local, as
in images of Python. Everything else is made here.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ACCOUNTS = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nshadow:x:42:\nnogroup:x:65534:\n",
    "shadow": "root:*:19000:0:99999:7:::\n",
    "gshadow": "root:*::\n",
}


@dataclass(frozen=True)
class Mounted:
    """source is mounted at target, a path in the root. writable: also for whoever is inside and may."""

    source: Path
    target: str
    writable: bool = False


@dataclass
class Room:
    """Layers of one root, the topmost first; what is written goes into `top`. mounts: what stands in each of them."""

    top: Path
    below: tuple[Path, ...]
    mounts: tuple[Mounted, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[Path, ...]:
        return (self.top, *self.below)

    def mounting(self, at: Path, *, writable: bool, also: Sequence[Mounted] = ()) -> list[str]:
        """Commands that mount this root at a directory of the host, in a mount namespace."""
        lower = ":".join(str(layer) for layer in (self.below if writable else self.layers))
        options = f"lowerdir={lower}"
        if writable:
            work = self.top.with_name(f"{self.top.name}.work")
            work.mkdir(exist_ok=True)
            options += f",upperdir={self.top},workdir={work}"
        commands = [shlex.join(["mount", "-t", "overlay", "overlay", "-o", options, str(at)])]
        for each in (*self.mounts, *also):
            target = shlex.quote(f"{at}{each.target}")
            commands.append(f"mount --bind {shlex.quote(str(each.source))} {target}")
            if not each.writable:
                commands.append(f"mount -o remount,ro,bind {target}")
        return commands


def can_be_made() -> str:
    """Why there can be no such rooms here; empty: there can."""
    if os.geteuid() != 0 or platform.system() != "Linux":
        return "only root can mount"
    if sys.base_prefix == "/usr":
        return "the Python of the system cannot stand at /usr/local"
    return ""


def base_room(folder: Path, mounts: Sequence[Mounted] = ()) -> Room:
    """What an image of Python has, made of this machine's."""
    if why := can_be_made():
        pytest.skip(why)
    top = folder / "base"
    for name in ("dev", "etc", "home", "opt", "proc", "root", "run", "sys", "tmp", "usr/local", "var/lib", "var/tmp"):
        (top / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (top / name).chmod(0o1777)
    fixed = [Mounted(Path("/usr"), "/usr"), Mounted(Path(sys.base_prefix), "/usr/local")]
    for name in TOP:
        path = Path("/", name)
        if path.is_symlink():
            (top / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            (top / name).mkdir()
            fixed.append(Mounted(path, f"/{name}"))
    for name, text in ACCOUNTS.items():
        (top / "etc" / name).write_text(text)
    (top / "etc" / "shadow").chmod(0o600)
    for name in ("resolv.conf", "nsswitch.conf", "ld.so.cache", "login.defs", "hosts", "host.conf", "gai.conf"):
        if (path := Path("/etc", name)).is_file():
            (top / "etc" / name).write_bytes(path.read_bytes())
    for each in mounts:
        target = top / each.target.lstrip("/")
        if each.source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
    return Room(
        folder / "base-top",
        (top,),
        (*fixed, *mounts),
        # The library of this Python is found by where Python was made for, which is not where it stands here.
        {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin", "LD_LIBRARY_PATH": "/usr/local/lib"},
    )


def inside(commands: Sequence[str], last: str, *, network: int = 0, host_processes: bool = False) -> list[str]:
    """A command line that runs `commands` in namespaces of their own, and becomes `last` there, as process 1.

    network: a process whose network is joined; 0: that of this test. host_processes: it sees this machine's processes,
    and is one of them.
    """
    script = "\n".join(["set -e", *commands, f"exec {last}"])
    joined = ["nsenter", f"--net=/proc/{network}/ns/net"] if network else []
    own = [] if host_processes else ["--pid", "--fork", "--kill-child"]
    return [*joined, "unshare", "--mount", *own, "sh", "-c", script]


def entering(
    root: Path, words: Sequence[str], environment: Mapping[str, str], directory: str, user: str, *, caged: bool
) -> str:
    """The shell's words that go into a mounted root and become this command. user: `UID:GID`. caged: with nothing that
    only root may do, as `capabilities: {drop: [ALL]}` and `allowPrivilegeEscalation: false` have it."""
    uid, gid = user.split(":")
    cage = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"] if caged else []
    return shlex.join(
        [
            *("chroot", str(root), "env", "-i", *(f"{name}={value}" for name, value in environment.items())),
            *("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *cage),
            *("env", f"--chdir={directory}", *words),
        ]
    )


def run(room: Room, at: Path, words: Sequence[str], environment: Mapping[str, str], directory: str, user: str) -> str:
    """One step of a build, that writes into the room's top; returns what it printed, or raises with it."""
    commands = room.mounting(at, writable=True)
    commands += [f"mount -t proc proc {at}/proc", f"mount --rbind /dev {at}/dev"]
    commands += [f"mount -t tmpfs tmpfs {at}/run"]
    last = entering(at, words, environment, directory, user, caged=False)
    done = subprocess.run(inside(commands, last), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout
