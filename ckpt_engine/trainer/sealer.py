"""The source that a trainer publishes, and the only place where its weights are read."""

from __future__ import annotations

import logging
import threading
import time

from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.names import some
from ckpt_engine.core.offers import by_transport
from ckpt_engine.core.problems import precondition
from ckpt_engine.core.transports import is_of_gpus
from ckpt_engine.digest.host import warm_up
from ckpt_engine.source.base import Source
from ckpt_engine.trainer.part import held_of
from ckpt_engine.trainer.session import SealFigures
from ckpt_engine.transport.collective.seat import Held
from ckpt_engine.v1 import weights_pb2

log = logging.getLogger(__name__)


class Sealer:
    """Holds the source that is published now, and seals and digests it. Callable from any thread; one seal at a
    time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._table_digest = b""
        self._check_finite = False
        self._withdrawing = False

    def offer(self, source: Source, check_finite: bool = False) -> bytes:
        """Replaces the source and closes the former one. Returns the table to publish, serialised.

        The first call compiles the digest kernels, which takes a second or two, so that no update has to wait for it.
        check_finite: refuse to seal weights that hold NaN or infinity.
        """
        if not all(_on_gpu(region) for region in source.table().regions):
            warm_up()
        table = canonical(source.table())
        with self._lock:
            former, self._source, self._table_digest = self._source, source, blob_digest(table)
            self._check_finite, self._withdrawing = check_finite, False
        if former is not None:
            former.close()
        return table

    @property
    def offering(self) -> bool:
        """Whether there is a source that is not being withdrawn."""
        return self._source is not None and not self._withdrawing

    def seal(self, atoms: weights_pb2.Atoms, keep: bool) -> SealFigures:
        """Seals the source and digests its atoms.

        keep: what was sealed before stays, and is only digested. Without it the live weights are read, so call it on
        the thread that could change them. Raises FAILED_PRECONDITION if there is no source or `atoms` belong to another
        table, and what Source.seal raises.
        """
        with self._lock:
            if self._source is None:
                raise precondition("nothing is published")
            if atoms.table_digest != self._table_digest:
                raise precondition("other weights were published since this was planned; update again")
            copy_seconds = self._source.seal(keep)
            started = time.perf_counter()
            values = self._source.digest(atoms)
            seconds = time.perf_counter() - started
            not_finite = [] if keep else self._source.not_finite()
            if not_finite:
                rank = self._source.table().rank
                warning = f"weights of rank {rank} hold NaN or infinity: {some(not_finite)}; has training diverged?"
                if self._check_finite:
                    raise precondition(warning, tensors=not_finite, ranks=[rank])
                log.warning("ckpt-engine: %s They are served; publish(check_finite=True) refuses such updates", warning)
            return SealFigures(weights_pb2.Digests(values=values), copy_seconds, seconds, not_finite)

    def held(self, manifest: weights_pb2.Manifest) -> Held:
        """What is sealed, by the numbers of a manifest, for a collective. Raises FAILED_PRECONDITION if nothing is
        published, INVALID_ARGUMENT if the manifest is of other tensors."""
        with self._lock:
            if self._source is None:
                raise precondition("nothing is published")
            return held_of(manifest, self._source.table(), list(self._source.tensors()))

    def withdraw(self, seconds: float) -> None:
        """Withdraws the source once no reader maps its GPU memory. Raises as Source.withdraw does; then the source is
        not offered any more, and the call may be repeated."""
        with self._lock:
            if self._source is not None:
                self._withdrawing = True
                self._source.withdraw(seconds)
                self._source = None

    def close(self) -> None:
        """Frees what the source holds. May be repeated."""
        with self._lock:
            former, self._source = self._source, None
        if former is not None:
            former.close()


def _on_gpu(region: weights_pb2.OfferedRegion) -> bool:
    return any(map(is_of_gpus, by_transport(region)))
