"""A relay fills itself from a trainer's GPU: bit for bit, whoever digests, on a process that has used no GPU before;
it says what the GPU's memory pays for it, and names what was changed after it was sealed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.core.manifest import blob_digest, canonical, manifest_of
from ckpt_engine.core.plan import PlanRequest, compile_plans
from ckpt_engine.core.publication import join_sources
from ckpt_engine.core.sealed import check_replicas
from ckpt_engine.host.facts import this_host
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.relay import batches
from ckpt_engine.relay.arena import Arena
from ckpt_engine.relay.slots import FillWish, Slots, SlotVersion, Want
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1.weights_pb2 import Digests, Identity, Need, SourceTable, WorkerNeeds
from tests.cluster import generate, running_cluster
from tests.gpu.cuda_peer import SHAPES, Peer, _hash, many_shapes
from tests.sealing import record_of
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, make_tiny_qwen3, reference_tokens

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "relays"))


@contextmanager
def relay() -> Iterator[Slots]:
    slots = Slots("a", this_host(), 4 << 30, all_transports(), 5.0)
    try:
        yield slots
    finally:
        slots.close()


def published(trainer: Peer, **wishes: str) -> SourceTable:
    table = SourceTable.FromString(bytes.fromhex(trainer.ask("trainer.publish", **wishes)["table"]))
    table.id, table.rank = "rank 0", 0
    return table


def wish(trainer: Peer, table: SourceTable, version: int, needs: list[WorkerNeeds]) -> FillWish:
    """What the trainer has on its GPU now, sealed along what workers need; everything, if nobody needs anything."""
    joined = join_sources(manifest_of(table.tensors), [table])
    asked = [PlanRequest(rank, each, table.host, ["cuda_ipc"]) for rank, each in enumerate(needs)]
    plans = compile_plans(joined, joined.table_digests, asked)
    values = trainer.ask("trainer.seal_atoms", atoms=plans.atoms[0].SerializeToString().hex())
    found = check_replicas(plans, {0: Digests(values=values)})
    identity = Identity(lineage="run", version=version, root=found.root())
    return FillWish(identity, record_of(found), [table], Want(needs, not needs))


def tensors_of(held: SlotVersion) -> dict[str, torch.Tensor]:
    """Whole tensors, joined of their cells: a large one is cut into rows."""
    specs = held.record.manifest.tensors
    found = {spec.name: torch.empty(tuple(spec.shape), dtype=torch_dtype(spec.dtype)) for spec in specs}
    for shard, memory in zip(held.table.shards, held.sealed, strict=True):
        part = tuple(slice(*each) for each in zip(shard.start, shard.stop, strict=True))
        found[held.table.tensors[shard.tensor].name][part] = memory
    return found


def assert_filled(held: SlotVersion) -> None:
    assert not held.filled.missing, (held.filled.missing[0].problem.message, held.filled.faults)
    assert held.filled.again == 0


@pytest.mark.parametrize("read_back", [1, 0, 2], ids=["by the GPU", "by processors", "by both"])
@pytest.mark.parametrize("shapes", [SHAPES, many_shapes()], ids=["odd", "many"])
def test_a_trainers_gpu_is_read_bit_for_bit(
    shapes: dict[str, tuple[list[int], str]], read_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "READ_BACK", read_back)
    monkeypatch.setattr(batches, "GPU_BATCH_BYTES", 32 << 20)
    with Peer() as trainer, relay() as slots:
        trainer.ask("trainer.make", shapes=shapes)
        table = published(trainer)
        assert [gpu.uuid for gpu in table.host.gpus]
        for version in (1, 2, 3):
            trainer.ask("trainer.fill", seed=version)
            held = slots.fill(version % 2, wish(trainer, table, version, []), 60.0)
            assert_filled(held)
            expected = trainer.ask("trainer.hashes")
            assert all(memory.is_pinned() for memory in held.sealed)
            assert {name: _hash(tensor) for name, tensor in tensors_of(held).items()} == expected
            size = sum(held.filled.bytes_by_source.values())
            print(
                f"version {version}: {size / 1e9:.3f} GB in {held.filled.seconds:.3f} s, context "
                f"{slots.gpu_context_bytes / 1e6:.0f} MB, torch {torch.__version__}"
            )


@pytest.mark.parametrize("read_back", [1, 0, 2], ids=["by the GPU", "by processors", "by both"])
def test_halves_of_rows_and_casts_arrive_as_workers_need_them(read_back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided boxes, and float32 served as bfloat16: both written by a kernel into pinned memory."""
    monkeypatch.setattr(batches, "READ_BACK", read_back)
    shapes = {"wide": ([512, 4096], "float32"), "long": ([4096, 640], "float32"), "norm": ([4099], "float32")}
    with Peer() as trainer, relay() as slots:
        trainer.ask("trainer.make", shapes=shapes)
        table = published(trainer, dtype="bfloat16")
        manifest = manifest_of(table.tensors)
        needs = []
        for rank in range(2):
            each = WorkerNeeds(manifest_digest=blob_digest(canonical(manifest)))
            for index, spec in enumerate(manifest.tensors):
                start, stop = [0] * len(spec.shape), list(spec.shape)
                if len(stop) == 2:
                    start[1], stop[1] = rank * stop[1] // 2, (rank + 1) * stop[1] // 2
                each.needs.append(Need(tensor=index, start=start, stop=stop))
            needs.append(each)
        for version in (1, 2):
            trainer.ask("trainer.fill", seed=version)
            held = slots.fill(version % 2, wish(trainer, table, version, needs), 60.0)
            assert_filled(held)
            assert held.layout.bytes == sum(2 * torch.Size(shape).numel() for shape, _ in shapes.values())
            expected = trainer.ask("trainer.hashes", served="bfloat16")
            found = {spec.name: torch.empty(tuple(spec.shape), dtype=torch.bfloat16) for spec in held.table.tensors}
            for shard, memory in zip(held.table.shards, held.sealed, strict=True):
                part = tuple(slice(first, last) for first, last in zip(shard.start, shard.stop, strict=True))
                found[held.table.tensors[shard.tensor].name][part] = memory
            assert {name: _hash(tensor) for name, tensor in found.items()} == expected


