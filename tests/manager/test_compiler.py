"""Merging, compiling and adding up over the content store, and what is kept of it."""

from dataclasses import replace

import pytest
import torch
from scripted_members import HOST, ScriptedTrainer, some_weights

from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.reach import Distance
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.machines.events import (
    Combined,
    CombineSeals,
    Compiled,
    CompilePlans,
    HeldOffer,
    JoinSources,
    MergeTables,
    PlanWorker,
    Published,
)
from ckpt_engine.manager import compiler as compiler_module
from ckpt_engine.manager.blobs import BlobStore
from ckpt_engine.manager.compiler import Compiler
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.sealing import root

SECONDS = 60.0


def tables(blobs: BlobStore, weights: dict[str, torch.Tensor], ranks: int = 2) -> tuple[manager_pb2.BlobRef, ...]:
    """The tables of all ranks, stored."""
    refs = []
    for rank in range(ranks):
        trainer = ScriptedTrainer(None, rank, ranks)  # type: ignore[arg-type]  # only its table is wanted
        trainer.hold(weights)
        refs.append(blobs.put(canonical(trainer.table)))
    return tuple(refs)


def merged(
    blobs: BlobStore, weights: dict[str, torch.Tensor]
) -> tuple[Compiler, tuple[manager_pb2.BlobRef, ...], Published]:
    """A compiler that has merged the tables of two ranks; and the tables."""
    compiler, refs = Compiler(blobs), tables(blobs, weights)
    return compiler, refs, compiler.merge(MergeTables("run", refs, SECONDS))


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
    compiler, refs, published = merged(blobs, weights)
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
    compiler, refs, published = merged(blobs, some_weights())
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
    compiler, refs, published = merged(blobs, some_weights())
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
        (manager_pb2.BlobRef(digest=bytes(32), size=1), weights_pb2.Problem.CODE_NOT_FOUND, "put it again"),
        (
            blobs.put(b"\xff\xff\xff"),
            weights_pb2.Problem.CODE_INVALID_ARGUMENT,
            "table of rank 0 .* is not a SourceTable",
        ),
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
    compiler, _, published = merged(blobs, some_weights())
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


def test_a_draft_without_weights_is_kept_only_if_that_is_asked_for() -> None:
    """Each answer is kept apart from the other one."""
    blobs = BlobStore()
    compiler, _, published = merged(blobs, some_weights())
    plain = workers(blobs, published)
    needs = weights_pb2.WorkerNeeds.FromString(blobs.get(plain[0].needs))
    needs.unfilled_parts.append("draft")
    guesses = PlanWorker(("guesses", 0), blobs.put(canonical(needs)), HOST, ("shared_memory",))
    task = CompilePlans(published, (*plain, guesses), SECONDS)
    for _ in range(2):
        refused = compiler.compile(task)
        assert "has a draft model" in refused.unfit["guesses"].message
        assert ("guesses", 0) not in refused.plans
        kept = compiler.compile(replace(task, keeps_draft=True))
        assert not kept.unfit
        assert ("guesses", 0) in kept.plans


def test_replicas_that_cannot_be_planned_for_are_named_and_the_others_get_the_plans_of_old() -> None:
    """One without the transport, with a second worker that has it; one whose needs are no message; one of another
    manifest. Needs that are not stored at all refuse everything, since replicas can store them again."""
    blobs = BlobStore()
    compiler, _, published = merged(blobs, some_weights())
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
    assert caught.value.problem.code == weights_pb2.Problem.CODE_NOT_FOUND


def test_what_is_told_of_a_replica_out_of_reach_goes_by_where_relays_run_now() -> None:
    blobs = BlobStore()
    compiler, _, published = merged(blobs, some_weights())
    far = weights_pb2.Host(boot_id="far", name="far")
    away = tuple(replace(worker, host=far) for worker in workers(blobs, published, 1))
    said = []
    for running in (frozenset[str](), frozenset({"far"}), frozenset({"far", HOST.boot_id})):
        compiled = compiler.compile(CompilePlans(published, away, SECONDS, relays=running))
        said.append(compiled.unfit["replica"].message)
    assert ["start a relay on host here and on host far" in each for each in said] == [True, False, False]
    assert ["start a relay on host" in each for each in said] == [True, True, False]
    assert "a relay runs on host" in said[2]


def sealed(compiler: Compiler, blobs: BlobStore, weights: dict[str, torch.Tensor]) -> tuple[Published, Combined]:
    """An update of two ranks, whose worker needs everything."""
    refs = tables(blobs, weights)
    published = compiler.merge(MergeTables("run", refs, SECONDS))
    compiled = compiler.compile(CompilePlans(published, workers(blobs, published, 1), SECONDS))
    return published, compiler.combine(
        CombineSeals(published, compiled, digests(blobs, refs, compiled, weights), SECONDS)
    )


def held(blobs: BlobStore, weights: dict[str, torch.Tensor], record: manager_pb2.BlobRef | None) -> HeldOffer:
    """What a holder of everything says."""
    trainer = ScriptedTrainer(None)  # type: ignore[arg-type]  # only its table is wanted
    trainer.hold(weights, stays_sealed=True)
    trainer.table.ClearField("rank")
    trainer.table.id = "keeper one"
    return HeldOffer("keeper one", blobs.put(canonical(trainer.table)), record)


