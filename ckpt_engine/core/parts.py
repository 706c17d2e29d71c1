"""Names the parts of a version. It decides how a tensor's name says which part it is of; it does not decide which
parts an engine has, nor what follows if one is missing (`record/record.py`, `core/complete.py`).

A version holds the weights of a target model and, if there is one, of the draft model that guesses tokens for it
(speculative decoding). Both are sealed, committed and installed together, so they are in one manifest, one record and
one root. The target's tensors have the names of its checkpoint. A draft's checkpoint has the same names for other
tensors, so that its names are in a namespace of their own: "draft::model.norm.weight". A draft that is published in
the target's own checkpoint, as the layers of multi-token prediction are, needs none: it takes tensors of the target's
part. All else treats names as text, so relays, plans, rollbacks and records know nothing of parts.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_engine.v1.weights_pb2 import Manifest

DRAFT = "draft"
"""The part of the model that guesses tokens for the target."""

PARTS = (DRAFT,)
"""All parts but the target, which has no name."""

_SEPARATOR = "::"


def in_part(part: str, name: str) -> str:
    """The name in a version of a part's tensor `name`. part: empty: the target."""
    return f"{part}{_SEPARATOR}{name}" if part else name


def part_of(name: str) -> str:
    """The part that a name in a version belongs to; empty: the target."""
    part, separator, _ = name.partition(_SEPARATOR)
    return part if separator and part in PARTS else ""


def own_name(name: str) -> str:
    """The name that a tensor has in its part's own checkpoint or model."""
    part = part_of(name)
    return name[len(part) + len(_SEPARATOR) :] if part else name


def by_part(manifest: Manifest, tensors: Iterable[int]) -> list[int]:
    """Indices into a manifest in the order in which loaders get them: the target's first, and no part in pieces."""
    return sorted(tensors, key=lambda index: (part_of(manifest.tensors[index].name), index))
