"""Reads the headers of safetensors files: which tensors, and where in the file. Reads no weights.

A file is 8 bytes (length of the header, little endian), the header (JSON: name to dtype, shape and data_offsets) and
the data. Files come from anywhere, so everything is checked: a header is refused that is too long, does not parse, or
has tensors that do not tile the data exactly.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from ckpt_engine.core.dtypes import UnsupportedDtypeError, itemsize
from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.manifest import METADATA, check_name, shape_problem
from ckpt_engine.core.problems import CkptEngineError, invalid, not_found

HEADER_LIMIT = 100_000_000
"""Bytes; the format's own limit."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
    }
)
"""The format's names of dtypes, as torch spells them."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file: contiguous, `offset` bytes from the start of the file's data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The content of a file."""

    path: Path
    data_start: int  # bytes from the file's start
    data_size: int  # bytes
    tensors: tuple[FileTensor, ...]


def read_header(path: Path) -> FileHeader:
    """Reads and checks the header of one file. Raises INVALID_ARGUMENT saying what is wrong with it, or NOT_FOUND."""
    try:
        with open(path, "rb", opener=_open) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise invalid(f"{path} is not a regular file")
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > HEADER_LIMIT or 8 + length > size:
                raise invalid(f"{path} is not a safetensors file: {size} bytes, of which the header would be {length}")
            raw = file.read(length)
    except OSError as error:
        raise not_found(f"cannot read {path}: {error}") from error
    header = _json(raw, path)
    data_size = size - 8 - length
    header.pop(METADATA, None)
    entries = sorted((_entry(name, value, path) for name, value in header.items()), key=lambda entry: entry[1:])
    end = 0
    for tensor, start, stop in entries:
        if start != end or stop - start != prod(tensor.shape) * itemsize(tensor.dtype):
            raise invalid(
                f"{path}: {tensor.name!r} of shape {list(tensor.shape)} and {tensor.dtype} takes bytes "
                f"[{start}, {stop}), but should start at {end} and take {prod(tensor.shape) * itemsize(tensor.dtype)}",
                tensors=[tensor.name],
            )
        end = stop
    if end != data_size:
        raise invalid(f"{path} has {data_size} bytes of data, but its tensors take {end}; is it cut short?")
    return FileHeader(path, 8 + length, data_size, tuple(tensor for tensor, _, _ in entries))


def read_directory(path: Path, check: Callable[[Path], object] | None = None) -> list[FileHeader]:
    """The headers of a checkpoint: the files that the index names, else model.safetensors, else every *.safetensors.

    `path` may also be one file. Raises NOT_FOUND if there is none; INVALID_ARGUMENT if a file is wrong, if one that the
    index names is not in the directory or lacks a tensor, or if two files hold tensors of one name. check: called with
    each file of weights before any of them is opened; what it raises is raised.
    """
    try:
        if path.is_file():
            return [read_header(path)]
        if not path.is_dir():
            raise not_found(f"{path} is neither a directory nor a safetensors file")
    except OSError as error:  # a name that is too long
        raise not_found(f"cannot read {path}: {error.strerror}") from error
    index = path / INDEX
    file_of = _index(index) if index.is_file() else {}
    if file_of:
        files = [path / name for name in sorted(set(file_of.values()))]
    elif (path / SINGLE).is_file():
        files = [path / SINGLE]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise not_found(f"{path} holds no safetensors files: name the directory with a checkpoint's *.safetensors")
    if check is not None:
        for file in files:
            check(file)
    headers = [read_header(file) for file in files]
    homes: dict[str, str] = {}
    for header in headers:
        for tensor in header.tensors:
            other = homes.setdefault(tensor.name, header.path.name)
            if other != header.path.name:
                raise invalid(f"{tensor.name!r} is in both {other} and {header.path.name}", tensors=[tensor.name])
    missing = sorted(name for name, file in file_of.items() if homes.get(name) != file)
    if missing:
        raise invalid(
            f"{index} names {len(missing)} tensors that are not in the file it says: {', '.join(missing[:4])}",
            tensors=missing[:16],
        )
    return headers


def _open(path: str, flags: int) -> int:
    """Opens without waiting: a pipe would block until something writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _index(path: Path) -> dict[str, str]:
    try:
        content = _json(path.read_bytes(), path)
    except OSError as error:
        raise not_found(f"cannot read {path}: {error}") from error
    file_of = content.get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise invalid(f"{path} has no weight_map")
    for name, file in file_of.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", "..") or not _is_path(file):
            raise invalid(f"{path} places {name!r} in {file!r}, which is not a file of this directory", tensors=[name])
    return file_of


def _is_path(name: str) -> bool:
    """Whether the file system can be asked for it."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _json(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        content = load_json(raw.decode("utf-8"), object_pairs_hook=_refuse_duplicates)
    except ValueError as error:
        raise invalid(f"{path} is damaged: its JSON does not parse: {error}") from error
    if not isinstance(content, dict):
        raise invalid(f"{path} is damaged: its JSON is not an object")
    return content


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _entry(name: str, value: object, path: Path) -> tuple[FileTensor, int, int]:
    try:
        check_name(name)
    except CkptEngineError as error:
        raise invalid(f"{path}: {error.problem.message}", tensors=[name]) from error
    if not isinstance(value, dict):
        raise invalid(
            f"{path}: the entry of {name!r} must be a JSON object, got a {type(value).__name__}", tensors=[name]
        )
    code, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not (_sizes(shape) and _sizes(offsets) and len(offsets) == 2 and isinstance(code, str)):
        raise invalid(
            f"{path}: the entry of {name!r} needs a dtype, a shape and two data_offsets that are valid", tensors=[name]
        )
    try:
        dtype = DTYPES[code]
        width = itemsize(dtype)
    except (KeyError, UnsupportedDtypeError) as error:
        raise invalid(
            f"{path}: {name!r} is of dtype {code[:40]!r}, which cannot be published", tensors=[name]
        ) from error
    if problem := shape_problem(shape, width):
        raise invalid(f"{path}: {name!r} {problem}", tensors=[name])
    return FileTensor(name, dtype, tuple(shape), offsets[0]), offsets[0], offsets[1]


def _sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
