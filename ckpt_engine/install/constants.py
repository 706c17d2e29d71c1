"""Tensors that no update brings, over a sleep that discards memory: noted before it, compared after it.

An engine restores such tensors (rotary tables, scales, router biases) by itself, or forgets to. Nothing is trusted:
what does not hash to what it was is named, and no version is installed beside it.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ckpt_engine.core.problems import CkptEngineError, data_loss, precondition
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.torch_dtypes import dtype_name

log = logging.getLogger(__name__)

_Noted = dict[str, tuple[tuple[int, ...], int]]


class Constants:
    """What the target of one worker's model declares constant. Used on the engine's thread."""

    def __init__(self, target: LoadTarget) -> None:
        self._target = target
        self._noted: _Noted | None = None
        self._failure = ""
        self._due = False

    def note(self) -> None:
        """Remembers what they hold now, if they may be lost soon. Never raises; a failure is told by `check`.

        What was noted before and not compared yet stays: memory may be lost already.
        """
        if self._due:
            return
        self._due = True
        self._noted, self._failure = None, ""
        try:
            self._noted = self._digests()
        except Exception as error:
            log.exception("ckpt-engine: what the model keeps without updates cannot be noted")
            self._failure = f"{type(error).__name__}: {error}"

    def check(self) -> None:
        """Compares, once after each `note`; does nothing if there was none.

        Raises DATA_LOSS naming what changed, FAILED_PRECONDITION if it could not be noted.
        """
        if not self._due:
            return
        if self._noted is None:
            raise precondition(
                "the weights were discarded, and nobody knows whether the tensors that no update brings are still "
                f"right ({self._failure}): restart the engine"
            )
        found = self._digests()
        lost = sorted(name for name, noted in self._noted.items() if found.get(name) != noted)
        if lost:
            raise data_loss(
                f"{', '.join(lost[:4])} ({len(lost)} in all) lost what they held while the engine slept, and no update "
                "brings it: restart the engine",
                lost,
            )
        self._due = False

    def _digests(self) -> _Noted:
        tensors = self._tensors()
        digests = digest_boxes([(tensor, (0,) * tensor.dim()) for tensor in tensors.values()])
        return {
            name: (tuple(tensor.shape), digest) for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
        }

    def _tensors(self) -> dict[str, Tensor]:
        names = self._target.constant()
        return {
            name: _hashable(tensor)
            for name, tensor in self._target.named_tensors()
            if name in names and not tensor.is_meta and tensor.layout is torch.strided
        }


def _hashable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes if it is of a dtype that no weights have."""
    try:
        dtype_name(tensor.dtype)
    except CkptEngineError:
        return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    return tensor
