"""A relay fills itself from a trainer's GPU: bit for bit, on a process that has used no GPU before, and says what the
GPU's memory pays for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_engine.core.manifest import manifest_of
from ckpt_engine.core.plan import compile_plans
from ckpt_engine.core.publication import join_sources
from ckpt_engine.core.sealed import check_replicas
from ckpt_engine.core.sealed_record import record_of
from ckpt_engine.host.facts import this_host
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.relay.slots import Slots, Wish
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1.weights_pb2 import Digests, Identity, SourceTable
from tests.gpu.cuda_peer import SHAPES, Peer, _hash, many_shapes

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("shapes", [SHAPES, many_shapes()], ids=["odd", "many"])
def test_a_trainers_gpu_is_read_bit_for_bit(
    shapes: dict[str, tuple[list[int], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "relays"))
    with Peer() as trainer:
        trainer.ask("make", shapes=shapes)
        table = SourceTable.FromString(bytes.fromhex(trainer.ask("publish")["table"]))
        assert [gpu.uuid for gpu in table.host.gpus]
        table.id, table.rank = "rank 0", 0
        slots = Slots("a", this_host(), 4 << 30, all_transports(), 5.0)
        try:
            for version in (1, 2, 3):
                trainer.ask("fill", seed=version)
                digests = trainer.ask("seal")
                joined = join_sources(manifest_of(table.tensors), [table])
                plans = compile_plans(joined, joined.table_digests, [])
                values = [digests[atom.shard] for atom in plans.atoms[0].atoms]
                found = check_replicas(plans, {0: Digests(values=values)})
                identity = Identity(lineage="run", version=version, root=found.root())
                held = slots.fill(version % 2, Wish(identity, record_of(found), [table], everything=True), 60.0)
                assert not held.filled.missing, (held.filled.missing[0].problem.message, held.filled.faults)
                expected = trainer.ask("hashes")
                for shard, memory in zip(held.table.shards, held.sealed, strict=True):
                    assert _hash(memory) == expected[held.table.tensors[shard.tensor].name]
                size = sum(held.filled.brought.values())
                print(
                    f"version {version}: {size / 1e9:.3f} GB in {held.filled.seconds:.3f} s, context "
                    f"{slots.gpu_context_bytes / 1e6:.0f} MB, torch {torch.__version__}"
                )
            assert slots.gpu_context_bytes > 0
        finally:
            slots.close()
