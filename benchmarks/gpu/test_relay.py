"""Relays on a GPU machine, with Qwen3-8B's shapes: how fast one fills itself from a trainer's GPU, how long a trainer
is held up, how fast a replica installs from it, and a trainer on the CPU, against Moonshot's checkpoint-engine.

The replica is the reference engine on GPU 0, or on GPU 1 where there is one; Moonshot has no engine attached. Ceilings
are copies between pinned memory and the same GPU, in turns with the thing itself.

    python -m pytest benchmarks/gpu/test_relay.py --benchmark-json=FILE
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.json_format import MessageToDict
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.measure import WARMUP, CopyCeiling, Series, rounded, versions
from benchmarks.gpu.qwen3_8b import BYTES, COLUMNS, SHAPES, HostWeights, Tree, renew, write_config
from benchmarks.gpu.rivals import moonshot
from ckpt_engine import Trainer, UpdateReport
from ckpt_engine.core.manifest import blob_digest, canonical, manifest_of
from ckpt_engine.core.plan import PlanRequest, compile_plans
from ckpt_engine.core.publication import join_sources
from ckpt_engine.core.sealed import check_replicas
from ckpt_engine.host.facts import this_host
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.relay import batches
from ckpt_engine.relay.slots import FillWish, Slots, Want
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1.weights_pb2 import Digests, Identity, Need, SourceTable, WorkerNeeds
from tests.cluster import Cluster, running_cluster
from tests.gpu.cuda_peer import Peer
from tests.sealing import record_of

pytestmark = pytest.mark.timeout(400)

ROUNDS = 8
MEMORY = 31 << 30
SECONDS = 240.0
THREADS = {"OMP_NUM_THREADS": str(min(16, len(os.sched_getaffinity(0))))}


@pytest.fixture
def relays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "relays"))


@pytest.fixture(scope="module")
def rival(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Moonshot's seconds, on as many GPUs as there are, two at most; none with CKPT_ENGINE_RIVALS=0."""
    gpus = min(2, torch.cuda.device_count())
    if os.environ.get("CKPT_ENGINE_RIVALS") == "0":
        return {"gpus": gpus, "seconds": []}
    return {"gpus": gpus, **moonshot(tmp_path_factory.mktemp("moonshot"), gpus, ROUNDS + WARMUP)}


@contextmanager
def cluster_of(path: Path) -> Iterator[Cluster]:
    """A manager, a relay and a replica whose weights lie on the last GPU."""
    with running_cluster(path / "cluster") as cluster:
        visible = str(min(2, torch.cuda.device_count()) - 1)
        config = write_config(path / "model")
        cluster.replica(
            "r", "reference", config, "--device", "cuda", environment={"CUDA_VISIBLE_DEVICES": visible, **THREADS}
        )
        cluster.relay("a", "--deltas", "never", "--memory", f"{MEMORY}B", environment=THREADS)
        yield cluster


def started(cluster: Cluster) -> None:
    cluster.relays[0].registered()
    cluster.replicas[0].registered(SECONDS)


def described(report: UpdateReport) -> dict[str, Any]:
    """What a report says of where time went."""
    found: dict[str, Any] = MessageToDict(report.message)
    return {key: found[key] for key in ("seconds", "stages", "prefetch", "relays") if key in found}


# ------------------------------------------------------------------------------------- filling alone, from a GPU


def needs_of(table: SourceTable, ranks: int) -> list[WorkerNeeds]:
    """Of tensor-parallel workers, which need columns of some matrices and rows of the others."""
    found = []
    for rank in range(ranks):
        needs = WorkerNeeds(manifest_digest=blob_digest(canonical(manifest_of(table.tensors))))
        for index, spec in enumerate(manifest_of(table.tensors).tensors):
            shape = tuple(spec.shape)
            start, stop = [0] * len(shape), list(shape)
            if len(shape) == 2:
                axis = 1 if spec.name.endswith(COLUMNS) else 0
                each = shape[axis] // ranks
                start[axis], stop[axis] = rank * each, (rank + 1) * each
            needs.needs.append(Need(tensor=index, start=start, stop=stop))
        found.append(needs)
    return found


