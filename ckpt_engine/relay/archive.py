"""Versions on a relay's disk, so that any of them can be served again after everything was restarted.

It decides what is kept: whole versions as the relay held them, the last `keep` of them, and fewer if the disk has no
room. It does not decide when one is read: to the manager an archive is one more holder, and the relay reads it as it
reads any source, cell by cell against the sealed record, before anything is paused. Each version is whole; deltas would
join as further files of a version that name the one that they lead from.

A version is a folder with two files: `weights`, and `version`, an ArchivedVersion. It is written under another name,
put on the disk, read back and compared with the record, and only then renamed: so a process that is killed leaves a
part that no one takes for a version, and the next start removes it. What does not hash as it was sealed when it is read
is set aside and never offered again.

`write`, `verify` and `digest` block; callable from any thread, and one at a time writes.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from google.protobuf.message import DecodeError

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.offers import by_transport, holder_id, region_offered
from ckpt_engine.core.problems import CkptEngineError, aborted, data_loss, precondition, unavailable
from ckpt_engine.core.sealed_record import ProvenRecord, read_record
from ckpt_engine.core.sizes import in_words
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.machines.events import OfferedVersion
from ckpt_engine.relay.slots import SlotVersion
from ckpt_engine.source.digests import digest_atoms
from ckpt_engine.transport.archive.files import ArchiveTransport, archive_region
from ckpt_engine.transport.archive.kind import NAME
from ckpt_engine.v1.weights_pb2 import ArchivedVersion, Atoms, Host, Identity, Shard, SourceTable

log = logging.getLogger("ckpt_engine.relay")

KIND = "archive"
"""Of the holder that an archive is."""

_PART = "part-"
_ASIDE = "damaged-"
_WEIGHTS, _ABOUT, _LOCK = "weights", "version", "lock"
_ALIGNMENT = 64
_WRITE_BYTES = 16 << 20
_SPARE = 1.05  # of a version's size is to be free before it is written
_CHECK_BYTES = 256 << 20  # hashed between two looks at whether the relay is being stopped
_CLOSE_SECONDS = 5.0  # that a disk which is being written may take to notice


@dataclass(frozen=True)
class Archived:
    """One version in the archive."""

    folder: Path
    identity: Identity
    offer: OfferedVersion  # what the manager is told of it
    table: SourceTable
    bytes: int


class Archive:
    """One relay's archive."""

    def __init__(self, directory: Path, keep: int, name: str, host: Host) -> None:
        """Takes the directory, removes parts, and reads what is there. name: the relay's. host: the relay's, as its
        tables describe it.

        Raises UNAVAILABLE if the directory cannot be used, FAILED_PRECONDITION if another relay has it.
        """
        self._directory = directory
        self._keep = keep
        self._id = holder_id(KIND, name)
        self._host = host
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._closed = False
        if directory.exists() and not directory.is_dir():
            raise unavailable(f"--archive {directory} is not a directory: name one, or a path at which it can be made")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unavailable(f"--archive {directory} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise precondition(
                f"--archive {directory} is that of another relay that runs: name another directory"
            ) from None
        self._versions = self._read_all()

    @property
    def versions(self) -> tuple[OfferedVersion, ...]:
        """What it offers, the last one written first."""
        with self._lock:
            return tuple(each.offer for each in reversed(self._versions))

    @property
    def bytes(self) -> int:
        """Of all that it offers."""
        with self._lock:
            return sum(each.bytes for each in self._versions)

    def holds(self, identity: Identity) -> bool:
        """Whether it has this version."""
        with self._lock:
            return any(each.identity == identity for each in self._versions)

    def write(self, held: SlotVersion) -> bool:
        """Writes a version that lies verified in a slot; returns whether what it offers has changed. Then removes the
        oldest beyond `keep`.

        Raises UNAVAILABLE if there is no room or the disk fails, DATA_LOSS if the slot was given up meanwhile or the
        disk returns other bytes, ABORTED once it is closed. Nothing is left of the version then.
        """
        if self.holds(held.identity):
            return False
        with self._writing:
            about = ArchivedVersion(identity=held.identity, record=held.record, tensors=held.table.tensors)
            end = 0
            for shard, memory in zip(held.table.shards, held.sealed, strict=True):
                stored = Shard()
                stored.CopyFrom(shard)
                stored.region, stored.offset = 0, end
                about.shards.append(stored)
                end = -(-(end + memory.nbytes) // _ALIGNMENT) * _ALIGNMENT
            about.bytes = about.wanted_bytes = end
            self._make_room(end)
            part = self._directory / f"{_PART}{_name(held.identity)}"
            try:
                self._write_part(part, about, held)
                folder = self._directory / _name(held.identity)
                _remove(folder)
                part.rename(folder)
                _sync(self._directory)
            except OSError as error:
                raise unavailable(
                    f"version {held.identity.version} is not archived in {self._directory}: {error.strerror}"
                ) from error
            finally:
                _remove(part)
            with self._lock:
                self._versions.append(self._archived(folder, about))
                old = self._versions[: -self._keep]
                del self._versions[: -self._keep]
        for each in old:
            _remove(each.folder)
        return True

    def verify(self, identity: Identity) -> bool:
        """Hashes a version where it lies. If it is not as it was sealed it is never offered again; the file of the last
        such version is kept. Returns whether what it offers has changed."""
        with self._lock:
            found = next((each for each in self._versions if each.identity == identity), None)
        if found is None:
            return False
        try:
            self._check(self._about(found.folder), found.table)
        except (CkptEngineError, OSError, DecodeError) as error:
            if self._closed:
                return False
            self._set_aside(found, _words(error))
            return True
        return False

    def _set_aside(self, found: Archived, why: str) -> None:
        with self._lock:
            self._versions.remove(found)
        aside = self._directory / f"{_ASIDE}{found.folder.name}"
        for old in self._directory.glob(f"{_ASIDE}*"):
            _remove(old)
        try:
            found.folder.rename(aside)
        except OSError:
            _remove(found.folder)
        log.error(
            "version %d of %s is damaged in the archive, is not offered any more, and is set aside as %s: %s",
            found.identity.version,
            found.identity.lineage,
            aside,
            why,
        )

    def digest(self, atoms: Atoms, version: int) -> list[int]:
        """Digests of pieces finer than the record's cells, read from the disk. Raises FAILED_PRECONDITION if it has no
        such version, and as ArchiveTransport and `digest_atoms`."""
        with self._lock:
            found = [each for each in self._versions if each.identity.version == version]
        for each in found:
            if blob_digest(each.offer.table) == atoms.table_digest:
                return digest_atoms(each.table, _mapped(each.table), atoms)
        raise precondition(f"this archive does not have version {version}, as the atoms have it")

    def close(self) -> None:
        """Ends what is being written, and gives the directory up. May be repeated. Waits for a disk at most
        `_CLOSE_SECONDS`; the directory is then given up with the process."""
        self._closed = True
        if not self._writing.acquire(timeout=_CLOSE_SECONDS):
            log.warning("the archive %s is left while its disk still writes a part of a version", self._directory)
            return
        try:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        finally:
            self._writing.release()

    # -- writing

    def _write_part(self, part: Path, about: ArchivedVersion, held: SlotVersion) -> None:
        _remove(part)
        part.mkdir()
        with (part / _WEIGHTS).open("wb", buffering=0) as file:
            for shard, memory in zip(about.shards, held.sealed, strict=True):
                file.write(bytes(shard.offset - file.tell()))
                self._write(file.fileno(), memory)
            file.write(bytes(about.bytes - file.tell()))
            os.fsync(file.fileno())
        self._check(about, self._table(part, about), [held.recorded])
        with (part / _ABOUT).open("wb") as file:
            file.write(about.SerializeToString(deterministic=True))
            file.flush()
            os.fsync(file.fileno())
        _sync(part)

    def _write(self, descriptor: int, memory: torch.Tensor) -> None:
        data = memory.contiguous().view(-1).view(torch.uint8).numpy().data if memory.numel() else b""
        at = 0
        while at < len(data):
            if self._closed:
                raise aborted("the relay is being stopped")
            at += os.write(descriptor, data[at : at + _WRITE_BYTES])

    def _check(self, about: ArchivedVersion, table: SourceTable, others: Sequence[ProvenRecord] = ()) -> None:
        """Reads a version back. Raises DATA_LOSS, naming a tensor, unless it is as it was sealed; ABORTED once the
        archive is closed. others: see `read_record`."""
        recorded = read_record(about.record, about.identity.root, others)
        boxes = [(view, shard.start) for view, shard in zip(_mapped(table), table.shards, strict=True)]
        values: list[int] = []
        while len(values) < len(boxes):
            if self._closed:
                raise aborted("the relay is being stopped")
            first, size = len(values), 0
            last = first
            while last < len(boxes) and size < _CHECK_BYTES:
                size += boxes[last][0].nbytes
                last += 1
            values += digest_boxes(boxes[first:last])
        place = {spec.name: number for number, spec in enumerate(about.record.manifest.tensors)}
        sums = np.zeros(len(recorded.values), dtype=np.uint64)
        cells: dict[int, str] = {}
        for shard, value in zip(table.shards, values, strict=True):
            name = table.tensors[shard.tensor].name
            (hit,) = recorded.partitions[place[name]].hits(Box(tuple(shard.start), tuple(shard.stop)))
            cell = recorded.first[place[name]] + hit.part
            sums[cell] += np.uint64(value)
            cells[cell] = name
        for cell, name in cells.items():
            if sums[cell] != recorded.values[cell]:
                raise data_loss(f"tensor {name} on the disk has other bytes than were sealed", [name])

    def _make_room(self, size: int) -> None:
        """Removes what is damaged, and then the oldest versions, until there is room for `size` bytes. Raises
        UNAVAILABLE, and has removed no version, if removing all of them would not do."""
        if self._free() < size * _SPARE:
            for damaged in self._directory.glob(f"{_ASIDE}*"):
                _remove(damaged)
        if (free := self._free()) + self.bytes < size * _SPARE:
            raise unavailable(
                f"a version of {in_words(size)} is not archived: {self._directory} has {in_words(free)} free, and to "
                f"remove the {len(self.versions)} older ones would not make enough room"
            )
        while self._free() < size * _SPARE:
            with self._lock:
                oldest = self._versions.pop(0) if self._versions else None
            if oldest is None:
                raise unavailable(
                    f"a version of {in_words(size)} is not archived: {self._directory} has {in_words(self._free())} "
                    "free, without older versions"
                )
            log.warning(
                "version %d of %s leaves the archive: the disk is full",
                oldest.identity.version,
                oldest.identity.lineage,
            )
            _remove(oldest.folder)

    def _free(self) -> int:
        """Bytes that the disk has. Raises UNAVAILABLE if it does not say."""
        try:
            return shutil.disk_usage(self._directory).free
        except OSError as error:
            raise unavailable(f"--archive {self._directory} cannot be used: {error.strerror}") from error

    # -- reading

    def _read_all(self) -> list[Archived]:
        found: list[tuple[float, Archived]] = []
        proven: list[ProvenRecord] = []  # one of each cutting, which further versions share
        for folder in sorted(self._directory.iterdir()):
            if folder.name.startswith(_PART):
                _remove(folder)
            elif folder.is_dir() and not folder.name.startswith(_ASIDE):
                try:
                    found.append(((folder / _ABOUT).stat().st_mtime, self._read(folder, proven)))
                except (CkptEngineError, OSError, DecodeError) as error:
                    log.error("%s in the archive cannot be read, and is not offered: %s", folder, _words(error))
        versions = [each for _, each in sorted(found, key=lambda pair: pair[0])]
        for each in versions[: -self._keep]:
            number, lineage = each.identity.version, each.identity.lineage
            log.warning("version %d of %s leaves the archive: --keep is %d", number, lineage, self._keep)
            _remove(each.folder)
        return versions[-self._keep :]

    def _read(self, folder: Path, proven: list[ProvenRecord]) -> Archived:
        """Reads what a folder says of itself. proven: records that were read; this one joins them if it is cut in
        another way. Raises DATA_LOSS, OSError, DecodeError."""
        about = self._about(folder)
        recorded = read_record(about.record, about.identity.root, proven)
        if all(each.cut is not recorded.cut for each in proven):
            proven.append(recorded)
        size = (folder / _WEIGHTS).stat().st_size
        if size != about.bytes:
            raise data_loss(f"its weights have {size} bytes, not {about.bytes}")
        return self._archived(folder, about)

    def _about(self, folder: Path) -> ArchivedVersion:
        return ArchivedVersion.FromString((folder / _ABOUT).read_bytes())

    def _archived(self, folder: Path, about: ArchivedVersion) -> Archived:
        table = self._table(folder, about)
        offer = OfferedVersion(
            canonical(table), canonical(about.record), about.identity, about.bytes, about.wanted_bytes
        )
        return Archived(folder, about.identity, offer, table, about.bytes)

    def _table(self, folder: Path, about: ArchivedVersion) -> SourceTable:
        region = archive_region(0, str(folder / _WEIGHTS), about.bytes)
        return SourceTable(
            host=self._host,
            id=self._id,
            tensors=about.tensors,
            regions=[region_offered([region])],
            shards=about.shards,
            stays_sealed=True,
            source_copies=0,
            description=f"archive, {folder.name}",
        )


def _name(identity: Identity) -> str:
    """The folder of a version. Lineages may have any characters, so they are hashed."""
    lineage = hashlib.sha256(identity.lineage.encode()).hexdigest()[:12]
    return f"{identity.version}-{identity.root.hex()[:16]}-{lineage}"


def _mapped(table: SourceTable) -> list[torch.Tensor]:
    """The memory of each shard of a table, mapped from its file."""
    region = by_transport(table.regions[0])[NAME]
    opened = ArchiveTransport().open([region])
    return [
        opened.view(region, shard.offset, list(_shape(shard)), shard.stride, table.tensors[shard.tensor].dtype)
        for shard in table.shards
    ]


def _shape(shard: Shard) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in zip(shard.start, shard.stop, strict=True))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _words(error: Exception) -> str:
    return error.problem.message if isinstance(error, CkptEngineError) else str(error)
