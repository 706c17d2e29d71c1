"""The shelf of one adapter in one engine: which of its versions the engine's workers hold, and which requests use them.

It decides how the processes of an engine say and see that, and in which place a version goes. It does not decide which
versions there are (the workers' adapter shelf does), nor how tokens are computed.

A shelf is a runtime directory below the engine's own, with a page of state words of its own: to the manager it is a
replica. Beside it lie its *places*, each for one version: a page of state words again, of which `verdict` says whether
all workers hold the same version there, verified. A version in a place never changes; another one takes a place only
when no request uses it. Of the versions on a shelf the newest is that which was put there last, which after a rollback
is not the highest.

Each API process counts its own requests, and holds a shared lock on the place's file of uses while there are any, so
that a killed process counts no more. A worker marks the place first and then looks for a lock, a request takes the lock
first and then looks at the mark: so one of the two sees the other.

The workers of an engine come to an install one after another, and uses begin and end meanwhile. So the first one
chooses the place, and writes that down for the others.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ckpt_engine.core.problems import precondition
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage, WorkerSlot, verdict
from ckpt_engine.gate.reader import StateReader
from ckpt_engine.v1 import weights_pb2

ENVIRONMENT = "CKPT_ENGINE_ADAPTERS"
"""Variable that tells a launched engine its adapters, and how many versions it keeps of each: "policy=3,critic=2"."""

_FOLDER = "adapters"
_ROOT_BYTES = 32
_LOCK = struct.Struct("hhqqi")  # kind, from where, start, length, 0: of an open file description
_CHOICE = struct.Struct("<Qq")  # epoch, number of the place; -1: there is none


def shelf_directory(engine: Path, adapter: str) -> EngineDirectory:
    """The runtime directory of an adapter's shelf, made if it is not there. engine: the path of the engine's own."""
    path = engine / _FOLDER / adapter
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return EngineDirectory(path)


def clear_shelves(engine: Path) -> None:
    """Removes what the last engine's workers wrote of adapters. What agents have there stays. engine: as above."""
    for shelf in (engine / _FOLDER).glob("*"):
        for pattern in ("page", "place-*", "base-*", "choice"):
            for file in shelf.glob(pattern):
                file.unlink(missing_ok=True)


class ShelfPlace:
    """One place of a shelf, as any process of the engine sees it."""

    def __init__(self, directory: Path, number: int) -> None:
        """Opens it, and makes its files if they are not there. Raises CkptEngineError: there is no room for them."""
        self.page = EnginePage(directory / f"place-{number}")
        self._reader = StateReader(self.page)
        self._roots = directory
        self._uses = directory / f"place-{number}.uses"
        self._file: int | None = None  # locked, shared, while requests of this process use the place
        self._requests = 0
        self._base: tuple[bytes, bytes] = (b"", b"")  # a root, and that of its base

    def holds(self) -> weights_pb2.Identity | None:
        """The version that all workers hold here, verified; None: there is none."""
        return self._reader.verdict().identity

    def holds_now(self) -> weights_pb2.Identity | None:
        """The same, read afresh."""
        return verdict(self.page.read()).identity

    @property
    def order(self) -> int:
        """The epoch by which the version was put here; 0: none was."""
        return max((word.epoch for word in self.page.read()), default=0)

    def base_of(self, identity: weights_pb2.Identity) -> bytes:
        """The root of the base that a version in this place names; empty: not known."""
        if self._base[0] != identity.root:
            with suppress(OSError):
                self._base = identity.root, (self._roots / f"base-{identity.root.hex()}").read_bytes()
        return self._base[1] if self._base[0] == identity.root else b""

    def note_base(self, identity: weights_pb2.Identity, base_root: bytes) -> None:
        """Writes which base a version names, before it is marked as held. All workers write the same."""
        assert len(base_root) == _ROOT_BYTES
        path = self._roots / f"base-{identity.root.hex()}"
        new = path.with_suffix(f".{os.getpid()}")
        new.write_bytes(base_root)
        new.rename(path)

    def use(self, identity: weights_pb2.Identity) -> bool:
        """Counts a request of this process that uses this version. False: the place has another one by now."""
        if self._file is None:
            descriptor = os.open(self._uses, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK))
            self._file = descriptor
        self._requests += 1
        if self.holds_now() != identity:
            self.leave()
            return False
        return True

    def leave(self) -> None:
        """Ends what `use` began."""
        self._requests -= 1
        if self._requests == 0 and self._file is not None:
            os.close(self._file)
            self._file = None

    def used(self) -> bool:
        """Whether a request uses it. Only after a worker has marked its word the answer stays "no"."""
        descriptor = os.open(self._uses, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
        finally:
            os.close(descriptor)
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Closes its files."""
        self._requests = 1
        self.leave()
        self.page.close()


def choose_place(
    directory: Path, places: Sequence[tuple[ShelfPlace, WorkerSlot]], identity: weights_pb2.Identity, epoch: int
) -> int | None:
    """The number of the place for the version that an install of `epoch` brings, the same in each worker that asks.
    None: requests use all that could go.

    directory: of the shelf. places: each with this worker's word, which is marked as dirty if the place's version goes.
    Raises FAILED_PRECONDITION: a later install has begun.
    """
    descriptor = os.open(directory / "choice", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        content = os.pread(descriptor, _CHOICE.size, 0)
        last, number = _CHOICE.unpack(content) if content else (0, -1)
        if last > epoch:
            raise precondition(f"the install of epoch {last} has begun, and this one of epoch {epoch} is over")
        if last < epoch:
            number = _choose(places, identity)
            os.pwrite(descriptor, _CHOICE.pack(epoch, number), 0)
        return None if number < 0 else int(number)
    finally:
        os.close(descriptor)


def _choose(places: Sequence[tuple[ShelfPlace, WorkerSlot]], identity: weights_pb2.Identity) -> int:
    """The place that has this version, in some workers at least; or one that has none in all of them; or that of the
    oldest version that no request uses; -1: there is none. The newest version stays."""
    words = [place.page.read() for place, _ in places]
    for number, each in enumerate(words):
        if any(word.identity == identity for word in each):
            return number
    for number, each in enumerate(words):
        if verdict(each).identity is None:
            return number
    by_age = sorted(range(len(places)), key=lambda number: places[number][0].order)
    for number in by_age[:-1]:
        place, word = places[number]
        oldest = word.identity
        assert oldest is not None
        if place.used():
            continue
        word.dirty(word.epoch)  # no further request begins to use it
        if not place.used():
            return number
        word.clean(word.epoch, oldest)
    return -1


class Shelf:
    """One adapter's shelf, as an API process reads it. Used on its event loop."""

    def __init__(self, engine: Path, adapter: str, versions: int) -> None:
        """versions: how many places it has."""
        self.adapter = adapter
        directory = shelf_directory(engine, adapter).path
        self.places = [ShelfPlace(directory, number) for number in range(versions)]

    def held(self) -> Iterator[tuple[ShelfPlace, weights_pb2.Identity]]:
        """Each place with the version that it holds, the newest first."""
        for place in sorted(self.places, key=lambda place: place.order, reverse=True):
            if (identity := place.holds()) is not None:
                yield place, identity

    def close(self) -> None:
        """Closes its places."""
        for place in self.places:
            place.close()


def _lock(kind: int) -> bytes:
    """A lock (struct flock) of the whole file."""
    return _LOCK.pack(kind, os.SEEK_SET, 0, 0, 0)