@pytest.mark.parametrize("read_back", [2, 1, 0], ids=["digested by both", "by the GPU", "by processors"])
@pytest.mark.parametrize("ranks", [1, 2], ids=["whole tensors", "TP2"])
def test_filling_from_a_gpu(
    benchmark: BenchmarkFixture, relays: None, monkeypatch: pytest.MonkeyPatch, ranks: int, read_back: int
) -> None:
    monkeypatch.setattr(batches, "READ_BACK", read_back)
    torch.set_num_threads(int(THREADS["OMP_NUM_THREADS"]))
    series = Series()
    with Peer() as trainer:
        trainer.ask("trainer.make", shapes={name: (shape, "bfloat16") for name, shape in SHAPES.items()})
        table = SourceTable.FromString(bytes.fromhex(trainer.ask("trainer.publish")["table"]))
        table.id, table.rank = "rank 0", 0
        needs = needs_of(table, ranks)
        joined = join_sources(manifest_of(table.tensors), [table])
        asked = [PlanRequest(rank, each, table.host, ["cuda_ipc"]) for rank, each in enumerate(needs)]
        plans = compile_plans(joined, joined.table_digests, asked)
        values = trainer.ask("trainer.seal_atoms", atoms=plans.atoms[0].SerializeToString().hex())
        found = check_replicas(plans, {0: Digests(values=values)})
        identity = Identity(lineage="run", version=1, root=found.root())
        wish = FillWish(identity, record_of(found), [table], Want(needs))
        ceiling = CopyCeiling("cuda:0", "cpu", 2 << 30)
        slots = Slots("a", this_host(), MEMORY, all_transports(), 5.0)
        try:
            began = time.perf_counter()
            held = slots.fill(0, wish, 300.0)
            first = time.perf_counter() - began
            assert not held.filled.missing, (held.filled.missing[0].problem.message, held.filled.faults)

            def once() -> None:
                series.add(ceiling_GB_s=ceiling.once())
                filled = slots.fill(0, wish, 60.0).filled
                assert not filled.missing
                assert not filled.again
                series.add(fill_seconds=filled.seconds)

            benchmark.pedantic(once, rounds=ROUNDS, warmup_rounds=WARMUP)
            context, pages, nodes = slots.gpu_context_bytes, slots.pages, slots._arena.nodes
            size = held.layout.bytes
        finally:
            slots.close()
    rate = size / series.median("fill_seconds", ROUNDS) / 1e9
    benchmark.extra_info.update(
        rounded(
            {
                "bytes": size,
                "fill_GB_s": rate,
                "share_of_pinned_ceiling": rate / series.median("ceiling_GB_s", ROUNDS),
                "first_filling_seconds": first,
                "gpu_context_bytes": context,
                "pages": pages,
                "memory_nodes": nodes,
                "threads": torch.get_num_threads(),
                "medians": series.last(ROUNDS),
                "versions": versions("numba"),
            }
        )
    )
    print("\nRESULT filling", benchmark.name, benchmark.extra_info, flush=True)


# ------------------------------------------------------------------------------------------- whole updates


def test_a_trainer_on_a_gpu_is_held(
    benchmark: BenchmarkFixture, rival: dict[str, Any], relays: None, tmp_path: Path
) -> None:
    series = Series()
    for seconds in rival["seconds"]:
        series.add(moonshot_seconds=seconds)
    with cluster_of(tmp_path) as cluster:
        model = Tree("cuda:0")
        renew(model, 0)
        out, back = CopyCeiling("cuda:0", "cpu", 2 << 30), CopyCeiling("cpu", "cuda:0", 2 << 30)
        started(cluster)
        seeds = itertools.count(1)
        last: dict[str, Any] = {}
        with Trainer(cluster.address, lineage="benchmark-held") as trainer:
            trainer.publish(model, move=True)

            def before() -> None:
                renew(model, next(seeds))
                series.add(device_to_host_GB_s=out.once(), host_to_device_GB_s=back.once())

            def update() -> None:
                began = time.perf_counter()
                held = trainer.update_weights(prefetch="always", until="held", timeout=SECONDS)
                seconds = time.perf_counter() - began
                assert held.held, f"{held}\n{cluster.relays[0].said[-4000:]}"
                report = trainer.wait(held.version, timeout=SECONDS)
                assert report.ok, f"{report}\n{cluster.replicas[0].tail()}"
                assert report.verified
                (outcome,) = report.replicas
                (worker,) = outcome.message.workers
                assert [use.transport for use in outcome.transports] == ["relay_memory"], outcome.transports
                (relay,) = held.relays
                assert relay.nbytes == BYTES
                series.add(
                    held_seconds=seconds,
                    held_report_seconds=held.seconds,
                    fill_seconds=relay.message.filled.fill_seconds,
                    beside_filling_seconds=seconds - relay.message.filled.fill_seconds,
                    pause_seconds=outcome.pause_seconds,
                    sync_seconds=outcome.sync_seconds,
                    held_plus_pause_seconds=seconds + outcome.pause_seconds,
                    transfer_and_install_seconds=worker.transfer_seconds + worker.install_seconds,
                    verify_seconds=worker.verify_seconds,
                    **{f"held_stage_{name}": value for name, value in held.stages.items()},
                    **{f"stage_{name}": value for name, value in outcome.stages.items()},
                )
                last.update(held=described(held), notes=[use.reason for use in outcome.transports])

            benchmark.pedantic(update, setup=before, rounds=ROUNDS, warmup_rounds=WARMUP)
        context = [holder.filling.gpu_context_bytes for holder in cluster.status().holders if holder.kind == "relay"]
        said = cluster.relays[0].said
    held_rate = BYTES / series.median("held_seconds", ROUNDS) / 1e9
    install_rate = BYTES / series.median("transfer_and_install_seconds", ROUNDS) / 1e9
    against = {}
    if rival["seconds"]:
        together = series.median("held_plus_pause_seconds", ROUNDS)
        against["held_plus_pause_over_rival"] = together / series.median("moonshot_seconds", ROUNDS)
    benchmark.extra_info.update(
        rounded(
            {
                "bytes": BYTES,
                "held_GB_s": held_rate,
                "held_share_of_pinned_ceiling": held_rate / series.median("device_to_host_GB_s", ROUNDS),
                "install_GB_s": install_rate,
                "install_share_of_pinned_ceiling": install_rate / series.median("host_to_device_GB_s", ROUNDS),
                "rival": f"Moonshot checkpoint-engine 0.4.2 on {rival['gpus']} GPU(s)",
                "rival_once": {key: value for key, value in rival.items() if key.endswith("_seconds")},
                **against,
                "gpu_context_bytes": context,
                "first": series.first(),
                "last": last,
                "medians": series.last(ROUNDS),
                "versions": versions("checkpoint-engine", "numba"),
            }
        )
    )
    print("\nRESULT held", benchmark.extra_info, flush=True)
    print(said[-3000:], flush=True)


