"""Writes a version into a directory of safetensors files, which is there whole or not at all.

Tensors are verified before they are written. All files go into a scratch directory beside the named one,
which gets its name when everything is on the disk. A version's draft model goes into the folder `draft`, with its own
names, so that both folders can be published or served from.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.parts import own_name, part_of
from ckpt_engine.core.problems import invalid, precondition, unavailable
from ckpt_engine.reading.reader import Reader
from ckpt_engine.source.safetensors import DTYPES, INDEX, SINGLE
from ckpt_engine.torch_dtypes import dtype_name

FILE_BYTES = 5_000_000_000
"""Most bytes of weights in one file, unless one tensor is larger."""

SPARE_BYTES = 16 << 20
"""Bytes that must be free in addition: for the index, and the file system's own use."""

CODES: Mapping[str, str] = {dtype: code for code, dtype in DTYPES.items()}

Progress = Callable[[int, int], object]
"""Called with the bytes that are written, and the bytes in all."""


def pull(
    address: str,
    directory: str | os.PathLike[str],
    lineage: str | None = None,
    version: int | None = None,
    *,
    on_progress: Progress | None = None,
    deadlines: Deadlines | None = None,
) -> tuple[str, int]:
    """Writes the weights of a version, verified, as safetensors files; returns its lineage and number.

    address, lineage, version, deadlines: as for `Reader`. directory: created; it may exist if it is empty. Several
    files get an index, as transformers writes it. on_progress: called on this thread.

    Raises CkptEngineError as `Reader` and `Reader.tensors` do; INVALID_ARGUMENT if `directory` is not empty, is a file,
    or has no parent directory; FAILED_PRECONDITION, naming both numbers, for too little room; UNAVAILABLE if it cannot
    be written. The directory is then as it was.
    """
    directory = Path(os.path.abspath(directory))
    try:
        _check_directory(directory)
        with Reader(address, lineage, version, deadlines=deadlines) as reader:
            files = _files(reader)
            bytes_needed = reader.nbytes + sum(len(header) for header, _ in files.values()) + SPARE_BYTES
            free = shutil.disk_usage(directory.parent).free
            if bytes_needed > free:
                raise precondition(
                    f"version {reader.version} of lineage {reader.lineage!r} takes {bytes_needed} bytes of disk, and "
                    f"{directory.parent} has {free} left"
                )
            with _whole_or_not_at_all(directory) as scratch:
                _write(scratch, files, reader, on_progress)
            return reader.lineage, reader.version
    except OSError as os_error:
        raise unavailable(f"cannot write {directory}: {os_error.strerror or os_error}") from os_error


def _check_directory(directory: Path) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise invalid(f"{directory} exists and is not a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise invalid(f"{directory} is not empty: name another directory, or empty it")
    if not directory.parent.is_dir():
        raise invalid(f"{directory.parent}, in which the directory is to be, is not a directory")


def _files(reader: Reader) -> dict[str, tuple[bytes, list[str]]]:
    """For each file, by its path: its first bytes (length and header) and the names of its tensors, in order."""
    files: dict[str, tuple[bytes, list[str]]] = {}
    for part in sorted({part_of(name) for name in reader.names}):
        files |= _files_of(reader, part, [name for name in reader.names if part_of(name) == part])
    return files


def _files_of(reader: Reader, part: str, tensors: Sequence[str]) -> dict[str, tuple[bytes, list[str]]]:
    """The files of one part of the version."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in tensors:
        nbytes = reader.nbytes_of(name)
        if shards[-1] and size + nbytes > FILE_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    folder = f"{part}/" if part else ""
    return {f"{folder}{name}": (_header(reader, shard), shard) for name, shard in zip(names, shards, strict=True)}


def _header(reader: Reader, names: Sequence[str]) -> bytes:
    about = {"format": "pt", "lineage": reader.lineage, "version": str(reader.version), "root": reader.root}
    entries: dict[str, object] = {"__metadata__": about}
    at = 0
    for name in names:
        dtype = dtype_name(reader.dtype(name))
        if dtype not in CODES:
            raise precondition(f"safetensors has no dtype {dtype}", [name])
        end = at + reader.nbytes_of(name)
        entries[own_name(name)] = {"dtype": CODES[dtype], "shape": list(reader.shape(name)), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _whole_or_not_at_all(directory: Path) -> Iterator[Path]:
    """Gives a scratch directory beside the named one; renames it at the end, and removes it after an error."""
    scratch = directory.parent / f".{directory.name[:100]}.{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch
        _to_disk(scratch)
        os.rename(scratch, directory)  # replaces an empty directory; fails if it has got content meanwhile
        _to_disk(directory.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(
    scratch: Path, files: Mapping[str, tuple[bytes, Sequence[str]]], reader: Reader, progress: Progress | None
) -> None:
    written_bytes, total = 0, reader.nbytes
    for file, (header, names) in files.items():
        (scratch / file).parent.mkdir(exist_ok=True)
        with (scratch / file).open("wb") as stream:
            stream.write(header)
            for _, tensor in reader.tensors(names):
                if tensor.numel():
                    stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
                written_bytes += tensor.nbytes
                if progress is not None:
                    progress(written_bytes, total)
            stream.flush()
            os.fsync(stream.fileno())
    for folder in {Path(file).parent for file in files}:
        inside = {Path(file).name: names for file, (_, names) in files.items() if Path(file).parent == folder}
        if len(inside) > 1:
            _write_index(scratch / folder, inside, sum(map(reader.nbytes_of, chain.from_iterable(inside.values()))))
        if folder.name:
            _to_disk(scratch / folder)


def _write_index(folder: Path, files: Mapping[str, Sequence[str]], size: int) -> None:
    """Writes the index of several files. size: bytes of all their weights."""
    file_of = {own_name(name): file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
    with (folder / INDEX).open("w", encoding="utf-8") as text:
        json.dump(index, text, indent=2, ensure_ascii=False)
        text.flush()
        os.fsync(text.fileno())


def _to_disk(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
