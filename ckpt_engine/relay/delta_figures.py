"""What other relays sent in one filling, counted: bytes on the network, deltas, and how much had changed.

It decides nothing, and does not say which relay sent what.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DeltaFigures:
    """What came from other relays in one filling, and how."""

    network_bytes: int = 0  # of chunks that came, heads of messages included
    delta_bytes: int = 0  # of the chunks that came as deltas, in full
    changed_bytes: int = 0  # of the elements of these that differ from the base
    base: bytes = b""  # its root; empty: none was named
    whole: Counter[str] = field(default_factory=Counter)  # by reason, bytes of chunks that came in full all the same
    tensors: Counter[str] = field(default_factory=Counter)  # changed elements of what came as deltas, by tensor
    elements: Counter[str] = field(default_factory=Counter)  # all elements of what came as deltas, by tensor

    def after(self, first: DeltaFigures) -> DeltaFigures:
        """The figures of two fillings, of which this is the second."""
        return DeltaFigures(
            first.network_bytes + self.network_bytes,
            first.delta_bytes + self.delta_bytes,
            first.changed_bytes + self.changed_bytes,
            self.base or first.base,
            first.whole + self.whole,
            first.tensors + self.tensors,
            first.elements + self.elements,
        )

    def densest(self, most: int) -> list[tuple[str, int, int]]:
        """The tensors of which the largest share differs: name, changed elements, elements. Without those of which
        nothing does."""
        changed = [(name, count, self.elements[name]) for name, count in self.tensors.items() if count]
        return sorted(changed, key=lambda each: (-each[1] / each[2], each[0]))[:most]