def test_a_trainer_on_the_cpu(benchmark: BenchmarkFixture, rival: dict[str, Any], relays: None, tmp_path: Path) -> None:
    torch.set_num_threads(int(THREADS["OMP_NUM_THREADS"]))
    series = Series()
    for seconds in rival["seconds"]:
        series.add(moonshot_seconds=seconds)
    with cluster_of(tmp_path) as cluster:
        model = Tree("cpu")
        weights = HostWeights(model)
        weights.renew(0)
        back = CopyCeiling("cpu", "cuda:0", 2 << 30)
        plain = torch.empty(4 << 30, dtype=torch.uint8).fill_(3)
        target = torch.empty_like(plain).fill_(4)
        started(cluster)
        seeds = itertools.count(1)
        last: dict[str, Any] = {}
        with Trainer(cluster.address, lineage="benchmark-cpu") as trainer:
            trainer.publish(model, move=True)

            def before() -> None:
                weights.renew(next(seeds))
                began = time.perf_counter()
                target.copy_(plain)
                memory = plain.nbytes / (time.perf_counter() - began) / 1e9
                series.add(host_to_device_GB_s=back.once(), memory_copy_GB_s=memory)

            def update() -> None:
                began = time.perf_counter()
                report = trainer.update_weights(prefetch="auto", timeout=SECONDS)
                seconds = time.perf_counter() - began
                assert report.ok, f"{report}\n{cluster.replicas[0].tail()}"
                assert report.verified
                (outcome,) = report.replicas
                series.add(
                    call_seconds=seconds,
                    report_seconds=report.seconds,
                    pause_seconds=outcome.pause_seconds,
                    sync_seconds=outcome.sync_seconds,
                    **{f"report_stage_{name}": value for name, value in report.stages.items()},
                )
                last.update(auto=described(report))

            benchmark.pedantic(update, setup=before, rounds=ROUNDS, warmup_rounds=WARMUP)
            for _ in range(5):
                before()
                began = time.perf_counter()
                held = trainer.update_weights(prefetch="always", until="held", timeout=SECONDS)
                series.add(by_relay_held_seconds=time.perf_counter() - began)
                assert held.held, f"{held}\n{cluster.relays[0].said[-4000:]}"
                report = trainer.wait(held.version, timeout=SECONDS)
                assert report.ok, f"{report}\n{cluster.replicas[0].tail()}"
                series.add(
                    by_relay_fill_seconds=held.relays[0].message.filled.fill_seconds,
                    by_relay_pause_seconds=report.replicas[0].pause_seconds,
                )
    fill_rate = BYTES / series.median("by_relay_fill_seconds", 3) / 1e9
    against = {}
    if rival["seconds"]:
        seconds = series.median("moonshot_seconds", ROUNDS)
        against["call_over_rival"] = series.median("call_seconds", ROUNDS) / seconds
    benchmark.extra_info.update(
        rounded(
            {
                "bytes": BYTES,
                "rival": f"Moonshot checkpoint-engine 0.4.2 on {rival['gpus']} GPU(s)",
                **against,
                "fill_from_host_memory_GB_s": fill_rate,
                "fill_from_host_memory_over_copy": fill_rate / series.median("memory_copy_GB_s", ROUNDS),
                "threads": THREADS["OMP_NUM_THREADS"],
                "first": series.first(),
                "last": last,
                "medians": series.last(ROUNDS),
                "versions": versions("checkpoint-engine", "numba"),
            }
        )
    )
    print("\nRESULT cpu", benchmark.extra_info, flush=True)
