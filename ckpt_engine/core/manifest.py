"""Manifests: what a model's tensors are called and how they look, and the root that names their content. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from ckpt_engine.core.dtypes import UnsupportedDtypeError, itemsize
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1.weights_pb2 import Manifest, TensorSpec


def blob_digest(data: bytes) -> bytes:
    """The digest that names a blob: SHA-256, 32 bytes."""
    return hashlib.sha256(data).digest()


def canonical(message: Message) -> bytes:
    """The one serialisation of a message that blobs are made of."""
    return message.SerializeToString(deterministic=True)


def manifest_of(specs: Iterable[TensorSpec]) -> Manifest:
    """The manifest of these tensors, sorted by name.

    Raises INVALID_ARGUMENT if there are none, if a name occurs twice, and as `check_spec`.
    """
    found: dict[str, TensorSpec] = {}
    for spec in specs:
        check_spec(spec)
        if spec.name in found:
            raise invalid(f"two tensors are called {spec.name!r}; publish each tensor under one name", [spec.name])
        found[spec.name] = spec
    if not found:
        raise invalid("nothing to publish: no rank offers a tensor")
    return Manifest(tensors=[found[name] for name in sorted(found)])


MOST_AXES = 64
"""Dimensions of a tensor; torch has no more."""

MOST_BYTES = 1 << 62
"""Most bytes of a tensor, counting each dimension of size 0 as 1: strides are computed from the others."""

METADATA = "__metadata__"
"""The name under which a safetensors file has notes instead of a tensor."""


def check_name(name: str, ranks: Sequence[int] = ()) -> None:
    """Raises INVALID_ARGUMENT for a tensor's name that a message or a checkpoint's file cannot carry."""
    if not name:
        raise invalid("a tensor has no name; publish it under its checkpoint name", ranks=ranks)
    if name == METADATA:
        raise invalid(f"a tensor is called {name!r}, where safetensors files have notes; rename it", [name], ranks)
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise invalid(f"the tensor name {name!r} cannot be written as UTF-8; rename it", [name], ranks) from None


def shape_problem(shape: Sequence[int], width: int) -> str:
    """Why no tensor can have this shape; empty: one can. width: bytes of an element. Safe for any input: it reads at
    most `MOST_AXES` numbers, and multiplies none that is too large."""
    if len(shape) > MOST_AXES:
        return f"has {len(shape)} dimensions; a tensor has at most {MOST_AXES}"
    size = width
    for extent in shape:
        if extent < 0:
            return f"has shape {list(shape)}; no dimension can be negative"
        if extent > MOST_BYTES or (size := size * max(extent, 1)) > MOST_BYTES:
            dimensions = ", ".join(str(each) if each <= MOST_BYTES else "..." for each in shape)
            return f"has shape [{dimensions}], more than any memory holds"
    return ""


def check_spec(spec: TensorSpec, ranks: Sequence[int] = ()) -> None:
    """Raises INVALID_ARGUMENT, naming the tensor, for a name, a dtype or a shape that no tensor can have."""
    check_name(spec.name, ranks)
    try:
        width = itemsize(spec.dtype)
    except UnsupportedDtypeError as error:
        raise invalid(f"tensor {spec.name}: {error.problem.message}", [spec.name], ranks) from None
    if problem := shape_problem(spec.shape, width):
        raise invalid(f"tensor {spec.name} {problem}", [spec.name], ranks)


DIGEST_FORMAT = 2
"""The format of digests and roots (docs/protocol.md). Members send it in their hello, and each formula has a number of
its own: weights that were sealed by one formula can only be verified by the same one."""


def other_format(member: str, its: int, this: str = "this process") -> str:
    """Why a process with another digest format cannot be worked with; empty: it has this one. its: its format; 0: it
    sends none, as releases of format 1 do. this: what that process is to call this one."""
    if its == DIGEST_FORMAT:
        return ""
    return (
        f"{member} makes digests of format {its or 1}, and {this} of format {DIGEST_FORMAT}: what one seals the "
        "other cannot verify. Run the same release of ckpt-engine everywhere, then start it again"
    )


_ROOT_TAG = f"ckpt-engine root {DIGEST_FORMAT}\n".encode()


class RootHasher:
    """Computes roots of one manifest; names, dtypes and shapes are hashed once, here.

    root = SHA-256 of: the tag "ckpt-engine root 2\\n"; the number of tensors; for each tensor in the manifest's order
    its name and its dtype (each its length in bytes, then UTF-8), its number of dimensions and its dimensions; then
    the digest of each tensor in that order. Every number is 8 bytes, little-endian, unsigned.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._count = len(manifest.tensors)
        pieces = [_ROOT_TAG, _number(self._count)]
        for spec in manifest.tensors:
            for text in (spec.name.encode(), spec.dtype.encode()):
                pieces += (_number(len(text)), text)
            pieces.append(_number(len(spec.shape)))
            pieces += map(_number, spec.shape)
        self._header = hashlib.sha256(b"".join(pieces))

    def root(self, digests: bytes) -> bytes:
        """The root, 32 bytes, given all tensors' digests as 8 little-endian bytes each."""
        if len(digests) != 8 * self._count:
            raise invalid(f"{len(digests) // 8} digests were given for {self._count} tensors")
        hasher = self._header.copy()
        hasher.update(digests)
        return hasher.digest()


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
