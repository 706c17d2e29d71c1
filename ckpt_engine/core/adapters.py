"""What a version of an adapter (LoRA) is made of, and by which names it is served.

It decides the names of its tensors, the sealed facts beside them, and what a request's `model` means. It does not
decide where an adapter is read from (integrations/adapters.py), nor how an engine computes with it.

An adapter's versions are those of an ordinary lineage that has the adapter's name. The tensors of one are, for each
target module, `MODULE.lora_A.weight` [rank, inputs] and `MODULE.lora_B.weight` [outputs, rank], and one tensor more,
`adapter.json`: uint8 [n], the facts as JSON. As tensors these are sealed, carried and verified as all weights are.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.names import POOL_BYTES
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1 import weights_pb2

FACTS = "adapter.json"
"""The tensor that holds an adapter's facts."""

VERSION_HEADER = "x-ckpt-engine-adapter"
"""Header of an answer: the version of an adapter that made it, by its served name."""

ROOT_HEADER = "x-ckpt-engine-adapter-root"
"""Header of an answer: that version's root, hexadecimal."""

NOT_HERE = "adapter_not_here"
"""Reason of a 503 for an adapter of which no version for this base is here, and of one for an exact version."""

FEWEST_VERSIONS = 2
"""An adapter needs two places in an engine: requests go on with one version while the next one is brought."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_ID_BITS = 31


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What is sealed with an adapter's tensors."""

    base_root: bytes  # root of the base model's version that it was trained on, 32 bytes
    scaling: Mapping[str, float]  # of each target module, by name: what B times A is multiplied by

    def to_bytes(self) -> bytes:
        """The content of the tensor `FACTS`. Its length does not depend on the root."""
        facts = {"format": 1, "base_root": self.base_root.hex(), "scaling": dict(sorted(self.scaling.items()))}
        return json.dumps(facts, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> AdapterFacts:
        """Reads the tensor `FACTS`. Raises INVALID_ARGUMENT."""
        try:
            facts = load_json(content)
            if facts["format"] != 1:
                raise ValueError(f"format {facts['format']} is not known here")
            scaling = {str(module): float(value) for module, value in facts["scaling"].items()}
            root = bytes.fromhex(facts["base_root"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise invalid(f"{FACTS} cannot be read: {type(error).__name__}: {error}", [FACTS]) from error
        if len(root) != 32 or not all(map(math.isfinite, scaling.values())):
            raise invalid(f"{FACTS} needs a root of 32 bytes and finite scalings", [FACTS])
        return cls(root, scaling)


def factor_name(module: str, factor: str) -> str:
    """The name of the tensor of a module's factor "A" or "B"."""
    return f"{module}.lora_{factor}.weight"


def factor_of(name: str) -> tuple[str, str]:
    """Module and factor ("A" or "B") of a tensor. Raises INVALID_ARGUMENT for one that an adapter does not have."""
    match = _TENSOR.fullmatch(name)
    if match is None:
        raise invalid(
            f"{name!r} is not a tensor of an adapter (MODULE.lora_A.weight, MODULE.lora_B.weight, {FACTS}); publish "
            "ckpt_engine.integrations.adapters.adapter(...)",
            [name],
        )
    return match["module"], match["factor"]


def check_adapter_name(name: str) -> None:
    """Raises INVALID_ARGUMENT unless it can name an adapter: it is a lineage, a pool and a part of a `model`."""
    if len(name.encode()) > POOL_BYTES or _NAME.fullmatch(name) is None:
        raise invalid(
            f"an adapter's name has 1 to {POOL_BYTES} letters, digits, dots, dashes and underscores and begins with "
            f"a letter or digit, not {name!r}"
        )


def adapter_versions(words: str) -> dict[str, int]:
    """Reads "NAME=VERSIONS,…": each adapter, and how many of its versions an engine keeps. Raises INVALID_ARGUMENT."""
    found: dict[str, int] = {}
    for word in filter(None, words.split(",")):
        name, _, number = word.partition("=")
        check_adapter_name(name)
        if not number.isdecimal() or int(number) < FEWEST_VERSIONS:
            raise invalid(f"{word!r}: an engine keeps {FEWEST_VERSIONS} or more versions of an adapter: NAME=VERSIONS")
        if name in found:
            raise invalid(f"the adapter {name!r} is named twice")
        found[name] = int(number)
    return found


def served_name(identity: weights_pb2.Identity) -> str:
    """The name by which requests ask for exactly this version: "policy@7"."""
    return f"{identity.lineage}@{identity.version}"


def asked_version(model: str) -> tuple[str, int | None]:
    """Adapter and version that a request's `model` asks for: "policy@7" is version 7, "policy" the newest (None).

    What is no such name is returned whole, without a version.
    """
    name, at, number = model.rpartition("@")
    if at and number.isascii() and number.isdecimal():
        return name, int(number)
    return model, None


def integer_id(identity: weights_pb2.Identity) -> int:
    """A number from 1 to 2^31 - 1 for engines that tell adapters apart by one: the same in every process. Two versions
    in one engine have the same one with a chance of one in a billion; that is checked where they are taken up."""
    key = identity.lineage.encode() + identity.version.to_bytes(8, "little", signed=True) + identity.root
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "little") % ((1 << _ID_BITS) - 1) + 1