def test_a_late_worker_costs_no_digest_but_for_what_is_finer_than_the_record() -> None:
    blobs, weights = BlobStore(), some_weights()
    compiler = Compiler(blobs)
    published, combined = sealed(compiler, blobs, weights)
    identity = weights_pb2.Identity(lineage="run", version=1, root=combined.root)
    offer = held(blobs, weights, combined.record)
    joined = compiler.join(JoinSources(identity, (offer,), None, SECONDS))
    assert (joined.record, joined.refused) == (combined.record, {})
    assert joined.published is not None
    assert joined.published.manifest == published.manifest
    everything, rows = (
        workers(blobs, published, 1)[0],
        weights_pb2.WorkerNeeds(manifest_digest=published.manifest.digest),
    )
    rows.needs.add(tensor=2, start=[1, 0], stop=[3, 4])  # rows 0 to 4 are one recorded cell
    finer = PlanWorker(("late", 0), blobs.put(canonical(rows)), HOST, ("shared_memory",))
    for worker, asked in ((everything, 0), (finer, 3)):
        task = CompilePlans(joined.published, (worker,), SECONDS, joined.record, combined.root)
        compiled = compiler.compile(task)
        atoms = [weights_pb2.Atoms.FromString(blobs.get(ref)) for ref in compiled.atoms.values()]
        assert sum(len(each.atoms) for each in atoms) == asked
        answers = digests(blobs, (offer.table,), compiled, weights)
        late = compiler.combine(CombineSeals(joined.published, compiled, answers, SECONDS))
        assert (late.root, late.record) == (combined.root, None)
    (ref,) = late.expected.values()
    wanted = digest_boxes([(weights["layer.weight"][1:3], [1, 0])])
    assert list(weights_pb2.Digests.FromString(blobs.get(ref)).values) == wanted