@pytest.mark.parametrize("read_back", [1, 0, 2], ids=["by the GPU", "by processors", "by both"])
def test_what_changed_after_it_was_sealed_is_left_out_by_name(read_back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "READ_BACK", read_back)
    with Peer() as trainer, relay() as slots:
        trainer.ask("trainer.make", shapes={"w": ([512, 384], "bfloat16"), "v": ([4099], "bfloat16")})
        table = published(trainer)
        wanted = wish(trainer, table, 1, [])
        trainer.ask("trainer.flip", name="w", byte=300_001)
        held = slots.fill(0, wanted, 60.0)
        (missing,) = held.filled.missing
        assert list(missing.problem.tensors) == ["w"], missing.problem.message
        assert [spec.name for spec in held.table.tensors] == ["v"]


def test_memory_that_arrived_wrong_is_noticed_by_whoever_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the slot counts, not what was sent: a byte that changes between the copy and the digest is found.

    A fake of the fault, since no part of ours writes there."""
    bring = batches.PieceBatch.bring

    def bring_then_damage(self: batches.PieceBatch, carry_on: Callable[[], None]) -> None:
        bring(self, carry_on)
        for piece in self.pieces:
            if piece.destination.numel() > 1000:
                piece.destination.view(torch.uint8).view(-1)[77] ^= 4

    monkeypatch.setattr(batches.PieceBatch, "bring", bring_then_damage)
    with Peer() as trainer, relay() as slots:
        trainer.ask("trainer.make", shapes={"w": ([512, 384], "bfloat16"), "v": ([40], "bfloat16")})
        table = published(trainer)
        for read_back in (1, 0):
            monkeypatch.setattr(batches, "READ_BACK", read_back)
            held = slots.fill(read_back, wish(trainer, table, 1, []), 60.0)
            assert [list(each.problem.tensors) for each in held.filled.missing] == [["w"]]


def test_a_slot_that_grows_is_pinned_anew(tmp_path: Path) -> None:
    torch.empty(1, device="cuda")
    arena = Arena(64 << 20)
    arena.reserve(0, 5000, "a version")
    arena.pin(0, 0)
    assert arena.tensor(0, 0, (5000,), torch.uint8).is_pinned()
    arena.reserve(0, 20 << 20, "a larger one")
    assert not arena.tensor(0, 16 << 20, (5000,), torch.uint8).is_pinned()
    arena.pin(0, 0)
    arena.pin(0, 0)
    whole = arena.tensor(0, 0, (20 << 20,), torch.uint8)
    there = torch.arange(20 << 20, device="cuda").to(torch.uint8)
    whole.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(whole, there.cpu())
    arena.close()


def test_tokens_are_those_of_a_trainer_on_a_gpu_that_went_on_at_once(tmp_path: Path) -> None:
    """A whole cluster: the relay holds the version, the trainer overwrites its GPU, and the replica on the GPU
    generates as the weights were."""
    model = make_tiny_qwen3(tmp_path / "model", 1, weights=False)
    prompt = decisive_prompts(model, 1, 16)[0]
    reference = reference_tokens(model, prompt, 16)
    assert reference.gap > DECISIVE_GAP
    with running_cluster(tmp_path / "cluster") as cluster:
        replica = cluster.replica("r", "reference", tmp_path / "model", "--device", "cuda")
        running = cluster.relay("a", "--memory", "64MiB")
        model.to("cuda")
        with Trainer(cluster.address, lineage="run") as trainer:
            trainer.publish(model, move=True)
            running.registered()
            replica.registered()
            held = trainer.update_weights(version=1, prefetch="always", until="held", timeout=120)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            assert held.held, held
            assert trainer.wait(1, timeout=120).verified
            assert generate(replica, prompt, 16) == reference.tokens
        (holder,) = [each for each in cluster.status().holders if each.kind == "relay"]
        assert holder.filling.gpu_context_bytes > 0
        assert "takes" in running.said, "what its context costs is in the log"
