"""The protocol of all that offers weights: a trainer rank's model, a shard of it, a checkpoint directory.

A source runs in the process that owns the weights. `table` says what it offers and where it lies; it stays the same,
byte for byte, as long as the source is open, so that plans made from it can be kept. For each update the owner's
thread calls `check`, `seal` and `digest`, in this order, between two training steps. From `seal` until the update has
ended, what is sealed must not change. A source opens no connection. Errors are CkptEngineError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from ckpt_engine.v1.weights_pb2 import Atoms, SourceTable


class Source(Protocol):
    """Sealed regions of one version of the weights."""

    def table(self) -> SourceTable:
        """The table of what it offers: the same message at every call. The caller must not change it."""
        ...

    def check(self) -> None:
        """Raises FAILED_PRECONDITION, naming tensors, if the weights no longer lie where, or are no longer shaped as,
        they were published. Cheap: looks at no element."""
        ...

    def seal(self, keep: bool = False) -> float:
        """Checks, then puts the current weights into the offered regions, if they do not lie there already; returns
        the seconds that copying took. `keep`: leave what is sealed as it is (a late reader wants the version that
        others have); raises FAILED_PRECONDITION if nothing is sealed or the source does not stay sealed."""
        ...

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Names and sealed values, valid after `seal`. The caller must not change the values, nor keep them."""
        ...

    def digest(self, atoms: Atoms) -> list[int]:
        """The digest (docs/protocol.md) of each atom, unsigned 64-bit, in their order, over the sealed bytes. Raises
        INVALID_ARGUMENT for an atom outside its shard and FAILED_PRECONDITION before the first `seal`."""
        ...

    def not_finite(self) -> list[str]:
        """Names of the tensors in which the last `digest` found NaN or infinity, as they are served."""
        ...

    def withdraw(self, seconds: float) -> None:
        """Closes as `close` does, but only once no reader maps GPU memory of it any more, so that freeing that memory
        frees it.

        Readers are asked to let go and do so at once, unless they are in the middle of an update. Raises
        DEADLINE_EXCEEDED if some have not within `seconds`; new ones are refused by then, and it may be called again.
        """
        ...

    def close(self) -> None:
        """Stops offering: new readers cannot open the regions. Readers of mapped shared memory or files go on; readers
        of GPU memory are asked to let go, and waited for a little. May be repeated."""
        ...