def test_versions_that_were_cut_alike_are_joined_and_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each must find is its own all the same."""
    blobs = BlobStore()
    compiler, expected = Compiler(blobs), list[bytes]()
    made: list[str] = []
    for name in ("join_sources", "compile_plans"):
        original = getattr(compiler_module, name)
        monkeypatch.setattr(
            compiler_module, name, lambda *args, n=name, o=original, **named: (made.append(n), o(*args, **named))[1]
        )
    for version in range(3):
        weights = {name: tensor + version for name, tensor in some_weights().items()}
        published, combined = sealed(compiler, blobs, weights)
        made.clear()
        identity = weights_pb2.Identity(lineage="run", version=version, root=combined.root)
        joined = compiler.join(JoinSources(identity, (held(blobs, weights, combined.record),), None, SECONDS))
        assert joined.published is not None
        task = CompilePlans(joined.published, workers(blobs, published), SECONDS, joined.record, combined.root)
        again = compiler.combine(CombineSeals(joined.published, compiler.compile(task), {}, SECONDS))
        assert bool(made) == (version == 0)
        found = {ref.digest for ref in again.expected.values()}
        assert found == {ref.digest for ref in combined.expected.values()} - set(expected)
        expected += found


@pytest.mark.parametrize("known", [True, False], ids=["known at the seal", "later"])
def test_workers_that_reach_no_rank_are_planned_for_from_a_relay(known: bool) -> None:
    """As in a container of its own. The record is cut along needs that are known when it is made, so that relays bring
    no more than that; of a worker that comes later the relay digests what is finer."""
    blobs, weights = BlobStore(), some_weights()
    compiler, refs, published = merged(blobs, weights)
    rows = [weights_pb2.WorkerNeeds(manifest_digest=published.manifest.digest) for _ in range(2)]
    manifest = weights_pb2.Manifest.FromString(blobs.get(published.manifest))
    for index, spec in enumerate(manifest.tensors):
        for rank, (start, stop) in enumerate(((0, 1), (1, spec.shape[0]))):
            rest = list(spec.shape[1:])
            rows[rank].needs.add(tensor=index, start=[start] + [0] * len(rest), stop=[stop, *rest])
    far = weights_pb2.Host()
    far.CopyFrom(HOST)
    far.pid_namespace, far.relay_directory = "another", "shared"
    asking = tuple(
        PlanWorker(("far", rank), blobs.put(canonical(needs)), far, ("shared_memory", "relay_memory"))
        for rank, needs in enumerate(rows)
    )
    direct = compiler.compile(CompilePlans(published, asking if known else (), SECONDS))
    assert not direct.plans
    if known:
        assert "but not its process ids" in direct.unfit["far"].message
    answers = digests(blobs, refs, direct, weights)
    combined = compiler.combine(CombineSeals(published, direct, answers, SECONDS))
    offer = held(blobs, weights, combined.record)
    table = weights_pb2.SourceTable.FromString(blobs.get(offer.table))
    table.host.CopyFrom(far)
    for region in table.regions:
        region.offers[0].transport = "relay_memory"
    offer = HeldOffer(offer.source, blobs.put(canonical(table)), offer.record)
    identity = weights_pb2.Identity(lineage="run", version=1, root=combined.root)
    joined = compiler.join(JoinSources(identity, (offer,), combined.record, SECONDS))
    assert joined.published is not None
    compiled = compiler.compile(CompilePlans(joined.published, asking, SECONDS, joined.record, combined.root))
    assert set(compiled.plans) == {("far", 0), ("far", 1)}
    assert set(compiled.distances.values()) == {Distance.HOST_MEMORY}
    assert set(compiled.atoms) == (set() if known else {"keeper one"})
    finer = digests(blobs, (offer.table,), compiled, weights) if compiled.atoms else {}
    last = compiler.combine(CombineSeals(joined.published, compiled, finer, SECONDS))
    assert last.root == combined.root
    first = manifest.tensors[0]
    (wanted,) = digest_boxes([(weights[first.name][:1], [0] * len(first.shape))])
    assert weights_pb2.Digests.FromString(blobs.get(last.expected["far", 0])).values[0] == wanted


@pytest.mark.parametrize(
    ("transport", "read", "distance"),
    [("file", "keeper one", Distance.HOST_MEMORY), ("cuda_ipc", "rank 0", Distance.SAME_GPU)],
)
def test_of_ranks_and_holders_that_hold_a_version_the_nearest_is_read(
    transport: str, read: str, distance: Distance
) -> None:
    blobs, weights = BlobStore(), some_weights()
    compiler = Compiler(blobs)
    published, combined = sealed(compiler, blobs, weights)
    identity = weights_pb2.Identity(lineage="run", version=1, root=combined.root)
    host = weights_pb2.Host()
    host.CopyFrom(HOST)
    host.relay_directory, host.network_namespace = "shared", "net"
    host.gpus.add(uuid=b"u" * 16)
    offers = []
    for offer, lent in (
        (held(blobs, weights, combined.record), "relay_memory"),
        (HeldOffer("rank 0", tables(blobs, weights, 1)[0], None, 0), transport),
    ):
        table = weights_pb2.SourceTable.FromString(blobs.get(offer.table))
        table.host.CopyFrom(host)
        for region in table.regions:
            region.offers[0].transport = lent
        offers.append(replace(offer, table=blobs.put(canonical(table))))
    joined = compiler.join(JoinSources(identity, tuple(offers), None, SECONDS))
    assert not joined.refused
    assert joined.published is not None
    assert [(each.source, each.rank) for each in joined.published.sources] == [("keeper one", None), ("rank 0", 0)]
    (asking,) = workers(blobs, published, 1)
    asking = replace(asking, host=host, transports=("file", "cuda_ipc", "relay_memory"))
    compiled = compiler.compile(CompilePlans(joined.published, (asking,), SECONDS, joined.record, combined.root))
    plan = weights_pb2.WorkerPlan.FromString(blobs.get(compiled.plans[asking.key]))
    assert [each.source for each in plan.sources] == [read]
    assert compiled.distances[asking.key] == distance
    other = replace(offers[1], rank=1)
    problem = Compiler(blobs).join(JoinSources(identity, (offers[0], other), None, SECONDS)).refused["rank 0"]
    assert "of rank 1" in problem.message


def test_a_holder_is_left_out_by_name_unless_its_record_hashes_to_the_root_and_its_table_fits() -> None:
    blobs, weights = BlobStore(), some_weights()
    compiler = Compiler(blobs)
    _, combined = sealed(compiler, blobs, weights)
    _, other = sealed(compiler, blobs, {name: tensor + 1 for name, tensor in weights.items()})
    identity = weights_pb2.Identity(lineage="run", version=1, root=combined.root)

    def refused(offer: HeldOffer) -> weights_pb2.Problem:
        joined = compiler.join(JoinSources(identity, (offer,), combined.record, SECONDS))
        assert joined.published is None
        return joined.refused[offer.source]

    problem = refused(held(blobs, weights, other.record))
    assert (problem.code, "hashes to" in problem.message) == (weights_pb2.Problem.CODE_DATA_LOSS, True)
    assert "what keeper one holds is left out" in problem.message
    wider = held(blobs, some_weights(sizes=(8, 6)), None)
    assert "the sealed weights have" in refused(wider).message
    assert "must be 'keeper two'" in refused(HeldOffer("keeper two", wider.table, None)).message
    assert compiler.join(JoinSources(identity, (held(blobs, weights, None),), None, SECONDS)).record is None


def test_records_are_dropped_with_their_version_unless_somebody_holds_them() -> None:
    blobs, weights = BlobStore(), some_weights()
    compiler = Compiler(blobs)
    records: list[manager_pb2.BlobRef] = []
    for step in range(20):
        _, combined = sealed(compiler, blobs, {name: tensor + step for name, tensor in weights.items()})
        assert combined.record is not None
        records.append(combined.record)
        blobs.pin("lineage 'run'", [combined.record])
        if step == 3:
            blobs.pin("keeper one", [combined.record])
    assert [step for step, record in enumerate(records) if blobs.has(record)] == [3, 19]
    blobs.unpin("keeper one")
    assert not blobs.has(records[3])
