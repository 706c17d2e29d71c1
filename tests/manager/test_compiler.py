"""Merging, compiling and adding up over the content store, and what is kept of it."""

import pytest
import torch
from scripted_members import HOST, ScriptedTrainer, some_weights

from ckpt_engine.core.digest import digest_boxes
from ckpt_engine.core.machines.events import CombineSeals, Compiled, CompilePlans, MergeTables, PlanWorker, Published
from ckpt_engine.core.manifest import canonical, root
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.manager.blobs import BlobStore
from ckpt_engine.manager.compiler import Compiler
from ckpt_engine.v1 import manager_pb2, weights_pb2

SECONDS = 60.0


def tables(blobs: BlobStore, weights: dict[str, torch.Tensor], ranks: int = 2) -> tuple[manager_pb2.BlobRef, ...]:
    """The tables of all ranks, stored."""
    refs = []
    for rank in range(ranks):
        trainer = ScriptedTrainer(None, rank, ranks)  # type: ignore[arg-type]  # only its table is wanted
        trainer.hold(weights)
        refs.append(blobs.put(canonical(trainer.table)))
    return tuple(refs)


def workers(blobs: BlobStore, published: Published, count: int = 2) -> tuple[PlanWorker, ...]:
    """Workers that need everything."""
    manifest = weights_pb2.Manifest.FromString(blobs.get(published.manifest))
    needs = weights_pb2.WorkerNeeds(manifest_digest=published.manifest.digest)
    for index, spec in enumerate(manifest.tensors):
        needs.needs.add(tensor=index, start=[0] * len(spec.shape), stop=spec.shape)
    ref = blobs.put(canonical(needs))
    return tuple(PlanWorker(("replica", rank), ref, HOST, ("shared_memory",)) for rank in range(count))


def digests(
    blobs: BlobStore, refs: tuple[manager_pb2.BlobRef, ...], compiled: Compiled, weights: dict[str, torch.Tensor]
) -> dict[str, manager_pb2.BlobRef]:
    """What honest ranks answer."""
    answers = {}
    offered = {table.id: table for table in (weights_pb2.SourceTable.FromString(blobs.get(ref)) for ref in refs)}
    for source, ref in compiled.atoms.items():
        table = offered[source]
        boxes = []
        for atom in weights_pb2.Atoms.FromString(blobs.get(ref)).atoms:
            tensor = weights[table.tensors[table.shards[atom.shard].tensor].name]
            part = tuple(slice(first, last) for first, last in zip(atom.start, atom.stop, strict=True))
            boxes.append((tensor[part], list(atom.start)))
        answers[source] = blobs.put(canonical(weights_pb2.Digests(values=digest_boxes(boxes))))
    return answers


def test_what_is_expected_is_what_the_weights_hash_to() -> None:
    blobs, weights = BlobStore(), some_weights()
    compiler = Compiler(blobs)
    refs = tables(blobs, weights)
    published = compiler.merge(MergeTables("run", refs, SECONDS))
    assert (published.tensors, published.bytes) == (3, sum(tensor.nbytes for tensor in weights.values()))
    assert [(offer.rank, offer.table) for offer in published.sources] == [(0, refs[0]), (1, refs[1])]
    compiled = compiler.compile(CompilePlans(published, workers(blobs, published), SECONDS))
    combined = compiler.combine(CombineSeals(published, compiled, digests(blobs, refs, compiled, weights), SECONDS))
    sums = digest_boxes([(weights[name], [0] * weights[name].dim()) for name in sorted(weights)])
    for ref in combined.expected.values():
        assert list(weights_pb2.Digests.FromString(blobs.get(ref)).values) == sums
    assert combined.root == root(weights_pb2.Manifest.FromString(blobs.get(published.manifest)), sums)


def test_nothing_is_done_twice() -> None:
    blobs = BlobStore()
    compiler = Compiler(blobs)
    refs = tables(blobs, some_weights())
    published = compiler.merge(MergeTables("run", refs, SECONDS))
    everyone = workers(blobs, published)
    compiled = compiler.compile(CompilePlans(published, everyone, SECONDS))
    assert compiler.merge(MergeTables("run", refs, SECONDS)) is published
    assert compiler.compile(CompilePlans(published, everyone, SECONDS)) is compiled
    # A worker alone is another plan, and does not displace that of all of them.
    alone = compiler.compile(CompilePlans(published, everyone[:1], SECONDS))
    assert set(alone.plans) == {("replica", 0)}
    assert compiler.compile(CompilePlans(published, everyone, SECONDS)) is compiled
    # Another worker behind the same name is planned for anew.
    other = PlanWorker(everyone[0].key, everyone[0].needs, HOST, ("file", "shared_memory"))
    assert compiler.compile(CompilePlans(published, (other,), SECONDS)) is not alone


