"""The runtime directory of one engine: where its workers, its gate and its agent meet.

This module decides the layout, the permissions and which process is the agent. It does not start or stop anything.
Everything in it belongs to one user (0700). Every start of an engine gets a new directory, so that nothing of an
earlier engine can be mistaken for this one's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from pathlib import Path

from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.host.reserve import room_for

ENVIRONMENT = "CKPT_ENGINE_DIRECTORY"
"""Variable that tells a launched engine where its directory is."""

TOKEN_HEADER = "x-ckpt-engine-token"
"""Header in which the agent sends the directory's token to the engine's gate."""

_SOCKET_PATH_BYTES = 107  # sun_path of unix(7) is 108 bytes with its final zero
_STALE_SECONDS = 3600.0
_TOKEN_CHARACTERS = 32
_TOKEN_BYTES = 64
_NUMBER_BYTES = 20
"""Most bytes of a pid or a count of agents."""


def default_root() -> Path:
    """The folder of engine directories, for this user only: below XDG_RUNTIME_DIR, or else below /tmp.

    Raises:
        CkptEngineError: the folder exists and belongs to another user, or others have access to it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    root = Path(base) / "ckpt-engine" if base and os.path.isdir(base) else Path(f"/tmp/ckpt-engine-{os.getuid()}")
    _make_private(root)
    return root


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise precondition(
                f"{path} must be a directory of user {os.getuid()} with mode 0700, "
                f"but it belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}; "
                "remove it or set XDG_RUNTIME_DIR to a private directory"
            ) from None


class EngineDirectory:
    """One engine's directory. ``path`` must exist; use :meth:`create` to make one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.page = path / "page"
        self.socket = path / "agent.sock"
        self._lock_path = path / "agent.lock"
        self._token_path = path / "token"
        self._epoch_path = path / "agent_epoch"
        self._lock_descriptor: int | None = None
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES:
            raise precondition(
                f"{self.socket} is longer than the {_SOCKET_PATH_BYTES} bytes that a socket path may have; "
                "set XDG_RUNTIME_DIR to a shorter one"
            )

    @classmethod
    def create(cls, root: Path | None = None) -> EngineDirectory:
        """Creates a new directory with a page and a token, below ``root`` (default: :func:`default_root`).

        Raises:
            CkptEngineError: there is no room for it; nothing of it remains.
        """
        from ckpt_engine.gate.page import EnginePage

        root = default_root() if root is None else root
        _remove_stale(root)
        directory = cls(root / secrets.token_hex(4))
        try:
            with room_for(_TOKEN_BYTES, root):
                directory.path.mkdir(mode=0o700)
                descriptor = os.open(directory._token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(secrets.token_hex(_TOKEN_BYTES // 2))
            EnginePage(directory.page).close()
        except BaseException:
            directory.remove()
            raise
        return directory

    @classmethod
    def from_environment(cls) -> EngineDirectory | None:
        """The directory that the launcher named, or None for an engine started by hand."""
        path = os.environ.get(ENVIRONMENT)
        return cls(Path(path)) if path else None

    @property
    def endpoint(self) -> str:
        """The ZeroMQ address at which the agent listens."""
        return f"ipc://{self.socket}"

    def token(self) -> str:
        """The secret that only the agent has, for the engine's control routes.

        Raises:
            CkptEngineError: the file holds less than 32 characters, so that the token could be guessed.
        """
        token = self._token_path.read_text().strip()
        if len(token) < _TOKEN_CHARACTERS:
            raise precondition(
                f"{self._token_path} holds a token of {len(token)} characters, and {_TOKEN_CHARACTERS} are needed: "
                "restart the engine with another directory, or write a long random token there before it starts"
            )
        return token

    def lock(self) -> None:
        """Makes the caller this engine's only agent until it exits or calls :meth:`unlock`.

        Raises:
            CkptEngineError: another agent holds the lock; the message names its pid. Or there is no room for its file.
        """
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise
            raise precondition(
                f"the engine at {self.path} already has an agent (pid {holder}); stop that one first"
            ) from None
        try:
            with room_for(_NUMBER_BYTES, self.path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._lock_descriptor = descriptor

    def unlock(self) -> None:
        """Lets another agent take over. Does nothing if the lock is not held."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def next_agent_epoch(self) -> int:
        """Numbers the agents of this engine, from 1. Call it once per start, with the lock held.

        Raises:
            CkptEngineError: there is no room for the count.
        """
        try:
            epoch = int(self._epoch_path.read_text()) + 1
        except FileNotFoundError:
            epoch = 1
        new = self._epoch_path.with_suffix(".new")
        with room_for(_NUMBER_BYTES, self.path):
            new.write_text(str(epoch))
            new.rename(self._epoch_path)
        return epoch

    def remove(self) -> None:
        """Deletes the directory. The engine must be gone."""
        self.unlock()
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_stale(root: Path) -> None:
    """Deletes old directories of killed agents: their lock is free and their workers are dead. A directory with a page
    of another version of ckpt-engine stays: the page cannot be read, and the workers may live."""
    for path in root.iterdir():
        try:
            if not (path / "token").exists() or time.time() - path.stat().st_mtime < _STALE_SECONDS:
                continue
            directory = EngineDirectory(path)
            directory.lock()
        except (OSError, CkptEngineError):
            continue  # in use, vanished or not ours
        try:
            in_use = _is_in_use(directory)
        except ValueError:
            in_use = True
        if in_use:
            directory.unlock()
        else:
            directory.remove()


def _is_in_use(directory: EngineDirectory) -> bool:
    from ckpt_engine.gate.page import EnginePage

    try:
        page = EnginePage(directory.page)
    except CkptEngineError:
        return False  # no room for a page that is not there: no worker has ever claimed a slot
    try:
        return any(word.alive for word in page.read())
    finally:
        page.close()
