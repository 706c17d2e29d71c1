"""The interface of a training loop: publish a model once, then call `update_weights` after each step.

The calls are synchronous. A background thread keeps the session with the manager alive while the caller computes; it
never reads live parameters. The snapshot (if the source needs one) and the digests read them, on the caller's thread
inside `update_weights`: the call itself is the caller's promise that nothing changes them.

Not supported: using a Trainer after a fork or from two threads at once (refused, but for `wait`), and pickling it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self, Unpack

import torch

from ckpt_engine.connection import checked_address
from ckpt_engine.core.arguments import checked_flag, checked_names, checked_version, whole
from ckpt_engine.core.deadlines import Deadlines, check_seconds
from ckpt_engine.core.names import check_pool, in_pool
from ckpt_engine.core.problems import CkptEngineError, invalid, precondition
from ckpt_engine.host.facts import this_host
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.options import MemoryTag, Progress, UpdateOptions, options_message
from ckpt_engine.replica_wait import ReplicaWait
from ckpt_engine.report import UpdateReport
from ckpt_engine.source.open import Publishable, open_source
from ckpt_engine.trainer.background import Background, LostLeaderError
from ckpt_engine.trainer.lineage import resolve_lineage, resolve_rank
from ckpt_engine.trainer.probe import Probe
from ckpt_engine.trainer.sealer import Sealer
from ckpt_engine.v1 import manager_pb2

ADVERTISE = "CKPT_ENGINE_ADVERTISE"
"""Environment variable with the name or address at which other hosts reach this one; agents read it, too."""

POLL_SECONDS = 0.2

logger = logging.getLogger("ckpt_engine.trainer")


class Trainer:
    """One trainer rank. Use it as a context manager, or call `close`.

    address: the manager, host:port, or several with commas between them, of which one leads. It need not run yet; a
        lost one is dialled again by itself.
    rank, world_size: of the ranks that publish; each has a Trainer of its own in its own process. None: those of
        torchrun (RANK, WORLD_SIZE), else of the step that srun started (SLURM_PROCID, SLURM_STEP_NUM_TASKS), else the
        only one. If one process alone publishes for several, it gives 0 and 1.
    lineage: the training run; equal on all ranks. Left out, see `lineage.resolve_lineage`: it may need
        torch.distributed. A run that starts again or goes back to an earlier version needs a new one.
    pool: the replicas that updates, `sleep` and `wake` are for: those that were started with this `--pool`; equal on
        all ranks. Empty: those that were started without one.
    advertise: the name or address at which other hosts reach this one; only for transports between hosts. None:
        CKPT_ENGINE_ADVERTISE, if it is set.
    deadlines: how long the steps may take; none: the defaults, changed by CKPT_ENGINE_DEADLINES.
    probe: sequences that each replica is asked to score after it has installed a version, compared with what this
        trainer's own forward pass gives (docs/probe.md); equal on all ranks. None: nothing is asked.

    Every method raises CkptEngineError; its `problem` names tensors and ranks. The trainer stays usable, unless the
    manager refused the session itself (the rank is taken, the lineage has another world size).
    """

    def __init__(
        self,
        address: str,
        rank: int | None = None,
        world_size: int | None = None,
        lineage: str | None = None,
        *,
        pool: str = "",
        advertise: str | None = None,
        deadlines: Deadlines | None = None,
        probe: Probe | None = None,
    ) -> None:
        check_pool(pool)
        if not isinstance(address, str):
            raise invalid(f"the manager's address must be HOST:PORT, not {address!r}; such as '127.0.0.1:50051'")
        checked_address(address)
        if not (deadlines is None or isinstance(deadlines, Deadlines)):
            raise invalid(f"deadlines must be ckpt_engine.Deadlines(NAME=SECONDS, ...), not {deadlines!r}")
        if not (probe is None or isinstance(probe, Probe)):
            raise invalid(f"probe must be ckpt_engine.Probe(sequences, score, ...), not {probe!r}")
        rank, world_size = resolve_rank(rank, world_size, os.environ)
        self.address = address
        self.rank = rank
        self.world_size = world_size
        self.lineage = resolve_lineage(lineage, rank, world_size, os.environ)
        self.pool = pool
        self._advertise = os.environ.get(ADVERTISE, "") if advertise is None else advertise
        self._deadlines = deadlines or Deadlines.from_environment(os.environ)
        self._probe = probe
        self._session_id = uuid.uuid4().hex
        self._process = os.getpid()
        self._sealer = Sealer()
        self._kept_dtypes: dict[str, str] = {}  # dtypes that replicas were found to keep, by tensor; served in them
        self._republish: Callable[[], None] | None = None  # set until the first update of what was published
        self._busy = threading.Lock()
        machine = TrainerMachine(
            self.lineage, rank, world_size, self._session_id, this_host(self._advertise), self._deadlines
        )
        self._background = Background(address, machine, self._sealer, self._deadlines, rank)
        self._background.start()
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(
        self,
        weights: Publishable,
        *,
        draft: Publishable | None = None,
        dtype: str | torch.dtype | None = None,
        snapshot: bool | None = None,
        move: bool = False,
        transport: str | None = None,
        check_finite: bool = False,
    ) -> None:
        """Says which weights updates send: an nn.Module (also sharded by FSDP2), (name, tensor) pairs or a mapping, a
        callable that yields pairs again at each update, or a safetensors directory.

        Once, and again only when tensors are replaced (not when their values change). Each rank publishes what it
        holds. draft: the model that guesses tokens for this one (speculative decoding), in any of the same types: it is
        sealed, committed and installed together with it; replicas without a draft model leave it, and the report says
        so. A draft in the same checkpoint, as the layers of multi-token prediction are, needs no argument. dtype:
        served, if another than the weights'; none: float32 weights are served in bfloat16 where replicas of the first
        update keep that, and stay so. snapshot: True copies the weights at each update, so that replicas
        that join late can be served between updates; False refuses what needs a copy. move: True moves weights on a CPU
        into shared memory, once, so that updates need not copy them; see below. transport: what all of them are offered
        over, "cuda_ipc", "shared_memory" or another that lends memory; none: where they lie if that works. "nccl": this
        rank takes part in a collective with the replicas' workers, inside `update_weights`, over NCCL between GPUs and
        over Gloo between CPUs (docs/collective.md). check_finite: an update is refused, naming tensor and rank,
        if its weights hold NaN or infinity; else its report warns. The table in
        `source.open.open_source` says what each kind of weights does by default.

        Weights on a CPU stay where they are and are copied into shared memory at each update, which the report says
        (`report.copied`). With move=True they move there instead, as the same parameter objects, and the optimizer
        steps them there; what moved once is read there ever after. Whatever took an address of them before (a DLPack
        view, native code) is cut off: publish before that. What is seen to share its memory with something (a flat
        buffer, `share_memory`, a kept `.data`, a DLPack view) does not move and is copied. The memory that was left
        stays taken, and each update looks at it: if something wrote there, the update is refused by name. A child that
        this process forks later cannot change moved weights for it, but sees them change until it has written them
        itself: do not move them if it needs them as they were. A child that shall train what this process publishes
        needs `model.share_memory()` before `publish`.

        Weights on a GPU are read where they lie, and stay mapped by the replicas from update to update. Before their
        memory is given up (to offload them, or to let an engine have it), call `withdraw`.

        Returns at once; whether all ranks' weights fit together is known, and raised, in `update_weights`.
        Raises CkptEngineError (INVALID_ARGUMENT, naming the tensor) for weights that cannot be published.
        """
        checked_flag("snapshot", snapshot)
        checked_flag("move", move)
        checked_flag("check_finite", check_finite)
        weights_again = list(weights) if isinstance(weights, Iterator) else weights
        draft_again = list(draft) if isinstance(draft, Iterator) else draft

        def publish() -> None:
            source = open_source(
                weights_again,
                rank=self.rank,
                world_size=self.world_size,
                dtype=dtype,
                snapshot=snapshot,
                advertise=self._advertise,
                transport=transport,
                move=move,
                kept_dtypes=self._kept_dtypes,
                draft=draft_again,
            )
            self._background.publish(self._sealer.offer(source, check_finite))

        with self._exclusive("publish"):
            self._background.require_running()
            publish()
            self._republish = publish if dtype is None else None

    def withdraw(self, timeout: float = 60.0) -> None:
        """Takes back what was published; returns when no replica and no relay maps GPU memory of this rank any more.

        Deleting the weights then really frees their memory; before, it would not as long as a process maps it. Relays
        let go of memory of the host, too, soon after. This trainer holds no reference to the weights afterwards.
        Updates are refused until `publish` is called again. Replicas keep serving what they have, relays keep what they
        hold, and late replicas are brought up from these. Returns at once if nothing was published.

        Raises DEADLINE_EXCEEDED if some replica or relay still maps it after `timeout` seconds, as after a fenced
        update that ended in the middle of an install. It may be called again.
        """
        check_seconds("a timeout", timeout)
        with self._exclusive("withdraw"):
            self._republish = None
            if self._sealer.offering:
                self._background.withdraw()
            self._sealer.withdraw(timeout)

    def wait_for_replicas(self, count: int = 1, timeout: float = 600.0) -> list[str]:
        """Returns the names of the replicas that updates bring weights to, once there are `count` of them.

        For runs that start everything at once: engines take minutes to come up, and an update with too few replicas is
        refused. Raises DEADLINE_EXCEEDED after `timeout` seconds.
        """
        wait = ReplicaWait(count, self.pool, timeout, logger)
        with self._exclusive("wait_for_replicas"):
            while True:
                status, hindrance = manager_pb2.GetStatusResponse(), ""
                try:
                    status = self._background.status()
                except CkptEngineError as error:
                    hindrance = error.problem.message
                if (found := wait.look(status, hindrance)) is not None:
                    return found
                time.sleep(wait.pause(POLL_SECONDS))

    def update_weights(
        self,
        version: int | None = None,
        *,
        on_progress: Progress | None = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateReport:
        """Brings the replicas to the weights as they are now. Every rank calls it; all return when it has ended.

        Do not change the weights meanwhile: this thread copies (if the source needs it) and digests them in here, and
        first has the probe's sequences scored. A change while they are copied is refused by name; a change while
        replicas read leaves these closed.

        version: rises within the lineage; none: the last one plus one. All ranks give the same.
        options: see `ckpt_engine.UpdateOptions`: pause_mode, timeout, min_replicas, replicas, pool, prefetch, until,
            dry_run, draft. All ranks give the same.
        on_progress: called on this thread with each UpdateProgress; what it raises ends the wait.

        Returns the report also if some replicas failed: look at `report.ok`. Raises CkptEngineError when the update
        was refused (INVALID_ARGUMENT, FAILED_PRECONDITION: no replica was touched) or could not be brought to a report
        (ABORTED, UNAVAILABLE, DEADLINE_EXCEEDED). Where several managers are named and the one that leads is lost, this
        waits for the next one and asks it for the same version. KeyboardInterrupt cancels the call. The next update
        repairs whatever an unfinished one left.
        """
        if version is not None:
            checked_version(version)
        wishes = options_message(options, self.pool)
        request = manager_pb2.UpdateWeightsRequest(version=version, options=wishes)
        request.lineage, request.rank, request.session_id = self.lineage, self.rank, self._session_id
        with self._exclusive("update_weights"):
            self._background.require_running()
            if not self._sealer.offering:
                raise precondition("publish weights before update_weights", ranks=[self.rank])
            # Every rank scores, since a forward pass of a sharded model takes all of them.
            scores = None if self._probe is None or wishes.dry_run else self._probe.scores()
            limit = wishes.timeout_seconds or self._deadlines.update
            end = time.monotonic() + limit
            limits = self._deadlines
            settle = limits.settle if self.world_size > 1 else 0.0
            while True:
                self._background.await_published(min(limits.connect, limit), min(limits.gather, limit), settle)
                request.adapts = self._republish is not None
                try:
                    if scores is not None and self.rank == 0:
                        request.probe.CopyFrom(self._background.put(scores.SerializeToString(deterministic=True)))
                    remaining = end - time.monotonic() + limits.call_grace
                    report = UpdateReport(self._background.update(request, remaining, on_progress))
                except LostLeaderError as lost:
                    # Whatever was decided, it was for the version that this rank has sealed, if it has.
                    if lost.version is not None and lost.sealed is not None:
                        request.version = lost.version
                        request.sealed.CopyFrom(lost.sealed)
                    if time.monotonic() + POLL_SECONDS >= end:
                        raise
                    logger.warning("the manager was lost during the update, which goes on with another one: %s", lost)
                    time.sleep(POLL_SECONDS)
                except CkptEngineError as refusal:
                    if self._republish is None or not refusal.problem.kept:
                        raise
                    logger.info("published in the dtypes that replicas keep: %s", refusal.problem.message)
                    publish, self._republish = self._republish, None
                    self._kept_dtypes.update(refusal.problem.kept)
                    request.ClearField("sealed")
                    publish()
                else:
                    self._republish = self._republish if wishes.dry_run else None
                    return report

    def wait(self, version: int, *, timeout: float | None = None) -> UpdateReport:
        """Returns the report of the lineage's last update to `version`, once that has ended. Any rank, on any thread.

        Also of an update that ended long ago, or under a manager that has been killed since: the ledger keeps reports.
        timeout: seconds; none: the deadline of an update. A manager that is away meanwhile is waited for.

        Raises CkptEngineError: NOT_FOUND, naming the last ones, if no update to it is known; DEADLINE_EXCEEDED, with
        its phase, if it still runs; ABORTED if the manager ended in the middle, so that there is no report; and the
        error with which the update itself was refused.
        """
        checked_version(version)
        seconds = self._deadlines.update if timeout is None else timeout
        check_seconds("a timeout", seconds)
        self._check_process("wait")
        request = manager_pb2.WaitForUpdateRequest(lineage=self.lineage, version=version, timeout_seconds=seconds)
        return UpdateReport(self._background.wait_for_update(request))

    def sleep(self, level: int = 1, *, replicas: Sequence[str] = (), timeout: float | None = None) -> None:
        """Has replicas close and give their memory up, for example while this process trains. One rank calls it.

        level: 1 keeps weights on the host, 2 discards them. replicas: those that are named, of any mode; empty: all
        hybrid ones. timeout: seconds for the slowest. Requests that are inside may end early. Hybrid replicas are
        woken by the next `update_weights`.
        Raises CkptEngineError naming the first replica that does not sleep; others may.
        """
        seconds = self._deadlines.sleep_wake if timeout is None else timeout
        if not whole(level):
            raise invalid(f"level {level!r} is not a whole number: 1 keeps weights on the host, 2 discards them")
        self._sleep_or_wake(manager_pb2.SleepRequest(level=level, timeout_seconds=seconds), replicas, seconds)

    def wake(
        self, tags: Sequence[MemoryTag] = (), *, replicas: Sequence[str] = (), timeout: float | None = None
    ) -> None:
        """Has replicas take their memory back: "weights" before "kv_cache"; no tags: both. One rank calls it.

        replicas, timeout: as for `sleep`.
        A replica that discarded its weights serves again after its next update. Raises as `sleep` does.
        """
        seconds = self._deadlines.sleep_wake if timeout is None else timeout
        checked_names("tags", tags)
        self._sleep_or_wake(manager_pb2.WakeRequest(tags=tags, timeout_seconds=seconds), replicas, seconds)

    def _sleep_or_wake(
        self, request: manager_pb2.SleepRequest | manager_pb2.WakeRequest, replicas: Sequence[str], seconds: float
    ) -> None:
        checked_names("replicas", replicas)
        check_seconds("a timeout", seconds)
        with self._exclusive("sleep or wake"):
            status = self._background.status() if not replicas else manager_pb2.GetStatusResponse()
            ours = [each for each in status.replicas if each.pool == self.pool]
            hybrid = [each.name for each in ours if each.mode == manager_pb2.MODE_HYBRID]
            if not replicas and not hybrid:
                where = f" {in_pool(self.pool)}" if self.pool else ""
                raise precondition(f"no replica{where} is registered as hybrid: name those that shall sleep or wake")
            request.replicas.extend(replicas or hybrid)
            request.pool = self.pool
            for result in self._background.sleep_or_wake(request, seconds + self._deadlines.call_grace):
                if result.HasField("problem"):
                    raise CkptEngineError(result.problem)

    def close(self) -> None:
        """Says goodbye to the manager and frees shared memory. May be repeated; a closed trainer stays closed."""
        if os.getpid() != self._process:
            return  # a forked child: thread and session are its parent's
        atexit.unregister(self.close)
        self._republish = None
        self._background.stop("the trainer was closed")
        self._sealer.close()

    def _check_process(self, what: str) -> None:
        if os.getpid() != self._process:
            raise precondition(f"{what}: this Trainer belongs to process {self._process}; make one in this process")

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        self._check_process(what)
        if not self._busy.acquire(blocking=False):
            raise precondition(f"{what}: this Trainer is in use by another thread")
        try:
            yield
        finally:
            self._busy.release()
