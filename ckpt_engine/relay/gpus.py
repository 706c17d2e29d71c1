"""Trainers' GPUs, as a relay reads them: CUDA is started for one when a version lies on it, and not before.

A context takes some hundred MB of that GPU's memory as long as the relay lives; it is counted and reported.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from ckpt_engine.core.offers import by_transport
from ckpt_engine.core.reach import same_host
from ckpt_engine.core.transports import is_of_gpus
from ckpt_engine.cuda.driver import CudaDriverError, driver, library_problem
from ckpt_engine.host import nvml
from ckpt_engine.v1.weights_pb2 import Gpu, Host, SourceTable

log = logging.getLogger("ckpt_engine.relay")


class TrainersGpus:
    """The GPUs on which this relay has started CUDA. Used on the thread that fills."""

    def __init__(self) -> None:
        self._contexts: dict[int, int] = {}  # by ordinal: bytes of the GPU's memory that its start took

    @property
    def taken_bytes(self) -> int:
        """GPU memory that reading has taken, all GPUs together: contexts, measured by the driver's management library
        before and after (other processes may have changed it meanwhile), and torch's reserved memory. Any thread."""
        contexts = dict(self._contexts)
        return sum(taken + torch.cuda.memory_reserved(gpu) for gpu, taken in contexts.items())

    def seen_from(self, table: SourceTable, host: Host) -> Host:
        """A copy of `host` that lists the GPUs on which a source of the same host has its weights, as far as this
        process sees them. Starts CUDA on them. Never raises."""
        found = Host()
        found.CopyFrom(host)
        del found.gpus[:]
        found.gpus.extend(gpu for _, gpu in self._of(table, host))
        return found

    @contextlib.contextmanager
    def on(self, table: SourceTable, host: Host) -> Iterator[int | None]:
        """Makes the GPU on which a source has its weights the current one, for mapping; yields its ordinal, or None."""
        found = self._of(table, host)
        if not found:
            yield None
            return
        with torch.cuda.device(found[0][0]):
            yield found[0][0]

    def _of(self, table: SourceTable, host: Host) -> list[tuple[int, Gpu]]:
        lends = any(is_of_gpus(name) for region in table.regions for name in by_transport(region))
        if not lends or not same_host(table.host, host) or torch.version.cuda is None or library_problem():
            return []
        try:
            visible = {driver().uuid(ordinal): ordinal for ordinal in range(torch.cuda.device_count())}
            found = [(visible[gpu.uuid], gpu) for gpu in table.host.gpus if gpu.uuid in visible]
            for ordinal, gpu in found:
                self._start(ordinal, gpu)
        except (CudaDriverError, RuntimeError) as error:
            log.warning("the GPUs of %s cannot be read: %s", table.host.name, error)
            return []
        return found

    def _start(self, ordinal: int, gpu: Gpu) -> None:
        if ordinal in self._contexts:
            return
        before = _used(gpu.uuid)
        torch.empty(1, device=torch.device("cuda", ordinal))
        taken = max(0, _used(gpu.uuid) - before)
        self._contexts[ordinal] = max(0, taken - torch.cuda.memory_reserved(ordinal))
        log.info("reading GPU %s takes %d MB of its memory", gpu.name or gpu.uuid.hex()[:8], taken // 10**6)


def _used(uuid: bytes) -> int:
    try:
        return nvml.used_bytes(uuid)
    except nvml.NvmlError:
        return 0
