"""Checks that tensors which no update brings survive a sleep that discards memory: digested before it and after it.

An engine restores such tensors (rotary tables, scales, router biases) by itself, or fails to. Each is compared by its
digest; if one differs, it is named and no version is installed.
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

_Digests = dict[str, tuple[tuple[int, ...], int]]


class Constants:
    """The tensors that one worker's target declares constant. Used on the engine's thread."""

    def __init__(self, target: LoadTarget) -> None:
        self._target = target
        self._before: _Digests | None = None
        self._failure = ""
        self._must_check = False

    def note(self) -> None:
        """Digests the tensors before their memory may be lost. Never raises; `check` reports a failure.

        Keeps digests that were not compared yet: the memory may be lost already.
        """
        if self._must_check:
            return
        self._must_check = True
        self._before, self._failure = None, ""
        try:
            self._before = self._digests()
        except Exception as error:
            log.exception("ckpt-engine: what the model keeps without updates cannot be noted")
            self._failure = f"{type(error).__name__}: {error}"

    def check(self) -> None:
        """Compares the tensors with their digests, once after each `note`; does nothing without one.

        Raises DATA_LOSS with the names of what changed, FAILED_PRECONDITION if `note` failed.
        """
        if not self._must_check:
            return
        if self._before is None:
            raise precondition(
                "the weights were discarded, and the tensors that no update brings cannot be checked "
                f"({self._failure}): restart the engine"
            )
        now = self._digests()
        names = sorted(name for name, digest in self._before.items() if now.get(name) != digest)
        if names:
            raise data_loss(
                f"{', '.join(names[:4])} ({len(names)} in all) lost what they held while the engine slept, and no "
                "update brings it: restart the engine",
                names,
            )
        self._must_check = False

    def _digests(self) -> _Digests:
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
    """The tensor, or its bytes if its dtype is none of weights."""
    try:
        dtype_name(tensor.dtype)
    except CkptEngineError:
        return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    return tensor