def test_what_was_evicted_is_made_again() -> None:
    blobs = BlobStore(max_total_bytes=20_000)
    compiler = Compiler(blobs)
    refs = tables(blobs, some_weights())
    published = compiler.merge(MergeTables("run", refs, SECONDS))
    everyone = workers(blobs, published)
    pinned = (*refs, everyone[0].needs)
    blobs.pin("test", pinned)
    compiled = compiler.compile(CompilePlans(published, everyone, SECONDS))
    blobs.put(bytes(20_000 - sum(ref.size for ref in pinned)))  # leaves no room for anything else
    assert not blobs.has(published.manifest)
    assert not any(map(blobs.has, compiled.atoms.values()))
    blobs.max_total_bytes *= 2
    again = compiler.compile(CompilePlans(compiler.merge(MergeTables("run", refs, SECONDS)), everyone, SECONDS))
    assert again == compiled
    assert blobs.has(published.manifest)
    assert all(map(blobs.has, (*again.plans.values(), *again.atoms.values())))


def test_lost_and_meaningless_blobs_are_told_apart() -> None:
    blobs = BlobStore()
    compiler = Compiler(blobs)
    for ref, code, words in (
        (manager_pb2.BlobRef(digest=bytes(32), size=1), weights_pb2.Problem.NOT_FOUND, "put it again"),
        (blobs.put(b"\xff\xff\xff"), weights_pb2.Problem.INVALID_ARGUMENT, "table of rank 0 .* is no SourceTable"),
    ):
        with pytest.raises(CkptEngineError, match=words) as caught:
            compiler.merge(MergeTables("run", (ref,), SECONDS))
        assert caught.value.problem.code == code


def test_a_rank_cannot_publish_for_another() -> None:
    blobs = BlobStore()
    first, second = tables(blobs, some_weights())
    with pytest.raises(CkptEngineError, match=r"rank 0 .* table of rank 1"):
        Compiler(blobs).merge(MergeTables("run", (second, first), SECONDS))


def test_a_replica_whose_workers_all_leave_a_tensor_to_others_is_unfit() -> None:
    """Two pipeline stages that share the tensors, then two that both leave the last one out."""
    blobs = BlobStore()
    compiler = Compiler(blobs)
    published = compiler.merge(MergeTables("run", tables(blobs, some_weights()), SECONDS))
    manifest = weights_pb2.Manifest.FromString(blobs.get(published.manifest))

    def stage(rank: int, *loaded: int) -> PlanWorker:
        needs = weights_pb2.WorkerNeeds(manifest_digest=published.manifest.digest)
        for index, spec in enumerate(manifest.tensors):
            if index in loaded:
                needs.needs.add(tensor=index, start=[0] * len(spec.shape), stop=spec.shape)
            else:
                needs.elsewhere.append(index)
        return PlanWorker(("replica", rank), blobs.put(canonical(needs)), HOST, ("shared_memory",))

    assert not compiler.compile(CompilePlans(published, (stage(0, 0, 1), stage(1, 2)), SECONDS)).unfit
    compiled = compiler.compile(CompilePlans(published, (stage(0, 0), stage(1, 1)), SECONDS))
    assert not compiled.plans
    problem = compiled.unfit["replica"]
    assert "each of the 2 workers of replica 'replica'" in problem.message
    assert list(problem.tensors) == [manifest.tensors[2].name]


def test_replicas_that_cannot_be_planned_for_are_named_and_the_others_get_the_plans_of_old() -> None:
    """One without the transport, with a second worker that has it; one whose needs are no message; one of another
    manifest. Needs that are not stored at all refuse everything, since replicas can store them again."""
    blobs = BlobStore()
    compiler = Compiler(blobs)
    published = compiler.merge(MergeTables("run", tables(blobs, some_weights()), SECONDS))
    good = workers(blobs, published)
    (needs,) = {worker.needs.digest: worker.needs for worker in good}.values()
    other = blobs.put(canonical(weights_pb2.WorkerNeeds(manifest_digest=b"another")))
    bad = (
        PlanWorker(("half", 0), needs, HOST, ("shared_memory",)),
        PlanWorker(("half", 1), needs, HOST, ("file",)),
        PlanWorker(("garbage", 0), blobs.put(b"\xff\xff"), HOST, ("shared_memory",)),
        PlanWorker(("stale", 0), other, HOST, ("shared_memory",)),
    )
    compiled = compiler.compile(CompilePlans(published, (*bad, *good), SECONDS))
    alone = Compiler(blobs).compile(CompilePlans(published, good, SECONDS))
    assert (compiled.plans, compiled.atoms, compiled.bytes) == (alone.plans, alone.atoms, alone.bytes)
    said = {name: problem.message for name, problem in compiled.unfit.items()}
    assert sorted(said) == ["garbage", "half", "stale"]
    assert "('half', 1)" in said["half"]
    assert "offers its weights over shared_memory" in said["half"]
    assert "needs of replica 'garbage', worker 0" in said["garbage"]
    assert "has to prepare again" in said["stale"]
    lost = PlanWorker(("lost", 0), manager_pb2.BlobRef(digest=bytes(32), size=1), HOST, ("shared_memory",))
    with pytest.raises(CkptEngineError) as caught:
        compiler.compile(CompilePlans(published, (lost, *good), SECONDS))
    assert caught.value.problem.code == weights_pb2.Problem.NOT_FOUND
