"""The C libraries that come with NVIDIA's driver, bound without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any


def load_library(name: str, signatures: Mapping[str, Sequence[Any]]) -> ctypes.CDLL:
    """Loads a library and declares functions with these types of arguments, which return an int.

    Raises OSError, also if the library is too old and lacks one of them.
    """
    found = ctypes.CDLL(name)
    for function, arguments in signatures.items():
        try:
            bound = getattr(found, function)
        except AttributeError as error:
            raise OSError(str(error)) from error
        bound.argtypes, bound.restype = arguments, ctypes.c_int
    return found
