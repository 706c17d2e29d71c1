"""Decides which directories may be published: those below the configured roots, after following symbolic links.

It looks at names and kinds of files and reads none of them. Any user with write access below a root decides what is
published.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpt_engine.core.problems import CkptEngineError, forbidden, invalid, not_found

WEIGHTS = (".safetensors", ".safetensors.index.json")
"""Endings of the files that a checkpoint is read from; its index may name others."""


def checked_roots(roots: Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """The roots, absolute. Raises INVALID_ARGUMENT if one is not a directory: a mistyped one would refuse all."""
    found = tuple(Path(os.path.abspath(root)) for root in roots)
    for root in found:
        if not root.is_dir():
            raise invalid(f"--allow-directory {root} is not a directory")
    return found


def resolve(directory: str, roots: Sequence[Path]) -> Path:
    """The real path of a directory, or of one file. Reads nothing outside the roots.

    Raises INVALID_ARGUMENT unless the path is absolute; PERMISSION_DENIED if it, or a file of weights in it, lies
    outside the roots; NOT_FOUND if it does not exist.
    """
    if not directory.startswith("/") or "\0" in directory:
        raise invalid(f"name the directory by its absolute path, as the hosts of the replicas know it: {directory!r}")
    path = Path(directory)
    real = inside(path, roots)
    try:
        if not stat.S_ISDIR(os.stat(real).st_mode):
            _regular(real)
            return real
        for entry in sorted(os.listdir(real)):
            if entry.endswith(WEIGHTS):
                check_file(real / entry, roots)
    except OSError as error:
        raise _unreadable(path, error) from error
    return real


def check_file(file: Path, roots: Sequence[Path]) -> None:
    """Checks that a file may be opened. Raises PERMISSION_DENIED for one outside the roots, NOT_FOUND if it is not
    there, INVALID_ARGUMENT if it is not a regular file."""
    real = inside(file, roots)
    try:
        _regular(real)
    except OSError as error:
        raise _unreadable(file, error) from error


def inside(path: Path, roots: Sequence[Path]) -> Path:
    """The real path. Raises PERMISSION_DENIED if it is below none of the roots, whether or not it exists."""
    real = Path(os.path.realpath(path))
    if any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        return real
    leads = "" if real == path else f" (it leads to {real})"
    allowed = ", ".join(str(root) for root in roots)
    raise forbidden(
        f"{path}{leads} lies outside the directories that this manager may publish: {allowed}; start it with "
        "--allow-directory ROOT"
    )


def _regular(file: Path) -> None:
    """Refuses anything but a regular file: opening a pipe could wait without end."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise invalid(f"{file} is not a regular file")


def _unreadable(path: Path, error: OSError) -> CkptEngineError:
    if isinstance(error, FileNotFoundError):
        return not_found(f"{error.filename or path} is not there")
    return invalid(f"cannot look at {error.filename or path}: {error.strerror}")
