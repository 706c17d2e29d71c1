"""The dtypes that weights may have, under the names that travel on the wire.

A name is what torch calls the dtype ("bfloat16"). This module does not load torch, since the manager never holds a
tensor; ckpt_engine/torch_dtypes.py maps these names to torch's dtypes. Packed dtypes of less than a byte are not
supported: one element of theirs has no address.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1 import weights_pb2

ITEMSIZES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "uint16": 2,
        "int16": 2,
        "float16": 2,
        "bfloat16": 2,
        "uint32": 4,
        "int32": 4,
        "float32": 4,
        "uint64": 8,
        "int64": 8,
        "float64": 8,
        "complex64": 8,
    }
)
"""Every supported dtype and the bytes of one element."""

SHORT: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "bfloat16",
        "fp16": "float16",
        "f16": "float16",
        "half": "float16",
        "fp32": "float32",
        "f32": "float32",
        "float": "float32",
        "fp64": "float64",
        "double": "float64",
        "fp8": "float8_e4m3fn",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
    }
)
"""What people write instead of a name; only suggested, since two programs might read it differently."""

CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Dtypes that weights may be cast to and from. Integers are counts or indices, and 8-bit floats need their scales."""


_WIDENS = frozenset({("bfloat16", "float32")})


class UnsupportedDtypeError(CkptEngineError):
    """INVALID_ARGUMENT for a dtype that weights cannot have, or that this torch does not know."""

    def __init__(self, name: str, why: str = "is not supported", typed: bool = True) -> None:
        """typed: a person wrote the name, so a similar one is suggested; False: it is a tensor's own."""
        hint = _suggestion(name) if typed else ""
        message = f"dtype {name!r} {why}; {hint}weights can be {', '.join(ITEMSIZES)}"
        super().__init__(weights_pb2.Problem(code=weights_pb2.Problem.CODE_INVALID_ARGUMENT, message=message))
        self.name = name


def _suggestion(name: str) -> str:
    """A suggestion for a message; empty: none, or the name is right."""
    bare = str(name).lower().removeprefix("torch.")
    near = [SHORT[bare]] if bare in SHORT else get_close_matches(bare[:40], ITEMSIZES, 1)
    return f"did you mean {near[0]!r}? " if near and near[0] != name else ""


def itemsize(name: str) -> int:
    """Bytes of one element. Raises UnsupportedDtypeError."""
    try:
        return ITEMSIZES[name]
    except KeyError:
        raise UnsupportedDtypeError(name) from None


def widens(have: str, want: str) -> bool:
    """Whether every element of dtype ``have``, with zero bits appended, is the same number in ``want``. Then a model
    may keep ``want`` of what is served as ``have``. A cast of float16 to float32 is exact too, but does not just append
    bits: to be verified it would have to be undone, and that loses payloads of NaN."""
    return (have, want) in _WIDENS
