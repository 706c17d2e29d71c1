"""Memory of a worker's own for weights that it brings before a pause: how much there is, and when.

It decides nothing about what lies in it (`early_copy.py`), and no engine knows of it: it is the driver's memory on a
GPU, and memory of the process on a CPU. A size that was given is taken when the worker is made, before its engine
sizes its caches, or the engine does not start; "auto" takes what a plan wants once there is a plan, at most half of
what is free then. A sleep gives it back, and the next plan after it takes it again. Used on the engine's thread.
"""

from __future__ import annotations

import torch

from ckpt_engine.core.problems import CkptEngineError, unavailable
from ckpt_engine.core.sizes import in_words
from ckpt_engine.core.stage_memory import OPTION, stage_bytes
from ckpt_engine.cuda.arena import device_bytes
from ckpt_engine.cuda.driver import CudaDriverError, driver
from ckpt_engine.host.room import memory_room


class StageMemory:
    """The stage memory of one worker, on one device."""

    def __init__(self, text: str, device: torch.device) -> None:
        """text: as in `--stage-memory`. Takes a given size. Raises INVALID_ARGUMENT, and UNAVAILABLE with what is free
        if that size cannot be had."""
        self._text = text
        self.device = device
        self._size = stage_bytes(text)
        self._pointer = 0  # of the driver's memory; 0: there is none
        self.bytes: torch.Tensor | None = None
        """uint8[n]; another tensor each time that memory is taken."""
        self.note = ""
        """Why it is less than a plan wants; empty: it is not."""
        self._request = 0  # the most bytes that "auto" was asked for since it took memory
        if self._size:
            self._take(self._size)

    @property
    def is_configured(self) -> bool:
        """Whether there is to be any."""
        return self._size != 0

    @property
    def size(self) -> int:
        """Bytes that are taken now."""
        return 0 if self.bytes is None else self.bytes.numel()

    @property
    def words(self) -> str:
        """How much there is, for people; empty if there is to be none."""
        if not self.is_configured:
            return ""
        return self.note or f"{in_words(self.size)} on {self.device}" if self.size else self.note or "none is taken yet"

    def provide(self, size: int) -> torch.Tensor | None:
        """Takes memory for `size` bytes, or for fewer if there is not so much, unless it is taken already. None:
        there is none. Never raises: what does not fit is read in the pause, and `note` says why."""
        if not self.is_configured or not size:
            return None
        if self._size is None and self._request < size:
            self.give_back()
            self._request = size
            self._try(min(size, self._free() // 2), size)
        elif self._size:
            self.note = ""
            if self.bytes is None:
                self._try(self._size, min(self._size, size))
            if not self.note and self._size < size:
                self.note = f"{OPTION} {self._text} is less than the {in_words(size)} that this version wants"
        return self.bytes

    def give_back(self) -> None:
        """Frees the memory; nothing may use it any more. May be repeated. Never raises."""
        pointer, self._pointer, self.bytes, self.note, self._request = self._pointer, 0, None, "", 0
        if pointer:
            try:
                with driver().on(self.device.index):
                    driver().free(pointer)
            except CudaDriverError:  # a context that is broken has freed all of its memory
                return

    def _try(self, size: int, version: int) -> None:
        free = self._free()
        try:
            if size:
                self._take(size)
        except CkptEngineError as error:
            self.note = error.problem.message
        else:
            if size < version:
                self.note = (
                    f"{OPTION} {self._text}: {in_words(size)} of the {in_words(version)} that this version wants, half "
                    f"of the {in_words(free)} that were free on {self.device}"
                )

    def _take(self, size: int) -> None:
        free = self._free()
        if size > free:
            raise unavailable(
                f"{OPTION} {self._text} asks for {in_words(size)} on {self.device}, where {in_words(free)} are free: "
                "give less, or leave more beside the engine's caches"
            )
        if self.device.type != "cuda":
            self.bytes = torch.empty(size, dtype=torch.uint8, device=self.device)
            return
        try:
            with driver().on(self.device.index):
                self._pointer = driver().allocate(size)
        except CudaDriverError as error:
            raise unavailable(
                f"{OPTION} {self._text}: {in_words(size)} cannot be taken on {self.device}, where {in_words(free)} "
                f"are free: {error}"
            ) from error
        self.bytes = device_bytes(self._pointer, size, self.device.index)

    def _free(self) -> int:
        if self.device.type != "cuda":
            return memory_room()
        try:
            with driver().on(self.device.index):
                return driver().memory_info()[0]
        except CudaDriverError:
            return 0
